//! Acquiring: in one store, or in the old one first and then in the new one (rules M3, M4 and M7 to M9).

use std::time::Duration;

use super::{
    claim::{Entry, Held},
    dual::{Confirmed, Dual},
    phase::{Phase, Side},
    rules,
    shadow::is_own,
    tally::Answer,
};
use crate::{
    AcquireRequest, Attempt, Contention, Effect, Error, ErrorKind, Fence, FenceRequest, Hold, LockStore, Moment,
    Renewal, Renewed, Result, Token, Waiting, store::renew_one,
};

/// How often one call asks anew when the phase changed under it.
const ROUNDS: usize = 4;

/// How one round ended.
enum Ended {
    Answer(Attempt),
    /// The phase is another one by now. Nothing is left of the claim.
    PhaseChanged,
}

impl Dual {
    pub(super) async fn acquire_in_phase(&self, request: &AcquireRequest) -> Result<Attempt> {
        let record = self.confirmed().await?;
        let entry = self.claims.enter(&request.claim, record.at, self.lapse(record.at));
        if entry.over().is_some() {
            let why = "the claim was released: ask with a new token (rule R2)";
            return Err(if entry.is_nowhere() { Error::invalid(why) } else { lost() });
        }
        if entry.held().is_some() {
            return self.repeat(request).await;
        }
        let answer = self.rounds(request, &entry, record).await;
        if !matches!(answer, Ok(Attempt::Granted(_))) {
            self.claims.settle(&entry);
        }
        // What is left is for the caller to release, and a token that was released is not to be asked for again: it is told of both
        // by the effect.
        match answer {
            Err(error) if error.effect() == Effect::None && (!entry.is_nowhere() || entry.is_burnt()) => {
                Err(error.unknown_effect())
            }
            answer => answer,
        }
    }

    async fn rounds(&self, request: &AcquireRequest, entry: &Entry, mut record: Confirmed) -> Result<Attempt> {
        let (give_up, mut wait) = (record.at + request.wait, request.wait);
        for _ in 0..ROUNDS {
            let ended = match record.phase {
                Phase::Both => self.in_both(request, entry, &record, wait).await?,
                Phase::Old => self.in_one(Side::Old, request, entry, &record, wait).await?,
                Phase::New => self.in_one(Side::New, request, entry, &record, wait).await?,
            };
            match ended {
                Ended::Answer(answer) => return Ok(answer),
                Ended::PhaseChanged => {
                    record = self.confirmed().await?;
                    wait = give_up.since(record.at);
                }
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "the phase of the migration changed again and again"))
    }

    /// One round in a phase in which a lock is in one store.
    async fn in_one(
        &self,
        side: Side,
        request: &AcquireRequest,
        entry: &Entry,
        record: &Confirmed,
        wait: Duration,
    ) -> Result<Ended> {
        let hold = match self.ask_first(side, request, entry, record, wait).await? {
            Ok(hold) => hold,
            Err(ended) => return Ok(ended),
        };
        let now = self.confirmed().await?;
        if !now.stands(record.phase, Some(hold.fence)) {
            return self.start_over(entry).await;
        }
        let held = Held { phase: record.phase, fence: hold.fence, span: hold.span };
        let granted = self.granted(request, entry, held, &[self.pair.here(side, hold.until)], &now)?;
        if now.is_shadowed {
            self.follow(entry, request.ttl, || request.holder.clone());
        }
        Ok(granted)
    }

    /// One round in the phase in which a lock is in both stores. The old store may be waited for; the new one never is while the
    /// old one is held, or two could wait for each other (rule M9).
    async fn in_both(
        &self,
        request: &AcquireRequest,
        entry: &Entry,
        record: &Confirmed,
        wait: Duration,
    ) -> Result<Ended> {
        let first = match self.ask_first(Side::Old, request, entry, record, wait).await? {
            Ok(hold) => hold,
            Err(ended) => return Ok(ended),
        };
        let below = rules::floor_after(first.fence);
        let (asked, second) =
            (self.pair.now(), self.ask(Side::New, request, entry, below, Duration::ZERO, Phase::Both).await);
        match &second {
            Ok(Attempt::Granted(_)) => self.shadow.answers.note(Answer::Granted(self.pair.now().since(asked))),
            Ok(Attempt::Contended(contention)) if is_own(contention.holder.as_ref(), &self.first.id) => {}
            Ok(Attempt::Contended(_)) => self.shadow.answers.note(Answer::Refused),
            Err(_) => self.shadow.answers.note(Answer::Failed),
        }
        let second = match second? {
            Attempt::Granted(hold) => hold,
            Attempt::Contended(mut contention) => {
                // Those who hold it there are few and go on soon: they take the lock with them into this phase, or are
                // about to give way.
                contention.retry_after = Some(pause(request.ttl)?);
                return self.refused(entry, contention, record).await;
            }
        };
        let held = Held { phase: Phase::Both, fence: second.fence, span: second.span };
        let mut ends = [self.pair.here(Side::Old, first.until), self.pair.here(Side::New, second.until)];
        let last = first.fence.offset(first.span.saturating_sub(1));
        if rules::needs_raise(last, held.last_fence()) {
            match self.raise(request, entry, held).await? {
                // A renewal extends what is there, and makes nothing: the lock was held without a gap.
                Some(raised) => ends[0] = self.pair.here(Side::Old, raised.until),
                None => return self.start_over(entry).await,
            }
        }
        let now = self.confirmed().await?;
        if !now.stands(Phase::Both, Some(held.fence)) {
            return self.start_over(entry).await;
        }
        self.granted(request, entry, held, &ends, &now)
    }

