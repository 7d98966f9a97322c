//! The proof: a compliance suite for lock stores, private throw-away servers to run it on, and faults to inject.
//!
//! A store of one's own joins in about ten lines: implement [`Backend`], hand it to [`trials`], run them with
//! `libtest-mimic`. `docs/writing-a-backend.md` shows it.
//!
//! For tests of applications there is a simulated store, in the package `lockkit-sim`.

mod altered;
mod backend;
pub mod broken;
pub mod calls;
pub mod cases;
mod check;
pub mod crowd;
mod expected;
pub mod faults;
pub mod findings;
mod frozen;
pub mod history;
mod leaks;
mod memory;
mod others;
pub mod servers;
mod suite;

pub use {
    altered::{Alter, Altered, Slow, WithInfo},
    backend::{Backend, BoxError, Server},
    cases::{Case, Needs},
    check::{Checked, Subject, Verdict, trials},
    frozen::{AsyncOpen, a_frozen_holder_is_refused, a_frozen_writer_is_refused_after_readers},
    leaks::cycles_leave_nothing,
    memory::MemoryBackend,
    others::{Other, OtherClient},
    suite::{Suite, arguments, arguments_of_idle_tests},
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
