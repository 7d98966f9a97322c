//! The two sides of a readers-writer lock.

use std::sync::Arc;

use crate::{Lock, Mode, Owner, engine::Engine};

/// The two sides of a readers-writer lock: [`Locker::rw_lock`](crate::Locker::rw_lock), [`Owner::rw_lock`].
#[derive(Clone, Debug)]
pub struct RwLock {
    read: Lock,
    write: Lock,
}

impl RwLock {
    pub(crate) fn new(engine: &Arc<Engine>, name: &str) -> Self {
        let side = |mode| Lock::new(Arc::clone(engine), name, mode).fifo();
        Self { read: side(Mode::Shared), write: side(Mode::Exclusive) }
    }

    /// The side that many can hold at once.
    pub fn read(&self) -> Lock {
        self.read.clone()
    }

    /// The side that excludes all others.
    pub fn write(&self) -> Lock {
        self.write.clone()
    }
}

impl Owner {
    /// The two sides of the readers-writer lock of this name, held by this owner.
    ///
    /// An owner that reads may read again, also while a writer waits, and one that writes may read and write again: such holds
    /// share one lease, as those of [`lock`](Self::lock) do; two tasks that ask to read at the same moment may get one each. **An owner that reads can't write**: it would wait for itself, and two that
    /// read and wait to write would wait for each other for ever. It is refused, and has to release what it has for reading first.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
    /// use lockkit_core::{ErrorKind, Locker, MemoryStore};
    ///
    /// let owner = Locker::new(MemoryStore::new()).owner();
    /// let prices = owner.rw_lock("prices");
    /// let reader = prices.read().acquire().await?;
    /// assert_eq!(prices.write().acquire().await.expect_err("reads").kind(), ErrorKind::InvalidInput);
    /// reader.release().await?;
    /// let writer = prices.write().acquire().await?;
    /// let within = prices.read().acquire().await?;
    /// assert_eq!(within.fence(), writer.fence());
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// As [`Locker::rw_lock`](crate::Locker::rw_lock); `InvalidInput` for one that reads and asks to write.
    pub fn rw_lock(&self, name: impl AsRef<str>) -> RwLock {
        let RwLock { read, write } = RwLock::new(&self.engine, name.as_ref());
        RwLock { read: self.hold(read), write: self.hold(write) }
    }
}
