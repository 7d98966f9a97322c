//! One lock in the hands of several processes, beside what else can lock on the same server.
//!
//! **Grants per second** and **fairness**: four processes take and release one lock without pause. **Turns** and
//! **hand-off**: two processes hold it for 3 ms again and again; how many grants came after the other process's, and the time
//! from the beginning of a release to such a grant.

use std::{
    fmt::{self, Write as _},
    io::{self, Read as _, Write as _},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use rustix::time::{ClockId, clock_gettime};

pub use crate::pairs::BoxError;
use crate::{
    pairs::TTL,
    stats::{jain, median},
    workers::this_program,
};

const PROCESSES: usize = 4;
const HOLD: Duration = Duration::from_millis(3);
const TURN: Duration = Duration::from_secs(3);

/// A way to take a lock: a command, to which the time to hold it, in microseconds, and the time of the turn, in
/// milliseconds, are added. At its end it prints a line for each grant: from when and to when it had the lock, in
/// nanoseconds of `CLOCK_MONOTONIC`. [`Turn`] does that.
#[derive(Clone)]
pub struct Contestant {
    name: String,
    program: String,
    args: Vec<String>,
}

impl fmt::Debug for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The command may contain a password.
        f.debug_tuple("Contestant").field(&self.name).finish()
    }
}

impl Contestant {
    /// A program with these arguments. What is among the arguments can be read by all users of the machine.
    pub fn new<'a>(
        name: impl Into<String>,
        program: impl Into<String>,
        args: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        let args = args.into_iter().map(str::to_owned).collect();
        Self { name: name.into(), program: program.into(), args }
    }

    /// This program, with these arguments.
    ///
    /// # Errors
    /// The system does not tell where this program is.
    pub fn this<'a>(name: impl Into<String>, args: impl IntoIterator<Item = &'a str>) -> Result<Self, BoxError> {
        let program = this_program()?.to_str().ok_or("a path in UTF-8")?.to_owned();
        Ok(Self::new(name, program, args))
    }
}

/// A turn of one process: for how long it takes the lock again and again, and when it had it.
#[derive(Debug)]
pub struct Turn {
    hold: Duration,
    end: u128,
    grants: String,
}

impl Turn {
    /// A turn that begins now, by the two arguments that were added to the command.
    ///
    /// # Errors
    /// They are no numbers.
    pub fn begin(hold: &str, time: &str) -> Result<Self, BoxError> {
        let (hold, time) = (Duration::from_micros(hold.parse()?), Duration::from_millis(time.parse()?));
        Ok(Self { hold, end: now() + time.as_nanos(), grants: String::new() })
    }

    /// Whether to take the lock once more.
    #[must_use]
    pub fn goes_on(&self) -> bool {
        now() < self.end
    }

    /// Holds the lock that was granted just now. It is to be released at once after that.
    ///
    /// # Errors
    /// None that are known.
    pub async fn hold(&mut self) -> Result<(), BoxError> {
        let had = now();
        if !self.hold.is_zero() {
            tokio::time::sleep(self.hold).await;
        }
        Ok(writeln!(self.grants, "{had} {}", now())?)
    }

    /// Prints the grants.
    ///
    /// # Errors
    /// Stdout can't be written to.
    pub fn end(self) -> Result<(), BoxError> {
        Ok(std::io::stdout().write_all(self.grants.as_bytes())?)
    }

    /// The whole turn with the store at this URL.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn take(mut self, url: &str) -> Result<(), BoxError> {
        let lock = lockkit::connect(url).await?.lock("hot").ttl(TTL);
        while self.goes_on() {
            let guard = lock.acquire().await?;
            self.hold().await?;
            if guard.release().await? != lockkit::Outcome::Released {
                return Err("a lease was lost".into());
            }
        }
        self.end()
    }
}

/// Nanoseconds of the clock that all processes share.
fn now() -> u128 {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec.cast_unsigned(), u32::try_from(now.tv_nsec).unwrap_or_default()).as_nanos()
}

/// What all contestants showed, round by round. Shown as a table of the medians, and the ratios of the first to each other one.
#[derive(Clone, Debug)]
pub struct Scores {
    names: Vec<String>,
    /// For each contestant, a score for each round.
    scores: Vec<Vec<Score>>,
}

#[derive(Clone, Copy, Debug)]
struct Score {
    rate: f64,
    fairness: f64,
    turns: f64,
    hand_off: Duration,
}

/// Gives each contestant its turns in each round.
///
/// # Errors
/// A process failed, or never got the lock.
pub fn compete(contestants: &[Contestant], rounds: usize) -> Result<Scores, BoxError> {
    let mut scores: Vec<Vec<Score>> = contestants.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for step in 0..contestants.len() {
            let which = (step + round) % contestants.len();
            let hot = run(&contestants[which], PROCESSES, Duration::ZERO)?;
            let paired = run(&contestants[which], 2, HOLD)?;
            let turns = paired.passed().count() as f64 / paired.grants.len().saturating_sub(1).max(1) as f64;
            let (rate, fairness) = (hot.rate(), hot.fairness());
            scores[which].push(Score { rate, fairness, turns, hand_off: paired.hand_off() });
        }
    }
    Ok(Scores { names: contestants.iter().map(|contestant| contestant.name.clone()).collect(), scores })
}

