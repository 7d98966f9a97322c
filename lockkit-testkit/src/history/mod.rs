//! What happened, and whether it may have: a history recorded by every process, and a checker.
//!
//! Each process writes what it asks for and what it is told ([`Recorder`]), one line of JSON per [`Event`], with the time
//! of the one clock that all processes of a machine share. [`History::read`] puts the files together, and [`check`] judges
//! these rules, each in O(n log n):
//!
//! | rule | what must not be |
//! |---|---|
//! | [`Overlap`](Rule::Overlap) | two holders who were told at the same moment that the lock is theirs, and do not share it; more permits than there are |
//! | [`FenceOrder`](Rule::FenceOrder) | a grant with a fence no greater than one that was returned before it was asked for; two leases with one fence (readers may have the same) |
//! | [`Superseded`](Rule::Superseded) | a holder who is told that the lock is its own after a newer fence was returned |
//! | [`Answer`](Rule::Answer) | held after lost |
//! | [`Rival`](Rule::Rival) | taken by nobody |
//! | [`Resource`](Rule::Resource) | a fenced resource that admits who is late, refuses who is not, or loses an update or a write that it acknowledged |
//! | [`Liveness`](Rule::Liveness) | a lock that was to be had within some time, and was not |
//! | [`Reach`](Rule::Reach) | a lock that somebody asked for and nobody had for longer than is allowed, if that is said ([`check_reach`]) |
//! | [`Order`](Rule::Order) | a lock that is had before one that was in its queue already, if somebody [looks](What::Look) |
//! | [`Record`](Rule::Record) | answers to what nobody asked, guards that nobody has, gaps in the record of a resource |
//!
//! **What is not known counts for nobody.** A process may be killed between asking and hearing, and an error may hide an
//! effect. So a holder believes from the moment it heard of its grant until the last moment at which it asked its guard
//! and heard yes, or released it and heard that it was held until then; what it would have been told later is not guessed,
//! and who never heard yes may have heard of its grant too late. An acquisition without an answer has no fence, and
//! a write without an answer may have happened or not.
//!
//! All that one [owner](lockkit_core::Owner) holds at once of a lock is one lease: its nested grants share the fence, and
//! don't exclude each other.
//!
//! No search is needed, as it is for histories of registers or queues: the fence says in which order the grants were.

mod check;
mod event;
mod explain;
mod judge;
mod lease;
mod mode;
mod ops;
mod order;
mod reach;
mod recorder;
mod report;
mod timeline;
mod writes;

pub use self::{
    check::{check, check_reach},
    event::{Event, History, What},
    explain::{Party, Rule, Violation},
    recorder::Recorder,
    report::Report,
    timeline::timeline,
};
