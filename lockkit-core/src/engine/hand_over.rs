//! What the next in a local queue gets: its turn at the store, or the lease itself, and how often that.

use std::{fmt, sync::Arc, time::Duration};

use super::{lease::Lease, outstanding::BackgroundTask, seat::Seat};
use crate::Error;

/// How often a lease may go from one local holder to the next before other processes get their turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandOver {
    /// At most so many times in a row; 0 turns hand-over off, and more than [`MOST`](Self::MOST) counts as that.
    pub times: u32,
    /// At most for so long in a row.
    pub within: Duration,
}

impl Default for HandOver {
    /// 64 times or 50 ms, whichever comes first.
    fn default() -> Self {
        Self { times: 64, within: Duration::from_millis(50) }
    }
}

impl HandOver {
    /// No hand-over: every release goes to the store.
    pub const OFF: Self = Self { times: 0, within: Duration::ZERO };
    /// The most times in a row: a grant owns a fence for each.
    pub const MOST: u32 = 1000;
}

/// What a waiter gets when it is up.
#[derive(Debug)]
pub(crate) enum Turn {
    /// Ask the store.
    Ask(Seat),
    /// Here is the lease.
    Take(Handed),
    /// The store has failed for too long; this was its last error.
    Fail(Error),
}

/// A lease on its way to the next holder; if that one is gone, its `Drop` finds another home for it.
pub(crate) struct Handed {
    lease: Option<Arc<Lease>>,
    /// A shutdown waits for it.
    engine: BackgroundTask,
}

impl Handed {
    pub(super) fn new(lease: Arc<Lease>, engine: BackgroundTask) -> Self {
        Self { lease: Some(lease), engine }
    }

    /// The lease, unless it ran out on the way or was taken back.
    pub(crate) fn accept(mut self) -> Option<Arc<Lease>> {
        let lease = self.lease.take()?;
        self.engine.engine().take(&lease).then_some(lease)
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.engine.engine().let_go(&lease);
        }
    }
}

impl fmt::Debug for Handed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handed").field("lease", &self.lease).finish_non_exhaustive()
    }
}
