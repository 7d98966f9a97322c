//! The measures that take several processes.

use std::{path::Path, time::Duration};

use lockkit::{Clock, Lock, Locker, Moment, SystemClock};
use serde_json::Value;

use super::{
    plan::Plan,
    results::{Contest, Held},
    stats::{Latencies, jain},
};
use crate::{
    crew::{Worker, number, start_together},
    exit::{Failure, SOFTWARE},
    ledger::{FileLedger, Ledger},
    worker::TTL,
};

/// How long a waiter is left alone after it is known to wait: it subscribes, and asks once more after that.
const SETTLE: Duration = Duration::from_millis(3);
/// The same for a store that can't tell who waits.
const SETTLE_BLINDLY: Duration = Duration::from_millis(50);
/// Fewer hand-offs than this are no sample.
const LEAST_HAND_OFFS: u32 = 5;

/// Processes with several tasks each that want the same lock. Each holder makes an entry in a file that they share.
pub(super) async fn contest(url: &str, key: &str, slice: Duration, dir: &Path) -> Result<Contest, Failure> {
    let failed = |error| Failure::system("make a counter", &error);
    let path = tempfile::Builder::new().prefix("contest-").tempdir_in(dir).map_err(failed)?;
    let file = path.path().join("ledger");
    let ledger = FileLedger::create(&file).map_err(failed)?;
    let args = words(&format!(
        "contend --key {key}/processes --tasks {} --warm-up {} --millis {}",
        Plan::TASKS_EACH,
        Plan::warm_up(slice).as_millis(),
        slice.as_millis(),
    ));
    let args = [args, vec!["--file".into(), file.display().to_string()]].concat();
    let mut workers = (0..Plan::PROCESSES).map(|_| Worker::spawn(&args, Some(url))).collect::<Result<Vec<_>, _>>()?;
    let (_, reports) = start_together(&mut workers).await?;
    sum_up(&reports, slice, ledger.read().map_err(failed)?.count)
}

/// What the workers report together, and whether it fits what the ledger says.
fn sum_up(reports: &[Value], slice: Duration, entered: u64) -> Result<Contest, Failure> {
    let (mut shares, mut total, mut out_of_turn) = (Vec::new(), 0, 0);
    for report in reports {
        shares.push(report["counts"].as_array().into_iter().flatten().filter_map(Value::as_u64).sum());
        total += number(report, "total")?;
        out_of_turn += number(report, "out_of_turn")?;
    }
    Ok(Contest {
        per_second: shares.iter().sum::<u64>() as f64 / slice.as_secs_f64(),
        fairness: jain(&shares),
        violations: out_of_turn + total.abs_diff(entered),
    })
}

/// Hand-offs, and round trips to measure them by.
#[derive(Debug)]
pub(super) struct HandOff {
    pub(super) latencies: Latencies,
    pub(super) idle_round_trips: Latencies,
}

/// The time from the call that releases a lock in this process to the moment when a waiter in another has it.
pub(super) async fn hand_off(url: &str, locker: &Locker, key: &str, slice: Duration) -> Result<HandOff, Failure> {
    let lock = locker.lock(format!("{key}/hand-off")).ttl(TTL);
    let mut other = Worker::spawn(&words(&format!("take --key {key}/hand-off")), Some(url))?;
    other.hear().await?;
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
    other.tell("").await?;
    other.hear().await?;
    Ok(sum)
}

async fn hand_off_once(lock: &Lock, other: &mut Worker) -> Result<Duration, Failure> {
    let guard = lock.acquire().await?;
    other.tell("take").await?;
    await_waiter(lock).await?;
    let sent = SystemClock.now();
    let _ = guard.release().await?;
    let got = number(&other.hear().await?, "got")?;
    Ok(Moment::from_nanos(got).since(sent))
}

/// One question to the store after everybody was idle for as long as before a hand-off.
async fn idle_round_trip(lock: &Lock) -> Result<Duration, Failure> {
    tokio::time::sleep(SETTLE).await;
    let sent = SystemClock.now();
    lock.inspect().await?;
    Ok(SystemClock.now().since(sent))
}

/// Returns when somebody waits for the lock.
async fn await_waiter(lock: &Lock) -> Result<(), Failure> {
    let give_up = SystemClock.now() + TTL / 2;
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
    Err(Failure::new(SOFTWARE, "the other process never came to wait for the lock"))
}

/// Many leases that one process holds and renews.
pub(super) async fn leases(url: &str, key: &str, plan: &Plan) -> Result<Held, Failure> {
    let (leases, ttl) = (plan.leases, plan.lease_ttl.as_millis());
    let args = words(&format!("hold --key {key}/held --leases {leases} --ttl {ttl}"));
    let mut workers = [Worker::spawn(&args, Some(url))?];
    let (_, reports) = start_together(&mut workers).await?;
    let report = &reports[0];
    Ok(Held {
        leases,
        bytes: number(report, "bytes")?,
        window: Duration::from_nanos(number(report, "window_nanos")?),
        cpu: Duration::from_nanos(number(report, "cpu_nanos")?),
        renewed: number(report, "renewed")?,
        failed: number(report, "failed")?,
        lost: number(report, "lost")?,
        least_margin: report["least_margin_nanos"].as_u64().map(Duration::from_nanos),
        ttl: plan.lease_ttl,
    })
}

/// Arguments that have no spaces in them.
fn words(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_ledger_that_does_not_fit_the_reports_is_a_violation() {
        let reports = [
            json!({"counts": [2, 2], "total": 5, "out_of_turn": 0}),
            json!({"counts": [4, 0], "total": 4, "out_of_turn": 1}),
        ];
        let contest = sum_up(&reports, Duration::from_secs(2), 9).expect("whole reports");
        assert_eq!((contest.per_second, contest.fairness, contest.violations), (4.0, Some(1.0), 1));
        assert_eq!(sum_up(&reports, Duration::from_secs(2), 7).expect("whole reports").violations, 3);
        assert!(sum_up(&[json!({})], Duration::from_secs(1), 0).is_err());
    }
}
