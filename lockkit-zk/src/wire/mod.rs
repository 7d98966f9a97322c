//! What is said to the servers and what they answer, and nothing else: pure. Names of nodes, their data, the order of a queue and errors.

pub(crate) mod error;
pub(crate) mod fence;
pub(crate) mod name;
pub(crate) mod queue;
pub(crate) mod value;
