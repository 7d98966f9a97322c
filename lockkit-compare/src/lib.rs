//! Measures lock stores side by side.
//!
//! - [`Comparison`]: the same measures on every store, in turns: speed, hot locks, hand-off between processes, what held
//!   leases cost, what locks and waiters cost the servers, and the compliance cases of `lockkit-testkit`; a [`Report`] of them as text, as a page for a browser, Markdown and JSON.
//! - [`race()`]: what happens to a number that several processes change at once, with and without a lock.
//! - [`pairs`]: a store beside other clients of the same server, acquisition and release in pairs.
//!
//! The stores are given by URL, or are private servers of what is installed: [`Targets`]. Some measures take other
//! processes: the same program again, which then calls [`worker::run`].

#![cfg_attr(docsrs, feature(doc_cfg))]

mod backend;
mod comparison;
mod compliance;
mod contention;
mod contestant;
mod cost;
mod delay;
mod error;
mod exclusive;
mod faults;
mod group;
#[cfg(test)]
mod known;
mod ledger;
mod measure;
mod meter;
pub mod pairs;
mod peers;
mod plan;
mod processes;
mod race;
mod report;
mod results;
mod stats;
mod takeover;
mod targets;
mod timeline;
pub mod worker;
mod workers;

pub use crate::{
    backend::backend,
    comparison::{Comparison, Progress},
    error::{Error, ErrorKind, Result},
    group::Group,
    peers::Peer,
    plan::{Effort, Options},
    race::{Race, Score, race},
    report::{
        Axis, Baseline, Better, Cases, Cell, Change, Changes, Curve, Facts, Interrupted, Report, Row, Setting, Verdict,
    },
    results::{Absence, Figure, Traits},
    targets::{Target, Targets, redlock},
    timeline::{Belief, Ending, Fault, Overlap, Refusal, Timeline},
    workers::WorkerProgram,
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
