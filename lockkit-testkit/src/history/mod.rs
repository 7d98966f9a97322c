//! What happened, and whether it may have: a history recorded by every process, and a checker.
//!
//! Each process writes what it asks for and what it is told ([`Recorder`]), one line of JSON per [`Event`], with the time
//! of the one clock that all processes of a machine share. [`History::read`] puts the files together, and [`check`] judges
//! four rules, each in O(n log n):
//!
//! | rule | what must not be |
//! |---|---|
//! | [`Overlap`](Rule::Overlap) | two holders who were told at the same moment that the lock is theirs |
//! | [`FenceOrder`](Rule::FenceOrder) | a grant with a fence no greater than one that was returned before it was asked for |
//! | [`Resource`](Rule::Resource) | a fenced resource that admits who is late, refuses who is not, or loses an update |
//! | [`Liveness`](Rule::Liveness) | a lock that was to be had within some time, and was not |
//!
//! **What is not known counts for nobody.** A process may be killed between asking and hearing, and an error may hide an
//! effect. So a holder believes from the moment it heard of its grant until the last moment at which it asked its guard
//! and heard yes; what it would have been told later is not guessed. An acquisition without an answer has no fence, and
//! a write without an answer may have happened or not.
//!
//! No search is needed, as it is for histories of registers or queues: the fence says in which order the grants were.

mod check;
mod event;
mod explain;
mod judge;
mod recorder;
mod timeline;

pub use self::{
    check::{Report, check},
    event::{Event, History, What},
    explain::{Party, Rule, Violation},
    recorder::Recorder,
    timeline::timeline,
};
