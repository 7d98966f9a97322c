//! Gates: being woken by the release of a hot lock.
//!
//! A table can't wake anybody, so whoever waits asks again and again. For a lock that changes hands all the time this is
//! slow: its next holder finds out milliseconds late, or never, if the last one is there again before. But a server has
//! named locks (`GET_LOCK`) that do wake, first come, first served, at the price of a connection for as long as one is
//! had or waited for. So whoever finds a lock held lines up at its **gate**, a named lock; who has passed the gate takes
//! the row, and the gate is opened for the next when the row was released.
//!
//! **A gate decides nothing.** Who holds the lock is in the row. Not everybody comes through the gate (who finds the row
//! free does not, nor who gets no connection), and who passed it may find the row held. It is a bell with a queue. A
//! wait at a gate ends after a second, so that a process that stands still in it holds up nobody for long, and
//! when no connection can be had the poller does it all.

use std::{
    collections::HashMap,
    fmt::Write,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{LockKey, Token};
use tokio::{
    runtime::Handle,
    time::{Instant, sleep_until},
};

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::{Lane, Pool},
        raw::LONGEST_WAIT,
    },
    wire::{
        error,
        row::column,
        statements::{self, Statement},
    },
};

/// For how long after the last sign of company a lock is taken through its gate at once.
const HOT: Duration = Duration::from_millis(100);

/// For how long a gate that was passed is kept for the next attempt, when the row was held all the same.
const LINGER: Duration = Duration::from_millis(500);

/// A process that takes a lock again and again asks no more often than this whether somebody stands at the gate.
const ASKED: Duration = Duration::from_millis(5);

/// So many locks are remembered, and then those that are cold are forgotten, but not all the time.
const REMEMBERED: usize = 1024;

/// The gates of a store.
pub(crate) struct Gates {
    table: String,
    timeout: Duration,
    /// Whether the server, or something before it, has refused what gates need. Then this store does without: each refusal
    /// costs a connection.
    refused: AtomicBool,
    locks: Mutex<Locks>,
}

struct Locks {
    known: HashMap<LockKey, Lock>,
    cleared: Instant,
}

/// What is known of a lock's gate.
struct Lock {
    state: State,
    /// The last sign of company.
    contended: Option<Instant>,
    /// When this process released it last, and when it last asked whether somebody stands at the gate.
    released: Option<Instant>,
    asked: Instant,
}

enum State {
    /// Nobody of this store has to do with it.
    Away,
    /// Somebody of this store lines up, or tries the row.
    Busy,
    /// Passed, but the row was held. The next attempt has it, or else it is opened at that moment.
    Passed(Gate, Instant),
    /// Passed, and the row was taken by the claim with this token.
    Held(Gate, Token),
}

/// A gate that was passed. Dropping it hangs up, which opens it.
pub(crate) struct Gate {
    name: String,
    timeout: Duration,
    connection: Option<Connection>,
}

/// The turn of this store's only task at a gate; dropping it without a word says that the task is gone.
pub(crate) struct Turn<'a> {
    gates: &'a Arc<Gates>,
    key: &'a LockKey,
    gate: Option<Gate>,
    done: bool,
}

/// What [`Turn::pass`] led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    Yes,
    /// Others were served for all of that time.
    NotYet,
    /// It can't be waited for.
    No,
}

impl Gates {
    pub(crate) fn new(table: &str, timeout: Duration) -> Self {
        Self {
            table: table.to_owned(),
            timeout,
            refused: AtomicBool::new(false),
            locks: Mutex::new(Locks { known: HashMap::new(), cleared: Instant::now() }),
        }
    }

    /// The turn at the gate of a lock, unless another task of this store has it, or there are no gates.
    pub(crate) fn turn<'a>(self: &'a Arc<Self>, key: &'a LockKey) -> Option<Turn<'a>> {
        if self.refused.load(Ordering::Relaxed) {
            return None;
        }
        let mut locks = self.locks();
        let lock = locks.get_or_make(key)?;
        let gate = match std::mem::replace(&mut lock.state, State::Busy) {
            State::Away => None,
            State::Passed(gate, _) => Some(gate),
            other @ (State::Busy | State::Held(..)) => {
                lock.state = other;
                return None;
            }
        };
        Some(Turn { gates: self, key, gate, done: false })
    }

    /// The gate behind a claim that is being released, or is lost. To be [opened](open) once the row is free;
    /// dropping it opens it too.
    pub(crate) fn behind(&self, key: &LockKey, token: &Token) -> Option<Gate> {
        let mut locks = self.locks();
        let lock = locks.get_or_make(key)?;
        lock.released = Some(Instant::now());
        match &lock.state {
            State::Held(_, holder) if holder == token => match std::mem::replace(&mut lock.state, State::Away) {
                State::Held(gate, _) => Some(gate),
                _ => None,
            },
            _ => None,
        }
    }

    /// What the server says to a question about gates, a number if all is well; `None` if nothing is known.
    async fn ask(&self, connection: &mut Connection, statement: Statement<'_>, name: &str) -> Option<i64> {
        match connection.numbered_rows(|question| statement.bind(question).bind(name)).await {
            Ok(rows) => column::<Option<i64>>(rows.first()?, 1).ok().flatten(),
            Err(failed) => {
                let is_for_good = error::is_refusal(&failed) && !failed.is_retryable();
                self.refused.fetch_or(is_for_good, Ordering::Relaxed);
                None
            }
        }
    }

