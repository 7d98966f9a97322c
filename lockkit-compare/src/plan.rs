//! What is measured, in what order, for how long.

use std::{collections::BTreeSet, num::NonZeroU32, time::Duration};

use crate::group::Group;

/// One measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Step {
    RoundTrip,
    Pair,
    ManyKeys,
    ByKeys,
    Kinds,
    HandedOver,
    NotHandedOver,
    Processes,
    HandOff,
    Takeover,
    Delay,
    Leases,
    Cost,
    /// After all that has the machine for itself: servers are started anew.
    Faults,
    /// The compliance suite, which comes last: all stores at once, for its cases mostly wait.
    Compliance,
}

impl Step {
    /// The measures that have the machine for themselves, in order.
    pub(crate) const ALONE: [Self; 14] = [
        Self::RoundTrip,
        Self::Pair,
        Self::ManyKeys,
        Self::ByKeys,
        Self::Kinds,
        Self::HandedOver,
        Self::NotHandedOver,
        Self::Processes,
        Self::HandOff,
        Self::Takeover,
        Self::Delay,
        Self::Leases,
        Self::Cost,
        Self::Faults,
    ];

    /// Those of a store that is made of two others of the same comparison, or is another one with other settings: what its locks cost, and
    /// whether they exclude.
    pub(crate) const IN_PART: [Self; 5] = [Self::RoundTrip, Self::Pair, Self::ManyKeys, Self::Processes, Self::HandOff];

    /// Those of a [peer](crate::Peer): the same work on the same server, as its own program can do and time it.
    pub(crate) const OF_PEERS: [Self; 3] = [Self::Pair, Self::Processes, Self::HandOff];

    /// All measures, in order.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        Self::ALONE.into_iter().chain([Self::Compliance])
    }

    /// The group that it is taken or left out with.
    pub(crate) fn group(self) -> Group {
        match self {
            Self::RoundTrip | Self::Pair => Group::Alone,
            Self::ManyKeys | Self::ByKeys => Group::Keys,
            Self::Kinds => Group::Kinds,
            Self::HandedOver | Self::NotHandedOver => Group::Hot,
            Self::Processes => Group::Processes,
            Self::HandOff => Group::HandOff,
            Self::Takeover => Group::Takeover,
            Self::Delay => Group::Delay,
            Self::Leases => Group::Leases,
            Self::Cost => Group::Cost,
            Self::Faults => Group::Faults,
            Self::Compliance => Group::Compliance,
        }
    }

    /// What goes on, for the progress bar.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::RoundTrip => "bare round trip",
            Self::Pair => "acquire and release",
            Self::ManyKeys => "many keys",
            Self::ByKeys => "more and more keys",
            Self::Kinds => "readers, writers, permits, in order",
            Self::HandedOver => "hot lock, hand-over on",
            Self::NotHandedOver => "hot lock, hand-over off",
            Self::Processes => "hot lock, several processes",
            Self::HandOff => "hand-off between processes",
            Self::Takeover => "takeover after the end of a holder",
            Self::Delay => "growing delay of the network",
            Self::Leases => "held leases",
            Self::Cost => "cost of locks and waiters at the server",
            Self::Faults => "faults of holders and servers",
            Self::Compliance => "compliance cases",
        }
    }
}

impl Group {
    /// Whether [servers with the other durability](crate::Targets::with_other_durability) have something to show in it.
    #[must_use]
    pub fn is_about_the_disk(self) -> bool {
        Step::IN_PART.iter().any(|step| step.group() == self)
    }
}

/// How much is measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    effort: Effort,
    groups: BTreeSet<Group>,
    leases: usize,
}

/// How long to measure.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Effort {
    /// About 10 s for each store, for rough numbers, and as much again for [`Group::Cost`], and half as much for [`Group::Takeover`].
    Quick,
    /// About 60 s for each store.
    #[default]
    Thorough,
}

impl Default for Options {
    /// A thorough comparison of everything but [`Group::Faults`], which starts servers anew, with 10 000 leases.
    fn default() -> Self {
        let groups = Group::ALL.into_iter().filter(|group| *group != Group::Faults).collect();
        Self { effort: Effort::Thorough, groups, leases: 10_000 }
    }
}

impl Options {
    /// How long to measure.
    #[must_use]
    pub fn effort(self, effort: Effort) -> Self {
        Self { effort, ..self }
    }

    /// Which groups of measures to take. The report has nothing of the others.
    #[must_use]
    pub fn groups(self, groups: impl IntoIterator<Item = Group>) -> Self {
        Self { groups: groups.into_iter().collect(), ..self }
    }

