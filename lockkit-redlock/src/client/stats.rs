//! Counters of what quorums cost.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// How the acquisitions of a store went so far.
///
/// With the feature `metrics` each counter is also fed to the `metrics` facade, under the name that is given with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Acquisitions that were granted: `lockkit_redlock_grants_total`.
    pub grants: u64,
    /// Acquisitions that needed a second round, because the nodes' fence counters were apart:
    /// `lockkit_redlock_raise_rounds_total`.
    pub raise_rounds: u64,
    /// Acquisitions that some nodes granted, but too few, because another was faster at the others:
    /// `lockkit_redlock_split_votes_total`.
    pub split_votes: u64,
    /// Nodes that granted after the acquisition had failed, and were released: `lockkit_redlock_late_grants_total`.
    pub late_grants_released: u64,
    /// Nodes that were given a lease again which they had lost: `lockkit_redlock_heals_total`.
    pub heals: u64,
    /// How long it takes to get the votes of a majority, as a moving average.
    pub lock_time: Duration,
}

/// The counters behind [`Stats`].
#[derive(Debug)]
pub(crate) struct Counters {
    grants: Counter,
    pub(crate) raise_rounds: Counter,
    pub(crate) split_votes: Counter,
    pub(crate) late_grants_released: Counter,
    pub(crate) heals: Counter,
    lock_nanos: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            grants: Counter::new("lockkit_redlock_grants_total"),
            raise_rounds: Counter::new("lockkit_redlock_raise_rounds_total"),
            split_votes: Counter::new("lockkit_redlock_split_votes_total"),
            late_grants_released: Counter::new("lockkit_redlock_late_grants_total"),
            heals: Counter::new("lockkit_redlock_heals_total"),
            lock_nanos: AtomicU64::new(0),
        }
    }
}

impl Counters {
    pub(crate) fn note_grant(&self, took: Duration) {
        self.grants.add_one();
        let took = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let before = self.lock_nanos.load(Ordering::Relaxed);
        // An update that another overwrites is no loss.
        let average = if before == 0 { took } else { before - before / 8 + took / 8 };
        self.lock_nanos.store(average, Ordering::Relaxed);
    }

    pub(crate) fn lock_time(&self) -> Duration {
        Duration::from_nanos(self.lock_nanos.load(Ordering::Relaxed))
    }

    pub(crate) fn read(&self) -> Stats {
        Stats {
            grants: self.grants.read(),
            raise_rounds: self.raise_rounds.read(),
            split_votes: self.split_votes.read(),
            late_grants_released: self.late_grants_released.read(),
            heals: self.heals.read(),
            lock_time: self.lock_time(),
        }
    }
}

#[derive(Debug)]
pub(crate) struct Counter {
    count: AtomicU64,
    #[cfg_attr(not(feature = "metrics"), expect(dead_code, reason = "there is nobody to tell"))]
    name: &'static str,
}

impl Counter {
    const fn new(name: &'static str) -> Self {
        Self { count: AtomicU64::new(0), name }
    }

    pub(crate) fn add_one(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        #[cfg(feature = "metrics")]
        metrics::counter!(self.name).increment(1);
    }

    fn read(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}
