//! The entry point: a store made into locks.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use tokio::runtime::Handle;

use crate::{
    Alarm, Claim, Election, Event, HandOver, HolderInfo, KeyState, Lock, LockKey, LockStore, LossReason, Mode,
    MultiLock, Observer, OwnThread, Owner, Query, Release, Result, RwLock, StoreInfo, Token,
    engine::{Engine, Home, Settings},
};

/// Makes locks of a store. Cheap to clone; all clones share one connection, one local queue and one renewal task.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
/// use lockkit_core::{Locker, MemoryStore};
///
/// let locker = Locker::new(MemoryStore::new());
/// let guard = locker.lock("invoice/42").acquire().await?;
/// assert!(locker.lock("invoice/42").try_acquire().await?.is_none());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Locker {
    engine: Arc<Engine>,
}

/// Builds a [`Locker`] with other than default settings.
#[derive(Debug)]
#[must_use]
pub struct LockerBuilder {
    store: Arc<dyn LockStore>,
    settings: Settings,
    runtime: Option<Handle>,
    thread: Option<OwnThread>,
}

impl Locker {
    /// A locker over `store` with default settings.
    pub fn new(store: impl LockStore) -> Self {
        Self::builder(store).build()
    }

    /// A builder of a locker over `store`.
    pub fn builder(store: impl LockStore) -> LockerBuilder {
        Self::shared_builder(Arc::new(store))
    }

    /// A builder of a locker over a store that is shared already.
    pub fn shared_builder(store: Arc<dyn LockStore>) -> LockerBuilder {
        let settings = Settings {
            holder: HolderInfo::this_process(),
            hand_over: HandOver::default(),
            patience: Duration::from_secs(5),
            observer: None,
        };
        LockerBuilder { store, settings, runtime: None, thread: None }
    }

    /// The exclusive lock of this name. No I/O; a bad name is reported by the first acquisition.
    pub fn lock(&self, name: impl AsRef<str>) -> Lock {
        Lock::new(Arc::clone(&self.engine), name.as_ref(), Mode::Exclusive)
    }

    /// The two sides of the readers-writer lock of this name. No I/O; a bad name is reported by the first acquisition.
    ///
    /// Readers share the lock, a writer has it alone. Each reader has a lease of its own, which is renewed, lapses and is
    /// released by itself: a writer gets in when the last of them has ended. Both sides wait in one queue, in the
    /// [order](Lock::fifo) in which they came: a reader that comes behind a waiting writer waits, so that writers do not
    /// starve, and readers that stand in front together get in together. There is no way from reading to writing but to
    /// release the one and acquire the other.
    ///
    /// **A task that keeps its guard as a reader and waits to write waits for itself**, and all that come behind it wait, too. So does one that
    /// asks to read again beside its own guard, as soon as a writer waits. That is not refused, for nobody can tell it from two tasks, of
    /// which one will release its guard: [`acquire_within`](Lock::acquire_within) ends such a wait. An [`Owner`] can be told from others:
    /// [`Owner::rw_lock`] lets it read again, and refuses it as a writer while it reads.
    ///
    /// A reader's fence lies above those of all writers before it, and below those of all after it; readers that share the lock may
    /// have one, or one each. A [resource that checks fences](crate::fenced) takes them by
    /// [`claim_shared`](crate::fenced::FencedResource::claim_shared).
    ///
    /// [`lock`](Self::lock) of the same name excludes both sides and is excluded by them. It does not queue: it gets in when
    /// nobody has the lock, and on most stores only when nobody waits for it either, which may take long under load. Users of one
    /// name should agree on the order.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// use lockkit_core::{Locker, MemoryStore};
    ///
    /// let prices = Locker::new(MemoryStore::new()).rw_lock("prices");
    /// let (one, another) = (prices.read().acquire().await?, prices.read().acquire().await?);
    /// assert!(prices.write().try_acquire().await?.is_none());
    /// one.release().await?;
    /// another.release().await?;
    /// let writer = prices.write().acquire().await?;
    /// assert!(prices.read().try_acquire().await?.is_none());
    /// # drop(writer);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Stores without [`Capability::shared`](crate::Capability::shared) refuse the reading side as `Unsupported`, and those
    /// without [`Capability::fifo`](crate::Capability::fifo) both.
    pub fn rw_lock(&self, name: impl AsRef<str>) -> RwLock {
        RwLock::new(&self.engine, name.as_ref())
    }

