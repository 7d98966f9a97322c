//! The other process of the hand-off: it waits for the lock and says at what moment it got it.

use lockkit::{Clock, SystemClock};

use super::{Answer, Orders};
use crate::{error::Result, exclusive::Exclusive, plan::Plan};

/// Takes the lock once for each order, until the one to end.
pub(super) async fn run(key: &str, in_order: bool, store: Option<&str>, orders: Orders) -> Result<Answer> {
    let locker = super::connect(store).await?;
    super::warm_up(&locker, key).await?;
    let lock = locker.lock(key).ttl(Plan::TTL);
    take_each_time(&if in_order { lock.fifo() } else { lock }, orders).await
}

/// The same with this lock, whoever it is from.
pub(super) async fn take_each_time<X: Exclusive>(lock: &X, mut orders: Orders) -> Result<Answer> {
    super::say(&Answer::Ready)?;
    while orders.next().await? {
        let held = lock.take().await?;
        let got = SystemClock.now();
        X::give_back(held).await?;
        super::say(&Answer::Took { at: got.as_nanos() })?;
    }
    Ok(Answer::Finished)
}
