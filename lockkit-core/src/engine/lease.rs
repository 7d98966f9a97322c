//! The state of one lease, as this process believes it: `Held -> Suspect -> Lost | Released`.
//!
//! All decisions take the present moment as an argument and do no I/O. `Lost` and `Released` are final: whatever a
//! late reply says, a lease that ended stays ended.

use std::{
    sync::{Mutex, MutexGuard, OnceLock},
    time::Duration,
};

use tokio::{runtime::Handle, sync::Notify};

use super::{ask::Terms, seat::Seat};
use crate::{Claim, Fence, Hold, LossReason, Moment, Token, store::unpoisoned};

/// A lease and what is believed of it.
#[derive(Debug)]
pub(crate) struct Lease {
    /// Tells leases with the same next event apart.
    pub(crate) id: u64,
    pub(crate) claim: Claim,
    pub(crate) terms: Terms,
    /// How long the lease lasts without renewal: the ttl asked for, or what the session gives.
    pub(crate) ttl: Duration,
    /// The fence of this holder.
    pub(crate) fence: Fence,
    /// How many fences of the grant are left to hand out after this one.
    pub(crate) spare_fences: u32,
    /// When this holder got the lease.
    pub(crate) since: Moment,
    /// Where it was granted, or given: it can be looked after there if the timer task has to move.
    given_on: Option<Handle>,
    /// Where its holder took it, if another gave it.
    taken_on: OnceLock<Handle>,
    state: Mutex<LeaseState>,
    ended: Notify,
}

/// What must be left of a lease for it to be worth having: a quarter of its ttl, and at least 20 ms.
pub(super) fn useful(ttl: Duration) -> Duration {
    (ttl / 4).max(Duration::from_millis(20))
}

/// How long one renewal may take: a sixth of the ttl, so that two more fit before the deadline, and at most 3 s.
pub(super) fn renewal_timeout(ttl: Duration) -> Duration {
    (ttl / 6).min(Duration::from_secs(3))
}

#[derive(Debug)]
pub(crate) struct LeaseState {
    status: LeaseStatus,
    /// When belief ends if nothing is heard.
    deadline: Moment,
    /// When this holder's time is up, however often the lease is renewed.
    hold_limit: Option<Moment>,
    /// Whether its holder has it. One that is on its way to a holder, who may never be polled again, is not renewed.
    taken: bool,
    /// Since when its holder has it.
    held_since: Moment,
    /// For how long since then the lock is to be kept from others.
    keep_for: Option<Duration>,
    /// Failed renewals in a row.
    failures: u32,
    /// When the lease is next looked at; its place in the timer queue.
    pub(crate) next_event: Moment,
    /// Nested holds, as the store is told.
    pub(crate) depth: u32,
    /// How many of them are not granted yet: they keep no lease, for nobody may be there to end them.
    pub(crate) nesting: u32,
    /// The place at the head of the local queue, if the lock has one.
    pub(crate) seat: Option<Seat>,
    /// Whether somebody was told the token. It is to stand for this holder then, and for no later one.
    pub(crate) token_is_known: bool,
    /// Until when an earlier request for the lease may take effect once more.
    pub(super) asked_again_until: Option<Moment>,
    /// The request by which the holder asked the former one to yield, and which may still be there.
    pub(crate) request: Option<Token>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseStatus {
    Held,
    Suspect,
    Lost(LossReason),
    Released,
}

impl Lease {
    pub(crate) fn new(id: u64, hold: Hold, terms: Terms, ttl: Duration, since: Moment, seat: Option<Seat>) -> Self {
        Self {
            id,
            claim: hold.claim,
            terms,
            ttl,
            fence: hold.fence,
            spare_fences: hold.span.saturating_sub(1),
            since,
            given_on: Handle::try_current().ok(),
            taken_on: OnceLock::new(),
            state: Mutex::new(LeaseState {
                hold_limit: terms.max_hold.map(|limit| since + limit),
                taken: true,
                ..LeaseState::new(hold.until, &terms, since, seat)
            }),
            ended: Notify::new(),
        }
    }

    /// The same lease on its way to the next holder, with the next fence. The caller ends this one.
    pub(crate) fn succeed(&self, id: u64, terms: Terms, now: Moment, seat: Option<Seat>, state: &LeaseState) -> Self {
        Self {
            id,
            claim: self.claim.clone(),
            terms,
            ttl: self.ttl,
            fence: if self.fence == Fence::NONE { Fence::NONE } else { self.fence.offset(1) },
            spare_fences: self.spare_fences - 1,
            since: now,
            given_on: Handle::try_current().ok(),
            taken_on: OnceLock::new(),
            state: Mutex::new(LeaseState {
                next_event: state.next_event,
                asked_again_until: state.asked_again_until,
                ..LeaseState::new(state.deadline, &terms, now, seat)
            }),
            ended: Notify::new(),
        }
    }

    /// Where it can be looked after, the holder's own runtime first.
    pub(crate) fn runtimes(&self) -> impl Iterator<Item = &Handle> {
        self.taken_on.get().into_iter().chain(&self.given_on)
    }

