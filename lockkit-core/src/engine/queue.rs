//! The local queue of one lock: who waits, who is at its head, and what is known of the lock meanwhile. Decisions only;
//! nothing here waits, wakes or reads a clock.

use std::{
    collections::VecDeque,
    sync::{Arc, Weak},
    task::Waker,
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    ask::Terms,
    hand_over::{HandOver, Turn},
    lease::Lease,
};
use crate::{Error, Moment, Token};

/// How long a head may go without being polled before those behind it wake it, and how long after that before they pass: an
/// acquisition in a `select!` may be kept and not polled for as long as it pleases its owner. Each further one in the queue
/// waits for as long again, so that an acquisition that is polled gets past any number of those that are not: past k of them within
/// 2 (k + 1) times as long, for each is woken first.
pub(super) const OVERDUE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(super) struct LocalQueue {
    waiters: VecDeque<Waiter>,
    /// The number of the seat in force. The holder of any other one was overtaken.
    seat: u64,
    head: Head,
    /// What the head asks the store for, and with which ttl.
    asked: Option<(Token, Duration)>,
    /// When the store was last heard to say that the lock is held.
    held_at: Option<Moment>,
    failing: Option<Failing>,
    /// Consecutive holders of this process, and when the first of them got the lease.
    run: u32,
    run_since: Option<Moment>,
    /// How often the last grant was handed over.
    handed: u32,
    /// How many fences beyond its own the next grant may take.
    fences: u32,
}

#[derive(Debug)]
pub(crate) struct Waiter {
    id: u64,
    since: Moment,
    pub(crate) terms: Terms,
    pub(crate) wake: oneshot::Sender<Turn>,
}

/// What the head of the queue is at.
#[derive(Debug)]
enum Head {
    /// It is up, asks the store, or gives the lock back; when it was last seen at it, and how to have it polled.
    Asks(Moment, Option<Waker>),
    /// The lease is on its way to it, since this moment.
    IsHanded(Weak<Lease>, Moment),
    /// It has this lease.
    Holds(Weak<Lease>),
}

/// The last that is known of the store is an error.
#[derive(Debug)]
struct Failing {
    /// Since when it has given nothing else, unless it has answered something that says nothing of the lock.
    since: Option<Moment>,
    last: Moment,
    error: Error,
}

/// What somebody may say whose time is up.
#[derive(Debug)]
pub(super) enum Verdict {
    /// The lock was held by another.
    Contended,
    /// The store did not answer.
    Failed(Error),
    /// Neither is known: it has to ask for itself.
    Unknown,
}

/// Why somebody that has waited for long may not overtake the head yet, and what to do instead.
#[derive(Debug)]
pub(super) enum NotYet {
    /// Nothing before this moment.
    Before(Moment),
    /// Wake the head, which shows whether it is polled.
    Wake(Waker),
    /// See whether this lease has lapsed, which the head has or is to get: its timer may be on a runtime that has ended, or that
    /// nobody drives. If the head does not take it, take it back.
    Lease(Arc<Lease>),
}

impl LocalQueue {
    /// A queue with nobody in it but its head.
    pub(super) fn new(seat: u64, now: Moment) -> Self {
        Self {
            waiters: VecDeque::new(),
            seat,
            head: Head::Asks(now, None),
            asked: None,
            held_at: None,
            failing: None,
            run: 0,
            run_since: None,
            handed: 0,
            fences: 0,
        }
    }

    /// How many stand behind the head.
    pub(super) fn waiting(&self) -> usize {
        self.waiters.len()
    }

    /// Adds a waiter. Its number is higher than that of all before it, and no queue of the lock has had it before: a waiter may
    /// outlast its queue, and must not leave the next one in the place of another.
    pub(super) fn join(&mut self, id: u64, terms: Terms, wake: oneshot::Sender<Turn>, now: Moment) {
        self.waiters.push_back(Waiter { id, since: now, terms, wake });
    }

    pub(super) fn leave(&mut self, id: u64) -> Option<Waiter> {
        self.waiters.remove(self.position(id)?)
    }

