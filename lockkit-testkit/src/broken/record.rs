//! What the machine keeps of one lock, and whom it lets in.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit_core::{
    AcquireRequest, Claim, Fence, FenceClock, Holder, HolderInfo, Mode, Moment, Order, Token, Waiter, store::PLACE,
};

use super::Bug;

#[derive(Debug, Default)]
pub(super) struct LockRecord {
    /// One for each that holds the lock.
    pub(super) leases: Vec<StoredLease>,
    /// Who waits to be served in order, the first in front.
    queue: VecDeque<QueuedClaim>,
    /// The last fence given out; 0 if there is no counter.
    pub(super) fence: u64,
    /// Only with a bug: when the counter is forgotten.
    counter_ends: Option<Moment>,
    /// Only with a bug: until when no writer gets in.
    barred: Option<Moment>,
    /// Only with a bug: how the first permit was asked for.
    first_permit: Option<Mode>,
}

/// A claim's place in the queue. It ends when it was not asked for again in time.
#[derive(Debug)]
struct QueuedClaim {
    token: Token,
    mode: Mode,
    ends: Option<Moment>,
    info: HolderInfo,
}

#[derive(Clone, Debug)]
pub(super) struct StoredLease {
    pub(super) claim: Claim,
    pub(super) mode: Mode,
    /// `None` is for ever.
    pub(super) ends: Option<Moment>,
    pub(super) fence: u64,
    pub(super) span: u32,
    pub(super) depth: u32,
    pub(super) info: HolderInfo,
}

/// What is on record of a lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoredTerms {
    pub(super) fence: Fence,
    pub(super) span: u32,
    pub(super) depth: u32,
}

/// The answer to an acquisition.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Granted(StoredTerms),
    Held {
        remaining: Option<Duration>,
        holder: Option<HolderInfo>,
    },
    /// It is in use with another number of permits.
    OtherLimit,
}

impl LockRecord {
    /// Grants a lease that ends at `ends`, or says who is in the way.
    pub(super) fn acquire(
        &mut self,
        request: &AcquireRequest,
        mode: Mode,
        now: Moment,
        ends: Option<Moment>,
        bug: Option<Bug>,
    ) -> Answer {
        if let Some(answer) = self.again(request, ends, bug) {
            return answer;
        }
        if let Some(from) = request.from {
            // BUG: first the writer's lease ends, and then the reader asks as any other does.
            if bug == Some(Bug::DowngradeInTwoSteps) && mode == Mode::Shared {
                self.leases.retain(|lease| lease.claim.token != from);
            } else {
                return self.replace(from, request, mode, now, ends, bug);
            }
        }
        // BUG: who comes last says how many permits there are.
        if self.has_other_limit(mode) && bug != Some(Bug::LimitOfLast) {
            return Answer::OtherLimit;
        }
        // BUG: who came first of all has said it for good.
        if bug == Some(Bug::LimitOfFirst) && is_permit(&mode) && *self.first_permit.get_or_insert(mode) != mode {
            return Answer::OtherLimit;
        }
        // BUG: no place is kept, so that who is quickest goes first.
        if request.order == Order::Fifo && !request.wait.is_zero() && bug != Some(Bug::LastComeFirst) {
            self.queue_up(request, mode, now, bug);
        }
        let place = self.queue.iter().position(|place| place.token == request.claim.token);
        let ahead = match bug {
            // BUG: who does not wait has nobody before it.
            Some(Bug::TryBarges) if request.wait.is_zero() => 0,
            // BUG: a reader gets in where readers are, whoever waits.
            Some(Bug::ReaderPassesWriter) if mode == Mode::Shared => 0,
            _ => place.unwrap_or(self.queue.len()),
        };
        // A claim without a place passes none that has one.
        let waits = place.is_none() && ahead > 0;
        if waits || !self.has_room(mode, ahead, now, bug) {
            return self.held(now, ahead);
        }
        self.leave(&request.claim.token);
        self.grant(request, mode, ends, bug)
    }

