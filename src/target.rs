//! What store a URL names, by an explicit match on the scheme: no registry, nothing global.

use std::{borrow::Cow, sync::Arc};

use lockkit_core::{Error, ErrorKind, Fence, LockStore, MemoryStore, Result};

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

/// What the URL of a migration looks like.
const EXAMPLE: &str = "migrate:?from=URL&to=URL";

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
    let floor =
        floor.ok_or_else(|| Error::invalid("fence_above takes one number, such as fence_above=1795411846980269"))?;
    let url = if others.is_empty() { address.to_owned() } else { format!("{address}?{}", others.join("&")) };
    Ok((url.into(), Some(Fence::new(floor))))
}

/// The same for a store that is not made of two others.
pub(crate) async fn open_one(url: &str) -> Result<Arc<dyn LockStore>> {
    match target(url)? {
        Target::Migrate => Err(Error::invalid("a migration leads from one store to another, not to a migration")),
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

/// The two URLs in that of a migration.
pub(crate) fn urls(url: &str) -> Result<(&str, &str)> {
    let options = url.split_once(':').and_then(|(_, rest)| rest.strip_prefix("?from="));
    let both = options.and_then(|options| options.split_once("&to="));
    both.filter(|(from, to)| !from.is_empty() && !to.is_empty())
        .ok_or_else(|| Error::invalid(format!("the URL of a migration looks like {EXAMPLE}")))
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
        return Err(Error::invalid(format!("not a store URL; it should look like {}", examples())));
    };
    match scheme.to_ascii_lowercase().as_str() {
        "memory" if rest.is_empty() => Ok(Target::Memory),
        "migrate" => Ok(Target::Migrate),
        "memory" => Err(Error::invalid("the memory store takes no address; write memory:")),
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
        _ => Error::invalid(format!("a store URL begins with one of {}", examples())),
    }
}

fn examples() -> String {
    SCHEMES
        .map(|(scheme, feature)| if feature.is_some() { format!("{scheme}://host") } else { format!("{scheme}:") })
        .join(", ")
        + ", "
        + EXAMPLE
}
