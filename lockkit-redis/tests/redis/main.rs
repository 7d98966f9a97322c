//! The store against a real server, through the public contract only.
//!
//! `LOCKKIT_REDIS_SERVER` names the server's program; `redis-server` by default.

mod contract;
mod doctor;
mod faults;
mod fenced;
mod inspect;
mod support;
#[cfg(feature = "tls")]
mod tls;
mod waiting;
