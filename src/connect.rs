//! From a URL to a locker.

use std::sync::Arc;

use lockkit_core::{FenceAbove, LockStore, Locker, OwnThread, Result};

use crate::{
    migrating::migrating,
    target::{Target, fence_above, open_one, target, urls},
};

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
    if let Ok(Target::Migrate) = target(url) {
        let (from, to) = urls(url)?;
        return migrating(from, to).await;
    }
    let (url, floor) = fence_above(url)?;
    let store = open_one(&url).await?;
    Ok(match floor {
        None => store,
        Some(floor) => Arc::new(FenceAbove::new(floor, store)),
    })
}
