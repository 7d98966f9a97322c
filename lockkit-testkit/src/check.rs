//! Running cases, by themselves or as trials of a test binary.

use std::{
    any::Any,
    sync::Arc,
    time::{Duration, Instant},
};

use libtest_mimic::{Failed, Trial};
use lockkit_core::{Capability, Fencing, Resume, SystemClock};
use tokio::task::JoinSet;

use crate::{
    Backend, BoxError,
    cases::{self, Case, Ctx, Needs},
};

/// How long one case may take. A case that waits for ever has failed.
const LIMIT: Duration = Duration::from_secs(60);

/// How a case went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The store keeps the rule.
    Passed,
    /// It does not; here is what was seen.
    Failed(String),
    /// The case does not apply, and why.
    Ignored(String),
}

/// A case that was run, or left out.
#[derive(Clone, Debug)]
pub struct Checked {
    /// The case.
    pub case: &'static Case,
    /// How it went.
    pub verdict: Verdict,
    /// How long it took.
    pub took: Duration,
}

/// A store under test, and what it has to offer. Finding that out may start a server, so it is done once for all cases.
#[derive(Debug)]
pub struct Subject {
    backend: Arc<dyn Backend>,
    under: String,
    capability: Capability,
    /// In how many places the store keeps records.
    keepers: usize,
    clock: bool,
    server: bool,
}

impl Subject {
    /// Opens the store and asks what it can do.
    ///
    /// # Errors
    /// When it can't be opened.
    pub async fn new(backend: Arc<dyn Backend>) -> Result<Self, BoxError> {
        let store = backend.open().await?;
        Ok(Self {
            under: String::new(),
            capability: store.info().capability.clone(),
            keepers: store.records().len(),
            clock: backend.open_with_clock(Arc::new(SystemClock)).await?.is_some(),
            server: backend.private_server().await?.is_some(),
            backend,
        })
    }

    /// Gives the names of all locks that cases use a common beginning, by which they can be found afterwards.
    #[must_use]
    pub fn under(self, prefix: impl Into<String>) -> Self {
        Self { under: prefix.into(), ..self }
    }

    /// Why a case does not apply; `None` if it does.
    #[must_use]
    pub fn lacks(&self, case: &Case) -> Option<String> {
        let Needs { ttl, shared, permits, fifo, fences, hybrid, resume, keeps, records, clock, server } = case.needs;
        let fencing = self.capability.fencing;
        if ttl && self.capability.liveness.session.is_some() {
            Some("leases here end with the session, not by ttl".to_owned())
        } else if shared && !self.capability.shared {
            Some("no shared locks".to_owned())
        } else if permits && !self.capability.permits {
            Some("no permits".to_owned())
        } else if fifo && !self.capability.fifo {
            Some("waiters have no order".to_owned())
        } else if fences && fencing == Fencing::None {
            Some("no fences".to_owned())
        } else if hybrid && fencing != Fencing::Hybrid {
            Some(format!("fencing is {fencing:?}, not Hybrid"))
        } else if resume && self.capability.resume == Resume::None {
            Some("no grants in the place of others".to_owned())
        } else if keeps && !self.capability.keeps {
            Some("locks end with their holders".to_owned())
        } else if records && self.keepers != 1 {
            Some(if self.keepers == 0 { "no records" } else { "records are kept at each node" }.to_owned())
        } else if clock && !self.clock {
            Some("takes no clock".to_owned())
        } else if server && !self.server {
            Some("no private server to harm".to_owned())
        } else {
            None
        }
    }

    /// Runs a case on the present runtime, if it applies.
    ///
    /// # Cancellation
    /// The case ends at its next await. Locks of it may stay held until their leases end.
    pub async fn run(&self, case: &'static Case) -> Checked {
        let started = Instant::now();
        let verdict = match self.lacks(case) {
            Some(reason) => Verdict::Ignored(reason),
            None => self.judge(case).await,
        };
        Checked { case, verdict, took: started.elapsed() }
    }

    async fn judge(&self, case: &'static Case) -> Verdict {
        // A task of its own, for a case may panic; ended when nobody waits for it any more.
        let mut task = JoinSet::new();
        task.spawn((case.run)(Ctx::new(case, Arc::clone(&self.backend), &self.under)));
        match tokio::time::timeout(LIMIT, task.join_next()).await {
            Ok(Some(Ok(Ok(())))) => Verdict::Passed,
            Ok(Some(Ok(Err(error)))) => Verdict::Failed(error.to_string()),
            Ok(Some(Err(panicked))) => Verdict::Failed(panicked.try_into_panic().map_or_else(|e| e.to_string(), said)),
            Ok(None) | Err(_) => Verdict::Failed(format!("it did not end within {LIMIT:?}")),
        }
    }
}

/// One trial for every case, named `<backend>::<case>`, for `libtest_mimic::run`.
///
/// What does not apply is shown as ignored, with the reason behind the name.
///
/// # Errors
/// When the store can't be opened: a store that is required and absent is a failure, not a pass.
pub fn trials(backend: Arc<dyn Backend>) -> Result<Vec<Trial>, BoxError> {
    let name = backend.name().to_owned();
    let subject = Arc::new(runtime()?.block_on(Subject::new(backend))?);
    Ok(trials_of(&name, &subject))
}

pub(crate) fn trials_of(backend: &str, subject: &Arc<Subject>) -> Vec<Trial> {
    let mut trials = Vec::new();
    for case in cases::all() {
        let reason = subject.lacks(case);
        let mut name = format!("{backend}::{}", case.name);
        if let Some(reason) = &reason {
            name = format!("{name} ({reason})");
        }
        let subject = Arc::clone(subject);
        let trial = Trial::test(name, move || match runtime_of_its_own(case, &subject)? {
            Verdict::Passed | Verdict::Ignored(_) => Ok(()),
            Verdict::Failed(message) => Err(Failed::from(format!("{}\n{message}", case.doc))),
        });
        trials.push(trial.with_ignored_flag(reason.is_some()));
    }
    trials
}

fn runtime_of_its_own(case: &'static Case, subject: &Subject) -> Result<Verdict, BoxError> {
    let runtime = runtime()?;
    let checked = runtime.block_on(subject.run(case));
    runtime.shutdown_background();
    Ok(checked.verdict)
}

pub(crate) fn runtime() -> Result<tokio::runtime::Runtime, BoxError> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

fn said(panic: Box<dyn Any + Send>) -> String {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("panicked")
        .to_owned()
}
