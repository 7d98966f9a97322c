//! From a URL to a store, by an explicit match on the scheme: no registry, nothing global.

use std::{borrow::Cow, sync::Arc};

use lockkit_core::{Error, ErrorKind, Fence, FenceAbove, LockStore, Locker, MemoryStore, OwnThread, Result};

use crate::migrating::{self, migrating};

/// The schemes of all stores, and the feature that each needs.
const SCHEMES: [(&str, Option<&str>); 13] = [
    ("memory", None),
    ("redis", Some("redis")),
    ("rediss", Some("redis")),
    ("valkey", Some("redis")),
    ("valkeys", Some("redis")),
    ("redis+sentinel", Some("redis")),
    ("redis+cluster", Some("redis")),
    ("redlock", Some("redlock")),
    ("redlocks", Some("redlock")),
    ("mysql", Some("mysql")),
    ("mariadb", Some("mysql")),
    ("zk", Some("zk")),
    ("zks", Some("zk")),
];

/// The schemes that the Redis store reads, each also with `+sentinel` or `+cluster`.
#[cfg(feature = "redis")]
const REDIS: [&str; 4] = ["redis", "rediss", "valkey", "valkeys"];

/// Connects to the store at `url` and makes a [`Locker`] of it. Schemes may be written in capitals.
///
/// What connecting shows to put locks at risk is in [`Locker::warnings`]: log it.
///
/// Every URL but that of a migration takes the option `fence_above=NUMBER`: all fences lie above it, as with
/// [`FenceAbove`](crate::FenceAbove).
///
/// | URL | feature | store |
/// |---|---|---|
/// | `memory:` | | a new, empty store in this process |
/// | `redis://[user:password@]host[:port][/db]` | `redis` | one Redis or Valkey server |
/// | `redis+sentinel://[user:password@]host[:port],…/primary[/db]` | `redis` | the primary that sentinels name |
/// | `redis+cluster://[user:password@]host[:port],…` | `redis` | a Redis or Valkey cluster |
/// | `rediss://…`, `rediss+sentinel://…`, `rediss+cluster://…` | `redis`, `tls` | the same over TLS |
/// | `redlock://[user:password@]host[:port],host[:port],…[/db]` | `redlock` | a majority of several such servers |
/// | `mysql://user:password@host[:port]/db` | `mysql` | a table of a MySQL or MariaDB server |
/// | `zk://host[:port],…[/chroot]` | `zk` | a ZooKeeper ensemble |
/// | `zks://…?ca=file` | `zk`, `tls` | the same over TLS |
/// | `migrate:?from=URL&to=URL` | | both of these, while a service [moves](crate::migrating) from one to the other |
///
/// # Errors
/// `InvalidInput` for a URL that is no URL, has an unknown scheme or option; `Misconfigured` for what is missing where it
/// leads, such as a table; `Unsupported` for a store whose feature is off, naming the feature; what the store says if it
/// can't be reached. Nothing of the URL is repeated that could be a password.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit::Result<()> {
/// let locker = lockkit::connect("memory:").await?;
/// let guard = locker.lock("invoice/42").acquire().await?;
/// guard.release().await?;
/// # Ok(()) }
/// ```
pub async fn connect(url: &str) -> Result<Locker> {
    Ok(Locker::shared_builder(open(url).await?).build())
}

/// Connects to the store at `url` on a thread of its own, and makes a [`Locker`] of it that renews its leases there: also
/// while the application blocks its runtimes, or does not drive them.
///
/// # Errors
/// As [`connect`]; `Unavailable` also when no thread could be started.
///
/// # Cancellation
/// The connection is dropped once it is there.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit::Result<()> {
/// use std::time::Duration;
///
/// let locker = lockkit::connect_on_own_thread("memory:").await?;
/// let guard = locker.lock("invoice/42").ttl(Duration::from_millis(200)).acquire().await?;
/// std::thread::sleep(Duration::from_millis(500)); // what an application should not do, but does
/// assert!(guard.is_held());
/// # Ok(()) }
/// ```
pub async fn connect_on_own_thread(url: &str) -> Result<Locker> {
    let (thread, url) = (OwnThread::start()?, url.to_owned());
    let store = thread.run(async move { open(&url).await }).await?;
    Ok(Locker::shared_builder(store).own_thread(thread).build())
}

