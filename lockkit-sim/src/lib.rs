//! A simulated store: for tests of applications, above all of what they do when a lock is lost.
//!
//! A [`SimStore`] keeps locks in memory and follows tokio's time, so that a test that
//! [pauses](https://docs.rs/tokio/latest/tokio/time/fn.pause.html) it sees leases of minutes lapse in microseconds. The
//! same value is the handle that makes things go wrong: [`inject`](SimStore::inject) says what happens to the next calls,
//! [`take_over`](SimStore::take_over) and its siblings what happens at once, [`calls`](SimStore::calls) what was asked.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread", start_paused = true)] async fn main() -> lockkit_core::Result<()> {
//! use std::time::Duration;
//! use lockkit_core::{ErrorKind, Locker, LossReason};
//! use lockkit_sim::SimStore;
//!
//! let store = SimStore::new();
//! let locker = Locker::new(store.clone());
//! let guard = locker.lock("invoice/42").ttl(Duration::from_secs(30)).acquire().await?;
//!
//! // In the middle of the work, somebody else gets the lock.
//! let work = guard.run(async {
//!     store.take_over("invoice/42", Duration::from_secs(30)).await?;
//!     std::future::pending::<lockkit_core::Result<()>>().await
//! });
//! let error = work.await.expect_err("the work was stopped");
//! assert_eq!(error.kind(), ErrorKind::Lost);
//! assert_eq!(guard.lost().await, LossReason::Taken);
//! # Ok(()) }
//! ```
//!
//! # Time
//!
//! - `#[tokio::test(start_paused = true)]` (tokio's feature `test-util`) makes all sleeps end at once, in the right
//!   order. Make the store inside the test. It works with time that runs, too.
//! - The **process** that stands still for five seconds: `tokio::time::advance(Duration::from_secs(5)).await`.
//! - The **machine** that sleeps, so that timers stand still too: [`suspend`](SimStore::suspend).
//! - The **store** that stands still: [`freeze`](SimStore::freeze).

#![cfg_attr(docsrs, feature(doc_cfg))]

mod answers;
mod clock;
mod fault;
mod link;
mod log;
mod store;

pub use crate::{
    fault::{Fault, Operation, Rule},
    log::{Answer, Call},
    store::SimStore,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