    /// Asks the store that may be waited for, for a fence above the floor (rule M7).
    async fn ask_first(
        &self,
        side: Side,
        request: &AcquireRequest,
        entry: &Entry,
        record: &Confirmed,
        wait: Duration,
    ) -> Result<std::result::Result<Hold, Ended>> {
        let floor = request.fence.floor.max(record.floor);
        match self.ask(side, request, entry, floor, wait, record.phase).await? {
            Attempt::Granted(hold) => Ok(Ok(hold)),
            Attempt::Contended(contention) => self.refused(entry, contention, record).await.map(Err),
        }
    }

    /// Asks one store.
    async fn ask(
        &self,
        side: Side,
        request: &AcquireRequest,
        entry: &Entry,
        floor: Fence,
        wait: Duration,
        phase: Phase,
    ) -> Result<Attempt> {
        self.check(side).await?;
        let Some(mut asking) = entry.ask_at(side) else {
            let why = "the claim is being asked for by another call, or a release of it was not answered yet";
            return Err(Error::new(ErrorKind::Unavailable, why).unknown_effect());
        };
        let store = self.pair.at(side);
        // A store that keeps places in a queue is waited for as long as it may be; at others the phase is looked at now and then.
        let queues = store.info().capability.waiting == Waiting::Queue;
        let most = if queues { wait } else { self.first.fresh };
        let asked = AcquireRequest {
            claim: asking.claim.clone(),
            ttl: request.ttl,
            wait: wait.min(most),
            order: request.order,
            fence: FenceRequest { floor, ..request.fence },
            holder: self.mark(&request.holder, phase),
            from: request.from,
            keeps: request.keeps,
        };
        entry.show(&request.holder, phase);
        let answer = store.acquire(&asked).await;
        match &answer {
            Ok(Attempt::Granted(_)) => asking.granted(),
            Ok(Attempt::Contended(contention)) if contention.burnt => asking.refused(true)?,
            // A place in a queue is given up by `refused`.
            Ok(Attempt::Contended(_)) if !queues || asked.wait.is_zero() => asking.refused(false)?,
            Err(error) if error.effect() == Effect::None => asking.refused(false)?,
            Ok(_) | Err(_) => {}
        }
        answer
    }

    /// Another has the lock, unless the phase has changed.
    async fn refused(&self, entry: &Entry, contention: Contention, record: &Confirmed) -> Result<Ended> {
        self.undo(entry).await?;
        if self.confirmed().await?.phase != record.phase {
            return Ok(Ended::PhaseChanged);
        }
        let holder = contention.holder.map(|holder| self.unmark(&holder));
        Ok(Ended::Answer(Attempt::Contended(Contention { holder, burnt: true, ..contention })))
    }

    /// What was granted does not stand in the phase that it is by now, or lies at or below its floor.
    async fn start_over(&self, entry: &Entry) -> Result<Ended> {
        self.undo(entry).await?;
        Ok(Ended::PhaseChanged)
    }

    /// Releases what an attempt got, in reverse.
    ///
    /// # Errors
    /// Of unknown effect, if a store could not be told: the core releases the claim then.
    async fn undo(&self, entry: &Entry) -> Result<()> {
        for side in Side::ALL.into_iter().rev().filter(|side| entry.is_at(*side)) {
            let claim = entry.release_at(side);
            self.pair.at(side).release(&claim).await.map_err(Error::unknown_effect)?;
            entry.released(side, &claim)?;
        }
        Ok(())
    }

    /// Raises the old store's counter to what the new store granted, while the lock is held there (rule M8); `None` if it is not
    /// any more.
    async fn raise(&self, request: &AcquireRequest, entry: &Entry, held: Held) -> Result<Option<Hold>> {
        let renewal =
            Renewal { fence_floor: Some(held.last_fence()), ..Renewal::new(entry.at(Side::Old), request.ttl) };
        match renew_one(&**self.pair.at(Side::Old), renewal).await? {
            Renewed::Held(hold) => Ok(Some(hold)),
            Renewed::Lost(_) => Ok(None),
        }
    }

    /// What the stores grant until `ends` stands, by what was confirmed after their answers.
    fn granted(
        &self,
        request: &AcquireRequest,
        entry: &Entry,
        held: Held,
        ends: &[Moment],
        now: &Confirmed,
    ) -> Result<Ended> {
        if !entry.hold(held, None, self.lapse(now.at)) {
            let why = "the claim was released while it was asked for";
            return Err(Error::new(ErrorKind::Unavailable, why).unknown_effect());
        }
        let until = self.deadline(ends.iter().copied(), now);
        Ok(Ended::Answer(Attempt::Granted(held.as_hold(&request.claim, until, 1))))
    }

    /// The same claim again (rule R1): the grant goes on.
    async fn repeat(&self, request: &AcquireRequest) -> Result<Attempt> {
        let renewal = Renewal::new(request.claim.clone(), request.ttl);
        match self.renew_in_phase(&[renewal]).await.pop() {
            Some(Ok(Renewed::Held(hold))) => Ok(Attempt::Granted(hold)),
            Some(Err(error)) => Err(error.unknown_effect()),
            // One of the stores may still have it, and that is for the caller to release.
            Some(Ok(Renewed::Lost(_))) | None => Err(lost()),
        }
    }
}

fn lost() -> Error {
    let why = "the lease is lost: release the claim, and ask with a new token (rule R2)";
    Error::new(ErrorKind::Unavailable, why).unknown_effect()
}

/// How long to stay away from a lock that is held at the new store alone: at random, so that of several that do, each gets its
/// chance, and a holder that has to add the old store finds that free.
fn pause(ttl: Duration) -> Result<Duration> {
    let most = (ttl / 8).clamp(Duration::from_millis(20), Duration::from_millis(500));
    Ok(most / 4 + most * 3 / 4 * u32::from(Token::random()?.as_bytes()[0]) / 255)
}
