//! A store beside other clients of the same server: acquisition and release, in pairs.
//!
//! All contestants run in turn within each round, so that whatever else the machine does hits all of them alike; what
//! counts is the median of the rounds' own ratios.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit::{
    HolderInfo, LockKey, LockStore, Mode, Token,
    store::{AcquireRequest, Attempt, Claim, Release, Renewal, Renewed},
};

use crate::{meter::processor_time, stats::median};

/// Longer than any measure: no lease is to end by itself.
pub const TTL: Duration = Duration::from_secs(30);

/// Why a pair failed.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Tasks that run side by side where many do.
const TASKS: usize = 64;
/// Pairs between two looks at the clock.
const AT_ONCE: u32 = 8;

type Pair = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;
type Task = Box<dyn FnMut() -> Pair + Send>;

/// Runs a bench: `run` with as many rounds as an argument of the program says, or this many, on a runtime of two threads.
///
/// # Errors
/// Those of `run`, or why there is no runtime.
pub fn main(rounds: usize, run: impl AsyncFnOnce(Rounds) -> Result<(), BoxError>) -> Result<(), BoxError> {
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(rounds);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(run(Rounds::new(rounds)))
}

/// One way to take and release locks.
pub struct Contestant {
    name: String,
    task: Box<dyn Fn(usize) -> Task + Send + Sync>,
}

impl fmt::Debug for Contestant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Contestant").field(&self.name).finish()
    }
}

impl Contestant {
    /// `task` makes the task with this number, which has a lock of its own; each call of the task takes and releases it.
    pub fn new<P, F>(name: impl Into<String>, task: impl Fn(usize) -> P + Send + Sync + 'static) -> Self
    where
        P: FnMut() -> F + Send + 'static,
        F: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        let task = move |number| {
            let mut pair = task(number);
            Box::new(move || Box::pin(pair()) as Pair) as Task
        };
        Self { name: name.into(), task: Box::new(task) }
    }

    /// A store of lockkit, asked without a [`Locker`](lockkit::Locker) between.
    pub fn store(store: Arc<dyn LockStore>) -> Self {
        Self::named_store("lockkit", store)
    }

    /// The same where several stores of lockkit compete.
    pub fn named_store(name: impl Into<String>, store: Arc<dyn LockStore>) -> Self {
        Self::new(name, move |number| {
            let (store, key) = (Arc::clone(&store), LockKey::new(format!("bench/{number}")));
            move || {
                let (store, key) = (Arc::clone(&store), key.clone());
                async move {
                    let request = request(key?)?;
                    let granted = matches!(store.acquire(&request).await?, Attempt::Granted(_));
                    let released = matches!(store.release(&request.claim).await?, Release::Released { .. });
                    if granted && released { Ok(()) } else { Err("not granted".into()) }
                }
            }
        })
    }
}

/// A request for a lock, under a new claim.
///
/// # Errors
/// The system has no random numbers.
pub fn request(key: LockKey) -> lockkit::Result<AcquireRequest> {
    let claim = Claim { key, token: Token::random()?, mode: Mode::Exclusive };
    Ok(AcquireRequest::new(claim, TTL, HolderInfo::new("bench@host:1234")))
}

/// How long is measured, and how often.
#[derive(Clone, Copy, Debug)]
pub struct Rounds {
    rounds: usize,
    slice: Duration,
    turns: u32,
    server: Option<u32>,
    what: &'static str,
}

impl Rounds {
    /// This many rounds, in which each contestant has 400 ms.
    #[must_use]
    pub fn new(rounds: usize) -> Self {
        Self { rounds, slice: Duration::from_millis(400), turns: 1, server: None, what: "pairs" }
    }

    /// What a task does each time, in the plural, if that is no pair of acquisition and release.
    #[must_use]
    pub fn of(self, what: &'static str) -> Self {
        Self { what, ..self }
    }

    /// How long each contestant has in a round.
    #[must_use]
    pub fn slice(self, slice: Duration) -> Self {
        Self { slice, ..self }
    }

    /// Divides this time into so many turns: what a single task does in a while depends on where its threads happen to run.
    #[must_use]
    pub fn turns(self, turns: u32) -> Self {
        Self { turns, ..self }
    }

    /// Measures the processor time of this server process, too, and of this one.
    #[must_use]
    pub fn server(self, process: u32) -> Self {
        Self { server: Some(process), ..self }
    }

    /// Measures all contestants with one task each.
    ///
    /// # Errors
    /// What a pair failed with.
    pub async fn one_task(&self, contestants: &[&Contestant]) -> Result<Rates, BoxError> {
        self.run(contestants, 1).await
    }

    /// Measures all contestants with 64 tasks each, each on a lock of its own.
    ///
    /// # Errors
    /// What a pair failed with.
    pub async fn many_tasks(&self, contestants: &[&Contestant]) -> Result<Rates, BoxError> {
        self.run(contestants, TASKS).await
    }

