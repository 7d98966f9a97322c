//! What a shutdown ends, and what it waits for.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, Effect, Error, ErrorKind, LockStore, Locker, MemoryStore, Moment, Outcome,
    Release, Result,
};
use lockkit_testkit::{Alter, Altered, faults::poll_until};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(5);

/// The memory store, which takes its time over a release.
#[derive(Debug)]
struct Slow {
    inner: MemoryStore,
    released: Arc<AtomicUsize>,
}

#[async_trait]
impl Alter for Slow {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let answer = self.inner.release(claim).await;
        self.released.fetch_add(1, Ordering::SeqCst);
        answer
    }
}

/// Those who wait at the store, not only those behind them.
#[tokio::test]
async fn who_waits_at_the_store_is_told() -> Result<()> {
    let (store, released) = (MemoryStore::new(), Arc::new(AtomicUsize::new(0)));
    let other = Locker::new(store.clone());
    let guard = other.lock("x").acquire().await?;
    let locker = Locker::new(Altered(Slow { inner: store, released: Arc::clone(&released) }));
    let lock = locker.lock("x");
    let waiting = tokio::spawn(async move { lock.acquire().await.map(drop) });
    while other.lock("x").inspect().await?.waiters != Some(1) {
        tokio::task::yield_now().await;
    }
    locker.shutdown(SOON).await?;
    assert_eq!(released.load(Ordering::SeqCst), 1, "what it had asked for is undone by now");
    let error = timeout(SOON, waiting).await.expect("it waits on").expect("no panic").expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

/// A clock that goes on by hand.
#[derive(Debug, Default)]
struct ByHand(AtomicU64);

impl Clock for ByHand {
    fn now(&self) -> Moment {
        Moment::from_nanos(1_000_000_000 + self.0.load(Ordering::SeqCst))
    }
}

/// The memory store, which counts what it is asked for.
#[derive(Debug)]
struct Counting {
    inner: MemoryStore,
    asked: Arc<AtomicUsize>,
}

#[async_trait]
impl Alter for Counting {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.inner.acquire(request).await
    }
}

/// An acquisition that found the locker open, and has sent nothing yet when it is shut down, sends nothing any more.
#[tokio::test]
async fn nothing_is_sent_after_a_shutdown() -> Result<()> {
    let (clock, asked) = (Arc::new(ByHand::default()), Arc::new(AtomicUsize::new(0)));
    let store = MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>);
    let other = Locker::new(store.clone());
    let locker = Locker::new(Altered(Counting { inner: store, asked: Arc::clone(&asked) }));
    let guard = locker.lock("x").acquire().await?;
    let waiting = tokio::spawn(async move { other.lock("x").acquire().await });
    while locker.lock("x").inspect().await?.waiters != Some(1) {
        tokio::task::yield_now().await;
    }
    // This process has had the lock for a while and others wait: it lets them go first, before it asks again.
    clock.0.fetch_add(20_000_000, Ordering::SeqCst);
    assert_eq!(guard.release().await?, Outcome::Released);
    let lock = locker.lock("x");
    let mut acquiring = std::pin::pin!(lock.acquire());
    assert!(poll_until(acquiring.as_mut(), 1, || {}).await.is_none());
    let before = asked.load(Ordering::SeqCst);
    assert_eq!(before, 1, "it keeps back");
    locker.shutdown(SOON).await?;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let error = timeout(SOON, acquiring).await.expect("it waits on").expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert_eq!(asked.load(Ordering::SeqCst), before, "the store was asked after the shutdown");
    drop(waiting.await.expect("no panic")?);
    Ok(())
}

#[tokio::test]
async fn a_release_under_way_is_waited_for() -> Result<()> {
    let released = Arc::new(AtomicUsize::new(0));
    let locker = Locker::new(Altered(Slow { inner: MemoryStore::new(), released: Arc::clone(&released) }));
    let guard = locker.lock("x").acquire().await?;
    let releasing = tokio::spawn(guard.release());
    tokio::task::yield_now().await;
    locker.shutdown(SOON).await?;
    assert_eq!(released.load(Ordering::SeqCst), 1);
    assert_eq!(releasing.await.expect("no panic")?, Outcome::Released);
    Ok(())
}

/// The memory store, whose first release never ends by itself.
#[derive(Debug)]
struct FirstHangs {
    inner: MemoryStore,
    asked: Arc<AtomicUsize>,
}

#[async_trait]
impl Alter for FirstHangs {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if self.asked.fetch_add(1, Ordering::SeqCst) == 0 {
            std::future::pending::<()>().await;
        }
        self.inner.release(claim).await
    }
}