/// Connects to the store at `url`, for use with [`Locker::shared_builder`] or a wrapper.
///
/// # Errors
/// As [`connect`].
pub async fn open(url: &str) -> Result<Arc<dyn LockStore>> {
    match target(url)? {
        Target::Migrate => {
            let (from, to) = migrating::urls(url)?;
            migrating(from, to).await
        }
        _ => match fence_above(url)? {
            (url, None) => open_one(&url).await,
            (url, Some(floor)) => Ok(Arc::new(FenceAbove::new(floor, open_one(&url).await?))),
        },
    }
}

/// The option of every URL, which no store reads: `fence_above`; and the URL without it.
pub(crate) fn fence_above(url: &str) -> Result<(Cow<'_, str>, Option<Fence>)> {
    const OPTION: &str = "fence_above=";
    let Some((address, options)) = url.split_once('?').filter(|(_, options)| options.contains(OPTION)) else {
        return Ok((url.into(), None));
    };
    let (ours, others): (Vec<_>, Vec<_>) = options.split('&').partition(|option| option.starts_with(OPTION));
    let floor = match ours[..] {
        [] => return Ok((url.into(), None)),
        [one] => one[OPTION.len()..].parse().ok(),
        _ => None,
    };
    let floor = floor
        .ok_or_else(|| invalid("fence_above takes one number, such as fence_above=1795411846980269".to_owned()))?;
    let url = if others.is_empty() { address.to_owned() } else { format!("{address}?{}", others.join("&")) };
    Ok((url.into(), Some(Fence::new(floor))))
}

/// The same for a store that is not made of two others.
pub(crate) async fn open_one(url: &str) -> Result<Arc<dyn LockStore>> {
    match target(url)? {
        Target::Migrate => Err(invalid("a migration leads from one store to another, not to a migration".to_owned())),
        Target::Memory => Ok(Arc::new(MemoryStore::new())),
        #[cfg(feature = "redis")]
        Target::Redis => Ok(Arc::new(lockkit_redis::RedisStore::from_url(url).await?)),
        #[cfg(feature = "redlock")]
        Target::Redlock => Ok(Arc::new(crate::redlock::RedisNodes::from_url(url)?.connect().await?)),
        #[cfg(feature = "mysql")]
        Target::MySql => Ok(Arc::new(lockkit_mysql::MySqlStore::from_url(url).await?)),
        #[cfg(feature = "zk")]
        Target::Zk => Ok(Arc::new(lockkit_zk::ZkStore::from_url(url).await?)),
    }
}

/// The kind of store that a URL names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Memory,
    Migrate,
    #[cfg(feature = "redis")]
    Redis,
    #[cfg(feature = "redlock")]
    Redlock,
    #[cfg(feature = "mysql")]
    MySql,
    #[cfg(feature = "zk")]
    Zk,
}

/// Tells by the scheme what store a URL names. What can't be understood is not repeated: it may be a password.
pub(crate) fn target(url: &str) -> Result<Target> {
    let Some((scheme, rest)) = url.split_once(':') else {
        return Err(invalid(format!("not a store URL; it should look like {}", examples())));
    };
    match scheme.to_ascii_lowercase().as_str() {
        "memory" if rest.is_empty() => Ok(Target::Memory),
        "migrate" => Ok(Target::Migrate),
        "memory" => Err(invalid("the memory store takes no address; write memory:".to_owned())),
        #[cfg(feature = "redis")]
        scheme if REDIS.contains(&family(scheme)) => Ok(Target::Redis),
        #[cfg(feature = "redlock")]
        "redlock" | "redlocks" => Ok(Target::Redlock),
        #[cfg(feature = "mysql")]
        "mysql" | "mariadb" => Ok(Target::MySql),
        #[cfg(feature = "zk")]
        "zk" | "zks" => Ok(Target::Zk),
        other => Err(unknown(other)),
    }
}

/// What comes before `+sentinel` or `+cluster`.
fn family(scheme: &str) -> &str {
    scheme.split_once('+').map_or(scheme, |(family, _)| family)
}

fn unknown(scheme: &str) -> Error {
    match SCHEMES.iter().find(|(known, _)| *known == scheme || *known == family(scheme)) {
        Some((known, Some(feature))) => {
            let message = format!("this build has no {known} store; turn on the cargo feature `{feature}` of lockkit");
            Error::new(ErrorKind::Unsupported, message)
        }
        _ => invalid(format!("a store URL begins with one of {}", examples())),
    }
}

fn examples() -> String {
    SCHEMES
        .map(|(scheme, feature)| if feature.is_some() { format!("{scheme}://host") } else { format!("{scheme}:") })
        .join(", ")
        + ", "
        + migrating::EXAMPLE
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}