    async fn run(&self, contestants: &[&Contestant], tasks: usize) -> Result<Rates, BoxError> {
        let of = contestants.len();
        let mut costs = vec![Cost::default(); of];
        let mut rates = Vec::with_capacity(self.rounds);
        for round in 0..self.rounds {
            let mut sums = vec![0.0; of];
            for turn in 0..of * self.turns as usize {
                let which = (turn + round) % of;
                let (client, server, start) = (self.client_time(), self.server_time(), Instant::now());
                let rate = measure(contestants[which], tasks, self.slice / self.turns).await?;
                costs[which].client += self.client_time() - client;
                costs[which].server += self.server_time() - server;
                costs[which].pairs += rate * start.elapsed().as_secs_f64();
                sums[which] += rate / f64::from(self.turns);
            }
            rates.push(sums);
        }
        let names = contestants.iter().map(|contestant| contestant.name.clone()).collect();
        Ok(Rates { tasks, what: self.what, names, rates, costs: self.server.map(|_| costs) })
    }

    fn client_time(&self) -> f64 {
        self.server.map_or(0.0, |_| processor_seconds(std::process::id()))
    }

    fn server_time(&self) -> f64 {
        self.server.map_or(0.0, processor_seconds)
    }
}

/// Processor time, in seconds, and for how many pairs.
#[derive(Clone, Copy, Debug, Default)]
struct Cost {
    client: f64,
    server: f64,
    pairs: f64,
}

/// Pairs per second.
async fn measure(contestant: &Contestant, tasks: usize, slice: Duration) -> Result<f64, BoxError> {
    if tasks == 1 {
        return one_task((contestant.task)(0), slice).await;
    }
    let tasks: Vec<_> = (0..tasks).map(|number| tokio::spawn(one_task((contestant.task)(number), slice))).collect();
    let mut rate = 0.0;
    for task in tasks {
        rate += task.await??;
    }
    Ok(rate)
}

async fn one_task(mut pair: Task, slice: Duration) -> Result<f64, BoxError> {
    let (start, mut pairs) = (Instant::now(), 0_u32);
    while start.elapsed() < slice {
        for _ in 0..AT_ONCE {
            pair().await?;
        }
        pairs += AT_ONCE;
    }
    Ok(f64::from(pairs) / start.elapsed().as_secs_f64())
}

/// Pairs per second of several contestants, round by round. Shown as a table of the medians, with the processor time per
/// pair if that was measured.
#[derive(Clone, Debug)]
pub struct Rates {
    tasks: usize,
    what: &'static str,
    names: Vec<String>,
    /// For each round, a rate for each contestant.
    rates: Vec<Vec<f64>>,
    costs: Option<Vec<Cost>>,
}

impl Rates {
    /// The ratio of the first contestant's rate to that of another, judged by the least that it is to be.
    #[must_use]
    pub fn ratio(&self, other: usize, target: f64) -> Ratio {
        self.ratio_of(&format!("to {}", self.names[other]), target, |rates| rates[0] / rates[other])
    }

    /// Another ratio of the rates of one round, which are in the order of the contestants.
    #[must_use]
    pub fn ratio_of(&self, name: &str, target: f64, ratio: impl Fn(&[f64]) -> f64) -> Ratio {
        let mut ratios: Vec<_> = self.rates.iter().map(|rates| ratio(rates)).collect();
        ratios.sort_by(f64::total_cmp);
        let quartile = |of: usize| ratios.get(ratios.len() * of / 4).copied().unwrap_or(f64::NAN);
        Ratio {
            name: format!("{}, {name}", self.tasks()),
            quartiles: [quartile(1), quartile(3)],
            median: median(ratios.iter().copied()).unwrap_or(f64::NAN),
            target,
        }
    }

    fn tasks(&self) -> String {
        if self.tasks == 1 { "1 task".to_owned() } else { format!("{} tasks", self.tasks) }
    }
}

impl fmt::Display for Rates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} per second, medians of {} rounds", self.what, self.rates.len())?;
        for (index, name) in self.names.iter().enumerate() {
            let rate = median(self.rates.iter().map(|rates| rates[index])).unwrap_or(f64::NAN);
            write!(f, "  {:<42} {rate:>9.0}", format!("{}, {name}", self.tasks()))?;
            match self.tasks {
                1 => writeln!(f, "   {:>7.0} us each", 1e6 / rate)?,
                _ => writeln!(f)?,
            }
        }
        let Some(costs) = &self.costs else { return Ok(()) };
        writeln!(f, "processor time of each with {}, in us: client, server", self.tasks())?;
        for (name, cost) in self.names.iter().zip(costs) {
            let (client, server) = (cost.client / cost.pairs * 1e6, cost.server / cost.pairs * 1e6);
            writeln!(f, "  {name:<42} {client:>9.2} {server:>9.2}")?;
        }
        Ok(())
    }
}

