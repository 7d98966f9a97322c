//! Redlock with fencing tokens: locks on a majority of independent stores.
//!
//! ```
//! use std::sync::Arc;
//! use lockkit_core::{Locker, MemoryStore};
//! use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
//! let nodes = (0..3).map(|_| Node::new(Arc::new(MemoryStore::new()))).collect();
//! let store = RedlockStore::new(nodes, RedlockConfig::new())?;
//! let guard = Locker::new(store).lock("invoice/42").acquire().await?;
//! println!("fence {}", guard.fence());
//! guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! The crate knows no store but those that it is given. `lockkit::redlock::RedisNodes` makes Redis nodes of a URL.
//!
//! - **Exclusion** holds as long as every other majority still has a node that remembers the lease, clocks run at about
//!   the same rate, and no node's clock is set forward. Nodes that may lose their data do not vote for a while after a restart
//!   ([`RestartPolicy`]).
//! - **Fences** grow with every grant, agreed upon in the same round trip as the lock; if the nodes are durable,
//!   whatever clocks, pauses and partitions do.
//! - **Liveness**: with a majority of the nodes up, locks are granted, renewed and released, and the answer comes from
//!   the fastest majority: a node that stands still costs nothing.
//!
//! `docs/backends/redlock.md` says what is guaranteed, what is not, and why.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod client;
mod config;
#[cfg(feature = "doctor")]
mod doctor;
mod store;
mod wire;

#[cfg(feature = "doctor")]
pub use doctor::{Report, findings};
pub use {
    client::{
        node::{Node, RestartPolicy},
        stats::Stats,
    },
    config::RedlockConfig,
    store::RedlockStore,
    wire::{
        error::{NodeError, NodeErrors},
        votes::majority,
    },
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
