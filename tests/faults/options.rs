//! The command line: what every test takes, and four options more.

use std::{path::PathBuf, time::SystemTime};

use clap::Parser;
use libtest_mimic::Arguments;

/// How many runs go on at once: they mostly wait.
const THREADS: usize = 3;

/// What was asked for.
#[derive(Debug, Parser)]
pub(crate) struct Options {
    /// What the faults and their moments follow from; by default it is another one each time
    #[arg(long, default_value_t = any_seed())]
    pub(crate) seed: u64,
    /// For how many minutes to go on, with faults as the seed has it
    #[arg(long)]
    pub(crate) soak: Option<u64>,
    /// The file that has the table
    #[arg(long)]
    pub(crate) write: Option<PathBuf>,
    /// Whether each version of a server gets all faults, also those that befall clients and the network
    #[arg(long)]
    pub(crate) every_version: bool,
    #[command(flatten)]
    pub(crate) harness: Arguments,
}

impl Options {
    pub(crate) fn from_args() -> Self {
        let mut options = Self::parse();
        options.harness.test_threads = options.harness.test_threads.or(Some(THREADS));
        // The table has all of them.
        options.every_version |= options.write.is_some();
        options
    }
}

fn any_seed() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |since| since.as_secs())
}
