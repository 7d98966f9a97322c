//! What happens to a counter that several processes change at once: under no lock, under a lock that only one process
//! knows, and under a lock of a store.

use std::time::Duration;

use comfy_table::{CellAlignment, Table, presets};
use lockkit::{Moment, Token};
use serde_json::json;

use crate::{
    error::{Error, Result},
    ledger::{FileLedger, Ledger},
    stats::grouped,
    targets::Targets,
    worker::{Answer, Count, Job},
    workers::{Worker, WorkerProgram, start_together, unexpected},
};

/// What a counter came to that worker processes changed at once.
#[derive(Clone, Debug)]
pub struct Race {
    /// How many processes took part.
    pub workers: u64,
    /// How many times they added one, all together.
    pub total: u64,
    /// First under no lock, then under a lock that each process has for itself, then under each store.
    pub scores: Vec<Score>,
}

/// What the counter came to under one lock, or none.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Score {
    /// What protected it: the name of the store, if a store did.
    pub name: String,
    /// Whether all processes shared the lock, so that no update may be lost.
    pub is_shared: bool,
    /// What it should have come to.
    pub expected: u64,
    /// What it came to.
    pub counted: u64,
    /// How long it took.
    pub took: Duration,
}

impl Score {
    /// Updates that are missing; below zero if there are too many.
    #[must_use]
    pub fn lost(&self) -> i128 {
        i128::from(self.expected) - i128::from(self.counted)
    }

    fn per_second(&self) -> f64 {
        self.expected as f64 / self.took.as_secs_f64().max(1e-9)
    }
}

/// Lets `workers` processes add one to a number in a file, again and again, `total` times together: under no lock, under a
/// lock that each process keeps to itself, and under each store that processes can share.
///
/// # Errors
/// Those of the stores and of the system; `Internal` if a worker process ended early.
///
/// # Cancellation
/// The worker processes are killed; what they held is released when the leases end.
pub async fn race(targets: &Targets, workers: u64, total: u64, program: &WorkerProgram) -> Result<Race> {
    let own = [("no lock", None, false), (OWN, Some("memory:"), false)];
    // `memory:` as a store is the lock of each process's own, which is there already.
    let shared = targets.list.iter().filter(|target| !target.is_in_process());
    let schemes: Vec<_> =
        own.into_iter().chain(shared.map(|target| (target.name(), Some(target.url()), true))).collect();
    let mut scores = Vec::new();
    for (name, url, is_shared) in schemes {
        let (counted, took) = count_to(total, workers, Duration::ZERO, program, url).await?;
        scores.push(Score { name: name.to_owned(), is_shared, expected: total, counted, took });
    }
    Ok(Race { workers, total, scores })
}

impl Race {
    /// The first shared lock under which updates were lost: the store that it is of broke its promise.
    #[must_use]
    pub fn broken(&self) -> Option<&Score> {
        self.scores.iter().find(|score| score.is_shared && score.lost() != 0)
    }

    /// A table for the terminal, and what it shows in a sentence.
    #[must_use]
    pub fn as_text(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(["UNDER", "EXPECTED", "COUNTED", "LOST", "TIME", "PER SECOND"]);
        for score in &self.scores {
            table.add_row([
                score.name.clone(),
                grouped(score.expected as f64),
                grouped(score.counted as f64),
                grouped(score.lost() as f64),
                show_millis(score.took),
                grouped(score.per_second()),
            ]);
        }
        table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        let processes =
            if self.workers == 1 { "1 process adds".into() } else { format!("{} processes add", self.workers) };
        format!(
            "{processes} one to a number in a file, {} times together.\n\n{}\n\n{}",
            grouped(self.total as f64),
            table.trim_fmt(),
            verdict(&self.scores)
        )
    }

    /// An object in JSON, of several lines.
    #[must_use]
    pub fn as_json(&self) -> String {
        let score = |score: &Score| {
            json!({
                "under": score.name,
                "shared_lock": score.is_shared,
                "expected": score.expected,
                "counted": score.counted,
                "lost": score.lost() as i64,
                "seconds": score.took.as_secs_f64(),
                "per_second": score.per_second(),
            })
        };
        let schemes: Vec<_> = self.scores.iter().map(score).collect();
        format!("{:#}", json!({ "workers": self.workers, "total": self.total, "schemes": schemes }))
    }
}

/// Lets so many processes add one to a number in a file, `total` times together, each time with so much work between reading and
/// writing: under the lock of the store at this URL, or under none. Returns what the number came to, and how long it took.
pub(crate) async fn count_to(
    total: u64,
    workers: u64,
    work: Duration,
    program: &WorkerProgram,
    store: Option<&str>,
) -> Result<(u64, Duration)> {
    let failed = |error| Error::system("make a counter", &error);
    let dir = tempfile::Builder::new().prefix("lockkit-race-").tempdir().map_err(failed)?;
    let file = dir.path().join("counter");
    let ledger = FileLedger::create(&file).map_err(failed)?;
    let key = format!("lockkit-race/{}", &Token::random()?.reveal()[..12]);
    let mut running = Vec::new();
    for index in 0..workers {
        let times = share(total, workers, index);
        let job = Count { file: file.clone(), times, key: key.clone(), work };
        running.push(Worker::start(program, Job::Count(job), store).await?);
    }
    let (start, answers) = start_together(running).await?;
    let mut took = Duration::ZERO;
    for answer in &answers {
        let Answer::Counted { at } = answer else { return Err(unexpected(answer)) };
        took = took.max(Moment::from_nanos(*at).since(start));
    }
    Ok((ledger.read().map_err(failed)?.count, took))
}

/// The scheme in which each process has a lock of its own.
const OWN: &str = "a lock of each process's own";

/// The part of the whole that falls to one worker: all shares add up, and no two differ by more than one.
fn share(total: u64, workers: u64, index: u64) -> u64 {
    total / workers + u64::from(index < total % workers)
}

/// A time in milliseconds, whatever its size: times in one column are there to be compared.
fn show_millis(took: Duration) -> String {
    format!("{} ms", grouped(took.as_secs_f64() * 1000.0))
}

/// What the numbers say, in a sentence; also when they say that nothing was shown.
fn verdict(scores: &[Score]) -> String {
    let lost = scores.iter().filter(|score| score.is_shared && score.lost() != 0).count();
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
    match (scores.iter().any(|score| score.is_shared), lost) {
        (false, _) => unprotected,
        (true, 0) => format!("{unprotected}\nUnder a lock that all of them share, none was."),
        (true, _) => format!("{unprotected}\nUPDATES WERE LOST UNDER A SHARED LOCK."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn score(name: &str, is_shared: bool, counted: u64) -> Score {
        Score { name: name.into(), is_shared, expected: 100, counted, took: Duration::from_millis(20) }
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