    /// How many leases to hold at once when their cost is measured.
    #[must_use]
    pub fn leases(self, leases: usize) -> Self {
        Self { leases, ..self }
    }
}

/// How long and how often.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) effort: Effort,
    /// Rounds of the measures inside this process. Each round visits every store, so that what the machine does
    /// beside hits all of them alike.
    pub(crate) rounds: u32,
    /// How long such a measure takes in a round.
    pub(crate) slice: Duration,
    /// Rounds of the measures with worker processes.
    pub(crate) process_rounds: u32,
    pub(crate) process_slice: Duration,
    /// What is measured.
    pub(crate) groups: BTreeSet<Group>,
    pub(crate) leases: usize,
    pub(crate) lease_ttl: Duration,
    /// What is held and waited for, for the cost of it at the server.
    pub(crate) cost: Sizes,
}

/// How many locks are held for their cost at the server, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub(crate) locks: usize,
    pub(crate) ttl: Duration,
    /// How long the servers are watched without either, with locks, and with waiters.
    pub(crate) idle: Duration,
    pub(crate) held: Duration,
    pub(crate) awaited: Duration,
}

impl Plan {
    /// How long the leases last that nothing else is asked of: a worker that is killed leaves its lock behind for so long.
    pub(crate) const TTL: Duration = Duration::from_secs(10);
    /// Keys that are used side by side.
    pub(crate) const KEYS: usize = 64;
    /// Numbers of keys that show how the rate grows with them, beside [`KEYS`](Self::KEYS).
    pub(crate) const BY_KEYS: [usize; 4] = [1, 4, 16, 256];
    /// What is added to each round trip, one after the other.
    pub(crate) const DELAYS: [Duration; 4] =
        [Duration::from_micros(200), Duration::from_millis(1), Duration::from_millis(5), Duration::from_millis(20)];
    /// How many locks are held at once when their cost at the server is measured, if as many leases may be held at all; and how long each
    /// of them lasts.
    pub(crate) const LOCKS: usize = 1000;
    pub(crate) const COST_TTL: Duration = Duration::from_secs(3);
    /// How long the servers are watched when there is nothing to do. Redis looks at what its clients have in use once a second.
    pub(crate) const COST_IDLE: Duration = Duration::from_secs(2);
    /// How many holders are killed, and how many are frozen; and how long their leases last.
    pub(crate) const HOLDERS: u32 = 3;
    pub(crate) const TAKEOVER_TTL: Duration = Duration::from_secs(3);
    /// How many times processes add one to a number, all together; and how long the work takes between reading and writing.
    /// Without a lock, whoever else comes in that time is lost.
    pub(crate) const UPDATES: u64 = 100;
    pub(crate) const UPDATE_TAKES: Duration = Duration::from_millis(1);
    /// Clients that wait for one lock at the same time.
    pub(crate) const WAITERS: usize = 20;
    /// The limit of the semaphore of which a permit is taken.
    pub(crate) const PERMITS: NonZeroU32 = NonZeroU32::new(1000).unwrap();
    /// Tasks that fight for the hot lock in one process.
    pub(crate) const TASKS: usize = 16;
    /// Processes that fight for the hot lock, and tasks in each of them.
    pub(crate) const PROCESSES: usize = 4;
    pub(crate) const TASKS_EACH: usize = 4;

    pub(crate) fn new(options: Options) -> Self {
        let millis = Duration::from_millis;
        let Options { effort, groups, leases } = options;
        let cost = |cycles: u32, awaited| Sizes {
            locks: leases.min(Self::LOCKS),
            ttl: Self::COST_TTL,
            idle: Self::COST_IDLE,
            // Each lock is renewed once in a third of its ttl, give or take a tenth.
            held: Self::COST_TTL * 11 / 30 * cycles,
            awaited,
        };
        match effort {
            Effort::Quick => Self {
                effort,
                rounds: 2,
                slice: millis(350),
                process_rounds: 1,
                process_slice: millis(1200),
                groups,
                leases,
                lease_ttl: millis(6_000),
                cost: cost(1, millis(1_500)),
            },
            Effort::Thorough => Self {
                effort,
                rounds: 4,
                slice: millis(800),
                process_rounds: 3,
                process_slice: millis(1500),
                groups,
                leases,
                lease_ttl: millis(30_000),
                // Waiters that are woken ask once in 5 s all the same.
                cost: cost(2, millis(5_200)),
            },
        }
    }

    /// Whether a measure is taken at all.
    pub(crate) fn takes(&self, step: Step) -> bool {
        self.groups.contains(&step.group())
    }

