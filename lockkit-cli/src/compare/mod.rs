//! `lockkit compare`: the same measures on every store, side by side.

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
    process::ExitCode,
    sync::Arc,
    time::Instant,
};

use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lockkit::{HandOver, LockStore, Locker, Token};
use tempfile::TempDir;

use self::{
    plan::{Plan, Step},
    report::{Report, Setting},
    results::{Absence, Counts, Results, Traits},
};
use crate::{
    exit::{Failure, SOFTWARE, USAGE, VIOLATED},
    interrupt::block_on,
    targets::{Target, Targets},
};

/// Measures lock stores side by side.
///
/// Compares the stores given by URL, or else a private instance of every server that is found installed, and always
/// the store in memory. Prints one table and writes comparison.json and comparison.md. Takes about 40 s per store.
#[derive(Debug, Args)]
pub(crate) struct CompareArgs {
    /// A store to compare; may be given several times.
    #[arg(long, value_name = "URL", env = "LOCKKIT_STORE", hide_env_values = true)]
    store: Vec<String>,
    /// Where to put comparison.json and comparison.md.
    #[arg(long, value_name = "DIR", default_value = "comparison")]
    out: PathBuf,
    /// Measures for about 10 s per store: enough to see that it works.
    #[arg(long)]
    quick: bool,
    /// How many leases to hold at once for the measure of their cost.
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    leases: u64,
}

/// A store while it is measured.
struct Contestant {
    target: Target,
    store: Arc<dyn LockStore>,
    locker: Locker,
    /// What the names of all its locks start with.
    key: String,
    results: Results,
}

/// Runs the comparison.
pub(crate) fn run(args: CompareArgs) -> Result<ExitCode, Failure> {
    block_on(compare(args))
}

async fn compare(args: CompareArgs) -> Result<ExitCode, Failure> {
    let started = Instant::now();
    let plan = Plan::new(args.quick, usize::try_from(args.leases).unwrap_or(usize::MAX));
    // Before the work, not after it: a directory that can't be written to should cost nobody minutes.
    fs::create_dir_all(&args.out).map_err(|error| no_out(&args.out, error))?;
    let release = !cfg!(debug_assertions);
    if let Some(warning) = Report::warning(&plan, release) {
        eprintln!("{warning}");
    }
    let targets = if args.store.is_empty() { Targets::installed().await? } else { Targets::given(&args.store).await? };
    let targets = targets.with_memory();
    let mut contestants = Vec::new();
    for target in targets.list {
        contestants.push(Contestant::enter(target).await?);
    }
    measure_all(&mut contestants, &plan).await?;
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
    let report = Report { rows: rows::rows(&results, &plan), stores, setting, missing: targets.missing };
    publish(&report, &args.out)?;
    verdict(&report.stores, &results)
}

fn publish(report: &Report, out: &Path) -> Result<(), Failure> {
    let write = |name: &str, text: String| fs::write(out.join(name), text).map_err(|error| no_out(out, error));
    write("comparison.json", format!("{:#}\n", report.as_json()))?;
    write("comparison.md", report.as_markdown())?;
    println!("{}", report.as_text());
    println!("Written to {0}/comparison.md and {0}/comparison.json.", out.display());
    Ok(())
}

fn no_out(out: &Path, error: io::Error) -> Failure {
    Failure::new(USAGE, format!("can't write to {}: {error}", out.display()))
}

