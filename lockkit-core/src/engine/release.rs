//! How a hold ends: the lease goes to the next in the local queue, or back to the store.

use std::{
    sync::{Arc, MutexGuard},
    time::Duration,
};

use super::{
    Engine, Lease, LeaseStatus,
    hand_over::{Handed, Turn},
    keep::Kept,
    lease::{LeaseState, useful},
    outstanding::BackgroundTask,
    queue::Waiter,
    reaper::{Certainty, Owed, PendingRelease},
    seat::Seat,
};
use crate::{Event, LockKey, LossReason, Moment, Release, Result, Waiting};

/// How long a process that had its run keeps back while others wait, if its release took `round_trip`. They are woken by
/// the release and need about two round trips to get the lock. These take longer where the network or the machine is busy;
/// but a release that was held up for other reasons must not hold up this process for as long.
fn courtesy(round_trip: Duration) -> Duration {
    (2 * round_trip).clamp(Duration::from_millis(1), Duration::from_millis(50))
}

/// How a hold ended locally, and what the store still has to be told.
enum Ending {
    /// The lease went to the next local waiter, or was never the caller's to end.
    Done,
    /// It had been lost before.
    Lost(LossReason),
    /// It was one of several nested holds.
    Nested,
    /// The store has to be told, and may have to keep the lock from others.
    Store(Option<Seat>, Option<Kept>),
}

impl Engine {
    /// Ends a hold and reports how it stood.
    pub(crate) async fn release(self: &Arc<Self>, lease: &Arc<Lease>) -> Result<Option<LossReason>> {
        match self.end(lease, lease.state()) {
            Ending::Done => Ok(None),
            Ending::Lost(reason) => Ok(Some(reason)),
            Ending::Nested => self.renew_now(lease).await,
            Ending::Store(seat, kept) => self.release_at_store(lease, seat, kept).await,
        }
    }

    /// Ends a hold without waiting: what the store has to be told is told in the background.
    pub(crate) fn let_go(self: &Arc<Self>, lease: &Arc<Lease>) {
        let ending = self.end(lease, lease.state());
        self.tell(lease, ending);
    }

    /// Takes back a nested hold that was not granted.
    pub(crate) fn give_up_nesting(self: &Arc<Self>, lease: &Arc<Lease>) {
        let mut state = lease.state();
        state.nesting -= 1;
        state.depth = state.depth.saturating_sub(1);
        if state.is_live() {
            drop(state);
            self.tell(lease, Ending::Nested);
        }
    }

    /// Tells the store of an ending in the background.
    fn tell(self: &Arc<Self>, lease: &Arc<Lease>, ending: Ending) {
        match ending {
            Ending::Done | Ending::Lost(_) => {}
            Ending::Nested => {
                let (counted, engine, lease) = (BackgroundTask::new(self), Arc::clone(self), Arc::clone(lease));
                self.at_home(async move {
                    drop(engine.renew_now(&lease).await);
                    drop(counted);
                });
            }
            Ending::Store(seat, kept) => {
                let (lapse, certainty) = (self.lapse_of(self.lasts(lease)), Certainty::of(&lease.state(), self.now()));
                self.reap(PendingRelease::new(lease.claim.clone(), lapse, certainty, kept), seat);
            }
        }
    }

