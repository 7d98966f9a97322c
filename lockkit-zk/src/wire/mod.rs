//! Requests and answers as the servers know them: names of nodes, their data, the order of a queue and errors. Pure.

pub(crate) mod error;
pub(crate) mod fence;
pub(crate) mod name;
pub(crate) mod queue;
pub(crate) mod value;
pub(crate) mod window;
