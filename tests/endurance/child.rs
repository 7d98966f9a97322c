//! The process that holds the leases and runs the tasks. Each line of its input is a question, or `end`; it answers with a line.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, Write},
    process::ExitCode,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit::{Guard, Lock, Locker, Status, store::unpoisoned};
use lockkit_testkit::BoxError;
use serde::{Deserialize, Serialize};
use tokio::{sync::mpsc, task::JoinSet, time::sleep};

/// The environment variable that makes this program a child, with its [`Orders`] as JSON.
pub(crate) const ORDERS: &str = "LOCKKIT_ENDURANCE_CHILD";

/// Of the leases that are held all the time.
pub(crate) const LONG: Duration = Duration::from_secs(30);
/// Of the locks that the tasks take and release.
pub(crate) const SHORT: Duration = Duration::from_secs(3);
/// For how long a task keeps its lock: all others wait meanwhile. With shorter ones, what a server has written becomes so much
/// that it takes longer than the leases last to read it when it is started again.
const KEPT: Duration = Duration::from_millis(50);
/// How many locks are asked for at a time.
const AT_A_TIME: usize = 16;
/// The last releases, of all leases, may take this long.
const END: Duration = Duration::from_secs(600);

/// The task of a child.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) url: String,
    /// How many leases it holds all the time.
    pub(crate) leases: usize,
    /// How many tasks take and release locks.
    pub(crate) tasks: usize,
    /// How many locks the tasks, of both children, share.
    pub(crate) pages: usize,
}

/// How a child is.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Report {
    /// How often the leases that are held all the time were lost, by reason.
    pub(crate) lost: BTreeMap<String, usize>,
    /// How often the locks of tasks were lost, by reason.
    pub(crate) lost_by_tasks: BTreeMap<String, usize>,
    /// How many acquisitions ended with an error that may be tried again.
    pub(crate) errors: u64,
    /// For each task, how often it had a lock.
    pub(crate) served: Vec<u64>,
    /// The longest that a task waited since the last report, in milliseconds.
    pub(crate) longest_wait: u64,
    /// Open file descriptors.
    pub(crate) descriptors: usize,
    /// Resident memory, in KiB.
    pub(crate) memory: u64,
    /// Why a task ended that should have gone on.
    pub(crate) broken: Option<String>,
}

/// The counts that the tasks keep.
#[derive(Debug)]
struct Seen {
    served: Vec<AtomicU64>,
    longest_wait: AtomicU64,
    errors: AtomicU64,
    lost: Mutex<BTreeMap<String, usize>>,
    ends: AtomicBool,
}

pub(crate) fn main(orders: &str) -> ExitCode {
    let done = serde_json::from_str(orders).map_err(BoxError::from).and_then(|orders| {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(work(orders))
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("a child failed: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn work(orders: Orders) -> Result<(), BoxError> {
    let locker = Locker::shared_builder(lockkit::open(&orders.url).await?).build();
    let guards = hold(&locker, orders.leases).await?;
    let seen = Arc::new(Seen {
        served: (0..orders.tasks).map(|_| AtomicU64::new(0)).collect(),
        longest_wait: AtomicU64::new(0),
        errors: AtomicU64::new(0),
        lost: Mutex::default(),
        ends: AtomicBool::new(false),
    });
    let mut tasks = JoinSet::new();
    for task in 0..orders.tasks {
        tasks.spawn(use_a_lock(locker.clone(), format!("page/{}", task % orders.pages), task, Arc::clone(&seen)));
    }
    let mut questions = lines();
    let mut broken = None;
    while questions.recv().await.is_some_and(|line| line != "end") {
        while let Some(ended) = tasks.try_join_next() {
            if let Err(error) = ended.map_err(BoxError::from).and_then(|ended| ended) {
                broken = Some(error.to_string());
            }
        }
        answer(&report(&guards, &seen, broken.clone()))?;
    }
    seen.ends.store(true, Ordering::Relaxed);
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    drop(guards);
    locker.shutdown(END).await?;
    answer(&report(&[], &seen, broken))
}

/// Takes all leases, some at a time.
async fn hold(locker: &Locker, leases: usize) -> Result<Vec<Guard>, BoxError> {
    let mut taking = JoinSet::new();
    for first in 0..AT_A_TIME {
        let locker = locker.clone();
        taking.spawn(async move {
            let mut guards = Vec::new();
            for number in (first..leases).step_by(AT_A_TIME) {
                guards.push(take(&locker.lock(format!("held/{number}")).ttl(LONG)).await?);
            }
            Ok::<_, BoxError>(guards)
        });
    }
    let mut guards = Vec::with_capacity(leases);
    while let Some(taken) = taking.join_next().await {
        guards.extend(taken??);
    }
    Ok(guards)
}

/// Takes a lock, however long the store is busy with the others.
async fn take(lock: &Lock) -> Result<Guard, BoxError> {
    loop {
        match lock.acquire().await {
            Err(error) if error.is_retryable() => sleep(Duration::from_millis(10)).await,
            taken => return Ok(taken?),
        }
    }
}

/// Takes a lock, keeps it for a moment, and releases it, again and again.
async fn use_a_lock(locker: Locker, name: String, task: usize, seen: Arc<Seen>) -> Result<(), BoxError> {
    let lock = locker.lock(name).ttl(SHORT);
    while !seen.ends.load(Ordering::Relaxed) {
        let start = Instant::now();
        let guard = match lock.acquire().await {
            Ok(guard) => guard,
            Err(error) if error.is_retryable() => {
                seen.errors.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(10)).await;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        seen.longest_wait.fetch_max(start.elapsed().as_millis() as u64, Ordering::Relaxed);
        sleep(KEPT).await;
        if let Status::Lost(reason) = guard.status() {
            let mut lost = unpoisoned(&seen.lost);
            *lost.entry(reason.to_string()).or_default() += 1;
        }
        // It may have ended, which its status tells.
        _ = guard.release().await;
        seen.served[task].fetch_add(1, Ordering::Relaxed);
    }
    Ok(())
}

fn report(guards: &[Guard], seen: &Seen, broken: Option<String>) -> Report {
    let mut lost = BTreeMap::new();
    for guard in guards {
        if let Status::Lost(reason) = guard.status() {
            *lost.entry(reason.to_string()).or_default() += 1;
        }
    }
    Report {
        lost,
        lost_by_tasks: unpoisoned(&seen.lost).clone(),
        errors: seen.errors.load(Ordering::Relaxed),
        served: seen.served.iter().map(|served| served.load(Ordering::Relaxed)).collect(),
        longest_wait: seen.longest_wait.swap(0, Ordering::Relaxed),
        descriptors: fs::read_dir("/proc/self/fd").map_or(0, Iterator::count),
        memory: resident(),
        broken,
    }
}

/// The resident memory of this process in KiB, of `/proc`.
fn resident() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

fn answer(report: &Report) -> Result<(), BoxError> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{}", serde_json::to_string(report)?)?;
    Ok(out.flush()?)
}

/// The lines of the standard input. Its end is the end of the parent: nobody is left to work for.
fn lines() -> mpsc::UnboundedReceiver<String> {
    let (send, receive) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if send.send(line).is_err() {
                return;
            }
        }
        std::process::exit(2);
    });
    receive
}
