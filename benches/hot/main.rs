//! One hot lock in the hands of several processes: this library beside what else is used on the same server.
//!
//! Each contestant has its turn on the same server in each round. **Grants per second** and **fairness**: four processes
//! take and release one lock without pause. **Turns** and **hand-off**: two processes hold it for 3 ms again and again;
//! how many grants came after the other process's, and the time from the beginning of a release to such a grant.
//! `cargo bench --all-features --bench hot -- [rounds] [redis] [redlock] [mysql] [zk] [durable]`
//!
//! MySQL leaves writing to the disk to the operating system, unless `durable` has it write each commit. Curator's
//! archives are looked for in `$LOCKKIT_CURATOR`, or else in `/usr/share/java`; without them it does not take part.

mod servers;
mod work;

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use servers::{Contestant, Field};

type Error = Box<dyn std::error::Error + Send + Sync>;

const PROCESSES: usize = 4;
const HOLD: Duration = Duration::from_millis(3);
const TURN: Duration = Duration::from_secs(3);

fn main() -> Result<(), Error> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    if let [word, rest @ ..] = &arguments[..]
        && word == "worker"
    {
        return runtime.block_on(work::work(rest));
    }
    let rounds = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(5);
    for field in Field::ALL {
        let named: Vec<_> =
            Field::ALL.iter().filter(|field| arguments.iter().any(|word| word == field.name())).collect();
        if named.is_empty() || named.iter().any(|named| named.name() == field.name()) {
            let durable = arguments.iter().any(|argument| argument == "durable");
            runtime.block_on(compete(field, rounds, durable))?;
        }
    }
    Ok(())
}

/// What one contestant showed in one round.
struct Score {
    rate: f64,
    fairness: f64,
    turns: f64,
    hand_off: Duration,
}

async fn compete(field: Field, rounds: usize, durable: bool) -> Result<(), Error> {
    let (_servers, contestants) = field.start(durable).await?;
    let mut scores: Vec<Vec<Score>> = contestants.iter().map(|_| Vec::new()).collect();
    for round in 0..rounds {
        for step in 0..contestants.len() {
            let who = (step + round) % contestants.len();
            let contestant = &contestants[who];
            let hot = run(contestant, PROCESSES, Duration::ZERO)?;
            let paired = run(contestant, 2, HOLD)?;
            let turns = paired.passed().count() as f64 / (paired.0.len() - 1).max(1) as f64;
            scores[who].push(Score { rate: hot.rate(), fairness: hot.fairness(), turns, hand_off: paired.hand_off() });
        }
    }
    println!("{} ({rounds} rounds, medians)", field.name());
    for (contestant, scores) in contestants.iter().zip(&scores) {
        let of = |value: fn(&Score) -> f64| median(scores.iter().map(value).collect());
        println!(
            "  {:<24} {:>8.0} grants/s   fairness {:.2}   turns {:>3.0} %   hand-off p50 {:>7.0} us",
            contestant.name,
            of(|score| score.rate),
            of(|score| score.fairness),
            of(|score| score.turns) * 100.0,
            of(|score| score.hand_off.as_secs_f64() * 1e6),
        );
    }
    for (contestant, theirs) in contestants.iter().zip(&scores).skip(1) {
        let rounds = || scores[0].iter().zip(theirs);
        let rate = median(rounds().map(|(ours, theirs)| ours.rate / theirs.rate).collect());
        let time = rounds().map(|(ours, theirs)| ours.hand_off.as_secs_f64() / theirs.hand_off.as_secs_f64());
        println!("  to {}: rate {rate:.2}, hand-off {:.2} of its time", contestant.name, median(time.collect()));
    }
    Ok(())
}

/// The grants of all processes: who, from when, to when, in nanoseconds; in order.
struct Grants(Vec<(usize, u64, u64)>, usize);

fn run(contestant: &Contestant, processes: usize, hold: Duration) -> Result<Grants, Error> {
    let workers = (0..processes).map(|_| {
        let mut command = Command::new(&contestant.command[0]);
        command.args(&contestant.command[1..]).arg(hold.as_micros().to_string()).arg(TURN.as_millis().to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn()
    });
    let workers = workers.collect::<Result<Vec<_>, _>>()?;
    let mut grants = Vec::new();
    let (mut begin, mut end) = (0, u64::MAX);
    // None writes before it is done, so that they may be heard one by one.
    for (who, worker) in workers.into_iter().enumerate() {
        let output = worker.wait_with_output()?;
        if !output.status.success() {
            return Err(format!("a process of {} failed: {}", contestant.name, output.status).into());
        }
        let text = String::from_utf8(output.stdout)?;
        let times = text.lines().map(|line| {
            let (had, gave) = line.split_once(' ').ok_or("two times")?;
            Ok::<(u64, u64), Error>((had.parse()?, gave.parse()?))
        });
        let times = times.collect::<Result<Vec<_>, _>>()?;
        let (Some(first), Some(last)) = (times.first(), times.last()) else {
            return Err(format!("a process of {} never got the lock", contestant.name).into());
        };
        (begin, end) = (begin.max(first.0), end.min(last.1));
        grants.extend(times.into_iter().map(|(had, gave)| (who, had, gave)));
    }
    // Only the time in which all were at work.
    grants.retain(|(_, had, gave)| *had >= begin && *gave <= end);
    grants.sort_unstable_by_key(|(_, had, _)| *had);
    Ok(Grants(grants, processes))
}

impl Grants {
    fn rate(&self) -> f64 {
        let (Some(first), Some(last)) = (self.0.first(), self.0.last()) else { return 0.0 };
        (self.0.len() - 1) as f64 * 1e9 / (last.1 - first.1) as f64
    }

    /// Jain's index of the processes' shares: 1 if they are equal.
    fn fairness(&self) -> f64 {
        let mut shares = vec![0.0; self.1];
        self.0.iter().for_each(|(who, ..)| shares[*who] += 1.0);
        let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
        sum * sum / (self.1 as f64 * squares)
    }

    /// The grants that came after another process's, each with that one.
    fn passed(&self) -> impl Iterator<Item = &[(usize, u64, u64)]> {
        self.0.windows(2).filter(|pair| pair[0].0 != pair[1].0)
    }

    fn hand_off(&self) -> Duration {
        let times = self.passed().map(|pair| pair[1].1.saturating_sub(pair[0].2) as f64).collect();
        Duration::from_nanos(median(times) as u64)
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
