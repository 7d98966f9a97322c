//! All measures on all stores, in turns.

use std::{
    collections::HashMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit::store::unpoisoned;
use tokio::task::{JoinError, JoinSet};

use crate::{
    backend::backend,
    compliance::compliance,
    contestant::Contestant,
    error::{Error, ErrorKind, Result},
    plan::{Options, Plan, Step},
    report::{Interrupted, Report, rows},
    results::Absence,
    targets::Targets,
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
    /// The groups that were chosen and that none of the stores can take, each with the reason.
    impossible: Vec<String>,
    plan: Plan,
    started: Instant,
}

/// Is told how far a comparison is.
pub trait Progress: Send + Sync + 'static {
    /// This is being measured on this store now.
    fn begins(&self, store: &str, measure: &str);
    /// A part of the [time that the comparison takes](Comparison::about) is over.
    fn advances(&self, by: Duration);
    /// All rounds of a measure are over on all stores: its first figures, in one line. The report has them all.
    fn shows(&self, figures: &str);
}

/// Nobody is told.
impl Progress for () {
    fn begins(&self, _: &str, _: &str) {}
    fn advances(&self, _: Duration) {}
    fn shows(&self, _: &str) {}
}

impl Comparison {
    /// Connects to all stores. On a store in use, locks will be taken whose names start with `lockkit-compare/`, and
    /// released.
    ///
    /// A group of measures that none of the stores can take is left out.
    ///
    /// # Errors
    /// Those of [`lockkit::open`]; [`InvalidInput`](ErrorKind::InvalidInput) if no group is left.
    pub async fn prepare(targets: Targets, options: Options) -> Result<Self> {
        let (started, mut plan) = (Instant::now(), Plan::new(options));
        let mut contestants = Vec::new();
        for target in targets.list {
            contestants.push(Contestant::enter(target).await?);
        }
        // An empty column tells nothing; but a peer was asked for.
        let whole = |one: &Contestant| one.target.in_part().is_none() || one.target.peer().is_some();
        contestants.retain(|one| whole(one) || Step::all().any(|step| plan.takes(step) && one.takes(step)));
        let can_take = |step: &Step| contestants.iter().any(|contestant: &Contestant| contestant.takes(*step));
        let possible: Vec<_> = Step::all().filter(can_take).collect();
        let why =
            |step: &Step| contestants.iter().rev().find_map(|one| one.results.absent.get(step)).map(Absence::text);
        let impossible = Step::all().filter(|step| plan.takes(*step) && !possible.contains(step));
        let impossible = impossible.filter_map(|step| Some(format!("{}: {}", step.group(), why(&step)?))).collect();
        plan.groups.retain(|group| possible.iter().any(|step| step.group() == *group));
        if plan.groups.is_empty() {
            let message = "there is nothing to measure: none of these stores can take any of these measures";
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        Ok(Self { contestants, missing: targets.missing, impossible, plan, started })
    }

    /// The names of the stores.
    pub fn stores(&self) -> impl Iterator<Item = &str> {
        self.contestants.iter().map(|contestant| contestant.target.name())
    }

    /// The stores in use that it takes locks on, not those that were started for it: the URL of each, which may have a password in
    /// it, and what the names of the locks there start with. After an interruption, some may be held until their leases end.
    pub fn locks_in_use(&self) -> impl Iterator<Item = (&str, String)> {
        let in_use = self.contestants.iter().filter(|contestant| contestant.target.is_in_use());
        in_use.map(|contestant| (contestant.target.url(), contestant.under()))
    }

    /// About how long it takes.
    #[must_use]
    pub fn about(&self) -> Duration {
        self.plan.about_in_all(self.contestants.iter().flat_map(Contestant::steps))
    }

    /// Measures all stores. A measure that fails on a store ends there; the report says why.
    ///
    /// # Errors
    /// Those of the system.
    ///
    /// # Cancellation
    /// Worker processes are killed; what they held is released when the leases end.
    pub async fn run(self, program: &WorkerProgram, progress: Arc<dyn Progress>) -> Result<Report> {
        self.run_until(program, progress, std::future::pending()).await
    }

    /// The same, but no longer than until `stop` is ready: the report then has what was measured by that time, and
    /// [says so](crate::Setting::interrupted).
    ///
    /// # Errors
    /// Those of the system.
    ///
    /// # Cancellation
    /// Worker processes are killed, when `stop` is ready, too; what they held is released when the leases end.
    pub async fn run_until(
        mut self,
        program: &WorkerProgram,
        progress: Arc<dyn Progress>,
        stop: impl Future<Output = ()> + Send,
    ) -> Result<Report> {
        let dir = tempfile::Builder::new()
            .prefix("lockkit-compare-")
            .tempdir()
            .map_err(|error| Error::system("make a temporary directory", &error))?;
        let stopped = tokio::select! {
            () = self.measure_all(program, &progress, dir.path()) => false,
            () = stop => true,
        };
        let interrupted = stopped.then(|| self.break_off());
        let measured = self.contestants.into_iter().map(|one| (one.target.name().to_owned(), one.results)).collect();
        let mut report = Report::new(measured, &self.plan, self.missing, self.started.elapsed());
        report.setting.interrupted = interrupted;
        report.setting.impossible = self.impossible;
        Ok(report)
    }

    /// Takes all measures, in turns.
    async fn measure_all(&mut self, program: &WorkerProgram, progress: &Arc<dyn Progress>, dir: &Path) {
        for step in Step::ALONE.into_iter().filter(|step| self.plan.takes(*step)) {
            for _ in 0..self.plan.rounds_of(step) {
                for contestant in self.contestants.iter_mut().filter(|contestant| contestant.takes(step)) {
                    progress.begins(contestant.target.name(), step.title());
                    contestant.go(step, &self.plan, program, dir).await;
                    progress.advances(self.plan.about(step));
                }
            }
            if let Some(figures) = self.first_figures(step) {
                progress.shows(&figures);
            }
        }
        if self.plan.takes(Step::Compliance) {
            self.check_all(progress).await;
        }
    }

    /// What a measure showed on each store, by the first row that it has.
    fn first_figures(&self, step: Step) -> Option<String> {
        let results: Vec<_> = self.contestants.iter().map(|one| one.results.clone()).collect();
        let rows = rows(&results, &self.plan);
        rows.iter().find(|row| row.measure == step.title() && !row.unit.is_empty())?.line(self.stores())
    }

    /// Notes what was not measured, for each store, and sums it up.
    fn break_off(&mut self) -> Interrupted {
        let mut sum = Interrupted::default();
        for step in Step::all().filter(|step| self.plan.takes(*step)) {
            let (rounds, mut least) = (self.plan.rounds_of(step), u32::MAX);
            for contestant in self.contestants.iter_mut().filter(|contestant| contestant.takes(step)) {
                let taken = contestant.taken(step);
                (sum.taken, sum.of, least) = (sum.taken + taken, sum.of + rounds, least.min(taken));
                if taken == 0 {
                    contestant.leave_out(step);
                }
            }
            match least {
                0 => sum.missing.push(step.title()),
                some if some < rounds => sum.fewer_rounds.push(step.title()),
                _ => {}
            }
        }
        sum
    }

    /// Runs the compliance suite on all stores at once.
    async fn check_all(&mut self, progress: &Arc<dyn Progress>) {
        let checked = self.contestants.iter().filter(|one| one.takes(Step::Compliance)).count();
        let cases = checked * lockkit_testkit::cases::all().len();
        let each = self.plan.about(Step::Compliance) / u32::try_from(cases).unwrap_or(u32::MAX).max(1);
        let (mut running, mut indices) = (JoinSet::new(), HashMap::new());
        for (index, contestant) in self.contestants.iter().enumerate().filter(|(_, one)| one.takes(Step::Compliance)) {
            let (target, progress) = (&contestant.target, Arc::clone(progress));
            let backend = backend(target.name(), target.url(), target.is_in_process());
            let (under, seen) = (contestant.under(), Arc::clone(&contestant.cases));
            progress.begins(target.name(), Step::Compliance.title());
            let checking =
                running.spawn(async move { compliance(backend, &under, &seen, || progress.advances(each)).await });
            indices.insert(checking.id(), index);
        }
        while let Some(ended) = running.join_next_with_id().await {
            let id = ended.as_ref().map_or_else(JoinError::id, |(id, ())| *id);
            let contestant = &mut self.contestants[indices[&id]];
            contestant.count(Step::Compliance);
            match ended {
                Ok(_) => contestant.results.compliance = Some(unpoisoned(&contestant.cases).clone()),
                // A panic on one store takes nothing from what the others showed.
                Err(error) => _ = contestant.results.absent.insert(Step::Compliance, Absence::Failed(error.into())),
            }
        }
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
