//! The reaper: background tasks that release what nobody waits for any more, above all acquisitions whose outcome is
//! unknown. The first try is a task of its own; what failed goes to the [backlog](super::backlog), until the store gave a
//! definite answer or the lease, or the place in a queue, must have lapsed.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::timeout;

use super::{Engine, Lease, backoff::Backoff, keep::Kept, lease::LeaseState, outstanding::BackgroundTask, seat::Seat};
use crate::{Claim, Effect, Moment, Release, Result, drift};

/// What an answer to a release is worth to the reaper, from the surest to the least sure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Certainty {
    /// The acquisition was answered, and nothing else can create a lease: `NotHeld` is final.
    Settled,
    /// The release goes the way that the acquire went, so that it arrives after it: `NotHeld` is final, as long as no call
    /// failed, and no connection was replaced, since that many [`failures`](Engine::failures) were counted. After that, the
    /// next request may go another way and be faster.
    Ordered {
        failures: u64,
        /// Whether one request for the claim may have had its effect before another: it has a place in a queue, or may have.
        again: bool,
    },
    /// A request is still on its way, perhaps in the buffer of a server that stands still, and may yet take effect:
    /// only `Released` is final.
    Doubtful,
    /// Such a request is on its way, and an earlier request for the claim had its effect, or may have. `Released` may be about the earlier
    /// one, and the other one may take effect after it. Only the lapse is final, or `NotHeld` where [leases end with the
    /// session](PendingRelease::is_over).
    Twice,
}

impl Certainty {
    /// Of a lease that was granted.
    pub(super) fn of(lease: &LeaseState, now: Moment) -> Self {
        if lease.asked_again_until.is_some_and(|until| now < until) { Self::Twice } else { Self::Settled }
    }

    /// What it comes to when the next request may be faster than an earlier one.
    fn out_of_order(self) -> Self {
        match self {
            Self::Ordered { again, .. } if again => Self::Twice,
            Self::Ordered { .. } => Self::Doubtful,
            certainty => certainty,
        }
    }
}

/// A release that the store has to be told of. If it is dropped before that, with its runtime or for want of one, it is
/// [left](super::backlog::Backlog::leave) to the next home.
pub(super) struct Owed {
    engine: BackgroundTask,
    pending: PendingRelease,
    is_settled: bool,
}

/// When a lease must have lapsed whose ttl nobody extends.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lapse {
    at: Moment,
    /// Whether nothing is left of it then; else a session may keep a part of it.
    is_end: bool,
}

/// What there is to be released.
#[derive(Clone)]
pub(super) struct PendingRelease {
    claim: Claim,
    /// `None` where leases have no ttl.
    lapse: Option<Lapse>,
    certainty: Certainty,
    /// Whether the lock is to be kept from others.
    kept: Option<Kept>,
    backoff: Backoff,
    /// Tells the acquisition that made the claim, by its end, that nothing of it is left.
    unsettled: Arc<Unsettled>,
}

/// Exists for as long as something of a claim may be left at the store.
#[derive(Debug)]
pub(super) struct Unsettled;

impl PendingRelease {
    pub(super) fn new(claim: Claim, lapse: Option<Lapse>, certainty: Certainty, kept: Option<Kept>) -> Self {
        let backoff = Backoff::new(Duration::from_millis(20), Duration::from_secs(2));
        Self { claim, lapse, certainty, kept, backoff, unsettled: Arc::new(Unsettled) }
    }

    /// Whether nothing is left of the lease one day if nobody releases it.
    fn lapses(&self) -> bool {
        self.lapse.is_some_and(|lapse| lapse.is_end)
    }

    fn has_lapsed(&self, now: Moment) -> bool {
        self.lapse.is_some_and(|lapse| lapse.is_end && now >= lapse.at)
    }

    /// Whether nothing can come to be held any more that was not held when a release was `sent`.
    ///
    /// Where leases end with the session, so does what a dead session still had under way; and within one session requests are kept in
    /// order. In a store of two halves, one with sessions and one with a ttl, that is true of the one half, and what reaches the
    /// other one late lapses. (In a quorum of both, what reaches a minority late is no lease.)
    fn is_over(&self, sent: Moment) -> bool {
        self.certainty < Certainty::Doubtful || self.lapse.is_none_or(|lapse| !lapse.is_end && sent >= lapse.at)
    }
}

