//! The place at the head of a local queue. A lease keeps it, and the queue knows the lease that its head has: so the place itself
//! knows no more of the queues than how to leave them.

use std::{fmt, sync::Arc};

use crate::{LockKey, Moment};

/// The place at the head of a queue. The task that has it may ask the store, or holds the lease. Dropping it lets the next one
/// up, so that no way out of an acquisition can forget to.
pub(crate) struct Seat {
    queues: Arc<dyn LeaveQueue>,
    /// `None` if there is nothing to leave any more.
    pub(super) key: Option<LockKey>,
    pub(super) number: u64,
    /// Since when its holder has the lease.
    pub(crate) granted: Option<Moment>,
}

/// Where a seat is from.
pub(super) trait LeaveQueue: Send + Sync {
    /// The seat with this number is left: the next in the queue of the lock is up. Nothing happens if others went past it.
    fn leave(self: Arc<Self>, key: LockKey, number: u64);
}

impl Seat {
    pub(super) fn new(queues: Arc<dyn LeaveQueue>, key: LockKey, number: u64) -> Self {
        Self { queues, key: Some(key), number, granted: None }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Some(key) = self.key.take() {
            Arc::clone(&self.queues).leave(key, self.number);
        }
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat").field("key", &self.key).finish_non_exhaustive()
    }
}
