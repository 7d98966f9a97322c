//! The queue in front of the store: tasks of one `Locker` that want the same lock line up here, first come, first
//! served, and only the head talks to the store.
//!
//! A [`Seat`] is the place at the head. Whoever holds it may ask the store, or holds the lease. Dropping it lets the
//! next one up, so that no way out of an acquisition can forget to.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::oneshot;

use super::{
    Engine,
    lease::{Lease, Phase, Terms},
};
use crate::{LockKey, Moment};

/// How often a lease may go from one local holder to the next before other processes get their turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HandOver {
    /// At most so many times in a row; 0 turns hand-over off, and more than [`MOST`](Self::MOST) counts as that.
    pub times: u32,
    /// At most for so long in a row.
    pub within: Duration,
}

impl Default for HandOver {
    /// 64 times or 50 ms, whichever comes first.
    fn default() -> Self {
        Self { times: 64, within: Duration::from_millis(50) }
    }
}

impl HandOver {
    /// No hand-over: every release goes to the store.
    pub const OFF: Self = Self { times: 0, within: Duration::ZERO };
    /// The most times in a row. A grant owns a fence for each, and fences must not be used up faster than one per
    /// microsecond, or they would run ahead of the clock at which they start again after a loss of data.
    pub const MOST: u32 = 1000;
}

/// All local queues of one `Locker`.
#[derive(Debug, Default)]
pub(crate) struct LocalQueues {
    lines: Mutex<HashMap<LockKey, Line>>,
    /// Locks that this process released while others waited for them, and nobody here.
    wanted: Mutex<HashMap<LockKey, Solo>>,
}

/// So many wanted locks are remembered before those of which nothing was heard for a while are forgotten.
const WANTED: usize = 256;

/// One after another of this process had the lock, without a line here, while others waited.
#[derive(Debug)]
struct Solo {
    since: Moment,
    released: Moment,
    /// Until when this process keeps back.
    yielded: Moment,
}

#[derive(Debug, Default)]
struct Line {
    waiters: VecDeque<Waiter>,
    next_id: u64,
    /// Consecutive holders of this process, and when the first of them got the lease.
    run: u32,
    run_since: Option<Moment>,
}

#[derive(Debug)]
pub(crate) struct Waiter {
    id: u64,
    pub(crate) terms: Terms,
    pub(crate) wake: oneshot::Sender<Turn>,
}

/// What a waiter gets when it is up.
#[derive(Debug)]
pub(crate) enum Turn {
    /// Ask the store.
    Ask(Seat),
    /// Here is the lease.
    Take(Handed),
}

/// The place at the head of a line.
pub(crate) struct Seat {
    queues: Arc<LocalQueues>,
    key: Option<LockKey>,
    /// Others are known to wait at the store and this process had its run: let them go first.
    pub(crate) courtesy: bool,
    /// Since when its holder has the lease.
    pub(crate) granted: Option<Moment>,
}

/// A lease on its way to the next holder; if that one is gone, its `Drop` finds another home for it.
pub(crate) struct Handed {
    lease: Option<Arc<Lease>>,
    engine: Arc<Engine>,
}

/// A place in a line. Dropping it leaves the line.
#[derive(Debug)]
pub(crate) struct Place {
    queues: Arc<LocalQueues>,
    key: LockKey,
    id: u64,
    turn: oneshot::Receiver<Turn>,
}

/// The answer to [`LocalQueues::enter`].
#[derive(Debug)]
pub(crate) enum Entered {
    Head(Seat),
    Line(Place),
}

impl LocalQueues {
    /// Takes the head of the line if nobody is there.
    pub(crate) fn try_enter(self: &Arc<Self>, key: &LockKey) -> Option<Seat> {
        match self.lines().entry(key.clone()) {
            Entry::Occupied(_) => None,
            Entry::Vacant(line) => {
                line.insert(Line::default());
                Some(self.seat(key))
            }
        }
    }

    /// Takes the head of the line, or a place in it.
    pub(crate) fn enter(self: &Arc<Self>, key: &LockKey, terms: Terms) -> Entered {
        match self.lines().entry(key.clone()) {
            Entry::Vacant(line) => {
                line.insert(Line::default());
                Entered::Head(self.seat(key))
            }
            Entry::Occupied(mut line) => {
                let line = line.get_mut();
                let id = line.next_id;
                line.next_id += 1;
                let (wake, turn) = oneshot::channel();
                line.waiters.push_back(Waiter { id, terms, wake });
                Entered::Line(Place { queues: Arc::clone(self), key: key.clone(), id, turn })
            }
        }
    }

    /// How many stand behind the head.
    pub(crate) fn waiting(&self, key: &LockKey) -> usize {
        self.lines().get(key).map_or(0, |line| line.waiters.len())
    }

