//! A named lock with its settings: a value, no I/O until it is acquired.

mod asking;

use std::{future::Future, sync::Arc, time::Duration};

use crate::{
    Claim, Event, Fence, Guard, KeyState, LockKey, LockStore, Mode, Moment, Order, Owner, Query, Result, Token,
    engine::{Ask, BackgroundTask, Doubts, Engine, Lease, Limit, Terms},
    store::{Identity, identity},
};

/// A lock that can be acquired. Immutable: every setting returns a changed copy.
#[derive(Clone, Debug)]
#[must_use]
pub struct Lock {
    engine: Arc<Engine>,
    key: Result<LockKey>,
    mode: Mode,
    order: Order,
    terms: Terms,
    /// Whether the ttl was asked for.
    ttl_is_set: bool,
    owner: Option<Owner>,
    asks_to_yield: bool,
}

impl Lock {
    /// How long a lease lasts when it is not renewed: 30 s.
    pub const DEFAULT_TTL: Duration = Duration::from_secs(30);

    pub(crate) fn new(engine: Arc<Engine>, name: &str, mode: Mode) -> Self {
        let terms = Terms {
            ttl: Self::DEFAULT_TTL,
            renew: true,
            max_hold: None,
            fence_above: Fence::NONE,
            keep_for: None,
            hands_over: true,
        };
        let key = LockKey::new(name);
        Self { engine, key, mode, order: Order::Any, terms, ttl_is_set: false, owner: None, asks_to_yield: false }
    }

    /// How long a lease lasts when it is not renewed; how long others wait after this process crashed.
    ///
    /// Where leases end with the session (ZooKeeper), others wait for the end of that. The ttl is for how long the holder believes in
    /// its lease without an answer then, for as long as the session lasts at most.
    ///
    /// # Errors
    /// When the lock is acquired: `InvalidInput` for a ttl that the store does not take: below 100 ms, or above five minutes on most
    /// stores that end leases by time ([`Liveness::ttl`](crate::Liveness)).
    pub fn ttl(mut self, ttl: Duration) -> Self {
        (self.terms.ttl, self.ttl_is_set) = (ttl, true);
        self
    }

    /// Leaves the lease unrenewed: the guard is lost after the ttl, unless [`Guard::renew`] is called.
    pub fn no_renewal(mut self) -> Self {
        self.terms.renew = false;
        self
    }

    /// Ends the guard, as [`MaxHold`](crate::LossReason::MaxHold), when it was kept for so long.
    pub fn max_hold(mut self, limit: Duration) -> Self {
        self.terms.max_hold = Some(limit);
        self
    }

    /// Keeps the lock from all others for at least this long after it was granted, also if the holder is done sooner: for a job that
    /// is due once in a window of time, of which each of many hosts starts one at about the same moment.
    ///
    /// What the holder leaves is a lease that nobody has, on the store's clock: the clocks of hosts do not matter, but for how
    /// long this one measures its work. A window has to be shorter than the time from one start of the job to the next, by more than
    /// that varies: 23 hours for a job that is started once a day. It may end a second late, and later by as long as the holder's
    /// last request takes to reach the store.
    ///
    /// The lock is kept when the guard is [released](Guard::release), whatever came of the work. A dropped guard has it done in the background:
    /// a process that ends then leaves the lease alone, which lapses after the ttl. So does one that crashes or can't reach the store, and a
    /// store that loses the lease keeps nothing: another may do the job in the same window then. [`Guard::keep_for`] changes the
    /// window of a hold, [`Guard::release_early`] gives it up.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// use lockkit_core::{Locker, MemoryStore};
    /// use std::time::Duration;
    ///
    /// let report = Locker::new(MemoryStore::new()).lock("report").keep_for(Duration::from_secs(3600));
    /// if let Some(guard) = report.try_acquire().await? {
    ///     // Takes a millisecond.
    ///     guard.release().await?;
    /// }
    /// assert!(report.try_acquire().await?.is_none(), "once an hour is enough");
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the lock is acquired: `Unsupported` where the store can't do it ([`Capability::keeps`](crate::Capability): a quorum), and for readers and permits; `InvalidInput` above
    /// [400 days](crate::StoreInfo::LONGEST_KEPT), and for a lock that is one [of several](crate::MultiLock).
    pub fn keep_for(mut self, at_least: Duration) -> Self {
        self.terms.keep_for = Some(at_least).filter(|at_least| !at_least.is_zero());
        self
    }

