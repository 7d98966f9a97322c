//! The classic experiment: read a number, add one, write it back.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use lockkit::{Clock, Lock, SystemClock};
use serde_json::{Value, json};

use super::{Orders, TTL};
use crate::{
    exit::Failure,
    ledger::{FileLedger, Ledger},
};

#[derive(Debug, Args)]
pub(super) struct CountArgs {
    /// The counter.
    #[arg(long)]
    file: PathBuf,
    /// How many times to add one.
    #[arg(long)]
    times: u64,
    /// The lock's name.
    #[arg(long)]
    key: String,
    /// What protects the counter.
    #[arg(long)]
    under: Under,
}

/// What protects a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Under {
    /// Nothing.
    Nothing,
    /// The lock of the store.
    Store,
}

pub(super) async fn run(args: CountArgs, mut orders: Orders) -> Result<Value, Failure> {
    let ledger = FileLedger::open(&args.file).map_err(|error| Failure::system("open the counter", &error))?;
    let lock = match args.under {
        Under::Nothing => None,
        Under::Store => {
            let locker = super::connect().await?;
            super::warm_up(&locker, &args.key).await?;
            Some(locker.lock(&args.key).ttl(TTL))
        }
    };
    orders.start().await?;
    for _ in 0..args.times {
        match &lock {
            None => add_one(&ledger)?,
            Some(lock) => add_one_under(lock, &ledger).await?,
        }
    }
    Ok(json!({ "done": SystemClock.now().as_nanos() }))
}

async fn add_one_under(lock: &Lock, ledger: &FileLedger) -> Result<(), Failure> {
    let guard = lock.acquire().await?;
    add_one(ledger)?;
    let _ = guard.release().await?;
    Ok(())
}

fn add_one(ledger: &FileLedger) -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::system("read or write the counter", &error);
    let (entry, _) = ledger.read().map_err(failed)?.next(0);
    // Real work takes time between reading and writing, and on a machine with one processor another process could
    // not come in between if this one never paused.
    std::thread::yield_now();
    ledger.write(entry).map_err(failed)
}
