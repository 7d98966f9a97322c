//! The other process of the hand-off: it waits for the lock and says at what moment it got it.

use lockkit::{Clock, SystemClock};

use super::{Answer, Orders, TTL};
use crate::error::Result;

/// Takes the lock once for each order, until the one to end.
pub(super) async fn run(key: &str, store: Option<&str>, mut orders: Orders) -> Result<Answer> {
    let locker = super::connect(store).await?;
    super::warm_up(&locker, key).await?;
    let lock = locker.lock(key).ttl(TTL);
    super::say(&Answer::Ready)?;
    while orders.next().await? {
        let guard = lock.acquire().await?;
        let got = SystemClock.now();
        let _ = guard.release().await?;
        super::say(&Answer::Took { at: got.as_nanos() })?;
    }
    Ok(Answer::Finished)
}
