//! One process with many leases and many tasks, through lost connections and pauses of the process: no lease is lost that
//! nobody took, every task gets its lock again and again, and memory and descriptors stay as they are.
//!
//! `cargo test --all-features --test endurance` takes seconds. For 100 000 leases and 1 000 tasks:
//!
//! `cargo test --release --all-features --test endurance -- --leases 100000 --tasks 1000 --rounds 6 [store]`
//!
//! The process that is tormented is a child, so that it can be stopped with all its threads. A second child asks for the
//! same locks as its tasks do. Both go through a proxy. `docs/testing.md` describes it.

mod child;
mod target;
mod torment;

use std::{env, process::ExitCode};

use clap::Parser;
use libtest_mimic::{Arguments, Failed, Trial};
use lockkit_testkit::BoxError;

use crate::{
    child::Orders,
    target::{Kind, Target},
};

/// The arguments of every test, and three numbers more.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    size: Size,
    #[command(flatten)]
    harness: Arguments,
}

/// How many leases, tasks and rounds of faults: by default, a few seconds of each store.
#[derive(Clone, Copy, Debug, clap::Args)]
pub(crate) struct Size {
    #[arg(long, default_value_t = FEW)]
    pub(crate) leases: usize,
    #[arg(long, default_value_t = 60)]
    pub(crate) tasks: usize,
    #[arg(long, default_value_t = 3)]
    pub(crate) rounds: usize,
}

/// So many leases are little to do.
const FEW: usize = 400;

fn main() -> ExitCode {
    if let Ok(orders) = env::var(child::ORDERS) {
        return child::main(&orders);
    }
    let Options { size, harness: mut arguments } = Options::parse();
    // One after the other, if there is much to do: the stores share the processors.
    let at_once = if size.leases > FEW { 1 } else { 3 };
    arguments.test_threads = arguments.test_threads.or(Some(at_once));
    let trials = Kind::ALL.map(|kind| {
        let trial = Trial::test(kind.name(), move || run(kind, size).map_err(|error| Failed::from(error.to_string())));
        trial.with_ignored_flag(kind.may_be_missing() && kind.is_missing())
    });
    libtest_mimic::run(&arguments, trials.into()).exit_code()
}

fn run(kind: Kind, size: Size) -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        let target = Target::start(kind).await?;
        let big = Orders { url: target.url(), leases: size.leases, tasks: size.tasks, pages: size.tasks / 10 + 1 };
        torment::run(&target, big, size.rounds).await
    })
}
