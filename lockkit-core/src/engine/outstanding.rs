//! What a shutdown waits for.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::Notify;

use super::Engine;

/// Counts what a shutdown waits for: background releases, and claims of which one may become necessary.
#[derive(Debug, Default)]
pub(super) struct Outstanding {
    count: AtomicUsize,
    done: Notify,
}

impl Outstanding {
    pub(super) fn begin(&self) {
        // In one order with the look at whether the locker is open: see `Engine::check_open`.
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    pub(super) fn end(&self) {
        if self.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.done.notify_waiters();
        }
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Returns when none is under way.
    pub(super) async fn drained(&self) {
        loop {
            let done = self.done.notified();
            if self.count() == 0 {
                return;
            }
            done.await;
        }
    }
}

/// One background task, counted from its creation to its end, also if its runtime drops it.
pub(crate) struct BackgroundTask(Arc<Engine>);

impl BackgroundTask {
    pub(crate) fn new(engine: &Arc<Engine>) -> Self {
        engine.outstanding.begin();
        Self(Arc::clone(engine))
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.0
    }
}

impl Drop for BackgroundTask {
    fn drop(&mut self) {
        self.0.outstanding.end();
    }
}