impl fmt::Display for Scores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let middle = |values: &mut dyn Iterator<Item = f64>| median(values).unwrap_or(f64::NAN);
        writeln!(f, "({} rounds, medians)", self.scores.first().map_or(0, Vec::len))?;
        for (name, scores) in self.names.iter().zip(&self.scores) {
            let of = |value: fn(&Score) -> f64| middle(&mut scores.iter().map(value));
            writeln!(
                f,
                "  {name:<24} {:>8.0} grants/s   fairness {:.2}   turns {:>3.0} %   hand-off p50 {:>7.0} us",
                of(|score| score.rate),
                of(|score| score.fairness),
                of(|score| score.turns) * 100.0,
                of(|score| score.hand_off.as_secs_f64() * 1e6),
            )?;
        }
        let Some(ours) = self.scores.first() else { return Ok(()) };
        for (name, theirs) in self.names.iter().zip(&self.scores).skip(1) {
            let rate = middle(&mut ours.iter().zip(theirs).map(|(ours, theirs)| ours.rate / theirs.rate));
            let time = ours.iter().zip(theirs);
            let time = time.map(|(ours, theirs)| ours.hand_off.as_secs_f64() / theirs.hand_off.as_secs_f64());
            writeln!(f, "  to {name}: rate {rate:.2}, hand-off {:.2} of its time", middle(&mut { time }))?;
        }
        Ok(())
    }
}

/// The grants of all processes, in order.
struct Grants {
    grants: Vec<Grant>,
    processes: usize,
}

/// Times in nanoseconds.
#[derive(Clone, Copy)]
struct Grant {
    process: usize,
    had: u64,
    gave: u64,
}

fn run(contestant: &Contestant, processes: usize, hold: Duration) -> Result<Grants, BoxError> {
    let workers = (0..processes).map(|_| {
        let mut command = Command::new(&contestant.program);
        command.args(&contestant.args).arg(hold.as_micros().to_string()).arg(TURN.as_millis().to_string());
        command.stdout(Stdio::piped()).spawn().map(Process)
    });
    let mut grants = Vec::new();
    let (mut begin, mut end) = (0, u64::MAX);
    // None writes before it is done, so that they may be heard one by one.
    for (process, mut worker) in workers.collect::<Result<Vec<_>, _>>()?.into_iter().enumerate() {
        let (printed, status) = worker.end()?;
        if !status.success() {
            return Err(format!("a process of {} failed: {status}", contestant.name).into());
        }
        let times = parse(&printed, process)?;
        let (Some(first), Some(last)) = (times.first(), times.last()) else {
            return Err(format!("a process of {} never got the lock", contestant.name).into());
        };
        (begin, end) = (begin.max(first.had), end.min(last.gave));
        grants.extend(times);
    }
    // Only the time in which all were at work.
    grants.retain(|grant| grant.had >= begin && grant.gave <= end);
    grants.sort_unstable_by_key(|grant| grant.had);
    Ok(Grants { grants, processes })
}

/// A process that takes its turn. Dropping it kills it: those of a contestant of which one failed are of no use.
struct Process(Child);

impl Process {
    /// What it printed, and how it ended.
    fn end(&mut self) -> io::Result<(String, ExitStatus)> {
        let mut printed = String::new();
        if let Some(stdout) = &mut self.0.stdout {
            stdout.read_to_string(&mut printed)?;
        }
        Ok((printed, self.0.wait()?))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Nothing can be done about an error here, and one that has ended is not there to be killed.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn parse(text: &str, process: usize) -> Result<Vec<Grant>, BoxError> {
    text.lines()
        .map(|line| {
            let (had, gave) = line.split_once(' ').ok_or("a line without two times")?;
            Ok(Grant { process, had: had.parse()?, gave: gave.parse()? })
        })
        .collect()
}

impl Grants {
    fn rate(&self) -> f64 {
        let (Some(first), Some(last)) = (self.grants.first(), self.grants.last()) else { return 0.0 };
        (self.grants.len() - 1) as f64 * 1e9 / (last.had - first.had).max(1) as f64
    }

    fn fairness(&self) -> f64 {
        let mut shares = vec![0; self.processes];
        self.grants.iter().for_each(|grant| shares[grant.process] += 1);
        jain(&shares).unwrap_or(f64::NAN)
    }

    /// The grants that came after another process's, each with that one.
    fn passed(&self) -> impl Iterator<Item = (Grant, Grant)> {
        self.grants.windows(2).map(|pair| (pair[0], pair[1])).filter(|(one, next)| one.process != next.process)
    }

    fn hand_off(&self) -> Duration {
        let times = self.passed().map(|(one, next)| next.had.saturating_sub(one.gave) as f64);
        Duration::from_nanos(median(times).unwrap_or_default() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grants_of_two_processes_are_put_in_order() {
        let mut grants = parse("0 10\n40 50\n60 70\n", 0).expect("times");
        grants.extend(parse("15 30\n", 1).expect("times"));
        grants.sort_unstable_by_key(|grant| grant.had);
        let grants = Grants { grants, processes: 2 };
        assert_eq!(grants.rate(), 3.0 * 1e9 / 60.0);
        assert_eq!(grants.fairness(), 0.8);
        // From 10 to 15, and from 30 to 40.
        assert_eq!((grants.passed().count(), grants.hand_off()), (2, Duration::from_nanos(7)));
        assert!(parse("1", 0).is_err());
    }
}
