//! The machine sleeps for an hour at a bad moment: what came too late is no acquisition.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Clock, Error, ErrorKind, LockStore, Locker, MemoryStore, Outcome, Renewal, Renewed, Result, ShiftedClock,
};
use lockkit_testkit::{Alter, Altered};

const HOUR: Duration = Duration::from_secs(3600);

/// The memory store; the machine sleeps between a renewal and its answer.
#[derive(Debug)]
struct Sleepy {
    inner: MemoryStore,
    clock: Arc<ShiftedClock>,
    sleeps: Arc<AtomicBool>,
}

#[async_trait]
impl Alter for Sleepy {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let answers = self.inner.renew(renewals).await;
        if self.sleeps.load(Ordering::SeqCst) {
            self.clock.advance(HOUR);
        }
        answers
    }
}

/// The memory store, whose renewals fail for a while.
#[derive(Debug)]
struct Unreachable {
    inner: MemoryStore,
    fails: Arc<AtomicBool>,
}

#[async_trait]
impl Alter for Unreachable {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        if self.fails.load(Ordering::SeqCst) {
            return renewals.iter().map(|_| Err(Error::new(ErrorKind::Unavailable, "it is away"))).collect();
        }
        self.inner.renew(renewals).await
    }
}

#[tokio::test]
async fn a_nested_hold_is_none_when_the_answer_comes_too_late() -> Result<()> {
    let (clock, sleeps) = (Arc::new(ShiftedClock::default()), Arc::new(AtomicBool::new(false)));
    let inner = MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>);
    let owner = Locker::new(Altered(Sleepy { inner, clock, sleeps: Arc::clone(&sleeps) })).owner();
    let outer = owner.lock("x").acquire().await?;
    sleeps.store(true, Ordering::SeqCst);
    let error = owner.lock("x").acquire().await.expect_err("the lease ran out long ago");
    assert_eq!(error.kind(), ErrorKind::Lost);
    sleeps.store(false, Ordering::SeqCst);
    drop(outer);
    assert!(owner.lock("x").acquire().await?.is_held());
    Ok(())
}

/// The machine sleeps and wakes shortly before the lease ends; its timers have stood still meanwhile.
#[tokio::test]
async fn work_is_stopped_before_the_lease_can_lapse_also_after_a_sleep() -> Result<()> {
    let (clock, fails) = (Arc::new(ShiftedClock::default()), Arc::new(AtomicBool::new(false)));
    let inner = MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>);
    let locker = Locker::new(Altered(Unreachable { inner, fails: Arc::clone(&fails) }));
    let ttl = Duration::from_secs(20);
    let guard = locker.lock("x").ttl(ttl).acquire().await?;
    fails.store(true, Ordering::SeqCst);
    let mut work = pin!(guard.run(std::future::pending::<()>()));
    let mut context = Context::from_waker(Waker::noop());
    assert!(work.as_mut().poll(&mut context).is_pending());
    let sleep = guard.remaining().saturating_sub(ttl / 20 + Duration::from_millis(200));
    clock.advance(sleep);
    let error = work.await.expect_err("the lease was about to lapse");
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(guard.remaining() > ttl / 80, "only {:?} were left", guard.remaining());
    Ok(())
}

#[tokio::test]
async fn a_lease_that_was_handed_over_long_ago_is_not_taken() -> Result<()> {
    let clock = Arc::new(ShiftedClock::default());
    let locker = Locker::new(MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
    let lock = locker.lock("x");
    let mut second = pin!(lock.acquire());
    let mut third = pin!(lock.acquire());
    let mut context = Context::from_waker(Waker::noop());
    let first = lock.acquire().await?;
    assert!(second.as_mut().poll(&mut context).is_pending());
    assert_eq!(first.release().await?, Outcome::Released);
    assert!(third.as_mut().poll(&mut context).is_pending());
    // The second one asks when somebody waits behind it, so that its lease can be handed on.
    let second = second.await?;
    assert_eq!(second.release().await?, Outcome::Released);
    clock.advance(HOUR);
    let third = tokio::time::timeout(Duration::from_secs(5), third).await.expect("free")?;
    assert!(third.is_held(), "{:?}", third.status());
    let Poll::Ready(outcome) = pin!(third.release()).poll(&mut context) else { panic!("memory answers at once") };
    assert_eq!(outcome?, Outcome::Released);
    Ok(())
}
