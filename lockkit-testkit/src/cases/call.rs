//! The calls whose answers are watched: what is asked, and which stores know it.

use std::time::Duration;

use lockkit_core::{AcquireRequest, LockKey, LockStore, Mode, Order, Resume};

use super::request;
use crate::BoxError;

/// How long a call waits for a lock that stays held.
const WAIT: Duration = Duration::from_millis(100);

/// The calls that are dropped, or whose answers go astray.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    AcquireNew,
    AcquireKnown,
    AcquireHeld,
    Wait,
    /// A grant in the place of another, where there are such.
    Replace,
    /// The same to keep the lock, where that is another step at the store.
    Keep,
    /// Those that come in order, and those that share a lock, where there are such.
    InOrder,
    WaitInOrder,
    Share,
    /// A reader's grant in the place of a writer's.
    Downgrade,
    RenewShared,
    ReleaseShared,
    /// The release of an exclusive lock that was asked for in order.
    ReleaseInOrder,
    Renew,
    /// A renewal that also raises the fence counter and changes the holder's name.
    Change,
    Release,
    ReleaseForeign,
    Inspect,
    InspectPrefix,
    InspectQueue,
    /// A renewal for which the client has to connect first.
    Connect,
    ReadRecord,
    MakeRecord,
    ChangeRecord,
}

impl Call {
    /// Those about locks.
    pub(super) const LOCKS: [Self; 21] = [
        Self::AcquireNew,
        Self::AcquireKnown,
        Self::AcquireHeld,
        Self::Wait,
        Self::Replace,
        Self::Keep,
        Self::Renew,
        Self::Change,
        Self::Release,
        Self::ReleaseForeign,
        Self::Inspect,
        Self::InspectPrefix,
        Self::InspectQueue,
        Self::Connect,
        Self::InOrder,
        Self::WaitInOrder,
        Self::Share,
        Self::Downgrade,
        Self::RenewShared,
        Self::ReleaseShared,
        Self::ReleaseInOrder,
    ];
    /// Those about records.
    pub(super) const RECORDS: [Self; 3] = [Self::ReadRecord, Self::MakeRecord, Self::ChangeRecord];

    /// Whether a store does not know it.
    pub(super) fn is_lacking(self, store: &dyn LockStore) -> bool {
        let capability = &store.info().capability;
        match self {
            Self::Replace => capability.resume == Resume::None,
            // Where a lease can outlive its client it is what the other one asks.
            Self::Keep => !capability.keeps || capability.resume == Resume::UntilTtl,
            Self::Downgrade => !capability.downgrades || !capability.shared,
            // Without queues it is the question for one key, which another call asks.
            Self::InOrder | Self::WaitInOrder | Self::ReleaseInOrder | Self::InspectQueue => !capability.fifo,
            Self::Share | Self::RenewShared | Self::ReleaseShared => !capability.shared,
            _ => false,
        }
    }

    /// Whether it is about a lock that is shared or has an order.
    pub(super) fn is_of_kinds(self) -> bool {
        matches!(
            self,
            Self::InOrder
                | Self::WaitInOrder
                | Self::InspectQueue
                | Self::Share
                | Self::Downgrade
                | Self::RenewShared
                | Self::ReleaseShared
                | Self::ReleaseInOrder
        )
    }

    /// A request for a lock of the kind that the call is about.
    pub(super) fn request(self, key: &LockKey, ttl: Duration) -> Result<AcquireRequest, BoxError> {
        let mut asked = request(key, ttl)?;
        match self {
            Self::InOrder | Self::WaitInOrder | Self::ReleaseInOrder => asked.order = Order::Fifo,
            Self::Share | Self::RenewShared | Self::ReleaseShared => {
                (asked.claim.mode, asked.order) = (Mode::Shared, Order::Fifo);
            }
            Self::Downgrade => asked.claim.mode = Mode::Shared,
            _ => {}
        }
        Ok(asked)
    }

    /// How long an acquisition waits.
    pub(super) fn wait(self) -> Duration {
        if matches!(self, Self::Wait | Self::WaitInOrder) { WAIT } else { Duration::ZERO }
    }
}
