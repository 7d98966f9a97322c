//! The one way to the servers: connecting, deadlines, which server it is, and what is heard from it unasked.

pub(crate) mod batch;
pub(crate) mod cluster;
pub(crate) mod connect;
pub(crate) mod connection;
pub(crate) mod dialer;
pub(crate) mod epoch;
pub(crate) mod identify;
pub(crate) mod node;
pub(crate) mod nodes;
pub(crate) mod note;
pub(crate) mod questions;
pub(crate) mod replicas;
pub(crate) mod rounds;
pub(crate) mod sentinel;
pub(crate) mod slots;
pub(crate) mod subscriptions;
#[cfg(feature = "tls")]
pub(crate) mod tls;
pub(crate) mod vote;