    fn position(&self, id: u64) -> Option<usize> {
        self.waiters.binary_search_by_key(&id, |waiter| waiter.id).ok()
    }

    pub(super) fn is_in_force(&self, seat: u64) -> bool {
        self.seat == seat
    }

    /// The next one, who is up with this seat from now on.
    pub(super) fn next(&mut self, seat: u64, now: Moment) -> Option<Waiter> {
        let waiter = self.waiters.pop_front()?;
        (self.seat, self.head, self.asked) = (seat, Head::Asks(now, None), None);
        Some(waiter)
    }

    /// The head was seen to be polled. Returns the waker that it left before, which must not be dropped while the queues
    /// are locked, for it may be the last of its task.
    pub(super) fn touch(&mut self, now: Moment, waker: Option<Waker>) -> Option<Waker> {
        let Head::Asks(last, old) = &mut self.head else { return waker };
        *last = now;
        std::mem::replace(old, waker)
    }

    /// The waiter `id` gets a seat with the number `seat`, if it may, and is to [leave](Self::leave) the queue. Returns what the head
    /// before it had asked for, which is to be released.
    pub(super) fn overtake(&mut self, id: u64, seat: u64, now: Moment) -> Result<Option<(Token, Duration)>, NotYet> {
        let Some(at) = self.position(id) else { return Err(NotYet::Before(now + OVERDUE)) };
        let idle = match &self.head {
            Head::Holds(lease) => return Err(lease.upgrade().map_or(NotYet::Before(now + OVERDUE), NotYet::Lease)),
            Head::Asks(last, _) | Head::IsHanded(_, last) => *last,
        };
        let overdue = idle + OVERDUE.saturating_mul(u32::try_from(at).unwrap_or(u32::MAX).saturating_add(1));
        if now < overdue {
            return Err(NotYet::Before(overdue));
        }
        match &mut self.head {
            Head::Asks(last, waker) => {
                if let Some(waker) = waker.take() {
                    // From now on, for all: else somebody further behind could pass before the one that wakes it looks again.
                    *last = now;
                    return Err(NotYet::Wake(waker));
                }
            }
            Head::IsHanded(lease, last) => {
                if let Some(lease) = lease.upgrade() {
                    *last = now;
                    return Err(NotYet::Lease(lease));
                }
            }
            Head::Holds(_) => {}
        }
        (self.seat, self.head) = (seat, Head::Asks(now, None));
        Ok(self.asked.take())
    }

    /// The head is about to ask. Returns how many fences to ask for.
    pub(super) fn asks(&mut self, asked: (Token, Duration), times: u32) -> u32 {
        self.asked = Some(asked);
        self.span(times)
    }

    /// The store granted the head a lease with so many fences. Returns the waker that the head left, as [`touch`](Self::touch) does.
    pub(super) fn granted(&mut self, span: u32, now: Moment) -> Option<Waker> {
        let head = std::mem::replace(&mut self.head, Head::Holds(Weak::new()));
        self.asked = None;
        self.handed = 0;
        self.fences = self.fences.saturating_sub(span.saturating_sub(1));
        self.heard_held(now);
        if let Head::Asks(_, waker) = head { waker } else { None }
    }

    /// The lease is on its way to the next holder.
    pub(super) fn handed(&mut self, lease: Weak<Lease>, now: Moment) {
        self.head = Head::IsHanded(lease, now);
    }

    /// The head has this lease.
    pub(super) fn holds(&mut self, lease: Weak<Lease>) {
        self.head = Head::Holds(lease);
    }

    /// The lease that the head has, or is to get.
    pub(super) fn held(&self) -> Option<Arc<Lease>> {
        if let Head::Holds(lease) | Head::IsHanded(lease, _) = &self.head { lease.upgrade() } else { None }
    }

    /// The head does not believe in its lease any more, which ended at `end`; the store is to be told.
    pub(super) fn ended(&mut self, end: Moment, now: Moment) {
        self.head = Head::Asks(now, None);
        self.heard_held(end);
    }

    pub(super) fn heard_held(&mut self, at: Moment) {
        self.held_at = self.held_at.max(Some(at));
        self.failing = None;
    }

