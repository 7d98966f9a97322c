//! From a URL to what can be told of the store behind it.

use lockkit_core::{Finding, Result};

use crate::target::{Target, fence_above, target, urls};

/// Looks at the store at `url`: whether it can keep locks, what puts them at risk, and what this user may not do. The
/// worst comes first. `docs/doctor.md` lists all findings.
///
/// Nothing is changed that stays: what has to be tried is tried under names that no lock can have.
///
/// # Errors
/// As [`connect`](crate::connect()) for the URL itself; `Unavailable`, `TimedOut` or `Denied` if the store can't be asked
/// at all. A store that is unfit for locks is no error, but a finding.
///
/// # Examples
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit::Result<()> {
/// for finding in lockkit::diagnose("memory:").await? {
///     println!("{}: {}", finding.severity, finding.in_words());
/// }
/// # Ok(()) }
/// ```
pub async fn diagnose(url: &str) -> Result<Vec<Finding>> {
    let (url, _) = fence_above(url)?;
    let url = &*url;
    match target(url)? {
        Target::Migrate => {
            let (from, to) = urls(url)?;
            let mut findings = Box::pin(diagnose(from)).await?;
            findings.extend(Box::pin(diagnose(to)).await?);
            findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
            Ok(findings)
        }
        Target::Memory => {
            let summary = "locks in the memory of this process: there is nothing to check";
            let advice = "no other process sees them, and they end with this one";
            Ok(vec![Finding::note("memory", summary, advice)])
        }
        #[cfg(feature = "redis")]
        Target::Redis => lockkit_redis::diagnose(&lockkit_redis::RedisConfig::from_url(url)?).await,
        #[cfg(feature = "redlock")]
        Target::Redlock => crate::redlock::diagnose(&crate::redlock::RedisNodes::from_url(url)?).await,
        #[cfg(feature = "mysql")]
        Target::MySql => lockkit_mysql::diagnose(&lockkit_mysql::MySqlConfig::from_url(url)?).await,
        #[cfg(feature = "zk")]
        Target::Zk => lockkit_zk::diagnose(&lockkit_zk::ZkConfig::from_url(url)?).await,
    }
}
