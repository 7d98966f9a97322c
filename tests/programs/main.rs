//! Random small concurrent programs on every store, judged by a model and by their history.
//!
//! A program is a few tasks of two processes on two runtimes that acquire the same few locks in all ways (try, within a time,
//! for ever, for an owner, in order), give acquisitions and releases up at any await, leave futures unpolled, renew, look,
//! release, drop and hand guards on, while a process may be shut down or a runtime may end. Nothing is broken in the stores:
//! so errors, refusals and losses have to have a reason, all must end in time, and nothing may be left.
//!
//! `LOCKKIT_PROGRAMS_SECONDS` says for how long to look on each store, `LOCKKIT_PROGRAMS_SEED` from where, and
//! `LOCKKIT_PROGRAM` repeats one program, as a failure prints it.

mod hand;
mod kept;
mod program;
mod run;
mod search;
mod stores;
mod world;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use lockkit_testkit::{BoxError, broken::Bug};
use tokio::runtime::Runtime;

use crate::{
    search::{Limits, search},
    stores::{Kind, Running},
};

/// Stores that are wrong, to be found in so many programs: all that they do under test is what programs do anyway.
const BAD: [(Bug, u64); 4] =
    [(Bug::DeletesAnyones, 400), (Bug::FenceRestarts, 400), (Bug::LandsLate, 400), (Bug::ReusesInDoubt, 400)];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let limits = Limits::from_env().expect("settings");
    println!("seed {} ({})", limits.seed, search::SEED);
    let mut trials = Vec::new();
    for (name, kind) in Kind::ALL {
        let limits = limits.clone();
        let look = move || with(kind, |store| search(name, store, &limits).map_err(Failed::from));
        trials.push(Trial::test(name, look).with_ignored_flag(kind.is_missing()));
    }
    for (bug, programs) in BAD {
        let limits = limits.fixed(programs);
        let find = move || with(Kind::Simple(Some(bug)), |store| must_be_found(bug, store, &limits));
        trials.push(Trial::test(format!("finds::{bug:?}"), find));
    }
    // Programs mostly wait.
    arguments.test_threads = arguments.test_threads.or(Some(trials.len()));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// With a store that runs.
fn with(kind: Kind, act: impl FnOnce(&Running) -> Result<(), Failed>) -> Result<(), Failed> {
    let servers = Runtime::new().map_err(BoxError::from)?;
    let store = servers.block_on(kind.start())?;
    let answer = act(&store);
    // Before their runtime.
    let guard = servers.enter();
    drop(store);
    drop(guard);
    servers.shutdown_background();
    answer
}

fn must_be_found(bug: Bug, store: &Running, limits: &Limits) -> Result<(), Failed> {
    match search(&format!("{bug:?}"), store, limits) {
        Err(found) => {
            let first = found.lines().next().unwrap_or_default();
            println!("{bug:?}: {first}");
            let is_load = ["timed out", "does not end"].iter().any(|other| first.contains(other));
            if is_load { Err(format!("found for another reason: {found}").into()) } else { Ok(()) }
        }
        Ok(()) => Err(format!("not found: {}", bug.what()).into()),
    }
}
