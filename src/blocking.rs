//! Locks for code that is not async.
//!
//! The same locks, the same engine: a [`Locker`] has a [thread of its own](OwnThread) on which it talks to its store and renews its
//! leases, and each call here blocks the thread that it is made on until the answer is there. It may be made on any
//! other thread, also on that of a runtime, which does nothing else meanwhile. On the locker's own thread it would wait for itself,
//! and panics.
//!
//! What has no blocking form of its own is done with [`Locker::block_on`] and [`Locker::asynchronous`].
//!
//! ```
//! # fn main() -> lockkit::Result<()> {
//! use std::time::Duration;
//!
//! let locker = lockkit::blocking::connect("memory:")?;
//! let lock = locker.lock("invoice/42").ttl(Duration::from_secs(10));
//! if let Some(guard) = lock.acquire_within(Duration::from_secs(5))? {
//!     println!("fence {}", guard.fence()); // hand it to what the lock protects
//!     guard.release()?;
//! }
//! # Ok(()) }
//! ```

mod election;
mod multi;

use std::{future::Future, num::NonZeroU32, ops::Deref, time::Duration};

use lockkit_core::{Fence, KeyState, LossReason, Outcome, OwnThread, Result, Token};

pub use self::{
    election::{Election, Leaders, Term},
    multi::{MultiGuard, MultiLock},
};

/// Connects to the store at `url`, as [`lockkit::connect`](crate::connect) does.
///
/// # Errors
/// Those of [`lockkit::connect`](crate::connect); `Unavailable` also when no thread could be started.
pub fn connect(url: &str) -> Result<Locker> {
    let url = url.to_owned();
    Locker::build(|thread| async move {
        Ok(lockkit_core::Locker::shared_builder(crate::open(&url).await?).own_thread(thread).build())
    })
}

/// Waits for a future on this thread, with the timers of the locker's.
fn wait<F: Future>(thread: &OwnThread, future: F) -> F::Output {
    assert!(
        !thread.is_current(),
        "a blocking call on the thread of its locker would wait for itself: use the asynchronous one"
    );
    let _entered = thread.handle().enter();
    // A task of a runtime that this thread is in the middle of may have used up its budget, and gets no new one meanwhile.
    pollster::block_on(tokio::task::unconstrained(future))
}

/// A [`lockkit::Locker`](crate::Locker) for code that is not async. Clones share everything.
#[derive(Clone, Debug)]
pub struct Locker {
    locker: lockkit_core::Locker,
    thread: OwnThread,
}

impl Locker {
    /// A locker with settings of your own: `build` makes it, and is to connect its store, on the thread that the locker has for
    /// itself. Give that to [`own_thread`](crate::LockerBuilder::own_thread).
    ///
    /// ```
    /// # fn main() -> lockkit::Result<()> {
    /// use lockkit::{HolderInfo, Locker, blocking};
    ///
    /// let locker = blocking::Locker::build(|thread| async move {
    ///     let builder = Locker::shared_builder(lockkit::open("memory:").await?);
    ///     Ok(builder.holder(HolderInfo::new("billing")).own_thread(thread).build())
    /// })?;
    /// # drop(locker.lock("invoice/42").acquire()?);
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of `build`; `Unavailable` when no thread could be started.
    ///
    /// # Panics
    /// When `build` does.
    pub fn build<F>(build: impl FnOnce(OwnThread) -> F) -> Result<Self>
    where
        F: Future<Output = Result<lockkit_core::Locker>> + Send + 'static,
    {
        let thread = OwnThread::start()?;
        let locker = wait(&thread, thread.run(build(thread.clone())))?;
        Ok(Self { locker, thread })
    }

    /// The exclusive lock of this name: [`lockkit::Locker::lock`](crate::Locker::lock).
    pub fn lock(&self, name: impl AsRef<str>) -> Lock {
        self.of(self.locker.lock(name))
    }

    /// The reading side of the readers-writer lock of this name: [`lockkit::Locker::rw_lock`](crate::Locker::rw_lock).
    pub fn read(&self, name: impl AsRef<str>) -> Lock {
        self.of(self.locker.rw_lock(name).read())
    }

    /// The writing side of the readers-writer lock of this name: [`lockkit::Locker::rw_lock`](crate::Locker::rw_lock).
    pub fn write(&self, name: impl AsRef<str>) -> Lock {
        self.of(self.locker.rw_lock(name).write())
    }

    /// The semaphore of this name: [`lockkit::Locker::semaphore`](crate::Locker::semaphore).
    pub fn semaphore(&self, name: impl AsRef<str>, permits: NonZeroU32) -> Lock {
        self.of(self.locker.semaphore(name, permits))
    }

