//! From a URL to what the servers behind it have done.

use lockkit_core::{Result, Workload};

use crate::target::{Target, fence_above, target, urls};

/// What the servers of the store at `url` have done since they started and what memory they use, as far as they tell: to be looked at
/// twice, for what happens in between. It is about all clients of the servers, and about what looking takes, too.
///
/// The store in memory has no server, and tells nothing; a quorum and a migration are all their servers together.
///
/// # Errors
/// As [`connect`](crate::connect()) for the URL itself; `Unavailable`, `TimedOut` or `Denied` if a server can't be asked at all.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit::Result<()> {
/// let before = lockkit::workload("memory:").await?;
/// let after = lockkit::workload("memory:").await?;
/// match (before.requests, after.requests) {
///     (Some(before), Some(after)) => println!("{} requests", after - before),
///     _ => println!("the store does not tell"),
/// }
/// # Ok(()) }
/// ```
pub async fn workload(url: &str) -> Result<Workload> {
    let (url, _) = fence_above(url)?;
    let url = &*url;
    match target(url)? {
        Target::Migrate => {
            let (from, to) = urls(url)?;
            Ok(Box::pin(workload(from)).await? + Box::pin(workload(to)).await?)
        }
        Target::Memory => Ok(Workload::default()),
        #[cfg(feature = "redis")]
        Target::Redis => lockkit_redis::workload(&lockkit_redis::RedisConfig::from_url(url)?).await,
        #[cfg(feature = "redlock")]
        Target::Redlock => crate::redlock::workload(&crate::redlock::RedisNodes::from_url(url)?).await,
        #[cfg(feature = "mysql")]
        Target::MySql => lockkit_mysql::workload(&lockkit_mysql::MySqlConfig::from_url(url)?).await,
        #[cfg(feature = "zk")]
        Target::Zk => lockkit_zk::workload(&lockkit_zk::ZkConfig::from_url(url)?).await,
    }
}
