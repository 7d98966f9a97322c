//! Waiting in the local queue: for the head of it, for the lease itself, or for what may be said when the time is up.

use std::{convert::Infallible, pin::pin, sync::Arc, task::Poll, time::Duration};

use tokio::time::sleep;

use super::{
    Engine, Lease,
    ask::{Ask, Limit},
    closed,
    hand_over::Turn,
    local::LocalWaiter,
    queue::{NotYet, OVERDUE, Verdict},
    reaper::{Certainty, PendingRelease},
    seat::Seat,
};
use crate::{Error, ErrorKind, Moment, Result};

/// How waiting in the local queue ended.
pub(super) enum LocalOutcome {
    /// Ask the store. Without a seat where there is no queue, or where only the store can tell whether the lock is held.
    Ask(Option<Seat>),
    /// A holder of this process handed its lease over.
    Granted(Arc<Lease>),
    /// The time is up, and the lock was held by another.
    Contended,
}

impl Engine {
    /// Waits for the head of the local queue, or for the lease itself.
    pub(super) async fn queue_up(self: &Arc<Self>, ask: &Ask, limit: Limit, start: Moment) -> Result<LocalOutcome> {
        if !ask.queues_locally() {
            return Ok(LocalOutcome::Ask(None));
        }
        if limit.is_try() {
            let seat = self.queues.try_enter(&ask.key);
            return if seat.is_some() { Ok(LocalOutcome::Ask(seat)) } else { self.time_is_up(ask, start) };
        }
        loop {
            let place = match self.queues.enter(&ask.key, ask.terms) {
                Ok(seat) => return Ok(LocalOutcome::Ask(Some(seat))),
                Err(place) => place,
            };
            match self.turn(place, limit).await? {
                None => return self.time_is_up(ask, start),
                Some(Turn::Fail(error)) => return Err(error),
                Some(Turn::Ask(seat)) if self.queues.touch(&seat, None) => return Ok(LocalOutcome::Ask(Some(seat))),
                // This future was not polled for so long that it was overtaken, or the lease ran out.
                Some(Turn::Ask(_)) => {}
                Some(Turn::Take(handed)) => {
                    self.check_open()?;
                    if let Some(lease) = handed.accept() {
                        return Ok(LocalOutcome::Granted(lease));
                    }
                }
            }
        }
    }

    /// Waits until this place is up; `None` if the time is.
    async fn turn(self: &Arc<Self>, mut place: LocalWaiter, limit: Limit) -> Result<Option<Turn>> {
        let mut closing = pin!(self.closing.notified());
        self.check_open()?;
        // The home may have ended, and with it the renewals of the lease that is waited for.
        drop(self.home());
        let mut pause = OVERDUE;
        loop {
            let left = limit.left(self.now()).unwrap_or(Duration::MAX);
            tokio::select! {
                biased;
                turn = place.turn() => {
                    return turn.map(Some).ok_or_else(|| Error::new(ErrorKind::Closed, "the locker was dropped"));
                }
                () = &mut closing => return Err(closed()),
                () = sleep(left.min(pause)) => {}
            }
            if limit.is_over(self.now()) {
                return Ok(None);
            }
            match self.overtake(&place) {
                Ok(seat) => return Ok(Some(Turn::Ask(seat))),
                Err(later) => pause = later.since(self.now()),
            }
        }
    }

    /// Goes past a head that is not polled: the seat, or else when to look again.
    fn overtake(self: &Arc<Self>, place: &LocalWaiter) -> Result<Seat, Moment> {
        let now = self.now();
        let release = |claim, ttl| {
            self.reap(PendingRelease::new(claim, self.lapse_of(ttl), Certainty::Doubtful, None), None);
        };
        place.overtake(now, release).map_err(|not_yet| match not_yet {
            NotYet::Before(later) => later,
            NotYet::Wake(waker) => {
                waker.wake();
                now + OVERDUE
            }
            NotYet::Lease(lease) => {
                self.look(&lease);
                self.take_back(&lease);
                now + OVERDUE
            }
        })
    }

    /// What may be said of a lock for which somebody waited in vain since `start`. That others of this process stand before
    /// it is no answer (rule R6): they may be asking a store that is away.
    fn time_is_up(self: &Arc<Self>, ask: &Ask, start: Moment) -> Result<LocalOutcome> {
        if let Some(lease) = self.queues.look(&ask.key, |queue| queue.held()).flatten() {
            self.look(&lease);
        }
        match self.queues.look(&ask.key, |queue| queue.verdict(start)).unwrap_or(Verdict::Unknown) {
            Verdict::Contended => Ok(LocalOutcome::Contended),
            Verdict::Failed(error) => Err(error),
            Verdict::Unknown => Ok(LocalOutcome::Ask(None)),
        }
    }

    /// Ends when another acquisition has overtaken the head. It looks each time that it is polled but the first: by then the head has asked
    /// for nothing yet, and most heads are granted the lock at that first poll.
    pub(super) async fn until_overtaken(&self, seat: Option<&Seat>) {
        let Some(seat) = seat else { return std::future::pending().await };
        let mut is_first = true;
        std::future::poll_fn(|_| {
            let is_in_force = std::mem::take(&mut is_first) || self.queues.touch(seat, None);
            if is_in_force { Poll::Pending } else { Poll::Ready(()) }
        })
        .await;
    }

    /// Shows those behind it that the head of the queue is polled, each time that it is.
    pub(super) async fn stay_at_head(&self, seat: Option<&Seat>) -> Infallible {
        let Some(seat) = seat else { return std::future::pending().await };
        let _gone = WakerGuard { engine: self, seat };
        std::future::poll_fn(|context| {
            self.queues.touch(seat, Some(context.waker().clone()));
            Poll::Pending
        })
        .await
    }
}

/// Takes the waker of a head back that does not ask any more.
struct WakerGuard<'a> {
    engine: &'a Engine,
    seat: &'a Seat,
}

impl Drop for WakerGuard<'_> {
    fn drop(&mut self) {
        self.engine.queues.touch(self.seat, None);
    }
}
