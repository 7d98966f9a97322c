//! One distributed-lock API over many stores.
//!
//! Everything that users hold lives in `lockkit-core` and is re-exported here; each cargo feature adds a store.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod connect;
mod diagnose;
#[cfg(feature = "redlock")]
pub mod redlock;

pub use lockkit_core::*;

pub use crate::{
    connect::{connect, connect_on_own_thread, open},
    diagnose::diagnose,
};

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
    #[cfg(feature = "mysql")]
    #[doc = include_str!("../docs/fencing.md")]
    mod fencing {}
    #[doc = include_str!("../docs/observability.md")]
    mod observability {}
    #[doc = include_str!("../docs/testing-your-application.md")]
    mod testing_your_application {}
}
