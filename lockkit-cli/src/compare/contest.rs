//! All measures on all stores, in turns.

use std::{path::Path, sync::Arc, time::Duration};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use lockkit::{HandOver, LockStore, Locker, Token};
use tokio::task::JoinSet;

use super::{
    compliance::compliance,
    measure,
    plan::{Plan, Step},
    processes,
    results::{Absence, Results, Traits},
};
use crate::{
    exit::{Failure, SOFTWARE, say},
    targets::Target,
    under_test::backend,
};

/// A store while it is measured.
pub(super) struct Contestant {
    pub(super) target: Target,
    store: Arc<dyn LockStore>,
    locker: Locker,
    /// What the names of all its locks start with.
    key: String,
    pub(super) results: Results,
}

/// Measures all stores.
pub(super) async fn measure_all(targets: Vec<Target>, plan: &Plan) -> Result<Vec<Contestant>, Failure> {
    let mut contestants = Vec::new();
    for target in targets {
        contestants.push(Contestant::enter(target).await?);
    }
    let dir = tempfile::Builder::new()
        .prefix("lockkit-compare-")
        .tempdir()
        .map_err(|error| Failure::system("make a temporary directory", &error))?;
    let names: Vec<_> = contestants.iter().map(|contestant| contestant.target.name.as_str()).collect();
    let seconds = plan.about_in_all(names.len()).as_secs();
    say(&format!("comparing {}; this takes about {seconds} s", names.join(", ")));
    let bar = progress_bar(names.len(), plan);
    for step in Step::ALONE {
        for _ in 0..plan.rounds_of(step) {
            for contestant in &mut contestants {
                bar.set_message(format!("{}: {}", contestant.target.name, step.title()));
                contestant.go(step, plan, dir.path()).await;
                bar.inc(millis(plan.about(step)));
            }
        }
    }
    if plan.compliance {
        check_all(&mut contestants, plan, &bar).await?;
    } else {
        for contestant in &mut contestants {
            contestant.results.absent.insert(Step::Compliance, Absence::Inapplicable("compliance was left out"));
        }
    }
    bar.finish_and_clear();
    Ok(contestants)
}

/// Runs the compliance suite on all stores at once.
async fn check_all(contestants: &mut [Contestant], plan: &Plan, bar: &ProgressBar) -> Result<(), Failure> {
    let cases = contestants.len() * lockkit_testkit::cases::all().len();
    let each = millis(plan.about(Step::Compliance)) / u64::try_from(cases).unwrap_or(u64::MAX).max(1);
    let mut running = JoinSet::new();
    for (index, contestant) in contestants.iter().enumerate() {
        let Target { name, url, in_process, .. } = &contestant.target;
        let (backend, bar, name) = (backend(name, url, *in_process), bar.clone(), name.clone());
        let under = format!("{}/", contestant.key);
        running.spawn(async move {
            let progress = |case: &str| {
                bar.set_message(format!("{name}: {case}"));
                bar.inc(each);
            };
            (index, compliance(backend, &under, progress).await)
        });
    }
    while let Some(ended) = running.join_next().await {
        let (index, counts) = ended.map_err(|error| Failure::new(SOFTWARE, error.to_string()))?;
        contestants[index].results.compliance = Some(counts);
    }
    Ok(())
}

/// Tells how far the measures are, by the time that they take. Drawn only if stderr is a terminal.
fn progress_bar(stores: usize, plan: &Plan) -> ProgressBar {
    let whole = millis(plan.about_in_all(stores));
    let bar = ProgressBar::with_draw_target(Some(whole), ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template("{elapsed:>4} [{bar:30}] {percent:>3}% {wide_msg}") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(500));
    bar
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Contestant {
    async fn enter(target: Target) -> Result<Self, Failure> {
        let store = lockkit::open(&target.url).await?;
        let capability = &store.info().capability;
        let traits = Traits {
            in_process: target.in_process,
            fencing: format!("{:?}", capability.fencing),
            waiting: format!("{:?}", capability.waiting),
        };
        let locker = Locker::shared_builder(Arc::clone(&store)).build();
        // Names of its own: the store may be in use, by another comparison too.
        let key = format!("lockkit-compare/{}", &Token::random()?.reveal()[..12]);
        Ok(Self { target, store, locker, key, results: Results { traits, ..Results::default() } })
    }

    /// Takes one measure. A failure ends this measure on this store; the others go on.
    async fn go(&mut self, step: Step, plan: &Plan, dir: &Path) {
        if self.results.absent.contains_key(&step) {
            return;
        }
        if self.target.in_process && matches!(step, Step::Processes | Step::HandOff) {
            let why = "it is inside one process, and no other can share it";
            self.results.absent.insert(step, Absence::Inapplicable(why));
            return;
        }
        if let Err(failure) = self.measure(step, plan, dir).await {
            self.results.absent.insert(step, Absence::Failed(failure));
        }
    }

    async fn measure(&mut self, step: Step, plan: &Plan, dir: &Path) -> Result<(), Failure> {
        let (url, locker, key, results) = (&self.target.url, &self.locker, &self.key, &mut self.results);
        let (slice, process_slice) = (plan.slice, plan.process_slice);
        match step {
            Step::RoundTrip => {
                Results::add(&mut results.round_trip, &measure::round_trip(locker, key, slice).await?);
            }
            Step::Pair => Results::add(&mut results.pair, &measure::pair(locker, key, slice).await?),
            Step::ManyKeys => results.many_keys.push(measure::many_keys(locker, key, slice).await?),
            Step::HandedOver => {
                results.handed_over.push(measure::hot_lock(&self.store, key, slice, HandOver::default()).await?);
            }
            Step::NotHandedOver => {
                results.not_handed_over.push(measure::hot_lock(&self.store, key, slice, HandOver::OFF).await?);
            }
            Step::Processes => results.processes.push(processes::contest(url, key, process_slice, dir).await?),
            Step::HandOff => {
                let round = processes::hand_off(url, locker, key, process_slice).await?;
                Results::add(&mut results.hand_off, &round.latencies);
                Results::add(&mut results.idle_round_trip, &round.idle_round_trips);
            }
            Step::Leases => results.held = Some(processes::leases(url, key, plan).await?),
            // All stores at once, after all else.
            Step::Compliance => {}
        }
        Ok(())
    }
}
