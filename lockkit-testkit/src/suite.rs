//! A test program that runs the compliance suite on several stores.

use std::{env, fs, num::NonZero, path::PathBuf, process::ExitCode, sync::Arc, thread::available_parallelism};

use libtest_mimic::{Arguments, Trial};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::{
    Backend, BoxError, Subject,
    check::{runtime, trials_of},
    expected,
};

/// The trials of one or more stores, each held to its list of expected cases, as a test program with `harness = false`.
///
/// The list of a store is `<name>.txt` in the directory of lists. It has a line for each case: its name, and `run`, or
/// `ignored: ` and the reason. The trial `<name>::runs_what_is_expected` fails when a case vanishes, is new, or changes
/// between the two, and says how to write the list anew: with `LOCKKIT_EXPECTED=write`.
///
/// A store that is required and can't be found is a failure; another is shown as ignored, with the reason. The variable
/// `LOCKKIT_REQUIRE` names the required ones, separated by commas.
#[derive(Debug)]
pub struct Suite {
    arguments: Arguments,
    lists: PathBuf,
    required: String,
    names: Vec<String>,
    trials: Vec<Trial>,
}

/// The arguments of a test program whose tests mostly wait: unless they say otherwise, two run at once for each processor.
/// They may have as many files open as the system allows: some tests need two thousand connections.
#[must_use]
pub fn arguments() -> Arguments {
    arguments_with(2)
}

/// The same for tests that hardly do more than wait for leases to lapse: eight at once for each processor.
#[must_use]
pub fn arguments_of_idle_tests() -> Arguments {
    arguments_with(8)
}

fn arguments_with(per_processor: usize) -> Arguments {
    let open_files = getrlimit(Resource::Nofile);
    // Where that is refused, tests that need more say so themselves.
    _ = setrlimit(Resource::Nofile, Rlimit { current: open_files.maximum, ..open_files });
    let mut arguments = Arguments::from_args();
    let processors = available_parallelism().map_or(1, NonZero::get);
    arguments.test_threads = arguments.test_threads.or(Some(per_processor * processors));
    arguments
}

impl Suite {
    /// A suite without stores: the directory of its lists, and what is required unless `LOCKKIT_REQUIRE` says otherwise.
    pub fn new(lists: impl Into<PathBuf>, required: &str) -> Self {
        // First of all: help is shown without waiting for servers.
        Self::with(arguments(), lists, required)
    }

    /// The same for stores whose cases wait for time-outs most of the time: three run at once for each processor.
    pub fn of_slow_stores(lists: impl Into<PathBuf>, required: &str) -> Self {
        Self::with(arguments_with(3), lists, required)
    }

    fn with(arguments: Arguments, lists: impl Into<PathBuf>, required: &str) -> Self {
        let required = env::var("LOCKKIT_REQUIRE").unwrap_or_else(|_| required.to_owned());
        Self { arguments, lists: lists.into(), required, names: Vec::new(), trials: Vec::new() }
    }

    /// Adds the trials of a store, or one that says why there are none.
    pub fn add<B: Backend>(&mut self, name: &str, backend: Result<B, BoxError>) {
        self.names.push(name.to_owned());
        let subject = backend.and_then(|backend| runtime()?.block_on(Subject::new(Arc::new(backend))));
        match subject {
            Ok(subject) => {
                let compared = expected::compare(&self.list(name), name, &subject).map_err(|e| e.to_string());
                self.push(format!("{name}::runs_what_is_expected"), compared);
                self.trials.extend(trials_of(name, &Arc::new(subject)));
            }
            Err(error) if self.required.split(',').any(|required| required.trim() == name) => {
                self.push(format!("{name}::is_there"), Err(format!("{name} is required: {error}")));
            }
            Err(error) => {
                let reason = error.to_string().lines().next().unwrap_or_default().to_owned();
                self.trials.push(Trial::test(format!("{name} ({reason})"), || Ok(())).with_ignored_flag(true));
            }
        }
    }

    /// Adds a store that has something new to say in these cases alone, such as `abandoned::a_dropped_call_answers_no_other`. It is
    /// required, all of them must run on it, and it has no list.
    pub fn add_cases<B: Backend>(&mut self, name: &str, backend: Result<B, BoxError>, cases: &[&str]) {
        let subject = backend.and_then(|backend| runtime()?.block_on(Subject::new(Arc::new(backend))));
        let subject = match subject {
            Ok(subject) => Arc::new(subject),
            Err(error) => return self.push(format!("{name}::is_there"), Err(format!("{name} is required: {error}"))),
        };
        let is_wanted = |trial: &Trial| cases.iter().any(|case| trial.name() == format!("{name}::{case}"));
        let trials: Vec<_> = trials_of(name, &subject).into_iter().filter(is_wanted).collect();
        if trials.len() != cases.len() {
            let missing = format!("{} of {} cases are there and run on it", trials.len(), cases.len());
            self.push(format!("{name}::runs_what_is_wanted"), Err(missing));
        }
        self.trials.extend(trials);
    }

    /// Runs them all, as the arguments of the program say.
    #[must_use]
    pub fn run(mut self) -> ExitCode {
        self.add_lists_without_store();
        libtest_mimic::run(&self.arguments, self.trials).exit_code()
    }

    /// A list that no store is held to would let that store vanish.
    fn add_lists_without_store(&mut self) {
        let entries = fs::read_dir(&self.lists).into_iter().flatten().flatten();
        let listed = entries.filter_map(|entry| entry.path().file_stem()?.to_str().map(str::to_owned));
        let stray: Vec<_> = listed.filter(|name| !self.names.contains(name)).collect();
        for name in stray {
            let what = format!("{} expects cases of a store that is not tested any more", self.list(&name).display());
            self.push(format!("{name}::is_tested"), Err(what));
        }
    }

    fn list(&self, name: &str) -> PathBuf {
        self.lists.join(format!("{name}.txt"))
    }

    fn push(&mut self, name: String, outcome: Result<(), String>) {
        self.trials.push(Trial::test(name, move || outcome.map_err(Into::into)));
    }
}
