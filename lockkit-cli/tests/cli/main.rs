//! The command, run as a process: one program for all its verbs, so that tests of one wait while those of others work.

#![allow(clippy::unwrap_used)] // Clippy knows a helper of tests only by its attribute.

mod check;
mod doctor;
mod elect;
mod init;
mod inspect;
mod kinds;
mod lease;
mod migrate;
mod nested;
mod quorum;
mod race;
mod run;
mod secrets;
mod stores;
#[path = "../support/mod.rs"]
mod support;
mod terminal;
mod top;
mod usage;
mod watchdog;
mod words;
