//! One lock of the memory store: who holds it, who waits for it, and its fences. Decisions only; nothing here waits or
//! reads a clock.

use std::sync::Arc;

use tokio::sync::{Notify, futures::OwnedNotified};

use super::queue::ClaimQueue;
use crate::{
    AcquireRequest, Claim, Contention, Error, Fence, FenceClock, FenceRequest, Hold, Holder, HolderInfo, KeyState,
    LockKey, LossReason, Mode, Moment, Order, Release, Renewal, Renewed, Result, Token, Waiter, clock::wall_clock,
    store::FENCE_ROOM,
};

#[derive(Debug, Default)]
pub(super) struct LockState {
    leases: Vec<MemoryLease>,
    queue: ClaimQueue,
    /// The last fence given out.
    fence: u64,
    /// How those are told that the lock may be free which wait outside the queue. Each of them has a reference to it.
    pub(super) freed: Arc<Notify>,
}

#[derive(Debug)]
struct MemoryLease {
    claim: Claim,
    fence: u64,
    span: u32,
    depth: u32,
    expires: Moment,
    info: HolderInfo,
}

/// The answer to a request. One that waits gets what wakes it, too.
pub(super) enum Answer {
    Granted(Hold),
    Contended(Contention, Option<OwnedNotified>),
}

/// When a request is judged, what its lease is counted from, and above which fence a new counter starts.
#[derive(Clone, Copy)]
pub(super) struct AskedAt {
    pub(super) now: Moment,
    pub(super) until: Moment,
    pub(super) floor: u64,
}

impl LockState {
    /// Ends what ran out.
    pub(super) fn drop_lapsed(&mut self, now: Moment) {
        let before = self.leases.len();
        self.leases.retain(|lease| now < lease.expires);
        if self.queue.drop_lapsed(now) || self.leases.len() < before {
            self.call();
        }
    }

    /// Whether anybody holds the lock or waits for it.
    pub(super) fn is_used(&self) -> bool {
        !self.leases.is_empty() || !self.queue.is_empty() || self.outside() > 0
    }

    pub(super) fn last_fence(&self) -> u64 {
        self.fence
    }

    /// One attempt, after all that ran out has ended.
    pub(super) fn ask(&mut self, request: &AcquireRequest, asked: AskedAt) -> Result<Answer> {
        let (claim, now) = (&request.claim, asked.now);
        if let Some(lease) = self.leases.iter_mut().find(|lease| lease.claim == *claim) {
            lease.expires = now + request.ttl;
            return Ok(Answer::Granted(lease.hold(asked.until)));
        }
        if let Some(from) = request.from {
            return self.replace(from, request, asked);
        }
        self.admit_limit(claim)?;
        let wake = (!request.wait.is_zero()).then(|| match request.order {
            Order::Any => Arc::clone(&self.freed),
            Order::Fifo => self.queue.keep(claim, &request.holder, now),
        });
        // A claim without a place passes none that has one. A claim with a place gets in if all before it could, too: a
        // reader does not wait for the reader before it to wake up.
        let may_pass = self.queue.is_empty() || self.queue.has(claim);
        let taken = self.modes().chain(self.queue.before(claim).map(|place| place.claim.mode));
        if !may_pass || !claim.mode.has_room(taken) {
            return Ok(Answer::Contended(self.contention(claim, now), wake.map(Notify::notified_owned)));
        }
        self.queue.leave(&claim.token);
        self.grant(request, asked)
    }

    /// A grant in the place of the exclusive lease with this token.
    fn replace(&mut self, from: Token, request: &AcquireRequest, asked: AskedAt) -> Result<Answer> {
        let is_it = |lease: &MemoryLease| lease.claim.token == from && lease.claim.mode == Mode::Exclusive;
        if !self.leases.iter().any(is_it) {
            return Ok(Answer::Contended(self.contention(&request.claim, asked.now), None));
        }
        // It stays if there is no fence to give.
        let granted = self.grant(request, asked)?;
        self.leases.retain(|lease| lease.claim.token != from);
        if request.claim.mode == Mode::Shared {
            self.call();
        }
        Ok(granted)
    }

    fn grant(&mut self, request: &AcquireRequest, asked: AskedAt) -> Result<Answer> {
        let fence = self.next_fence(request.claim.mode, request.fence, asked.floor)?;
        let lease = MemoryLease {
            claim: request.claim.clone(),
            fence,
            span: request.fence.span.max(1),
            depth: 1,
            expires: asked.now + request.ttl,
            info: request.holder.clone(),
        };
        let hold = lease.hold(asked.until);
        self.leases.push(lease);
        Ok(Answer::Granted(hold))
    }

    pub(super) fn renew(&mut self, renewal: &Renewal, now: Moment, until: Moment) -> Renewed {
        let Some(lease) = self.leases.iter_mut().find(|lease| lease.claim == renewal.claim) else {
            return Renewed::Lost(self.why_not_held());
        };
        lease.expires = now + renewal.ttl;
        lease.depth = renewal.depth;
        if let Some(holder) = &renewal.holder {
            lease.info = holder.clone();
        }
        let hold = lease.hold(until);
        if let Some(floor) = renewal.fence_floor {
            self.fence = self.fence.max(floor.get());
        }
        Renewed::Held(hold)
    }

