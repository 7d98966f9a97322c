//! What a shutdown ends, and what it waits for.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, ErrorKind, KeyState, LockStore, Locker, MemoryStore, Outcome, Query, Release,
    Renewal, Renewed, Result, StoreInfo,
};
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(5);

/// The memory store, which takes its time over a release.
#[derive(Debug)]
struct Slow {
    inner: MemoryStore,
    released: Arc<AtomicUsize>,
}

#[async_trait]
impl LockStore for Slow {
    fn info(&self) -> &StoreInfo {
        self.inner.info()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.inner.acquire(request).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.inner.renew(renewals).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let answer = self.inner.release(claim).await;
        self.released.fetch_add(1, Ordering::SeqCst);
        answer
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.inner.inspect(query).await
    }
}

/// Those who wait at the store, not only those behind them.
#[tokio::test]
async fn who_waits_at_the_store_is_told() -> Result<()> {
    let (store, released) = (MemoryStore::new(), Arc::new(AtomicUsize::new(0)));
    let other = Locker::new(store.clone());
    let guard = other.lock("x").acquire().await?;
    let locker = Locker::new(Slow { inner: store, released: Arc::clone(&released) });
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

#[tokio::test]
async fn a_release_under_way_is_waited_for() -> Result<()> {
    let released = Arc::new(AtomicUsize::new(0));
    let locker = Locker::new(Slow { inner: MemoryStore::new(), released: Arc::clone(&released) });
    let guard = locker.lock("x").acquire().await?;
    let releasing = tokio::spawn(guard.release());
    tokio::task::yield_now().await;
    locker.shutdown(SOON).await?;
    assert_eq!(released.load(Ordering::SeqCst), 1);
    assert_eq!(releasing.await.expect("no panic")?, Outcome::Released);
    Ok(())
}