#[tokio::test]
async fn a_release_whose_runtime_ends_meanwhile_is_waited_for() -> Result<()> {
    let (inner, asked) = (MemoryStore::new(), Arc::new(AtomicUsize::new(0)));
    let home = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let store = FirstHangs { inner: inner.clone(), asked: Arc::clone(&asked) };
    let locker = home.spawn(async move {
        let locker = Locker::new(Altered(store));
        drop(locker.lock("x").acquire().await?);
        Ok::<_, lockkit_core::Error>(locker)
    });
    let locker = locker.await.expect("no panic")?;
    while asked.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let mut shutdown = std::pin::pin!(locker.shutdown(SOON));
    assert!(timeout(Duration::from_millis(20), shutdown.as_mut()).await.is_err(), "a release is under way");
    home.shutdown_background();
    shutdown.await?;
    assert!(Locker::new(inner).lock("x").try_acquire().await?.is_some(), "it was released");
    Ok(())
}

/// Every acquisition takes effect, and nobody hears so; or it is refused by a server that is not there any more.
#[derive(Debug)]
struct Lossy {
    inner: MemoryStore,
    /// Whether all but the first fail at once, without effect.
    fails: bool,
    asked: AtomicUsize,
}

#[async_trait]
impl Alter for Lossy {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let first = self.asked.fetch_add(1, Ordering::SeqCst) == 0;
        match (first, self.fails) {
            (true, true) => {
                let _ = self.inner.acquire(request).await?;
                Err(Error::new(ErrorKind::TimedOut, "no answer").unknown_effect())
            }
            (false, true) => Err(Error::new(ErrorKind::Unavailable, "the server is gone")),
            (_, false) => {
                let _ = self.inner.acquire(request).await?;
                pending().await
            }
        }
    }

    async fn release(&self, _: &Claim) -> Result<Release> {
        pending().await
    }
}

/// The error of an acquisition says whether any of its requests may have had an effect, not only the last one.
#[tokio::test]
async fn what_an_acquisition_left_at_the_store_is_told_with_its_error() -> Result<()> {
    for fails in [false, true] {
        let memory = MemoryStore::new();
        let store = Arc::new(Altered(Lossy { inner: memory.clone(), fails, asked: AtomicUsize::new(0) }));
        let locker = Locker::builder(Arc::clone(&store)).patience(Duration::from_millis(50)).build();
        let lock = locker.lock("x");
        let acquiring = tokio::spawn(async move { lock.acquire().await.map(drop) });
        while Locker::new(memory.clone()).lock("x").inspect().await?.holders.is_empty() {
            tokio::task::yield_now().await;
        }
        if !fails {
            drop(locker.shutdown(Duration::ZERO).await);
        }
        let error = timeout(SOON, acquiring).await.expect("it waits on").expect("no panic").expect_err("no grant");
        let kind = if fails { ErrorKind::Unavailable } else { ErrorKind::Closed };
        assert_eq!((error.kind(), error.effect()), (kind, Effect::Unknown));
    }
    Ok(())
}

/// The request is a lease of its own, while the lock is waited for behind another task of this process.
#[tokio::test]
async fn a_request_to_yield_is_given_back() -> Result<()> {
    let memory = MemoryStore::new();
    let (locker, other) = (Locker::new(memory.clone()), Locker::new(memory));
    let held = locker.lock("b").acquire().await?;
    let lock = locker.lock("b").ask_to_yield();
    let waiting = tokio::spawn(async move { lock.acquire().await.map(drop) });
    while !held.yield_requested().await? {
        tokio::task::yield_now().await;
    }
    locker.shutdown(SOON).await?;
    assert!(other.lock("lockkit/yield/b").inspect().await?.holders.is_empty(), "nobody waits any more");
    assert_eq!(waiting.await.expect("no panic").expect_err("closed").kind(), ErrorKind::Closed);
    assert_eq!(held.release().await?, Outcome::Released);
    Ok(())
}

/// It waits in this process, and has nothing under way at the store.
#[tokio::test]
async fn what_was_taken_of_several_locks_is_given_back() -> Result<()> {
    let memory = MemoryStore::new();
    let (locker, other) = (Locker::new(memory.clone()), Locker::new(memory));
    let held = locker.lock("b").acquire().await?;
    let several = locker.multi(["a", "b"]);
    let waiting = tokio::spawn(async move { several.acquire().await.map(drop) });
    while other.lock("a").inspect().await?.holders.is_empty() {
        tokio::task::yield_now().await;
    }
    locker.shutdown(SOON).await?;
    assert!(other.lock("a").try_acquire().await?.is_some(), "it is held by nobody");
    assert_eq!(waiting.await.expect("no panic").expect_err("closed").kind(), ErrorKind::Closed);
    assert_eq!(held.release().await?, Outcome::Released);
    Ok(())
}
