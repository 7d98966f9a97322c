//! Processes that use locks in earnest while a nemesis is at work, and a resource that notices when a lock fails them.
//!
//! ```text
//!   worker processes ──── the store under test     (through proxies, killed, frozen, ...)
//!        │ claim, pass, write
//!   Register: a fenced value and its unfenced twin, kept by the test itself
//! ```
//!
//! A test starts a [`Register`] and a [`Workers`] of worker processes, which are the test's own program, started again; there
//! they run [`work`]. Each worker has several tasks, which hand leases over to each other. A task takes a lock, **claims** the
//! fenced value with its fence and reads it and its twin, holds the lock for a moment, asks its guard, **passes**, and writes
//! both: one with its fence, one without a check. It also nests holds of one owner, drops guards, gives up acquisitions after
//! some time or at one of their awaits, leaves others unpolled for a while, and holds many locks at once.
//!
//! At the pass a nemesis can [catch](Register::catch) a holder: it is then past its last check and before its write, for as
//! long as the nemesis likes. That is where locks alone fail.
//!
//! All that happens is recorded for `lockkit_testkit::history`.

mod client;
mod hand;
mod proof;
mod random;
mod register;
mod worker;
mod workers;

pub(crate) use self::{
    proof::trials,
    random::Random,
    register::{Caught, Prey, Register},
    worker::{Orders, Sharing, work},
    workers::Workers,
};
