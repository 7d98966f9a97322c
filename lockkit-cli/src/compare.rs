//! `lockkit compare`: the same measures on every store, side by side.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use clap::{Args as ClapArgs, ValueEnum};
use indicatif::ProgressBar;
use lockkit_compare::{Baseline, Comparison, Effort, Group, Options, Peer, Progress, Report, Verdict};
use tempfile::NamedTempFile;

use crate::{
    duration::{self, millis},
    exit::{Exit, Failure, LOST, USAGE, VIOLATED, WORSE, say},
    interrupt::{Interruption, block_on_told},
    show::{self, print},
    store, sweep,
    targets::StoresArgs,
    worker,
};

/// Measure stores side by side
///
/// Also measures the memory store, as a reference. With private servers of Redis and of MariaDB or MySQL it measures a
/// migration between them, too, in the phase both and in part of the groups. Prints the figures, and writes
/// comparison.html, a page with charts, comparison.md, and comparison.json. On a store in use it takes locks whose
/// names start with lockkit-compare/, and releases them.
///
/// Ctrl-C ends it with a report of what was measured by then, which says what is missing, releases the locks that are still held, and
/// stops all servers and processes that were started; a second one ends it at once.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    stores: StoresArgs,
    /// Where to put comparison.html, comparison.md and comparison.json
    #[arg(long, value_name = "DIR", default_value = "comparison", value_parser = store::file)]
    out: PathBuf,
    /// Measure all groups: adds faults, which kills and restarts private servers, and with --quick takeover and cost
    #[arg(long, conflicts_with = "only")]
    full: bool,
    /// Take about 10 s per store instead of 60 s, for rougher numbers; without the groups takeover and cost, unless --only names them
    #[arg(long)]
    quick: bool,
    /// How private servers treat the disk: both also measures, in part, Redis and ZooKeeper that wait for it, and MariaDB or MySQL that
    /// does not; usual leaves these out [default: both]
    #[arg(long, value_name = "WHICH")]
    durability: Option<Durability>,
    /// Measure other lock libraries, too, each on the private server of a store: those that are installed, or with =NAME[,NAME] these:
    /// rslock, redis-py, curator
    #[arg(long, value_name = "NAME", num_args = 0.., require_equals = true, value_delimiter = ',')]
    peers: Option<Vec<Peer>>,
    /// Measure these groups only: alone, keys, kinds, hot, processes, hand-off, takeover, delay, leases, cost, faults, compliance.
    /// With faults comes takeover, which measures the same on more samples
    #[arg(long, value_name = "GROUP", value_delimiter = ',')]
    only: Vec<Group>,
    /// Leave out these groups, such as compliance, which takes half a minute
    #[arg(long, value_name = "GROUP", value_delimiter = ',')]
    skip: Vec<Group>,
    /// Tell what changed since this earlier comparison.json, and end with 2 if something is worse beyond the noise of its rounds
    #[arg(long, value_name = "FILE", value_parser = store::file)]
    baseline: Option<PathBuf>,
    /// How many leases to hold at once when their cost is measured
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = duration::number(1, 1_000_000))]
    leases: u64,
}

/// How private servers treat the disk.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Durability {
    Both,
    Usual,
}

/// Runs the comparison.
pub(crate) fn run(args: Args) -> Exit {
    let Ended { exit, locks } = block_on_told(|interruption| compare(args, interruption))?;
    // Not before all tasks and workers are gone that could take more.
    for (url, prefix) in locks {
        if let Some(held) = sweep::release(&url, &prefix) {
            say(&held);
        }
    }
    exit
}

/// A comparison that came to its end or was interrupted.
struct Ended {
    exit: Exit,
    /// For each store in use, its URL and what the names of the locks start with that may still be held there.
    locks: Vec<(String, String)>,
}

