//! The reference store as a store under test.

use std::sync::Arc;

use async_trait::async_trait;
use lockkit_core::{Clock, LockStore, MemoryStore};

use crate::{Backend, BoxError};

/// The memory store under test: every client is a clone of one store.
#[derive(Debug, Default)]
pub struct MemoryBackend {
    store: MemoryStore,
}

#[async_trait]
impl Backend for MemoryBackend {
    fn name(&self) -> &str {
        "memory"
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(Arc::new(self.store.clone()))
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        Ok(Some(Arc::new(self.store.client_with_clock(clock))))
    }
}
