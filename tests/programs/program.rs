//! Small concurrent programs: what they consist of, and how they are made up.
//!
//! Times are in milliseconds, so that what `Debug` prints of a program is almost the program itself.

use proptest::{collection::vec, option, prelude::*};

/// The processes of a program: each has a `Locker` and a client of the store.
pub(crate) const LOCKERS: usize = 2;
/// The owners of each.
pub(crate) const OWNERS: usize = 2;
/// The locks of a program.
pub(crate) const KEYS: usize = 3;
/// A lease that no program comes to the end of.
pub(crate) const LONG: u64 = 20_000;

/// Some tasks side by side.
#[derive(Clone, Debug, Default)]
pub(crate) struct Program {
    pub(crate) tasks: Vec<Task>,
    /// A process that is shut down, and when.
    pub(crate) shutdown: Option<(usize, u64)>,
    /// When the second runtime ends, with all that runs there.
    pub(crate) runtime_ends: Option<u64>,
}

/// The steps of one task, one after the other. It drops the guards that it has in the end.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub(crate) locker: usize,
    /// The first runtime, or the second: the background work of each process runs on the one of its own number.
    pub(crate) runtime: usize,
    pub(crate) steps: Vec<Step>,
}

/// One step. A guard is named by its number among those that the task has, modulo how many these are.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Acquire(Ask),
    /// Acquires the same lock as this guard's once more for its owner, if it has one.
    Nest(usize, Ask),
    /// Asks the guard, and the store as well.
    Look(usize),
    Renew(usize),
    Release(usize),
    /// Gives the release up after so many polls.
    LeaveRelease(usize, u64),
    Drop(usize),
    /// Hands the guard to another task, on that runtime, which keeps it for so long and releases it.
    Give(usize, usize, u64),
    Sleep(u64),
    /// Sleeps for longer than a short lease lasts.
    Outlast,
}

/// An acquisition.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) key: usize,
    pub(crate) owner: Option<usize>,
    /// Whether the lease may end under its holder; otherwise no program comes to the end of it.
    pub(crate) short: bool,
    pub(crate) renew: bool,
    pub(crate) max_hold: Option<u64>,
    /// In the order of asking, where the store can.
    pub(crate) fifo: bool,
    pub(crate) wait: Wait,
    pub(crate) patience: Patience,
}

/// For how long an acquisition is asked to wait.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    Try,
    Within(u64),
    /// For ever: for a bounded time where that could be a deadlock (see `Hand::may_wait_forever`).
    Forever,
}

/// What its caller makes of its future.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    Await,
    /// Drops it after this time.
    DropAfter(u64),
    /// Drops it when it was polled so often.
    DropAtPoll(u64),
    /// Selects on `&mut` of it and a timer, leaves it unpolled for the second time, and goes on with it.
    GoOnAfter(u64, u64),
    /// The same, and drops it.
    DropUnpolled(u64, u64),
}

impl Program {
    /// How long it takes at most if nothing has to wait for the machine: all waits and sleeps one after the other. No wait
    /// for ever is longer than the sleeps of others, for none of them is part of a deadlock.
    pub(crate) fn bound(&self, short: u64) -> u64 {
        let steps = self.tasks.iter().flat_map(|task| &task.steps).map(|step| step.bound(short)).sum::<u64>();
        let all = steps + self.shutdown.map_or(0, |(_, at)| at) + self.runtime_ends.unwrap_or(0);
        // What was under way on the runtime lapses, which is no longer than this, for each lease of a lock one after the other.
        all + self.runtime_ends.map_or(0, |_| self.tasks.len() as u64 * short)
    }

    /// Whether a lease of this lock may end under its holder. Leases are handed over, so that it is the same for all.
    pub(crate) fn may_lose(&self, key: usize) -> bool {
        self.is_short(key) || self.asks(key).any(|ask| ask.max_hold.is_some())
    }

    /// Whether a lease of this lock may be short, and so the time in which the store must answer.
    pub(crate) fn is_short(&self, key: usize) -> bool {
        self.runtime_ends.is_some() || self.asks(key).any(|ask| ask.short)
    }

    fn asks(&self, key: usize) -> impl Iterator<Item = &Ask> {
        self.tasks.iter().flat_map(|task| &task.steps).filter_map(move |step| match step {
            Step::Acquire(ask) if ask.key == key => Some(ask),
            // Whichever lock it comes to be.
            Step::Nest(_, ask) => Some(ask),
            _ => None,
        })
    }
}

