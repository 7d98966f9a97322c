//! All measures on all stores, in turns.

use std::{
    collections::HashMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit::{HandOver, Liveness, LockStore, Locker, Token};
use tokio::task::{JoinError, JoinSet};

use crate::{
    backend::backend,
    compliance::compliance,
    error::{Error, ErrorKind, Result},
    measure,
    plan::{Options, Plan, Step},
    processes,
    report::Report,
    results::{Absence, Kinds, Results, Traits},
    targets::{Target, Targets},
    workers::WorkerProgram,
};

/// Stores that are about to be measured side by side, with the same measures.
///
/// # Examples
/// ```no_run
/// use std::sync::Arc;
///
/// use lockkit_compare::{Comparison, Effort, Options, Targets, WorkerProgram, worker};
///
/// fn main() -> lockkit_compare::Result<()> {
///     if std::env::args().nth(1).as_deref() == Some("worker") { worker::run() } else { compare() }
/// }
///
/// #[tokio::main]
/// async fn compare() -> lockkit_compare::Result<()> {
///     let mut targets = Targets::default().with_memory();
///     targets.add("redis://localhost").await?;
///     let comparison = Comparison::prepare(targets, Options::default().effort(Effort::Quick)).await?;
///     let report = comparison.run(&WorkerProgram::this(["worker"])?, Arc::new(())).await?;
///     println!("{}", report.as_text());
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct Comparison {
    contestants: Vec<Contestant>,
    missing: Vec<String>,
    plan: Plan,
    started: Instant,
}

/// Is told how far a comparison is.
pub trait Progress: Send + Sync + 'static {
    /// This is being measured on this store now.
    fn begins(&self, store: &str, measure: &str);
    /// A part of the [time that the comparison takes](Comparison::about) is over.
    fn advances(&self, by: Duration);
}

/// Nobody is told.
impl Progress for () {
    fn begins(&self, _: &str, _: &str) {}
    fn advances(&self, _: Duration) {}
}

impl Comparison {
    /// Connects to all stores. On a store in use, locks will be taken whose names start with `lockkit-compare/`, and
    /// released.
    ///
    /// # Errors
    /// Those of [`lockkit::open`]; [`InvalidInput`](ErrorKind::InvalidInput) if there is no group to measure.
    pub async fn prepare(targets: Targets, options: Options) -> Result<Self> {
        let (started, plan) = (Instant::now(), Plan::new(options));
        if plan.groups.is_empty() {
            return Err(Error::new(ErrorKind::InvalidInput, "there is no group of measures to take"));
        }
        let mut contestants = Vec::new();
        for target in targets.list {
            contestants.push(Contestant::enter(target).await?);
        }
        Ok(Self { contestants, missing: targets.missing, plan, started })
    }

    /// The names of the stores.
    pub fn stores(&self) -> impl Iterator<Item = &str> {
        self.contestants.iter().map(|contestant| contestant.target.name())
    }

    /// About how long it takes.
    #[must_use]
    pub fn about(&self) -> Duration {
        self.plan.about_in_all(self.contestants.iter().map(|contestant| contestant.target.steps()))
    }

    /// Measures all stores. A measure that fails on a store ends there; the report says why.
    ///
    /// # Errors
    /// Those of the system.
    ///
    /// # Cancellation
    /// Worker processes are killed; what they held is released when the leases end.
    pub async fn run(mut self, program: &WorkerProgram, progress: Arc<dyn Progress>) -> Result<Report> {
        let dir = tempfile::Builder::new()
            .prefix("lockkit-compare-")
            .tempdir()
            .map_err(|error| Error::system("make a temporary directory", &error))?;
        for step in Step::ALONE.into_iter().filter(|step| self.plan.takes(*step)) {
            for _ in 0..self.plan.rounds_of(step) {
                let takes_it = |contestant: &&mut Contestant| contestant.target.steps().contains(&step);
                for contestant in self.contestants.iter_mut().filter(takes_it) {
                    progress.begins(contestant.target.name(), step.title());
                    contestant.go(step, &self.plan, program, dir.path()).await;
                    progress.advances(self.plan.about(step));
                }
            }
        }
        if self.plan.takes(Step::Compliance) {
            self.check_all(&progress).await;
        }
        let measured = self.contestants.into_iter().map(|one| (one.target.name().to_owned(), one.results));
        Ok(Report::new(measured.collect(), &self.plan, self.missing, self.started.elapsed()))
    }

    /// Runs the compliance suite on all stores at once.
    async fn check_all(&mut self, progress: &Arc<dyn Progress>) {
        let cases = self.contestants.len() * lockkit_testkit::cases::all().len();
        let each = self.plan.about(Step::Compliance) / u32::try_from(cases).unwrap_or(u32::MAX).max(1);
        let (mut running, mut indices) = (JoinSet::new(), HashMap::new());
        for (index, contestant) in self.contestants.iter().enumerate() {
            let (target, progress) = (&contestant.target, Arc::clone(progress));
            let backend = backend(target.name(), target.url(), target.is_in_process());
            let under = format!("{}/", contestant.key);
            progress.begins(target.name(), Step::Compliance.title());
            let checking = running.spawn(async move { compliance(backend, &under, || progress.advances(each)).await });
            indices.insert(checking.id(), index);
        }
        while let Some(ended) = running.join_next_with_id().await {
            let id = ended.as_ref().map_or_else(JoinError::id, |(id, _)| *id);
            let results = &mut self.contestants[indices[&id]].results;
            match ended {
                Ok((_, counts)) => results.compliance = Some(counts),
                // A panic on one store takes nothing from what the others showed.
                Err(error) => _ = results.absent.insert(Step::Compliance, Absence::Failed(error.into())),
            }
        }
    }
}

