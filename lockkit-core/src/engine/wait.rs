//! Getting a lease: the local queue first, then the store, until it is granted, the caller's time is up, or the
//! store has been out of reach for too long.

use std::{sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};

use super::{
    Engine, Lease,
    ask::{Ask, Limit},
    backoff::Backoff,
    closed,
    doubts::{Doubts, late_grant},
    lease::useful,
    reaper::Undo,
    seat::Seat,
    turn::LocalOutcome,
};
use crate::{
    AcquireRequest, Attempt, Claim, Contention, Effect, Error, ErrorKind, Event, Hold, LockKey, Moment, Order, Result,
    Token, Waiting, store::PLACE,
};

/// After being misled so often in a row, a claim pauses before it looks at the lock again: a server that has just taken over from another
/// grants nothing for a while, and shows no holder.
const MISLED: u32 = 10;

/// The longest wait that is asked of a store at once.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// One acquisition and what its requests led to so far.
struct Acquisition<'a> {
    engine: &'a Arc<Engine>,
    ask: &'a Ask,
    limit: Limit,
    /// The place at the head of the local queue, if it has one.
    seat: Option<&'a Seat>,
    backoff: Backoff,
    /// Since when the store gave nothing but errors.
    failing_since: Option<Moment>,
    /// How often in a row a lock looked free that was not held since it was refused.
    misled: u32,
    doubts: &'a mut Doubts,
    /// Until when an earlier request for the claim that is granted may take effect once more.
    asked_again_until: Option<Moment>,
}

/// What to do after one call.
enum Step {
    Done(Hold),
    GiveUp,
    /// Ask again with the same token.
    Again(Pause),
    /// Ask again with a new token: this one is burnt (rule R2).
    Afresh(Pause),
    /// Others went past, because this was not polled for too long, and had its claim released.
    Overtaken,
}

/// What came of asking the store.
enum Asked {
    Granted(Arc<Lease>),
    GaveUp,
    Overtaken,
}

/// What to wait for before asking again.
enum Pause {
    For(Duration),
    /// Until the lock is seen to be free, or for so long.
    UntilFree(Duration),
}

impl Engine {
    /// Gets a lease; `None` if the caller's time was up while another had the lock.
    pub(crate) async fn acquire(
        self: &Arc<Self>,
        ask: &Ask,
        limit: Limit,
        doubts: &mut Doubts,
    ) -> Result<Option<Arc<Lease>>> {
        let is_possible = self.check_open().and_then(|()| self.check_backlog()).and_then(|()| self.check(ask));
        is_possible.map_err(|error| doubts.leave_open(error))?;
        let start = self.now();
        let mut in_doubt = doubts.latest().is_some();
        loop {
            let seat = match self.queue_up(ask, limit, start).await.map_err(|error| doubts.leave_open(error))? {
                LocalOutcome::Ask(seat) => seat,
                LocalOutcome::Granted(lease) => {
                    self.note_granted(&lease, start, true);
                    return Ok(Some(lease));
                }
                // It may have been held by a claim of this caller when others of this process saw that.
                LocalOutcome::Contended if in_doubt => None,
                LocalOutcome::Contended => return Ok(None),
            };
            let asked = self.ask_store(ask, limit, start, seat, doubts).await;
            match asked.map_err(|error| doubts.leave_open(error))? {
                Asked::Granted(lease) => return Ok(Some(lease)),
                Asked::GaveUp => return Ok(None),
                Asked::Overtaken => doubts.overtaken(),
            }
            // Others may have heard since the start that the lock is held, and it was by the claim that was overtaken.
            in_doubt = true;
        }
    }

