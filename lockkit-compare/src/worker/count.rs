//! The classic experiment: read a number, add one, write it back.

use lockkit::{Clock, Lock, SystemClock};

use super::{Answer, Count, Orders, TTL, Under};
use crate::{
    error::{Error, Result},
    ledger::{FileLedger, Ledger},
};

pub(super) async fn run(job: Count, store: Option<&str>, mut orders: Orders) -> Result<Answer> {
    let ledger = FileLedger::open(&job.file).map_err(|error| Error::system("open the counter", &error))?;
    let lock = match job.under {
        Under::Nothing => None,
        Under::Store => {
            let locker = super::connect(store).await?;
            super::warm_up(&locker, &job.key).await?;
            Some(locker.lock(&job.key).ttl(TTL))
        }
    };
    orders.start().await?;
    for _ in 0..job.times {
        match &lock {
            None => add_one(&ledger)?,
            Some(lock) => add_one_under(lock, &ledger).await?,
        }
    }
    Ok(Answer::Counted { at: SystemClock.now().as_nanos() })
}

async fn add_one_under(lock: &Lock, ledger: &FileLedger) -> Result<()> {
    let guard = lock.acquire().await?;
    add_one(ledger)?;
    let _ = guard.release().await?;
    Ok(())
}

fn add_one(ledger: &FileLedger) -> Result<()> {
    let failed = |error: std::io::Error| Error::system("read or write the counter", &error);
    let (entry, _) = ledger.read().map_err(failed)?.next(0);
    // Real work takes time between reading and writing, and on a machine with one processor another process could
    // not come in between if this one never paused.
    std::thread::yield_now();
    ledger.write(entry).map_err(failed)
}
