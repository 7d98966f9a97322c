//! Locks on a ZooKeeper ensemble, 3.6 or newer.
//!
//! ```no_run
//! use lockkit_zk::ZkStore;
//!
//! # async fn connect() -> lockkit_core::Result<()> {
//! let store = ZkStore::from_url("zk://zk1:2181,zk2:2181,zk3:2181/app?base=/locks&session=20s").await?;
//! # Ok(())
//! # }
//! ```
//!
//! A lock is a queue of ephemeral sequential nodes, named as Apache Curator names them, so that Curator's
//! `InterProcessMutex` and lockkit exclude each other on the same path, in one order. Whoever is first holds the lock;
//! each of the others watches the one before it. Readers and permits have their places in the same queue, and hold beside those
//! before them that let them.
//!
//! - **Exclusion** holds as long as the ensemble keeps its data, clocks run at about the same rate, and a session lasts two
//!   ticks of the servers at least: a lease is believed in for no longer than writes that a majority acknowledged prove
//!   that the session lives.
//! - **Fences** come from the transaction that made the holder's node, so they grow whatever happens to clients,
//!   servers and leaders.
//! - **Waiting** is first come, first served, without polling; a release wakes one waiter.
//! - **The end of the session** ends all its leases at once. One session serves the whole store; one small write per
//!   interval keeps any number of leases.
//! - **Failures** are errors: an operation that got no answer never pretends that the lock is free, held or lost.
//!
//! The layout of the nodes is described in `docs/backends/zookeeper.md`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod client;
mod config;
#[cfg(feature = "doctor")]
mod doctor;
pub mod fenced;
#[cfg(test)]
mod properties;
mod store;
#[cfg(test)]
mod testing;
mod wire;

pub use config::ZkConfig;
#[cfg(feature = "doctor")]
pub use doctor::{diagnose, workload};
pub use store::ZkStore;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