    /// How often a measure is taken on each store.
    pub(crate) fn rounds_of(&self, step: Step) -> u32 {
        match step {
            Step::RoundTrip | Step::Pair | Step::ManyKeys | Step::HandedOver | Step::NotHandedOver => self.rounds,
            Step::ByKeys | Step::Kinds | Step::Delay => self.rounds / 2,
            Step::Processes | Step::HandOff => self.process_rounds,
            Step::Takeover | Step::Leases | Step::Cost | Step::Faults | Step::Compliance => 1,
        }
    }

    /// About how long a measure takes in one round on one store: for the progress bar, and to tell the user.
    pub(crate) fn about(&self, step: Step) -> Duration {
        let millis = Duration::from_millis;
        match step {
            Step::RoundTrip => self.slice / 3,
            Step::Pair | Step::ManyKeys | Step::HandedOver | Step::NotHandedOver => self.slice + self.slice / 8,
            Step::ByKeys => (self.short_slice() + self.short_slice() / 8) * 4,
            Step::Kinds => (self.short_slice() + self.short_slice() / 8) * 4,
            Step::Processes => self.process_slice + self.process_slice / 8 + millis(200),
            // The last fifth is in order.
            Step::HandOff => self.process_slice * 5 / 4 + self.process_slice / 8 + millis(200),
            // A ttl; of a session it is more.
            Step::Takeover => Self::TAKEOVER_TTL + millis(1_500),
            Step::Delay => Self::DELAYS.into_iter().map(|delay| self.delay_slice(delay) * 9 / 8).sum(),
            // Taking and releasing them, and one cycle of renewals.
            Step::Leases => millis(u64::try_from(self.leases).unwrap_or(u64::MAX) / 5) + self.lease_ttl * 11 / 30,
            // Connecting, taking and releasing the locks, and what the waiters settle down in.
            Step::Cost => self.cost.idle * 2 + self.cost.held + self.cost.awaited + millis(2_500),
            // Three faults at once, for a ttl and what comes before and after it; of a session it is more. Then a server is started anew.
            Step::Faults => Self::TAKEOVER_TTL * 2 + millis(12_000),
            Step::Compliance => millis(20_000),
        }
    }

    /// About how long the comparison takes, in which these measures have the machine for themselves, store by store.
    pub(crate) fn about_in_all(&self, alone: impl Iterator<Item = Step>) -> Duration {
        let taken = alone.filter(|step| self.takes(*step));
        let alone = taken.map(|step| self.about(step) * self.rounds_of(step)).sum::<Duration>();
        if self.takes(Step::Compliance) { alone + self.about(Step::Compliance) } else { alone }
    }

    /// How long each number of keys takes, and each kind of lock.
    pub(crate) fn short_slice(&self) -> Duration {
        self.slice / 3
    }

    /// How long is measured with this delay: enough for two dozen acquisitions and releases that take a round trip each.
    pub(crate) fn delay_slice(&self, delay: Duration) -> Duration {
        (self.slice / 2).max(delay * 2 * 25)
    }

    /// What part of a slice goes by before anything is counted.
    pub(crate) fn warm_up(slice: Duration) -> Duration {
        slice / 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_says_how_long_it_takes() {
        let groups = Group::ALL.into_iter().filter(|group| *group != Group::Compliance);
        let options = Options::default().groups(groups);
        let seconds = |effort, steps: &[Step]| {
            Plan::new(options.clone().effort(effort)).about_in_all(steps.iter().copied()).as_secs()
        };
        // Only private servers take these.
        let in_use: Vec<_> =
            Step::ALONE.into_iter().filter(|step| !matches!(step, Step::Delay | Step::Faults)).collect();
        // The command leaves these out of a quick comparison.
        let quickly: Vec<_> =
            in_use.iter().copied().filter(|step| !matches!(step, Step::Takeover | Step::Cost)).collect();
        let (quick, thorough) = (seconds(Effort::Quick, &quickly), seconds(Effort::Thorough, &in_use));
        assert!((8..=12).contains(&quick), "{quick}");
        assert!((55..=65).contains(&thorough), "{thorough}");
        assert!((8..=12).contains(&seconds(Effort::Quick, &[Step::Cost])));
        assert!((2..=5).contains(&seconds(Effort::Thorough, &[Step::Delay])));
        assert!((15..=20).contains(&seconds(Effort::Thorough, &[Step::Faults])));
        let in_part = seconds(Effort::Thorough, &Step::IN_PART);
        assert!((15..=20).contains(&in_part), "{in_part}");
    }
}
