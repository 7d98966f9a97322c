//! The store against real servers: what the compliance suite, which knows no ZooKeeper, can't ask.

mod broken;
mod contract;
mod doctor;
mod downgrades;
mod dropped;
mod ensemble;
mod faults;
mod fenced;
mod fuzz;
mod many;
mod old;
mod permits;
mod readers;
mod reconnect;
mod support;
mod taken_up;
#[cfg(feature = "tls")]
mod tls;
mod waiting;
mod windows;
