//! The measures that take several processes.

use std::{path::Path, time::Duration};

use lockkit::{Clock, Lock, Locker, Moment, SystemClock};

use crate::{
    contention::Tally,
    error::{Error, Result},
    ledger::{FileLedger, Ledger},
    plan::Plan,
    results::{Contest, Held},
    stats::{Latencies, jain},
    worker::{Answer, Contend, Hold, Job},
    workers::{Worker, WorkerProgram, start_together, unexpected},
};

/// How long a waiter is left alone after it is known to wait: it subscribes, and asks once more after that.
const SETTLE: Duration = Duration::from_millis(3);
/// The same for a store that can't tell who waits.
const SETTLE_BLINDLY: Duration = Duration::from_millis(50);
/// Fewer hand-offs than this are no sample.
pub(crate) const LEAST_HAND_OFFS: u32 = 5;

/// Processes with several tasks each that want the same lock. Each holder makes an entry in a file that they share.
pub(crate) async fn contest(
    program: &WorkerProgram,
    url: &str,
    key: &str,
    slice: Duration,
    dir: &Path,
) -> Result<Contest> {
    let failed = |error| Error::system("make a counter", &error);
    let path = tempfile::Builder::new().prefix("contest-").tempdir_in(dir).map_err(failed)?;
    let file = path.path().join("ledger");
    let ledger = FileLedger::create(&file).map_err(failed)?;
    let mut workers = Vec::new();
    for _ in 0..Plan::PROCESSES {
        let job = Contend {
            file: file.clone(),
            key: format!("{key}/processes"),
            tasks: Plan::TASKS_EACH,
            warm_up: Plan::warm_up(slice),
            length: slice,
        };
        workers.push(Worker::start(program, Job::Contend(job), Some(url)).await?);
    }
    let (_, answers) = start_together(workers).await?;
    let tallies = answers.into_iter().map(|answer| match answer {
        Answer::Contended(tally) => Ok(tally),
        other => Err(unexpected(&other)),
    });
    Ok(sum_up(&tallies.collect::<Result<Vec<_>>>()?, slice, ledger.read().map_err(failed)?.count))
}

/// What the workers report together, and whether it fits what the ledger says.
pub(crate) fn sum_up(tallies: &[Tally], slice: Duration, entered: u64) -> Contest {
    let shares: Vec<u64> = tallies.iter().map(|tally| tally.counts.iter().sum()).collect();
    let total: u64 = tallies.iter().map(|tally| tally.total).sum();
    let out_of_turn: u64 = tallies.iter().map(|tally| tally.out_of_turn).sum();
    Contest {
        per_second: shares.iter().sum::<u64>() as f64 / slice.as_secs_f64(),
        fairness: jain(&shares),
        violations: out_of_turn + total.abs_diff(entered),
    }
}

/// Hand-offs, and round trips to measure them by.
#[derive(Debug)]
pub(crate) struct HandOff {
    pub(crate) latencies: Latencies,
    pub(crate) idle_round_trips: Latencies,
}

/// The time from the call that releases a lock in this process to the moment when a waiter in another has it, in the order of arrival or
/// in none.
pub(crate) async fn hand_off(
    program: &WorkerProgram,
    url: &str,
    locker: &Locker,
    (key, in_order): (&str, bool),
    slice: Duration,
) -> Result<HandOff> {
    let key = format!("{key}/{}", if in_order { "hand-off-in-order" } else { "hand-off" });
    let lock = locker.lock(&key).ttl(Plan::TTL);
    let lock = if in_order { lock.fifo() } else { lock };
    let job = Job::Take { key, in_order };
    let mut other = Worker::start(program, job, Some(url)).await?;
    other.hear_soon().await?;
    let mut sum = HandOff { latencies: Latencies::new(), idle_round_trips: Latencies::new() };
    // The first goes are warm-up: the waiter subscribes for the first time.
    for _ in 0..3 {
        hand_off_once(&lock, &mut other).await?;
    }
    let (until, mut done) = (SystemClock.now() + slice, 0);
    while done < LEAST_HAND_OFFS || SystemClock.now() < until {
        sum.latencies.record(hand_off_once(&lock, &mut other).await?);
        sum.idle_round_trips.record(idle_round_trip(&lock).await?);
        done += 1;
    }
    other.tell(&false).await?;
    other.hear_soon().await?;
    Ok(sum)
}

async fn hand_off_once(lock: &Lock, other: &mut Worker) -> Result<Duration> {
    let guard = lock.acquire().await?;
    other.tell(&true).await?;
    await_waiter(lock).await?;
    let sent = SystemClock.now();
    let _ = guard.release().await?;
    match other.hear_soon().await? {
        Answer::Took { at } => Ok(Moment::from_nanos(at).since(sent)),
        answer => Err(unexpected(&answer)),
    }
}

/// One question to the store after everybody was idle for as long as before a hand-off.
async fn idle_round_trip(lock: &Lock) -> Result<Duration> {
    tokio::time::sleep(SETTLE).await;
    let sent = SystemClock.now();
    lock.inspect().await?;
    Ok(SystemClock.now().since(sent))
}

/// Returns when somebody waits for the lock.
pub(crate) async fn await_waiter(lock: &Lock) -> Result<()> {
    let give_up = SystemClock.now() + Plan::TTL / 2;
    while SystemClock.now() < give_up {
        match lock.inspect().await?.waiters {
            Some(0) => tokio::time::sleep(Duration::from_millis(1)).await,
            Some(_) => {
                tokio::time::sleep(SETTLE).await;
                return Ok(());
            }
            None => {
                tokio::time::sleep(SETTLE_BLINDLY).await;
                return Ok(());
            }
        }
    }
    Err(Error::internal("the other process never came to wait for the lock"))
}

/// Many leases that one process holds and renews.
pub(crate) async fn leases(program: &WorkerProgram, url: &str, key: &str, plan: &Plan) -> Result<Held> {
    let (leases, ttl) = (plan.leases, plan.lease_ttl);
    let job = Job::Hold(Hold { key: format!("{key}/held"), leases, ttl });
    let workers = vec![Worker::start(program, job, Some(url)).await?];
    let (_, answers) = start_together(workers).await?;
    match &answers[..] {
        [Answer::Held(cost)] => Ok(Held { leases, ttl, cost: *cost }),
        others => Err(others.first().map_or_else(|| Error::internal("no worker answered"), unexpected)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ledger_that_does_not_fit_the_reports_is_a_violation() {
        let tallies = [
            Tally { counts: vec![2, 2], total: 5, out_of_turn: 0 },
            Tally { counts: vec![4, 0], total: 4, out_of_turn: 1 },
        ];
        let contest = sum_up(&tallies, Duration::from_secs(2), 9);
        assert_eq!((contest.per_second, contest.fairness, contest.violations), (4.0, Some(1.0), 1));
        assert_eq!(sum_up(&tallies, Duration::from_secs(2), 7).violations, 3);
    }
}
