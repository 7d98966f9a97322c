//! Locks in a table of a MySQL 8+ or MariaDB 10.6+ server.
//!
//! ```no_run
//! use lockkit_mysql::MySqlStore;
//!
//! # async fn connect() -> lockkit_core::Result<()> {
//! let store = MySqlStore::from_url("mysql://app:secret@127.0.0.1:3306/shop?create=true").await?;
//! for warning in store.warnings() {
//!     eprintln!("{warning}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A lock is a row. It is made once, and goes when it was unused for a week. Taking, extending and giving back a lease is one conditional update of that row
//! each, on the server's clock: one round trip, and no deadlocks.
//!
//! - **Exclusion** holds as long as the server keeps what it committed and its clock is not set forward. A failover to a
//!   replica that was behind can give a lock away while it is held: check the fence at the resource.
//! - **Fences** are a counter per lock that is never below the server's clock in microseconds, so they grow even when the
//!   server lost its data, unless its clock was set back as well.
//! - **Waiting** is by polling, and for hot locks by queueing on `GET_LOCK`, which wakes.
//! - **Failures** are errors: an operation that got no answer never pretends that the lock is free, held or lost. Every
//!   operation is bounded in time, and some connections are kept for renewals and releases.
//! - **[`lock_in_transaction`]** is the other kind of lock that a database has, for work within one transaction;
//!   **[`update_versioned`]** does without a lock.
//!
//! The table is described in `docs/backends/mysql.md`; [`schema`] makes it.

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

pub use config::{MySqlConfig, Tls};
#[cfg(feature = "doctor")]
pub use doctor::{diagnose, workload};
pub use store::{
    MySqlStore, schema,
    transaction::{TransactionLock, lock_in_transaction},
    versioned::{VersionedUpdate, update_versioned},
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