impl Owed {
    pub(super) fn new(engine: &Arc<Engine>, pending: PendingRelease) -> Self {
        Self { engine: BackgroundTask::new(engine), pending, is_settled: false }
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        self.engine.engine()
    }

    /// Tries once. Returns when to try again, if that makes sense. The seat is given up, whatever the outcome.
    pub(super) async fn settle(&mut self, seat: &mut Option<Seat>) -> Option<Moment> {
        let again = self.try_once(seat).await;
        self.is_settled = again.is_none();
        again
    }

    async fn try_once(&mut self, seat: &mut Option<Seat>) -> Option<Moment> {
        let (engine, pending) = (self.engine.engine(), &mut self.pending);
        let sent = engine.now();
        let answer = engine.end_at_store(&pending.claim, pending.kept).await;
        pending.certainty = engine.still(pending.certainty);
        match answer {
            Ok(Release::Released { waiters }) => {
                engine.pass(seat.take(), &pending.claim.key, waiters, sent);
                if pending.certainty != Certainty::Twice {
                    return None;
                }
                pending.kept = None;
            }
            Ok(Release::NotHeld(_)) if pending.is_over(sent) => return None,
            Err(e) if !e.is_retryable() && e.effect() == Effect::None => {
                if pending.lapses() {
                    return None;
                }
                // Whatever is in the way may be put right, such as rights that an administrator took away. What can't be kept is released.
                pending.kept = None;
            }
            Ok(Release::NotHeld(_)) | Err(_) => {}
        }
        drop(seat.take());
        let again = engine.now() + pending.backoff.pause();
        (!pending.has_lapsed(again)).then_some(again)
    }

    /// In what time nothing is left of the lease, whatever the store answers.
    pub(super) fn lapses_in(&self, now: Moment) -> Duration {
        self.pending.lapse.filter(|lapse| lapse.is_end).map_or(Duration::MAX, |lapse| lapse.at.since(now))
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        let engine = self.engine.engine();
        if self.is_settled || self.pending.has_lapsed(engine.now()) {
            return;
        }
        let mut pending = self.pending.clone();
        // It may have been sent, and the next one may go another way.
        pending.certainty = pending.certainty.out_of_order();
        engine.backlog.leave(pending);
        engine.timers.wake();
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
    /// Whether the store may answer the request by several of its own: one that takes a place, and others.
    takes_place: bool,
    /// Whether the lock is to be kept from others.
    kept: Option<Kept>,
    unsettled: Arc<Unsettled>,
}

impl Undo<'_> {
    /// A release of a lease is about to be sent.
    pub(super) fn arm_release(&mut self, certainty: Certainty, kept: Option<Kept>) {
        (self.armed, self.kept) = (Some(certainty), kept);
    }

    /// The lease is at an end.
    pub(super) fn released(&mut self) {
        self.kept = None;
        self.armed = self.armed.filter(|certainty| *certainty == Certainty::Twice);
    }

    /// The claim is granted. Until when an earlier request for it may take effect once more, if one may.
    pub(super) fn granted(&mut self) -> Option<Moment> {
        let is_doubtful = self.armed.take() == Some(Certainty::Twice);
        self.engine.lapse_of(self.ttl).filter(|_| is_doubtful).map(|lapse| lapse.at)
    }

    /// A request is about to be sent; if it is abandoned, a release sent after it is final, unless an earlier one is in
    /// doubt.
    pub(super) fn arm(&mut self, takes_place: bool) {
        (self.before, self.takes_place) = (self.armed, takes_place);
        let ordered = Certainty::Ordered { failures: self.engine.failures(), again: self.is_asked_again() };
        self.armed = Some(if self.before >= Some(Certainty::Doubtful) { Certainty::Twice } else { ordered });
    }

    /// The request was answered: the claim has a place in a queue.
    pub(super) fn has_place(&mut self) {
        if let Some(Certainty::Ordered { .. }) = self.armed {
            self.armed = Some(Certainty::Settled);
        }
    }

    /// The request changed nothing: only what was to be undone before it still is.
    pub(super) fn unchanged(&mut self) {
        self.armed = self.before;
    }

    /// A request ended in an error and may yet take effect, beside what an earlier one left.
    pub(super) fn in_doubt(&mut self) {
        self.armed = Some(if self.is_asked_again() { Certainty::Twice } else { Certainty::Doubtful });
    }

    /// Whether the release may end what one request did, and another one of the same claim come behind it.
    fn is_asked_again(&self) -> bool {
        self.takes_place || self.before.is_some()
    }

