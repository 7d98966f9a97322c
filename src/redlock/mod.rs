//! A quorum over independent stores, and what makes Redis nodes of a URL.

mod doctor;
mod nodes;
mod roster;

pub use lockkit_redlock::{Gate, Node, NodeError, NodeErrors, RedlockConfig, RedlockStore, Report, Stats, findings};

pub use self::{doctor::diagnose, nodes::RedisNodes};
