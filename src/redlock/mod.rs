//! A quorum over independent stores, and what makes Redis nodes of a URL.

#[cfg(feature = "doctor")]
mod doctor;
mod nodes;
mod roster;

pub use lockkit_redlock::{Node, NodeError, NodeErrors, RedlockConfig, RedlockStore, RestartPolicy, Stats};
#[cfg(feature = "doctor")]
pub use lockkit_redlock::{Report, findings};

#[cfg(feature = "doctor")]
pub use self::doctor::{diagnose, workload};
pub use self::nodes::RedisNodes;
