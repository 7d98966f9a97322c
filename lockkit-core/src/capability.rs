//! What a store can do. Claims are proven by the compliance suite; what is not claimed is refused (rule R12).

use std::{ops::RangeInclusive, time::Duration};

use crate::LockKey;

/// What a store can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capability {
    /// Whether [`Mode::Shared`](crate::Mode::Shared) is understood. Exclusive always is. Such a store also has
    /// [`fifo`](Self::fifo), for readers and writers [wait in one queue](crate::Locker::rw_lock).
    pub shared: bool,
    /// Whether [`Mode::Permit`](crate::Mode::Permit) is understood. Such a store also has [`fifo`](Self::fifo).
    pub permits: bool,
    /// Whether [`Order::Fifo`](crate::Order::Fifo) is understood: one queue for all modes of a name.
    pub fifo: bool,
    /// Whether an exclusive lease can be let go of ([`Guard::detach`](crate::Guard::detach)) for another client to take up, and how long it
    /// lasts then: an exclusive grant may take the place of another ([`AcquireRequest::from`](crate::AcquireRequest::from)).
    pub resume: Resume,
    /// Whether a lock can be [kept](crate::Lock::keep_for) when its holder is done: a grant in the place of another, of a request that
    /// [says so](crate::AcquireRequest::keeps), may last for longer than any lease that is held, up to
    /// [`StoreInfo::LONGEST_KEPT`](crate::StoreInfo::LONGEST_KEPT), and ends by time alone. Not a quorum: what a minority of its nodes had
    /// of so long a lease would be in the way for as long.
    pub keeps: bool,
    /// Whether a writer can become a reader without a gap ([`Guard::downgrade`](crate::Guard::downgrade)): a shared grant may take the place of
    /// an exclusive one. Such a store also has [`shared`](Self::shared).
    pub downgrades: bool,
    /// How a waiter learns that a lock is free.
    pub waiting: Waiting,
    /// What ends the lease of a holder that is gone.
    pub liveness: Liveness,
    /// What a fence is worth.
    pub fencing: Fencing,
    /// The longest name, in bytes.
    pub max_key_bytes: usize,
}

impl Capability {
    /// That of a store with exclusive locks in no order, and nothing else.
    #[must_use]
    pub const fn exclusive(waiting: Waiting, liveness: Liveness, fencing: Fencing) -> Self {
        Self {
            shared: false,
            permits: false,
            fifo: false,
            resume: Resume::None,
            keeps: false,
            downgrades: false,
            waiting,
            liveness,
            fencing,
            max_key_bytes: LockKey::MAX_BYTES,
        }
    }

    /// That of a store with all kinds of locks.
    #[must_use]
    pub const fn all_kinds(waiting: Waiting, liveness: Liveness, fencing: Fencing) -> Self {
        Self {
            shared: true,
            permits: true,
            fifo: true,
            resume: Resume::UntilTtl,
            keeps: true,
            downgrades: true,
            ..Self::exclusive(waiting, liveness, fencing)
        }
    }
}

/// How long an exclusive lease lasts that its client has let go of, for another to take it up. The later ones promise more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Resume {
    /// It can't be let go of.
    None,
    /// Until its ttl is over, counted from the moment at which it was let go of, or the session of the client ends that did so, if that is
    /// earlier. The client itself ends it, while its process runs and can be reached by the servers. For a service that restarts this is
    /// no way to keep its lock.
    WhileSession,
    /// Until its ttl is over, whatever becomes of the client.
    UntilTtl,
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

/// What ends the lease of a holder that is gone: its time, its session, or both.
///
/// Where both do (a quorum with members of either kind), a holder may rely on its lease until the first of the two, and others
/// may have to wait for the last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Liveness {
    /// Leases end when their time to live is over; the store takes ttls from the shortest to the longest.
    pub ttl: Option<RangeInclusive<Duration>>,
    /// Leases end with the session of the client, at the latest so long after its last sign of life. A server may give
    /// another timeout than the one asked for, which is this one.
    pub session: Option<Duration>,
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
