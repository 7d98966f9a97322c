//! Renewing: in the stores of the phase, and from one phase into the next (rules M3, M4 and M10).

use std::{sync::Arc, time::Duration};

use super::{
    claim::{Asking, Entry, Held},
    dual::{Confirmed, Dual},
    pair::aside,
    phase::{Phase, Side},
    rules,
};
use crate::{
    AcquireRequest, Attempt, Claim, Effect, Error, ErrorKind, FenceRequest, HolderInfo, LockStore, LossReason, Moment,
    Order, Renewal, Renewed, Result, store::join_all,
};

/// A renewal under way.
struct Renewing<'a> {
    renewal: &'a Renewal,
    entry: Arc<Entry>,
    held: Held,
    /// What the stores have said, by [`Side::index`], and of which claim.
    answers: [Option<(Claim, Result<Renewed>)>; 2],
}

/// A lease that goes on at the stores that were asked.
struct GoesOn {
    /// Until when it lasts: the earliest of the stores' ends.
    end: Moment,
    depth: u32,
    /// The grant, with its fence if that was not known.
    first: Held,
}

impl Dual {
    pub(super) async fn renew_in_phase(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        if renewals.is_empty() {
            return Vec::new();
        }
        let record = match self.confirmed().await {
            Ok(record) => record,
            Err(error) => return renewals.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut all_of_them: Vec<_> = renewals.iter().map(|renewal| self.begin(renewal, &record)).collect();
        self.ask_stores(&mut all_of_them, record.phase).await;
        self.finish(all_of_them, record.phase).await
    }

    fn begin<'a>(&self, renewal: &'a Renewal, record: &Confirmed) -> Renewing<'a> {
        let known = self.claims.get(&renewal.claim).and_then(|entry| entry.held().map(|held| (entry, held)));
        let (entry, held) = known.unwrap_or_else(|| {
            let held = Held { phase: record.phase, fence: crate::Fence::NONE, span: 1 };
            (Arc::new(Entry::assumed(renewal.claim.clone(), record.phase)), held)
        });
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
        let answered = [(Side::Old, old, to_old, from_old), (Side::New, new, to_new, from_new)];
        for (side, places, asked, answers) in answered {
            // A store that says nothing of a lease does not say that it has it.
            let answers = answers.into_iter().chain(std::iter::repeat_with(|| Err(Error::unanswered())));
            for ((place, asked), answer) in places.into_iter().zip(asked).zip(answers) {
                renewing[place].answers[side.index()] = Some((asked.claim, answer));
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
        let Renewal { ttl, depth, fence_floor, .. } = *one.renewal;
        Renewal { claim: one.entry.at(side), ttl, depth, fence_floor, holder: renamed.or_else(moved) }
    }

    /// Draws the consequences, by one look at the record that is later than all answers (rule M3). Most take no further call.
    async fn finish(&self, renewing: Vec<Renewing<'_>>, phase: Phase) -> Vec<Result<Renewed>> {
        let confirmed = &self.confirmed().await;
        join_all(renewing.into_iter().map(|one| self.finish_one(one, phase, confirmed))).await
    }

    async fn finish_one(&self, mut one: Renewing<'_>, phase: Phase, confirmed: &Result<Confirmed>) -> Result<Renewed> {
        let mut goes_on = match self.said(&mut one, phase)? {
            Ok(goes_on) => goes_on,
            Err(reason) => return Ok(Renewed::Lost(reason)),
        };
        let Renewing { renewal, entry, held, .. } = &one;
        let (mut confirmed, mut _asking) = (confirmed.clone(), None);
        if let Some(missing) = rules::added(held.phase, phase) {
            // Each lease has room for what it may have to do, and few change their stores.
            let (end, asking) = Box::pin(self.take_along(entry, missing, renewal, goes_on.first)).await?;
            (goes_on.end, _asking) = (goes_on.end.min(end), Some(asking));
            confirmed = self.confirmed().await;
        }
        let now = confirmed?;
        let answer = self.go_on(entry, renewal, goes_on, phase, &now)?;
        if matches!(answer, Renewed::Held(_)) {
            // What can't be told in time is told with a later renewal.
            for side in Side::ALL.into_iter().filter(|side| !phase.uses(*side)) {
                Box::pin(self.leave_at(entry, side, aside(renewal.ttl))).await;
            }
            self.shadow_it(entry, renewal, &now);
        }
        Ok(answer)
    }

    /// Puts together what the stores have said of one lease: it goes on, or is lost.
    fn said(&self, one: &mut Renewing<'_>, phase: Phase) -> Result<Result<GoesOn, LossReason>> {
        let (entry, held) = (&*one.entry, one.held);
        match entry.over() {
            // Nobody has said yet that it is not held any more (rule R6).
            Some(_) if entry.is_in_doubt() => {
                let why = "a release of it was not answered yet";
                return Err(Error::new(ErrorKind::Unavailable, why).unknown_effect());
            }
            Some(reason) => return Ok(Err(reason)),
            None => {}
        }
        let (mut end, mut depth, mut first) = (None, one.renewal.depth, held);
        let (mut failed, mut lost) = (None, None);
        for (side, answer) in Side::ALL.into_iter().zip(one.answers.each_mut().map(Option::take)) {
            let Some((claim, answer)) = answer else { continue };
            match answer {
                Ok(Renewed::Held(hold)) => {
                    let until = self.pair.here(side, hold.until);
                    end = Some(end.map_or(until, |end: Moment| end.min(until)));
                    depth = hold.depth;
                    if held.fence == crate::Fence::NONE {
                        (first.fence, first.span) = (first.fence.max(hold.fence), hold.span);
                    }
                }
                // By now another renewal has taken it out of that store, and perhaps along to it again.
                Ok(Renewed::Lost(_))
                    if entry.at(side) != claim || entry.held().is_some_and(|now| !now.phase.uses(side)) =>
                {
                    failed = Some(has_just_changed());
                }
                Ok(Renewed::Lost(reason)) => lost = lost.or(Some(lost_at(entry, side, &claim, reason)?)),
                Err(error) => failed = Some(error),
            }
        }
        if let Some(reason) = lost {
            self.lose(entry, reason);
            return Ok(Err(reason));
        }
        if let Some(error) = failed {
            return Err(error);
        }
        let end = end.ok_or_else(|| {
            let why = format!("the lock is held as of the phase {}, and the phase is {phase}", held.phase);
            Error::new(ErrorKind::Unavailable, why)
        })?;
        Ok(Ok(GoesOn { end, depth, first }))
    }

    /// What is held goes on as of this phase, if the record says so.
    fn go_on(
        &self,
        entry: &Entry,
        renewal: &Renewal,
        goes_on: GoesOn,
        phase: Phase,
        now: &Confirmed,
    ) -> Result<Renewed> {
        if !now.stands(phase, None) {
            return Err(has_just_changed());
        }
        let GoesOn { end, depth, first } = goes_on;
        entry.show_anew(renewal.holder.as_ref(), first.phase);
        let held = Held { phase, ..first };
        if !entry.hold(held, Some(first.phase), self.lapse(now.at)) {
            return entry.over().map(Renewed::Lost).ok_or_else(has_just_changed);
        }
        Ok(Renewed::Held(held.as_hold(&renewal.claim, self.deadline([end], now), depth)))
    }

    /// A lease that goes on is followed in the shadow, if there is one.
    fn shadow_it(&self, entry: &Entry, renewal: &Renewal, now: &Confirmed) {
        if now.is_shadowed {
            let holder = || name_of(entry, renewal).unwrap_or_else(HolderInfo::this_process);
            self.follow(entry, renewal.ttl, holder);
        } else {
            self.shadow.end(&renewal.claim);
        }
    }

    /// Adds the store that a lease of the phase before does not have yet. Its fence stays. Until the lease counts as held there, no other
    /// renewal is to take it along.
    async fn take_along<'e>(
        &self,
        entry: &'e Entry,
        side: Side,
        renewal: &Renewal,
        held: Held,
    ) -> Result<(Moment, Asking<'e>)> {
        let in_the_way = |what: &str| {
            let why = format!("the lock can't be taken along to the {side} store yet: {what}");
            Error::new(ErrorKind::Unavailable, why).unknown_effect()
        };
        self.check(side).await?;
        let bound = aside(renewal.ttl);
        // What follows it in the shadow would be in its own way.
        self.shadow.end_within(&renewal.claim, bound).await;
        let Some(mut asking) = entry.ask_at(side) else {
            if entry.held().is_some_and(|held| held.phase.uses(side)) {
                return Err(has_just_changed());
            }
            // It is being taken along by another renewal, or a release from before is not answered yet.
            if entry.is_left_released(side) {
                self.leave_at(entry, side, bound).await;
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
            keeps: false,
        };
        let answer = self.pair.at(side).acquire(&request).await;
        match answer {
            Ok(Attempt::Granted(_)) if entry.over().is_some() => {
                // A release may have overtaken this request: it is released once more, under the token that was asked for.
                drop(asking);
                self.leave_at(entry, side, bound).await;
                self.claims.settle(entry);
                Err(in_the_way("its hold has ended meanwhile"))
            }
            Ok(Attempt::Granted(hold)) => {
                asking.granted();
                Ok((self.pair.here(side, hold.until), asking))
            }
            Ok(Attempt::Contended(contention)) => {
                if contention.burnt || request.wait.is_zero() {
                    asking.refused(contention.burnt)?;
                } else {
                    // A place in the queue of the old store is given up, unless another renewal has got the lock by it meanwhile.
                    asking.granted();
                    drop(asking);
                    self.leave_at(entry, side, bound).await;
                }
                // It may be this very lock that is in the way, by an earlier request which arrived after its release.
                if let Some(unanswered) = entry.unanswered_at(side) {
                    drop(tokio::time::timeout(bound, self.pair.at(side).release(&unanswered)).await);
                }
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

    /// A lease is lost that one store has no more. What the other one has of it stays until the caller releases the claim: that this call
    /// is answered does not tell that its holder has heard.
    fn lose(&self, entry: &Entry, reason: LossReason) {
        entry.lose(reason);
        self.shadow.end(&entry.claim);
        self.claims.settle(entry);
    }
}

/// One store has the lease no more.
fn lost_at(entry: &Entry, side: Side, claim: &Claim, reason: LossReason) -> Result<LossReason> {
    // A lease that may have been cut short is one that the store may still have.
    if matches!(reason, LossReason::Gone | LossReason::Taken | LossReason::SessionEnded | LossReason::Revoked) {
        entry.gone_from(side, claim)?;
    }
    Ok(reason)
}

fn has_just_changed() -> Error {
    Error::new(ErrorKind::Unavailable, "the phase of the migration has just changed")
}

/// The holder's name as it is from this renewal on.
fn name_of(entry: &Entry, renewal: &Renewal) -> Option<HolderInfo> {
    renewal.holder.clone().or_else(|| entry.shown().map(|(holder, _)| holder))
}