    pub(super) fn heard_error(&mut self, error: &Error, now: Moment) {
        let since = self.failing_since().or(Some(now));
        self.failing = Some(Failing { since, last: now, error: error.clone() });
    }

    /// The store has answered, to a claim that may have been in its own way: that says nothing of others.
    pub(super) fn heard_in_doubt(&mut self) {
        if let Some(failing) = &mut self.failing {
            failing.since = None;
        }
    }

    /// Since when the store has given nothing but errors.
    pub(super) fn failing_since(&self) -> Option<Moment> {
        self.failing.as_ref().and_then(|failing| failing.since)
    }

    /// What somebody may say who has waited since `start`. Nothing older counts, for the lock may have been free, and the
    /// store well, since then.
    pub(super) fn verdict(&self, start: Moment) -> Verdict {
        if let Head::Holds(_) | Head::IsHanded(..) = self.head {
            return Verdict::Contended;
        }
        match (&self.failing, self.held_at) {
            (Some(failing), _) if failing.last >= start => Verdict::Failed(failing.error.clone()),
            (None, Some(held)) if held >= start => Verdict::Contended,
            _ => Verdict::Unknown,
        }
    }

    /// Takes out those who have waited for as long as `patience` on a store that fails.
    pub(super) fn worn_out(&mut self, patience: Duration, now: Moment) -> Vec<Waiter> {
        let Some(failing) = self.failing_since() else { return Vec::new() };
        let (gone, kept) = self.waiters.drain(..).partition(|waiter| now.since(waiter.since.max(failing)) >= patience);
        self.waiters = kept;
        gone.into()
    }

    /// The next waiter, if this process may keep the lease for one more holder and the waiter gets what it asked for. A waiter
    /// whose lease is not to be renewed would get only what is left of this one. A waiter that wants a fence above a number
    /// that the present holder did not ask for might get the next fence below it. A waiter that is to be seen at the store gets its
    /// lease there.
    pub(super) fn successor(&mut self, terms: Terms, rule: HandOver, now: Moment) -> Option<Waiter> {
        let since = *self.run_since.get_or_insert(now);
        if self.run >= rule.times || now.since(since) > rule.within {
            return None;
        }
        while let Some(front) = self.waiters.front() {
            let suits = front.terms.ttl == terms.ttl && front.terms.renew && front.terms.hands_over;
            let is_above = front.terms.fence_above <= terms.fence_above;
            if !front.wake.is_closed() && (!suits || !is_above) {
                return None;
            }
            let waiter = self.waiters.pop_front()?;
            if !waiter.wake.is_closed() {
                self.run += 1;
                self.handed += 1;
                return Some(waiter);
            }
        }
        None
    }

    /// Whether this process had as many holders in a row as it may. Starts a new run if so.
    pub(super) fn run_ended(&mut self, rule: HandOver, now: Moment) -> bool {
        let ended = self.run >= rule.times || self.run_since.is_some_and(|since| now.since(since) > rule.within);
        if ended {
            self.run = 0;
            self.run_since = None;
        } else {
            self.run += 1;
        }
        ended
    }

    /// How many fences to ask for: one, and one for each time that the lease is likely to be handed over. That is for those
    /// who wait, and twice as often as last time for those who come back while it lasts.
    ///
    /// A counter starts at the store's clock in microseconds, and goes on above its old end after a loss of data only if it
    /// has not outrun that clock: a key's fences must not be used up faster than one per microsecond. Grants of one
    /// process alone would take up to [`MOST`](HandOver::MOST) each, as fast as the store answers. So they are paid for:
    /// whoever had the lock for `t` µs, from the store's grant to its answer to the release, has earned `t / 2` fences for
    /// later grants. The times of all processes do not overlap, but for the way of that answer, which the half is for. So
    /// all grants together take less than one fence per microsecond, as long as each takes 2 µs for the fence that it
    /// needs itself. A grant whose answer was lost is not paid for: after each of those comes a pause of 10 ms at least,
    /// in which `MOST` are earned ten times over.
    fn span(&self, times: u32) -> u32 {
        let waiting = u32::try_from(self.waiters.len()).unwrap_or(u32::MAX);
        if waiting == 0 {
            return 1;
        }
        let likely = waiting.saturating_add(self.handed.saturating_mul(2));
        1 + likely.min(times).min(self.fences)
    }

