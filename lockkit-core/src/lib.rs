//! The core of lockkit: the contract that stores keep, the engine that makes locks of it, and the in-memory store.
//!
//! ```text
//!   Locker ── Lock ── Guard          what users hold
//!      │
//!   engine: local queue, waiting, renewal, owners, reaper     written once
//!      │
//!   LockStore (five questions)       what a backend implements: store.rs
//! ```
//!
//! Applications usually depend on the facade crate `lockkit`, which has what they hold by name, and the rest in `lockkit::store`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod alarm;
mod capability;
mod clock;
mod election;
mod engine;
mod error;
pub mod fenced;
mod finding;
mod guard;
mod key;
mod lock;
mod locker;
mod loss;
mod memory;
pub mod migrate;
mod multi;
mod observe;
mod owner;
mod rw_lock;
pub mod store;
mod thread;
mod types;
pub mod url_options;
mod workload;
mod wrap;
mod yielding;

#[cfg(feature = "metrics")]
pub use observe::Metrics;
pub use {
    alarm::Alarm,
    capability::{Capability, Fencing, Liveness, Resume, Waiting},
    clock::{Clock, Moment, ShiftedClock, SystemClock},
    election::{Election, Leader, Leaders, Term},
    engine::HandOver,
    error::{Effect, Error, ErrorKind, Result},
    finding::{ClockOffset, Finding, Severity, said_once},
    guard::{Guard, Outcome, Status},
    key::LockKey,
    lock::Lock,
    locker::{Locker, LockerBuilder},
    loss::LossSignal,
    memory::MemoryStore,
    multi::{MultiGuard, MultiLock},
    observe::{Event, Observer},
    owner::Owner,
    rw_lock::RwLock,
    store::{
        AcquireRequest, Attempt, Contention, FenceClock, FenceRequest, Holder, KeyState, LockStore, Order, Query,
        Release, Renewal, Renewed, StoreInfo, Waiter,
    },
    thread::OwnThread,
    types::{Claim, Fence, Hold, HolderInfo, LossReason, Mode, Token, drift},
    workload::Workload,
    wrap::{FenceAbove, Observed, Prefix},
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