    /// Asks the store as the head of the local queue, if there is one.
    async fn ask_store(
        self: &Arc<Self>,
        ask: &Ask,
        limit: Limit,
        start: Moment,
        seat: Option<Seat>,
        doubts: &mut Doubts,
    ) -> Result<Asked> {
        // From before the look at whether it is open, so that a shutdown is not missed.
        let closing = self.closing.notified();
        self.check_open()?;
        if seat.is_some() {
            let now = self.now();
            let keep_back = self.queues.yielded(&ask.key, now);
            let keep_back = limit.left(now).map_or(keep_back, |left| left.min(keep_back));
            if !keep_back.is_zero() {
                sleep(keep_back).await;
            }
        }
        let mut asking = Acquisition {
            engine: self,
            ask,
            limit,
            seat: seat.as_ref(),
            backoff: Backoff::new(Duration::from_millis(10), Duration::from_millis(500)),
            // The errors that others of this process got count, but nobody has less patience for having come late.
            failing_since: self
                .queues
                .look(&ask.key, |queue| queue.failing_since())
                .flatten()
                .map(|since| since.max(start)),
            doubts,
            misled: 0,
            asked_again_until: None,
        };
        let end = tokio::select! {
            biased;
            // Polled first: the claim of an acquisition that was overtaken was released, and what it asked for after that would stay at the store.
            () = self.until_overtaken(seat.as_ref()) => Ok(Step::Overtaken),
            end = asking.run() => end,
            // A request may be under way.
            () = closing => Err(closed().unknown_effect()),
            never = self.stay_at_head(seat.as_ref()) => match never {},
        };
        let asked_again_until = asking.asked_again_until;
        Ok(match end? {
            Step::Done(hold) => {
                let lease = self.admit(hold, ask.terms, seat);
                lease.state().asked_again_until = asked_again_until;
                self.note_granted(&lease, start, false);
                Asked::Granted(lease)
            }
            Step::Overtaken => Asked::Overtaken,
            Step::GiveUp | Step::Again(_) | Step::Afresh(_) => Asked::GaveUp,
        })
    }

    /// Refuses what this store can't do, before anything is sent.
    fn check(&self, ask: &Ask) -> Result<()> {
        let info = self.store.info();
        let most = info.capability.max_key_bytes;
        let refused = if ask.key.as_str().len() > most {
            Err(Error::invalid(format!("names have at most {most} bytes on this store")))
        } else {
            ask.terms.check(ask.mode, ask.order, info)
        };
        refused.map_err(|e| e.at("acquire", Some(&ask.key), &info.name))
    }

    /// One call to the store for an acquisition, bounded by the caller's limit.
    pub(super) async fn within<T>(
        &self,
        limit: Limit,
        key: &LockKey,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        match limit {
            // They need no timer.
            Limit::Try | Limit::Forever => call.await,
            Limit::Until(..) | Limit::TryWithin(..) => {
                timeout(limit.hard(self.now()), call).await.unwrap_or_else(|_| {
                    let error = Error::new(ErrorKind::TimedOut, "no answer within the caller's time").unknown_effect();
                    Err(error.at("acquire", Some(key), &self.store.info().name))
                })
            }
        }
    }

    /// Whether enough is left of a lease, asked for with this ttl, to be worth having.
    pub(super) fn is_useful(&self, hold: &Hold, ttl: Duration, now: Moment) -> bool {
        // A session may give less than was asked for.
        let has_session = self.store.info().capability.liveness.session.is_some();
        hold.until.since(now) >= useful(if has_session { Duration::ZERO } else { ttl })
    }

    pub(super) fn note_granted(&self, lease: &Lease, start: Moment, handed_over: bool) {
        let waited = lease.since.since(start);
        self.observe(|| Event::Acquired { key: &lease.claim.key, fence: lease.fence, waited, handed_over });
    }
}

