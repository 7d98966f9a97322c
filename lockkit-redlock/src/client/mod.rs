//! The one way to the servers: the nodes of a quorum, calls to several of them, and what is owed to one that failed.

pub(crate) mod backlog;
pub(crate) mod calls;
pub(crate) mod claims;
pub(crate) mod node;
pub(crate) mod quorum;
pub(crate) mod stats;
