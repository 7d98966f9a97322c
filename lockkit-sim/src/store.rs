//! The simulated store and its handle.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::{
    AcquireRequest, Alarm, Attempt, Claim, Clock, Hold, HolderInfo, KeyState, LockKey, LockStore, LossReason,
    MemoryStore, Mode, Query, Result, Resume, StoreInfo, Token, Waiting, store::unpoisoned,
};
use tokio::sync::Notify;

use crate::{
    clock::VirtualClock,
    fault::{Fault, Operation, Rule, Script},
    link::Link,
    log::{Call, Log},
};

/// A store in memory, on tokio's time, with a script of faults. See the [crate](crate) for an example.
///
/// Clones are one client, with one script and one log. [`another_client`](Self::another_client) shares the locks only.
/// It notifies waiters, has shared locks, permits and strict order, and takes ttls from 100 ms to 5 minutes, as
/// [`MemoryStore`] does.
#[derive(Clone)]
pub struct SimStore {
    pub(crate) info: Arc<StoreInfo>,
    pub(crate) world: Arc<World>,
    pub(crate) client: Arc<Client>,
}

/// What all clients share.
pub(crate) struct World {
    pub(crate) inner: Arc<dyn LockStore>,
    pub(crate) clock: Arc<VirtualClock>,
    /// Why leases ended that somebody ended; the store beneath does not know.
    pub(crate) reasons: Mutex<HashMap<Token, LossReason>>,
    /// Raised for one lease at a time: each client hears those of the others, too.
    pub(crate) alarm: Alarm,
}

/// What one client has for itself.
pub(crate) struct Client {
    pub(crate) script: Script,
    pub(crate) link: Link,
    pub(crate) log: Log,
    pub(crate) bound: Duration,
    /// What was granted to it and not released.
    pub(crate) session: Mutex<HashMap<Token, Claim>>,
    /// Those who wait for a lock are to ask again.
    pub(crate) disturbed: Notify,
}

