//! Faults to inflict on real servers, on the way to them, and on processes that use them.
//!
//! [`process`] kills and freezes processes. [`Proxy`] stands between a client and a server, and cuts, holds, delays, or
//! loses what passes. [`ServerClock`] moves a server's wall clock.

mod clock;
mod connection;
pub mod process;
mod proxy;
mod trap;

pub use self::{
    clock::ServerClock,
    proxy::{Direction, Proxy},
};