    /// The next waiter, if this process may keep the lease for one more holder and the waiter wants it on terms that
    /// the lease was taken for.
    pub(crate) fn successor(&self, key: &LockKey, terms: Terms, rule: HandOver, now: Moment) -> Option<Waiter> {
        let mut lines = self.lines();
        let line = lines.get_mut(key)?;
        let since = *line.run_since.get_or_insert(now);
        if line.run >= rule.times || now.since(since) > rule.within {
            return None;
        }
        while let Some(front) = line.waiters.front() {
            if !front.wake.is_closed() && front.terms.ttl != terms.ttl {
                return None;
            }
            let waiter = line.waiters.pop_front()?;
            if !waiter.wake.is_closed() {
                line.run += 1;
                return Some(waiter);
            }
        }
        None
    }

    /// Whether this process had as many holders in a row as it may. Starts a new run if so.
    pub(crate) fn run_ended(&self, key: &LockKey, rule: HandOver, now: Moment) -> bool {
        let mut lines = self.lines();
        let Some(line) = lines.get_mut(key) else { return true };
        let ended = line.run >= rule.times || line.run_since.is_some_and(|since| now.since(since) > rule.within);
        if ended {
            line.run = 0;
            line.run_since = None;
        } else {
            line.run += 1;
        }
        ended
    }

    /// Takes note that a lease, granted at `granted`, was released while others wait and nobody here. If this process
    /// had the lock for longer than `courtesy`, it is to keep back for as long: who takes and releases a lock in a loop
    /// would else be faster, each time, than those who have to be woken first.
    pub(crate) fn released_to_others(&self, key: &LockKey, granted: Moment, now: Moment, courtesy: Duration) {
        let mut wanted = self.wanted();
        if wanted.len() >= WANTED {
            wanted.retain(|_, solo| solo.released + courtesy > now);
        }
        let solo = wanted.entry(key.clone()).or_insert(Solo { since: granted, released: now, yielded: now });
        if granted > solo.released + courtesy {
            solo.since = granted;
        }
        solo.released = now;
        if now > solo.since + courtesy {
            solo.yielded = now + courtesy;
        }
    }

    /// For how long to keep back from the lock.
    pub(crate) fn yielded(&self, key: &LockKey, now: Moment) -> Duration {
        self.wanted().get(key).map(|solo| solo.yielded.since(now)).unwrap_or_default()
    }

    fn wanted(&self) -> MutexGuard<'_, HashMap<LockKey, Solo>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seat(self: &Arc<Self>, key: &LockKey) -> Seat {
        Seat { queues: Arc::clone(self), key: Some(key.clone()), courtesy: false, granted: None }
    }

    fn lines(&self) -> MutexGuard<'_, HashMap<LockKey, Line>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let Some(key) = self.key.take() else { return };
        let mut seat = Self { queues: Arc::clone(&self.queues), key: None, courtesy: self.courtesy, granted: None };
        loop {
            let next = {
                let mut lines = self.queues.lines();
                match lines.get_mut(&key).and_then(|line| line.waiters.pop_front()) {
                    Some(waiter) => waiter,
                    None => {
                        lines.remove(&key);
                        return;
                    }
                }
            };
            // The seat is armed only while it travels, so that handing it to someone who left can't recurse.
            seat.key = Some(key.clone());
            match next.wake.send(Turn::Ask(seat)) {
                Ok(()) => return,
                Err(Turn::Ask(mut back)) => {
                    back.key = None;
                    seat = back;
                }
                Err(Turn::Take(_)) => return,
            }
        }
    }
}

impl fmt::Debug for Seat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Seat").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Handed {
    pub(crate) fn new(lease: Arc<Lease>, engine: Arc<Engine>) -> Self {
        Self { lease: Some(lease), engine }
    }

    /// The lease, unless it ran out on the way.
    pub(crate) fn accept(mut self) -> Option<Arc<Lease>> {
        match self.engine.look(self.lease.as_ref()?) {
            Phase::Held | Phase::Suspect => self.lease.take(),
            Phase::Lost(_) | Phase::Released => None,
        }
    }
}

impl Drop for Handed {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.engine.let_go(&lease);
        }
    }
}

impl fmt::Debug for Handed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handed").field("lease", &self.lease).finish_non_exhaustive()
    }
}

impl Place {
    /// Waits to be up. Cancel-safe: a turn that arrives after all goes to the next in line.
    pub(crate) async fn turn(&mut self) -> Option<Turn> {
        (&mut self.turn).await.ok()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // Closing first decides the race with a sender: from here on a turn can't get lost in the channel.
        self.turn.close();
        drop(self.turn.try_recv());
        let left = {
            let mut lines = self.queues.lines();
            lines.get_mut(&self.key).and_then(|line| {
                let at = line.waiters.iter().position(|waiter| waiter.id == self.id)?;
                line.waiters.remove(at)
            })
        };
        drop(left);
    }
}