    /// Every fence lies above this number: for a lock that came by hand from another store or another name, where its fences were
    /// higher. Ask for it in all clients, for as long as the lock is used; [`FenceAbove`](crate::FenceAbove) does that for all
    /// locks of a store.
    ///
    /// A fence so high that the store has no higher one is refused when the lock is acquired, and so is any on a store without
    /// fences. A [migration](crate::migrate) of such a lock is to be started with a number above all fences that the lock has had.
    ///
    /// # Examples
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// use lockkit_core::{Fence, Locker, MemoryStore};
    ///
    /// let before = Fence::new(4_000_000_000_000_000);
    /// let locker = Locker::new(MemoryStore::new());
    /// assert!(locker.lock("invoice/42").fence_above(before).acquire().await?.fence() > before);
    /// # Ok(()) }
    /// ```
    pub fn fence_above(mut self, fence: Fence) -> Self {
        self.terms.fence_above = fence;
        self
    }

    /// Grants strictly in the order of asking, across processes. A [try](Self::try_acquire) passes nobody that waits.
    ///
    /// The two sides of a [`rw_lock`](crate::Locker::rw_lock), and a [`semaphore`](crate::Locker::semaphore), have this order
    /// already; all that wait for a name wait in one queue. A place is given up when its acquisition ends or is dropped. Those
    /// of a client that is gone without a word are kept for 6 s at most, or where leases end with the session for as long as
    /// that lasts. Locks of the same name without this order do not queue: they get in when nobody has the lock, and on most stores
    /// only when nobody waits in the queue. Users of one name should agree.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// use lockkit_core::{Locker, MemoryStore};
    ///
    /// let lock = Locker::new(MemoryStore::new()).lock("invoice/42").fifo();
    /// let first = lock.acquire().await?;
    /// let second = lock.acquire();
    /// # tokio::pin!(second);
    /// # assert!(tokio::time::timeout(std::time::Duration::from_millis(10), &mut second).await.is_err());
    /// first.release().await?;
    /// assert!(lock.try_acquire().await?.is_none(), "the second one comes first");
    /// # let guard =
    /// second.await?;
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Stores without [`Capability::fifo`](crate::Capability::fifo) refuse it as `Unsupported`.
    pub fn fifo(mut self) -> Self {
        self.order = Order::Fifo;
        self
    }

    /// Asks the holder to yield while this waits: a holder that looks ([`Guard::yield_requested`]) may end its work early, at a
    /// moment that suits it. One that does not look is not hurried. A [try](Self::try_acquire) asks nobody.
    ///
    /// The request is a lock of its own, called `lockkit/yield/` and the name of this one, with the same ttl: of all that ask, one holds it
    /// at a time, until it gets the lock or gives up; if it dies, the request lapses as a lease does. It says nothing of which waiter
    /// comes next. While it waits, this makes twice the requests of one that does not ask.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// use lockkit_core::{Locker, MemoryStore};
    ///
    /// let locker = Locker::new(MemoryStore::new());
    /// let reindex = locker.lock("reindex").acquire().await?;
    /// let urgent = tokio::spawn(async move { locker.lock("reindex").ask_to_yield().acquire().await });
    /// // The holder works in steps.
    /// while !reindex.yield_requested().await? {
    ///     tokio::task::yield_now().await;
    /// }
    /// reindex.release().await?;
    /// # let guard =
    /// urgent.await.expect("no panic")?;
    /// # drop(guard);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the lock is acquired: `InvalidInput` if its name has more than 498 bytes, or more than the store takes with those 14. That the
    /// store refuses the request is no error.
    pub fn ask_to_yield(mut self) -> Self {
        self.asks_to_yield = true;
        self
    }

    /// Acquires the lock, waiting as long as it takes.
    ///
    /// # Errors
    /// `InvalidInput` and `Unsupported` for what the store can't do; `Closed` after a shutdown; other kinds when the
    /// store could not be asked for longer than the [patience](crate::LockerBuilder::patience) of the locker. Where leases
    /// end with the session, `Unavailable` at once while 10 000 releases have had no answer.
    ///
    /// # Cancellation
    /// The future may be dropped at any time: the place in the queue is given up, and a lease that was or may come to
    /// be granted is released in the background. One that is kept but not polled, as by a `select!` on `&mut acquiring`,
    /// loses its place to other tasks of this locker after a second or two; a lease that it was given meanwhile is not
    /// renewed, so that other processes wait for one ttl at most. Where leases end with the session they wait until it is
    /// polled or dropped.
    pub async fn acquire(&self) -> Result<Guard> {
        loop {
            if let Some(guard) = self.get(Limit::Forever).await? {
                return Ok(guard);
            }
        }
    }

