//! `lockkit race`: what happens to a counter that several processes change at once, under no lock, under a lock that
//! only one process knows, and under a lock of a store.

use std::{path::Path, time::Duration};

use clap::Args as ClapArgs;
use comfy_table::{CellAlignment, Table, presets};
use lockkit::{Moment, Token};
use serde_json::{Value, json};

use crate::{
    compare::grouped,
    crew::{Worker, number, start_together},
    duration,
    exit::{Failure, Outcome, VIOLATED},
    interrupt::block_on,
    ledger::{FileLedger, Ledger},
    show::{print, print_json},
    targets::{StoresArgs, Targets},
};

/// Show what a lock is for: processes that add one to the same number, with and without
///
/// Worker processes read a number from a file, add one and write it back, again and again: under no lock, under a lock
/// that each process keeps to itself, and under each store. Prints how many updates were lost.
///
/// With --json: an object with workers, total, and schemes: an array of objects with under, shared_lock, expected,
/// counted, lost, seconds, per_second.
#[derive(Debug, ClapArgs)]
pub(crate) struct Args {
    #[command(flatten)]
    stores: StoresArgs,
    /// How many processes take part
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = duration::number(1, 256))]
    workers: u64,
    /// How many times they add one, all together
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = duration::number(1, 100_000_000))]
    total: u64,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// The scheme in which each process has a lock of its own.
const OWN: &str = "a lock of each process's own";

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
pub(crate) fn run(args: Args) -> Outcome {
    block_on(race(args))
}

async fn race(args: Args) -> Outcome {
    let targets = args.stores.targets().await?;
    let mut scores = Vec::new();
    for scheme in schemes(&targets) {
        scores.push(run_one(&args, &scheme).await?);
    }
    if args.json {
        print_json(&as_json(&args, &scores))?;
    } else {
        print(|out| writeln!(out, "{}{}", as_text(&args, &scores), absentees(&targets)))?;
    }
    match scores.iter().find(|score| score.safe && score.lost() != 0) {
        Some(score) => Err(Failure::new(VIOLATED, format!("{} updates were lost under {}", score.lost(), score.name))),
        None => Ok(0),
    }
}

fn schemes(targets: &Targets) -> Vec<Scheme> {
    let local = Scheme { name: OWN.into(), url: Some("memory:".into()), safe: false };
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

async fn run_one(args: &Args, scheme: &Scheme) -> Result<Score, Failure> {
    let failed = |error| Failure::system("make a counter", &error);
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

fn as_text(args: &Args, scores: &[Score]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["UNDER", "EXPECTED", "COUNTED", "LOST", "TIME", "PER SECOND"]);
    for score in scores {
        table.add_row([
            score.name.clone(),
            grouped(score.expected as f64),
            grouped(score.count as f64),
            grouped(score.lost() as f64),
            show_millis(score.took),
            grouped(score.per_second()),
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

/// A time in milliseconds, whatever its size: times in one column are there to be compared.
fn show_millis(took: Duration) -> String {
    format!("{} ms", grouped(took.as_secs_f64() * 1000.0))
}

/// How a store could take part, if none did.
fn absentees(targets: &Targets) -> String {
    if targets.list.iter().any(|target| !target.in_process) {
        return String::new();
    }
    let mut text = "\n\nNo store that processes can share took part. Give one with --store".to_owned();
    if !targets.missing.is_empty() {
        text += ", or install one:";
        targets.missing.iter().for_each(|how| text += &format!("\n  {how}"));
    }
    text
}

/// What the numbers say, in a sentence; also when they say that nothing was shown.
fn verdict(scores: &[Score]) -> String {
    let lost = scores.iter().filter(|score| score.safe && score.lost() != 0).count();
    let unprotected = match scores.first() {
        Some(none) if none.lost() == 0 => {
            "Without a lock no update was lost this time: that was luck. Try more workers or a larger total.".to_owned()
        }
        Some(none) => format!("Without a lock {} of {} updates were lost.", none.lost(), none.expected),
        None => String::new(),
    };
    let useless = scores.iter().any(|score| score.name == OWN && score.lost() != 0);
    let own = if useless { " A lock that other processes don't know was no help." } else { "" };
    let unprotected = unprotected + own;
    match (scores.iter().any(|score| score.safe), lost) {
        (false, _) => unprotected,
        (true, 0) => format!("{unprotected}\nUnder a lock that all of them share, none was."),
        (true, _) => format!("{unprotected}\nUPDATES WERE LOST UNDER A SHARED LOCK."),
    }
}

fn as_json(args: &Args, scores: &[Score]) -> Value {
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
