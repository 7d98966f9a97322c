//! What the machine keeps, and the steps that it does: each is atomic, for the table is locked meanwhile.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit_core::{
    AcquireRequest, Claim, Fence, FenceClock, Holder, HolderInfo, KeyState, LockKey, LossReason, Mode, Moment, Order,
    Release, Renewal, Token, store,
};

use super::Bug;

/// All locks, by the name that the client made of their key.
#[derive(Debug)]
pub(super) struct Table {
    bug: Option<Bug>,
    records: BTreeMap<String, Record>,
    texts: BTreeMap<String, store::Record>,
    /// Whether waiters are to be told that something is free.
    pub(super) freed: bool,
}

#[derive(Debug, Default)]
struct Record {
    lease: Option<Lease>,
    /// Who waits to be served in order, the first in front.
    queue: VecDeque<Place>,
    /// The last fence given out; 0 if there is no counter.
    fence: u64,
    /// Only with a bug: when the counter is forgotten.
    counter_ends: Option<Moment>,
}

/// A claim's place in the queue. It ends when it was not asked for again in time.
#[derive(Debug)]
struct Place {
    token: Token,
    ends: Option<Moment>,
    info: HolderInfo,
}

#[derive(Debug)]
struct Lease {
    claim: Claim,
    /// `None` is for ever.
    ends: Option<Moment>,
    fence: u64,
    span: u32,
    depth: u32,
    info: HolderInfo,
}

/// What is on record of a lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub(super) fence: Fence,
    pub(super) span: u32,
    pub(super) depth: u32,
}

/// The answer to an acquisition.
#[derive(Clone, Debug)]
pub(super) enum Answer {
    Granted(Terms),
    Held { remaining: Option<Duration>, holder: HolderInfo },
}

impl Table {
    pub(super) fn new(bug: Option<Bug>) -> Self {
        Self { bug, records: BTreeMap::new(), texts: BTreeMap::new(), freed: false }
    }

    fn has(&self, bug: Bug) -> bool {
        self.bug == Some(bug)
    }

    /// Grants a lease that ends at `ends`, or says who is in the way.
    pub(super) fn acquire(
        &mut self,
        name: &str,
        request: &AcquireRequest,
        now: Moment,
        ends: Option<Moment>,
    ) -> Answer {
        // BUG: a repeated claim finds the lock held, as everyone does.
        let idempotent = !self.has(Bug::NotIdempotent);
        // BUG: a repeated claim leaves the lease as it is.
        let extends = !self.has(Bug::RepeatDoesNotExtend);
        let bug = self.bug;
        let record = self.record(name, now);
        // BUG: no place is kept, so that who is quickest goes first.
        if request.order == Order::Fifo && !request.wait.is_zero() && bug != Some(Bug::LastComeFirst) {
            // BUG: who does not come back is waited for, for ever.
            record.queue_up(request, ends.filter(|_| bug != Some(Bug::DeadWaitersStay)));
        }
        let first = record.queue.front().filter(|first| first.token != request.claim.token);
        let replaced = request.from.map(|from| record.lease.as_ref().map(|lease| lease.claim.token == from));
        match &mut record.lease {
            Some(lease) if idempotent && lease.claim.token == request.claim.token => {
                if extends {
                    lease.ends = ends;
                }
                Answer::Granted(lease.terms())
            }
            // BUG: whoever has the lock, its place is taken.
            Some(lease) if replaced != Some(Some(true)) && (replaced.is_none() || bug != Some(Bug::ReplacesAnyone)) => {
                let remaining = lease.ends.map(|ends| ends.since(now));
                Answer::Held { remaining, holder: lease.info.clone() }
            }
            // BUG: nobody has it, and the place is taken all the same.
            None if replaced.is_some() && bug != Some(Bug::ReplacesNobody) => {
                Answer::Held { remaining: None, holder: HolderInfo::new("") }
            }
            None if let Some(first) = first => {
                let remaining = first.ends.map(|ends| ends.since(now));
                Answer::Held { remaining, holder: first.info.clone() }
            }
            Some(_) | None => {
                record.leave(&request.claim.token);
                let fence = record.next_fence(request, bug);
                // BUG: the counter is kept only as long as the lease.
                record.counter_ends = ends.filter(|_| bug == Some(Bug::FenceLapses));
                let span = request.fence.span;
                let (claim, info) = (request.claim.clone(), request.holder.clone());
                let lease = record.lease.insert(Lease { claim, ends, fence, span, depth: 1, info });
                Answer::Granted(lease.terms())
            }
        }
    }

    /// Gives a lease its end.
    pub(super) fn expire(&mut self, name: &str, claim: &Claim, ends: Option<Moment>) {
        if let Some(record) = self.records.get_mut(name)
            && let Some(lease) = record.lease.as_mut().filter(|lease| lease.claim.token == claim.token)
        {
            lease.ends = ends;
        }
    }

    pub(super) fn renew(
        &mut self,
        name: &str,
        renewal: &Renewal,
        now: Moment,
        ends: Option<Moment>,
    ) -> Result<Terms, LossReason> {
        // BUG: what is gone is written anew.
        if self.has(Bug::RenewCreates) && self.record(name, now).lease.is_none() {
            let info = HolderInfo::new("renewed");
            let lease = Lease { claim: renewal.claim.clone(), ends, fence: 0, span: 1, depth: renewal.depth, info };
            return Ok(self.record(name, now).lease.insert(lease).terms());
        }
        // BUG: nobody looks whose lease it is.
        let anyones = self.has(Bug::RenewsAnyones);
        // BUG: the depth is added to.
        let adds = self.has(Bug::DepthAdds);
        let record = self.record(name, now);
        let lease = record.lease.as_mut().ok_or(LossReason::Gone)?;
        if !anyones && lease.claim.token != renewal.claim.token {
            return Err(LossReason::Taken);
        }
        lease.ends = ends;
        lease.depth = if adds { lease.depth + renewal.depth - 1 } else { renewal.depth };
        if let Some(holder) = &renewal.holder {
            lease.info = holder.clone();
        }
        if let Some(floor) = renewal.fence_floor {
            record.fence = record.fence.max(floor.get());
        }
        Ok(lease.terms())
    }

