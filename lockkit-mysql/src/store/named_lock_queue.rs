//! Queues on named locks of the server: a waiter is woken by the release of a contended lock.
//!
//! A table can't wake a waiter, so a waiter polls. For a lock that changes hands all the time this is slow: its next holder
//! finds out milliseconds late, or never, if the last holder takes it again before. But a server has named locks
//! (`GET_LOCK`) that wake waiters, first come, first served, at the price of a connection for as long as one is held or
//! waited for. So a client that finds the row locked queues on `GET_LOCK`; the client that gets the named lock takes the
//! row, and releases the named lock when the row was released.
//!
//! **A named lock decides nothing.** The holder of the lock is in the row. Not every client queues (one that finds the row
//! free does not, nor one that gets no connection), and a client that gets the named lock may find the row locked. It is
//! a wake-up with an order. A wait for a named lock ends after a second, so that a process that stands still while it has
//! one holds up nobody for long. When there is no connection to spare, the client polls.

use std::{
    collections::HashMap,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};

use lockkit_core::{
    LockKey, Token,
    store::{Background, unpoisoned},
};
use tokio::{runtime::Handle, sync::watch, time::Instant};

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::{ConnectionClass, Pool},
        raw::LONGEST_WAIT,
    },
    wire::{
        error,
        row::column,
        statements::{self, Statement},
    },
};

/// For how long after the last sign of contention a lock is taken through its named lock at once.
const HOT: Duration = Duration::from_millis(100);

/// For how long a named lock that this store got is kept for its next attempt when another client has the row all the same.
const LINGER: Duration = Duration::from_millis(500);

/// A process that takes a lock again and again asks no more often than this whether others queue on the named lock.
const ASKED: Duration = Duration::from_millis(5);

/// At most this many locks are remembered. Then those without contention are forgotten, at most every [`HOT`].
const REMEMBERED: usize = 1024;

/// The queues of a store.
pub(crate) struct NamedLockQueues {
    table: String,
    timeout: Duration,
    /// Whether the server, or a proxy, has refused `GET_LOCK`. Then this store polls: each refusal costs a connection.
    refused: AtomicBool,
    background: Arc<Background>,
    pub(super) known: Mutex<KnownQueues>,
}

pub(super) struct KnownQueues {
    pub(super) queues: HashMap<LockKey, NamedLockQueue>,
    cleared: Instant,
    /// Until when the tasks sleep that look after the named locks that this store has, if there are any; and what has them look again, or
    /// ends them when it is dropped.
    pub(super) watched: Option<Instant>,
    pub(super) watch: Option<watch::Sender<()>>,
}

/// A lock's queue, as this store knows it.
pub(super) struct NamedLockQueue {
    pub(super) state: QueueState,
    /// When another client was last seen to want the lock, or to have it.
    contended: Option<Instant>,
    /// When this store released the lock last, and when it last asked whether a client has the named lock.
    released: Option<Instant>,
    asked: Instant,
}

#[expect(clippy::large_enum_variant, reason = "a store remembers a thousand at most")]
pub(super) enum QueueState {
    /// No task of this store uses it.
    Unused,
    /// A task of this store waits for the named lock, or tries the row.
    Busy,
    /// This store has the named lock until this moment: for the lease of the claim with this token, which has the row; or for the next
    /// attempt, for the row was locked.
    Has(NamedLock, Option<Token>, Instant),
}

/// A named lock that this store has. Dropping it releases it.
pub(crate) struct NamedLock {
    name: String,
    timeout: Duration,
    connection: Option<Connection>,
}

/// The right of one task to use a lock's queue: of each store, one task at a time has it.
pub(crate) struct QueueTurn<'a> {
    all: &'a Arc<NamedLockQueues>,
    key: &'a LockKey,
    named_lock: Option<NamedLock>,
    done: bool,
}

impl NamedLockQueues {
    pub(crate) fn new(table: &str, timeout: Duration, background: Arc<Background>) -> Self {
        Self {
            table: table.to_owned(),
            timeout,
            refused: AtomicBool::new(false),
            background,
            known: Mutex::new(KnownQueues {
                queues: HashMap::new(),
                cleared: Instant::now(),
                watched: None,
                watch: None,
            }),
        }
    }

