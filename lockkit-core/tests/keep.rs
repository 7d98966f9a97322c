//! Leases that take the place of others, on a store that fails: locks that are kept when their holder is done, and writers that become
//! readers. What holds on every store is in the compliance suite.

use std::{
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Effect, Error, ErrorKind, Fence, FenceAbove, Guard, HolderInfo,
    Liveness, Lock, LockStore, Locker, MemoryStore, Outcome, Release, Result, Token,
};
use lockkit_testkit::{Alter, Altered, faults::poll_until};
use tokio::time::sleep;

const YEAR: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// How long anything awaited may take. Not how long it does take.
const PATIENCE: Duration = Duration::from_secs(10);

/// A store that fails a few of those that ask for a lock in the place of another.
#[derive(Clone, Debug)]
struct Failing {
    inner: MemoryStore,
    failures: Arc<AtomicUsize>,
    failure: Failure,
}

#[derive(Clone, Copy, Debug)]
enum Failure {
    /// It neither does it nor answers.
    NotDone,
    /// It does it, and does not answer.
    Done,
    /// It says that the lease to be replaced has the lock no more, which is not so.
    Contended,
    /// It forbids it.
    Denied,
}

#[async_trait]
impl Alter for Failing {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let fails = |left: usize| left.checked_sub(1);
        let is_meant = request.from.is_some();
        if is_meant && self.failures.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fails).is_ok() {
            match self.failure {
                Failure::NotDone => {}
                Failure::Done => drop(self.inner.acquire(request).await?),
                Failure::Contended => {
                    return Ok(Attempt::Contended(Contention { retry_after: None, holder: None, burnt: false }));
                }
                Failure::Denied => return Err(Error::new(ErrorKind::Denied, "it is forbidden")),
            }
            tokio::task::yield_now().await;
            return Err(Error::new(ErrorKind::Unavailable, "no answer").unknown_effect());
        }
        self.inner.acquire(request).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        // Not at once, so that whoever asks can go away meanwhile.
        tokio::task::yield_now().await;
        self.inner.release(claim).await
    }
}

fn failing(failures: usize, failure: Failure) -> Locker {
    let failures = Arc::new(AtomicUsize::new(failures));
    Locker::new(Altered(Failing { inner: MemoryStore::new(), failures, failure }))
}

async fn take(lock: &Lock) -> Result<Guard> {
    Ok(lock.try_acquire().await?.expect("it is free"))
}

