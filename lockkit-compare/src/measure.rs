//! The measures that one process can take alone, each a function of its own.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit::{Clock, HandOver, Lock, LockStore, Locker, SystemClock, store::unpoisoned};
use tokio::task::JoinSet;

use crate::{
    contention::{Window, contend},
    error::{Error, Result},
    exclusive::Exclusive,
    ledger::{Ledger, MemoryLedger},
    plan::Plan,
    results::Contest,
    stats::{Latencies, jain},
};

/// The time of one question to the store that changes nothing.
pub(crate) async fn round_trip(locker: &Locker, key: &str, slice: Duration) -> Result<Latencies> {
    let lock = locker.lock(format!("{key}/round-trip"));
    // Long enough for a median, which is all that is made of it.
    timed(slice / 3, || async { lock.inspect().await.map(drop) }).await
}

/// Acquisitions and releases, together and apart.
#[derive(Debug)]
pub(crate) struct Pairs {
    pub(crate) pair: Latencies,
    pub(crate) acquire: Latencies,
    pub(crate) release: Latencies,
}

impl Pairs {
    fn new() -> Self {
        Self { pair: Latencies::new(), acquire: Latencies::new(), release: Latencies::new() }
    }

    fn record(&mut self, acquire: Duration, release: Duration) {
        self.pair.record(acquire + release);
        self.acquire.record(acquire);
        self.release.record(release);
    }
}

/// The time of an acquisition and its release, with nobody else there.
pub(crate) async fn pair(lock: Lock, slice: Duration) -> Result<Pairs> {
    let mut pairs = Pairs::new();
    each_pair(&lock.ttl(Plan::TTL), slice, |acquire, release| pairs.record(acquire, release)).await?;
    Ok(pairs)
}

/// Takes a lock and gives it back, again and again; after a warm-up, `record` is told how long each of the two took.
pub(crate) async fn each_pair<X: Exclusive>(
    lock: &X,
    slice: Duration,
    mut record: impl FnMut(Duration, Duration),
) -> Result<()> {
    let window = Window::after(SystemClock.now(), Plan::warm_up(slice), slice);
    loop {
        let sent = SystemClock.now();
        if sent >= window.until {
            return Ok(());
        }
        let held = lock.take().await?;
        let acquired = SystemClock.now();
        X::give_back(held).await?;
        let released = SystemClock.now();
        if sent >= window.from {
            record(acquired.since(sent), released.since(acquired));
        }
        tokio::task::consume_budget().await;
    }
}

/// Many keys, with one task for each: pairs per second, and how long each of them took meanwhile.
pub(crate) async fn many_keys(locker: &Locker, key: &str, keys: usize, slice: Duration) -> Result<(f64, Pairs)> {
    // One for all: a histogram takes a quarter of a megabyte.
    let pairs = Arc::new(Mutex::new(Pairs::new()));
    let mut tasks = JoinSet::new();
    for number in 0..keys {
        let (lock, pairs) = (locker.lock(format!("{key}/many/{number}")).ttl(Plan::TTL), Arc::clone(&pairs));
        tasks.spawn(async move {
            each_pair(&lock, slice, |acquire, release| unpoisoned(&pairs).record(acquire, release)).await
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    let pairs = std::mem::replace(&mut *unpoisoned(&pairs), Pairs::new());
    Ok((pairs.pair.len() as f64 / slice.as_secs_f64(), pairs))
}

/// Tasks of one process that want the same lock, with or without hand-over from one to the next.
pub(crate) async fn hot_lock(
    store: &Arc<dyn LockStore>,
    key: &str,
    slice: Duration,
    rule: HandOver,
) -> Result<Contest> {
    let locker = Locker::shared_builder(Arc::clone(store)).hand_over(rule).build();
    let lock = locker.lock(format!("{key}/hot")).ttl(Plan::TTL);
    let ledger = Arc::new(MemoryLedger::default());
    let window = Window::after(SystemClock.now(), Plan::warm_up(slice), slice);
    let tally = contend(&lock, Plan::TASKS, window, Arc::clone(&ledger)).await?;
    let entered = ledger.read().map_err(|error| Error::system("read the counter", &error))?.count;
    Ok(Contest {
        per_second: tally.counts.iter().sum::<u64>() as f64 / window.length().as_secs_f64(),
        fairness: jain(&tally.counts),
        violations: tally.out_of_turn + tally.total.abs_diff(entered),
    })
}

/// Does something again and again and times each go, after a warm-up.
async fn timed<F>(slice: Duration, go: impl Fn() -> F) -> Result<Latencies>
where
    F: Future<Output = lockkit::Result<()>>,
{
    let window = Window::after(SystemClock.now(), Plan::warm_up(slice), slice);
    let mut latencies = Latencies::new();
    loop {
        let sent = SystemClock.now();
        if sent >= window.until {
            return Ok(latencies);
        }
        go().await?;
        if sent >= window.from {
            latencies.record(SystemClock.now().since(sent));
        }
        tokio::task::consume_budget().await;
    }
}
