//! Looks for a program that fails, and shrinks it.

use std::{
    env,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant, SystemTime},
};

use lockkit::store::unpoisoned;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use crate::{
    kept,
    program::{Program, programs},
    run::{Seen, run},
    stores::Running,
};

pub(crate) const SEED: &str = "LOCKKIT_PROGRAMS_SEED";
const SECONDS: &str = "LOCKKIT_PROGRAMS_SECONDS";
const ONE: &str = "LOCKKIT_PROGRAM";

/// For how long to look on each store, unless the environment says otherwise.
const DEFAULT: Duration = Duration::from_secs(12);
/// How many programs run side by side on a store.
const LANES: usize = 4;
/// How often a program is run again when it was shrunk, or is to be repeated: tasks go their ways in another order each time.
const AGAIN: u32 = 10;
const SHRINK_FOR: Duration = Duration::from_secs(60);

/// Which programs to run.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    pub(crate) seed: u64,
    time: Duration,
    /// No more than these.
    programs: u64,
    /// This one alone.
    one: Option<u64>,
    shrink: bool,
}

impl Limits {
    /// # Errors
    /// Which variable can't be read.
    pub(crate) fn from_env() -> Result<Self, String> {
        let any = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |since| since.as_secs());
        let mut limits =
            Self { seed: number(SEED)?.unwrap_or(any), time: DEFAULT, programs: u64::MAX, one: None, shrink: true };
        if let Some(seconds) = number(SECONDS)? {
            limits.time = Duration::from_secs(seconds);
        }
        if let Ok(text) = env::var(ONE) {
            let (seed, one) = text.split_once('/').ok_or(format!("{ONE} is SEED/NUMBER"))?;
            let parse = |text: &str| text.parse().map_err(|_| format!("{ONE} is SEED/NUMBER, not {text}"));
            limits.seed = parse(seed)?;
            limits.one = Some(parse(one)?);
        }
        Ok(limits)
    }

    /// So many programs, however long they take, and the same each time.
    pub(crate) fn fixed(&self, programs: u64) -> Self {
        Self { seed: 7, time: Duration::MAX, programs, one: None, shrink: false }
    }
}

fn number(name: &str) -> Result<Option<u64>, String> {
    let Ok(text) = env::var(name) else { return Ok(None) };
    text.parse().map(Some).map_err(|_| format!("{name} is a whole number, not {text:?}"))
}

/// Runs programs until one fails or the time is over.
///
/// # Errors
/// The rule that was broken, the program as far as it could be shrunk, and how to run it again.
pub(crate) fn search(name: &str, store: &Running, limits: &Limits) -> Result<(), String> {
    let seen = std::sync::Mutex::new(Seen::default());
    let found = std::sync::Mutex::new(None);
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    if limits.shrink && limits.one.is_none() {
        for program in kept::programs() {
            unpoisoned(&seen)
                .add(again(store, &program).map_err(|broken| format!("a kept program: {program:?}\n{broken}"))?);
        }
    }
    let begun = Instant::now();
    let lane = || {
        while !stop.load(Ordering::Relaxed) && begun.elapsed() < limits.time {
            let number = limits.one.unwrap_or_else(|| next.fetch_add(1, Ordering::Relaxed));
            if number >= limits.programs {
                return;
            }
            if let Err(broken) = attempt(store, limits, number, &seen) {
                unpoisoned(&found).get_or_insert(broken);
                stop.store(true, Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(lane);
        }
    });
    println!("{name}: {:?}", unpoisoned(&seen));
    let found = unpoisoned(&found).take();
    found.map_or(Ok(()), Err)
}

/// One program; shrinks it if it fails.
fn attempt(store: &Running, limits: &Limits, number: u64, seen: &std::sync::Mutex<Seen>) -> Result<(), String> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&limits.seed.to_le_bytes());
    bytes[8..16].copy_from_slice(&number.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let max_shrink_iters = if limits.shrink { 1000 } else { 0 };
    let max_shrink_time = u32::try_from(SHRINK_FOR.as_millis()).unwrap_or(u32::MAX);
    let config = Config { cases: 1, failure_persistence: None, max_shrink_iters, max_shrink_time, ..Config::default() };
    let failed = AtomicBool::new(false);
    let judged = TestRunner::new_with_rng(config, rng).run(&programs(), |program| {
        let ran = if failed.load(Ordering::Relaxed) { again(store, &program) } else { run(&opener(store), &program) };
        match ran {
            Ok(of) => unpoisoned(seen).add(of),
            Err(broken) => {
                failed.store(true, Ordering::Relaxed);
                return Err(TestCaseError::fail(broken));
            }
        }
        Ok(())
    });
    judged.map_err(|broken| format!("{broken}\nrepeat it with {ONE}={}/{number}", limits.seed))
}

/// Runs a program several times.
fn again(store: &Running, program: &Program) -> Result<Seen, String> {
    let mut seen = Seen::default();
    for _ in 0..AGAIN {
        seen.add(run(&opener(store), program)?);
    }
    Ok(seen)
}

fn opener(store: &Running) -> impl lockkit_testkit::AsyncOpen + Clone + use<> {
    let store = store.clone();
    move || store.open()
}

impl Seen {
    fn add(&mut self, other: Self) {
        let Self { programs, grants, nested, handed_over, cancelled, lost } = other;
        self.programs += programs;
        self.grants += grants;
        self.nested += nested;
        self.handed_over += handed_over;
        self.cancelled += cancelled;
        self.lost += lost;
    }
}