    /// Acquires the lock, runs `work` with its fence for as long as the lease is held, and releases it.
    ///
    /// The work is dropped before the lease can lapse, as by [`Guard::run`]; it must yield now and then for that.
    ///
    /// ```
    /// # use lockkit_core::{Locker, MemoryStore};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockkit_core::Result<()> {
    /// # let locker = Locker::new(MemoryStore::new());
    /// let sum = locker.lock("invoice/42").with(|fence| async move { fence.get() + 1 }).await?;
    /// # assert!(sum > 1);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire). [`Lost`](crate::ErrorKind::Lost) if the work was stopped, or if it ended, and the store then said
    /// that the lease was not held any more: another may have held the lock at the same time. What the work gave is dropped
    /// then; with a [`Guard`] of your own you keep it. A release that can't be told to the store goes on in the background,
    /// and is no error of the work.
    ///
    /// # Cancellation
    /// Before the lock is granted as [`acquire`](Self::acquire); then the work is dropped, and the lock released in the background.
    pub async fn with<F: Future>(&self, work: impl FnOnce(Fence) -> F) -> Result<F::Output> {
        let guard = self.acquire().await?;
        let output = guard.run(work(guard.fence())).await?;
        let not_held = guard.lost_at_release().await;
        not_held.map_or(Ok(output), Err)
    }

    /// Acquires the lock if it is free.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), but without patience: the first error is returned.
    ///
    /// # Cancellation
    /// As [`acquire`](Self::acquire).
    pub async fn try_acquire(&self) -> Result<Option<Guard>> {
        self.get(Limit::Try).await
    }

    /// Acquires the lock if it becomes free within `wait`; `None` if another had it all the while.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire). An error, not `None`, also if the store did not answer when the time was up.
    ///
    /// # Cancellation
    /// As [`acquire`](Self::acquire).
    pub async fn acquire_within(&self, wait: Duration) -> Result<Option<Guard>> {
        self.acquire_within_rest(wait, Duration::ZERO).await
    }

    /// The same for a caller that has waited for other locks for some of its time.
    pub(crate) async fn acquire_within_rest(&self, wait: Duration, waited: Duration) -> Result<Option<Guard>> {
        let now = self.engine.now();
        let limit = if wait.is_zero() {
            // No time at all is a try, which takes as long as the store's answer does.
            Limit::Try
        } else if waited < wait {
            Limit::Until(now + (wait - waited), wait)
        } else {
            Limit::TryWithin(now - (waited - wait), wait)
        };
        self.get(limit).await
    }

    /// Takes up the lease that this token holds, after a crash of its holder or after [`Guard::detach`]; `None` if the token
    /// does not hold the lock any more.
    ///
    /// A new lease takes the place of that one in a single step, so that nobody gets in between. It has this lock's ttl, a token
    /// of its own and a higher fence: what the former holder still sends to a resource that checks fences is refused, and no
    /// release of it, however late, ends the new lease. A token serves once. A former holder that still runs loses the lease,
    /// and learns of it with its next renewal, or at its deadline.
    ///
    /// ```
    /// # use lockkit_core::{Locker, MemoryStore};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockkit_core::Result<()> {
    /// # let locker = Locker::new(MemoryStore::new());
    /// let lock = locker.lock("migration");
    /// let before = lock.acquire().await?;
    /// let fence = before.fence();
    /// let saved = before.detach()?.reveal(); // To a file, or to the next process.
    ///
    /// let after = lock.resume(saved.parse()?).await?.expect("the ttl is not over");
    /// assert!(after.fence() > fence);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `Unsupported` where no lease can be taken up ([`Resume::None`](crate::Resume)); else those of [`try_acquire`](Self::try_acquire).
    ///
    /// After an error of unknown effect the lease may have ended, as after a cancellation.
    ///
    /// # Cancellation
    /// The token may still hold the lock; or the lease was taken up, and is released in the background.
    pub async fn resume(&self, token: Token) -> Result<Option<Guard>> {
        let claim = Claim { key: self.key.clone()?, token, mode: self.mode };
        let Some(lease) = self.engine.resume(claim, self.terms).await? else { return Ok(None) };
        if let Some(owner) = &self.owner {
            owner.adopt(&lease);
        }
        Ok(Some(self.guard(lease)))
    }

