//! The worker processes of `race` and `compare`: this program again, with a verb that is not in the help.
//!
//! A worker gets its store by `LOCKKIT_STORE`, its orders line by line on stdin, and answers on stdout, where its
//! last line is its report as JSON. `crew.rs` is the other end. When stdin closes, whoever gave the orders is gone,
//! and the worker goes too.

mod contend;
mod count;
mod hold;
mod take;

use std::{
    io::{self, Write},
    time::Duration,
};

use clap::{Args as ClapArgs, Subcommand};
use lockkit::{Clock, Locker, Moment, SystemClock};
use serde_json::Value;
use tokio::sync::mpsc;

use crate::exit::{Failure, Outcome, USAGE};

/// The verb, which is for this program alone.
pub(crate) const VERB: &str = "__worker";

/// The environment variable with the URL of the store: an argument would show its password to all users.
pub(crate) const STORE: &str = "LOCKKIT_STORE";

/// How long a lease of a worker lasts: a worker that is killed leaves its lock behind for so long.
pub(crate) const TTL: Duration = Duration::from_secs(10);

/// One worker process of `race` or `compare`.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(subcommand)]
    job: Job,
}

#[derive(Debug, Subcommand)]
enum Job {
    /// Adds one to a counter, again and again.
    Count(count::CountArgs),
    /// Fights for a lock with several tasks.
    Contend(contend::ContendArgs),
    /// Waits for a lock whenever told to.
    Take(take::TakeArgs),
    /// Holds many leases.
    Hold(hold::HoldArgs),
}

/// Does one job and reports.
pub(crate) fn run(args: Args) -> Outcome {
    // One thread: there are several of these processes, on a machine that also runs the store.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::system("start the runtime", &error))?;
    let orders = Orders::listen();
    let report = runtime.block_on(async {
        match args.job {
            Job::Count(args) => count::run(args, orders).await,
            Job::Contend(args) => contend::run(args, orders).await,
            Job::Take(args) => take::run(args, orders).await,
            Job::Hold(args) => hold::run(args, orders).await,
        }
    })?;
    say(&report)?;
    Ok(0)
}

/// A locker on the store that the environment names.
async fn connect() -> Result<Locker, Failure> {
    let url = std::env::var(STORE).map_err(|_| Failure::new(USAGE, format!("a worker needs {STORE}")))?;
    Ok(lockkit::connect(&url).await?)
}

/// Takes and releases a lock that nobody else wants, so that connections are up and scripts are loaded.
async fn warm_up(locker: &Locker, key: &str) -> Result<(), Failure> {
    let guard = locker.lock(format!("{key}/warm-up/{}", std::process::id())).ttl(TTL).acquire().await?;
    let _ = guard.release().await?;
    Ok(())
}

/// Prints one line to whoever gives the orders.
fn say(line: &Value) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    writeln!(out, "{line}").and_then(|()| out.flush()).map_err(|error| Failure::system("write the report", &error))
}

/// The orders that come on stdin.
#[derive(Debug)]
struct Orders(mpsc::UnboundedReceiver<String>);

impl Orders {
    fn listen() -> Self {
        let (send, orders) = mpsc::unbounded_channel();
        // A thread of its own, for it has to notice the end of the input whatever the runtime is busy with.
        std::thread::spawn(move || {
            for line in io::stdin().lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
            std::process::exit(0);
        });
        Self(orders)
    }

    async fn next(&mut self) -> Option<String> {
        self.0.recv().await
    }

    /// Says that everything is prepared and waits for the starting shot: the moment, on the clock that all processes
    /// of a machine share, at which all workers start.
    async fn start(&mut self) -> Result<Moment, Failure> {
        say(&Value::from("ready"))?;
        let order = self.next().await.unwrap_or_default();
        let nanos = order.parse().map_err(|_| Failure::new(USAGE, format!("not a moment: {order:?}")))?;
        let start = Moment::from_nanos(nanos);
        let left = start.since(SystemClock.now());
        tokio::time::sleep(left.saturating_sub(Duration::from_millis(2))).await;
        // A timer is a millisecond late at worst, which is long compared with what follows.
        while SystemClock.now() < start {
            std::hint::spin_loop();
        }
        Ok(start)
    }
}