    /// A grant in the place of the exclusive lease with this token.
    fn replace(
        &mut self,
        from: Token,
        request: &AcquireRequest,
        mode: Mode,
        now: Moment,
        ends: Option<Moment>,
        bug: Option<Bug>,
    ) -> Answer {
        // BUG: nobody looks how the lease has the lock.
        let is_any = bug == Some(Bug::ReplacesReaders);
        let is_it = |lease: &StoredLease| lease.claim.token == from && (is_any || lease.mode == Mode::Exclusive);
        let right = self.leases.first().map(is_it);
        // BUG: what was there stays for as long as it would have.
        let lasts_on = self.leases.first().and_then(|lease| lease.ends).filter(|_| bug == Some(Bug::ReplacedLastsOn));
        let ends = ends.map(|ends| lasts_on.map_or(ends, |former| former.max(ends)));
        // BUG: whoever has the lock, its place is taken; or nobody has it, and the place is taken all the same.
        let wrong = right.map_or(Bug::ReplacesNobody, |_| Bug::ReplacesAnyone);
        if right != Some(true) && bug != Some(wrong) {
            // BUG: the lock is taken for free although that lease is over.
            if bug == Some(Bug::LateDowngradeFrees) && !self.queue.is_empty() {
                self.leases.clear();
            }
            return self.held(now, 0);
        }
        self.leases.clear();
        let answer = self.grant(request, mode, ends, bug);
        // BUG: the former lease has ended, and nothing else has happened.
        if bug == Some(Bug::ReplacedIsFree) {
            self.leases.clear();
        }
        answer
    }

    /// Ends what ran out.
    pub(super) fn drop_lapsed(&mut self, now: Moment) {
        let over = |ends: &Option<Moment>| ends.is_some_and(|ends| ends <= now);
        self.queue.retain(|place| !over(&place.ends));
        self.leases.retain(|lease| !over(&lease.ends));
        if over(&self.counter_ends) {
            self.fence = 0;
        }
    }

    /// The answer to a claim that holds the lock already.
    fn again(&mut self, request: &AcquireRequest, ends: Option<Moment>, bug: Option<Bug>) -> Option<Answer> {
        // BUG: a repeated claim finds the lock held, as everyone does.
        if bug == Some(Bug::NotIdempotent) {
            return None;
        }
        let lease = self.leases.iter_mut().find(|lease| lease.claim.token == request.claim.token)?;
        // BUG: a repeated claim leaves the lease as it is.
        if bug != Some(Bug::RepeatDoesNotExtend) {
            lease.ends = ends;
        }
        let lease = lease.clone();
        let terms = lease.terms();
        // BUG: it is counted each time.
        if bug == Some(Bug::RepeatCountsTwice) && lease.mode != Mode::Exclusive {
            self.leases.push(lease);
        }
        Some(Answer::Granted(terms))
    }

    fn grant(&mut self, request: &AcquireRequest, mode: Mode, ends: Option<Moment>, bug: Option<Bug>) -> Answer {
        let fence = self.next_fence(request, mode, bug);
        // BUG: the counter is kept only as long as the lease.
        self.counter_ends = ends.filter(|_| bug == Some(Bug::FenceLapses));
        if mode == Mode::Shared {
            // BUG: there is one end for all readers, that of whoever came last.
            if bug == Some(Bug::ReadersShareALease) {
                self.leases.iter_mut().for_each(|lease| lease.ends = ends);
            }
            // BUG: nobody takes it back if the reader leaves early.
            self.barred = self.barred.max(ends.filter(|_| bug == Some(Bug::WriterWaitsForTtl)));
        }
        let (claim, span, info) = (request.claim.clone(), request.fence.span, request.holder.clone());
        let lease = StoredLease { claim, mode, ends, fence, span, depth: 1, info };
        let terms = lease.terms();
        self.leases.push(lease);
        Answer::Granted(terms)
    }

    /// Whether one more may hold the lock in this way once all have got in that stand `ahead` of it.
    fn has_room(&self, mode: Mode, ahead: usize, now: Moment, bug: Option<Bug>) -> bool {
        let taken =
            self.leases.iter().map(|lease| lease.mode).chain(self.queue.iter().take(ahead).map(|place| place.mode));
        // BUG: counted from one that is not there.
        let taken = taken.skip(usize::from(bug == Some(Bug::OneTooMany)));
        // BUG: each kind has its own record, and looks at no other.
        let is_seen = |other: &Mode| {
            bug != Some(Bug::KindsApart) || std::mem::discriminant(other) == std::mem::discriminant(&mode)
        };
        let mut taken = taken.filter(is_seen);
        match mode {
            Mode::Shared => taken.all(|other| other == Mode::Shared),
            Mode::Permit { limit } => {
                let mut count = 0;
                let beside = |other| {
                    count += 1;
                    matches!(other, Mode::Permit { .. })
                };
                taken.all(beside) && count < limit.get()
            }
            _ => taken.next().is_none() && self.barred.is_none_or(|until| until <= now),
        }
    }

    fn has_other_limit(&self, mode: Mode) -> bool {
        let modes = self.leases.iter().map(|lease| lease.mode).chain(self.queue.iter().map(|place| place.mode));
        is_permit(&mode) && modes.filter(is_permit).any(|other| other != mode)
    }