    /// Ends a hold in this process. From here on nobody believes in it, whatever becomes of the store's lease.
    fn end(self: &Arc<Self>, lease: &Arc<Lease>, mut state: MutexGuard<'_, LeaseState>) -> Ending {
        let now = self.now();
        let taken = state.is_taken();
        // A lease that was taken back on its way ends once more when its way does.
        if let Some(reason) = state.look(now) {
            state.depth = state.depth.saturating_sub(1);
            drop(state);
            self.after_loss(lease, reason);
            return Ending::Lost(reason);
        }
        match state.status() {
            LeaseStatus::Lost(reason) => {
                // Counted down also now: an owner starts afresh when the last hold of a lost lease is gone.
                state.depth = state.depth.saturating_sub(1);
                return Ending::Lost(reason);
            }
            LeaseStatus::Released => return Ending::Done,
            LeaseStatus::Held | LeaseStatus::Suspect => {}
        }
        if state.holds() > 1 {
            state.depth -= 1;
            return Ending::Nested;
        }
        if self.may_hand_over(lease, &state, now)
            && let Some((waiter, counted)) = self.successor(lease, now)
        {
            let seat = state.seat.take();
            let next = Arc::new(lease.succeed(self.queues.number(), waiter.terms, now, seat, &state));
            state.release();
            // For its deadline only: it is renewed once its holder has taken it. An alarm finds the one lease or the other.
            self.register(&next, now);
            self.timers.remove(lease, &state);
            // While the former lease is locked: an answer of the store about it that comes later concerns the next one, and must find that.
            if let Some(seat) = &next.state().seat {
                self.queues.at(seat, |queue, now| queue.handed(Arc::downgrade(&next), now));
            }
            drop(state);
            self.note_released(lease, taken, now);
            // A waiter that left in this instant drops the turn, and with it the lease goes on to the next.
            drop(waiter.wake.send(Turn::Take(Handed::new(next, counted))));
            return Ending::Done;
        }
        let kept = Kept::of(&state);
        Ending::Store(self.end_here(lease, state, now), kept)
    }

    /// Ends the last hold of a lease in this process, and leaves what the store has. Gives the place in the local queue.
    pub(super) fn end_here(&self, lease: &Lease, mut state: MutexGuard<'_, LeaseState>, now: Moment) -> Option<Seat> {
        let taken = state.is_taken();
        state.release();
        self.timers.remove(lease, &state);
        let seat = state.seat.take();
        drop(state);
        if let Some(seat) = &seat {
            self.queues.at(seat, |queue, now| queue.ended(now, now));
        }
        self.note_released(lease, taken, now);
        seat
    }

    fn note_released(&self, lease: &Lease, taken: bool, now: Moment) {
        lease.announce_end();
        if taken {
            self.observe(|| Event::Released { key: &lease.claim.key, held: now.since(lease.since) });
        }
    }

    /// Takes over a lease that was handed over; `false` if too little is left of it, or it was taken back. It is renewed
    /// from here on.
    pub(super) fn take(self: &Arc<Self>, lease: &Arc<Lease>) -> bool {
        self.look(lease);
        let now = self.now();
        let mut state = lease.state();
        if !state.is_live() {
            return false;
        }
        if state.deadline().since(now) < useful(lease.ttl) {
            let ending = self.end(lease, state);
            self.tell(lease, ending);
            return false;
        }
        lease.take(&mut state, now);
        if let Some(seat) = &state.seat {
            self.queues.at(seat, |queue, _| queue.holds(Arc::downgrade(lease)));
        }
        drop(state);
        self.register(lease, now);
        true
    }

    /// Takes a lease back that was handed over to somebody who has not taken it.
    pub(super) fn take_back(self: &Arc<Self>, lease: &Arc<Lease>) {
        let state = lease.state();
        if !state.is_taken() {
            let ending = self.end(lease, state);
            self.tell(lease, ending);
        }
    }

    fn may_hand_over(&self, lease: &Lease, state: &LeaseState, now: Moment) -> bool {
        lease.spare_fences > 0
            && lease.terms.hands_over
            && !state.token_is_known
            && state.kept_until().is_none()
            && state.seat.is_some()
            && state.is_sure()
            && state.deadline().since(now) >= useful(lease.ttl)
    }