    /// The semaphore of this name, of which each guard holds one of `permits` permits. No I/O; a bad name is reported by the
    /// first acquisition.
    ///
    /// Each permit has a lease of its own, and is there again when that is released or lapses. Those that wait get theirs in
    /// the [order](Lock::fifo) in which they came. All users of a name must agree on the number of permits: as long as anybody
    /// holds or awaits one, another number is refused as `InvalidInput`. To change it, acquire the exclusive lock of the name in order
    /// ([`lock`](Self::lock)`(name).`[`fifo`](Lock::fifo)`()`), which waits until all permits are back and lets none out, replace the clients
    /// by those that know the new number, and release it. Exclusive locks of the same name, and readers, exclude
    /// the permits and are excluded by them; as to [`lock`](Self::lock), see [`rw_lock`](Self::rw_lock).
    ///
    /// A permit's fence is larger than those of all permits before it, but is an order and no admission: others that were given out
    /// earlier are still held. A [resource that checks fences](crate::fenced) would refuse them, and is not to be shown it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// use std::num::NonZeroU32;
    /// use lockkit_core::{Locker, MemoryStore};
    ///
    /// let two = NonZeroU32::new(2).expect("not zero");
    /// let printers = Locker::new(MemoryStore::new()).semaphore("printers", two);
    /// let (one, another) = (printers.acquire().await?, printers.acquire().await?);
    /// assert!(printers.try_acquire().await?.is_none());
    /// one.release().await?;
    /// assert!(printers.try_acquire().await?.is_some());
    /// # drop(another);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Stores without [`Capability::permits`](crate::Capability::permits) and [`Capability::fifo`](crate::Capability::fifo)
    /// refuse it as `Unsupported`.
    pub fn semaphore(&self, name: impl AsRef<str>, permits: NonZeroU32) -> Lock {
        Lock::new(Arc::clone(&self.engine), name.as_ref(), Mode::Permit { limit: permits }).fifo()
    }

    /// The exclusive locks of these names, all or none. For other settings, and locks of several lockers, see [`MultiLock::new`].
    pub fn multi<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> MultiLock {
        MultiLock::new(names.into_iter().map(|name| self.lock(name)))
    }

    /// The election of this name, in which this locker is a candidate under its [holder](LockerBuilder::holder)'s name. No I/O; a bad
    /// name is reported by the first campaign. It excludes the [`lock`](Self::lock) of the same name, and its holder looks like a leader.
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        let lock = self.lock(name).not_handed_over();
        Election::new(if self.info().capability.fifo { lock.fifo() } else { lock })
    }

    /// A new identity for reentrant locks.
    #[must_use]
    pub fn owner(&self) -> Owner {
        Owner::new(Arc::clone(&self.engine))
    }

    /// What the store is and can do.
    #[must_use]
    pub fn info(&self) -> &StoreInfo {
        self.engine.store.info()
    }

    /// What puts locks at risk in the store, as connecting to it showed: a line each, without secrets. Log them. An
    /// [`Observer`] is told of each as [`Event::Warned`](crate::Event::Warned).
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.info().warnings
    }

    /// Reads who holds what.
    ///
    /// # Errors
    /// When the store could not be asked.
    pub async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.engine.heard(self.engine.store.inspect(query).await)
    }

    /// Ends the lease of another holder, named by the token that [`inspect`](Self::inspect) shows, so that a newer lease can't be
    /// hit. (A lease that the tasks of one process [hand on](crate::HandOver) stays the same.) The holder learns of it at its next renewal, on ZooKeeper at once: until then, for
    /// about a third of its ttl, or all of it if it does not renew, it may still be at work.
    ///
    /// # Errors
    /// When the name is bad or the store could not be asked.
    ///
    /// # Cancellation
    /// The lease may have ended.
    pub async fn break_lock(&self, name: impl AsRef<str>, token: Token) -> Result<Release> {
        let mut claim = Claim { key: LockKey::new(name.as_ref())?, token, mode: Mode::Exclusive };
        // A store takes the end of a lease of its own for its holder's wish, and raises no alarm.
        let _alert = Alert { alarm: self.info().alarm.as_ref(), token };
        let mut release = self.engine.heard(self.engine.store.release(&claim).await)?;
        if matches!(release, Release::NotHeld(LossReason::Taken)) && self.info().capability.shared {
            // It may be one of several that share the lock.
            claim.mode = Mode::Shared;
            release = self.engine.heard(self.engine.store.release(&claim).await)?;
        }
        Ok(release)
    }

    /// Refuses new acquisitions and ends those that wait ([`Closed`](crate::ErrorKind::Closed)), then waits until every
    /// release under way is done, also of what those had asked for. Guards stay valid until they are released, dropped or
    /// lost.
    ///
    /// # Errors
    /// [`TimedOut`](crate::ErrorKind::TimedOut) if releases were still under way after `timeout`. They go on. An
    /// acquisition that nobody polls meanwhile counts as one.
    pub async fn shutdown(&self, timeout: Duration) -> Result<()> {
        self.engine.shutdown(timeout).await
    }
}

