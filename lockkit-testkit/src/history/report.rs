//! What the judge has to say.

use std::time::Duration;

use super::{Rule, Violation};

/// What a history shows.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Every broken rule, in the order of time. What a store does not claim may be broken; that is for the caller to
    /// judge.
    pub violations: Vec<Violation>,
    /// How many times a lock was granted.
    pub grants: u64,
    /// How many of these grants had no fence.
    pub unfenced: u64,
    /// How many of them were nested in another of the same owner.
    pub nested: u64,
    /// How many leases shared their lock, when they began, with one that was there before: readers, and permits.
    pub shared: u64,
    /// How many exclusive ones had the very next fence after another of the same process: handed over, most likely.
    pub handed_over: u64,
    /// How many acquisitions were dropped.
    pub cancelled: u64,
    /// How many acquisitions were told that another has a lock that nobody else had ever asked for. A lease that such an
    /// acquisition was granted too late, and that is not released yet, can keep it out.
    pub contended_alone: u64,
    /// How many acquisitions were seen to wait in the queue of their lock, with nothing wrong meanwhile.
    pub queued: u64,
    /// How many guards were dropped without a release.
    pub dropped: u64,
    /// The most guards that one process had at once.
    pub most_held: usize,
    /// How many times a guard, when it was asked, said that the lock is lost.
    pub lost: u64,
    /// How many writes the fenced resources admitted.
    pub admitted: u64,
    /// How many writes and claims the fenced resources refused to holders of an exclusive lock: they were late. A resource may also
    /// refuse one of those who share a lock, because another has a higher fence; those are not counted.
    pub refused: u64,
    /// How many updates were lost on the unfenced twins: what happens without the check.
    pub lost_on_twins: u64,
    /// How many writes the unfenced twins took.
    pub twin_writes: u64,
    /// The longest time for which somebody asked for a lock and nobody had it; `None` if nobody wanted to know
    /// ([`check_reach`](super::check_reach)).
    pub out_of_reach: Option<Duration>,
}

impl Report {
    /// How often a rule was broken.
    #[must_use]
    pub fn count(&self, rule: Rule) -> usize {
        self.violations.iter().filter(|violation| violation.rule == rule).count()
    }
}