    /// The exclusive locks of these names, all or none: [`lockkit::Locker::multi`](crate::Locker::multi).
    ///
    /// ```
    /// # fn main() -> lockkit::Result<()> {
    /// let locker = lockkit::blocking::connect("memory:")?;
    /// let both = locker.multi(["account/2", "account/1"]).acquire()?;
    /// let fences: Vec<_> = both.guards().iter().map(|guard| guard.fence()).collect();
    /// assert!(locker.lock("account/1").try_acquire()?.is_none());
    /// both.release()?;
    /// # assert_eq!(fences.len(), 2);
    /// # Ok(()) }
    /// ```
    pub fn multi<N: AsRef<str>>(&self, names: impl IntoIterator<Item = N>) -> MultiLock {
        self.of_multi(self.locker.multi(names))
    }

    /// The election of this name: [`lockkit::Locker::election`](crate::Locker::election).
    pub fn election(&self, name: impl AsRef<str>) -> Election {
        Election { election: self.locker.election(name), thread: self.thread.clone() }
    }

    /// Several locks of [asynchronous](Self::asynchronous) lockers: with [settings of their own](crate::MultiLock::new), or of several
    /// stores.
    pub fn of_multi(&self, several: lockkit_core::MultiLock) -> MultiLock {
        MultiLock { several, thread: self.thread.clone() }
    }

    /// A lock that was made of the [asynchronous](Self::asynchronous) locker, such as that of an [`Owner`](crate::Owner).
    pub fn of(&self, lock: lockkit_core::Lock) -> Lock {
        Lock { lock, thread: self.thread.clone() }
    }

    /// The locker that this one blocks on.
    #[must_use]
    pub fn asynchronous(&self) -> &lockkit_core::Locker {
        &self.locker
    }

    /// Waits on this thread for what [`asynchronous`](Self::asynchronous) gives.
    ///
    /// # Panics
    /// When `future` does.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        wait(&self.thread, future)
    }

    /// Ends what waits, and waits until every release under way is done:
    /// [`lockkit::Locker::shutdown`](crate::Locker::shutdown).
    ///
    /// # Errors
    /// [`TimedOut`](crate::ErrorKind::TimedOut) if releases were still under way after `timeout`. They go on.
    pub fn shutdown(&self, timeout: Duration) -> Result<()> {
        self.block_on(self.locker.shutdown(timeout))
    }
}

/// A [`lockkit::Lock`](crate::Lock) for code that is not async.
#[derive(Clone, Debug)]
#[must_use]
pub struct Lock {
    lock: lockkit_core::Lock,
    thread: OwnThread,
}

impl Lock {
    fn with(self, set: impl FnOnce(lockkit_core::Lock) -> lockkit_core::Lock) -> Self {
        Self { lock: set(self.lock), thread: self.thread }
    }

    /// How long a lease lasts when it is not renewed: [`lockkit::Lock::ttl`](crate::Lock::ttl).
    pub fn ttl(self, ttl: Duration) -> Self {
        self.with(|lock| lock.ttl(ttl))
    }

    /// Leaves the lease unrenewed: [`lockkit::Lock::no_renewal`](crate::Lock::no_renewal).
    pub fn no_renewal(self) -> Self {
        self.with(lockkit_core::Lock::no_renewal)
    }

    /// Ends the guard when it was kept for so long: [`lockkit::Lock::max_hold`](crate::Lock::max_hold).
    pub fn max_hold(self, limit: Duration) -> Self {
        self.with(|lock| lock.max_hold(limit))
    }

    /// Keeps the lock from all others for at least this long: [`lockkit::Lock::keep_for`](crate::Lock::keep_for).
    pub fn keep_for(self, at_least: Duration) -> Self {
        self.with(|lock| lock.keep_for(at_least))
    }

    /// Every fence lies above this number: [`lockkit::Lock::fence_above`](crate::Lock::fence_above).
    pub fn fence_above(self, fence: Fence) -> Self {
        self.with(|lock| lock.fence_above(fence))
    }

    /// First come, first served: [`lockkit::Lock::fifo`](crate::Lock::fifo).
    pub fn fifo(self) -> Self {
        self.with(lockkit_core::Lock::fifo)
    }

    /// Asks the holder to yield while this waits: [`lockkit::Lock::ask_to_yield`](crate::Lock::ask_to_yield).
    pub fn ask_to_yield(self) -> Self {
        self.with(lockkit_core::Lock::ask_to_yield)
    }

    /// Acquires the lock, waiting as long as it takes.
    ///
    /// # Errors
    /// As [`lockkit::Lock::acquire`](crate::Lock::acquire).
    pub fn acquire(&self) -> Result<Guard> {
        self.wait(self.lock.acquire()).map(|guard| self.guard(guard))
    }

