//! Connections that nobody uses, and what those in use have in common.

use std::{
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::store::{Reconnections, unpoisoned};
use tokio::runtime::Id;

use crate::client::{
    in_flight::InFlight,
    raw::{LONGEST_WAIT, RawConnection},
};

/// Where connections go when they are no longer in use.
pub(crate) struct Idle {
    connections: Mutex<Vec<(RawConnection, u64)>>,
    /// Raised whenever a connection broke, or the server turned out to be unfit: then those that are older are probed before
    /// they are used.
    breaks: AtomicU64,
    pub(crate) in_flight: InFlight,
    timeout: Duration,
    /// For how long a connection in doubt is kept: by then the server has answered, if it can.
    pub(crate) linger: Duration,
}

impl Idle {
    /// Of a store whose operations are bounded by `timeout`.
    pub(crate) fn new(timeout: Duration, reconnections: Reconnections) -> Self {
        let (connections, breaks, in_flight) = (Mutex::default(), AtomicU64::new(0), InFlight::new(reconnections));
        let linger = timeout.saturating_add(2 * LONGEST_WAIT);
        Self { connections, breaks, in_flight, timeout, linger }
    }

    /// After which time nothing comes any more of a statement about a claim whose operation had this bound, even if the server says
    /// nothing.
    pub(crate) fn open_for(&self, bound: Duration) -> Duration {
        // A bound below the store's is a quarter of the ttl: the lease that may have been granted is over by then.
        if bound < self.timeout { self.linger.min(bound.saturating_mul(4)) } else { self.linger }
    }

    pub(crate) fn breaks(&self) -> u64 {
        self.breaks.load(Ordering::Acquire)
    }

    /// The connection of this runtime that was used last, whose caches are warm, and how many had broken by then. If there is none, and
    /// there is no room for another one beside those that are idle, the oldest of another runtime is closed. `free`: the number of connections
    /// to which nobody has the right.
    pub(crate) fn pop(&self, runtime: Id, free: usize) -> Option<(RawConnection, u64)> {
        let mut idle = unpoisoned(&self.connections);
        if let Some(at) = idle.iter().rposition(|(raw, _)| raw.is_of(runtime)) {
            return Some(idle.remove(at));
        }
        let foreign = (idle.len() > free).then(|| idle.remove(0));
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A bound that is the store's says nothing of the ttl.
    #[test]
    fn a_statement_is_open_until_the_lease_it_asks_for_is_over_or_the_server_is_done() {
        let idle = |timeout| Idle::new(timeout, Reconnections::default());
        let (timeout, short) = (Duration::from_secs(2), Duration::from_millis(250));
        assert_eq!(idle(timeout).open_for(short), 4 * short);
        assert_eq!(idle(timeout).open_for(timeout), timeout + 2 * LONGEST_WAIT);
        assert_eq!(idle(short).open_for(short), short + 2 * LONGEST_WAIT);
    }
}
