//! A store that keeps places in a queue, and what becomes of them.

mod paused;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Effect, Error, ErrorKind, LockStore, Locker, LossReason, MemoryStore,
    Moment, Outcome, Release, Result, Token, Waiting,
};
use lockkit_testkit::{Alter, Altered, Slow, WithInfo, faults::poll_until};

/// The memory store with a queue in which nobody ever gets up; out of reach once somebody stands in it.
#[derive(Debug)]
struct Queueing {
    inner: Altered<WithInfo<MemoryStore>>,
    is_joined: AtomicBool,
    left: Arc<Mutex<Vec<Token>>>,
}

#[async_trait]
impl Alter for Queueing {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, _: &AcquireRequest) -> Result<Attempt> {
        if self.is_joined.swap(true, Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "connection refused"));
        }
        Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), ..Contention::default() }))
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        // Long enough to be still under way when a locker is shut down.
        tokio::time::sleep(Duration::from_millis(50)).await;
        self.left.lock().expect("unpoisoned").push(claim.token);
        self.inner.release(claim).await
    }
}

/// The last request did nothing; the place that an earlier one took is still there.
#[tokio::test]
async fn who_gives_up_leaves_the_queue() -> Result<()> {
    let inner = Altered::with_info(MemoryStore::new(), |info| info.capability.waiting = Waiting::Queue);
    let left = Arc::new(Mutex::default());
    let store = Queueing { inner, is_joined: AtomicBool::new(false), left: Arc::clone(&left) };
    let locker = Locker::builder(Altered(store)).patience(Duration::from_millis(50)).build();
    let error = locker.lock("x").acquire().await.expect_err("out of reach");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.effect(), Effect::Unknown, "the place may have got the lock");
    locker.shutdown(Duration::from_secs(5)).await?;
    assert_eq!(left.lock().expect("unpoisoned").len(), 1, "a place was left behind in the queue");
    Ok(())
}

/// Nor is a place in the way of the process that gave it up, however soon it asks again.
#[tokio::test]
async fn who_was_told_to_wait_in_vain_has_no_place_any_more() -> Result<()> {
    let memory = MemoryStore::new();
    let (other, locker) = (Locker::new(memory.clone()), Locker::new(memory));
    let held = other.lock("x").fifo().acquire().await?;
    assert!(locker.lock("x").fifo().acquire_within(Duration::from_millis(20)).await?.is_none());
    assert_eq!(held.release().await?, Outcome::Released);
    assert!(locker.lock("x").fifo().try_acquire().await?.is_some(), "its own former place is before it");
    Ok(())
}

/// Also while it gives the place up.
#[tokio::test]
async fn one_that_is_dropped_while_its_time_is_up_leaves_the_queue() -> Result<()> {
    for polls in 1..100 {
        let memory = MemoryStore::new();
        let (other, slow) = (Locker::new(memory.clone()), Locker::new(Altered(Slow(memory.clone()))));
        let (lock, held) = (slow.lock("x").fifo(), other.lock("x").fifo().acquire().await?);
        let told = {
            let mut asking = std::pin::pin!(lock.acquire_within(Duration::from_millis(1)));
            poll_until(asking.as_mut(), polls, || ()).await
        };
        assert_eq!(held.release().await?, Outcome::Released);
        let next = other.lock("x").fifo().acquire_within(Duration::from_secs(5)).await?;
        assert!(next.is_some(), "the place stays, dropped at poll {polls}");
        if let Some(told) = told {
            assert!(told?.is_none() && polls > 4, "it was never in the middle");
            return Ok(());
        }
    }
    panic!("it does not end");
}

/// It grants the lock to the place of a request, and never answers the one behind it: both can be of one call.
#[derive(Debug)]
struct Granting {
    inner: MemoryStore,
    is_joined: AtomicBool,
    releases: Arc<AtomicU32>,
}

#[async_trait]
impl Alter for Granting {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, _: &AcquireRequest) -> Result<Attempt> {
        if self.is_joined.swap(true, Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), ..Contention::default() }))
    }

    async fn release(&self, _: &Claim) -> Result<Release> {
        let is_first = self.releases.fetch_add(1, Ordering::SeqCst) == 0;
        Ok(if is_first { Release::Released { waiters: None } } else { Release::NotHeld(LossReason::Gone) })
    }
}

/// Of a request that is on its way, by a connection that was replaced, the release of what the place was granted says nothing.
#[tokio::test(start_paused = true)]
async fn a_request_behind_the_grant_of_a_place_is_released_once_more() {
    for (is_joined, is_replaced) in [(false, false), (false, true), (true, false), (true, true)] {
        let (inner, releases) = (paused::paused_store(), Arc::new(AtomicU32::new(0)));
        let reconnections = inner.info().reconnections.clone();
        let is_joined = AtomicBool::new(is_joined);
        let store = Granting { inner, is_joined, releases: Arc::clone(&releases) };
        let lock = Locker::new(Altered(store)).lock("x").fifo();
        let asking = tokio::spawn(async move { lock.acquire().await });
        tokio::time::sleep(Duration::from_millis(100)).await;
        if is_replaced {
            reconnections.add_one();
        }
        asking.abort();
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(releases.load(Ordering::SeqCst) > 1, is_replaced, "{releases:?} releases");
    }
}

/// In which nothing can be released for a while.
#[derive(Debug)]
struct Unreleasing {
    inner: MemoryStore,
    until: Moment,
}

#[async_trait]
impl Alter for Unreleasing {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if self.inner.info().clock.now() < self.until {
            return Err(Error::new(ErrorKind::Unavailable, "connection refused").unknown_effect());
        }
        self.inner.release(claim).await
    }
}

/// A place lasts longer than the lease that was asked for, and so do the tries to give it up.
#[tokio::test(start_paused = true)]
async fn a_place_is_given_up_however_short_the_ttl() -> Result<()> {
    let memory = paused::paused_store();
    let (other, until) = (Locker::new(memory.clone()), memory.info().clock.now() + Duration::from_secs(2));
    let locker = Locker::new(Altered(Unreleasing { inner: memory, until }));
    let held = other.lock("x").fifo().acquire().await?;
    let (lock, short) = (locker.lock("x").fifo().ttl(Duration::from_secs(1)), Duration::from_millis(10));
    assert!(lock.acquire_within(short).await?.is_none());
    let begun = tokio::time::Instant::now();
    assert!(tokio::time::timeout(short, lock.acquire()).await.is_err());
    while other.lock("x").inspect().await?.waiters != Some(0) {
        tokio::time::sleep(short).await;
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "its place lasted for {:?}", begun.elapsed());
    assert_eq!(held.release().await?, Outcome::Released);
    Ok(())
}