    /// Reads who holds the lock.
    ///
    /// # Errors
    /// When the name is bad or the store could not be asked.
    pub async fn inspect(&self) -> Result<KeyState> {
        self.ask_for_state(|key| Query::Keys(vec![key])).await
    }

    /// The same, and who waits for it [in order](Self::fifo): [`KeyState::queue`]. Each that waits in order has a place of its own there, also
    /// several tasks of one locker. Tasks that wait for an exclusive lock in no order have a queue within their locker, and where the
    /// store has such waiters in its queue, too, the first of them alone is there.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// use lockkit_core::{Locker, MemoryStore};
    ///
    /// let lock = Locker::new(MemoryStore::new()).lock("invoice/42").fifo();
    /// let queue = lock.inspect_queue().await?.queue.expect("this store has queues");
    /// assert!(queue.is_empty());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`inspect`](Self::inspect).
    pub async fn inspect_queue(&self) -> Result<KeyState> {
        self.ask_for_state(Query::Queue).await
    }

    async fn ask_for_state(&self, query: impl FnOnce(LockKey) -> Query) -> Result<KeyState> {
        let key = self.key.clone()?;
        let mut states = self.engine.heard(self.engine.store.inspect(&query(key.clone())).await)?;
        Ok(states.pop().unwrap_or_else(|| KeyState::unknown(key)))
    }

    pub(crate) fn store(&self) -> &Arc<dyn LockStore> {
        &self.engine.store
    }

    pub(crate) fn now(&self) -> Moment {
        self.engine.now()
    }

    /// Something for a shutdown to wait for.
    pub(crate) fn under_way(&self) -> BackgroundTask {
        BackgroundTask::new(&self.engine)
    }

    pub(crate) async fn store_identity(&self) -> Result<Identity> {
        self.engine.heard(identity(&*self.engine.store).await)
    }

    pub(crate) fn key(&self) -> Result<LockKey> {
        self.key.clone()
    }

    /// Each holder of it is seen at the store.
    pub(crate) fn not_handed_over(mut self) -> Self {
        self.terms.hands_over = false;
        self
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.terms.keep_for.is_some()
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    async fn get(&self, limit: Limit) -> Result<Option<Guard>> {
        let start = self.engine.now();
        let answer = if self.asks_to_yield && !limit.is_try() {
            // Few ask: the others do not pay for the room of its future.
            Box::pin(self.get_asking(limit)).await?
        } else {
            self.get_unasked(limit, &mut Doubts::default()).await?
        };
        if let (None, Ok(key)) = (&answer, &self.key) {
            self.engine.observe(|| Event::Contended { key, waited: self.engine.now().since(start) });
        }
        Ok(answer)
    }

    /// Without asking anybody to yield.
    async fn get_unasked(&self, limit: Limit, doubts: &mut Doubts) -> Result<Option<Guard>> {
        let (key, mode, order, terms) = (self.key.clone()?, self.mode, self.order, self.terms);
        let ask = Ask { key, mode, order, terms, ttl_is_set: self.ttl_is_set };
        let lease = match &self.owner {
            None => self.engine.acquire(&ask, limit, doubts).await?,
            // Few have an owner: the others do not pay for the room of its future, which is more than twice as large.
            Some(owner) => Box::pin(owner.acquire(&ask, limit, doubts)).await?,
        };
        Ok(lease.map(|lease| self.guard(lease)))
    }

    fn guard(&self, lease: Arc<Lease>) -> Guard {
        Guard::new(Arc::clone(&self.engine), lease, self.owner.clone())
    }
}

impl Owner {
    /// The exclusive lock of this name, held by this owner.
    pub fn lock(&self, name: impl AsRef<str>) -> Lock {
        self.hold(Lock::new(Arc::clone(&self.engine), name.as_ref(), Mode::Exclusive))
    }

    pub(crate) fn hold(&self, lock: Lock) -> Lock {
        Lock { owner: Some(self.clone()), ..lock }
    }
}
