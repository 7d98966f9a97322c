//! What a caller asks for, and how long it waits.

use std::time::Duration;

use crate::{Fence, LockKey, Mode, Moment, Order, Result, StoreInfo};

/// What a caller asks for.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) key: LockKey,
    pub(crate) mode: Mode,
    pub(crate) order: Order,
    pub(crate) terms: Terms,
    /// Whether the ttl was asked for, and is no default.
    pub(crate) ttl_is_set: bool,
}

/// What is asked of the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
    pub(crate) ttl: Duration,
    pub(crate) renew: bool,
    pub(crate) max_hold: Option<Duration>,
    /// The fence is to lie above this.
    pub(crate) fence_above: Fence,
    /// From the grant on, nobody else is to have the lock for at least so long.
    pub(crate) keep_for: Option<Duration>,
    /// Whether the lease may go to the next task of this process, unseen by the store.
    pub(crate) hands_over: bool,
}

impl Terms {
    /// Refuses what this store can't do.
    pub(super) fn check(&self, mode: Mode, order: Order, info: &StoreInfo) -> Result<()> {
        info.admit_terms(mode, order, self.ttl)?;
        info.admit_fence_above(self.fence_above)?;
        self.keep_for.map_or(Ok(()), |keep_for| info.admit_keep_for(mode, keep_for))
    }
}

/// How long a caller waits.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Limit {
    /// Not at all.
    Try,
    /// Not at all; and the store is asked no longer than a caller waits who has until the moment.
    TryWithin(Moment, Duration),
    /// Until the moment; the duration is what it was made of.
    Until(Moment, Duration),
    /// For ever.
    Forever,
}

impl Limit {
    /// What is left at `now`; `None` without a limit.
    pub(crate) fn left(self, now: Moment) -> Option<Duration> {
        match self {
            Self::Try | Self::TryWithin(..) => Some(Duration::ZERO),
            Self::Until(moment, _) => Some(moment.since(now)),
            Self::Forever => None,
        }
    }

    /// How long one call to the store may take before the caller's patience is over: the store answers in time by
    /// itself, so this is for one that doesn't. A try is bounded by the store's own limit on an operation.
    pub(super) fn hard(self, now: Moment) -> Duration {
        match self {
            Self::Until(moment, whole) | Self::TryWithin(moment, whole) => {
                (moment + (whole / 10).max(Duration::from_millis(500))).since(now)
            }
            Self::Try | Self::Forever => Duration::MAX,
        }
    }

    /// Whether this is no waiting at all.
    pub(crate) fn is_try(self) -> bool {
        matches!(self, Self::Try | Self::TryWithin(..))
    }

    /// The same caller, who does not wait.
    pub(crate) fn at_once(self) -> Self {
        match self {
            Self::Until(moment, whole) => Self::TryWithin(moment, whole),
            Self::Try | Self::TryWithin(..) => self,
            Self::Forever => Self::Try,
        }
    }

    pub(crate) fn is_over(self, now: Moment) -> bool {
        self.left(now).is_some_and(|left| left.is_zero())
    }
}

impl Ask {
    /// Only plain exclusive locks queue locally: a queue in front of a fair one would undo its order, and the others
    /// have many holders at once.
    pub(super) fn queues_locally(&self) -> bool {
        self.mode == Mode::Exclusive && self.order == Order::Any
    }
}
