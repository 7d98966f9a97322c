//! What a store says unasked is looked into at once.

use std::time::Duration;

use lockkit_core::{Alarm, Locker, LossReason, MemoryStore, Prefix, Result};
use lockkit_testkit::{Altered, WithInfo};
use tokio::time::timeout;

/// The first renewal comes no sooner than 9 s after the grant.
const TTL: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_secs(5);

/// The memory store with a voice.
fn loud() -> (Altered<WithInfo<MemoryStore>>, Alarm) {
    let alarm = Alarm::new();
    (Altered::with_info(MemoryStore::new(), |info| info.alarm = Some(alarm.clone())), alarm)
}

#[tokio::test]
async fn a_lease_that_is_gone_is_lost_at_once() -> Result<()> {
    let (store, alarm) = loud();
    let locker = Locker::new(Prefix::new("tenant/", store)?);
    let (broken, whole) = (locker.lock("a").ttl(TTL).acquire().await?, locker.lock("b").ttl(TTL).acquire().await?);
    locker.break_lock("a", broken.token()).await?;
    alarm.raise(broken.token());
    alarm.raise(whole.token());
    assert_eq!(timeout(SOON, broken.lost()).await, Ok(LossReason::Gone));
    assert!(whole.is_held(), "an alarm decides nothing");
    locker.break_lock("b", whole.token()).await?;
    alarm.raise_all();
    assert_eq!(timeout(SOON, whole.lost()).await, Ok(LossReason::Gone));
    Ok(())
}

#[tokio::test]
async fn a_lease_that_is_not_renewed_is_asked_about_but_not_extended() -> Result<()> {
    let (store, alarm) = loud();
    let locker = Locker::new(store);
    let short = locker.lock("a").ttl(Duration::from_secs(1)).no_renewal().acquire().await?;
    alarm.raise_all();
    assert_eq!(timeout(SOON, short.lost()).await, Ok(LossReason::Expired));
    let broken = locker.lock("b").ttl(TTL).no_renewal().acquire().await?;
    locker.break_lock("b", broken.token()).await?;
    alarm.raise(broken.token());
    assert_eq!(timeout(SOON, broken.lost()).await, Ok(LossReason::Gone));
    Ok(())
}

/// The task that listens ends with its runtime; the next one listens again.
#[test]
fn alarms_outlive_a_runtime() -> Result<()> {
    let (store, alarm) = loud();
    let locker = Locker::new(store);
    for name in ["a", "b"] {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let guard = locker.lock(name).ttl(TTL).acquire().await?;
            locker.break_lock(name, guard.token()).await?;
            alarm.raise(guard.token());
            assert_eq!(timeout(SOON, guard.lost()).await, Ok(LossReason::Gone));
            Ok(())
        })?;
    }
    Ok(())
}
