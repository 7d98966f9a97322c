//! Running cases: one at a time, as trials of a test binary, or all against one store with a report.

use std::{any::Any, sync::Arc, time::Duration};

use libtest_mimic::{Failed, Trial};
use lockkit_core::{Capability, Fencing, Liveness, SystemClock};

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

/// How all cases went.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Each case and its verdict, in the order of the suite.
    pub verdicts: Vec<(&'static Case, Verdict)>,
}

impl Report {
    /// How many cases passed.
    #[must_use]
    pub fn passed(&self) -> usize {
        self.verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Passed).count()
    }

    /// The cases that failed, and what was seen.
    pub fn failed(&self) -> impl Iterator<Item = (&'static Case, &str)> {
        self.verdicts.iter().filter_map(|(case, verdict)| match verdict {
            Verdict::Failed(message) => Some((*case, message.as_str())),
            Verdict::Passed | Verdict::Ignored(_) => None,
        })
    }

    /// The cases that do not apply, and why.
    pub fn ignored(&self) -> impl Iterator<Item = (&'static Case, &str)> {
        self.verdicts.iter().filter_map(|(case, verdict)| match verdict {
            Verdict::Ignored(reason) => Some((*case, reason.as_str())),
            Verdict::Passed | Verdict::Failed(_) => None,
        })
    }
}

/// Runs every case against a store, one after the other; `progress` is told of each.
pub async fn check(backend: Arc<dyn Backend>, mut progress: impl FnMut(&Case, &Verdict) + Send) -> Report {
    let mut report = Report::default();
    let offer = Offer::of(&backend).await;
    for case in cases::all() {
        let verdict = match &offer {
            Ok(offer) => judge(case, offer, Arc::clone(&backend)).await,
            Err(error) => Verdict::Failed(format!("the store under test can't be opened: {error}")),
        };
        progress(case, &verdict);
        report.verdicts.push((case, verdict));
    }
    report
}

/// Runs one case on the present runtime.
pub async fn run_case(case: &'static Case, backend: Arc<dyn Backend>) -> Verdict {
    match Offer::of(&backend).await {
        Ok(offer) => judge(case, &offer, backend).await,
        Err(error) => Verdict::Failed(format!("the store under test can't be opened: {error}")),
    }
}

async fn judge(case: &'static Case, offer: &Offer, backend: Arc<dyn Backend>) -> Verdict {
    if let Some(reason) = offer.lacks(&case.needs) {
        return Verdict::Ignored(reason);
    }
    let task = tokio::spawn((case.run)(Ctx::new(case, backend)));
    let abort = task.abort_handle();
    match tokio::time::timeout(LIMIT, task).await {
        Ok(Ok(Ok(()))) => Verdict::Passed,
        Ok(Ok(Err(error))) => Verdict::Failed(error.to_string()),
        Ok(Err(panicked)) => Verdict::Failed(panicked.try_into_panic().map_or_else(|e| e.to_string(), said)),
        Err(_) => {
            abort.abort();
            Verdict::Failed(format!("it did not end within {LIMIT:?}"))
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
    let runtime = runtime()?;
    let offer = Arc::new(runtime.block_on(Offer::of(&backend))?);
    let mut trials = Vec::new();
    for case in cases::all() {
        let reason = offer.lacks(&case.needs);
        let mut name = format!("{}::{}", backend.name(), case.name);
        if let Some(reason) = &reason {
            name = format!("{name} ({reason})");
        }
        let (backend, offer) = (Arc::clone(&backend), Arc::clone(&offer));
        let trial = Trial::test(name, move || match runtime_of_its_own(case, &offer, backend)? {
            Verdict::Passed | Verdict::Ignored(_) => Ok(()),
            Verdict::Failed(message) => Err(Failed::from(format!("{}\n{message}", case.doc))),
        });
        trials.push(trial.with_ignored_flag(reason.is_some()));
    }
    Ok(trials)
}

fn runtime_of_its_own(case: &'static Case, offer: &Offer, backend: Arc<dyn Backend>) -> Result<Verdict, BoxError> {
    let runtime = runtime()?;
    let verdict = runtime.block_on(judge(case, offer, backend));
    runtime.shutdown_background();
    Ok(verdict)
}

fn runtime() -> Result<tokio::runtime::Runtime, BoxError> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// What a store under test has to offer. Finding out may start a server, so it is done once for all cases.
struct Offer {
    capability: Capability,
    clock: bool,
    server: bool,
}

impl Offer {
    async fn of(backend: &Arc<dyn Backend>) -> Result<Self, BoxError> {
        Ok(Self {
            capability: backend.open().await?.info().capability.clone(),
            clock: backend.open_with_clock(Arc::new(SystemClock)).await?.is_some(),
            server: backend.private_server().await?.is_some(),
        })
    }

    /// Why a case does not apply; `None` if it does.
    fn lacks(&self, needs: &Needs) -> Option<String> {
        let Needs { ttl, shared, permits, fences, hybrid, clock, server } = *needs;
        let Capability { fencing, liveness, .. } = self.capability;
        if ttl && !matches!(liveness, Liveness::Ttl { .. }) {
            Some("leases here end with the session, not by ttl".to_owned())
        } else if shared && !self.capability.shared {
            Some("no shared locks".to_owned())
        } else if permits && !self.capability.permits {
            Some("no permits".to_owned())
        } else if fences && fencing == Fencing::None {
            Some("no fences".to_owned())
        } else if hybrid && fencing != Fencing::Hybrid {
            Some(format!("fencing is {fencing:?}, not Hybrid"))
        } else if clock && !self.clock {
            Some("takes no clock".to_owned())
        } else if server && !self.server {
            Some("no private server to harm".to_owned())
        } else {
            None
        }
    }
}

fn said(panic: Box<dyn Any + Send>) -> String {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("panicked")
        .to_owned()
}
