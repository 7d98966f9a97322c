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
    AcquireRequest, Attempt, Claim, Contention, Error, ErrorKind, KeyState, LockStore, Locker, MemoryStore, Query,
    Release, Renewal, Renewed, Result, StoreInfo, Token, Waiting,
};

/// The memory store with a queue in which nobody ever gets up; out of reach once somebody stands in it.
#[derive(Debug)]
struct Queueing {
    inner: MemoryStore,
    info: StoreInfo,
    is_joined: AtomicBool,
    left: Arc<Mutex<Vec<Token>>>,
}

#[async_trait]
impl LockStore for Queueing {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, _: &AcquireRequest) -> Result<Attempt> {
        if self.is_joined.swap(true, Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "connection refused"));
        }
        Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), ..Contention::default() }))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.inner.renew(renewals).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.left.lock().expect("unpoisoned").push(claim.token);
        self.inner.release(claim).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.inner.inspect(query).await
    }
}

/// The error says that the last request did nothing; the place that an earlier one took is still there.
#[tokio::test]
async fn who_gives_up_leaves_the_queue() -> Result<()> {
    let inner = MemoryStore::new();
    let mut info = inner.info().clone();
    info.capability.waiting = Waiting::Queue;
    let left = Arc::new(Mutex::default());
    let store = Queueing { inner, info, is_joined: AtomicBool::new(false), left: Arc::clone(&left) };
    let locker = Locker::builder(store).patience(Duration::from_millis(50)).build();
    let error = locker.lock("x").acquire().await.expect_err("out of reach");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    locker.shutdown(Duration::from_secs(5)).await?;
    assert_eq!(left.lock().expect("unpoisoned").len(), 1, "a place was left behind in the queue");
    Ok(())
}
