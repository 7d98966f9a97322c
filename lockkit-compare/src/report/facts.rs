//! What each store is, for those who choose one. No I/O.

use std::collections::BTreeMap;

use crate::results::{Results, Traits};

/// What a store said of itself and what was seen, as far as it helps to choose.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Facts {
    /// What it said of itself.
    pub traits: Traits,
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
        let groups = store.compliance.iter().flat_map(|counts| &counts.groups);
        Self {
            traits: store.traits.clone(),
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
        match self.traits.scheme.as_str() {
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
