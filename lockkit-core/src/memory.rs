//! The reference store: locks in this process's memory, with the same rules as every other store.
//!
//! For tests, for single processes, and as the measure of what the other stores do. Leases expire here too, and a
//! clone is another client of the same store.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;
use tokio::sync::Notify;

use crate::{
    AcquireRequest, Attempt, Capability, Claim, Clock, Contention, Error, ErrorKind, Fence, FenceClock, FenceRequest,
    Fencing, Hold, Holder, HolderInfo, KeyState, Liveness, LockKey, LockStore, LossReason, Mode, Moment, Query,
    Release, Renewal, Renewed, Result, StoreInfo, SystemClock, Waiting,
    store::{Record, Records, Swap, unpoisoned},
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
    locks: BTreeMap<LockKey, Lock>,
    records: BTreeMap<LockKey, Record>,
    /// No new counter starts at or below this.
    floor: u64,
    /// How many keys have come since the free ones were forgotten.
    new: usize,
}

#[derive(Debug, Default)]
struct Lock {
    leases: Vec<MemoryLease>,
    /// The last fence given out.
    fence: u64,
    waiters: u32,
    freed: Arc<Notify>,
}

#[derive(Debug)]
struct MemoryLease {
    claim: Claim,
    fence: u64,
    span: u32,
    depth: u32,
    expires: Moment,
    info: HolderInfo,
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
        let capability = Capability {
            shared: true,
            permits: true,
            fifo: false,
            resume: true,
            waiting: Waiting::Notify,
            liveness: Liveness { ttl: Some(Duration::from_millis(100)..=Duration::from_secs(300)), session: None },
            fencing: Fencing::Hybrid,
            max_key_bytes: LockKey::MAX_BYTES,
        };
        let info = StoreInfo {
            scheme: "memory",
            name: "memory".into(),
            capability,
            clock: Arc::clone(&clock),
            alarm: None,
            warnings: Arc::default(),
        };
        Self { info: Arc::new(info), judge: clock, table: Arc::default() }
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
        *unpoisoned(&self.table) = Table::default();
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
    fn attempt(&self, request: &AcquireRequest) -> Result<Attempt> {
        let until = self.now() + request.ttl;
        let mut table = unpoisoned(&self.table);
        let now = self.store_now();
        let lock = table.lock(&request.claim.key, now);
        if let Some(lease) = lock.leases.iter_mut().find(|lease| lease.claim == request.claim) {
            lease.expires = now + request.ttl;
            return Ok(Attempt::Granted(lease.hold(until)));
        }
        let place = match request.from {
            Some(from) => {
                let is_it = |lease: &MemoryLease| lease.claim.token == from && lease.claim.mode == Mode::Exclusive;
                let Some(place) = lock.leases.iter().position(is_it) else {
                    let holder = lock.leases.first();
                    return Ok(Attempt::Contended(
                        holder.map_or_else(Contention::default, |lease| lease.contention(now)),
                    ));
                };
                Some(place)
            }
            None => match lock.blocker(request.claim.mode)? {
                Some(holder) => return Ok(Attempt::Contended(holder.contention(now))),
                None => None,
            },
        };
        let floor = table.floor;
        let lock = table.lock(&request.claim.key, now);
        let fence = lock.next_fence(request.fence, floor)?;
        if let Some(place) = place {
            lock.leases.remove(place);
        }
        let lease = MemoryLease {
            claim: request.claim.clone(),
            fence,
            span: request.fence.span.max(1),
            depth: 1,
            expires: now + request.ttl,
            info: request.holder.clone(),
        };
        let hold = lease.hold(until);
        lock.leases.push(lease);
        Ok(Attempt::Granted(hold))
    }

    fn renew_one(&self, renewal: &Renewal, sent: Moment) -> Renewed {
        let mut table = unpoisoned(&self.table);
        let now = self.store_now();
        let lock = table.lock(&renewal.claim.key, now);
        let Some(lease) = lock.leases.iter_mut().find(|lease| lease.claim == renewal.claim) else {
            return Renewed::Lost(lock.why_not_held());
        };
        lease.expires = now + renewal.ttl;
        lease.depth = renewal.depth;
        if let Some(holder) = &renewal.holder {
            lease.info = holder.clone();
        }
        let hold = lease.hold(sent + renewal.ttl);
        if let Some(floor) = renewal.fence_floor {
            lock.fence = lock.fence.max(floor.get());
        }
        Renewed::Held(hold)
    }

