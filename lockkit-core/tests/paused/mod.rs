//! The memory store on a clock that stands still unless somebody sleeps: what this machine does meanwhile takes no time.
//! For tests on a runtime with `start_paused`.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Clock, MemoryStore, Moment};
use tokio::time::Instant;

/// A new one, made on the runtime that it is for.
pub(crate) fn paused_store() -> MemoryStore {
    MemoryStore::with_clock(Arc::new(Paused(Instant::now())))
}

#[derive(Debug)]
struct Paused(Instant);

impl Clock for Paused {
    fn now(&self) -> Moment {
        Moment::from_nanos(0) + Duration::from_secs(1) + self.0.elapsed()
    }
}