    /// Whether an earlier request may yet take effect, or has a place in the store's queue.
    pub(super) fn is_armed(&self) -> bool {
        self.armed.is_some()
    }

    /// Releases the claim now, if there is something to be undone. What has no answer within this time goes on in the background.
    pub(super) async fn release_within(&mut self, bound: Duration) {
        let Some(certainty) = self.armed else { return };
        // If this is dropped, the next release may go another way, and be faster.
        self.armed = Some(certainty.out_of_order().max(Certainty::Doubtful));
        let Ok(answer) = timeout(bound, self.engine.end_at_store(self.claim, None)).await else { return };
        let certainty = self.engine.still(certainty);
        match answer {
            Ok(Release::Released { .. }) if certainty != Certainty::Twice => self.armed = None,
            Ok(Release::NotHeld(_)) if certainty < Certainty::Doubtful => self.armed = None,
            Ok(_) | Err(_) => {}
        }
    }

    /// Exists until the claim is settled, by its release at the latest.
    pub(super) fn unsettled(&self) -> Weak<Unsettled> {
        Arc::downgrade(&self.unsettled)
    }
}

impl Drop for Undo<'_> {
    fn drop(&mut self) {
        if let Some(certainty) = self.armed {
            let lapse = self.engine.lapse_of(self.ttl);
            let mut pending = PendingRelease::new(self.claim.clone(), lapse, certainty, self.kept);
            pending.unsettled = Arc::clone(&self.unsettled);
            self.engine.reap(pending, None);
        }
        self.engine.outstanding.end();
    }
}

impl Engine {
    /// The release of `claim` for the case that the caller's future is dropped; to be armed before a request is sent.
    pub(super) fn undo<'a>(self: &'a Arc<Self>, claim: &'a Claim, ttl: Duration) -> Undo<'a> {
        self.outstanding.begin();
        let unsettled = Arc::new(Unsettled);
        Undo { engine: self, claim, ttl, armed: None, before: None, takes_place: false, kept: None, unsettled }
    }

    /// What an answer is worth that came just now.
    fn still(&self, certainty: Certainty) -> Certainty {
        match certainty {
            Certainty::Ordered { failures, .. } if failures != self.failures() => certainty.out_of_order(),
            certainty => certainty,
        }
    }

    /// When a lease asked for up to now must have lapsed, if it has a ttl.
    pub(super) fn lapse_of(&self, ttl: Duration) -> Option<Lapse> {
        let liveness = &self.store.info().capability.liveness;
        let is_end = liveness.session.is_none();
        liveness.ttl.is_some().then(|| Lapse { at: self.now() + ttl + drift(ttl), is_end })
    }

    /// For how long something of a lease may be left: an earlier request for its claim may have left a place, or may yet.
    pub(super) fn lasts(&self, lease: &Lease) -> Duration {
        let asked_again_until = lease.state().asked_again_until;
        lease.terms.ttl.max(asked_again_until.map_or(Duration::ZERO, |until| until.since(self.now())))
    }

    /// Ends a lease in the background. The seat is given up after the first try, whatever its outcome.
    pub(super) fn reap(self: &Arc<Self>, pending: PendingRelease, mut seat: Option<Seat>) {
        let mut owed = Owed::new(self, pending);
        // A task of its own, whatever else is under way: the first try must not wait for those that fail.
        self.at_home(async move {
            if let Some(again) = owed.settle(&mut seat).await {
                owed.work_off(again).await;
            }
        });
    }

    /// Has those releases tried again whose runtime has ended before they were answered.
    pub(super) fn adopt_work(self: &Arc<Self>) {
        // Counted from before they are taken out, so that a shutdown misses none.
        let _taking = BackgroundTask::new(self);
        for mut pending in self.backlog.take_left() {
            let at = self.now() + pending.backoff.pause();
            self.at_home(Owed::new(self, pending).work_off(at));
        }
    }

    /// Refuses to leave more behind on a store where leases end with a session: only an answer ends a release there.
    pub(super) fn check_backlog(self: &Arc<Self>) -> Result<()> {
        if self.backlog.has_left() {
            // The caller may have to wait for the releases that are left, and has a runtime to send them on.
            drop(self.home());
        }
        let info = self.store.info();
        info.admit_owed(self.backlog.length()).map_err(|e| e.at("acquire", None, &info.name))
    }
}