    fn state_of(&self, table: &Table, key: &LockKey, now: Moment) -> KeyState {
        let lock = table.locks.get(key);
        let live = lock.into_iter().flat_map(|lock| &lock.leases).filter(|lease| now < lease.expires);
        KeyState {
            key: key.clone(),
            holders: live.map(|lease| lease.holder(now)).collect(),
            fence: lock.map(|lock| lock.fence).filter(|fence| *fence > 0).map(Fence::new),
            waiters: Some(lock.map_or(0, |lock| lock.waiters)),
        }
    }
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
        let give_up = self.now() + request.wait;
        let first = self.attempt(request)?;
        if request.wait.is_zero() || matches!(first, Attempt::Granted(_)) {
            return Ok(first);
        }
        let waiter = Waiter::new(self, &request.claim.key);
        loop {
            // Listen first, ask then: what is freed in between is not missed.
            let freed = waiter.freed.notified();
            let answer = self.attempt(request)?;
            let Attempt::Contended(contention) = &answer else { return Ok(answer) };
            let left = give_up.since(self.now());
            if left.is_zero() {
                // At once: whoever is to wait on would hear nothing until he asks again.
                let contention = Contention { retry_after: Some(Duration::ZERO), ..contention.clone() };
                return Ok(Attempt::Contended(contention));
            }
            let expiry = contention.retry_after.map_or(left, |after| after + Duration::from_millis(1));
            drop(tokio::time::timeout(left.min(expiry), freed).await);
        }
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let sent = self.now();
        renewals.iter().map(|renewal| Ok(self.renew_one(renewal, sent))).collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let mut table = unpoisoned(&self.table);
        let lock = table.lock(&claim.key, self.store_now());
        // The mode is not compared: a token is unique, and `break_lock` knows nothing else.
        let Some(at) = lock.leases.iter().position(|lease| lease.claim.token == claim.token) else {
            return Ok(Release::NotHeld(lock.why_not_held()));
        };
        lock.leases.remove(at);
        lock.freed.notify_waiters();
        Ok(Release::Released { waiters: Some(lock.waiters) })
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
    /// A lock, without the leases that ran out.
    fn lock(&mut self, key: &LockKey, now: Moment) -> &mut Lock {
        if !self.locks.contains_key(key) {
            self.tidy(now);
        }
        let lock = self.locks.entry(key.clone()).or_default();
        lock.leases.retain(|lease| now < lease.expires);
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
            lock.leases.retain(|lease| now < lease.expires);
            let used = !lock.leases.is_empty() || lock.waiters > 0;
            if !used {
                *floor = (*floor).max(lock.fence);
            }
            used
        });
    }
}

impl Lock {
    /// The lease that stands in the way of a new one of this mode.
    fn blocker(&self, mode: Mode) -> Result<Option<&MemoryLease>> {
        let other_kind = |lease: &&MemoryLease| match (mode, lease.claim.mode) {
            (Mode::Shared, Mode::Shared) | (Mode::Permit { .. }, Mode::Permit { .. }) => false,
            (Mode::Exclusive | Mode::Shared | Mode::Permit { .. }, _) => true,
        };
        if let Some(lease) = self.leases.iter().find(other_kind) {
            return Ok(Some(lease));
        }
        let Mode::Permit { limit } = mode else { return Ok(None) };
        if let Some(lease) = self.leases.iter().find(|lease| lease.claim.mode != mode) {
            let message = format!("the lock is in use as a {}, not as a {mode}", lease.claim.mode);
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        let full = self.leases.len() >= usize::try_from(limit.get()).unwrap_or(usize::MAX);
        Ok(self.leases.iter().min_by_key(|lease| lease.expires).filter(|_| full))
    }

    fn next_fence(&mut self, request: FenceRequest, floor: u64) -> Result<u64> {
        let start = match request.clock {
            FenceClock::Store if self.fence == 0 => wall_clock_micros(),
            FenceClock::Store | FenceClock::Floor => 0,
        };
        let above = self.fence.max(request.floor.get()).max(floor);
        let first = above.checked_add(1).map(|next| next.max(start));
        let last = first.and_then(|first| first.checked_add(u64::from(request.span.max(1)) - 1));
        let (first, last) = first.zip(last).ok_or_else(|| Error::new(ErrorKind::InvalidInput, "fences end at 2^64"))?;
        self.fence = last;
        Ok(first)
    }

    fn why_not_held(&self) -> LossReason {
        if self.leases.is_empty() { LossReason::Gone } else { LossReason::Taken }
    }
}

impl MemoryLease {
    fn hold(&self, until: Moment) -> Hold {
        Hold { claim: self.claim.clone(), fence: Fence::new(self.fence), span: self.span, until, depth: self.depth }
    }

    fn contention(&self, now: Moment) -> Contention {
        Contention { retry_after: Some(self.expires.since(now)), holder: Some(self.info.clone()), burnt: false }
    }

    fn holder(&self, now: Moment) -> Holder {
        Holder {
            token: Some(self.claim.token),
            info: self.info.clone(),
            mode: self.claim.mode,
            depth: self.depth,
            fence: Some(Fence::new(self.fence)),
            remaining: Some(self.expires.since(now)),
        }
    }
}

/// Counts one that waits for as long as it does.
struct Waiter<'a> {
    store: &'a MemoryStore,
    key: &'a LockKey,
    freed: Arc<Notify>,
}

impl<'a> Waiter<'a> {
    fn new(store: &'a MemoryStore, key: &'a LockKey) -> Self {
        let mut table = unpoisoned(&store.table);
        let lock = table.locks.entry(key.clone()).or_default();
        lock.waiters += 1;
        Self { store, key, freed: Arc::clone(&lock.freed) }
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut table = unpoisoned(&self.store.table);
        if let Some(lock) = table.locks.get_mut(self.key).filter(|lock| Arc::ptr_eq(&lock.freed, &self.freed)) {
            lock.waiters -= 1;
        }
    }
}

fn wall_clock_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
