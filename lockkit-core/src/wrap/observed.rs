//! A store whose every call leaves a span and a measurement.

use async_trait::async_trait;

use crate::{
    AcquireRequest, Attempt, Claim, KeyState, LockKey, LockStore, Query, Release, Renewal, Renewed, Result, StoreInfo,
    store::Records,
};

/// Observes every call to the wrapped store but those for its [`Records`]: with the feature `tracing` as a span, with the
/// feature `metrics` in the histogram `lockkit_store_seconds` with the labels `store` (its scheme), `operation` and `outcome`.
///
/// These are the calls that cross the network. What happens to locks as their users see them (waiting, holding,
/// losing) is told to an [`Observer`](crate::Observer).
///
/// | outcome | of |
/// |---|---|
/// | `granted`, `contended` | `acquire` |
/// | `renewed`, `lost` | `renew` (`lost` if any lease of the batch was) |
/// | `released`, `not_held` | `release` |
/// | `read` | `inspect` |
/// | the kind of the error | all |
#[derive(Debug)]
pub struct Observed<S> {
    inner: S,
}

impl<S: LockStore> Observed<S> {
    /// Wraps `inner`.
    pub fn new(inner: S) -> Self {
        Self { inner }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl<S: LockStore> LockStore for Observed<S> {
    fn info(&self) -> &StoreInfo {
        self.inner.info()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let call = Call::start(self.info(), "acquire", Some(&request.claim.key));
        let answer = call.within(self.inner.acquire(request)).await;
        call.end(&answer, |attempt| match attempt {
            Attempt::Granted(_) => "granted",
            Attempt::Contended(_) => "contended",
        });
        answer
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let call = Call::start(self.info(), "renew", None);
        let answers = call.within(self.inner.renew(renewals)).await;
        let lost = answers.iter().any(|answer| matches!(answer, Ok(Renewed::Lost(_))));
        let failed = answers.iter().find_map(|answer| answer.as_ref().err());
        let outcome = failed.map_or(Ok(()), |error| Err(error.clone()));
        call.end(&outcome, |()| if lost { "lost" } else { "renewed" });
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let call = Call::start(self.info(), "release", Some(&claim.key));
        let answer = call.within(self.inner.release(claim)).await;
        call.end(&answer, |release| match release {
            Release::Released { .. } => "released",
            Release::NotHeld(_) => "not_held",
        });
        answer
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        let call = Call::start(self.info(), "inspect", None);
        let answer = call.within(self.inner.inspect(query)).await;
        call.end(&answer, |_| "read");
        answer
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        self.inner.records()
    }
}

/// One call under observation.
struct Call {
    #[cfg(feature = "metrics")]
    started: (std::time::Instant, &'static str, &'static str),
    #[cfg(feature = "tracing")]
    span: tracing::Span,
}

impl Call {
    #[cfg_attr(not(feature = "tracing"), allow(unused_variables, reason = "the key goes into the span only"))]
    fn start(info: &StoreInfo, operation: &'static str, key: Option<&LockKey>) -> Self {
        Self {
            #[cfg(feature = "metrics")]
            started: (std::time::Instant::now(), info.scheme, operation),
            #[cfg(feature = "tracing")]
            span: tracing::info_span!(
                "lockkit",
                operation,
                store = &*info.name,
                key = key.map(LockKey::as_str),
                outcome = tracing::field::Empty
            ),
        }
    }

    async fn within<F: Future>(&self, call: F) -> F::Output {
        #[cfg(feature = "tracing")]
        let call = tracing::Instrument::instrument(call, self.span.clone());
        call.await
    }

    #[cfg_attr(
        not(any(feature = "metrics", feature = "tracing")),
        allow(unused_variables, reason = "nobody wants to know")
    )]
    fn end<T>(self, answer: &Result<T>, name: impl FnOnce(&T) -> &'static str) {
        #[cfg(any(feature = "metrics", feature = "tracing"))]
        let outcome = answer.as_ref().map_or_else(|error| error.kind().to_string(), |value| name(value).to_owned());
        #[cfg(feature = "tracing")]
        {
            self.span.record("outcome", &*outcome);
            if let Err(error) = answer {
                self.span.in_scope(|| tracing::warn!(%error));
            }
        }
        #[cfg(feature = "metrics")]
        {
            let (started, store, operation) = self.started;
            let labels = [("store", store.to_owned()), ("operation", operation.to_owned()), ("outcome", outcome)];
            metrics::histogram!("lockkit_store_seconds", &labels).record(started.elapsed().as_secs_f64());
        }
    }
}