    pub(super) fn release(&mut self, name: &str, claim: &Claim, now: Moment) -> Release {
        // BUG: nobody looks whose lease it is.
        let anyones = self.has(Bug::DeletesAnyones);
        let record = self.record(name, now);
        let left = record.leave(&claim.token);
        self.freed |= left;
        let answer = match self.whose(name, claim, now) {
            Err(LossReason::Taken) if anyones => Ok(()),
            answer => answer,
        };
        match answer {
            Ok(()) => {
                self.delete(name);
                Release::Released { waiters: None }
            }
            Err(reason) => Release::NotHeld(reason),
        }
    }

    /// Whether the lease is the claim's.
    pub(super) fn whose(&mut self, name: &str, claim: &Claim, now: Moment) -> Result<(), LossReason> {
        match &self.record(name, now).lease {
            None => Err(LossReason::Gone),
            Some(lease) if lease.claim.token == claim.token => Ok(()),
            Some(_) => Err(LossReason::Taken),
        }
    }

    /// Deletes whatever lease there is.
    pub(super) fn delete(&mut self, name: &str) -> bool {
        let deleted = self.records.get_mut(name).is_some_and(|record| record.lease.take().is_some());
        // BUG: the counter goes with the lease.
        if self.has(Bug::FenceRestarts) {
            self.records.remove(name);
        }
        // BUG: nobody is told.
        self.freed |= deleted && !self.has(Bug::NeverWakes);
        deleted
    }

    pub(super) fn state(&mut self, name: &str, key: &LockKey, now: Moment) -> KeyState {
        let record = self.record(name, now);
        KeyState {
            key: key.clone(),
            holders: record.lease.iter().map(|lease| lease.holder(now)).collect(),
            fence: Some(record.fence).filter(|fence| *fence > 0).map(Fence::new),
            waiters: None,
        }
    }

    /// The names and keys of the held locks whose key starts with `prefix`.
    pub(super) fn held(&self, prefix: &str) -> Vec<(String, LockKey)> {
        let leases = self.records.iter().filter_map(|(name, record)| Some((name, &record.lease.as_ref()?.claim.key)));
        leases
            .filter(|(_, key)| key.as_str().starts_with(prefix))
            .map(|(name, key)| (name.clone(), key.clone()))
            .collect()
    }

    /// The text of a record.
    pub(super) fn text(&self, name: &str) -> Option<store::Record> {
        self.texts.get(name).cloned()
    }

    /// Makes a record `new` if it is `seen`.
    pub(super) fn swap(
        &mut self,
        name: &str,
        seen: Option<&store::Record>,
        new: Option<&store::Record>,
    ) -> store::Swap {
        if let Some(answer) = store::Swap::of(self.texts.get(name), seen, new) {
            return answer;
        }
        self.write(name, new);
        store::Swap::Done
    }

    /// Makes a record `new`, whatever it is.
    pub(super) fn write(&mut self, name: &str, new: Option<&store::Record>) {
        match new {
            Some(new) => self.texts.insert(name.to_owned(), new.clone()),
            None => self.texts.remove(name),
        };
    }

    /// The record of a name, without what has ended.
    fn record(&mut self, name: &str, now: Moment) -> &mut Record {
        let over = |ends: &Option<Moment>| ends.is_some_and(|ends| ends <= now);
        let record = self.records.entry(name.to_owned()).or_default();
        record.queue.retain(|place| !over(&place.ends));
        record.lease.take_if(|lease| over(&lease.ends));
        if over(&record.counter_ends) {
            record.fence = 0;
        }
        record
    }
}

impl Record {
    /// Keeps the claim's place in the queue, the last one if it had none.
    fn queue_up(&mut self, request: &AcquireRequest, ends: Option<Moment>) {
        let token = request.claim.token;
        match self.queue.iter_mut().find(|place| place.token == token) {
            Some(place) => place.ends = ends,
            None if self.lease.as_ref().is_some_and(|lease| lease.claim.token == token) => {}
            None => self.queue.push_back(Place { token, ends, info: request.holder.clone() }),
        }
    }

    /// Gives up the claim's place in the queue, if it has one.
    fn leave(&mut self, token: &Token) -> bool {
        let before = self.queue.len();
        self.queue.retain(|place| place.token != *token);
        self.queue.len() < before
    }

    fn next_fence(&mut self, request: &AcquireRequest, bug: Option<Bug>) -> u64 {
        let asked = request.fence;
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
        self.fence = fence + u64::from(span) - 1;
        fence
    }
}

impl Lease {
    fn terms(&self) -> Terms {
        Terms { fence: Fence::new(self.fence), span: self.span, depth: self.depth }
    }

    fn holder(&self, now: Moment) -> Holder {
        Holder {
            token: Some(self.claim.token),
            info: self.info.clone(),
            mode: Mode::Exclusive,
            depth: self.depth,
            fence: Some(Fence::new(self.fence)),
            remaining: self.ends.map(|ends| ends.since(now)),
        }
    }
}

fn wall_clock_micros() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