/// Has the holder of a lease look at it when this is dropped: then its end was asked for, whatever has come of that. If the lease still
/// stands, the look costs one renewal.
struct Alert<'a> {
    alarm: Option<&'a Alarm>,
    token: Token,
}

impl Drop for Alert<'_> {
    fn drop(&mut self) {
        if let Some(alarm) = self.alarm {
            alarm.raise(self.token);
        }
    }
}

impl LockerBuilder {
    /// The holder's name, as shown to others. Default: [`HolderInfo::this_process`].
    pub fn holder(mut self, holder: HolderInfo) -> Self {
        self.settings.holder = holder;
        self
    }

    /// How often a lease may go from one task of this process to the next before other processes get their turn.
    pub fn hand_over(mut self, rule: HandOver) -> Self {
        self.settings.hand_over = HandOver { times: rule.times.min(HandOver::MOST), ..rule };
        self
    }

    /// How long a waiting acquisition goes on asking a store that gives nothing but errors before it reports the last
    /// one. Default: 5 s. A try reports the first error.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.settings.patience = patience;
        self
    }

    /// The observer that is told what happens.
    pub fn observer(mut self, observer: impl Observer) -> Self {
        self.settings.observer = Some(Arc::new(observer));
        self
    }

    /// The runtime on which leases are renewed and all other background work is done. Default: the one that
    /// [`build`](Self::build) is called on, or, if that is none, the first one that the locker is used on.
    ///
    /// Renewals come only while it is driven: a current-thread runtime whose `block_on` returns after each call renews
    /// nothing in between, and releases nothing whose guard was dropped: where leases end with the session, such a lock stays held for as
    /// long as the session lasts. [`own_thread`](Self::own_thread) is for those. If the runtime ends, one on which a lease was
    /// taken takes its place, or else the next one that the locker is used on; releases that were not answered are made again
    /// there. If the locker goes with its runtime, and its store lives on elsewhere, nobody makes them: [`shutdown`](Locker::shutdown) comes
    /// before that.
    pub fn runtime(mut self, runtime: Handle) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// Has all background work done on a thread of its own, so that leases are renewed also while the application blocks
    /// its runtimes. A store that was connected elsewhere may still depend on those: see [`OwnThread`].
    pub fn own_thread(mut self, thread: OwnThread) -> Self {
        self.thread = Some(thread);
        self
    }

    /// The locker. No I/O. The observer is told what connecting to the store [warned](Locker::warnings) of.
    #[must_use]
    pub fn build(self) -> Locker {
        let locker = Locker { engine: Engine::new(self.store, self.settings, Home::new(self.runtime, self.thread)) };
        for warning in locker.warnings() {
            locker.engine.observe(|| Event::Warned { warning });
        }
        locker
    }
}
