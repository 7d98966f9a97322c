//! Several tasks of several processes fight for one lock.

use std::{path::PathBuf, sync::Arc, time::Duration};

use clap::Args;
use serde_json::{Value, json};

use super::{Orders, TTL};
use crate::{
    contention::{Window, contend},
    exit::Failure,
    ledger::FileLedger,
};

#[derive(Debug, Args)]
pub(super) struct ContendArgs {
    /// The ledger that all processes share.
    #[arg(long)]
    file: PathBuf,
    /// The lock's name.
    #[arg(long)]
    key: String,
    #[arg(long)]
    tasks: usize,
    /// How long to warm up, in milliseconds.
    #[arg(long)]
    warm_up: u64,
    /// How long to count, in milliseconds.
    #[arg(long)]
    millis: u64,
}

pub(super) async fn run(args: ContendArgs, mut orders: Orders) -> Result<Value, Failure> {
    let ledger = FileLedger::open(&args.file).map_err(|error| Failure::system("open the counter", &error))?;
    let locker = super::connect().await?;
    super::warm_up(&locker, &args.key).await?;
    let start = orders.start().await?;
    let window = Window::after(start, Duration::from_millis(args.warm_up), Duration::from_millis(args.millis));
    let tally = contend(&locker.lock(&args.key).ttl(TTL), args.tasks, window, Arc::new(ledger)).await?;
    Ok(json!({ "counts": tally.counts, "total": tally.total, "out_of_turn": tally.out_of_turn }))
}