    /// The holder has it, from now on, and on this runtime.
    pub(crate) fn take(&self, state: &mut LeaseState, now: Moment) {
        if let Ok(here) = Handle::try_current() {
            self.taken_on.get_or_init(|| here);
        }
        (state.taken, state.held_since) = (true, now);
        state.hold_limit = self.terms.max_hold.map(|limit| now + limit);
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, LeaseState> {
        unpoisoned(&self.state)
    }

    /// Wakes everyone who waits for the end of this lease.
    pub(crate) fn announce_end(&self) {
        self.ended.notify_waiters();
    }

    /// Is notified when the lease ends. Must be created before the state is read.
    pub(crate) fn end(&self) -> tokio::sync::futures::Notified<'_> {
        self.ended.notified()
    }
}

impl LeaseState {
    /// Of a lease that its holder does not have yet.
    fn new(deadline: Moment, terms: &Terms, now: Moment, seat: Option<Seat>) -> Self {
        Self {
            status: LeaseStatus::Held,
            deadline,
            hold_limit: None,
            taken: false,
            held_since: now,
            keep_for: terms.keep_for,
            failures: 0,
            next_event: now,
            depth: 1,
            nesting: 0,
            seat,
            token_is_known: false,
            asked_again_until: None,
            request: None,
        }
    }

    pub(crate) fn status(&self) -> LeaseStatus {
        self.status
    }

    /// When belief ends: the lease's deadline or the holder's limit, whichever is first.
    pub(crate) fn deadline(&self) -> Moment {
        self.hold_limit.map_or(self.deadline, |limit| limit.min(self.deadline))
    }

    /// When work under the lease is to stop, and why: `margin` before the lease can end, or at the holder's limit.
    pub(crate) fn last_call(&self, margin: Duration) -> (Moment, LossReason) {
        let end = self.deadline - margin;
        match self.hold_limit {
            Some(limit) if limit <= end => (limit, LossReason::MaxHold),
            _ if self.status == LeaseStatus::Suspect => (end, LossReason::Unreachable),
            _ => (end, LossReason::Expired),
        }
    }

    /// What is believed at `now`. Finding the deadline passed is how a process that was frozen learns of it.
    ///
    /// Returns the reason if the lease was lost by this very look.
    pub(crate) fn look(&mut self, now: Moment) -> Option<LossReason> {
        if !self.is_live() || now < self.deadline() {
            return None;
        }
        let reason = match self.status {
            _ if self.hold_limit.is_some_and(|limit| limit <= self.deadline) => LossReason::MaxHold,
            LeaseStatus::Suspect => LossReason::Unreachable,
            _ => LossReason::Expired,
        };
        self.status = LeaseStatus::Lost(reason);
        Some(reason)
    }

    /// Whether it is held, surely or not.
    pub(crate) fn is_live(&self) -> bool {
        matches!(self.status, LeaseStatus::Held | LeaseStatus::Suspect)
    }

    /// Whether it is held and the last renewal went well.
    pub(crate) fn is_sure(&self) -> bool {
        self.status == LeaseStatus::Held
    }

    /// Whether its holder has it.
    pub(crate) fn is_taken(&self) -> bool {
        self.taken
    }

    /// Until when the lock is to be kept from others at the end of this hold.
    pub(crate) fn kept_until(&self) -> Option<Moment> {
        self.keep_for.filter(|_| self.taken).map(|keep_for| self.held_since + keep_for)
    }

    /// From now on the lock is to be kept for so long since its holder got it; `false` if it is not held any more.
    pub(crate) fn keep_for(&mut self, at_least: Duration) -> bool {
        let is_live = self.is_live();
        if is_live {
            self.keep_for = Some(at_least).filter(|at_least| !at_least.is_zero());
        }
        is_live
    }

    /// How many holds there are that somebody has.
    pub(crate) fn holds(&self) -> u32 {
        self.depth.saturating_sub(self.nesting)
    }

    /// Counts a nested hold that is asked for; `false` if there are too many.
    pub(crate) fn begin_nesting(&mut self) -> bool {
        let Some(depth) = self.depth.checked_add(1) else { return false };
        (self.depth, self.nesting) = (depth, self.nesting + 1);
        true
    }

    /// Ends the holder's belief. Returns what was believed until now.
    pub(crate) fn release(&mut self) -> LeaseStatus {
        std::mem::replace(&mut self.status, LeaseStatus::Released)
    }

    /// Records that the lease is lost, unless it had ended already.
    pub(crate) fn lose(&mut self, reason: LossReason) -> bool {
        let live = self.is_live();
        if live {
            self.status = LeaseStatus::Lost(reason);
        }
        live
    }

    /// Records a successful renewal. A reply that comes after the deadline changes nothing: by then the guard has
    /// been told, or will be at its next use, that the lease is lost.
    pub(crate) fn extend(&mut self, deadline: Moment, now: Moment) {
        if !self.is_live() || !self.taken || now >= self.deadline() {
            return;
        }
        self.status = LeaseStatus::Held;
        self.failures = 0;
        self.deadline = self.deadline.max(deadline);
    }

