//! Pure: from what the nodes answered to what that means. No I/O, no clock.

use std::time::Duration;

use lockkit_core::LossReason;

/// The majority of `nodes`: any two groups of that size share a node.
#[must_use]
pub const fn majority(nodes: usize) -> usize {
    nodes / 2 + 1
}

/// The votes on one acquisition so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Votes {
    nodes: usize,
    pub(crate) granted: usize,
    /// Nodes at which another holds the lock.
    pub(crate) held: usize,
    /// Nodes that could not be asked, or have not answered in time.
    pub(crate) failed: usize,
}

/// What the votes so far amount to. Only what no later vote can change is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// More votes are needed.
    Open,
    /// A majority granted it.
    Granted,
    /// No majority can be had, and a majority answered: others have it, or were faster at some nodes.
    Contended,
    /// No majority can be had, and none answered.
    Unavailable,
}

impl Votes {
    pub(crate) const fn new(nodes: usize) -> Self {
        Self { nodes, granted: 0, held: 0, failed: 0 }
    }

    /// Ends the waiting: a node that has not answered has failed.
    pub(crate) fn close(&mut self) {
        self.failed = self.nodes - self.granted - self.held;
    }

    /// How many are still to come.
    pub(crate) const fn pending(&self) -> usize {
        self.nodes - self.granted - self.held - self.failed
    }

    /// Met, or unreachable: as soon as either is certain.
    ///
    /// That another holds the lock is said only if a majority answered (rule R6): with less, whoever holds it at the
    /// nodes that answered may have lost it at the others long ago.
    pub(crate) const fn verdict(&self) -> Verdict {
        let quorum = majority(self.nodes);
        if self.granted >= quorum {
            return Verdict::Granted;
        }
        if self.granted + self.pending() >= quorum {
            return Verdict::Open;
        }
        let answered = self.granted + self.held;
        if answered >= quorum && self.held > 0 {
            Verdict::Contended
        } else if answered + self.pending() < quorum {
            Verdict::Unavailable
        } else {
            Verdict::Open
        }
    }

    /// The verdict if nobody waits for `slow` of those still to come where that would only prolong a split vote: what
    /// was granted keeps others from a majority meanwhile. For a grant they are waited for.
    pub(crate) const fn verdict_but_for(&self, slow: usize) -> Verdict {
        let without = Self { failed: self.failed + slow, ..*self };
        match (self.verdict(), without.verdict()) {
            (Verdict::Open, Verdict::Contended) => Verdict::Contended,
            (verdict, _) => verdict,
        }
    }
}

/// The answers about a lease that exists, to a renewal or a release, so far.
#[derive(Clone, Debug)]
pub(crate) struct Answers {
    nodes: usize,
    /// Nodes that did what was asked.
    pub(crate) yes: usize,
    /// Nodes at which the lease is gone, and at which another has the lock.
    gone: usize,
    taken: usize,
    failed: usize,
}

/// What the answers so far amount to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    /// More answers are needed.
    Open,
    /// A majority did it.
    Done,
    /// So many nodes do not have the lease that no majority can have had it.
    NotHeld(LossReason),
    /// Too many could not be asked to say either.
    Unknown,
}

impl Answers {
    pub(crate) const fn new(nodes: usize) -> Self {
        Self { nodes, yes: 0, gone: 0, taken: 0, failed: 0 }
    }

    pub(crate) const fn not_held(&mut self, reason: LossReason) {
        match reason {
            LossReason::Taken => self.taken += 1,
            _ => self.gone += 1,
        }
    }

    pub(crate) const fn failed(&mut self) {
        self.failed += 1;
    }

    /// Ends the waiting.
    pub(crate) fn close(&mut self) {
        self.failed = self.nodes - self.yes - self.gone - self.taken;
    }

    pub(crate) const fn pending(&self) -> usize {
        self.nodes - self.yes - self.gone - self.taken - self.failed
    }

    /// Nodes that do not have the lease.
    pub(crate) const fn missing(&self) -> usize {
        self.gone + self.taken
    }

    pub(crate) const fn outcome(&self) -> Decision {
        let quorum = majority(self.nodes);
        let missing = self.missing();
        if self.yes >= quorum {
            Decision::Done
        } else if self.nodes - missing < quorum {
            Decision::NotHeld(if self.taken >= self.gone { LossReason::Taken } else { LossReason::Gone })
        } else if self.yes + self.pending() < quorum && self.pending() + missing <= self.nodes - quorum {
            Decision::Unknown
        } else {
            Decision::Open
        }
    }

    /// The outcome of a release of what never was a lease, and is given up.
    ///
    /// When a majority let it go or did not have it, no majority can have it any more, whenever what is still on its way
    /// to the others arrives there. Whether one had it before does not matter: nobody counted the votes, so nobody worked
    /// under it, and nobody will. One node that says that another has the lock is enough to say so, whichever of them answer first.
    pub(crate) const fn outcome_if_unused(&self) -> Decision {
        let quorum = majority(self.nodes);
        let without = self.yes + self.missing();
        match self.outcome() {
            Decision::Open | Decision::Unknown if without >= quorum => {
                Decision::NotHeld(if self.taken > 0 { LossReason::Taken } else { LossReason::Gone })
            }
            Decision::Unknown if without + self.pending() >= quorum => Decision::Open,
            outcome => outcome,
        }
    }
}