    /// The refusal of a claim with so many ahead of it in the queue.
    fn held(&self, now: Moment, ahead: usize) -> Answer {
        let places = self.queue.iter().take(ahead);
        let ends = self.leases.iter().map(|lease| lease.ends).chain(places.clone().map(|place| place.ends)).flatten();
        let holder = self.leases.first().map(|lease| &lease.info).or(places.clone().next().map(|place| &place.info));
        let remaining = ends.chain(self.barred).min().map(|ends| ends.since(now));
        Answer::Held { remaining, holder: holder.cloned() }
    }

    /// Keeps the claim's place in the queue, the last one if it had none.
    fn queue_up(&mut self, request: &AcquireRequest, mode: Mode, now: Moment, bug: Option<Bug>) {
        // BUG: who does not come back is waited for, for ever.
        let ends = Some(now + PLACE).filter(|_| bug != Some(Bug::DeadWaitersStay));
        let token = request.claim.token;
        match self.queue.iter_mut().find(|place| place.token == token) {
            // BUG: who waits for long loses its place.
            Some(_) if bug == Some(Bug::PlaceNotKept) => {}
            Some(place) => place.ends = ends,
            None => self.queue.push_back(QueuedClaim { token, mode, ends, info: request.holder.clone() }),
        }
    }

    /// Those that wait in order, the next one first.
    pub(super) fn waiters(&self, most: usize) -> Vec<Waiter> {
        let waiters = self.queue.iter().map(|place| Waiter { info: place.info.clone(), mode: place.mode });
        waiters.take(most).collect()
    }

    /// Gives up the claim's place in the queue, if it has one.
    pub(super) fn leave(&mut self, token: &Token) -> bool {
        let before = self.queue.len();
        self.queue.retain(|place| place.token != *token);
        self.queue.len() < before
    }

    fn next_fence(&mut self, request: &AcquireRequest, mode: Mode, bug: Option<Bug>) -> u64 {
        let asked = request.fence;
        let is_high_enough = asked.span == 1 && self.fence > asked.floor.get();
        let is_beside = mode == Mode::Shared && !self.leases.is_empty();
        // BUG: the number of those that are there will do.
        let joins = is_beside && (is_high_enough || bug == Some(Bug::ReaderIgnoresFloor));
        // BUG: their number is the one that they came with.
        if joins && bug == Some(Bug::ReaderIgnoresRaise) {
            return self.leases.iter().map(|lease| lease.fence).max().unwrap_or_default();
        }
        // BUG: the first reader takes the number that is there, too: the last writer's.
        if joins || mode == Mode::Shared && self.fence > 0 && bug == Some(Bug::ReaderHasWritersFence) {
            return self.fence;
        }
        // BUG: the reader goes on with the number of the writer that it was.
        if mode == Mode::Shared && request.from.is_some() && bug == Some(Bug::DowngradeKeepsFence) {
            return self.fence;
        }
        // BUG: a new counter starts at 1, wherever the one before it was.
        let from_one = matches!(bug, Some(Bug::FenceLapses | Bug::FenceRestarts | Bug::FenceLostWithData));
        let start = match asked.clock {
            FenceClock::Store if self.fence == 0 && !from_one => wall_clock_micros(),
            FenceClock::Store | FenceClock::Floor => 0,
        };
        // BUG: what was asked for is not heard.
        let floor = if bug == Some(Bug::FloorIgnored) { 0 } else { asked.floor.get() };
        let span = if bug == Some(Bug::SpanIgnored) { 1 } else { asked.span };
        let fence = (self.fence + 1).max(floor + 1).max(start);
        // BUG: one that is beside others is thought to have their number.
        if !(is_beside && bug == Some(Bug::ReadersFenceNotCounted)) {
            self.fence = fence + u64::from(span) - 1;
        }
        fence
    }
}

impl StoredLease {
    pub(super) fn terms(&self) -> StoredTerms {
        StoredTerms { fence: Fence::new(self.fence), span: self.span, depth: self.depth }
    }

    pub(super) fn holder(&self, now: Moment) -> Holder {
        Holder {
            token: Some(self.claim.token),
            info: self.info.clone(),
            mode: self.mode,
            depth: self.depth,
            fence: Some(Fence::new(self.fence)),
            remaining: self.ends.map(|ends| ends.since(now)),
        }
    }
}

fn is_permit(mode: &Mode) -> bool {
    matches!(mode, Mode::Permit { .. })
}

fn wall_clock_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