    /// Opens a gate that nobody came back to.
    fn close_passed(&self, key: &LockKey, until: Instant) {
        let mut locks = self.locks();
        let Some(lock) = locks.known.get_mut(key) else { return };
        if matches!(lock.state, State::Passed(_, at) if at == until)
            && let State::Passed(gate, _) = std::mem::replace(&mut lock.state, State::Away)
        {
            drop(locks);
            gate.open();
        }
    }

    fn locks(&self) -> MutexGuard<'_, Locks> {
        self.locks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name of a lock's gate: they are common to all databases of a server, and have 64 characters at most. Two locks
    /// with one gate wake each other now and then, that is all.
    fn name(&self, key: &LockKey) -> String {
        // FNV-1a, 64 bits: draft-eastlake-fnv.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for byte in self.table.bytes().chain([0]).chain(key.as_str().bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        let mut name = String::from("lockkit:");
        // Writing to a string can't fail.
        _ = write!(name, "{hash:016x}");
        name
    }
}

impl Locks {
    /// `None` if too many are known already.
    fn get_or_make(&mut self, key: &LockKey) -> Option<&mut Lock> {
        if self.known.len() >= REMEMBERED && self.cleared.elapsed() > HOT {
            self.known.retain(|_, lock| !matches!(lock.state, State::Away) || lock.is_hot());
            self.cleared = Instant::now();
        }
        if self.known.len() >= REMEMBERED {
            return self.known.get_mut(key);
        }
        Some(self.known.entry(key.clone()).or_insert_with(Lock::new))
    }
}

impl Lock {
    fn new() -> Self {
        Self { state: State::Away, contended: None, released: None, asked: Instant::now() }
    }

    fn is_hot(&self) -> bool {
        self.contended.is_some_and(|at| at.elapsed() < HOT)
    }
}

impl Turn<'_> {
    /// Whether the lock changes hands so often that the gate comes first.
    pub(crate) fn is_hot(&self) -> bool {
        self.gates.locks().known.get(self.key).is_some_and(Lock::is_hot)
    }

    /// Whether the gate was passed already.
    pub(crate) fn is_passed(&self) -> bool {
        self.gate.is_some()
    }

    /// Takes note that others want the lock, or have it.
    pub(crate) fn note_company(&self) {
        if let Some(lock) = self.gates.locks().known.get_mut(self.key) {
            lock.contended = Some(Instant::now());
        }
    }

    /// Whether it is time to ask if somebody stands at the gate: the lock is being taken in a loop.
    pub(crate) fn should_ask(&self) -> bool {
        let mut locks = self.gates.locks();
        let Some(lock) = locks.known.get_mut(self.key) else { return false };
        let loops = lock.released.is_some_and(|at| at.elapsed() < ASKED);
        let ask = loops && lock.asked.elapsed() >= ASKED;
        if ask {
            lock.asked = Instant::now();
        }
        ask
    }

    /// Whether somebody stands at the gate, or passed it; not if it can't be told.
    pub(crate) async fn is_wanted(&self, connection: &mut Connection) -> bool {
        let name = self.gates.name(self.key);
        self.gates.ask(connection, statements::gate_is_used(), &name).await.is_some()
    }

    /// Lines up at the gate and waits, for a second at most.
    ///
    /// # Cancellation
    /// The connection is hung up when the server has answered, which takes a second at most and opens the gate.
    pub(crate) async fn pass(&mut self, pool: &Pool) -> Passed {
        if self.gate.is_some() {
            return Passed::Yes;
        }
        let bound = Bound::new(LONGEST_WAIT + self.gates.timeout);
        let Some(mut connection) = pool.spare_connection(Lane::NamedLock, bound).await else { return Passed::No };
        let name = self.gates.name(self.key);
        match self.gates.ask(&mut connection, statements::pass_gate(), &name).await {
            Some(1) => {
                self.gate = Some(Gate { name, timeout: self.gates.timeout, connection: Some(connection) });
                Passed::Yes
            }
            Some(_) => Passed::NotYet,
            None => Passed::No,
        }
    }

    /// The row was taken: the gate stays closed until it is released.
    pub(crate) fn took(mut self, token: Token) {
        let gate = self.gate.take();
        self.end(gate.map_or(State::Away, |gate| State::Held(gate, token)));
    }

    /// The row is another's: the gate, if it was passed, is kept for a moment for the next attempt.
    pub(crate) fn missed(mut self) {
        let Some(gate) = self.gate.take() else { return };
        let (gates, key, until) = (Arc::clone(self.gates), self.key.clone(), Instant::now() + LINGER);
        self.end(State::Passed(gate, until));
        tokio::spawn(async move {
            sleep_until(until).await;
            gates.close_passed(&key, until);
        });
    }

    fn end(&mut self, state: State) {
        self.done = true;
        let before = self.gates.locks().known.get_mut(self.key).map(|lock| std::mem::replace(&mut lock.state, state));
        drop(before);
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.end(State::Away);
        }
    }
}

/// Opens a gate, if there is one.
pub(crate) fn open(gate: Option<Gate>) {
    if let Some(gate) = gate {
        gate.open();
    }
}

impl Gate {
    /// Opens it, in the background. Without a runtime it hangs up.
    fn open(mut self) {
        let Ok(runtime) = Handle::try_current() else { return };
        runtime.spawn(async move {
            let Some(connection) = &mut self.connection else { return };
            connection.set_bound(Bound::new(self.timeout));
            // Only a connection that is known to have no lock any more may serve others.
            let open = |question| statements::open_gate().bind(question).bind(&self.name);
            if connection.numbered_rows(open).await.is_ok() {
                drop(self.connection.take());
            }
        });
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.hang_up();
        }
    }
}
