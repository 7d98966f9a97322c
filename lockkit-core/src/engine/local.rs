//! The queue in front of the store: tasks of one `Locker` that want the same lock queue up here, first come, first
//! served, and only the head talks to the store.
//!
//! A [`Seat`] is the place at the head. A task that has it and is not polled is overtaken: its seat is not in force any more, and
//! what it had asked the store for is released. When it is polled again, it queues up anew.

use std::{
    collections::{
        HashMap,
        hash_map::{Entry, VacantEntry},
    },
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    task::Waker,
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    ask::Terms,
    hand_over::{HandOver, Turn},
    queue::{LocalQueue, NotYet, OVERDUE},
    seat::{LeaveQueue, Seat},
};
use crate::{Claim, Clock, Error, LockKey, Mode, Moment, store::unpoisoned};

/// All local queues of one `Locker`.
#[derive(Debug)]
pub(crate) struct LocalQueues {
    by_key: Mutex<HashMap<LockKey, LocalQueue>>,
    /// Locks that this process released while others waited for them.
    wanted: Mutex<HashMap<LockKey, Wanted>>,
    /// The number of the next seat, waiter or lease.
    next_number: AtomicU64,
    clock: Arc<dyn Clock>,
}

/// How many wanted locks are remembered before those are forgotten of which nothing was heard for a while.
const WANTED: usize = 256;

/// One after another of this process had the lock while others waited.
#[derive(Debug)]
struct Wanted {
    since: Moment,
    released: Moment,
    /// Until when this process keeps back.
    yielded: Moment,
}

/// A place in a queue. Dropping it leaves the queue.
#[derive(Debug)]
pub(crate) struct LocalWaiter {
    queues: Arc<LocalQueues>,
    key: LockKey,
    id: u64,
    turn: oneshot::Receiver<Turn>,
}

impl LocalQueues {
    pub(crate) fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        Arc::new(Self { by_key: Mutex::default(), wanted: Mutex::default(), next_number: AtomicU64::new(0), clock })
    }

    /// Takes the head of the queue if nobody is there.
    pub(crate) fn try_enter(self: &Arc<Self>, key: &LockKey) -> Option<Seat> {
        match unpoisoned(&self.by_key).entry(key.clone()) {
            Entry::Occupied(_) => None,
            Entry::Vacant(queue) => Some(self.first(queue)),
        }
    }

    /// Takes the head of the queue, or else a place in it.
    pub(crate) fn enter(self: &Arc<Self>, key: &LockKey, terms: Terms) -> Result<Seat, LocalWaiter> {
        match unpoisoned(&self.by_key).entry(key.clone()) {
            Entry::Vacant(queue) => Ok(self.first(queue)),
            Entry::Occupied(mut queue) => {
                let ((wake, turn), id) = (oneshot::channel(), self.number());
                queue.get_mut().join(id, terms, wake, self.clock.now());
                Err(LocalWaiter { queues: Arc::clone(self), key: key.clone(), id, turn })
            }
        }
    }

    fn first(self: &Arc<Self>, queue: VacantEntry<'_, LockKey, LocalQueue>) -> Seat {
        let seat = self.seat(queue.key(), self.number());
        queue.insert(LocalQueue::new(seat.number, self.clock.now()));
        seat
    }

    /// Looks at the queue of this lock, if there is one.
    pub(super) fn look<T>(&self, key: &LockKey, what: impl FnOnce(&mut LocalQueue) -> T) -> Option<T> {
        unpoisoned(&self.by_key).get_mut(key).map(what)
    }

    /// The same for a head whose seat is in force; `None` if it was overtaken.
    pub(super) fn at<T>(&self, seat: &Seat, what: impl FnOnce(&mut LocalQueue, Moment) -> T) -> Option<T> {
        let mut queues = unpoisoned(&self.by_key);
        let queue = queues.get_mut(seat.key.as_ref()?).filter(|queue| queue.is_in_force(seat.number))?;
        Some(what(queue, self.clock.now()))
    }

    /// The head is seen to be polled, and can be again by this waker; `false` if it was overtaken.
    pub(crate) fn touch(&self, seat: &Seat, waker: Option<Waker>) -> bool {
        // What it left before is dropped after the lock on the queues.
        self.at(seat, |queue, now| queue.touch(now, waker)).is_some()
    }

    /// Lets all fail who have waited for as long as `patience` on a store that fails.
    pub(crate) fn give_up(&self, key: &LockKey, error: &Error, patience: Duration) {
        let worn_out = self.look(key, |queue| queue.worn_out(patience, self.clock.now())).unwrap_or_default();
        for waiter in worn_out {
            // A waiter that left in this instant needs no error.
            drop(waiter.wake.send(Turn::Fail(error.clone())));
        }
    }

    /// The lock was given back after `held`. Says whether this process had as many holders in a row as it may, and starts a
    /// new run if so.
    pub(crate) fn run_ended(&self, key: &LockKey, rule: HandOver, now: Moment, held: Duration) -> bool {
        let ended = self.look(key, |queue| {
            queue.earn(held);
            queue.run_ended(rule, now)
        });
        ended.unwrap_or(true)
    }

    /// Takes note that a lease was released while others wait, and has this process keep back for as long as `courtesy` if
    /// it had its run. If nobody waits here, that is so when it had the lock for longer than this since it was `granted`: a loop
    /// that takes and releases a lock would else be faster, each time, than those that have to be woken first.
    pub(crate) fn released_to_others(&self, key: &LockKey, granted: Option<Moment>, now: Moment, courtesy: Duration) {
        let (had_run, granted) = (granted.is_none(), granted.unwrap_or(now));
        let mut wanted = unpoisoned(&self.wanted);
        if wanted.len() >= WANTED {
            wanted.retain(|_, lock| lock.released + courtesy > now);
        }
        let lock = wanted.entry(key.clone()).or_insert(Wanted { since: granted, released: now, yielded: now });
        if granted > lock.released + courtesy {
            lock.since = granted;
        }
        lock.released = now;
        if had_run || now > lock.since + courtesy {
            lock.yielded = now + courtesy;
        }
    }

    /// For how long to keep back from the lock.
    pub(crate) fn yielded(&self, key: &LockKey, now: Moment) -> Duration {
        unpoisoned(&self.wanted).get(key).map(|lock| lock.yielded.since(now)).unwrap_or_default()
    }

    fn seat(self: &Arc<Self>, key: &LockKey, number: u64) -> Seat {
        Seat::new(Arc::<Self>::clone(self), key.clone(), number)
    }

    pub(super) fn number(&self) -> u64 {
        self.next_number.fetch_add(1, Ordering::Relaxed)
    }
}

