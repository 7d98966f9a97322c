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
//! Applications usually depend on the facade crate `lockkit`, which re-exports all of this.

mod capability;
mod clock;
mod error;
pub mod store;
mod types;

pub use capability::{Capability, Fencing, Liveness, Waiting};
pub use clock::{Clock, Moment, ShiftedClock, SystemClock};
pub use error::{Effect, Error, ErrorKind, Result};
pub use store::{
    AcquireRequest, Attempt, Contention, FenceClock, FenceRequest, Holder, KeyState, LockStore, Order, Query, Release,
    Renewal, Renewed, StoreInfo,
};
pub use types::{Claim, Fence, Hold, HolderInfo, LockKey, LossReason, Mode, Token, drift};