/// A lock that let two in at once is worse than a measure that failed.
fn verdict(stores: &[String], results: &[Results]) -> Result<ExitCode, Failure> {
    for (store, results) in stores.iter().zip(results) {
        if results.violations() > 0 {
            return Err(Failure::new(
                VIOLATED,
                format!("{store}: {} critical sections overlapped", results.violations()),
            ));
        }
        if results.compliance.is_some_and(|counts| counts.failed > 0) {
            return Err(Failure::new(VIOLATED, format!("{store}: compliance cases failed")));
        }
    }
    for (store, results) in stores.iter().zip(results) {
        for (step, absence) in &results.absent {
            if let Absence::Failed { code, message } = absence {
                return Err(Failure::new(*code, format!("{store}: {}: {message}", step.title())));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn measure_all(contestants: &mut [Contestant], plan: &Plan) -> Result<(), Failure> {
    let dir = tempfile::Builder::new()
        .prefix("lockkit-compare-")
        .tempdir()
        .map_err(|error| Failure::new(SOFTWARE, format!("no temporary directory: {error}")))?;
    let bar = progress_bar(contestants.len(), plan);
    for step in Step::ALL {
        for _ in 0..plan.rounds_of(step) {
            for contestant in &mut *contestants {
                bar.set_message(format!("{}: {}", contestant.target.name, step.title()));
                contestant.go(step, plan, &dir).await;
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    Ok(())
}

/// Drawn only if stderr is a terminal.
fn progress_bar(stores: usize, plan: &Plan) -> ProgressBar {
    let rounds: u32 = Step::ALL.iter().map(|step| plan.rounds_of(*step)).sum();
    let bar = ProgressBar::with_draw_target(
        Some(u64::from(rounds) * u64::try_from(stores).unwrap_or(1)),
        ProgressDrawTarget::stderr(),
    );
    if let Ok(style) = ProgressStyle::with_template("{elapsed:>4} [{bar:30}] {pos}/{len} {msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(std::time::Duration::from_millis(500));
    bar
}

impl Contestant {
    async fn enter(target: Target) -> Result<Self, Failure> {
        let store = lockkit::open(&target.url).await?;
        let capability = &store.info().capability;
        let traits =
            Traits { fencing: format!("{:?}", capability.fencing), waiting: format!("{:?}", capability.waiting) };
        let locker = Locker::shared_builder(Arc::clone(&store)).build();
        // Names of its own: the store may be in use, by another comparison too.
        let key = format!("lockkit-compare/{}", &Token::random()?.reveal()[..12]);
        Ok(Self { target, store, locker, key, results: Results { traits, ..Results::default() } })
    }

    /// Takes one measure. A failure ends this measure on this store; the others go on.
    async fn go(&mut self, step: Step, plan: &Plan, dir: &TempDir) {
        if self.results.absent.contains_key(&step) {
            return;
        }
        if self.target.in_process && matches!(step, Step::Processes | Step::HandOff) {
            let why = "memory: is inside one process and can't be shared with another";
            self.results.absent.insert(step, Absence::Inapplicable(why));
            return;
        }
        if let Err(failure) = self.measure(step, plan, dir).await {
            let Failure { code, .. } = failure;
            self.results.absent.insert(step, Absence::Failed { code, message: failure.to_string() });
        }
    }

    async fn measure(&mut self, step: Step, plan: &Plan, dir: &TempDir) -> Result<(), Failure> {
        let (url, locker, key, results) = (&self.target.url, &self.locker, &self.key, &mut self.results);
        match step {
            Step::RoundTrip => {
                let round = measure::round_trip(locker, key, plan.slice).await?;
                Results::add(&mut results.round_trip, &round);
            }
            Step::Pair => Results::add(&mut results.pair, &measure::pair(locker, key, plan.slice).await?),
            Step::ManyKeys => results.many_keys.push(measure::many_keys(locker, key, plan.slice).await?),
            Step::HandedOver => {
                let contest = measure::hot_lock(&self.store, key, plan.slice, HandOver::default()).await?;
                results.handed_over.push(contest);
            }
            Step::NotHandedOver => {
                let contest = measure::hot_lock(&self.store, key, plan.slice, HandOver::OFF).await?;
                results.not_handed_over.push(contest);
            }
            Step::Processes => {
                results.processes.push(processes::contest(url, key, plan.process_slice, dir.path()).await?);
            }
            Step::HandOff => {
                let round = processes::hand_off(url, locker, key, plan.process_slice).await?;
                Results::add(&mut results.hand_off, &round);
            }
            Step::Leases => results.held = Some(processes::leases(url, key, plan).await?),
            Step::Compliance => match compliance(&self.target).await {
                Some(counts) => results.compliance = Some(counts),
                None => {
                    let why = "this build has no compliance suite";
                    results.absent.insert(step, Absence::Inapplicable(why));
                }
            },
        }
        Ok(())
    }
}

/// Runs the compliance suite on a store, if this build has one.
#[expect(clippy::unused_async, reason = "the suite will be awaited here")]
async fn compliance(_target: &Target) -> Option<Counts> {
    None
}
