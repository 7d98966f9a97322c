//! Connections that nobody uses, and what those in use have in common.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::store::unpoisoned;
use tokio::runtime::Id;

use crate::client::{in_flight::InFlight, raw::RawConnection};

/// Where connections go when they are no longer in use.
pub(crate) struct Idle {
    connections: Mutex<Vec<(RawConnection, u64)>>,
    /// Raised whenever a connection broke, or the server turned out to be unfit: then those that are older are probed before
    /// they are used.
    breaks: AtomicU64,
    pub(crate) in_flight: InFlight,
    /// For how long a connection in doubt is kept: by then the server has answered, if it can.
    pub(crate) linger: Duration,
}

impl Idle {
    pub(crate) fn new(linger: Duration) -> Self {
        let (connections, breaks, in_flight) = (Mutex::default(), AtomicU64::new(0), InFlight::default());
        Self { connections, breaks, in_flight, linger }
    }

    pub(crate) fn breaks(&self) -> u64 {
        self.breaks.load(Ordering::Acquire)
    }

    /// The connection of this runtime that was used last, whose caches are warm, and how many had broken by then. If there
    /// is none, one of another runtime is closed to make room.
    pub(crate) fn pop(&self, runtime: Id) -> Option<(RawConnection, u64)> {
        let mut idle = unpoisoned(&self.connections);
        if let Some(at) = idle.iter().rposition(|(raw, _)| raw.is_of(runtime)) {
            return Some(idle.remove(at));
        }
        let foreign = idle.pop();
        drop(idle);
        drop(foreign);
        None
    }

    pub(crate) fn len(&self) -> usize {
        unpoisoned(&self.connections).len()
    }

    pub(crate) fn push(&self, raw: RawConnection, breaks: u64) {
        unpoisoned(&self.connections).push((raw, breaks));
    }

    /// Something came up that concerns all connections: they are probed before they are used again.
    pub(crate) fn broke(&self) {
        self.breaks.fetch_add(1, Ordering::AcqRel);
    }
}