async fn compare(args: Args, mut interruption: Interruption) -> Result<Ended, Failure> {
    let Prepared { comparison, baseline, files } = tokio::select! {
        prepared = Prepared::of(&args) => prepared?,
        failure = interruption.arrived() => return Err(failure),
    };
    if cfg!(debug_assertions) {
        say("this is a debug build: its numbers say little about a release build");
    }
    let stores: Vec<_> = comparison.stores().collect();
    say(&format!("comparing {}; this takes about {} s", stores.join(", "), comparison.about().as_secs()));
    let locks = comparison.locks_in_use().map(|(url, prefix)| (url.to_owned(), prefix)).collect();
    // How far the measures are, by the time that they take.
    let bar = show::bar(millis(comparison.about()), "{elapsed:>4} [{bar:30}] {percent:>3}%, {eta} left  {wide_msg}");
    bar.enable_steady_tick(show::TICK);
    let mut stop = interruption.clone();
    let stop = async move { drop(stop.arrived().await) };
    let measured = comparison.run_until(&worker::program()?, Arc::new(Bar(bar.clone())), stop).await;
    bar.finish_and_clear();
    let report = measured?;
    let report = match &baseline {
        Some(baseline) => report.since(baseline),
        None => report,
    };
    if report.setting.interrupted.is_none() {
        let exit = publish(&report, files, &args.out).and_then(|()| judge(&report));
        return Ok(Ended { exit, locks: Vec::new() });
    }
    let code = interruption.arrived().await.code();
    Ok(Ended { exit: break_off(&report, code, files, &args.out), locks })
}

/// Reports what was measured before the interruption.
fn break_off(report: &Report, code: u8, files: Files, out: &Path) -> Exit {
    match &report.setting.interrupted {
        Some(interrupted) if !report.is_empty() => {
            publish(report, files, out)?;
            // That a lock let two in is worth knowing whatever else was to come.
            let found = if report.verdict == Verdict::Sound { String::new() } else { format!("{}; ", report.verdict) };
            Err(Failure::new(code, format!("{found}{interrupted}; the report has what was measured by then")))
        }
        // Files of an earlier comparison stay: they say more.
        _ => Err(Failure::new(code, "interrupted before anything was measured")),
    }
}

/// The exit code of a comparison that came to its end.
fn judge(report: &Report) -> Exit {
    match report.verdict {
        Verdict::Sound => Ok(if report.changes.iter().any(|changes| changes.worse().count() > 0) { WORSE } else { 0 }),
        Verdict::Unmeasured { ref error, .. } => {
            Err(Failure::new(Failure::from(error.clone()).code(), report.verdict.to_string()))
        }
        Verdict::Overlapped { .. } | Verdict::Failed { .. } => Err(Failure::new(VIOLATED, report.verdict.to_string())),
    }
}

/// All that is there before the first measure.
struct Prepared {
    comparison: Comparison,
    baseline: Option<Baseline>,
    files: Files,
}

impl Prepared {
    async fn of(args: &Args) -> Result<Self, Failure> {
        let groups = groups(args)?;
        let options = Options::default()
            .effort(if args.quick { Effort::Quick } else { Effort::Thorough })
            .groups(groups.iter().copied())
            .leases(usize::try_from(args.leases).unwrap_or(usize::MAX));
        let baseline = args.baseline.as_deref().map(read_baseline).transpose()?;
        if args.durability.is_some() && args.stores.are_given() {
            return Err(Failure::new(USAGE, "--durability is about private servers, and stores are given by URL"));
        }
        if args.peers.is_some() && args.stores.are_given() {
            return Err(Failure::new(USAGE, "--peers is about private servers, and stores are given by URL"));
        }
        let targets = args.stores.targets().await?.with_memory().with_migration().await?;
        let targets = match args.durability.unwrap_or(Durability::Both) {
            Durability::Both if !args.stores.are_given() && groups.iter().any(|group| group.is_about_the_disk()) => {
                targets.with_other_durability().await?
            }
            _ => targets,
        };
        let targets = match args.peers.as_deref() {
            None => targets,
            Some([]) => targets.with_installed_peers().await,
            Some(peers) => targets.with_peers(peers.iter().copied()).await?,
        };
        let comparison = Comparison::prepare(targets, options).await?;
        // Before the work, not after it: a directory that can't be written to should cost nobody minutes.
        let files = Files::prepare(&args.out).map_err(|error| {
            Failure::new(
                USAGE,
                format!(
                    "can't write comparison.html, comparison.md and comparison.json to the directory of --out: {error}"
                ),
            )
        })?;
        let stores: Vec<_> = comparison.stores().collect();
        if let Some(baseline) = &baseline
            // The store in memory is in every comparison.
            && !baseline.stores().any(|store| stores.contains(&store) && (store != "memory" || stores.len() == 1))
        {
            let known: Vec<_> = baseline.stores().collect();
            let why = format!("--baseline has none of these stores ({}), but {}", stores.join(", "), known.join(", "));
            return Err(Failure::new(USAGE, why));
        }
        Ok(Self { comparison, baseline, files })
    }
}

