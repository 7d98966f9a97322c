//! One `Locker` on several runtimes, of which some end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, KeyState, LockStore, Locker, LossReason, MemoryStore, Outcome, Query, Release,
    Renewal, Renewed, Result, StoreInfo,
};
use tokio::{
    runtime::{Builder, Runtime},
    time::{sleep, timeout},
};

const TTL: Duration = Duration::from_millis(600);

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

/// Such as the tests of an application that share a `Locker`: each has a runtime of its own.
#[test]
fn leases_are_renewed_after_the_first_runtime_ended() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let (first, second, third) = (runtime(), runtime(), runtime());
    let early = first.block_on(locker.lock("a").ttl(TTL).acquire())?;
    let outlived = second.block_on(locker.lock("b").ttl(TTL).acquire())?;
    let late = third.block_on(locker.lock("c").ttl(TTL).acquire())?;
    drop((first, second));
    third.block_on(async {
        sleep(TTL * 2).await;
        assert!(early.is_held() && outlived.is_held() && late.is_held());
        assert_eq!(late.release().await?, Outcome::Released);
        Ok(())
    })
}

#[test]
fn a_loss_is_told_after_the_first_runtime_ended() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let (first, second) = (runtime(), runtime());
    drop(first.block_on(locker.lock("a").acquire())?);
    let guard = second.block_on(locker.lock("b").ttl(TTL).no_renewal().acquire())?;
    drop(first);
    let told = second.block_on(async { timeout(TTL * 4, guard.lost()).await });
    assert_eq!(told, Ok(LossReason::Expired));
    Ok(())
}

/// The memory store, which never answers its first renewal.
#[derive(Debug)]
struct OnceSilent {
    inner: MemoryStore,
    is_asked: AtomicBool,
}

#[async_trait]
impl LockStore for OnceSilent {
    fn info(&self) -> &StoreInfo {
        self.inner.info()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.inner.acquire(request).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        if !self.is_asked.swap(true, Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
        self.inner.renew(renewals).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.inner.release(claim).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.inner.inspect(query).await
    }
}

#[test]
fn a_renewal_that_ended_with_its_runtime_is_made_again() -> Result<()> {
    let store = Arc::new(OnceSilent { inner: MemoryStore::new(), is_asked: AtomicBool::new(false) });
    let locker = Locker::builder(Arc::clone(&store)).build();
    let (first, second) = (runtime(), runtime());
    drop(first.block_on(locker.lock("a").acquire())?);
    let guard = second.block_on(locker.lock("b").ttl(TTL * 5).acquire())?;
    while !store.is_asked.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(first);
    second.block_on(async {
        sleep(TTL * 5).await;
        assert!(guard.is_held());
    });
    Ok(())
}
