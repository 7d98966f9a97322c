//! The reaper: background tasks that release what nobody waits for any more, above all acquisitions whose outcome is
//! unknown. Each works until the store gave a definite answer or the lease must have lapsed.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{runtime::Handle, sync::Notify};

use super::{Engine, backoff::Backoff, local::Seat};
use crate::{Claim, Effect, Liveness, Moment, Release, drift};

/// What a `NotHeld` is worth to the reaper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Certainty {
    /// The acquisition was answered, and nothing else can create a lease: `NotHeld` is final.
    Settled,
    /// The release goes the way that the acquire went, so that it arrives after it: `NotHeld` is final, as long as no
    /// release failed. After that, the next one may go another way and be faster.
    Ordered,
    /// A request is still on its way, perhaps in the buffer of a server that stands still, and may yet take effect:
    /// only `Released` is final.
    Doubtful,
}

/// Counts what a shutdown waits for: background releases, and claims of which one may become necessary.
#[derive(Debug, Default)]
pub(super) struct Outstanding {
    count: AtomicUsize,
    done: Notify,
}

impl Outstanding {
    fn begin(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
    }

    fn end(&self) {
        if self.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.done.notify_waiters();
        }
    }

    pub(super) fn count(&self) -> usize {
        self.count.load(Ordering::Acquire)
    }

    /// Returns when none is under way.
    pub(super) async fn drained(&self) {
        loop {
            let done = self.done.notified();
            if self.count() == 0 {
                return;
            }
            done.await;
        }
    }
}

/// One background task, counted from its creation to its end, also if its runtime drops it.
struct Counted(Arc<Engine>);

impl Counted {
    fn new(engine: &Arc<Engine>) -> Self {
        engine.outstanding.begin();
        Self(Arc::clone(engine))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.outstanding.end();
    }
}

/// Releases a claim in the background if it is dropped while armed.
pub(super) struct Undo<'a> {
    engine: &'a Arc<Engine>,
    claim: &'a Claim,
    ttl: Duration,
    armed: Option<Certainty>,
    /// What earlier requests left to be undone: a place in a queue, or a lease that may yet be granted.
    before: Option<Certainty>,
}

impl Undo<'_> {
    /// The outcome is known: nothing is left to do.
    pub(super) fn disarm(&mut self) {
        self.armed = None;
    }

    /// A request is about to be sent; if it is abandoned, a release sent after it is final, unless an earlier one is in
    /// doubt.
    pub(super) fn arm(&mut self) {
        self.before = self.armed;
        self.armed.get_or_insert(Certainty::Ordered);
    }

    /// The request changed nothing: only what was to be undone before it still is.
    pub(super) fn unchanged(&mut self) {
        self.armed = self.before;
    }

    /// A request ended in an error and may yet take effect.
    pub(super) fn in_doubt(&mut self) {
        self.armed = Some(Certainty::Doubtful);
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if let Some(certainty) = self.armed {
            self.engine.reap(self.claim.clone(), self.engine.lapse_of(self.ttl), certainty, None);
        }
        self.engine.outstanding.end();
    }
}

impl Engine {
    /// The release of `claim` for the case that the caller's future is dropped; to be armed before a request is sent.
    pub(super) fn undo<'a>(self: &'a Arc<Self>, claim: &'a Claim, ttl: Duration) -> Undo<'a> {
        self.outstanding.begin();
        Undo { engine: self, claim, ttl, armed: None, before: None }
    }

    /// When a lease asked for up to now must have lapsed, if time ends leases on this store at all.
    pub(super) fn lapse_of(&self, ttl: Duration) -> Option<Moment> {
        match self.store.info().capability.liveness {
            Liveness::Ttl { .. } => Some(self.now() + ttl + drift(ttl)),
            Liveness::Session => None,
        }
    }

    /// Releases `claim` in the background. The seat is given up after the first try, whatever its outcome.
    pub(super) fn reap(
        self: &Arc<Self>,
        claim: Claim,
        lapse: Option<Moment>,
        certainty: Certainty,
        seat: Option<Seat>,
    ) {
        let engine = Arc::clone(self);
        self.spawn(async move {
            let (mut seat, mut certainty) = (seat, certainty);
            let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(2));
            loop {
                match engine.store.release(&claim).await {
                    Ok(Release::Released { waiters }) => return engine.pass(seat.take(), &claim.key, waiters),
                    // Where leases end with the session, so does what a dead session still had under way; and within
                    // one session requests are kept in order.
                    Ok(Release::NotHeld(_)) if certainty != Certainty::Doubtful || lapse.is_none() => return,
                    Err(e) if !e.is_retryable() && e.effect() == Effect::None => return,
                    Err(_) if certainty == Certainty::Ordered => certainty = Certainty::Doubtful,
                    Ok(Release::NotHeld(_)) | Err(_) => {}
                }
                drop(seat.take());
                let pause = backoff.pause();
                if lapse.is_some_and(|lapse| engine.now() + pause >= lapse) {
                    return;
                }
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Runs a task in the background. Without a runtime it is dropped, and the leases that it was for lapse.
    pub(super) fn spawn(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        let Some(runtime) = Handle::try_current().ok().or_else(|| self.timers.runtime()) else { return };
        let counted = Counted::new(self);
        runtime.spawn(async move {
            task.await;
            drop(counted);
        });
    }
}
