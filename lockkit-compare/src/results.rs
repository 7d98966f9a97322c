//! What was measured on one store.

use std::{collections::BTreeMap, time::Duration};

use crate::{
    error::Error,
    plan::Step,
    stats::{Latencies, median},
    worker::HoldCost,
};

/// Everything that was measured on one store, round by round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Results {
    /// What the store is, for the report.
    pub(crate) traits: Traits,
    pub(crate) round_trip: Option<Latencies>,
    pub(crate) pair: Option<Latencies>,
    pub(crate) many_keys: Vec<f64>,
    pub(crate) handed_over: Vec<Contest>,
    pub(crate) not_handed_over: Vec<Contest>,
    pub(crate) processes: Vec<Contest>,
    pub(crate) hand_off: Option<Latencies>,
    /// A bare round trip after the same pause as before a hand-off.
    pub(crate) idle_round_trip: Option<Latencies>,
    pub(crate) held: Option<Held>,
    pub(crate) compliance: Option<Counts>,
    /// Why a measure is missing.
    pub(crate) absent: BTreeMap<Step, Absence>,
}

/// What a store says of itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct Traits {
    /// Whether a question to it is no more than a look into this process's memory.
    pub(crate) in_process: bool,
    pub(crate) fencing: String,
    pub(crate) waiting: String,
}

/// Why there is no number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Absence {
    /// There can't be one.
    Inapplicable(&'static str),
    /// It went wrong.
    Failed(Error),
}

/// A lock that many wanted at once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Contest {
    pub(crate) per_second: f64,
    /// Jain's index over those who wanted it.
    pub(crate) fairness: Option<f64>,
    /// Critical sections that overlapped or came out of turn.
    pub(crate) violations: u64,
}

/// Leases that were held and renewed for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) leases: usize,
    pub(crate) ttl: Duration,
    pub(crate) cost: HoldCost,
}

/// Cases of the compliance suite.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: usize,
    pub(crate) ignored: usize,
    /// Each case that failed and what was seen, in a line.
    pub(crate) failures: Vec<String>,
}

impl Held {
    /// The ttl for which the share of a processor is reported, whatever the leases had.
    pub(crate) const NOMINAL_TTL: Duration = Duration::from_secs(30);

    pub(crate) fn bytes_each(&self) -> f64 {
        self.cost.bytes as f64 / self.leases.max(1) as f64
    }

    /// The share of one processor, in percent, that renewing these leases takes at the nominal ttl: what a renewal
    /// costs times how many there are in a second, one for each lease in a third of the ttl.
    pub(crate) fn cpu_percent(&self) -> Option<f64> {
        let each = self.cost.cpu.as_secs_f64() / (self.cost.renewed > 0).then_some(self.cost.renewed as f64)?;
        Some(each * self.leases as f64 / (Self::NOMINAL_TTL / 3).as_secs_f64() * 100.0)
    }

    /// The least that was left of a lease when it was renewed, in percent of its ttl.
    pub(crate) fn margin_percent(&self) -> Option<f64> {
        Some(self.cost.least_margin?.as_secs_f64() / self.ttl.as_secs_f64() * 100.0)
    }
}

impl Results {
    /// Adds the latencies of one round to those of earlier rounds.
    pub(crate) fn add(sum: &mut Option<Latencies>, round: &Latencies) {
        sum.get_or_insert_with(Latencies::new).merge(round);
    }

    /// Whether there was a contest, in which critical sections could have overlapped.
    pub(crate) fn was_contested(&self) -> bool {
        self.contests().next().is_some()
    }

    /// All that must never happen and did.
    pub(crate) fn violations(&self) -> u64 {
        self.contests().map(|contest| contest.violations).sum()
    }

    fn contests(&self) -> impl Iterator<Item = &Contest> {
        [&self.handed_over, &self.not_handed_over, &self.processes].into_iter().flatten()
    }
}

/// How many times as long as `unit` something took.
pub(crate) fn ratio(latencies: Option<&Latencies>, unit: Option<&Latencies>) -> Option<f64> {
    Some(latencies?.micros(0.5)? / unit?.micros(0.5)?)
}

/// The median rate of several rounds.
pub(crate) fn rate(contests: &[Contest]) -> Option<f64> {
    median(contests.iter().map(|contest| contest.per_second))
}

/// The median fairness of several rounds.
pub(crate) fn fairness(contests: &[Contest]) -> Option<f64> {
    median(contests.iter().filter_map(|contest| contest.fairness))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_a_processor_does_not_depend_on_the_ttl_measured_with() {
        let second = Duration::from_secs(1);
        let held = |ttl: u32, renewed| Held {
            leases: 10_000,
            ttl: second * ttl,
            cost: HoldCost {
                bytes: 5_000_000,
                window: second * ttl / 3,
                cpu: Duration::from_millis(100),
                renewed,
                failed: 0,
                lost: 0,
                least_margin: Some(second * ttl / 2),
            },
        };
        // 100 ms of work for one renewal each; at 30 s there is one in 10 s, whatever the measured ttl.
        assert_eq!(held(30, 10_000).cpu_percent(), Some(1.0));
        assert_eq!(held(6, 10_000).cpu_percent(), Some(1.0));
        assert_eq!(held(6, 0).cpu_percent(), None);
        assert_eq!(held(6, 1).bytes_each(), 500.0);
        assert_eq!(held(6, 1).margin_percent(), Some(50.0));
    }

    #[test]
    fn violations_of_all_contests_count() {
        let bad = Contest { per_second: 1.0, fairness: None, violations: 2 };
        let results = Results { handed_over: vec![bad], processes: vec![bad, bad], ..Results::default() };
        assert_eq!(results.violations(), 6);
    }
}
