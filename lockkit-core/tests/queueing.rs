//! A store that keeps places in a queue, and what becomes of them.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Error, ErrorKind, LockStore, Locker, MemoryStore, Release, Result,
    Token, Waiting,
};
use lockkit_testkit::{Alter, Altered, WithInfo};

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
        self.left.lock().expect("unpoisoned").push(claim.token);
        self.inner.release(claim).await
    }
}

/// The error says that the last request did nothing; the place that an earlier one took is still there.
#[tokio::test]
async fn who_gives_up_leaves_the_queue() -> Result<()> {
    let inner = Altered::with_info(MemoryStore::new(), |info| info.capability.waiting = Waiting::Queue);
    let left = Arc::new(Mutex::default());
    let store = Queueing { inner, is_joined: AtomicBool::new(false), left: Arc::clone(&left) };
    let locker = Locker::builder(Altered(store)).patience(Duration::from_millis(50)).build();
    let error = locker.lock("x").acquire().await.expect_err("out of reach");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    locker.shutdown(Duration::from_secs(5)).await?;
    assert_eq!(left.lock().expect("unpoisoned").len(), 1, "a place was left behind in the queue");
    Ok(())
}
