//! The backlog: releases that failed, and are tried again until the store answers or their leases must have lapsed.
//!
//! While a store is away, each acquisition that is given up leaves one. Few are tried at a time, so that a store which comes back is
//! not met by all of them at once.

use std::{
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    sync::Semaphore,
    time::{sleep, timeout},
};

use super::{
    Engine,
    reaper::{Owed, PendingRelease},
};
use crate::{
    Moment,
    store::{RETRIED_AT_ONCE, unpoisoned},
};

/// The releases of one `Locker` that failed at least once.
pub(super) struct Backlog {
    length: AtomicUsize,
    tries: Semaphore,
    /// Those that were dropped before they were answered.
    left: Mutex<Vec<PendingRelease>>,
}

impl Default for Backlog {
    fn default() -> Self {
        Self { length: AtomicUsize::new(0), tries: Semaphore::new(RETRIED_AT_ONCE), left: Mutex::default() }
    }
}

/// A release that counts for the length of the backlog.
struct Counted(Arc<Engine>);

impl Backlog {
    /// How many there are.
    pub(super) fn length(&self) -> usize {
        self.length.load(Ordering::Acquire)
    }

    /// Keeps a release that ended with its runtime until there is [another one](super::Engine::adopt_work).
    pub(super) fn leave(&self, pending: PendingRelease) {
        let mut left = unpoisoned(&self.left);
        left.push(pending);
        self.length.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn has_left(&self) -> bool {
        self.length() > 0 && !unpoisoned(&self.left).is_empty()
    }

    pub(super) fn take_left(&self) -> Vec<PendingRelease> {
        if self.length() == 0 {
            return Vec::new();
        }
        let left = mem::take(&mut *unpoisoned(&self.left));
        self.length.fetch_sub(left.len(), Ordering::AcqRel);
        left
    }
}

impl Counted {
    fn new(engine: &Arc<Engine>) -> Self {
        engine.backlog.length.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(engine))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.backlog.length.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Owed {
    /// Sends the release at this moment or later, when fewer than [`RETRIED_AT_ONCE`] are tried, and again until it is settled or its lease has
    /// lapsed.
    ///
    /// # Cancellation
    /// The release is [left](Backlog::leave) to the next runtime.
    pub(super) async fn work_off(mut self, mut at: Moment) {
        let Counted(engine) = &Counted::new(self.engine());
        loop {
            let turn = async {
                sleep(at.since(engine.now())).await;
                engine.backlog.tries.acquire().await
            };
            // The time is up when the lease has lapsed: then nothing is left to release.
            let Ok(Ok(_turn)) = timeout(self.lapses_in(engine.now()), turn).await else { return };
            match self.settle(&mut None).await {
                Some(again) => at = again,
                None => return,
            }
        }
    }
}
