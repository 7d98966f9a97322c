//! What was measured on one store.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{
    error::Error,
    plan::Step,
    stats::{Latencies, median},
    timeline::{Fault, Timeline},
};

/// Everything that was measured on one store, round by round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Results {
    /// What the store is, for the report.
    pub(crate) traits: Traits,
    pub(crate) round_trip: Rounds,
    /// Acquisition and release together, and each by itself.
    pub(crate) pair: Rounds,
    pub(crate) acquire: Rounds,
    pub(crate) release: Rounds,
    /// Acquisition and release of other kinds of locks: in order of arrival, as a reader, as one beside another, as a writer, of one permit.
    pub(crate) fifo: Rounds,
    pub(crate) reader: Rounds,
    pub(crate) reader_beside: Rounds,
    pub(crate) writer: Rounds,
    pub(crate) permit: Rounds,
    pub(crate) many_keys: Vec<f64>,
    /// Acquisition and release with that many tasks, each by itself.
    pub(crate) acquire_loaded: Rounds,
    pub(crate) release_loaded: Rounds,
    /// Pairs per second by the number of keys, round by round.
    pub(crate) by_keys: BTreeMap<usize, Vec<f64>>,
    pub(crate) handed_over: Vec<Contest>,
    pub(crate) not_handed_over: Vec<Contest>,
    pub(crate) processes: Vec<Contest>,
    pub(crate) hand_off: Rounds,
    /// The same of a lock whose waiters are served in the order of arrival.
    pub(crate) hand_off_in_order: Rounds,
    /// A bare round trip after the same pause as before a hand-off.
    pub(crate) idle_round_trip: Rounds,
    /// Acquisition and release, by what a round trip takes longer.
    pub(crate) by_delay: BTreeMap<Duration, Rounds>,
    pub(crate) takeover: Option<Takeover>,
    pub(crate) held: Option<Held>,
    pub(crate) cost: Option<ServerCost>,
    pub(crate) faults: BTreeMap<Fault, Timeline>,
    pub(crate) updates: Option<LostUpdates>,
    pub(crate) compliance: Option<Counts>,
    /// Why a measure is missing.
    pub(crate) absent: BTreeMap<Step, Absence>,
}

/// What a store says of itself.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Traits {
    /// Whether it is another lock library, of which only some measures are known. Then the rest here says nothing.
    pub is_peer: bool,
    /// Whether it is inside this process, and no other process can share its locks.
    pub in_process: bool,
    /// The scheme of its URL.
    pub scheme: String,
    /// What its fences are worth, as [`Fencing`](lockkit::Fencing) names it.
    pub fencing: String,
    /// How waiters learn of a release, as [`Waiting`](lockkit::Waiting) names it.
    pub waiting: String,
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
}

/// The latencies of one measure, a histogram for each round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Rounds(Vec<Latencies>);

impl Rounds {
    pub(crate) fn add(&mut self, round: Latencies) {
        self.0.push(round);
    }

    /// All samples; `None` without a round.
    pub(crate) fn all(&self) -> Option<Latencies> {
        self.0.iter().cloned().reduce(|mut sum, round| {
            sum.merge(&round);
            sum
        })
    }

    /// The time in µs that this share of all samples did not exceed, and the least and the most of single rounds.
    pub(crate) fn micros(&self, quantile: f64) -> Option<Figure> {
        let value = self.all()?.micros(quantile)?;
        Some(Figure::new(value, self.0.iter().filter_map(|round| round.micros(quantile))))
    }

    /// What a client would have measured that asks at a [steady pace](Latencies::at_pace): once in the median of `pairs`.
    pub(crate) fn at_pace_of(&self, pairs: &Self) -> Self {
        let pace = pairs.micros(0.5).map_or(0.0, |median| median.value);
        Self(self.0.iter().map(|round| round.at_pace(pace)).collect())
    }

    /// How many there were in a second, one after the other.
    pub(crate) fn per_second(&self) -> Option<Figure> {
        Figure::median(self.0.iter().filter_map(|round| Some(1e6 / round.mean_micros()?)))
    }

    /// The time for a share near all, as `micros`: `None` with so few samples that it would be the longest of them. It has no range if that is so
    /// of a round.
    pub(crate) fn tail(&self, quantile: f64) -> Option<Figure> {
        let micros =
            |of: &Latencies| (of.len() as f64 * (1.0 - quantile) >= 1.0).then(|| of.micros(quantile)).flatten();
        let value = micros(&self.all()?)?;
        let rounds: Option<Vec<f64>> = self.0.iter().map(micros).collect();
        Some(rounds.map_or(Figure::once(value), |rounds| Figure::new(value, rounds)))
    }
}

/// A number, and how much it differed from round to round.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figure {
    /// The number to go by.
    pub value: f64,
    /// The least and the most that a single round showed; `None` if there were not two rounds.
    pub range: Option<(f64, f64)>,
}

impl Figure {
    /// The number of a measure that was taken once.
    pub(crate) fn once(value: f64) -> Self {
        Self { value, range: None }
    }

    pub(crate) fn new(value: f64, rounds: impl IntoIterator<Item = f64>) -> Self {
        let rounds: Vec<f64> = rounds.into_iter().collect();
        let (least, most) = rounds.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(l, m), &x| (l.min(x), m.max(x)));
        Self { value, range: (rounds.len() > 1).then_some((least, most)) }
    }

    /// The median of several rounds; `None` without one.
    pub(crate) fn median(rounds: impl IntoIterator<Item = f64>) -> Option<Self> {
        let rounds: Vec<f64> = rounds.into_iter().collect();
        Some(Self::new(median(rounds.iter().copied())?, rounds))
    }
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

