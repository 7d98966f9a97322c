//! The one way to the servers: sessions, the proof that one lives, and what one does to nodes.

pub(crate) mod claims;
pub(crate) mod connect;
pub(crate) mod driver;
pub(crate) mod proof;
pub(crate) mod session;
pub(crate) mod sessions;
pub(crate) mod uncontended;
pub(crate) mod unwatched;
pub(crate) mod watched;
pub(crate) mod windows;
pub(crate) mod znodes;
