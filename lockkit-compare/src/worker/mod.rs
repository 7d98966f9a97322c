//! The worker processes of [`race`](crate::race()) and [`Comparison`](crate::Comparison): a program that calls [`run`].
//!
//! A worker reads its orders from stdin, a line of JSON each, and answers on stdout in the same way. When stdin closes, the
//! process that gave the orders is gone, and the worker ends too.

mod contend;
mod count;
mod fight;
mod hold;
mod keep;
mod protocol;
#[cfg(feature = "peers")]
mod rslock;
mod take;

use std::{
    io::{self, Write},
    time::Duration,
};

use lockkit::{Clock, Locker, Moment, SystemClock};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;

use crate::{
    error::{Error, ErrorKind, Result},
    plan::Plan,
};
#[cfg(test)]
pub(crate) use count::add_one;
#[cfg(test)]
pub(crate) use fight::Fighter;
pub(crate) use fight::{Order, TICK};
pub(crate) use hold::{ABREAST, TAKEN_WITHIN, acquire_all};
pub(crate) use protocol::{Answer, Assignment, Contend, Count, Fight, Hold, Job, Keep};

/// What the URL begins with if the locks are to be those of `rslock`.
pub(crate) const RSLOCK_SCHEME: &str = "rslock:";

/// Does one job for the process that started this one, and returns when it is done. The program has nothing else to do: its
/// stdin and stdout are used up, and it ends when stdin does.
///
/// # Errors
/// Those of the store and of the system. The other process has been told them.
pub fn run() -> Result<()> {
    let mut orders = Orders::listen();
    let done = orders.first().and_then(|assignment: Assignment| {
        let runtime = match assignment.job {
            // As the process has that measures the stores alone.
            Job::Pairs { .. } => tokio::runtime::Builder::new_multi_thread().enable_all().build(),
            // One thread: there are several of these processes, on a machine that also runs the store.
            _ => tokio::runtime::Builder::new_current_thread().enable_all().build(),
        };
        let runtime = runtime.map_err(|error| Error::system("start the runtime", &error))?;
        runtime.block_on(work(assignment, orders))
    });
    match done {
        Ok(answer) => say(&answer),
        Err(error) => {
            say(&Answer::Failed { kind: error.kind(), message: error.to_string() })?;
            Err(error)
        }
    }
}

async fn work(assignment: Assignment, orders: Orders) -> Result<Answer> {
    let store = assignment.store.as_deref();
    #[cfg(feature = "peers")]
    if let Some(server) = store.and_then(|url| url.strip_prefix(RSLOCK_SCHEME)) {
        return rslock::work(assignment.job, server, orders).await;
    }
    match assignment.job {
        Job::Count(job) => count::run(job, store, orders).await,
        Job::Contend(job) => contend::run(job, store, orders).await,
        Job::Take { key, in_order } => take::run(&key, in_order, store, orders).await,
        Job::Give { .. } | Job::Pairs { .. } => Err(Error::internal("only a peer does this job")),
        Job::Hold(job) => hold::run(job, store, orders).await,
        Job::Keep(job) => keep::run(job, store, orders).await,
        Job::Fight(job) => fight::run(job, store, orders).await,
    }
}

fn url(store: Option<&str>) -> Result<&str> {
    store.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "the job needs a store"))
}

async fn connect(store: Option<&str>) -> Result<Locker> {
    Ok(lockkit::connect(url(store)?).await?)
}

/// Takes and releases a lock that nobody else wants, so that connections are up and scripts are loaded.
async fn warm_up(locker: &Locker, key: &str) -> Result<()> {
    let guard = locker.lock(format!("{key}/warm-up/{}", std::process::id())).ttl(Plan::TTL).acquire().await?;
    let _ = guard.release().await?;
    Ok(())
}

/// Prints one line to the process that gives the orders.
fn say(answer: &Answer) -> Result<()> {
    let write = || -> io::Result<()> {
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, answer)?;
        out.write_all(b"\n")?;
        out.flush()
    };
    write().map_err(|error| Error::system("write the report", &error))
}

/// The orders that come on stdin.
#[derive(Debug)]
struct Orders(mpsc::UnboundedReceiver<String>);

impl Orders {
    fn listen() -> Self {
        let (send, orders) = mpsc::unbounded_channel();
        // A thread of its own, for it has to notice the end of the input whatever the runtime is busy with.
        std::thread::spawn(move || {
            for line in io::stdin().lines().map_while(io::Result::ok) {
                if send.send(line).is_err() {
                    return;
                }
            }
            std::process::exit(0);
        });
        Self(orders)
    }

    /// The first order, for whom there is no runtime yet.
    fn first<T: DeserializeOwned>(&mut self) -> Result<T> {
        Self::understood(self.0.blocking_recv())
    }

    async fn next<T: DeserializeOwned>(&mut self) -> Result<T> {
        Self::understood(self.0.recv().await)
    }

    fn understood<T: DeserializeOwned>(order: Option<String>) -> Result<T> {
        let order = order.unwrap_or_default();
        // Neither the order nor the parser's words for it are repeated: a password may be in them.
        serde_json::from_str(&order).map_err(|_| Error::internal("a worker does not understand an order"))
    }

    /// Says that everything is prepared and waits for the starting shot: the moment, on the clock that all processes
    /// of a machine share, at which all workers start.
    async fn start(&mut self) -> Result<Moment> {
        say(&Answer::Ready)?;
        let start = Moment::from_nanos(self.next().await?);
        let left = start.since(SystemClock.now());
        tokio::time::sleep(left.saturating_sub(Duration::from_millis(2))).await;
        // A timer is a millisecond late at worst, which is long compared with what follows.
        while SystemClock.now() < start {
            std::hint::spin_loop();
        }
        Ok(start)
    }
}