impl LeaveQueue for LocalQueues {
    fn leave(self: Arc<Self>, key: LockKey, mut number: u64) {
        loop {
            let next_number = self.number();
            let next = {
                let mut queues = unpoisoned(&self.by_key);
                let Some(queue) = queues.get_mut(&key).filter(|queue| queue.is_in_force(number)) else { return };
                let Some(next) = queue.next(next_number, self.clock.now()) else {
                    queues.remove(&key);
                    return;
                };
                next
            };
            number = next_number;
            let Err(Turn::Ask(mut back)) = next.wake.send(Turn::Ask(self.seat(&key, number))) else { return };
            // It left in this instant. Disarmed, so that a queue of those who left can't recurse.
            back.key = None;
        }
    }
}

impl LocalWaiter {
    /// Waits to be up. Cancel-safe: a turn that arrives after all goes to the next in the queue.
    pub(crate) async fn turn(&mut self) -> Option<Turn> {
        (&mut self.turn).await.ok()
    }

    /// Goes past a head that is not polled. What that one has asked the store for, with this ttl, is given to `release`.
    pub(crate) fn overtake(&self, now: Moment, release: impl FnOnce(Claim, Duration)) -> Result<Seat, NotYet> {
        let number = self.queues.number();
        let answer = self.queues.look(&self.key, |queue| {
            let asked = queue.overtake(self.id, number, now)?;
            // Not to be dropped while the queues are locked, for that wakes a task.
            Ok((asked, queue.leave(self.id)))
        });
        let (asked, _left) = answer.unwrap_or(Err(NotYet::Before(now + OVERDUE)))?;
        if let Some((token, ttl)) = asked {
            // Only plain exclusive locks queue here. The one that asked with this token finds out that it was
            // overtaken before it believes in a grant.
            release(Claim { key: self.key.clone(), token, mode: Mode::Exclusive }, ttl);
        }
        Ok(self.queues.seat(&self.key, number))
    }
}

impl Drop for LocalWaiter {
    fn drop(&mut self) {
        // Closing first decides the race with a sender: from here on a turn can't get lost in the channel.
        self.turn.close();
        drop(self.turn.try_recv());
        let left = {
            let mut queues = unpoisoned(&self.queues.by_key);
            queues.get_mut(&self.key).and_then(|queue| queue.leave(self.id))
        };
        drop(left);
    }
}
