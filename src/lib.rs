//! One distributed-lock API over many stores.
//!
//! What users of locks hold is named here; what authors of stores need besides is in [`store`]. All of it lives in
//! `lockkit-core`; each cargo feature adds a store.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "blocking")]
pub mod blocking;
mod connect;
#[cfg(feature = "doctor")]
mod diagnose;
mod migrating;
#[cfg(feature = "redlock")]
pub mod redlock;
mod target;
#[cfg(feature = "doctor")]
mod workload;

pub use crate::connect::{connect, connect_on_own_thread, open};
#[cfg(feature = "doctor")]
pub use crate::{diagnose::diagnose, workload::workload};

// Locks.
pub use lockkit_core::{
    Effect, Election, Error, ErrorKind, Fence, Guard, HandOver, Leader, Leaders, Lock, Locker, LockerBuilder,
    LossReason, LossSignal, Mode, MultiGuard, MultiLock, Outcome, OwnThread, Owner, Result, RwLock, Status, Term,
};

// Moving a service from one store to another.
pub use crate::migrating::{migrating, stores_of_migration};
pub use lockkit_core::migrate;

// Resources that check fences.
pub use lockkit_core::fenced;

// Who holds what, and what there is to see.
#[cfg(feature = "metrics")]
pub use lockkit_core::Metrics;
#[cfg(feature = "doctor")]
pub use lockkit_core::{ClockOffset, Finding, Severity, Workload};
pub use lockkit_core::{Event, Holder, HolderInfo, KeyState, LockKey, Observer, Token, Waiter};

// Stores, as they are connected to, wrapped, and asked for what they can do.
pub use lockkit_core::{
    Capability, Clock, FenceAbove, Fencing, Liveness, LockStore, MemoryStore, Moment, Observed, Prefix, Resume,
    ShiftedClock, StoreInfo, SystemClock, Waiting,
};

/// What authors of stores need: the contract, what its questions and answers are made of, and what stores share.
/// `docs/writing-a-backend.md` shows how.
pub mod store {
    pub use lockkit_core::{
        Alarm, Capability, Claim, Fence, Fencing, Hold, HolderInfo, Liveness, LockKey, LossReason, Mode, Resume, Token,
        Waiting, drift, store::*, url_options,
    };
}

#[cfg(feature = "mysql")]
pub use lockkit_mysql as mysql;
#[cfg(feature = "redis")]
pub use lockkit_redis as redis;
#[cfg(feature = "zk")]
pub use lockkit_zk as zk;

/// The examples of the documentation, compiled and run.
#[cfg(doctest)]
mod documentation {
    #[doc = include_str!("../README.md")]
    mod readme {}
    #[doc = include_str!("../docs/writing-a-backend.md")]
    mod writing_a_backend {}
    #[doc = include_str!("../docs/coming-from.md")]
    mod coming_from {}
    #[cfg(feature = "mysql")]
    #[doc = include_str!("../docs/fencing.md")]
    mod fencing {}
    #[cfg(feature = "doctor")]
    #[doc = include_str!("../docs/doctor.md")]
    mod doctor {}
    #[doc = include_str!("../docs/observability.md")]
    mod observability {}
    #[doc = include_str!("../docs/testing-your-application.md")]
    mod testing_your_application {}
}
