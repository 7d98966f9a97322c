//! Services that move from one store to another, on real servers: worker processes that use locks all the while, a migrator that
//! is killed, stores that are cut off, and the checker that judges what all of them recorded. `docs/testing.md` describes it.
//!
//! Options after `--` are those of every test. A store that can't be started here is a failure.

mod arena;
mod bad;
mod clients;
mod servers;
#[allow(dead_code, unused_imports, reason = "what only the fault trials use of it")]
#[path = "../faults/storm/mod.rs"]
mod storm;
mod trials;

use std::{env, process::ExitCode, time::Duration};

use lockkit_testkit::BoxError;
use tokio::time::sleep;

use crate::storm::{Orders, work};

/// Tells this program that it is a worker.
pub(crate) const WORKER: &str = "LOCKKIT_MOVING_WORKER";
/// Tells this program that it moves a migration on: the URLs of both stores, and the phase to go to.
pub(crate) const MIGRATOR: &str = "LOCKKIT_MOVING_MIGRATOR";

fn main() -> ExitCode {
    if let Ok(orders) = env::var(WORKER) {
        return ended("a worker", worker(&orders));
    }
    if let Ok(orders) = env::var(MIGRATOR) {
        return ended(
            "a migrator",
            runtime().map_err(BoxError::from).and_then(|on| on.block_on(arena::migrate(&orders))),
        );
    }
    libtest_mimic::run(&lockkit_testkit::arguments(), trials::all()).exit_code()
}

fn worker(orders: &str) -> Result<(), BoxError> {
    let orders: Orders = serde_json::from_str(orders)?;
    runtime()?.block_on(async {
        let store = loop {
            // A worker may be started while a store is cut off.
            match clients::open(&orders.url).await {
                Ok(store) => break store,
                Err(error) if error.is_retryable() => sleep(Duration::from_millis(20)).await,
                Err(error) => return Err(error.into()),
            }
        };
        work(orders, store).await
    })
}

fn ended(who: &str, result: Result<(), BoxError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{who} failed: {error}");
            ExitCode::FAILURE
        }
    }
}

pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()
}
