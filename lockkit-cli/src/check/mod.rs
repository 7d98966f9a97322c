//! `lockkit check`: the compliance suite on a store of the user's own.

mod junit;
mod report;

use std::{
    collections::BTreeMap,
    fs, panic,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use clap::Args as ClapArgs;
use lockkit::{
    Token,
    store::{join_all, unpoisoned},
};
use lockkit_compare::backend;
use lockkit_testkit::{Backend, Case, Checked, Subject, Verdict, cases};

use self::report::Report;
use crate::{
    exit::{Exit, Failure, UNAVAILABLE, USAGE, VIOLATED},
    interrupt, show,
    store::{self, StoreArgs, block_on},
    sweep,
};

/// How many cases run at once: most of their time they wait for leases to lapse.
const AT_ONCE: usize = 4;

/// Find out whether a store keeps the rules of locks, by trying
///
/// Runs the cases of the compliance suite that do a server no harm, some at once; this takes about half a minute. All
/// locks that they take have names that start with lockkit-check/ and a random part, or with lockkit/yield/ before that where a
/// holder is asked to yield; those still held at the end, or after Ctrl-C, are released. Lists what remains in the store,
/// such as fence counters. Cases that do not apply are ignored, with the reason; after Ctrl-C so are those that had
/// not ended.
///
/// Exit status: 0 if no case failed, 1 if one did, 69 if the store can't be reached, or not any more; 128 and the number of
/// the signal that interrupted it.
///
/// With --json: an object with store, passed, failed, ignored, seconds, left (what stays in the store, an array of
/// sentences) and cases: an array of objects with case, doc, result (passed, failed or ignored), reason (null if it
/// passed) and seconds.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    store: StoreArgs,
    /// Run only the cases whose name contains this, such as fencing::
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true, value_parser = store::text)]
    filter: String,
    /// Write the results to this file, too, as JUnit XML
    #[arg(long, value_name = "FILE", value_parser = store::file)]
    junit: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Print the cases, with what each is about, and run none
    #[arg(long, conflicts_with_all = ["junit", "json"])]
    list: bool,
}

pub(crate) fn run(args: &Args) -> Exit {
    let cases: Vec<_> = cases::all().into_iter().filter(|case| case.name.contains(&args.filter)).collect();
    if cases.is_empty() {
        return Err(Failure::new(
            USAGE,
            "no case has the text of --filter in its name; lockkit check --list shows them",
        ));
    }
    if args.list {
        return report::list(&cases).map(|()| 0);
    }
    let url = args.store.url()?.to_owned();
    let opened = block_on(store::open(&url))?;
    let (name, in_process) = (opened.info().name.to_string(), opened.info().scheme == "memory");
    drop(opened);
    if let Some(file) = &args.junit {
        // Before the work, not after it: a file that can't be written should cost nobody a minute. After the store was
        // reached: where it can't be, no empty file is left for the reader of reports.
        fs::File::options().append(true).create(true).open(file).map_err(|error| no_junit(&error))?;
    }

    let under = format!("lockkit-check/{}/", &Token::random()?.reveal()[..12]);
    let (started, done) = (Instant::now(), Done::default());
    let backend = backend(&name, &url, in_process);
    let checking = check(backend, cases.clone(), url.clone(), under.clone(), Arc::clone(&done));
    let ended = quietly(|| interrupt::block_on(checking));
    let took = started.elapsed();
    // Whatever became of it: also what was interrupted took locks.
    let left = if in_process { Vec::new() } else { sweep::sweep(&url, &under) };
    let mut checked = std::mem::take(&mut *unpoisoned(&done));
    let broken_off = match ended {
        Ok(broken_off) => broken_off,
        Err(failure) if interrupt::is_signal(&failure) => {
            let what = format!("interrupted after {} of {} cases", checked.len(), cases.len());
            for (place, case) in cases.iter().enumerate() {
                checked.entry(place).or_insert_with(|| not_run(case));
            }
            Some(Failure::new(failure.code(), what))
        }
        Err(failure) => return Err(after_failure(&failure, &left)),
    };
    finish(args, &Report { store: name, cases: checked.into_values().collect(), took, left }, broken_off)
}

/// The cases that have ended, by their places. They outlive an interruption.
type Done = Arc<Mutex<BTreeMap<usize, Checked>>>;

/// Runs the cases. Ends early, with the reason, when the store can't be reached any more.
async fn check(
    backend: Arc<dyn Backend>,
    cases: Vec<&'static Case>,
    url: String,
    under: String,
    done: Done,
) -> Result<Option<Failure>, Failure> {
    let unavailable = |error: &dyn std::fmt::Display| Failure::new(UNAVAILABLE, error.to_string());
    let subject = Subject::new(backend).await.map_err(|error| unavailable(&error))?.under(under);
    let length = u64::try_from(cases.len()).unwrap_or(u64::MAX);
    let bar = show::bar(length, "{elapsed:>4} [{bar:30}] {pos:>3}/{len} {wide_msg}");
    bar.enable_steady_tick(show::TICK);
    let (todo, broken_off) = (Mutex::new(cases.into_iter().enumerate()), Mutex::new(None));
    let worker = async || {
        // In a block, at whose end the lock on the list is given back.
        while let Some((place, case)) = { unpoisoned(&todo).next() } {
            bar.set_message(case.name);
            let checked = subject.run(case).await;
            let failed = matches!(checked.verdict, Verdict::Failed(_));
            unpoisoned(&done).insert(place, checked);
            bar.inc(1);
            // Was it the store's fault, or is there no store?
            if failed && let Err(error) = lockkit::open(&url).await {
                let what = format!("the store can't be used any more, since {}: {error}", case.name);
                unpoisoned(&broken_off).get_or_insert(Failure::new(UNAVAILABLE, what));
                // No more begin, also if the store comes back.
                unpoisoned(&todo).by_ref().for_each(drop);
            }
        }
    };
    join_all((0..AT_ONCE).map(|_| worker())).await;
    bar.finish_and_clear();
    Ok(broken_off.into_inner().unwrap_or_else(PoisonError::into_inner))
}

fn not_run(case: &'static Case) -> Checked {
    Checked { case, verdict: Verdict::Ignored("not run to its end: interrupted".to_owned()), took: Duration::ZERO }
}

/// A failed case panics; what it has to say is its verdict, and goes to the report.
fn quietly<T>(work: impl FnOnce() -> T) -> T {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let outcome = work();
    panic::set_hook(hook);
    outcome
}

fn after_failure(failure: &Failure, left: &[String]) -> Failure {
    let stays = if left.is_empty() { String::new() } else { format!("; left in the store: {}", left.join("; ")) };
    Failure::new(failure.code(), format!("{}{stays}", failure.message()))
}

fn finish(args: &Args, report: &Report, broken_off: Option<Failure>) -> Exit {
    if let Some(file) = &args.junit {
        fs::write(file, junit::xml(report)).map_err(|error| no_junit(&error))?;
    }
    if args.json {
        report.print_json()?;
    } else {
        report.print()?;
    }
    match (broken_off, report.failed()) {
        (Some(failure), _) => Err(failure),
        (None, 0) => Ok(0),
        (None, failed) => Err(Failure::new(VIOLATED, format!("{failed} of {} cases failed", report.cases.len()))),
    }
}

fn no_junit(error: &std::io::Error) -> Failure {
    Failure::new(USAGE, format!("can't write to the file of --junit: {error}"))
}