/// How the rate of one contestant compares with that of another. Shown in one line.
#[derive(Clone, Debug)]
pub struct Ratio {
    name: String,
    /// The median of the rounds' ratios.
    pub median: f64,
    /// The first and the third quartile.
    pub quartiles: [f64; 2],
    /// The least that it is to be.
    pub target: f64,
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, median, quartiles: [low, high], target } = self;
        let outcome = if median >= target { "met" } else { "MISSED" };
        write!(f, "  {name:<42} {median:>9.3}  (quartiles {low:.3} .. {high:.3}; target {target:.2}: {outcome})")
    }
}

/// Many leases of one store, to be renewed in one call.
#[derive(Debug)]
pub struct Leases {
    store: Arc<dyn LockStore>,
    renewals: Vec<Renewal>,
}

impl Leases {
    /// Takes so many leases, 64 at a time.
    ///
    /// # Errors
    /// Those of the store.
    pub async fn take(store: Arc<dyn LockStore>, count: usize) -> Result<Self, BoxError> {
        let mut renewals = Vec::with_capacity(count);
        for first in (0..count).step_by(TASKS) {
            let tasks = (first..count.min(first + TASKS)).map(|number| {
                let store = Arc::clone(&store);
                tokio::spawn(async move {
                    let request = request(LockKey::new(format!("renewed/{number}"))?)?;
                    match store.acquire(&request).await? {
                        Attempt::Granted(_) => Ok(request.claim),
                        Attempt::Contended(_) => Err(BoxError::from("not granted")),
                    }
                })
            });
            for task in tasks.collect::<Vec<_>>() {
                renewals.push(Renewal::new(task.await??, TTL));
            }
        }
        Ok(Self { store, renewals })
    }

    /// The first of them.
    #[must_use]
    pub fn first(&self, count: usize) -> Self {
        Self { store: Arc::clone(&self.store), renewals: self.renewals.iter().take(count).cloned().collect() }
    }

    /// The names of the locks.
    pub fn keys(&self) -> impl Iterator<Item = &LockKey> {
        self.renewals.iter().map(|renewal| &renewal.claim.key)
    }

    /// Renews them all, and says how long it took.
    ///
    /// # Errors
    /// A lease was lost.
    pub async fn renew(&self) -> Result<Duration, BoxError> {
        let start = Instant::now();
        let answers = self.store.renew(&self.renewals).await;
        let took = start.elapsed();
        let held = answers.iter().all(|answer| matches!(answer, Ok(Renewed::Held(_))));
        if held { Ok(took) } else { Err("a lease was lost".into()) }
    }
}

/// The median of some durations, in milliseconds.
#[must_use]
pub fn median_millis(took: &[Duration]) -> f64 {
    median(took.iter().map(|took| took.as_secs_f64() * 1e3)).unwrap_or(f64::NAN)
}

/// The processor time of a process in seconds, from `/proc`; 0 where there is no such process.
#[must_use]
pub fn processor_seconds(process: u32) -> f64 {
    processor_time(process).unwrap_or_default().as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_store_and_a_peer_are_measured_in_turns() {
        let store = Contestant::store(lockkit::open("memory:").await.expect("memory"));
        let idle = Contestant::new("nothing", |_| || async { Ok(()) });
        let rounds = Rounds::new(2).slice(Duration::from_millis(4)).turns(2);
        let rates = rounds.one_task(&[&store, &idle]).await.expect("pairs");
        let (ratio, text) = (rates.ratio(1, 0.0), rates.to_string());
        assert!(ratio.median > 0.0 && ratio.to_string().contains("1 task, to nothing"), "{ratio}");
        let twice = rates.ratio_of("twice", 0.0, |rates| 2.0 * rates[0] / rates[1]);
        assert!(
            (twice.median / ratio.median - 2.0).abs() < 1e-9 && twice.to_string().contains("1 task, twice"),
            "{twice}"
        );
        assert!(text.contains("1 task, lockkit") && text.contains("medians of 2 rounds"), "{text}");
        let rates = rounds.server(std::process::id()).many_tasks(&[&store]).await.expect("pairs");
        assert!(rates.to_string().contains("processor time of each with 64 tasks"), "{rates}");
    }

    #[tokio::test]
    async fn what_fails_is_no_rate() {
        let broken = Contestant::new("broken", |_| || async { Err("refused".into()) });
        let failure = Rounds::new(1).one_task(&[&broken]).await.expect_err("it fails");
        assert_eq!(failure.to_string(), "refused");
    }

    #[tokio::test]
    async fn leases_are_taken_and_renewed() {
        let leases = Leases::take(lockkit::open("memory:").await.expect("memory"), 70).await.expect("leases");
        assert_eq!(leases.keys().count(), 70);
        leases.renew().await.expect("all are held");
        assert_eq!(leases.first(3).keys().count(), 3);
    }
}
