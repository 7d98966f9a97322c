//! Counters of what quorums cost.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// How the acquisitions of a store went so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Acquisitions that were granted.
    pub grants: u64,
    /// Acquisitions that needed a second round, because the nodes' fence counters were apart.
    pub raise_rounds: u64,
    /// Acquisitions that some nodes granted, but too few, because another was faster at the others.
    pub split_votes: u64,
    /// Nodes that granted after the acquisition had failed, and were released.
    pub late_grants_released: u64,
    /// Nodes that were given a lease again which they had lost.
    pub heals: u64,
    /// How long it takes to get the votes of a majority, as a moving average.
    pub lock_time: Duration,
}

/// The counters behind [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    grants: AtomicU64,
    raise_rounds: AtomicU64,
    split_votes: AtomicU64,
    late_grants_released: AtomicU64,
    heals: AtomicU64,
    lock_nanos: AtomicU64,
}

impl Counters {
    pub(crate) fn note_grant(&self, took: Duration) {
        self.grants.fetch_add(1, Ordering::Relaxed);
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let before = self.lock_nanos.load(Ordering::Relaxed);
        // An update that another overwrites is no loss.
        let average = if before == 0 { took } else { before - before / 8 + took / 8 };
        self.lock_nanos.store(average, Ordering::Relaxed);
    }

    pub(crate) fn note_raise(&self) {
        self.raise_rounds.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn note_split(&self) {
        self.split_votes.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn note_straggler(&self) {
        self.late_grants_released.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn note_heal(&self) {
        self.heals.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn lock_time(&self) -> Duration {
        Duration::from_nanos(self.lock_nanos.load(Ordering::Relaxed))
    }

    pub(crate) fn read(&self) -> Stats {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            grants: count(&self.grants),
            raise_rounds: count(&self.raise_rounds),
            split_votes: count(&self.split_votes),
            late_grants_released: count(&self.late_grants_released),
            heals: count(&self.heals),
            lock_time: self.lock_time(),
        }
    }
}