impl Step {
    fn bound(&self, short: u64) -> u64 {
        match self {
            Self::Acquire(ask) | Self::Nest(_, ask) => {
                let wait = match ask.wait {
                    Wait::Try => 0,
                    Wait::Within(wait) => wait,
                    Wait::Forever => INSTEAD_OF_FOREVER,
                };
                wait + match ask.patience {
                    Patience::GoOnAfter(polled, unpolled) | Patience::DropUnpolled(polled, unpolled) => {
                        polled + unpolled
                    }
                    _ => 0,
                }
            }
            Self::Sleep(time) | Self::Give(_, _, time) => *time,
            Self::Outlast => short * 5 / 4,
            _ => 0,
        }
    }
}

/// How long to wait where waiting for ever could be a deadlock.
pub(crate) const INSTEAD_OF_FOREVER: u64 = 250;

pub(crate) fn programs() -> impl Strategy<Value = Program> {
    let shutdown = option::weighted(0.15, (0..LOCKERS, 0..200_u64));
    let runtime_ends = option::weighted(0.1, 0..200_u64);
    (vec(task(), 1..6), shutdown, runtime_ends).prop_map(|(tasks, shutdown, runtime_ends)| {
        let mut program = Program { tasks, shutdown, runtime_ends };
        program.shorten();
        program
    })
}

impl Program {
    /// What a runtime leaves behind lapses: soon.
    fn shorten(&mut self) {
        if self.runtime_ends.is_some() {
            for step in self.tasks.iter_mut().flat_map(|task| &mut task.steps) {
                if let Step::Acquire(ask) | Step::Nest(_, ask) = step {
                    ask.short = true;
                }
            }
        }
    }
}

fn task() -> impl Strategy<Value = Task> {
    (0..LOCKERS, prop_oneof![3 => Just(0), 2 => Just(1)], vec(step(), 1..10))
        .prop_map(|(locker, runtime, steps)| Task { locker, runtime, steps })
}

fn step() -> impl Strategy<Value = Step> {
    let guard = 0..4_usize;
    prop_oneof![
        9 => ask().prop_map(Step::Acquire),
        3 => (guard.clone(), ask()).prop_map(|(guard, ask)| Step::Nest(guard, ask)),
        3 => guard.clone().prop_map(Step::Look),
        1 => guard.clone().prop_map(Step::Renew),
        4 => guard.clone().prop_map(Step::Release),
        1 => (guard.clone(), 0..4_u64).prop_map(|(guard, polls)| Step::LeaveRelease(guard, polls)),
        2 => guard.clone().prop_map(Step::Drop),
        2 => (guard, 0..2_usize, 0..60_u64).prop_map(|(guard, runtime, time)| Step::Give(guard, runtime, time)),
        6 => (0..30_u64).prop_map(Step::Sleep),
        1 => Just(Step::Outlast),
    ]
}

fn ask() -> impl Strategy<Value = Ask> {
    let owner = option::weighted(0.4, 0..OWNERS);
    let short = prop::bool::weighted(0.35);
    let max_hold = option::weighted(0.05, 20..100_u64);
    let wait = prop_oneof![2 => Just(Wait::Try), 3 => (1..150_u64).prop_map(Wait::Within), 4 => Just(Wait::Forever)];
    let patience = prop_oneof![
        6 => Just(Patience::Await),
        1 => (0..20_u64).prop_map(Patience::DropAfter),
        2 => (1..7_u64).prop_map(Patience::DropAtPoll),
        2 => (0..10_u64, 0..80_u64).prop_map(|(polled, unpolled)| Patience::GoOnAfter(polled, unpolled)),
        1 => (0..10_u64, 0..80_u64).prop_map(|(polled, unpolled)| Patience::DropUnpolled(polled, unpolled)),
    ];
    (0..KEYS, owner, short, any::<bool>(), max_hold, prop::bool::weighted(0.2), wait, patience).prop_map(
        |(key, owner, short, renew, max_hold, fifo, wait, patience)| Ask {
            key,
            owner,
            short,
            renew,
            max_hold,
            fifo,
            wait,
            patience,
        },
    )
}
