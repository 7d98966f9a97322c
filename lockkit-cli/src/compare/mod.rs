//! `lockkit compare`: the same measures on every store, side by side.

mod compliance;
mod contest;
mod measure;
mod plan;
mod processes;
mod report;
mod results;
mod rows;
mod stats;

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

use clap::Args as ClapArgs;

use self::{
    plan::Plan,
    report::{Report, Setting},
    results::{Absence, Results},
};
use crate::{
    duration,
    exit::{Failure, Outcome, USAGE, VIOLATED, say},
    interrupt::block_on,
    show::print,
    store,
    targets::StoresArgs,
};
pub(crate) use stats::grouped;

/// Measure stores side by side
///
/// Always takes the store in memory too, to measure the others by. Prints one table, and writes comparison.json and
/// comparison.md, which also tells how it was measured. On a store in use it takes locks whose names start with
/// lockkit-compare/, and releases them.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    stores: StoresArgs,
    /// Where to put comparison.json and comparison.md
    #[arg(long, value_name = "DIR", default_value = "comparison", value_parser = store::file)]
    out: PathBuf,
    /// Take about 10 s per store instead of 40 s, for rougher numbers
    #[arg(long)]
    quick: bool,
    /// Leave out the compliance cases, which take half a minute more
    #[arg(long)]
    no_compliance: bool,
    /// How many leases to hold at once when their cost is measured
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = duration::number(1, 1_000_000))]
    leases: u64,
}

/// Runs the comparison.
pub(crate) fn run(args: Args) -> Outcome {
    block_on(compare(args))
}

async fn compare(args: Args) -> Outcome {
    let started = Instant::now();
    let plan = Plan::new(args.quick, !args.no_compliance, usize::try_from(args.leases).unwrap_or(usize::MAX));
    // Before the work, not after it: a directory that can't be written to should cost nobody minutes.
    fs::create_dir_all(&args.out).map_err(no_out)?;
    let release = !cfg!(debug_assertions);
    if !release {
        say("this is a debug build: its numbers say little about a release build");
    }
    let targets = args.stores.targets().await?.with_memory();
    let contestants = contest::measure_all(targets.list, &plan).await?;
    let setting = Setting {
        version: env!("CARGO_PKG_VERSION"),
        release,
        quick: args.quick,
        processors: std::thread::available_parallelism().map_or(1, usize::from),
        system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        seconds: started.elapsed().as_secs(),
    };
    let (stores, results): (Vec<_>, Vec<_>) =
        contestants.into_iter().map(|contestant| (contestant.target.name, contestant.results)).unzip();
    let failures = failed_cases(&stores, &results);
    let report = Report { rows: rows::rows(&results, &plan), stores, setting, failures, missing: targets.missing };
    publish(&report, &args.out)?;
    verdict(&report.stores, &results)
}

fn publish(report: &Report, out: &Path) -> Result<(), Failure> {
    let write = |name: &str, text: String| fs::write(out.join(name), text).map_err(no_out);
    write("comparison.json", format!("{:#}\n", report.as_json()))?;
    write("comparison.md", report.as_markdown())?;
    print(|stdout| {
        writeln!(stdout, "{}", report.as_text())?;
        writeln!(stdout, "Written: {0}/comparison.md and {0}/comparison.json", out.display())
    })
}

fn no_out(error: io::Error) -> Failure {
    Failure::new(USAGE, format!("can't write to the directory of --out: {error}"))
}

fn failed_cases(stores: &[String], results: &[Results]) -> Vec<String> {
    let all = stores.iter().zip(results).filter_map(|(store, results)| Some((store, results.compliance.as_ref()?)));
    all.flat_map(|(store, counts)| counts.failures.iter().map(move |case| format!("{store}: {case}"))).collect()
}

/// A lock that let two in at once is worse than a measure that failed.
fn verdict(stores: &[String], results: &[Results]) -> Outcome {
    for (store, results) in stores.iter().zip(results) {
        if results.violations() > 0 {
            return Err(Failure::new(
                VIOLATED,
                format!("{store}: {} critical sections overlapped", results.violations()),
            ));
        }
        if let Some(failed) = results.compliance.as_ref().map(|counts| counts.failures.len()).filter(|&many| many > 0) {
            return Err(Failure::new(VIOLATED, format!("{store}: {failed} compliance cases failed")));
        }
    }
    for (store, results) in stores.iter().zip(results) {
        for (step, absence) in &results.absent {
            if let Absence::Failed(failure) = absence {
                let message = format!("{store}: {}: {}", step.title(), failure.message());
                return Err(Failure::new(failure.code(), message));
            }
        }
    }
    Ok(0)
}