    /// Records a failed renewal; returns when to try again: soon at first, then less often, at most a tenth of the
    /// ttl apart.
    pub(crate) fn doubt(&mut self, ttl: Duration, now: Moment) -> Option<Moment> {
        if !self.is_live() {
            return None;
        }
        self.status = LeaseStatus::Suspect;
        let longest = (ttl / 10).max(Duration::from_millis(5));
        let pause = Duration::from_millis(100).saturating_mul(1 << self.failures.min(10)).min(longest);
        self.failures += 1;
        Some((now + pause).min(self.deadline()))
    }

    /// When a lease just granted or renewed is next looked at: after a third of what is left of it, up to 10 %
    /// sooner or later so that leases taken together drift apart, or at its end if it is not renewed.
    pub(crate) fn schedule(&self, renew: bool, ttl: Duration, now: Moment, jitter: u32) -> Moment {
        if !renew || !self.taken {
            return self.deadline();
        }
        let third = self.deadline.since(now) / 3;
        let pause = third * 9 / 10 + third / 5 * (jitter % 1024) / 1024;
        on_grid(now + pause, ttl).max(now).min(self.deadline())
    }
}

/// The next earlier point of a grid that leases of a like ttl share, so that one request renews many of them.
///
/// The mesh is a power of two below ttl/256: coarse grids are subsets of finer ones.
fn on_grid(moment: Moment, ttl: Duration) -> Moment {
    let mesh = (ttl / 256).as_nanos().max(1).ilog2();
    Moment::from_nanos(moment.as_nanos() >> mesh << mesh)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LockKey, Mode};

    const TTL: Duration = Duration::from_secs(10);

    fn terms() -> Terms {
        Terms { ttl: TTL, renew: true, max_hold: None, fence_above: Fence::NONE, keep_for: None, hands_over: true }
    }

    fn start() -> Moment {
        Moment::from_nanos(1_000_000_000_000)
    }

    fn lease(terms: Terms) -> Lease {
        let claim = Claim {
            key: LockKey::new("x").expect("name"),
            token: Token::random().expect("random"),
            mode: Mode::Exclusive,
        };
        let hold = Hold { claim, fence: Fence::new(7), span: 4, until: start() + terms.ttl, depth: 1 };
        Lease::new(1, hold, terms, terms.ttl, start(), None)
    }

    #[test]
    fn belief_ends_at_the_deadline() {
        let lease = lease(terms());
        let mut state = lease.state();
        assert_eq!(state.deadline(), start() + TTL);
        assert_eq!(state.look(start() + TTL - Duration::from_nanos(1)), None);
        assert_eq!(state.look(start() + TTL), Some(LossReason::Expired));
    }

    #[test]
    fn lost_is_final() {
        let lease = lease(terms());
        let mut state = lease.state();
        assert!(state.lose(LossReason::Taken));
        state.extend(start() + TTL * 2, start() + Duration::from_secs(1));
        assert_eq!(state.status(), LeaseStatus::Lost(LossReason::Taken));
        assert!(!state.lose(LossReason::Gone));
        assert!(!state.is_live());
    }

    #[test]
    fn a_reply_after_the_deadline_comes_too_late() {
        let lease = lease(terms());
        let mut state = lease.state();
        state.extend(start() + TTL * 3, start() + TTL);
        assert_eq!(state.look(start() + TTL), Some(LossReason::Expired));
    }

    #[test]
    fn doubt_keeps_the_deadline_and_is_healed_by_a_renewal() {
        let lease = lease(terms());
        let mut state = lease.state();
        let before = state.deadline();
        let mut now = start();
        for _ in 0..40 {
            now = state.doubt(TTL, now).expect("live");
        }
        assert_eq!((state.deadline(), now), (before, before));
        state.extend(start() + TTL * 2, start() + Duration::from_secs(1));
        assert!(state.is_sure());
        assert_eq!(state.deadline(), start() + TTL * 2);
    }

    #[test]
    fn unreachable_and_max_hold_are_told_apart() {
        let first = lease(terms());
        first.state().doubt(TTL, start());
        assert_eq!(first.state().look(start() + TTL), Some(LossReason::Unreachable));

        let capped = Terms { max_hold: Some(Duration::from_secs(2)), ..terms() };
        let second = lease(capped);
        assert_eq!(second.state().look(start() + Duration::from_secs(2)), Some(LossReason::MaxHold));
    }

    #[test]
    fn renewals_come_at_a_third_and_share_a_grid() {
        let lease = lease(terms());
        let state = lease.state();
        let soonest = state.schedule(true, TTL, start(), 0).since(start());
        let latest = state.schedule(true, TTL, start(), 1023).since(start());
        assert!(soonest > TTL / 4 && latest < TTL * 2 / 5, "{soonest:?} {latest:?}");
        assert_eq!(state.schedule(false, TTL, start(), 0), state.deadline());
        assert_eq!(
            on_grid(start() + Duration::from_millis(20), TTL),
            on_grid(start() + Duration::from_millis(21), TTL)
        );
    }
}
