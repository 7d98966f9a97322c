//! `lockkit race`: what happens to a counter that several processes change at once, under no lock, under a lock that
//! only one process knows, and under a lock of a store.

use std::{path::Path, process::ExitCode, time::Duration};

use clap::Args;
use comfy_table::{CellAlignment, Table, presets};
use lockkit::{Moment, Token};
use serde_json::{Value, json};

use crate::{
    crew::{Worker, number, start_together},
    exit::{Failure, SOFTWARE, VIOLATED},
    interrupt::block_on,
    ledger::{FileLedger, Ledger},
    targets::Targets,
};

/// Shows that a counter shared by processes loses updates without a lock, and keeps them with one.
///
/// Worker processes read a number from a file, add one and write it back: under no lock, under a lock that each
/// process keeps to itself, and under each store. Without --store, every server that is found installed is started
/// for the occasion.
#[derive(Debug, Args)]
pub(crate) struct RaceArgs {
    /// A store to race under; may be given several times.
    #[arg(long, value_name = "URL", env = "LOCKKIT_STORE", hide_env_values = true)]
    store: Vec<String>,
    /// How many processes take part.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=256))]
    workers: u64,
    /// How many increments they make together.
    #[arg(long, default_value_t = 5000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    total: u64,
    /// Prints JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// One way to protect the counter.
#[derive(Debug)]
struct Scheme {
    name: String,
    /// The store whose lock is taken; `None` for no lock.
    url: Option<String>,
    /// Whether no update may be lost.
    safe: bool,
}

/// What came out under one scheme.
#[derive(Clone, Debug, PartialEq)]
struct Score {
    name: String,
    safe: bool,
    expected: u64,
    count: u64,
    took: Duration,
}

impl Score {
    /// Updates that are missing; below zero if there are too many.
    fn lost(&self) -> i128 {
        i128::from(self.expected) - i128::from(self.count)
    }

