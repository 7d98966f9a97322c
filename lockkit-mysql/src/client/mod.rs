//! The one way to the servers: connections, when one may be used, and what the server says of itself.

pub(crate) mod connection;
pub(crate) mod identify;
pub(crate) mod in_flight;
pub(crate) mod pool;
pub(crate) mod raw;
pub(crate) mod settings;