    /// The turn at a lock's queue, unless another task of this store has it, or `GET_LOCK` is refused.
    pub(crate) fn turn<'a>(self: &'a Arc<Self>, key: &'a LockKey) -> Option<QueueTurn<'a>> {
        if self.refused.load(Ordering::Relaxed) {
            return None;
        }
        let mut known = unpoisoned(&self.known);
        let queue = known.get_or_make(key)?;
        let named_lock = match mem::replace(&mut queue.state, QueueState::Busy) {
            QueueState::Unused => None,
            QueueState::Has(named_lock, None, _) => Some(named_lock),
            // Its lease is over, and the tasks that should have seen that are on runtimes that nobody drives. It is given back.
            QueueState::Has(named_lock, Some(_), until) if until <= Instant::now() => {
                drop(known);
                drop(named_lock);
                None
            }
            other @ (QueueState::Busy | QueueState::Has(..)) => {
                queue.state = other;
                return None;
            }
        };
        Some(QueueTurn { all: self, key, named_lock, done: false })
    }

    /// The named lock of a claim that is being released, or is lost. To be dropped once the row is free.
    pub(crate) fn named_lock_of(&self, key: &LockKey, token: &Token) -> Option<NamedLock> {
        let mut known = unpoisoned(&self.known);
        let queue = known.get_or_make(key)?;
        queue.released = Some(Instant::now());
        let is_its = matches!(&queue.state, QueueState::Has(_, Some(holder), _) if holder == token);
        is_its.then(|| queue.give_up()).flatten()
    }

    /// The server's answer to a question about a named lock: a number; `None` if it is NULL or unknown.
    async fn ask(&self, connection: &mut Connection, statement: Statement, name: &str) -> Option<i64> {
        match connection.numbered_rows(|question| statement.bind(question).bind(name)).await {
            Ok(rows) => column::<Option<i64>>(rows.first()?, 1).ok().flatten(),
            Err(failed) => {
                self.refused.fetch_or(error::is_lasting_refusal(&failed), Ordering::Relaxed);
                None
            }
        }
    }

    /// Leads a task to its end on the caller's runtime and on that of the store's background work: nobody may drive one of them.
    pub(super) fn spawn_on_both<T: Future<Output = ()> + Send + 'static>(&self, task: impl Fn() -> T) {
        if let Ok(here) = Handle::try_current() {
            here.spawn(task());
        }
        self.background.spawn(task());
    }

    /// The named lock's name. Such names are common to all databases of a server, and have at most 64 characters. Two locks
    /// whose named locks have the same name wake each other now and then; nothing else follows.
    fn name(&self, key: &LockKey) -> String {
        // FNV-1a, 64 bits: draft-eastlake-fnv.
        let mut hash: u64 = 0xcbf2_9ce4_8422_2325;
        for byte in self.table.bytes().chain([0]).chain(key.as_str().bytes()) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
        format!("lockkit:{hash:016x}")
    }
}

impl KnownQueues {
    /// `None` if too many are known already.
    fn get_or_make(&mut self, key: &LockKey) -> Option<&mut NamedLockQueue> {
        if self.queues.len() >= REMEMBERED && self.cleared.elapsed() > HOT {
            self.queues.retain(|_, queue| !matches!(queue.state, QueueState::Unused) || queue.is_hot());
            self.cleared = Instant::now();
        }
        if self.queues.len() >= REMEMBERED {
            return self.queues.get_mut(key);
        }
        Some(self.queues.entry(key.clone()).or_insert_with(NamedLockQueue::new))
    }
}

impl NamedLockQueue {
    fn new() -> Self {
        Self { state: QueueState::Unused, contended: None, released: None, asked: Instant::now() }
    }

    /// This store is to have its named lock no longer.
    pub(super) fn give_up(&mut self) -> Option<NamedLock> {
        match mem::replace(&mut self.state, QueueState::Unused) {
            QueueState::Has(named_lock, ..) => Some(named_lock),
            _ => None,
        }
    }

    fn is_hot(&self) -> bool {
        self.contended.is_some_and(|at| at.elapsed() < HOT)
    }
}