    fn per_second(&self) -> f64 {
        self.expected as f64 / self.took.as_secs_f64().max(1e-9)
    }
}

/// Runs the race.
pub(crate) fn run(args: RaceArgs) -> Result<ExitCode, Failure> {
    block_on(race(args))
}

async fn race(args: RaceArgs) -> Result<ExitCode, Failure> {
    let targets = if args.store.is_empty() { Targets::installed().await? } else { Targets::given(&args.store).await? };
    let mut scores = Vec::new();
    for scheme in schemes(&targets) {
        scores.push(run_one(&args, &scheme).await?);
    }
    if args.json {
        println!("{:#}", as_json(&args, &scores));
    } else {
        println!("{}", as_text(&args, &scores));
        if targets.list.is_empty() {
            println!("\nNo store took part. Give one with --store, or install one:");
            targets.missing.iter().for_each(|how| println!("  {how}"));
        }
    }
    match scores.iter().find(|score| score.safe && score.lost() != 0) {
        Some(score) => Err(Failure::new(VIOLATED, format!("{} updates were lost under {}", score.lost(), score.name))),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn schemes(targets: &Targets) -> Vec<Scheme> {
    let local = Scheme { name: "a lock of each process's own".into(), url: Some("memory:".into()), safe: false };
    let mut schemes = vec![Scheme { name: "no lock".into(), url: None, safe: false }, local];
    // `memory:` as a store is the lock of each process's own, which is there already.
    let shared = targets.list.iter().filter(|target| !target.in_process);
    schemes.extend(shared.map(|target| Scheme {
        name: target.name.clone(),
        url: Some(target.url.clone()),
        safe: true,
    }));
    schemes
}

async fn run_one(args: &RaceArgs, scheme: &Scheme) -> Result<Score, Failure> {
    let failed = |error| Failure::new(SOFTWARE, format!("no place for the counter: {error}"));
    let dir = tempfile::Builder::new().prefix("lockkit-race-").tempdir().map_err(failed)?;
    let path = dir.path().join("counter");
    let ledger = FileLedger::create(&path).map_err(failed)?;
    let key = format!("lockkit-race/{}", &Token::random()?.reveal()[..12]);
    let mut workers = (0..args.workers)
        .map(|index| worker(&path, &key, share(args.total, args.workers, index), scheme))
        .collect::<Result<Vec<_>, _>>()?;
    let (start, reports) = start_together(&mut workers).await?;
    let mut took = Duration::ZERO;
    for report in &reports {
        took = took.max(Moment::from_nanos(number(report, "done")?).since(start));
    }
    let count = ledger.read().map_err(failed)?.count;
    Ok(Score { name: scheme.name.clone(), safe: scheme.safe, expected: args.total, count, took })
}

fn worker(path: &Path, key: &str, times: u64, scheme: &Scheme) -> Result<Worker, Failure> {
    let under = if scheme.url.is_some() { "store" } else { "nothing" };
    let (path, times) = (path.display().to_string(), times.to_string());
    let args = ["count", "--file", &path, "--times", &times, "--key", key, "--under", under].map(str::to_owned);
    Worker::spawn(&args, scheme.url.as_deref())
}

/// The part of the whole that falls to one worker: all shares add up, and no two differ by more than one.
fn share(total: u64, workers: u64, index: u64) -> u64 {
    total / workers + u64::from(index < total % workers)
}

fn as_text(args: &RaceArgs, scores: &[Score]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["UNDER", "EXPECTED", "COUNTED", "LOST", "TIME", "PER SECOND"]);
    for score in scores {
        table.add_row([
            score.name.clone(),
            score.expected.to_string(),
            score.count.to_string(),
            score.lost().to_string(),
            format!("{:.1?}", score.took),
            format!("{:.0}", score.per_second()),
        ]);
    }
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    let processes = if args.workers == 1 { "1 process adds".into() } else { format!("{} processes add", args.workers) };
    format!(
        "{processes} one to a number in a file, {} times together.\n\n{}\n\n{}",
        args.total,
        table.trim_fmt(),
        verdict(scores)
    )
}

/// What the numbers say, in a sentence; also when they say that nothing was shown.
fn verdict(scores: &[Score]) -> String {
    let lost = |safe: bool| scores.iter().filter(|score| score.safe == safe && score.lost() != 0).count();
    let unprotected = match scores.first() {
        Some(none) if none.lost() == 0 => {
            "Without a lock no update was lost this time: that was luck. Try more workers or a larger total.".to_owned()
        }
        Some(none) => format!(
            "Without a lock {} of {} updates were lost; a lock that other processes don't know is no better.",
            none.lost(),
            none.expected
        ),
        None => String::new(),
    };
    match (scores.iter().any(|score| score.safe), lost(true)) {
        (false, _) => unprotected,
        (true, 0) => format!("{unprotected}\nUnder a lock that all of them share, none was."),
        (true, _) => format!("{unprotected}\nUPDATES WERE LOST UNDER A SHARED LOCK."),
    }
}

fn as_json(args: &RaceArgs, scores: &[Score]) -> Value {
    let rows: Vec<_> = scores
        .iter()
        .map(|score| {
            json!({
                "under": score.name,
                "shared_lock": score.safe,
                "expected": score.expected,
                "counted": score.count,
                "lost": score.lost() as i64,
                "seconds": score.took.as_secs_f64(),
                "per_second": score.per_second(),
            })
        })
        .collect();
    json!({ "workers": args.workers, "total": args.total, "schemes": rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(name: &str, safe: bool, count: u64) -> Score {
        Score { name: name.into(), safe, expected: 100, count, took: Duration::from_millis(20) }
    }

    #[test]
    fn shares_add_up() {
        for (total, workers) in [(5000, 3), (2, 5), (7, 7), (1, 1)] {
            let shares: Vec<_> = (0..workers).map(|index| share(total, workers, index)).collect();
            assert_eq!(shares.iter().sum::<u64>(), total);
            assert!(shares.iter().max().zip(shares.iter().min()).is_some_and(|(most, least)| most - least <= 1));
        }
    }

    #[test]
    fn luck_is_called_luck() {
        assert!(verdict(&[score("no lock", false, 100)]).contains("luck"));
        let text = verdict(&[score("no lock", false, 60), score("redis", true, 100)]);
        assert!(text.contains("40 of 100") && text.contains("none was"), "{text}");
        assert!(verdict(&[score("no lock", false, 60), score("redis", true, 99)]).contains("UPDATES WERE LOST"));
    }
}
