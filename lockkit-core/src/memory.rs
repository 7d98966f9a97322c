//! The reference store: locks in this process's memory, with the same rules as every other store.
//!
//! For tests, for single processes, and as the measure of what the other stores do. Leases expire here too, and a
//! clone is another client of the same store.

mod lock;
mod queue;

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use tokio::time::timeout;

use self::lock::{Answer, AskedAt, LockState};
use crate::{
    AcquireRequest, Attempt, Capability, Claim, Clock, Contention, Fence, Fencing, Hold, KeyState, Liveness, LockKey,
    LockStore, Moment, Order, Query, Release, Renewal, Renewed, Result, StoreInfo, SystemClock, Waiting,
    store::{REFRESH, Reconnections, Record, Records, Swap, unpoisoned},
};

/// How many new keys may come before the fence counters of all free ones are folded into one floor.
const NEW_KEYS: usize = 1024;

/// A store in this process's memory. Clones share their locks.
#[derive(Clone, Debug)]
pub struct MemoryStore {
    info: Arc<StoreInfo>,
    /// What expiry is judged by, whatever clock a client has.
    judge: Arc<dyn Clock>,
    table: Arc<Mutex<Table>>,
}

#[derive(Debug, Default)]
struct Table {
    locks: BTreeMap<LockKey, LockState>,
    records: BTreeMap<LockKey, Record>,
    /// No new counter starts at or below this.
    floor: u64,
    /// How many keys have come since the free ones were forgotten.
    new: usize,
}

impl MemoryStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(Arc::new(SystemClock))
    }

    /// An empty store on a clock of one's own.
    #[must_use]
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        let liveness = Liveness { ttl: Some(StoreInfo::SHORTEST_TTL..=StoreInfo::LONGEST_TTL), session: None };
        let capability = Capability::all_kinds(Waiting::Notify, liveness, Fencing::Hybrid);
        let info = StoreInfo {
            scheme: "memory",
            name: "memory".into(),
            capability,
            clock: Arc::clone(&clock),
            alarm: None,
            reconnections: Reconnections::default(),
            warnings: Arc::default(),
        };
        Self { info: Arc::new(info), judge: clock, table: Arc::default() }
    }

    /// The same store, which does no more than a store of this capability, so that tests of an application see what
    /// production will refuse: modes, order, grants in the place of others, ttls, lengths of names. Where fences mean nothing,
    /// each is [`Fence::NONE`].
    ///
    /// Some things stay as they are: how waiters are woken, and that leases end by their ttl, of which this store takes its own
    /// where the other has sessions.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// use lockkit_core::{Capability, ErrorKind, LockStore, Locker, MemoryStore};
    ///
    /// let store = MemoryStore::new();
    /// let production = Capability { shared: false, ..store.info().capability.clone() };
    /// let prices = Locker::new(store.like(&production)).rw_lock("prices");
    /// assert_eq!(prices.read().acquire().await.expect_err("no readers").kind(), ErrorKind::Unsupported);
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn like(self, other: &Capability) -> Self {
        let own = &self.info.capability;
        let capability = Capability {
            shared: own.shared && other.shared,
            permits: own.permits && other.permits,
            fifo: own.fifo && other.fifo,
            resume: own.resume.min(other.resume),
            keeps: own.keeps && other.keeps,
            downgrades: own.downgrades && other.downgrades,
            waiting: own.waiting,
            liveness: Liveness {
                ttl: other.liveness.ttl.clone().or_else(|| own.liveness.ttl.clone()),
                session: own.liveness.session,
            },
            // What is promised here holds in each of these ways.
            fencing: if own.fencing == Fencing::None { Fencing::None } else { other.fencing },
            max_key_bytes: own.max_key_bytes.min(other.max_key_bytes),
        };
        let info = StoreInfo { capability, ..StoreInfo::clone(&self.info) };
        Self { info: Arc::new(info), ..self }
    }

    /// Another client of this store, whose own clock is `clock`: the leases that it is granted end on that clock for
    /// itself, and on the store's for everyone else.
    #[must_use]
    pub fn client_with_clock(&self, clock: Arc<dyn Clock>) -> Self {
        let info = StoreInfo { clock, ..StoreInfo::clone(&self.info) };
        Self { info: Arc::new(info), ..self.clone() }
    }

    /// Forgets all leases, as a server does that restarts empty. Fences go on from the wall clock.
    pub fn forget_all(&self) {
        let forgotten = mem::take(&mut *unpoisoned(&self.table));
        forgotten.locks.values().for_each(|lock| lock.freed.notify_waiters());
    }

    /// The present moment for this client.
    fn now(&self) -> Moment {
        self.info.clock.now()
    }

    /// The present moment for the store, read while the table is locked: the judgement and what depends on it are one
    /// step (rule R10).
    fn store_now(&self) -> Moment {
        self.judge.now()
    }

    /// One atomic attempt.
    fn attempt(&self, request: &AcquireRequest) -> Result<Answer> {
        let until = self.now() + request.ttl;
        let mut table = unpoisoned(&self.table);
        let (now, floor) = (self.store_now(), table.floor);
        let answer = table.lock(&request.claim.key, now).ask(request, AskedAt { now, until, floor })?;
        Ok(match answer {
            Answer::Granted(hold) => Answer::Granted(self.told(hold)),
            contended @ Answer::Contended(..) => contended,
        })
    }

    fn has_fences(&self) -> bool {
        self.info.capability.fencing != Fencing::None
    }

    /// What a client is told of its lease.
    fn told(&self, hold: Hold) -> Hold {
        if self.has_fences() { hold } else { Hold { fence: Fence::NONE, ..hold } }
    }

    /// Waits until the lease is granted or the wait is over, in the queue or outside it.
    async fn wait(&self, request: &AcquireRequest, give_up: Moment) -> Result<Attempt> {
        loop {
            let (contention, wake) = match self.attempt(request)? {
                Answer::Granted(hold) => return Ok(Attempt::Granted(hold)),
                Answer::Contended(contention, wake) => (contention, wake),
            };
            let Some(wake) = wake else { return Ok(Attempt::Contended(contention)) };
            let left = give_up.since(self.now());
            if left.is_zero() {
                // At once: one that is to wait on would hear nothing until it asks again.
                return Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), ..contention }));
            }
            drop(timeout(pause(&contention, left), wake).await);
        }
    }

    fn renew_one(&self, renewal: &Renewal, sent: Moment) -> Result<Renewed> {
        self.info.admit_mode(renewal.claim.mode)?;
        let mut table = unpoisoned(&self.table);
        let now = self.store_now();
        let renewed = table.lock(&renewal.claim.key, now).renew(renewal, now, sent + renewal.ttl);
        Ok(match renewed {
            Renewed::Held(hold) => Renewed::Held(self.told(hold)),
            lost @ Renewed::Lost(_) => lost,
        })
    }

    fn state_of(&self, table: &Table, key: &LockKey, now: Moment) -> KeyState {
        let free = || KeyState { waiters: Some(0), ..KeyState::unknown(key.clone()) };
        let mut state = table.locks.get(key).map_or_else(free, |lock| lock.state(key, now));
        if !self.has_fences() {
            state.fence = None;
            state.holders.iter_mut().for_each(|holder| holder.fence = None);
        }
        state
    }
}

