//! Several locks that are held together, for code that is not async.

use std::{ops::Deref, time::Duration};

use lockkit_core::{LossReason, Outcome, OwnThread, Result};
use tokio::time::timeout;

use super::wait;

/// A [`lockkit::MultiLock`](crate::MultiLock) for code that is not async.
#[derive(Debug)]
#[must_use]
pub struct MultiLock {
    pub(super) several: lockkit_core::MultiLock,
    pub(super) thread: OwnThread,
}

impl MultiLock {
    /// Acquires all of them, waiting as long as it takes: [`lockkit::MultiLock::acquire`](crate::MultiLock::acquire).
    ///
    /// # Errors
    /// As [`lockkit::MultiLock::acquire`](crate::MultiLock::acquire).
    pub fn acquire(&self) -> Result<MultiGuard> {
        wait(&self.thread, self.several.acquire()).map(|guard| self.guard(guard))
    }

    /// Acquires all of them if all are free.
    ///
    /// # Errors
    /// As [`lockkit::MultiLock::try_acquire`](crate::MultiLock::try_acquire).
    pub fn try_acquire(&self) -> Result<Option<MultiGuard>> {
        Ok(wait(&self.thread, self.several.try_acquire())?.map(|guard| self.guard(guard)))
    }

    /// Acquires all of them if that is possible within `wait`; `None` if another had one all the while.
    ///
    /// # Errors
    /// As [`lockkit::MultiLock::acquire_within`](crate::MultiLock::acquire_within).
    pub fn acquire_within(&self, within: Duration) -> Result<Option<MultiGuard>> {
        Ok(wait(&self.thread, self.several.acquire_within(within))?.map(|guard| self.guard(guard)))
    }

    fn guard(&self, guard: lockkit_core::MultiGuard) -> MultiGuard {
        MultiGuard { guard, thread: self.thread.clone() }
    }
}

/// A [`lockkit::MultiGuard`](crate::MultiGuard) for code that is not async: the fence of each lock, and whether all are held, are told by
/// that one. As with a [`Guard`](super::Guard), nobody can stop a thread that is at work when one of the locks is lost.
#[derive(Debug)]
#[must_use = "dropping the guard releases the locks"]
pub struct MultiGuard {
    guard: lockkit_core::MultiGuard,
    thread: OwnThread,
}

impl MultiGuard {
    /// Waits until the first of them is lost, but no longer than `within`.
    #[must_use]
    pub fn lost_within(&self, within: Duration) -> Option<LossReason> {
        wait(&self.thread, async { timeout(within, self.guard.lost()).await.ok() })
    }

    /// Releases all of them, and says how they stood: [`lockkit::MultiGuard::release`](crate::MultiGuard::release).
    ///
    /// # Errors
    /// As [`lockkit::MultiGuard::release`](crate::MultiGuard::release): the releases go on in the background.
    pub fn release(self) -> Result<Outcome> {
        let Self { guard, thread } = self;
        wait(&thread, guard.release())
    }
}

impl Deref for MultiGuard {
    type Target = lockkit_core::MultiGuard;

    fn deref(&self) -> &Self::Target {
        &self.guard
    }
}