    /// Acquires the lock if it is free.
    ///
    /// # Errors
    /// As [`lockkit::Lock::try_acquire`](crate::Lock::try_acquire).
    pub fn try_acquire(&self) -> Result<Option<Guard>> {
        Ok(self.wait(self.lock.try_acquire())?.map(|guard| self.guard(guard)))
    }

    /// Acquires the lock if it becomes free within `wait`; `None` if another had it all the while.
    ///
    /// # Errors
    /// As [`lockkit::Lock::acquire_within`](crate::Lock::acquire_within).
    pub fn acquire_within(&self, wait: Duration) -> Result<Option<Guard>> {
        Ok(self.wait(self.lock.acquire_within(wait))?.map(|guard| self.guard(guard)))
    }

    /// Takes up the lease that this token holds: [`lockkit::Lock::resume`](crate::Lock::resume).
    ///
    /// # Errors
    /// As [`lockkit::Lock::resume`](crate::Lock::resume).
    pub fn resume(&self, token: Token) -> Result<Option<Guard>> {
        Ok(self.wait(self.lock.resume(token))?.map(|guard| self.guard(guard)))
    }

    /// Reads who holds the lock.
    ///
    /// # Errors
    /// When the name is bad or the store could not be asked.
    pub fn inspect(&self) -> Result<KeyState> {
        self.wait(self.lock.inspect())
    }

    fn wait<F: Future>(&self, future: F) -> F::Output {
        wait(&self.thread, future)
    }

    fn guard(&self, guard: lockkit_core::Guard) -> Guard {
        Guard { guard, thread: self.thread.clone() }
    }
}

/// A [`lockkit::Guard`](crate::Guard) for code that is not async: its fence, status and the like are those of that one.
///
/// The lease is renewed on the locker's thread until the guard is released, dropped, or lost. Nobody can stop a thread that is
/// at work when the lease is lost: ask [`is_held`](crate::Guard::is_held) or [`ensure`](crate::Guard::ensure) before each step,
/// and have the resource check the [fence](crate::Guard::fence).
#[derive(Debug)]
#[must_use = "dropping a guard releases the lock"]
pub struct Guard {
    guard: lockkit_core::Guard,
    thread: OwnThread,
}

impl Guard {
    /// Renews the lease now: [`lockkit::Guard::renew`](crate::Guard::renew).
    ///
    /// # Errors
    /// As [`lockkit::Guard::renew`](crate::Guard::renew).
    pub fn renew(&self) -> Result<()> {
        wait(&self.thread, self.guard.renew())
    }

    /// Waits until the lease is lost, but no longer than `timeout`.
    #[must_use]
    pub fn lost_within(&self, timeout: Duration) -> Option<LossReason> {
        wait(&self.thread, async { tokio::time::timeout(timeout, self.guard.lost()).await.ok() })
    }

    /// Releases the lock, and says how that went: [`lockkit::Guard::release`](crate::Guard::release).
    ///
    /// # Errors
    /// As [`lockkit::Guard::release`](crate::Guard::release): the release goes on in the background.
    pub fn release(self) -> Result<Outcome> {
        let Self { guard, thread } = self;
        wait(&thread, guard.release())
    }

    /// Releases the lock although it was to be kept from others: [`lockkit::Guard::release_early`](crate::Guard::release_early).
    ///
    /// # Errors
    /// As [`release`](Self::release).
    pub fn release_early(self) -> Result<Outcome> {
        let Self { guard, thread } = self;
        wait(&thread, guard.release_early())
    }

    /// Whether a waiter asks for the lock: [`lockkit::Guard::yield_requested`](crate::Guard::yield_requested).
    ///
    /// # Errors
    /// As [`lockkit::Guard::yield_requested`](crate::Guard::yield_requested).
    pub fn yield_requested(&self) -> Result<bool> {
        wait(&self.thread, self.guard.yield_requested())
    }

    /// Makes this writer a reader, without a gap: [`lockkit::Guard::downgrade`](crate::Guard::downgrade).
    ///
    /// # Errors
    /// As [`lockkit::Guard::downgrade`](crate::Guard::downgrade).
    pub fn downgrade(self) -> Result<Self> {
        let Self { guard, thread } = self;
        let guard = wait(&thread, guard.downgrade())?;
        Ok(Self { guard, thread })
    }

    /// Ends the guard, and leaves the lease to the one that has its token: [`lockkit::Guard::detach`](crate::Guard::detach).
    ///
    /// # Errors
    /// As [`lockkit::Guard::detach`](crate::Guard::detach).
    pub fn detach(self) -> Result<Token> {
        self.guard.detach()
    }
}

impl Deref for Guard {
    type Target = lockkit_core::Guard;

    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}