/// How long to wait to be told: not beyond the moment at which something ends by itself, which nobody tells of.
fn pause(contention: &Contention, left: Duration) -> Duration {
    contention.retry_after.map_or(left, |after| left.min(after + Duration::from_millis(1)))
}

impl Default for MemoryStore {
    fn default() -> Self {
        Self::new()
    }
}

#[async_trait]
impl LockStore for MemoryStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.info.admit(request)?;
        // Nothing here ever waits for anything, so that a loop of acquisitions would starve its runtime.
        tokio::task::consume_budget().await;
        let wait = match request.order {
            Order::Any => request.wait,
            Order::Fifo => request.wait.min(REFRESH),
        };
        self.wait(request, self.now() + wait).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let sent = self.now();
        renewals.iter().map(|renewal| self.renew_one(renewal, sent)).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.info.admit_mode(claim.mode)?;
        let mut table = unpoisoned(&self.table);
        let now = self.store_now();
        Ok(table.lock(&claim.key, now).release(&claim.token, now))
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        let table = unpoisoned(&self.table);
        let now = self.store_now();
        Ok(match query {
            Query::Keys(keys) => keys.iter().map(|key| self.state_of(&table, key, now)).collect(),
            Query::Prefix(prefix) => {
                let named = table.locks.keys().filter(|key| key.as_str().starts_with(prefix));
                named.map(|key| self.state_of(&table, key, now)).filter(|state| !state.holders.is_empty()).collect()
            }
            Query::Queue(key) => {
                let queue = table.locks.get(key).map(|lock| lock.queue_to_show(now)).unwrap_or_default();
                let queue = self.info.capability.fifo.then_some(queue);
                vec![KeyState { queue, ..self.state_of(&table, key, now) }]
            }
        })
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        vec![Box::new(self)]
    }
}

#[async_trait]
impl Records for MemoryStore {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        Ok(unpoisoned(&self.table).records.get(name).cloned())
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        let records = &mut unpoisoned(&self.table).records;
        if let Some(answer) = Swap::of(records.get(name), seen, new) {
            return Ok(answer);
        }
        match new {
            Some(new) => records.insert(name.clone(), new.clone()),
            None => records.remove(name),
        };
        Ok(Swap::Done)
    }
}

impl Table {
    /// A lock, without what ran out.
    fn lock(&mut self, key: &LockKey, now: Moment) -> &mut LockState {
        if !self.locks.contains_key(key) {
            self.tidy(now);
        }
        let lock = self.locks.entry(key.clone()).or_default();
        lock.drop_lapsed(now);
        lock
    }

    /// Drops the free locks when many have come. Their counters are folded into the floor, so that fences go on
    /// growing.
    fn tidy(&mut self, now: Moment) {
        self.new += 1;
        if self.new < NEW_KEYS {
            return;
        }
        self.new = 0;
        let floor = &mut self.floor;
        self.locks.retain(|_, lock| {
            lock.drop_lapsed(now);
            if !lock.is_used() {
                *floor = (*floor).max(lock.last_fence());
            }
            lock.is_used()
        });
    }
}