    /// This process had the lock for so long, and has given it back.
    pub(super) fn earn(&mut self, time: Duration) {
        let earned = u32::try_from(time.as_micros() / 2).unwrap_or(u32::MAX);
        self.fences = self.fences.saturating_add(earned).min(HandOver::MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Fence;

    const TERMS: Terms = Terms {
        ttl: Duration::from_secs(10),
        renew: true,
        max_hold: None,
        fence_above: Fence::NONE,
        keep_for: None,
        hands_over: true,
    };

    fn at(micros: u64) -> Moment {
        Moment::from_nanos(1_000_000_000_000 + micros * 1000)
    }

    /// However fast the store answers, and however short the lock is held: the fences of all grants are fewer than the
    /// microseconds that they took.
    #[test]
    fn fences_stay_behind_the_clock() {
        for (pause, hand_over) in [(2, 0), (5, 0), (5, 1), (100, 1), (100, 7), (3000, 20), (1_000_000, 1)] {
            for times in [1, 64, HandOver::MOST, u32::MAX] {
                let mut queue = LocalQueue::new(0, at(0));
                let mut turns = Vec::new();
                for id in 0..3 {
                    let (wake, turn) = oneshot::channel();
                    queue.join(id, TERMS, wake, at(0));
                    turns.push(turn);
                }
                let (mut now, mut fences) = (0, 0);
                for _ in 0..10_000 {
                    let span = queue.span(times);
                    fences += u64::from(span);
                    queue.granted(span, at(now));
                    let granted = now;
                    now += pause + u64::from(span - 1) * hand_over;
                    queue.handed = span - 1;
                    queue.ended(at(now), at(now));
                    queue.earn(at(now).since(at(granted)));
                    assert!(fences <= now, "{fences} fences in {now} µs, of {pause} µs a grant, {times} times");
                }
            }
        }
    }

    #[test]
    fn a_span_fits_those_who_wait() {
        let mut queue = LocalQueue::new(0, at(0));
        queue.earn(Duration::from_secs(1));
        assert_eq!(queue.span(64), 1, "nobody waits");
        let (wake, _turn) = oneshot::channel();
        queue.join(1, TERMS, wake, at(0));
        assert_eq!(queue.span(64), 2);
        assert_eq!(queue.span(0), 1);
        queue.handed = 50;
        assert_eq!(queue.span(64), 65);
        assert_eq!(queue.span(u32::MAX), 102);
        queue.granted(102, at(0));
        assert_eq!((queue.span(64), queue.fences), (2, HandOver::MOST - 101));
    }

    #[test]
    fn an_old_answer_is_none() {
        let mut queue = LocalQueue::new(0, at(0));
        assert!(matches!(queue.verdict(at(0)), Verdict::Unknown));
        queue.heard_held(at(5));
        assert!(matches!(queue.verdict(at(5)), Verdict::Contended));
        assert!(matches!(queue.verdict(at(6)), Verdict::Unknown));
        let error = Error::new(crate::ErrorKind::Unavailable, "down");
        queue.heard_error(&error, at(7));
        queue.heard_error(&error, at(9));
        assert_eq!(queue.failing_since(), Some(at(7)));
        assert!(matches!(queue.verdict(at(9)), Verdict::Failed(_)));
        assert!(matches!(queue.verdict(at(10)), Verdict::Unknown));
        assert!(matches!(queue.verdict(at(0)), Verdict::Failed(_)), "the last answer counts");
        // It gives errors again after an answer, and not still: nobody has lost patience yet.
        queue.heard_in_doubt();
        assert!(matches!(queue.verdict(at(0)), Verdict::Failed(_)), "the answer says nothing of the lock");
        assert_eq!(queue.failing_since(), None);
        queue.heard_error(&error, at(10));
        assert_eq!(queue.failing_since(), Some(at(10)));
        queue.granted(1, at(11));
        assert!(matches!(queue.verdict(at(100)), Verdict::Contended), "it is held here");
    }
}
