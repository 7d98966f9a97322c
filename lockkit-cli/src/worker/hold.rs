//! Many leases held and renewed by one process: what they cost in memory and processor time.

use std::{
    fs,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use clap::Args;
use lockkit::{Clock, Event, Guard, Locker, Observer, SystemClock};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::Orders;
use crate::exit::{Failure, SOFTWARE};

/// How many acquisitions are under way at once.
const ABREAST: usize = 64;

#[derive(Debug, Args)]
pub(super) struct HoldArgs {
    /// What the locks' names start with.
    #[arg(long)]
    key: String,
    #[arg(long)]
    leases: usize,
    /// The time to live of each lease, in milliseconds.
    #[arg(long)]
    ttl: u64,
}

/// What happened to the leases.
#[derive(Clone, Copy, Debug, Default)]
struct Life {
    renewed: u64,
    failed: u64,
    lost: u64,
    /// The least that was left of a lease when its renewal was answered.
    least_margin: Option<Duration>,
}

#[derive(Clone, Debug, Default)]
struct Watcher(Arc<Mutex<Life>>);

impl Watcher {
    fn life(&self) -> Life {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Observer for Watcher {
    fn event(&self, event: &Event<'_>) {
        let mut life = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Renewed { margin, .. } => {
                life.renewed += 1;
                life.least_margin = Some(life.least_margin.map_or(*margin, |least| least.min(*margin)));
            }
            Event::RenewalFailed { .. } => life.failed += 1,
            Event::Lost { .. } => life.lost += 1,
            _ => {}
        }
    }
}

pub(super) async fn run(args: HoldArgs, mut orders: Orders) -> Result<Value, Failure> {
    let url = std::env::var(super::STORE).unwrap_or_default();
    let watcher = Watcher::default();
    let locker = Locker::shared_builder(lockkit::open(&url).await?).observer(watcher.clone()).build();
    // As many acquisitions at once as later, so that buffers have their size before the memory is first read.
    for round in 0..4 {
        drop(acquire_all(&locker, &format!("{}/warm-up/{round}", args.key), ABREAST, args.ttl).await?);
    }
    orders.start().await?;
    let before = resident_bytes()?;
    let guards = acquire_all(&locker, &args.key, args.leases, args.ttl).await?;
    // Each lease is renewed once in a third of its ttl, give or take a tenth.
    let (asked, cpu, life) = (SystemClock.now(), cpu_time(), watcher.life());
    tokio::time::sleep(Duration::from_millis(args.ttl) * 11 / 30).await;
    let (window, used, since) = (SystemClock.now().since(asked), cpu_time().saturating_sub(cpu), watcher.life());
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    let after = resident_bytes()?;
    drop(guards);
    locker.shutdown(Duration::from_secs(30)).await?;
    Ok(json!({
        "bytes": after.saturating_sub(before),
        "window_nanos": nanos(window),
        "cpu_nanos": nanos(used),
        "renewed": since.renewed - life.renewed,
        "failed": since.failed,
        "lost": args.leases - held,
        "least_margin_nanos": since.least_margin.map(nanos),
    }))
}

async fn acquire_all(locker: &Locker, key: &str, leases: usize, ttl: u64) -> Result<Vec<Guard>, Failure> {
    let (mut guards, mut under_way) = (Vec::with_capacity(leases), JoinSet::new());
    for number in 0..leases {
        if under_way.len() >= ABREAST {
            guards.extend(one_of(&mut under_way).await?);
        }
        let lock = locker.lock(format!("{key}/{number}")).ttl(Duration::from_millis(ttl));
        under_way.spawn(async move { lock.acquire().await });
    }
    while let Some(guard) = one_of(&mut under_way).await? {
        guards.push(guard);
    }
    Ok(guards)
}

async fn one_of(under_way: &mut JoinSet<lockkit::Result<Guard>>) -> Result<Option<Guard>, Failure> {
    match under_way.join_next().await {
        None => Ok(None),
        Some(Ok(guard)) => Ok(Some(guard?)),
        Some(Err(error)) => Err(Failure::new(SOFTWARE, error.to_string())),
    }
}

/// The memory of this process that is in RAM, from `/proc`.
fn resident_bytes() -> Result<u64, Failure> {
    let status =
        fs::read_to_string("/proc/self/status").map_err(|error| Failure::system("read /proc/self/status", &error))?;
    kibibytes(&status, "VmRSS:")
        .map(|kib| kib * 1024)
        .ok_or_else(|| Failure::new(SOFTWARE, "/proc/self/status has no VmRSS"))
}

/// The value of a line such as `VmRSS:    10240 kB`.
fn kibibytes(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    line.split_ascii_whitespace().next()?.parse().ok()
}

/// The processor time that all threads of this process have used.
fn cpu_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resident_memory_is_read() {
        assert_eq!(kibibytes("VmPeak:\t 9 kB\nVmRSS:\t   512 kB\n", "VmRSS:"), Some(512));
        assert!(resident_bytes().expect("linux") > 0);
    }
}
