//! A resource that the lock protects, and that notices when it does not.

use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
};

use lockkit_core::Fence;

/// A counter that loses updates unless its users exclude each other, and that checks fences.
#[derive(Debug, Default)]
pub(super) struct Resource {
    count: AtomicU64,
    highest: Mutex<Fence>,
}

impl Resource {
    /// The rule of every fenced resource: a smaller fence than the highest seen is refused, any other is remembered.
    pub(super) fn admit(&self, fence: Fence) -> bool {
        let mut highest = self.highest.lock().expect("unpoisoned");
        let admitted = fence >= *highest;
        *highest = (*highest).max(fence);
        admitted
    }

    /// Adds one, by reading and writing in two steps with a pause between them.
    pub(super) async fn increment(&self) {
        let read = self.count.load(Ordering::SeqCst);
        tokio::task::yield_now().await;
        self.count.store(read + 1, Ordering::SeqCst);
    }

    pub(super) fn count(&self) -> u64 {
        self.count.load(Ordering::SeqCst)
    }
}
