//! What a store can do. Claims are proven by the compliance suite; what is not claimed is refused (rule R12).

use std::time::Duration;

/// What a store can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Whether [`Mode::Shared`](crate::Mode::Shared) is understood. Exclusive always is.
    pub shared: bool,
    /// Whether [`Mode::Permit`](crate::Mode::Permit) is understood.
    pub permits: bool,
    /// Whether [`Order::Fifo`](crate::Order::Fifo) is understood.
    pub fifo: bool,
    /// How a waiter learns that a lock is free.
    pub waiting: Waiting,
    /// What ends the lease of a holder that is gone.
    pub liveness: Liveness,
    /// What a fence is worth.
    pub fencing: Fencing,
    /// The longest name, in bytes.
    pub max_key_bytes: usize,
}

/// How a waiter learns that a lock is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Waiting {
    /// It asks again and again; the core does so, with back-off.
    Poll,
    /// The store wakes it, and all others that wait.
    Notify,
    /// The store keeps a queue and wakes the first.
    Queue,
}

/// What ends the lease of a holder that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Liveness {
    /// Its time to live. The store takes ttls from `min` to `max`.
    Ttl {
        /// The shortest ttl.
        min: Duration,
        /// The longest ttl.
        max: Duration,
    },
    /// The end of its session.
    Session,
}

/// What a fence is worth: how much may happen before a later grant could carry a smaller number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fencing {
    /// Fences mean nothing.
    None,
    /// They grow as long as nothing is lost; a lost counter may start again lower.
    BestEffort,
    /// They grow even when the store lost its data, unless its wall clock was **also** set back past the last fence.
    Hybrid,
    /// They grow as long as the store keeps what it committed, through crashes, restarts and changes of leader,
    /// whatever its clocks do. After a loss of all data they start again.
    Strict,
}
