//! The store against a real server, through the public contract only.
//!
//! `LOCKKIT_REDIS_SERVER` names the server's program; `redis-server` by default.

mod backlog;
mod cluster;
mod contention;
mod contract;
mod doctor;
mod doctor_many;
mod failover;
mod faults;
mod fenced;
mod fences;
mod full;
mod fuzz;
mod herald;
mod inspect;
mod kinds;
mod left;
mod mysql;
mod passwords;
mod queue;
mod replicas;
mod reshard;
mod sentinel;
mod snag;
mod support;
#[cfg(feature = "tls")]
mod tls;
mod waiting;
