//! Locks on Redis 6.2+ or Valkey: one server, the primary that sentinels name, or a cluster.
//!
//! ```no_run
//! use lockkit_redis::RedisStore;
//!
//! # async fn connect() -> lockkit_core::Result<()> {
//! let store = RedisStore::from_url("redis://127.0.0.1:6379/0?prefix=shop:").await?;
//! for warning in store.warnings() {
//!     eprintln!("{warning}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A lock is a plain string with a time to live, set and deleted by Lua scripts, each one atomic step and one round
//! trip. So other clients that use `SET key value NX PX ttl` exclude us, and we them (see [`RedisConfig::prefix`]).
//!
//! - **Exclusion** holds as long as the server keeps its data and its clock is not set forward. A restart without
//!   persistence, or eviction can give a lock away while it is held: check the fence at the resource.
//! - **A failover**, with sentinels or in a cluster, ends all leases, and nothing is granted until they have lapsed. A
//!   former primary that still serves somebody can grant a lock twice; asynchronous replication can't do better.
//! - **Fences** are a counter per lock that starts at the server's clock in microseconds, so they grow even when the
//!   server lost its data, unless its clock was set back as well.
//! - **Waiting** is by subscription: a release wakes the waiters within about a millisecond, without polling.
//! - **Failures** are errors: an operation that got no answer never pretends that the lock is free, held or lost. One
//!   connection to each server serves the whole store; it is made when it is needed and replaced when it is dead.
//!
//! The layout of the keys is described in `docs/backends/redis.md`.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod client;
mod config;
#[cfg(feature = "doctor")]
mod doctor;
pub mod fenced;
#[cfg(test)]
mod properties;
mod store;
mod wire;

pub use config::RedisConfig;
#[cfg(feature = "doctor")]
pub use doctor::{Examination, diagnose, examine, workload};
pub use store::RedisStore;
pub use wire::server::ServerFacts;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