/// Locks whose holders were gone without a word: after how many seconds another had them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Takeover {
    pub(crate) killed: Figure,
    pub(crate) frozen: Figure,
    /// How many of the frozen ones believed that they still had the lock when they went on.
    pub(crate) believed: u64,
}

/// How many of [`Plan::UPDATES`](crate::plan::Plan::UPDATES) of a number were lost that processes changed at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LostUpdates {
    pub(crate) without: u64,
    pub(crate) under: u64,
}

/// Leases that were held and renewed for a while.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) leases: usize,
    pub(crate) ttl: Duration,
    pub(crate) cost: HoldCost,
}

/// What it cost to hold leases, as the worker process tells it.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct HoldCost {
    /// By how much the process grew.
    pub(crate) bytes: u64,
    pub(crate) window: Duration,
    /// Processor time in the window.
    pub(crate) cpu: Duration,
    /// Renewals in the window.
    pub(crate) renewed: u64,
    pub(crate) failed: u64,
    pub(crate) lost: u64,
    /// The least that was left of a lease when its renewal was answered.
    pub(crate) least_margin: Option<Duration>,
}

/// What held locks and waiters cost the servers of a store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServerCost {
    pub(crate) locks: Share,
    pub(crate) waiters: Share,
}

/// What one of them costs, above what the servers did and had without them; nothing of what they do not tell.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Share {
    /// Requests per second.
    pub(crate) requests: Option<Figure>,
    /// Microseconds of processor time per second.
    pub(crate) micros: Option<Figure>,
    /// Bytes of memory.
    pub(crate) bytes: Option<Figure>,
}

/// Cases of the compliance suite.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: usize,
    pub(crate) ignored: usize,
    /// Each case that failed and what was seen, in a line.
    pub(crate) failures: Vec<String>,
    /// Cases that passed, failed and were ignored, by the rule that they are about.
    pub(crate) groups: BTreeMap<&'static str, [usize; 3]>,
    /// Whether there were more, for which the comparison was interrupted too early.
    pub(crate) interrupted: bool,
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
    /// Whether there was a contest of several clients, in which critical sections could have overlapped. Tasks of one locker queue within it,
    /// and ask the store one at a time: that they do not overlap says little of the store; that they do says all.
    pub(crate) fn was_contested(&self) -> bool {
        !self.processes.is_empty() || !self.faults.is_empty() || self.violations() > 0
    }

    /// All that must never happen and did.
    pub(crate) fn violations(&self) -> u64 {
        self.contests().map(|contest| contest.violations).sum::<u64>()
            + self.takeover.map_or(0, |takeover| takeover.believed)
            + self.faults.values().map(|timeline| timeline.broken).sum::<u64>()
            + self.updates.map_or(0, |updates| updates.under)
    }

    fn contests(&self) -> impl Iterator<Item = &Contest> {
        [&self.handed_over, &self.not_handed_over, &self.processes].into_iter().flatten()
    }
}

/// How many round trips something takes, by what it takes longer from the one delay of the network to the other.
pub(crate) fn round_trips(by_delay: &BTreeMap<Duration, Rounds>, from: Duration, to: Duration) -> Option<Figure> {
    let micros = |delay: Duration| Some(by_delay.get(&delay)?.micros(0.5)?.value);
    Some(Figure::once((micros(to)? - micros(from)?) / ((to - from).as_secs_f64() * 1e6)))
}

/// How many times as long as `unit` something took.
pub(crate) fn ratio(latencies: &Rounds, unit: &Rounds) -> Option<Figure> {
    Some(Figure::once(latencies.micros(0.5)?.value / unit.micros(0.5)?.value))
}

/// The median rate of several rounds.
pub(crate) fn rate(contests: &[Contest]) -> Option<Figure> {
    Figure::median(contests.iter().map(|contest| contest.per_second))
}

/// The median fairness of several rounds.
pub(crate) fn fairness(contests: &[Contest]) -> Option<Figure> {
    Figure::median(contests.iter().filter_map(|contest| contest.fairness))
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
    fn a_tail_is_more_than_the_longest_sample() {
        let round = |samples: u64| {
            let mut latencies = Latencies::new();
            (1..=samples).for_each(|micros| latencies.record(Duration::from_micros(micros)));
            latencies
        };
        let mut rounds = Rounds::default();
        rounds.add(round(600));
        assert_eq!(rounds.tail(0.999), None);
        assert!(rounds.tail(0.99).is_some());
        rounds.add(round(600));
        let both = rounds.tail(0.999).expect("1200 samples");
        assert_eq!(both.range, None, "no round has a thousand");
        assert!(rounds.tail(0.99).and_then(|figure| figure.range).is_some());
    }

    #[test]
    fn what_one_locker_contests_denies_no_overlap() {
        let contest = |violations| Contest { per_second: 1.0, fairness: None, violations };
        let one_locker = |violations| Results { not_handed_over: vec![contest(violations)], ..Results::default() };
        assert!(!one_locker(0).was_contested() && one_locker(1).was_contested());
        assert!(Results { processes: vec![contest(0)], ..Results::default() }.was_contested());
    }

    #[test]
    fn violations_of_all_contests_count() {
        let bad = Contest { per_second: 1.0, fairness: None, violations: 2 };
        let results = Results { handed_over: vec![bad], processes: vec![bad, bad], ..Results::default() };
        assert_eq!(results.violations(), 6);
    }
}
