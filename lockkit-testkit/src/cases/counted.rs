//! A store that counts what it is asked.

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering},
};

use async_trait::async_trait;
use lockkit_core::{AcquireRequest, Attempt, KeyState, LockStore, Query, Result};

use crate::Alter;

/// Counts all calls but those that every client makes in the background anyway.
#[derive(Debug)]
pub(super) struct Counted {
    store: Arc<dyn LockStore>,
    calls: AtomicU32,
}

impl Counted {
    pub(super) fn new(store: Arc<dyn LockStore>) -> Self {
        Self { store, calls: AtomicU32::new(0) }
    }

    /// How often it was asked for a lock, or about one.
    pub(super) fn calls(&self) -> u32 {
        self.calls.load(Ordering::Relaxed)
    }

    fn count(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
}

#[async_trait]
impl Alter for Counted {
    fn inner(&self) -> &dyn LockStore {
        &self.store
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.count();
        self.store.acquire(request).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.count();
        self.store.inspect(query).await
    }
}
