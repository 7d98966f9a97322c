//! Faults to inflict on real servers, on the way to them, and on processes that use them.
//!
//! [`process`] kills and freezes processes. [`Proxy`] stands between a client and a server, and cuts, holds, delays,
//! loses or repeats what passes. [`ServerClock`] moves a server's wall clock. [`poll_until`] stops a future at an await.

mod answers;
mod clock;
mod connection;
mod polls;
pub mod process;
mod proxy;
mod shared;
mod trap;

pub use self::{
    answers::{Framing, Slip},
    clock::ServerClock,
    polls::{overtaken_requests, poll_until},
    proxy::Proxy,
    shared::Direction,
};
