//! The command line: what every test takes, and four options more.

use std::{env, path::PathBuf, time::SystemTime};

use libtest_mimic::Arguments;

/// How many runs go on at once: they mostly wait.
const THREADS: usize = 3;

/// What was asked for.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) seed: u64,
    /// For how many minutes to go on, with faults as the seed has it.
    pub(crate) soak: Option<u64>,
    /// The file that has the table.
    pub(crate) write: Option<PathBuf>,
    /// Whether each version of a server gets all faults, also those that befall clients and the network.
    pub(crate) every_version: bool,
    pub(crate) harness: Arguments,
}

impl Options {
    pub(crate) fn from_args() -> Result<Self, String> {
        let (mut seed, mut soak, mut write, mut every_version) = (None, None, None, false);
        let mut args = env::args();
        let mut others: Vec<String> = args.next().into_iter().collect();
        while let Some(arg) = args.next() {
            let (name, value) = arg.split_once('=').map_or((arg.as_str(), None), |(name, value)| (name, Some(value)));
            let mut value = || value.map(str::to_owned).or_else(|| args.next()).ok_or(format!("{name} needs a value"));
            match name {
                "--seed" => seed = Some(number(name, &value()?)?),
                "--soak" => soak = Some(number(name, &value()?)?),
                "--every-version" => every_version = true,
                "--write" => write = Some(PathBuf::from(value()?)),
                _ => others.push(arg),
            }
        }
        let mut harness = Arguments::from_iter(others);
        harness.test_threads = harness.test_threads.or(Some(THREADS));
        // The table has all of them.
        let every_version = every_version || write.is_some();
        Ok(Self { seed: seed.unwrap_or_else(any_seed), soak, write, every_version, harness })
    }
}

fn number(name: &str, text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("{name} takes a whole number, not {text:?}"))
}

fn any_seed() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |since| since.as_secs())
}