impl QueueTurn<'_> {
    /// Whether the lock changes hands so often that an attempt should get the named lock before it tries the row.
    pub(crate) fn is_hot(&self) -> bool {
        unpoisoned(&self.all.known).queues.get(self.key).is_some_and(NamedLockQueue::is_hot)
    }

    /// Whether this store has the named lock already.
    pub(crate) fn has_named_lock(&self) -> bool {
        self.named_lock.is_some()
    }

    /// Takes note that other clients want the lock, or have it.
    pub(crate) fn note_contention(&self) {
        if let Some(queue) = unpoisoned(&self.all.known).queues.get_mut(self.key) {
            queue.contended = Some(Instant::now());
        }
    }

    /// Whether it is time to ask if a client has the named lock: this store takes the lock in a loop.
    pub(crate) fn should_ask(&self) -> bool {
        let mut known = unpoisoned(&self.all.known);
        let Some(queue) = known.queues.get_mut(self.key) else { return false };
        let loops = queue.released.is_some_and(|at| at.elapsed() < ASKED);
        let ask = loops && queue.asked.elapsed() >= ASKED;
        if ask {
            queue.asked = Instant::now();
        }
        ask
    }

    /// Whether a client has the named lock, as long as others wait for it; `false` if that is unknown.
    pub(crate) async fn is_contended(&mut self, connection: &mut Connection) -> bool {
        let name = self.all.name(self.key);
        self.all.ask(connection, statements::named_lock_holder(), &name).await.is_some()
    }

    /// Waits for the named lock, for a second at most, and until this moment for the answer. Says whether other clients had it for all of that time;
    /// not so if there is no connection to spare, or the server can't be asked.
    ///
    /// # Cancellation
    /// The connection is hung up when the server has answered, which takes a second at most and releases the named lock.
    pub(crate) async fn wait(&mut self, pool: &Pool, until: Instant) -> bool {
        if self.named_lock.is_some() {
            return false;
        }
        let bound = Bound::new(LONGEST_WAIT + self.all.timeout).no_later_than(until);
        let Some(mut connection) = pool.spare_connection(ConnectionClass::NamedLock, bound).await else { return false };
        let name = self.all.name(self.key);
        let answer = self.all.ask(&mut connection, statements::get_named_lock(), &name).await;
        if answer == Some(1) {
            self.named_lock = Some(NamedLock { name, timeout: self.all.timeout, connection: Some(connection) });
        }
        answer.is_some_and(|answer| answer != 1)
    }

    /// The row was taken: the named lock is kept until the row is released, or the lease has ended without a release.
    pub(crate) fn took(self, token: Token, ttl: Duration) {
        self.keep(Some(token), end_of_lease(ttl));
    }

    /// The row is locked by another client: the named lock, if this store has it, is kept for a moment for the next attempt.
    pub(crate) fn missed(self) {
        self.keep(None, Instant::now() + LINGER);
    }

    fn keep(mut self, token: Option<Token>, until: Instant) {
        if let Some(named_lock) = self.named_lock.take() {
            self.end(QueueState::Has(named_lock, token, until));
            self.all.watch(until);
        }
    }

    fn end(&mut self, state: QueueState) {
        self.done = true;
        let before =
            unpoisoned(&self.all.known).queues.get_mut(self.key).map(|queue| mem::replace(&mut queue.state, state));
        drop(before);
    }
}

impl Drop for QueueTurn<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.end(QueueState::Unused);
        }
    }
}

/// When a lease that is granted or extended now has ended.
pub(super) fn end_of_lease(ttl: Duration) -> Instant {
    Instant::now() + ttl
}

impl Drop for NamedLock {
    /// Releases it: this is sent here and now, and the answer is awaited in the background. On another runtime than that of its
    /// connection, which nobody may drive, it hangs up.
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        let here = Handle::try_current().ok().filter(|runtime| connection.is_of(runtime.id()));
        let Some(runtime) = here else { return connection.hang_up() };
        connection.set_bound(Bound::new(self.timeout));
        let name = mem::take(&mut self.name);
        let mut releasing = Box::pin(async move {
            let release = |question| statements::release_named_lock(question, &name);
            if connection.transact(release, None).await.is_err() {
                // Only a connection that is known to have no named lock any more may be used again.
                connection.close_if_answered();
            }
        });
        // The caller may be all that this runtime is driven for, so that the task does not begin.
        if releasing.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending() {
            runtime.spawn(releasing);
        }
    }
}