impl SimStore {
    /// How long a client waits for an answer, unless it is told otherwise.
    pub const BOUND: Duration = Duration::from_secs(2);

    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::over(|clock| Arc::new(MemoryStore::with_clock(clock)))
    }

    /// A simulation around another store, made with the clock of the simulation: for authors of stores. It must do its
    /// work in memory, for paused time does not wait for a network.
    #[must_use]
    pub fn over(inner: impl FnOnce(Arc<dyn Clock>) -> Arc<dyn LockStore>) -> Self {
        let clock = Arc::new(VirtualClock::new());
        let inner = inner(Arc::clone(&clock) as Arc<dyn Clock>);
        let world = Arc::new(World { inner, clock, reasons: Mutex::default(), alarm: Alarm::new() });
        Self::client(world, Self::BOUND, None)
    }

    /// The same store, which lets its clients ask again and again instead of waking them.
    #[must_use]
    pub fn polled(self) -> Self {
        Self::client(self.world, self.client.bound, Some(Waiting::Poll))
    }

    /// The same store, which waits so long for an answer that does not come. Starts a new script and log.
    #[must_use]
    pub fn bound(self, bound: Duration) -> Self {
        let waiting = self.info.capability.waiting;
        Self::client(self.world, bound, Some(waiting))
    }

    /// Another client of the same locks, as another process would be, with a script and a log of its own.
    #[must_use]
    pub fn another_client(&self) -> Self {
        Self::client(Arc::clone(&self.world), self.client.bound, Some(self.info.capability.waiting))
    }

    fn client(world: Arc<World>, bound: Duration, waiting: Option<Waiting>) -> Self {
        let mut info = world.inner.info().clone();
        info.scheme = "sim";
        info.name = "the simulated store".into();
        info.clock = Arc::clone(&world.clock) as Arc<dyn Clock>;
        info.alarm = Some(world.alarm.clone());
        if let Some(waiting) = waiting {
            info.capability.waiting = waiting;
        }
        let client = Client {
            script: Script::default(),
            link: Link::new(),
            log: Log::default(),
            bound,
            session: Mutex::default(),
            disturbed: Notify::new(),
        };
        Self { info: Arc::new(info), world, client: Arc::new(client) }
    }

    /// Adds a fault to the script of this client: for the next call, unless the rule says otherwise.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> lockkit_core::Result<()> {
    /// # use lockkit_core::{Locker, Status};
    /// # use lockkit_sim::{Fault, Operation, SimStore};
    /// # use std::time::Duration;
    /// let store = SimStore::new();
    /// store.inject(Fault::LoseReply); // of whatever is called first
    /// store.inject(Fault::REFUSED.on(Operation::Renew).times(2)); // the first two renewals
    ///
    /// let locker = Locker::new(store.clone());
    /// let guard = locker.lock("a").acquire().await?; // asked again: the claim has the lease already
    /// tokio::time::sleep(Duration::from_secs(12)).await;
    /// assert_eq!(guard.status(), Status::Held); // renewed after two failures
    /// assert_eq!(store.calls().iter().filter(|call| call.operation == Operation::Renew).count(), 3);
    /// # Ok(()) }
    /// ```
    pub fn inject(&self, rule: impl Into<Rule>) {
        let rule = rule.into();
        self.client.script.add(rule);
        if rule.lasts() {
            self.client.disturbed.notify_waiters();
        }
    }

    /// Nothing of what this client sends arrives for so long; then all of it does, also what nobody waits for any more.
    pub fn freeze(&self, time: Duration) {
        self.client.link.freeze(time);
        self.client.disturbed.notify_waiters();
    }

    /// Ends all faults of this client, and a freeze.
    pub fn heal(&self) {
        self.client.script.clear();
        self.client.link.thaw();
    }

    /// The machine sleeps for so long: leases lapse meanwhile, on all clients, while tokio's timers stand still.
    pub fn suspend(&self, time: Duration) {
        self.world.clock.sleep(time);
    }

    /// Ends whatever leases there are of this name, as if their ttl were over. The holder is not told: it learns of it at
    /// its next renewal, as [`Gone`](LossReason::Gone).
    ///
    /// # Errors
    /// When the name is bad.
    pub async fn expire(&self, name: &str) -> Result<()> {
        self.end_all(&LockKey::new(name)?, None).await
    }

    /// Ends whatever leases there are of this name on purpose, as `lockkit break` does on a store that says so: the
    /// holder learns of it at once, as [`Revoked`](LossReason::Revoked).
    ///
    /// # Errors
    /// When the name is bad.
    pub async fn revoke(&self, name: &str) -> Result<()> {
        self.end_all(&LockKey::new(name)?, Some(LossReason::Revoked)).await
    }

    /// Ends whatever leases there are of this name, and grants one for `ttl` to a stranger. The holder learns of it at its
    /// next renewal, as [`Taken`](LossReason::Taken). The stranger's lease ends with its ttl, or when
    /// [`LockStore::release`] is called with its claim. It takes the place of an exclusive holder, and passes those that wait
    /// in order; where readers or permits were held it comes after those that wait.
    ///
    /// # Errors
    /// When the name is bad, or the ttl not one that the store takes.
    pub async fn take_over(&self, name: &str, ttl: Duration) -> Result<Hold> {
        let claim = Claim { key: LockKey::new(name)?, token: Token::random()?, mode: Mode::Exclusive };
        let mut request = AcquireRequest::new(claim, ttl, HolderInfo::new("a stranger"));
        loop {
            request.from = self.replaceable(&request.claim.key).await?;
            if request.from.is_none() {
                self.end_all(&request.claim.key, None).await?;
            }
            if let Attempt::Granted(hold) = tokio::task::unconstrained(self.world.inner.acquire(&request)).await? {
                return Ok(hold);
            }
            // In between another thread may have been faster, or those that wait in order have to go first.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// The token of the exclusive holder, if its place can be taken.
    async fn replaceable(&self, key: &LockKey) -> Result<Option<Token>> {
        if self.info.capability.resume == Resume::None {
            return Ok(None);
        }
        let states = self.world.inner.inspect(&Query::Keys(vec![key.clone()])).await?;
        let exclusive = states.iter().flat_map(|state| &state.holders).find(|holder| holder.mode == Mode::Exclusive);
        Ok(exclusive.and_then(|holder| holder.token))
    }

    /// Ends all leases of this client, which learns of it at once, as [`SessionEnded`](LossReason::SessionEnded).
    ///
    /// # Errors
    /// None, over memory.
    pub async fn end_session(&self) -> Result<()> {
        let claims: Vec<_> = unpoisoned(&self.client.session).drain().map(|(_, claim)| claim).collect();
        for claim in claims {
            unpoisoned(&self.world.reasons).insert(claim.token, LossReason::SessionEnded);
            self.world.inner.release(&claim).await?;
            self.world.alarm.raise(claim.token);
        }
        Ok(())
    }

    /// Who holds the lock of this name now. Not a call: it is not in the log, and no fault happens to it.
    ///
    /// # Errors
    /// When the name is bad.
    pub async fn state(&self, name: &str) -> Result<KeyState> {
        let key = LockKey::new(name)?;
        let mut states = self.world.inner.inspect(&Query::Keys(vec![key.clone()])).await?;
        Ok(states.pop().unwrap_or_else(|| KeyState::unknown(key)))
    }

    /// The calls of this client so far, in the order in which they were made.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.client.log.all()
    }

    /// The calls since the last time.
    #[must_use]
    pub fn take_calls(&self) -> Vec<Call> {
        self.client.log.take()
    }

    async fn end_all(&self, key: &LockKey, reason: Option<LossReason>) -> Result<()> {
        let states = self.world.inner.inspect(&Query::Keys(vec![key.clone()])).await?;
        for token in states.iter().flat_map(|state| &state.holders).filter_map(|holder| holder.token) {
            if let Some(reason) = reason {
                unpoisoned(&self.world.reasons).insert(token, reason);
            }
            self.world.inner.release(&Claim { key: key.clone(), token, mode: Mode::Exclusive }).await?;
            if reason.is_some() {
                self.world.alarm.raise(token);
            }
        }
        Ok(())
    }

    /// Writes a call down; returns what happens to it and its number.
    pub(crate) fn asked(&self, operation: Operation, keys: &[Option<&LockKey>]) -> (Option<Fault>, Vec<usize>) {
        let fault = self.client.script.next(operation);
        let at = self.world.clock.elapsed();
        let call = |key: &Option<&LockKey>| Call { at, operation, key: key.cloned(), fault, answer: None };
        (fault, keys.iter().map(|key| self.client.log.asked(call(key))).collect())
    }
}

impl Default for SimStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for SimStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimStore").field("inner", &self.world.inner).finish_non_exhaustive()
    }
}