impl Acquisition<'_> {
    async fn run(&mut self) -> Result<Step> {
        loop {
            match self.with_one_token().await? {
                Step::Again(pause) | Step::Afresh(pause) => self.pause(pause, None).await,
                end => return Ok(end),
            }
        }
    }

    /// Asks for one claim, until it is granted, given up or its token is burnt. What is left of the claim then is released
    /// in the background from the moment on which this returns.
    async fn with_one_token(&mut self) -> Result<Step> {
        let claim = Claim { key: self.ask.key.clone(), token: Token::random()?, mode: self.ask.mode };
        let mut undo = self.engine.undo(&claim, self.lasts());
        self.engine.check_open()?;
        self.doubts.asks(claim.token, &undo);
        loop {
            let sent = self.engine.now();
            let Some(span) = self.span(claim.token) else { return Ok(Step::Overtaken) };
            let request = self.request(claim.clone(), span, sent);
            let doubt = self.doubts.latest();
            undo.arm(self.keeps_place() && !request.wait.is_zero());
            let call = self.engine.store.acquire(&request);
            let answer = self.engine.within(self.limit, &self.ask.key, call).await;
            let answer = self.engine.heard_of(&request, sent, answer);
            self.tell_others(&answer, sent, doubt.is_some());
            match self.judge(&request, answer, &mut undo)? {
                Step::Again(pause) => self.pause(pause, self.keeps_place().then_some(claim.token)).await,
                Step::GiveUp => {
                    // A place in the store's queue would be in the way of this process's next try.
                    undo.release_within(self.limit.hard(self.engine.now())).await;
                    // The store may have looked while an earlier claim was in the way. If that is over, it looks once more.
                    let once_more = || Ok(Step::Afresh(Pause::For(Duration::ZERO)));
                    return if doubt.is_none() {
                        Ok(Step::GiveUp)
                    } else {
                        self.doubts.latest().map_or_else(once_more, Err)
                    };
                }
                step => return Ok(step),
            }
        }
    }

    /// Waits, possibly in a queue at the store, by the token of the claim.
    async fn pause(&mut self, pause: Pause, queued: Option<Token>) {
        match pause {
            Pause::For(time) => sleep(time).await,
            Pause::UntilFree(limit) => {
                let waiter = (self.ask.mode, queued);
                let looked_free = self.engine.until_free(&self.ask.key, waiter, limit).await;
                self.misled = if looked_free { self.misled.saturating_add(1) } else { 0 };
            }
        }
    }

    /// How many fences to ask for; `None` if others went past.
    fn span(&self, token: Token) -> Option<u32> {
        let Some(seat) = self.seat else { return Some(1) };
        let (asked, times) = ((token, self.lasts()), self.engine.settings.hand_over.times);
        self.engine.queues.at(seat, |queue, _| queue.asks(asked, times))
    }

    fn request(&self, claim: Claim, span: u32, now: Moment) -> AcquireRequest {
        let mut request = AcquireRequest::new(claim, self.ask.terms.ttl, self.engine.settings.holder.clone());
        request.wait = self.limit.left(now).unwrap_or(LONGEST_WAIT).min(self.longest_wait());
        request.order = self.ask.order;
        (request.fence.floor, request.fence.span) = (self.ask.terms.fence_above, span);
        request
    }

    /// A store that is well again says nothing while it waits. After an error it is to be heard before patience would be over, or
    /// the next error would seem to come of the same outage.
    fn longest_wait(&self) -> Duration {
        let hears_soon = |_| (self.engine.settings.patience / 2).clamp(Duration::from_millis(1), LONGEST_WAIT);
        self.failing_since.map_or(LONGEST_WAIT, hears_soon)
    }

    /// What the store said counts for those, too, who wait in the local queue.
    fn tell_others(&self, answer: &Result<Attempt>, sent: Moment, in_doubt: bool) {
        if !self.ask.queues_locally() {
            return;
        }
        let now = self.engine.now();
        self.engine.queues.look(&self.ask.key, |queue| match answer {
            Ok(Attempt::Contended(_)) if !in_doubt => queue.heard_held(sent),
            Ok(Attempt::Contended(_)) => queue.heard_in_doubt(),
            Ok(Attempt::Granted(_)) => {}
            // It is about what this caller asked for.
            Err(error) if error.kind() == ErrorKind::InvalidInput => {}
            Err(error) => queue.heard_error(error, now),
        });
    }

    fn judge(&mut self, request: &AcquireRequest, answer: Result<Attempt>, undo: &mut Undo<'_>) -> Result<Step> {
        let now = self.engine.now();
        match answer {
            Ok(Attempt::Granted(hold)) => {
                if self.engine.is_useful(&hold, self.ask.terms.ttl, now) {
                    // In one step with the look at it: from here on nobody goes past.
                    if self.seat.is_some_and(|seat| {
                        self.engine.queues.at(seat, |queue, now| queue.granted(hold.span, now)).is_none()
                    }) {
                        return Ok(Step::Overtaken);
                    }
                    self.asked_again_until = undo.granted();
                    return Ok(Step::Done(hold));
                }
                // Too late to be of use. The armed undo releases it, which burns the token.
                let late = late_grant();
                self.doubts.add(&late, undo);
                self.failed(late, now).map(Step::Afresh)
            }
            Ok(Attempt::Contended(contention)) => {
                self.failing_since = None;
                if request.wait.is_zero() || !self.keeps_place() {
                    undo.unchanged();
                } else {
                    undo.has_place();
                }
                if self.limit.is_over(now) {
                    return Ok(Step::GiveUp);
                }
                let pause = self.after_contention(&contention, now);
                // Only a place in a queue is worth a token that was refused: what a store of several parts undoes after its
                // refusal may arrive late.
                let keeps_token = self.keeps_place() && !contention.burnt;
                Ok(if keeps_token { Step::Again(pause) } else { Step::Afresh(pause) })
            }
            Err(error) if error.effect() == Effect::None => {
                undo.unchanged();
                let pause = self.failed(error.clone(), now);
                if pause.is_err() && undo.is_armed() {
                    self.doubts.add(&error, undo);
                }
                pause.map(Step::Again)
            }
            Err(error) => {
                undo.in_doubt();
                let pause = self.failed(error.clone(), now);
                // Only a place in a queue is worth asking with the same token: anywhere else its release can be sent now.
                if self.keeps_place() && pause.is_ok() {
                    return pause.map(Step::Again);
                }
                self.doubts.add(&error, undo);
                pause.map(Step::Afresh)
            }
        }
    }

    /// How long to wait before asking again after an error, or the error if the caller should have it.
    fn failed(&mut self, error: Error, now: Moment) -> Result<Pause> {
        let since = *self.failing_since.get_or_insert(now);
        let patience = self.engine.settings.patience;
        let worn_out = now.since(since) >= patience;
        if worn_out && error.is_retryable() && self.seat.is_some() {
            self.engine.queues.give_up(&self.ask.key, &error, patience);
        }
        if !error.is_retryable() || worn_out || self.limit.is_over(now) {
            return Err(error);
        }
        self.engine.check_open()?;
        let pause = self.backoff.pause().min((since + patience).since(now));
        Ok(Pause::For(self.within_limit(pause, now)))
    }

    /// What to do after `Contended`. A store that waits natively was waited for already, unless it gives another time. A claim with a place
    /// is asked for again before that ends, whatever the store says.
    fn after_contention(&mut self, contention: &Contention, now: Moment) -> Pause {
        let longest = if self.keeps_place() { PLACE / 3 } else { Duration::MAX };
        match (self.waiting(), contention.retry_after) {
            (Waiting::Poll, lapse) => {
                let lapse = lapse.map_or(LONGEST_WAIT, |lapse| lapse.saturating_add(Duration::from_millis(1)));
                if self.misled >= MISLED {
                    // It looks once more after the pause: others may hold the lock by then.
                    self.misled -= 1;
                    let pause = self.backoff.pause().min(lapse).min(longest);
                    return Pause::For(self.within_limit(pause, now));
                }
                Pause::UntilFree(self.within_limit(lapse.min(longest), now))
            }
            (Waiting::Notify | Waiting::Queue, after) => {
                let pause = after.unwrap_or_else(|| self.backoff.pause());
                Pause::For(self.within_limit(pause.min(longest), now))
            }
        }
    }

    fn within_limit(&self, pause: Duration, now: Moment) -> Duration {
        self.limit.left(now).map_or(pause, |left| pause.min(left))
    }

    /// Whether the store keeps a place for the claim until it is released (rule R3).
    fn keeps_place(&self) -> bool {
        self.ask.order == Order::Fifo || self.waiting() == Waiting::Queue
    }

    /// For how long something of a request may be left at the store: a lease, or a place, which may last longer.
    fn lasts(&self) -> Duration {
        let (ttl, has_place) = (self.ask.terms.ttl, self.keeps_place() && !self.limit.is_try());
        if has_place { ttl.max(PLACE) } else { ttl }
    }

    fn waiting(&self) -> Waiting {
        self.engine.store.info().capability.waiting
    }
}
