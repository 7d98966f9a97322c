//! The other process of the hand-off: it waits for the lock and says at what moment it got it.

use clap::Args;
use lockkit::{Clock, SystemClock};
use serde_json::{Value, json};

use super::{Orders, TTL};
use crate::exit::Failure;

#[derive(Debug, Args)]
pub(super) struct TakeArgs {
    /// The lock's name.
    #[arg(long)]
    key: String,
}

/// Takes the lock once for each order, until an empty one comes.
pub(super) async fn run(args: TakeArgs, mut orders: Orders) -> Result<Value, Failure> {
    let locker = super::connect().await?;
    super::warm_up(&locker, &args.key).await?;
    let lock = locker.lock(&args.key).ttl(TTL);
    super::say(&Value::from("ready"))?;
    let mut taken = 0_u64;
    while orders.next().await.is_some_and(|order| !order.is_empty()) {
        let guard = lock.acquire().await?;
        let got = SystemClock.now();
        taken += 1;
        let _ = guard.release().await?;
        super::say(&json!({ "got": got.as_nanos() }))?;
    }
    Ok(json!({ "taken": taken }))
}
