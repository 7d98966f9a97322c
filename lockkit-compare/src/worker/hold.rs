//! Many leases held and renewed by one process: what they cost in memory and processor time.

use std::{
    fs,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit::{Clock, Event, Guard, Locker, Observer, SystemClock, store::unpoisoned};
use rustix::time::{ClockId, clock_gettime};
use tokio::task::JoinSet;

use super::{Answer, Hold, Orders};
use crate::{
    error::{Error, Result},
    results::HoldCost,
};

/// How many acquisitions are under way at once.
pub(crate) const ABREAST: usize = 64;

/// How long a lease may be asked for in vain. Taking them is not measured, and a quorum with a short node timeout may have to
/// be asked several times by a process that is kept from its processor.
pub(crate) const TAKEN_WITHIN: Duration = Duration::from_secs(30);

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
        *unpoisoned(&self.0)
    }
}

impl Observer for Watcher {
    fn event(&self, event: &Event<'_>) {
        let mut life = unpoisoned(&self.0);
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

pub(super) async fn run(job: Hold, store: Option<&str>, mut orders: Orders) -> Result<Answer> {
    let watcher = Watcher::default();
    let store = lockkit::open(super::url(store)?).await?;
    let locker = Locker::shared_builder(store).patience(TAKEN_WITHIN).observer(watcher.clone()).build();
    // As many acquisitions at once as later, so that buffers have their size before the memory is first read.
    for round in 0..4 {
        drop(acquire_all(&locker, &format!("{}/warm-up/{round}", job.key), ABREAST, job.ttl).await?);
    }
    orders.start().await?;
    let before = resident_bytes()?;
    let guards = acquire_all(&locker, &job.key, job.leases, job.ttl).await?;
    // Each lease is renewed once in a third of its ttl, give or take a tenth.
    let (asked, cpu, life) = (SystemClock.now(), cpu_time(), watcher.life());
    tokio::time::sleep(job.ttl * 11 / 30).await;
    let (window, used, since) = (SystemClock.now().since(asked), cpu_time().saturating_sub(cpu), watcher.life());
    let held = guards.iter().filter(|guard| guard.is_held()).count();
    let after = resident_bytes()?;
    drop(guards);
    locker.shutdown(Duration::from_secs(30)).await?;
    Ok(Answer::Held(HoldCost {
        bytes: after.saturating_sub(before),
        window,
        cpu: used,
        renewed: since.renewed - life.renewed,
        failed: since.failed,
        lost: u64::try_from(job.leases - held).unwrap_or(u64::MAX),
        least_margin: since.least_margin,
    }))
}

/// Takes this many locks, a good many of them at once.
pub(crate) async fn acquire_all(locker: &Locker, key: &str, leases: usize, ttl: Duration) -> Result<Vec<Guard>> {
    let (mut guards, mut under_way) = (Vec::with_capacity(leases), JoinSet::new());
    for number in 0..leases {
        if under_way.len() >= ABREAST {
            guards.extend(one_of(&mut under_way).await?);
        }
        let lock = locker.lock(format!("{key}/{number}")).ttl(ttl);
        under_way.spawn(async move { lock.acquire().await });
    }
    while let Some(guard) = one_of(&mut under_way).await? {
        guards.push(guard);
    }
    Ok(guards)
}

async fn one_of(under_way: &mut JoinSet<lockkit::Result<Guard>>) -> Result<Option<Guard>> {
    match under_way.join_next().await {
        None => Ok(None),
        Some(Ok(guard)) => Ok(Some(guard?)),
        Some(Err(error)) => Err(error.into()),
    }
}

/// The memory of this process that is in RAM, from `/proc`.
fn resident_bytes() -> Result<u64> {
    let status =
        fs::read_to_string("/proc/self/status").map_err(|error| Error::system("read /proc/self/status", &error))?;
    kibibytes(&status, "VmRSS:").map(|kib| kib * 1024).ok_or_else(|| Error::internal("/proc/self/status has no VmRSS"))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_resident_memory_is_read() {
        assert_eq!(kibibytes("VmPeak:\t 9 kB\nVmRSS:\t   512 kB\n", "VmRSS:"), Some(512));
        assert!(resident_bytes().expect("linux") > 0);
    }
}
