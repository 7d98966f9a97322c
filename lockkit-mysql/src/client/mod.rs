//! The one way to the server: connections, the rule that decides whether one may be used, and the server's settings.

pub(crate) mod connection;
pub(crate) mod identify;
pub(crate) mod idle;
pub(crate) mod in_flight;
pub(crate) mod pool;
pub(crate) mod raw;
pub(crate) mod settings;