/// A store while it is measured.
#[derive(Debug)]
struct Contestant {
    target: Target,
    store: Arc<dyn LockStore>,
    locker: Locker,
    /// What the names of all its locks start with.
    key: String,
    results: Results,
}

impl Contestant {
    async fn enter(target: Target) -> Result<Self> {
        let store = lockkit::open(target.url()).await?;
        let capability = &store.info().capability;
        let traits = Traits {
            in_process: target.is_in_process(),
            scheme: store.info().scheme.to_owned(),
            fencing: format!("{:?}", capability.fencing),
            waiting: format!("{:?}", capability.waiting),
            liveness: liveness(&capability.liveness),
            kinds: Kinds {
                fifo: capability.fifo,
                shared: capability.shared,
                permits: capability.permits,
                resume: capability.resume,
                keeps: capability.keeps,
            },
        };
        let locker = Locker::shared_builder(Arc::clone(&store)).build();
        // Names of its own: the store may be in use, by another comparison too.
        let key = format!("lockkit-compare/{}", &Token::random()?.reveal()[..12]);
        let left_out = Step::ALONE.into_iter().filter(|step| !target.steps().contains(step));
        let why = target.in_part().unwrap_or_default();
        let absent = left_out.map(|step| (step, Absence::Inapplicable(why))).collect();
        Ok(Self { target, store, locker, key, results: Results { traits, absent, ..Results::default() } })
    }

    /// Takes one measure. A failure ends this measure on this store; the others go on.
    async fn go(&mut self, step: Step, plan: &Plan, program: &WorkerProgram, dir: &Path) {
        if self.results.absent.contains_key(&step) {
            return;
        }
        if self.target.is_in_process() && matches!(step, Step::Processes | Step::HandOff) {
            let why = "it is inside one process, and no other can share it";
            self.results.absent.insert(step, Absence::Inapplicable(why));
            return;
        }
        let kinds = self.results.traits.kinds;
        if step == Step::Kinds && !(kinds.fifo || kinds.shared || kinds.permits) {
            let why = "it has exclusive locks only, in no order";
            self.results.absent.insert(step, Absence::Inapplicable(why));
            return;
        }
        if step == Step::Leases && !cfg!(target_os = "linux") {
            let why = "the memory of a process is read from /proc, which this system does not have";
            self.results.absent.insert(step, Absence::Inapplicable(why));
            return;
        }
        if let Err(failure) = self.measure(step, plan, program, dir).await {
            self.results.absent.insert(step, Absence::Failed(failure));
        }
    }

    async fn measure(&mut self, step: Step, plan: &Plan, program: &WorkerProgram, dir: &Path) -> Result<()> {
        let (url, locker, key, results) = (self.target.url(), &self.locker, &self.key, &mut self.results);
        let (slice, process_slice) = (plan.slice, plan.process_slice);
        match step {
            Step::RoundTrip => results.round_trip.add(measure::round_trip(locker, key, slice).await?),
            Step::Pair => {
                let round = measure::pair(locker.lock(format!("{key}/pair")), slice).await?;
                results.pair.add(round.pair);
                results.acquire.add(round.acquire);
                results.release.add(round.release);
            }
            Step::ManyKeys => {
                let rate = measure::many_keys(locker, key, Plan::KEYS, slice).await?;
                results.many_keys.push(rate);
                results.by_keys.entry(Plan::KEYS).or_default().push(rate);
            }
            Step::ByKeys => {
                for keys in Plan::BY_KEYS {
                    let rate = measure::many_keys(locker, key, keys, plan.short_slice()).await?;
                    results.by_keys.entry(keys).or_default().push(rate);
                }
            }
            Step::Kinds => {
                let (name, kinds, slice) = (|kind| format!("{key}/{kind}"), results.traits.kinds, plan.short_slice());
                if kinds.fifo {
                    results.fifo.add(measure::pair(locker.lock(name("fifo")).fifo(), slice).await?.pair);
                }
                if kinds.shared {
                    results.reader.add(measure::pair(locker.rw_lock(name("reader")).read(), slice).await?.pair);
                }
                if kinds.permits {
                    let permit = locker.semaphore(name("permit"), Plan::PERMITS);
                    results.permit.add(measure::pair(permit, slice).await?.pair);
                }
            }
            Step::HandedOver => {
                results.handed_over.push(measure::hot_lock(&self.store, key, slice, HandOver::default()).await?);
            }
            Step::NotHandedOver => {
                results.not_handed_over.push(measure::hot_lock(&self.store, key, slice, HandOver::OFF).await?);
            }
            Step::Processes => results.processes.push(processes::contest(program, url, key, process_slice, dir).await?),
            Step::HandOff => {
                let round = processes::hand_off(program, url, locker, key, process_slice).await?;
                results.hand_off.add(round.latencies);
                results.idle_round_trip.add(round.idle_round_trips);
            }
            Step::Leases => results.held = Some(processes::leases(program, url, key, plan).await?),
            // All stores at once, after all else.
            Step::Compliance => {}
        }
        Ok(())
    }
}

/// What ends the lease of a holder that is gone, in a word or two.
fn liveness(liveness: &Liveness) -> String {
    match (&liveness.ttl, &liveness.session) {
        (Some(_), Some(_)) => "ttl, session".to_owned(),
        (None, Some(_)) => "session".to_owned(),
        _ => "ttl".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_comparison_of_nothing_is_bad_input() {
        let targets = Targets::default().with_memory();
        let failure = Comparison::prepare(targets, Options::default().groups([])).await.expect_err("nothing to do");
        assert_eq!(failure.kind(), ErrorKind::InvalidInput);
    }
}
