//! What a worker process is told, and what it answers.

use std::{path::PathBuf, time::Duration};

use lockkit_testkit::history::Event;
use serde::{Deserialize, Serialize};

use crate::{contention::Tally, error::ErrorKind, results::HoldCost};

/// The first order: the whole job. It goes through a pipe, for the URL may have a password in it: arguments and the
/// environment can be read by others.
#[derive(Serialize, Deserialize)]
pub(crate) struct Assignment {
    pub(crate) job: Job,
    /// The URL of the store, if the job needs one.
    pub(crate) store: Option<String>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Job {
    /// Adds one to a counter, again and again: under the lock of the store, or under none without a store.
    Count(Count),
    /// Fights for a lock with several tasks.
    Contend(Contend),
    /// Takes and releases the lock each time that it is told to: `true` for once more, `false` for the end.
    Take { key: String, in_order: bool },
    /// Of a peer: takes the lock when it is told to, and releases it when it is told to once more: `true`, or `false` for the end.
    Give { key: String },
    /// Of a peer: takes and releases the lock for so long each time that it is told to: `true` for once more, `false` for the end.
    Pairs { key: String, slice: Duration },
    /// Holds many leases.
    Hold(Hold),
    /// Holds one lease, and says each time that it is asked whether it believes so: `true` for once more, `false` for the end.
    Keep(Keep),
    /// Fights for a lock with other processes, and tells all that it does and hears; each order is an
    /// [`Order`](super::Order).
    Fight(Fight),
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Count {
    /// The counter.
    pub(crate) file: PathBuf,
    /// How many times to add one.
    pub(crate) times: u64,
    /// The lock's name.
    pub(crate) key: String,
    /// How long the work takes between reading and writing.
    pub(crate) work: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Contend {
    /// The ledger that all processes share.
    pub(crate) file: PathBuf,
    /// The lock's name.
    pub(crate) key: String,
    pub(crate) tasks: usize,
    pub(crate) warm_up: Duration,
    /// How long to count.
    pub(crate) length: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Hold {
    /// What the locks' names start with.
    pub(crate) key: String,
    pub(crate) leases: usize,
    pub(crate) ttl: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Keep {
    /// The lock's name.
    pub(crate) key: String,
    pub(crate) ttl: Duration,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Fight {
    /// What to call the process.
    pub(crate) name: String,
    /// The lock's name.
    pub(crate) key: String,
    pub(crate) ttl: Duration,
}

/// What a worker says.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// It waits for the next order.
    Ready,
    /// When it got the lock, in nanoseconds of the clock that all processes share.
    Took {
        at: u64,
    },
    /// When it began to release the lock, on the same clock. (A peer may have another one than lockkit, for peers are compared with
    /// themselves alone.)
    Gave {
        at: u64,
    },
    /// How many nanoseconds each acquisition took, and each release.
    Paired {
        acquire: Vec<u64>,
        release: Vec<u64>,
    },
    /// Whether it believes that it holds the lock.
    Believes {
        held: bool,
    },
    /// What it did or heard, of [`Job::Fight`].
    Saw(Event),
    /// The end of all jobs that are told when to end.
    Finished,
    /// The end of [`Job::Count`], and when that was.
    Counted {
        at: u64,
    },
    /// The end of [`Job::Contend`].
    Contended(Tally),
    /// The end of [`Job::Hold`].
    Held(HoldCost),
    Failed {
        kind: ErrorKind,
        message: String,
    },
}
