//! The classic experiment: read a number, add one, write it back.

use std::time::Duration;

use lockkit::{Clock, Lock, Locker, SystemClock};

use super::{Answer, Count, Orders, TAKEN_WITHIN};
use crate::{
    error::{Error, Result},
    ledger::{FileLedger, Ledger},
    plan::Plan,
};

pub(super) async fn run(job: Count, store: Option<&str>, mut orders: Orders) -> Result<Answer> {
    let ledger = FileLedger::open(&job.file).map_err(|error| Error::system("open the counter", &error))?;
    let lock = match store {
        None => None,
        Some(url) => {
            // That somebody is kept from its processor is no reason to end.
            let store = lockkit::open(url).await?;
            let locker = Locker::shared_builder(store).patience(TAKEN_WITHIN).build();
            super::warm_up(&locker, &job.key).await?;
            Some(locker.lock(&job.key).ttl(Plan::TTL))
        }
    };
    orders.start().await?;
    for _ in 0..job.times {
        add_one(lock.as_ref(), &ledger, job.work).await?;
    }
    Ok(Answer::Counted { at: SystemClock.now().as_nanos() })
}

/// Adds one, under the lock if there is one.
pub(crate) async fn add_one(lock: Option<&Lock>, ledger: &impl Ledger, work: Duration) -> Result<()> {
    let guard = match lock {
        Some(lock) => Some(lock.acquire().await?),
        None => None,
    };
    read_work_write(ledger, work).await?;
    if let Some(guard) = guard {
        let _ = guard.release().await?;
    }
    Ok(())
}

async fn read_work_write(ledger: &impl Ledger, work: Duration) -> Result<()> {
    let failed = |error: std::io::Error| Error::system("read or write the counter", &error);
    let (entry, _) = ledger.read().map_err(failed)?.next(0);
    // Real work takes time between reading and writing, and on a machine with one processor another process could
    // not come in between if this one never paused.
    if work.is_zero() {
        std::thread::yield_now();
    } else {
        tokio::time::sleep(work).await;
    }
    ledger.write(entry).map_err(failed)
}