/// After what time enough nodes will be free for a majority, if these are left to the leases in the way.
pub(crate) fn free_after(left: &mut [Duration], nodes: usize) -> Option<Duration> {
    left.sort_unstable();
    let may_stay = nodes - majority(nodes);
    left.get(left.len().checked_sub(may_stay + 1)?).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(nodes: usize, granted: usize, held: usize, failed: usize) -> Verdict {
        Votes { nodes, granted, held, failed }.verdict()
    }

    #[test]
    fn two_majorities_always_share_a_node() {
        for nodes in 1..20 {
            assert!(2 * majority(nodes) > nodes && 2 * (majority(nodes) - 1) <= nodes);
        }
    }

    #[test]
    fn the_verdict_comes_as_soon_as_it_is_certain() {
        assert_eq!(verdict(5, 2, 2, 0), Verdict::Open);
        assert_eq!(verdict(5, 3, 0, 0), Verdict::Granted);
        assert_eq!(verdict(5, 0, 3, 0), Verdict::Contended);
        assert_eq!(verdict(5, 0, 0, 3), Verdict::Unavailable);
        assert_eq!(verdict(5, 2, 2, 1), Verdict::Contended, "a split vote with one node down");
        assert_eq!(verdict(5, 0, 2, 1), Verdict::Open, "a majority may yet answer");
        assert_eq!(verdict(5, 0, 2, 3), Verdict::Unavailable, "two of five say nothing about the other three");
        assert_eq!(verdict(5, 2, 0, 3), Verdict::Unavailable);
    }

    /// No verdict is ever overturned by the votes that come after it.
    #[test]
    fn no_verdict_is_overturned() {
        for nodes in [3, 4, 5, 7] {
            for granted in 0..=nodes {
                for held in 0..=nodes - granted {
                    for failed in 0..=nodes - granted - held {
                        let early = verdict(nodes, granted, held, failed);
                        let left = nodes - granted - held - failed;
                        for more in 0..=left {
                            for yet_more in 0..=left - more {
                                let rest = left - more - yet_more;
                                let late = verdict(nodes, granted + more, held + yet_more, failed + rest);
                                assert_ne!(late, Verdict::Open);
                                assert!(early == Verdict::Open || early == late, "{early:?} became {late:?}");
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_split_vote_does_not_wait_for_slow_nodes() {
        let but_for = |granted, held, failed, slow| Votes { nodes: 5, granted, held, failed }.verdict_but_for(slow);
        assert_eq!(but_for(2, 1, 1, 0), Verdict::Open);
        assert_eq!(but_for(2, 1, 1, 1), Verdict::Contended);
        assert_eq!(but_for(2, 1, 0, 1), Verdict::Open, "one that is not slow may still grant it");
        assert_eq!(but_for(2, 0, 1, 2), Verdict::Open, "nobody is in the way: worth waiting for");
        assert_eq!(but_for(1, 1, 1, 2), Verdict::Open, "a majority has to answer");
    }

    #[test]
    fn a_release_is_what_a_majority_says() {
        let outcome = |yes, gone, taken, failed| Answers { nodes: 5, yes, gone, taken, failed }.outcome();
        assert_eq!(outcome(3, 0, 0, 0), Decision::Done);
        assert_eq!(outcome(2, 2, 0, 0), Decision::Open);
        assert_eq!(outcome(2, 3, 0, 0), Decision::NotHeld(LossReason::Gone));
        assert_eq!(outcome(0, 0, 3, 0), Decision::NotHeld(LossReason::Taken));
        assert_eq!(outcome(2, 2, 0, 1), Decision::Unknown);
        assert_eq!(outcome(0, 2, 0, 3), Decision::Unknown);
        assert_eq!(outcome(0, 0, 0, 3), Decision::Unknown);
        assert_eq!(outcome(0, 1, 0, 2), Decision::Open, "two more could still say that it is not held");
    }

    #[test]
    fn a_majority_is_enough_to_end_what_never_was_a_lease() {
        let answers = |yes, gone, taken, failed| Answers { nodes: 5, yes, gone, taken, failed };
        let outcome = |yes, gone, taken, failed| answers(yes, gone, taken, failed).outcome_if_unused();
        assert_eq!(outcome(3, 0, 0, 0), Decision::Done);
        assert_eq!(outcome(2, 1, 0, 1), Decision::NotHeld(LossReason::Gone), "one is still on its way");
        assert_eq!(outcome(1, 1, 1, 2), Decision::NotHeld(LossReason::Taken));
        assert_eq!(outcome(2, 0, 1, 0), Decision::NotHeld(LossReason::Taken), "two had granted it");
        assert_eq!(outcome(1, 1, 0, 2), Decision::Open, "the last one decides");
        assert_eq!(outcome(0, 0, 0, 0), Decision::Open);
        assert_eq!(outcome(1, 1, 0, 3), Decision::Unknown, "three may have it");
        for (yes, gone) in [(2, 1), (1, 1)] {
            assert_eq!(answers(yes, gone, 0, 2).outcome(), Decision::Unknown, "what was a lease may have been lost");
        }
    }

    #[test]
    fn a_lock_is_free_when_a_majority_is() {
        let after = |left: &[u64]| {
            let mut left: Vec<_> = left.iter().copied().map(Duration::from_secs).collect();
            free_after(&mut left, 5).map(|after| after.as_secs())
        };
        assert_eq!(after(&[9, 1, 5]), Some(1), "two may stay");
        assert_eq!(after(&[9, 1, 5, 7, 3]), Some(5));
        assert_eq!(after(&[9, 1]), None);
    }
}