    /// The next waiter, if this process may keep the lease for one more holder, and what a shutdown waits for until that one has it. No lease is
    /// handed over after a shutdown.
    fn successor(self: &Arc<Self>, lease: &Lease, now: Moment) -> Option<(Waiter, BackgroundTask)> {
        let (rule, counted) = (self.settings.hand_over, BackgroundTask::new(self));
        self.check_open().ok()?;
        let waiter = self.queues.look(&lease.claim.key, |queue| queue.successor(lease.terms, rule, now)).flatten()?;
        Some((waiter, counted))
    }

    async fn release_at_store(
        self: &Arc<Self>,
        lease: &Lease,
        seat: Option<Seat>,
        kept: Option<Kept>,
    ) -> Result<Option<LossReason>> {
        let mut undo = self.undo(&lease.claim, self.lasts(lease));
        let sent = self.now();
        undo.arm_release(Certainty::of(&lease.state(), sent), kept);
        let answer = self.end_at_store(&lease.claim, kept).await?;
        undo.released();
        Ok(match answer {
            Release::Released { waiters } => {
                self.pass(seat, &lease.claim.key, waiters, sent);
                None
            }
            Release::NotHeld(reason) => Some(reason),
        })
    }

    /// Lets the next local waiter ask the store, after others if they wait and this process had its run. If nobody waits
    /// here, whichever comes next lets the others go first. Where the store keeps a queue they do anyway. `sent` is when the
    /// release was.
    pub(super) fn pass(&self, seat: Option<Seat>, key: &LockKey, waiters: Option<u32>, sent: Moment) {
        let Some(seat) = seat else { return };
        let now = self.now();
        let held = seat.granted.map(|granted| now.since(granted)).unwrap_or_default();
        let ended = self.queues.run_ended(key, self.settings.hand_over, now, held);
        let others_wait = match (self.store.info().capability.waiting, waiters) {
            // It serves them in order, or they are not waiting to be woken.
            (Waiting::Queue, _) | (Waiting::Poll, None) => false,
            (_, Some(waiters)) => waiters > 0,
            (Waiting::Notify, None) => true,
        };
        if !others_wait {
            return;
        }
        let courtesy = courtesy(now.since(sent));
        if self.queues.look(key, |queue| queue.waiting()).is_some_and(|waiting| waiting > 0) {
            if ended {
                self.queues.released_to_others(key, None, now, courtesy);
            }
        } else if waiters.is_some() {
            self.queues.released_to_others(key, Some(seat.granted.unwrap_or(now)), now, courtesy);
        }
    }
    /// What has to be done once when a lease is found to be lost.
    pub(super) fn after_loss(self: &Arc<Self>, lease: &Arc<Lease>, reason: LossReason) {
        let (seat, taken, kept, deadline) = {
            let mut state = lease.state();
            self.timers.remove(lease, &state);
            (state.seat.take(), state.is_taken(), Kept::of(&state), state.deadline())
        };
        if let Some(seat) = &seat {
            // It may have lapsed long ago.
            self.queues.at(seat, |queue, now| queue.ended(deadline.min(now), now));
        }
        lease.announce_end();
        if taken {
            self.observe(|| Event::Lost { key: &lease.claim.key, reason, held: self.now().since(lease.since) });
        }
        let granted = Certainty::of(&lease.state(), self.now());
        let certainty = match reason {
            // The store may still keep the lease: a renewal may have come through whose reply did not.
            LossReason::Expired | LossReason::Unreachable | LossReason::MaxHold => granted.max(Certainty::Doubtful),
            // The store has said so; but one of several parts may keep what is left of it until the holder has heard of the loss.
            LossReason::Gone | LossReason::Taken | LossReason::SessionEnded | LossReason::Revoked => granted,
        };
        let lapse = self.lapse_of(self.lasts(lease));
        let owed = Owed::new(self, PendingRelease::new(lease.claim.clone(), lapse, certainty, kept));
        // In its turn, for thousands may be lost at once: their releases must not be in the way of the renewals that save the others.
        self.at_home(owed.work_off(self.now()));
        // Not with the release, which may have to wait: whoever is next asks the store, and waits there.
        drop(seat);
    }
}
