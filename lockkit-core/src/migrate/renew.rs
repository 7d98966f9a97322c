//! Renewing: in the stores of the phase, and from one phase into the next (rules M3, M4 and M10).

use std::{sync::Arc, time::Duration};

use super::{
    claim::{Entry, Held, Over},
    dual::{Confirmed, Dual},
    pair::all,
    record::{Phase, Side},
    rules,
};
use crate::{
    AcquireRequest, Attempt, Effect, Error, ErrorKind, FenceRequest, HolderInfo, LockStore, LossReason, Moment, Order,
    Renewal, Renewed, Result,
};

/// A renewal under way.
struct Renewing<'a> {
    renewal: &'a Renewal,
    entry: Arc<Entry>,
    held: Held,
    /// What the stores have said, by [`Side::index`].
    answers: [Option<Result<Renewed>>; 2],
}

/// What the stores have said of one lease.
struct Said {
    /// Until when the lease lasts, at each store that has it.
    ends: Vec<Moment>,
    depth: u32,
    /// The grant, with its fence if that was not known.
    first: Held,
    failed: Option<Error>,
    lost: Option<LossReason>,
}

impl Dual {
    pub(super) async fn renew_in_phase(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let Some(bound) = renewals.iter().map(|renewal| self.aside(renewal.ttl)).min() else { return Vec::new() };
        let record = match self.confirmed().await {
            Ok(record) => record,
            Err(error) => return renewals.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut all_of_them: Vec<_> = renewals.iter().map(|renewal| self.begin(renewal, &record)).collect();
        self.ask_stores(&mut all_of_them, record.phase).await;
        // What one store has of a lease that the other has lost keeps others out until the holder has heard: no call clears it up before
        // this one has returned.
        let in_hand: Vec<_> = all_of_them.iter().map(|renewing| Arc::clone(&renewing.entry)).collect();
        let answers = all(all_of_them.into_iter().map(|renewing| self.finish(renewing, record.phase)));
        let answers = tokio::join!(answers, self.clear_up(bound, |_| true)).0;
        drop(in_hand);
        answers
    }

    fn begin<'a>(&self, renewal: &'a Renewal, record: &Confirmed) -> Renewing<'a> {
        let known = self.claims.get(&renewal.claim).filter(|entry| entry.held().is_some());
        let assumed = || Arc::new(Entry::assumed(renewal.claim.clone(), record.phase));
        let entry = known.unwrap_or_else(assumed);
        let held = entry.held().unwrap_or(Held { phase: record.phase, fence: crate::Fence::NONE, span: 1 });
        Renewing { renewal, entry, held, answers: [None, None] }
    }

    /// Asks the stores that have a lease and are of this phase; one call to each.
    async fn ask_stores(&self, renewing: &mut [Renewing<'_>], phase: Phase) {
        let batch = |side: Side| -> (Vec<usize>, Vec<Renewal>) {
            let is_asked =
                |one: &Renewing<'_>| rules::is_renewed(one.held.phase, phase, side) && one.entry.over().is_none();
            let asked = renewing.iter().enumerate().filter(|(_, one)| is_asked(one));
            asked.map(|(place, one)| (place, self.renewal_at(one, side))).unzip()
        };
        let [(old, to_old), (new, to_new)] = Side::ALL.map(batch);
        let call = async |side: Side, renewals: &[Renewal]| {
            if renewals.is_empty() { Vec::new() } else { self.pair.at(side).renew(renewals).await }
        };
        let (from_old, from_new) = tokio::join!(call(Side::Old, &to_old), call(Side::New, &to_new));
        for (side, places, answers) in [(Side::Old, old, from_old), (Side::New, new, from_new)] {
            for (place, answer) in places.into_iter().zip(answers) {
                renewing[place].answers[side.index()] = Some(answer);
            }
        }
    }

    /// Shows as what the lease is held once that is another phase than the stores show, and once the holder has another name.
    fn renewal_at(&self, one: &Renewing<'_>, side: Side) -> Renewal {
        let renamed = one.renewal.holder.as_ref().map(|holder| self.mark(holder, one.held.phase));
        let moved = || {
            let (holder, shown) = one.entry.shown()?;
            (shown != one.held.phase).then(|| self.mark(&holder, one.held.phase))
        };
        Renewal { claim: one.entry.at(side), holder: renamed.or_else(moved), ..one.renewal.clone() }
    }

    /// Puts together what the stores have said of one lease.
    fn said(&self, entry: &Entry, held: Held, depth: u32, answers: [Option<Result<Renewed>>; 2]) -> Result<Said> {
        let mut said = Said { ends: Vec::with_capacity(2), depth, first: held, failed: None, lost: None };
        for (side, answer) in Side::ALL.into_iter().zip(answers) {
            match answer {
                None => {}
                Some(Ok(Renewed::Held(hold))) => {
                    said.ends.push(self.pair.here(side, hold.until));
                    said.depth = hold.depth;
                    if held.fence == crate::Fence::NONE {
                        (said.first.fence, said.first.span) = (said.first.fence.max(hold.fence), hold.span);
                    }
                }
                // By now another renewal has taken it out of that store.
                Some(Ok(Renewed::Lost(_))) if entry.held().is_some_and(|now| !now.phase.uses(side)) => {
                    let why = "the phase of the migration has just changed";
                    said.failed = Some(Error::new(ErrorKind::Unavailable, why));
                }
                Some(Ok(Renewed::Lost(reason))) => said.lost = said.lost.or(Some(self.lost_at(entry, side, reason)?)),
                Some(Err(error)) => said.failed = Some(error),
            }
        }
        Ok(said)
    }

    /// Draws the consequences for one lease.
    async fn finish(&self, renewing: Renewing<'_>, phase: Phase) -> Result<Renewed> {
        let Renewing { renewal, entry, held, answers } = renewing;
        match entry.over() {
            // Nobody has said yet that it is not held any more (rule R6).
            Some(Over::Released) if entry.is_in_doubt() => {
                let why = "a release of it was not answered yet";
                return Err(Error::new(ErrorKind::Unavailable, why).unknown_effect());
            }
            Some(over) => return Ok(Renewed::Lost(over.reason())),
            None => {}
        }
        let Said { mut ends, depth, first, failed, lost } = self.said(&entry, held, renewal.depth, answers)?;
        if let Some(reason) = lost {
            self.lose(&entry, reason);
            return Ok(Renewed::Lost(reason));
        }
        if let Some(error) = failed {
            return Err(error);
        }
        if ends.is_empty() {
            let why = format!("the lock is held as of the phase {}, and the phase is {phase}", held.phase);
            return Err(Error::new(ErrorKind::Unavailable, why));
        }
        if let Some(missing) = rules::added(held.phase, phase) {
            ends.push(self.take_along(&entry, missing, renewal, first).await?);
        }
        let now = self.confirmed().await?;
        if !now.stands(phase, None) {
            return Err(Error::new(ErrorKind::Unavailable, "the phase of the migration has just changed"));
        }
        if let Some(holder) = name_of(&entry, renewal) {
            entry.show(&holder, held.phase);
        }
        let held = Held { phase, ..first };
        if !entry.hold(held, self.lapse(now.at)) {
            return Ok(Renewed::Lost(entry.over().map_or(LossReason::Gone, Over::reason)));
        }
        self.leave_behind(&entry, phase, renewal.ttl).await;
        if now.is_shadowed {
            let holder = || name_of(&entry, renewal).unwrap_or_else(HolderInfo::this_process);
            self.follow(&entry, renewal.ttl, holder);
        } else {
            self.shadow.end(&renewal.claim);
        }
        Ok(Renewed::Held(held.as_hold(&renewal.claim, self.deadline(ends, &now), depth)))
    }

    /// Adds the store that a lease of the phase before does not have yet. Its fence stays.
    async fn take_along(&self, entry: &Entry, side: Side, renewal: &Renewal, held: Held) -> Result<Moment> {
        let in_the_way = |what: &str| {
            let why = format!("the lock can't be taken along to the {side} store yet: {what}");
            Error::new(ErrorKind::Unavailable, why).unknown_effect()
        };
        self.check(side).await?;
        let bound = self.aside(renewal.ttl);
        // What follows it in the shadow would be in its own way.
        self.shadow.end_within(&renewal.claim, bound).await;
        let Some(asking) = entry.ask_at(side) else {
            // It is being taken along by another renewal, or a release from before is not answered yet.
            if entry.is_left_released(side) {
                self.drop_at(entry, side, bound).await;
            }
            return Err(in_the_way("an earlier request or release there was not answered"));
        };
        let holder = name_of(entry, renewal).unwrap_or_else(HolderInfo::this_process);
        let request = AcquireRequest {
            claim: asking.claim.clone(),
            ttl: renewal.ttl,
            // Those who have the old store never wait for the new one; so this can be waited for, and has its turn among them.
            wait: if side == Side::Old { bound } else { Duration::ZERO },
            order: Order::Any,
            fence: FenceRequest { floor: held.last_fence(), ..FenceRequest::default() },
            holder: self.mark(&holder, Phase::Both),
            from: None,
        };
        let answer = self.pair.at(side).acquire(&request).await;
        match answer {
            Ok(Attempt::Granted(_)) if entry.over().is_some() => {
                // A release may have overtaken this request: it is released once more, under the token that was asked for.
                drop(asking);
                self.drop_at(entry, side, bound).await;
                self.claims.settle(entry);
                Err(in_the_way("its hold has ended meanwhile"))
            }
            Ok(Attempt::Granted(hold)) => {
                asking.granted();
                Ok(self.pair.here(side, hold.until))
            }
            // A place in the queue of the old store is given up.
            Ok(Attempt::Contended(contention)) if !contention.burnt && !request.wait.is_zero() => {
                drop(asking);
                self.drop_at(entry, side, bound).await;
                Err(in_the_way("another holder has it there"))
            }
            Ok(Attempt::Contended(contention)) => {
                asking.refused(contention.burnt)?;
                Err(in_the_way("another holder has it there"))
            }
            Err(error) => {
                if error.effect() == Effect::None {
                    asking.refused(false)?;
                }
                Err(error)
            }
        }
    }

    /// Releases what a lease has at a store that is not of its phase any more; what can't be told in time is told with a later renewal.
    async fn leave_behind(&self, entry: &Entry, phase: Phase, ttl: Duration) {
        for side in Side::ALL.into_iter().filter(|side| !phase.uses(*side) && entry.is_at(*side)) {
            self.drop_at(entry, side, self.aside(ttl)).await;
        }
    }

    /// One store has the lease no more.
    fn lost_at(&self, entry: &Entry, side: Side, reason: LossReason) -> Result<LossReason> {
        // A lease that may have been cut short is one that the store may still have.
        if matches!(reason, LossReason::Gone | LossReason::Taken | LossReason::SessionEnded | LossReason::Revoked) {
            entry.gone_from(side)?;
        }
        Ok(reason)
    }

    /// A lease is lost that one store has no more. What the other one has of it stays until the holder has heard of that: then the core
    /// releases it, and again until that is answered.
    fn lose(&self, entry: &Entry, reason: LossReason) {
        entry.end(Over::Lost(reason));
        self.shadow.end(&entry.claim);
        self.claims.settle(entry);
    }
}

/// The holder's name as it is from this renewal on.
fn name_of(entry: &Entry, renewal: &Renewal) -> Option<HolderInfo> {
    renewal.holder.clone().or_else(|| entry.shown().map(|(holder, _)| holder))
}
