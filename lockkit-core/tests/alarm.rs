//! What a store says unasked is looked into at once.

use std::{pin::pin, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{Alarm, LockStore, Locker, LossReason, MemoryStore, Outcome, Prefix, Renewal, Renewed, Result};
use lockkit_testkit::{Alter, Altered, WithInfo, faults::poll_until};
use tokio::{sync::Semaphore, time::timeout};

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

/// Keeps back the answers to renewals.
#[derive(Clone, Debug)]
struct Slow {
    inner: Altered<WithInfo<MemoryStore>>,
    asked: Arc<Semaphore>,
    may_answer: Arc<Semaphore>,
}

#[async_trait]
impl Alter for Slow {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.asked.add_permits(1);
        self.may_answer.acquire().await.expect("open").forget();
        self.inner.renew(renewals).await
    }
}

/// The store was asked about the lease of one task, and answers when the next task of the process has it.
#[tokio::test]
async fn an_answer_reaches_the_task_that_has_the_lease_by_then() -> Result<()> {
    let (inner, alarm) = loud();
    let (asked, may_answer) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let locker = Locker::new(Altered(Slow { inner, asked: Arc::clone(&asked), may_answer: Arc::clone(&may_answer) }));
    let lock = locker.lock("x").ttl(TTL);
    let first = lock.acquire().await?;
    let (mut second, mut third) = (pin!(lock.acquire()), pin!(lock.acquire()));
    assert!(poll_until(second.as_mut(), 1, || {}).await.is_none());
    assert!(poll_until(third.as_mut(), 1, || {}).await.is_none());
    assert_eq!(first.release().await?, Outcome::Released);
    let second = second.await?;
    alarm.raise_all();
    timeout(SOON, asked.acquire()).await.expect("it asks").expect("open").forget();
    let token = lock.inspect().await?.holders[0].token.expect("a token");
    locker.break_lock("x", token).await?;
    assert_eq!(second.release().await?, Outcome::Released);
    let third = third.await?;
    may_answer.add_permits(1);
    assert_eq!(timeout(SOON, third.lost()).await, Ok(LossReason::Gone));
    Ok(())
}
