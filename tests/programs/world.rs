//! What the tasks of a running program share: the processes, and what is known of each lock.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit::{
    Error, ErrorKind, Locker, Owner,
    store::{KeyState, unpoisoned},
};
use lockkit_testkit::history::Recorder;
use tokio::{
    runtime::Handle,
    task::JoinHandle,
    time::{Instant, timeout_at},
};

use crate::program::{KEYS, Program};

/// What a machine that does ten other things may add to the time of a program.
const ROOM: Duration = Duration::from_secs(30);

/// A running program.
pub(crate) struct World {
    pub(crate) program: Program,
    pub(crate) processes: Vec<Process>,
    pub(crate) runtimes: [Handle; 2],
    pub(crate) terms: Terms,
    /// The beginning of all its locks' names, for it is not alone on its servers.
    prefix: String,
    /// When all must be over.
    ends: Instant,
    tasks: Mutex<Vec<JoinHandle<()>>>,
    keys: Mutex<[Key; KEYS]>,
    complaint: Mutex<Option<String>>,
}

/// What depends on the store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    /// Whether it serves in the order of asking.
    pub(crate) fifo: bool,
    /// How long a short lease lasts, in milliseconds.
    pub(crate) short: u64,
}

/// A process: a `Locker` with a client of the store.
pub(crate) struct Process {
    pub(crate) locker: Locker,
    pub(crate) owners: Vec<Owner>,
    pub(crate) recorder: Recorder,
    closing: AtomicBool,
    closed: AtomicBool,
}

/// What is known of a lock.
#[derive(Clone, Copy, Debug, Default)]
struct Key {
    /// Those who ask for it or hold it.
    parties: usize,
    /// How many have come so far.
    came: u64,
    /// Something was left to the background that may go on.
    unclear: bool,
}

/// That a lock was free, and nobody else had come, when somebody asked for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Free(Option<u64>);

impl Process {
    pub(crate) fn new(locker: Locker, recorder: Recorder, owners: usize) -> Self {
        let owners = (0..owners).map(|_| locker.owner()).collect();
        Self { locker, owners, recorder, closing: AtomicBool::new(false), closed: AtomicBool::new(false) }
    }

    pub(crate) async fn shutdown(&self, within: Duration) -> lockkit::Result<()> {
        self.closing.store(true, Ordering::SeqCst);
        self.locker.shutdown(within).await?;
        self.closed.store(true, Ordering::SeqCst);
        Ok(())
    }

    /// Whether a shutdown has begun.
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::SeqCst)
    }

    /// Whether it is over.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }
}

impl World {
    pub(crate) fn new(
        program: Program,
        prefix: String,
        processes: Vec<Process>,
        runtimes: [Handle; 2],
        terms: Terms,
    ) -> Self {
        let ends = Instant::now() + Duration::from_millis(program.bound(terms.short)) + ROOM;
        Self {
            program,
            processes,
            runtimes,
            terms,
            prefix,
            ends,
            tasks: Mutex::default(),
            keys: Mutex::default(),
            complaint: Mutex::default(),
        }
    }

    pub(crate) fn name(&self, key: usize) -> String {
        format!("{}{key}", self.prefix)
    }

    /// Runs another task of the program on one of its runtimes.
    pub(crate) fn spawn(self: &Arc<Self>, runtime: usize, task: impl Future<Output = ()> + Send + 'static) {
        let task = self.runtimes[runtime].spawn(task);
        unpoisoned(&self.tasks).push(task);
    }

    /// Waits until all tasks have ended, also those that others began.
    pub(crate) async fn ended(&self) {
        loop {
            let Some(task) = unpoisoned(&self.tasks).pop() else { return };
            match self.bounded(task).await {
                Some(Err(error)) if error.is_panic() => self.complain(format!("a task panicked: {error}")),
                Some(_) => {}
                None => self.complain("the program does not end".to_owned()),
            }
        }
    }

    /// `None` if the time of the program is over.
    pub(crate) async fn bounded<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        timeout_at(self.ends, work).await.ok()
    }

    pub(crate) fn time_left(&self) -> Duration {
        self.ends.saturating_duration_since(Instant::now())
    }

    pub(crate) fn complain(&self, what: String) {
        unpoisoned(&self.complaint).get_or_insert(what);
    }

    pub(crate) fn complaint(&self) -> Option<String> {
        unpoisoned(&self.complaint).clone()
    }

    /// Somebody asks for a lock.
    pub(crate) fn comes(&self, key: usize) -> Free {
        let mut keys = unpoisoned(&self.keys);
        let key = &mut keys[key];
        key.came += 1;
        key.parties += 1;
        Free((key.parties == 1 && !key.unclear).then_some(key.came))
    }

    /// Whether it was free all the while, and so must have been granted.
    pub(crate) fn was_free(&self, key: usize, free: Free) -> bool {
        free.0 == Some(unpoisoned(&self.keys)[key].came)
    }

    /// Somebody has nothing to do with a lock any more; unless `unclear`, nothing of it is under way.
    pub(crate) fn goes(&self, key: usize, unclear: bool) {
        let mut keys = unpoisoned(&self.keys);
        keys[key].parties -= 1;
        keys[key].unclear |= unclear;
    }

    /// Where nothing is broken, errors have their reasons.
    pub(crate) fn judge(&self, what: &str, key: usize, process: &Process, error: &Error) {
        let is_explained = match error.kind() {
            ErrorKind::Closed => process.is_closing(),
            ErrorKind::Lost => self.program.may_lose(key),
            ErrorKind::Unexpected => false,
            ErrorKind::TimedOut => self.program.is_short(key),
            _ => self.program.runtime_ends.is_some(),
        };
        if !is_explained {
            self.complain(format!("{what} of lock {key} failed for nothing: {error}"));
        }
    }

    /// What a guard that holds a lock must find in the store.
    pub(crate) fn must_show(&self, key: usize, token: lockkit::Token, states: &[KeyState]) {
        let is_shown = |state: &KeyState| state.holders.iter().any(|holder| holder.token == Some(token));
        if !states.iter().any(is_shown) {
            self.complain(format!("lock {key} is believed to be held, and the store shows {states:?}"));
        }
    }
}