    /// Ends a lease, or gives up a place in the queue. The mode is not compared: a token is unique, and `break_lock` knows
    /// nothing else.
    pub(super) fn release(&mut self, token: &Token, now: Moment) -> Release {
        let before = self.leases.len();
        self.leases.retain(|lease| lease.claim.token != *token);
        let was_held = self.leases.len() < before;
        if self.queue.leave(token) || was_held {
            self.call();
        }
        if was_held {
            Release::Released { waiters: Some(self.waiting(now)) }
        } else {
            Release::NotHeld(self.why_not_held())
        }
    }

    pub(super) fn state(&self, key: &LockKey, now: Moment) -> KeyState {
        let live = self.leases.iter().filter(|lease| now < lease.expires);
        KeyState {
            key: key.clone(),
            holders: live.map(|lease| lease.holder(now)).collect(),
            fence: Some(self.fence).filter(|fence| *fence > 0).map(Fence::new),
            waiters: Some(self.waiting(now)),
            queue: None,
        }
    }

    /// Those that wait in order.
    pub(super) fn queue_to_show(&self, now: Moment) -> Vec<Waiter> {
        self.queue.waiters(now).take(KeyState::LONGEST_QUEUE).collect()
    }

    /// Has those ask again whose turn it is.
    fn call(&self) {
        if self.queue.is_empty() {
            return self.freed.notify_waiters();
        }
        for (number, place) in self.queue.places().enumerate() {
            if !place.claim.mode.has_room(self.modes().chain(self.queue.modes().take(number))) {
                return;
            }
            place.wake.notify_one();
        }
    }

    fn waiting(&self, now: Moment) -> u32 {
        self.outside().saturating_add(self.queue.len(now))
    }

    /// How many wait outside the queue.
    fn outside(&self) -> u32 {
        u32::try_from(Arc::strong_count(&self.freed) - 1).unwrap_or(u32::MAX)
    }

    /// How the lock is held, once by each holder.
    fn modes(&self) -> impl Iterator<Item = Mode> + Clone {
        self.leases.iter().map(|lease| lease.claim.mode)
    }

    /// Refuses a semaphore whose users do not agree on its permits.
    fn admit_limit(&self, claim: &Claim) -> Result<()> {
        let Mode::Permit { .. } = claim.mode else { return Ok(()) };
        let is_other = |mode: &Mode| matches!(mode, Mode::Permit { .. }) && *mode != claim.mode;
        match self.modes().chain(self.queue.modes()).find(is_other) {
            None => Ok(()),
            Some(other) => Err(Error::invalid(format!("the lock is in use as a {other}, not as a {}", claim.mode))),
        }
    }

    /// Who is in the way of this claim, and when that may be over.
    fn contention(&self, claim: &Claim, now: Moment) -> Contention {
        let is_beside = |lease: &&MemoryLease| claim.mode != Mode::Exclusive && lease.claim.mode == claim.mode;
        let in_the_way = self.leases.iter().filter(|lease| !is_beside(lease)).max_by_key(|lease| lease.expires);
        let holder = in_the_way.or_else(|| self.leases.iter().min_by_key(|lease| lease.expires));
        let place = self.queue.before(claim).map(|place| place.ends).min();
        let change = holder.map(|lease| lease.expires).into_iter().chain(place).min();
        Contention {
            retry_after: change.map(|change| change.since(now)),
            holder: holder.map(|lease| lease.info.clone()),
            burnt: false,
        }
    }

    /// The first fence of a grant. Readers that come in beside others get the last one that was given out, which lies above
    /// those of all writers before them: the number of their group (rule R9).
    fn next_fence(&mut self, mode: Mode, request: FenceRequest, floor: u64) -> Result<u64> {
        let is_in_group = mode == Mode::Shared && self.modes().any(|mode| mode == Mode::Shared);
        if is_in_group && request.span <= 1 && self.fence > request.floor.get() {
            return Ok(self.fence);
        }
        let start = match request.clock {
            FenceClock::Store if self.fence == 0 => wall_clock(),
            FenceClock::Store | FenceClock::Floor => 0,
        };
        let above = self.fence.max(request.floor.get()).max(floor);
        let first = above.checked_add(1).map(|next| next.max(start));
        let last = first.and_then(|first| first.checked_add(u64::from(request.span.max(1)) - 1));
        let has_room = request.floor.get() <= u64::MAX - FENCE_ROOM;
        let (first, last) = first.zip(last).filter(|_| has_room).ok_or_else(|| Error::invalid("fences end at 2^64"))?;
        self.fence = last;
        Ok(first)
    }

    fn why_not_held(&self) -> LossReason {
        if self.leases.is_empty() { LossReason::Gone } else { LossReason::Taken }
    }
}

impl MemoryLease {
    fn hold(&self, until: Moment) -> Hold {
        Hold { claim: self.claim.clone(), fence: Fence::new(self.fence), span: self.span, until, depth: self.depth }
    }

    fn holder(&self, now: Moment) -> Holder {
        Holder {
            token: Some(self.claim.token),
            info: self.info.clone(),
            mode: self.claim.mode,
            depth: self.depth,
            fence: Some(Fence::new(self.fence)),
            remaining: Some(self.expires.since(now)),
        }
    }
}