/// What is left of the groups.
fn groups(Args { only, skip, quick, full, .. }: &Args) -> Result<Vec<Group>, Failure> {
    let mut groups = if only.is_empty() { Group::ALL.to_vec() } else { only.clone() };
    if only.is_empty() && !full {
        // It starts servers anew. And these two take as long as all the others.
        groups.retain(|group| *group != Group::Faults && !(*quick && matches!(group, Group::Takeover | Group::Cost)));
    } else if groups.contains(&Group::Faults) {
        groups.push(Group::Takeover);
    }
    groups.retain(|group| !skip.contains(group));
    if groups.is_empty() {
        return Err(Failure::new(USAGE, "--skip leaves nothing to measure"));
    }
    Ok(groups)
}

/// Reads the file before anything is measured.
fn read_baseline(path: &Path) -> Result<Baseline, Failure> {
    let unusable =
        |why: &dyn std::fmt::Display| Failure::new(USAGE, format!("can't use {} as --baseline: {why}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| unusable(&error))?;
    Baseline::parse(&text).map_err(|error| unusable(&error))
}

/// Writes the files of the report, and prints it: what took minutes to measure is not lost if one of the two fails, or if nobody reads
/// what is printed.
fn publish(report: &Report, files: Files, out: &Path) -> Result<(), Failure> {
    let written = files.write(report);
    let printed = print(|stdout| writeln!(stdout, "{}", report.as_text_within(show::width())));
    written.map_err(|error| Failure::new(LOST, format!("could not write the files of --out: {error}")))?;
    printed?;
    print(|stdout| {
        writeln!(stdout, "Written: {0}/comparison.html, {0}/comparison.md and {0}/comparison.json", out.display())
    })
}

/// The files of the report, in the making: JSON, Markdown and the page. Those of an earlier report stay until these are whole.
struct Files([(NamedTempFile, PathBuf); 3]);

impl Files {
    /// Makes the directory, and shows that all files can be written.
    fn prepare(out: &Path) -> io::Result<Self> {
        fs::create_dir_all(out)?;
        let prepare = |name: &str| {
            let path = out.join(name);
            if path.is_dir() {
                return Err(io::Error::new(io::ErrorKind::IsADirectory, format!("{name} is a directory")));
            }
            // For all whom the user's mask lets read it, as with any file.
            let mut file = tempfile::Builder::new();
            file.prefix(".comparison-").permissions(fs::Permissions::from_mode(0o666));
            Ok((file.tempfile_in(out)?, path))
        };
        Ok(Self([prepare("comparison.json")?, prepare("comparison.md")?, prepare("comparison.html")?]))
    }

    fn write(self, report: &Report) -> io::Result<()> {
        let texts = [format!("{}\n", report.as_json()), report.as_markdown(), report.as_html()];
        for ((mut file, path), text) in self.0.into_iter().zip(texts) {
            file.write_all(text.as_bytes())?;
            file.persist(path).map_err(|error| error.error)?;
        }
        Ok(())
    }
}

struct Bar(ProgressBar);

impl Progress for Bar {
    fn begins(&self, store: &str, measure: &str) {
        self.0.set_message(format!("{store}: {measure}"));
    }

    fn advances(&self, by: Duration) {
        self.0.inc(millis(by));
    }

    fn shows(&self, figures: &str) {
        self.0.suspend(|| say(figures));
    }
}
