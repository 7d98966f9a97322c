//! What the machine keeps, and the steps that it does: each is atomic, for the table is locked meanwhile.

use std::collections::BTreeMap;

use lockkit_core::{
    AcquireRequest, Claim, Fence, HolderInfo, KeyState, LockKey, LossReason, Mode, Moment, Release, Renewal, store,
};

use super::{
    Bug,
    record::{Answer, LockRecord, StoredLease, StoredTerms},
};

/// All locks, by the name that the client made of their key.
#[derive(Debug)]
pub(super) struct Table {
    bug: Option<Bug>,
    records: BTreeMap<String, LockRecord>,
    texts: BTreeMap<String, store::Record>,
    /// Whether waiters are to be told that something is free.
    pub(super) freed: bool,
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
        let (bug, mode) = (self.bug, self.mode(request));
        // BUG: nobody is told that there is room beside the reader.
        self.freed |= mode == Mode::Shared && request.from.is_some() && bug != Some(Bug::DowngradeWakesNobody);
        self.record(name, now).acquire(request, mode, now, ends, bug)
    }

    /// How the lock is to be held.
    fn mode(&self, request: &AcquireRequest) -> Mode {
        match request.claim.mode {
            // BUG: an exclusive lock is granted to who asked for a shared one.
            Mode::Shared if self.has(Bug::ClaimsShared) || self.has(Bug::DowngradesShared) => Mode::Exclusive,
            mode => mode,
        }
    }

    /// Gives a lease its end.
    pub(super) fn expire(&mut self, name: &str, claim: &Claim, ends: Option<Moment>) {
        let leases = self.records.get_mut(name).into_iter().flat_map(|record| &mut record.leases);
        for lease in leases.filter(|lease| lease.claim.token == claim.token) {
            lease.ends = ends;
        }
    }

    pub(super) fn renew(
        &mut self,
        name: &str,
        renewal: &Renewal,
        now: Moment,
        ends: Option<Moment>,
    ) -> Result<StoredTerms, LossReason> {
        // BUG: what is gone is written anew.
        if self.has(Bug::RenewCreates) && self.record(name, now).leases.is_empty() {
            let (claim, info) = (renewal.claim.clone(), HolderInfo::new("renewed"));
            let lease =
                StoredLease { claim, mode: Mode::Exclusive, ends, fence: 0, span: 1, depth: renewal.depth, info };
            let terms = lease.terms();
            self.record(name, now).leases.push(lease);
            return Ok(terms);
        }
        // BUG: nobody looks whose lease it is.
        let anyones = self.has(Bug::RenewsAnyones);
        // BUG: the depth is added to.
        let adds = self.has(Bug::DepthAdds);
        // BUG: what one reader says is done to all.
        let all = self.has(Bug::RenewsOtherReaders) || self.has(Bug::ReadersShareALease);
        let record = self.record(name, now);
        let lost = if record.leases.is_empty() { LossReason::Gone } else { LossReason::Taken };
        let is_it = |lease: &&mut StoredLease| anyones || lease.claim.token == renewal.claim.token;
        let lease = record.leases.iter_mut().find(is_it).ok_or(lost)?;
        lease.ends = ends;
        lease.depth = if adds { lease.depth + renewal.depth - 1 } else { renewal.depth };
        if let Some(holder) = &renewal.holder {
            lease.info = holder.clone();
        }
        let (terms, mode) = (lease.terms(), lease.mode);
        if mode == Mode::Shared && all {
            record.leases.iter_mut().for_each(|lease| lease.ends = ends);
        }
        if let Some(floor) = renewal.fence_floor {
            record.fence = record.fence.max(floor.get());
        }
        Ok(terms)
    }

    pub(super) fn release(&mut self, name: &str, claim: &Claim, now: Moment) -> Release {
        let bug = self.bug;
        let record = self.record(name, now);
        // BUG: who was cancelled still stands there.
        let left = bug != Some(Bug::CancelledStays) && record.leave(&claim.token);
        let its = record.leases.iter().position(|lease| lease.claim.token == claim.token);
        let any = match bug {
            // BUG: nobody looks whose lease it is.
            Some(Bug::DeletesAnyones) => true,
            // BUG: permits are counted, whoever has them.
            Some(Bug::PermitsWithoutOwners) => matches!(claim.mode, Mode::Permit { .. }),
            _ => false,
        };
        let answer = match its.or(Some(0).filter(|_| any && !record.leases.is_empty())) {
            // BUG: it is left to lapse.
            Some(_) if bug == Some(Bug::ReleaseLeftToLapse) => Release::Released { waiters: None },
            Some(number) => {
                record.leases.remove(number);
                self.has_ended(name);
                Release::Released { waiters: None }
            }
            None if record.leases.is_empty() => Release::NotHeld(LossReason::Gone),
            None => Release::NotHeld(LossReason::Taken),
        };
        self.freed |= left;
        answer
    }

    /// Whether the lease is the claim's.
    pub(super) fn whose(&mut self, name: &str, claim: &Claim, now: Moment) -> Result<(), LossReason> {
        let leases = &self.record(name, now).leases;
        match leases.iter().any(|lease| lease.claim.token == claim.token) {
            true => Ok(()),
            false if leases.is_empty() => Err(LossReason::Gone),
            false => Err(LossReason::Taken),
        }
    }

    /// Deletes whatever leases there are.
    pub(super) fn delete(&mut self, name: &str) -> bool {
        let Some(record) = self.records.get_mut(name).filter(|record| !record.leases.is_empty()) else { return false };
        record.leases.clear();
        self.has_ended(name);
        true
    }

    /// A lease was ended.
    fn has_ended(&mut self, name: &str) {
        // BUG: the counter goes with the lease.
        if self.has(Bug::FenceRestarts) && self.records.get(name).is_some_and(|record| record.leases.is_empty()) {
            self.records.remove(name);
        }
        // BUG: nobody is told.
        self.freed |= !self.has(Bug::NeverWakes);
    }

    pub(super) fn state(&mut self, name: &str, key: &LockKey, now: Moment) -> KeyState {
        let shown = match self.bug {
            // BUG: as if there could be but one.
            Some(Bug::ShowsOneHolder) => 1,
            // BUG: not even that.
            Some(Bug::ShowsNobody) => 0,
            _ => usize::MAX,
        };
        let record = self.record(name, now);
        KeyState {
            key: key.clone(),
            holders: record.leases.iter().take(shown).map(|lease| lease.holder(now)).collect(),
            fence: Some(record.fence).filter(|fence| *fence > 0).map(Fence::new),
            waiters: None,
            queue: None,
        }
    }

    /// The state of a lock, with those that wait.
    pub(super) fn state_with_queue(&mut self, name: &str, key: &LockKey, now: Moment) -> KeyState {
        // BUG: a thousand wait, and a thousand are sent.
        let most = if self.has(Bug::ShowsWholeQueue) { usize::MAX } else { KeyState::LONGEST_QUEUE };
        let mut queue = self.record(name, now).waiters(most);
        // BUG: who came last stands in front.
        if self.has(Bug::ShowsQueueBackwards) {
            queue.reverse();
        }
        // BUG: nobody is told of it.
        let queue = (!self.has(Bug::HidesQueue)).then_some(queue);
        KeyState { queue, ..self.state(name, key, now) }
    }

    /// The names and keys of the held locks whose key starts with `prefix`.
    pub(super) fn held(&self, prefix: &str) -> Vec<(String, LockKey)> {
        let leases = self.records.iter().filter_map(|(name, record)| Some((name, &record.leases.first()?.claim.key)));
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
    fn record(&mut self, name: &str, now: Moment) -> &mut LockRecord {
        let record = self.records.entry(name.to_owned()).or_default();
        record.drop_lapsed(now);
        record
    }
}