/// Waits until another lease than this one, and one that lasts, has the lock.
async fn kept_by_another(locker: &Locker, token: Token) -> Result<()> {
    let kept = async {
        loop {
            let holders = locker.lock("x").inspect().await?.holders;
            let [holder] = &holders[..] else { panic!("one has the lock: {holders:?}") };
            if holder.token != Some(token) {
                assert!(holder.remaining.is_some_and(|left| left > YEAR / 2), "{holder:?}");
                return Ok(());
            }
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, kept).await.expect("it is kept in time")
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_asked_again() -> Result<()> {
    for failure in [Failure::NotDone, Failure::Done] {
        let locker = failing(3, failure);
        let guard = take(&locker.lock("x").keep_for(YEAR)).await?;
        let token = guard.token();
        assert_eq!(guard.release().await.expect_err("no answer").kind(), ErrorKind::Unavailable);
        kept_by_another(&locker, token).await?;
        // What is asked again changes nothing any more.
        locker.shutdown(PATIENCE).await?;
        kept_by_another(&locker, token).await?;
    }
    Ok(())
}

#[tokio::test]
async fn a_release_that_is_dropped_keeps_the_lock() -> Result<()> {
    let locker = failing(1, Failure::NotDone);
    let guard = take(&locker.lock("x").keep_for(YEAR)).await?;
    let token = guard.token();
    {
        let mut release = pin!(guard.release());
        let polled = poll_until(release.as_mut(), 1, || {}).await;
        assert!(polled.is_none(), "it waits for the store");
    }
    kept_by_another(&locker, token).await
}

#[tokio::test]
async fn a_lock_that_is_lost_is_kept() -> Result<()> {
    let locker = failing(0, Failure::NotDone);
    let guard = take(&locker.lock("x").keep_for(YEAR).max_hold(Duration::from_millis(20))).await?;
    let token = guard.token();
    guard.lost().await;
    kept_by_another(&locker, token).await?;
    assert!(matches!(guard.release().await?, Outcome::NotHeld(_)));
    Ok(())
}

/// It is too late for either: what was to be kept is being kept.
#[tokio::test]
async fn the_window_of_a_lease_that_is_lost_can_not_be_changed() -> Result<()> {
    let locker = failing(0, Failure::NotDone);
    let guard = take(&locker.lock("x").max_hold(Duration::from_millis(20))).await?;
    guard.lost().await;
    for window in [YEAR, Duration::ZERO] {
        assert_eq!(guard.keep_for(window).expect_err("it is lost").kind(), ErrorKind::Lost, "{window:?}");
    }
    Ok(())
}

#[tokio::test]
async fn the_next_task_of_the_process_gets_no_lock_that_is_kept() -> Result<()> {
    let locker = failing(0, Failure::NotDone);
    let (lock, kept) = (locker.lock("x"), locker.lock("x").keep_for(YEAR));
    let first = take(&lock).await?;
    let (mut second, mut third) = (pin!(kept.acquire()), pin!(lock.acquire()));
    for next in [second.as_mut() as Pin<&mut dyn Future<Output = Result<Guard>>>, third.as_mut()] {
        assert!(poll_until(next, 1, || {}).await.is_none());
    }
    // For so long that the next grant has a fence for the one after it.
    sleep(Duration::from_millis(20)).await;
    assert_eq!(first.release().await?, Outcome::Released);
    let guard = second.await?;
    // As the store tells it: a lease whose token a holder has told is handed to nobody anyway.
    let token = lock.inspect().await?.holders[0].token.expect("a holder of lockkit's");
    assert_eq!(guard.release().await?, Outcome::Released);
    kept_by_another(&locker, token).await
}

#[tokio::test]
async fn a_nested_hold_asks_for_no_other_window() -> Result<()> {
    let owner = failing(0, Failure::NotDone).owner();
    let outer = take(&owner.lock("x").keep_for(YEAR)).await?;
    let other = owner.lock("x").keep_for(YEAR / 2).try_acquire().await.expect_err("it can't be changed");
    assert_eq!(other.kind(), ErrorKind::InvalidInput);
    // What is not asked for is taken as it is.
    let inner = take(&owner.lock("x")).await?;
    assert_eq!(inner.release().await?, Outcome::Released);
    assert_eq!(outer.release_early().await?, Outcome::Released);
    assert!(owner.lock("x").inspect().await?.holders.is_empty());
    Ok(())
}

#[tokio::test]
async fn what_can_not_be_kept_is_released() -> Result<()> {
    let session = Liveness { ttl: None, session: Some(Duration::from_secs(20)) };
    for (failure, liveness) in [
        (Failure::Contended, None),
        (Failure::Denied, None),
        (Failure::Contended, Some(session.clone())),
        (Failure::Denied, Some(session)),
    ] {
        let store = Failing { inner: MemoryStore::new(), failures: Arc::new(AtomicUsize::new(usize::MAX)), failure };
        let locker = Locker::new(Altered::with_info(Altered(store), |info| {
            if let Some(liveness) = liveness {
                info.capability.liveness = liveness;
            }
        }));
        let released = take(&locker.lock("x").keep_for(YEAR)).await?.release().await;
        // It was held to the end, so that the work done under it stands.
        let kind = if matches!(failure, Failure::Denied) { ErrorKind::Denied } else { ErrorKind::Unavailable };
        let error = released.expect_err("it is not kept");
        assert_eq!((error.kind(), error.effect()), (kind, Effect::Unknown), "it is released");
        assert!(locker.lock("x").inspect().await?.holders.is_empty(), "{failure:?}: nobody has the lock");
        locker.shutdown(PATIENCE).await?;
    }
    Ok(())
}

/// The keep was refused, and the release behind it is under way.
#[tokio::test]
async fn a_release_that_is_dropped_behind_a_refusal_goes_on() -> Result<()> {
    for failure in [Failure::Contended, Failure::Denied] {
        let locker = failing(usize::MAX, failure);
        let guard = take(&locker.lock("x").keep_for(YEAR)).await?;
        {
            let mut release = pin!(guard.release());
            let polled = poll_until(release.as_mut(), 1, || {}).await;
            assert!(polled.is_none(), "{failure:?}: it waits for the store");
        }
        locker.shutdown(PATIENCE).await?;
        assert!(locker.lock("x").inspect().await?.holders.is_empty(), "{failure:?}: nobody has the lock");
    }
    Ok(())
}

/// A description of the full length is cut for it.
#[tokio::test]
async fn what_keeps_a_lock_says_so() -> Result<()> {
    let locker =
        Locker::builder(MemoryStore::new()).holder(HolderInfo::new(&"ä".repeat(HolderInfo::MAX_BYTES))).build();
    let holder = async || Ok::<_, Error>(locker.lock("x").inspect().await?.holders.remove(0).info);
    let guard = take(&locker.lock("x").keep_for(YEAR)).await?;
    assert!(!holder().await?.is_done());
    assert_eq!(guard.release().await?, Outcome::Released);
    assert!(holder().await?.is_done(), "{}", holder().await?);
    Ok(())
}

/// A lock is kept for longer than any lease lasts that somebody has.
#[tokio::test]
async fn a_lock_with_fences_above_a_number_is_kept() -> Result<()> {
    let locker = Locker::new(FenceAbove::new(Fence::new(5), MemoryStore::new()));
    let guard = take(&locker.lock("x").keep_for(YEAR)).await?;
    let token = guard.token();
    assert_eq!(guard.release().await?, Outcome::Released);
    kept_by_another(&locker, token).await
}

/// Nothing of the writer's lease can come to be held any more.
#[tokio::test]
async fn a_downgrade_without_an_answer_keeps_no_shutdown_waiting() -> Result<()> {
    let locker = failing(1, Failure::Done);
    let writer = take(&locker.rw_lock("x").write()).await?;
    assert_eq!(writer.downgrade().await.expect_err("no answer").kind(), ErrorKind::Unavailable);
    locker.shutdown(PATIENCE).await?;
    assert!(locker.lock("x").inspect().await?.holders.is_empty(), "nobody has the lock");
    Ok(())
}
