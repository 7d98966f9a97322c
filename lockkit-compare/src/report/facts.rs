//! What each store is, for those who choose one. No I/O.

use std::collections::BTreeMap;

use crate::results::Results;

/// What a store said of itself and what was seen, as far as it helps to choose.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Facts {
    /// Whether it is another lock library, of which only some measures are known. Then the rest here says nothing.
    pub peer: bool,
    /// The scheme of its URL.
    pub scheme: String,
    /// Whether it is inside this process, and no other process can share its locks.
    pub in_process: bool,
    /// What its fences are worth, as [`Fencing`](lockkit::Fencing) names it.
    pub fencing: String,
    /// What ends the lease of a holder that is gone.
    pub liveness: String,
    /// Whether it has a strict order of arrival.
    pub fifo: bool,
    /// Whether it has readers and writers.
    pub shared: bool,
    /// Whether it has semaphores.
    pub permits: bool,
    /// Whether a lease may outlive its process.
    pub resume: bool,
    /// Whether a lock can be kept for a window.
    pub keeps: bool,
    /// Whether a writer can become a reader without a gap.
    pub downgrades: bool,
    /// The median of an acquisition and its release, in µs.
    pub pair_micros: Option<f64>,
    /// The overlaps that were seen; `None` where nothing was contested.
    pub overlaps: Option<u64>,
    /// How the compliance cases went, by the rule that they are about; empty if they were left out.
    pub cases: BTreeMap<&'static str, Cases>,
}

/// How many compliance cases went which way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cases {
    /// The store kept the rule.
    pub passed: usize,
    /// It did not.
    pub failed: usize,
    /// The case did not apply.
    pub ignored: usize,
}

impl Facts {
    pub(super) fn of(store: &Results) -> Self {
        let (traits, kinds) = (&store.traits, store.traits.kinds);
        let groups = store.compliance.iter().flat_map(|counts| &counts.groups);
        Self {
            peer: traits.is_peer,
            scheme: traits.scheme.clone(),
            in_process: traits.in_process,
            fencing: traits.fencing.clone(),
            liveness: traits.liveness.clone(),
            fifo: kinds.fifo,
            shared: kinds.shared,
            permits: kinds.permits,
            resume: kinds.resume,
            keeps: kinds.keeps,
            downgrades: kinds.downgrades,
            pair_micros: store.pair.micros(0.5).map(|figure| figure.value),
            overlaps: store.was_contested().then(|| store.violations()),
            cases: groups
                .map(|(name, [passed, failed, ignored])| {
                    (*name, Cases { passed: *passed, failed: *failed, ignored: *ignored })
                })
                .collect(),
        }
    }

    /// What a server that is back with less data does to this store's locks: what `docs/choosing.md` says of it.
    pub(super) fn after_loss(&self) -> AfterLoss {
        match self.scheme.as_str() {
            "redlock" | "zk" => AfterLoss::Majority,
            "memory" => AfterLoss::Process,
            "redis" | "mysql" => AfterLoss::GrantsTwice,
            "redis+sentinel" | "redis+cluster" => AfterLoss::Failover,
            _ => AfterLoss::Unknown,
        }
    }

    /// Whether a lock holds when a server loses data that it had confirmed; `None` where that depends on something else.
    pub(super) fn keeps_after_loss(&self) -> Option<bool> {
        match self.after_loss() {
            AfterLoss::GrantsTwice => Some(false),
            AfterLoss::Majority | AfterLoss::Process => Some(true),
            AfterLoss::Failover | AfterLoss::Unknown => None,
        }
    }
}

/// What becomes of the locks when a server loses data that it had confirmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterLoss {
    /// Until the holder's next renewal, another may be granted the lock.
    GrantsTwice,
    /// As long as a majority of the servers keeps its data, nothing is granted twice.
    Majority,
    /// All leases end at a failover, and nothing is granted for the longest ttl; but a former primary that still serves somebody can
    /// grant a lock twice.
    Failover,
    /// The locks end with the process, and with it all who hold them.
    Process,
    /// It depends on the stores behind it.
    Unknown,
}

impl AfterLoss {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::GrantsTwice => "may be granted twice",
            Self::Majority => "held, if a majority keeps its data",
            Self::Failover => "ends; twice, if a former primary still serves somebody",
            Self::Process => "ends with the process",
            Self::Unknown => "as the stores behind it",
        }
    }
}
