//! The poller: for stores that can't wake waiters, one task per `Locker` asks for all awaited locks at once.
//!
//! Each lock has its own pace. It is asked for after 2 ms at first; when nothing has changed ten times in a row, each
//! further pause is half as long again, up to 250 ms. A new holder makes it fast again, for what changes hands will change
//! hands again. A lock that nobody waits for any more keeps its pace until its time comes: whoever has a place in the store's
//! queue asks for that again every two seconds, and is soon back. Locks whose time comes at about the same moment share one
//! query, so that a thousand waiters for locks that are held for long cost the store four queries a second.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};

use super::{Engine, backoff::random, queue::OVERDUE};
use crate::{KeyState, LockKey, Mode, Query, Token, store::unpoisoned};

const FASTEST: Duration = Duration::from_millis(2);
const SLOWEST: Duration = Duration::from_millis(250);
/// So often a lock is asked for at the fastest pace: those that are held for some milliseconds are free by then.
const FAST: u32 = 10;

/// The locks that somebody of this `Locker` waits for, or did until just now.
#[derive(Debug, Default)]
pub(super) struct Poller {
    awaited: Mutex<Awaited>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Awaited {
    locks: HashMap<LockKey, Watched>,
    /// Whether the task runs.
    running: bool,
}

#[derive(Debug)]
struct Watched {
    waiters: Vec<PolledWaiter>,
    pause: Duration,
    /// How often in a row nothing had changed.
    unchanged: u32,
    due: Instant,
    /// How many held it, and the least of their tokens: a store shows them in any order.
    holders: (usize, Option<Token>),
}

/// One that waits.
#[derive(Clone, Debug)]
struct PolledWaiter {
    /// How it wants to hold the lock.
    mode: Mode,
    /// Its token, if it has a place in a queue at the store. Then its turn has come when it holds the lock.
    queued: Option<Token>,
    news: Arc<News>,
}

/// What the poller has to say to one that waits.
#[derive(Debug, Default)]
struct News {
    freed: Notify,
    /// Whether the lock was seen to be held meanwhile, or could not be asked for.
    was_held: AtomicBool,
}

impl Engine {
    /// Returns when the lock was seen to be free for a waiter that wants to hold it in this way, or could not be asked for, or
    /// after `limit`; `true` if it was seen, and was free each time.
    ///
    /// Room in the lock may belong to others that came before a waiter with a place in the store's queue, which is known by its token. For such a waiter this returns when it holds the lock; or when nobody holds it, for then the store has to
    /// be asked whose turn it is. If the store shows no queue, the waiter has no place in it.
    pub(super) async fn until_free(
        self: &Arc<Self>,
        key: &LockKey,
        (mode, queued): (Mode, Option<Token>),
        limit: Duration,
    ) -> bool {
        let interest = PollGuard::new(self, key, PolledWaiter { mode, queued, news: Arc::default() });
        self.start_polling();
        let freed = async {
            while timeout(OVERDUE, interest.waiter.news.freed.notified()).await.is_err() {
                // The poller may be on a runtime that nobody drives for now.
                if self.poller.is_late(key) {
                    self.poll_once().await;
                }
            }
        };
        timeout(limit, freed).await.is_ok() && !interest.waiter.news.was_held.load(Ordering::Relaxed)
    }

    fn start_polling(self: &Arc<Self>) {
        let mut awaited = unpoisoned(&self.poller.awaited);
        if awaited.running {
            drop(awaited);
            return self.poller.changed.notify_one();
        }
        awaited.running = true;
        drop(awaited);
        let running = Running(Arc::clone(self));
        self.at_home(async move {
            let Running(engine) = &running;
            while let Some(next) = engine.poller.next_due() {
                tokio::select! {
                    () = sleep_until(next) => engine.poll_once().await,
                    () = engine.poller.changed.notified() => {}
                }
            }
        });
    }

    async fn poll_once(&self) {
        let keys = self.poller.take_due(Instant::now());
        if keys.is_empty() {
            return;
        }
        match self.heard(self.store.inspect(&Query::Keys(keys.clone())).await) {
            Ok(states) => self.poller.seen(&states),
            // Each waiter asks for itself and finds out what is wrong; its patience is its own.
            Err(_) => self.poller.wake(&keys),
        }
    }
}

impl Poller {
    /// When the next lock is to be asked for, or forgotten; `None`, and the end of the task, if there is none.
    fn next_due(&self) -> Option<Instant> {
        unpoisoned(&self.awaited).locks.values().map(|lock| lock.due).min()
    }

    /// The locks to ask for now: those that are due, and those that would be within a quarter of their pause. Forgets those
    /// that are due and that nobody waits for.
    fn take_due(&self, now: Instant) -> Vec<LockKey> {
        let mut awaited = unpoisoned(&self.awaited);
        awaited.locks.retain(|_, lock| lock.is_awaited() || lock.due > now);
        let due = awaited.locks.iter_mut().filter(|(_, lock)| lock.is_awaited() && lock.due <= now + lock.pause / 4);
        due.map(|(key, lock)| {
            lock.due = now + lock.pause * 7 / 8 + lock.pause / 4 * (random() % 256) / 256;
            key.clone()
        })
        .collect()
    }

    fn is_late(&self, key: &LockKey) -> bool {
        let awaited = unpoisoned(&self.awaited);
        awaited.locks.get(key).is_some_and(|lock| lock.due + OVERDUE <= Instant::now())
    }

    fn seen(&self, states: &[KeyState]) {
        let mut awaited = unpoisoned(&self.awaited);
        for state in states {
            let Some(lock) = awaited.locks.get_mut(&state.key) else { continue };
            let holders = (
                state.holders.len(),
                state.holders.iter().filter_map(|holder| holder.token).min_by_key(|token| *token.as_bytes()),
            );
            let mut is_free = false;
            for waiter in &lock.waiters {
                if waiter.is_up(state) {
                    is_free = true;
                    waiter.news.freed.notify_one();
                } else {
                    waiter.news.was_held.store(true, Ordering::Relaxed);
                }
            }
            if is_free || holders != lock.holders {
                (lock.pause, lock.unchanged) = (FASTEST, 0);
            } else {
                lock.unchanged = lock.unchanged.saturating_add(1);
                if lock.unchanged > FAST {
                    lock.pause = (lock.pause * 3 / 2).min(SLOWEST);
                }
            }
            lock.holders = holders;
        }
    }

    fn wake(&self, keys: &[LockKey]) {
        let mut awaited = unpoisoned(&self.awaited);
        for key in keys {
            if let Some(lock) = awaited.locks.get_mut(key) {
                lock.pause = SLOWEST;
                lock.wake_all();
            }
        }
    }
}

impl Watched {
    fn is_awaited(&self) -> bool {
        !self.waiters.is_empty()
    }

    fn wake_all(&self) {
        for PolledWaiter { news, .. } in &self.waiters {
            news.was_held.store(true, Ordering::Relaxed);
            news.freed.notify_one();
        }
    }
}

impl PolledWaiter {
    fn is_up(&self, KeyState { holders, waiters, .. }: &KeyState) -> bool {
        // If the store knows of nobody in a queue, it has no place any more.
        let is_queued = self.queued.is_some() && waiters.is_some_and(|waiters| waiters > 0);
        if is_queued {
            holders.is_empty() || holders.iter().any(|holder| holder.token == self.queued)
        } else {
            self.mode.has_room(holders.iter().map(|holder| holder.mode))
                || self.queued.is_some_and(|me| holders.iter().any(|holder| holder.token == Some(me)))
        }
    }
}

/// When the task ends, or the runtime drops it, run or not, those who wait have to ask for themselves, and start another one.
struct Running(Arc<Engine>);

impl Drop for Running {
    fn drop(&mut self) {
        let mut awaited = unpoisoned(&self.0.poller.awaited);
        awaited.running = false;
        awaited.locks.retain(|_, lock| lock.is_awaited());
        awaited.locks.values().for_each(Watched::wake_all);
    }
}

/// One that waits; the lock is asked for as long as there is one, and forgotten soon after.
struct PollGuard<'a> {
    engine: &'a Engine,
    key: &'a LockKey,
    waiter: PolledWaiter,
}

impl<'a> PollGuard<'a> {
    fn new(engine: &'a Engine, key: &'a LockKey, waiter: PolledWaiter) -> Self {
        let mut awaited = unpoisoned(&engine.poller.awaited);
        let lock = awaited.locks.entry(key.clone()).or_insert_with(|| Watched {
            waiters: Vec::new(),
            pause: FASTEST,
            unchanged: 0,
            due: Instant::now() + FASTEST,
            holders: (0, None),
        });
        // Its pace may have become faster since that was set: it was free, and went to another.
        lock.due = lock.due.min(Instant::now() + lock.pause);
        lock.waiters.push(waiter.clone());
        Self { engine, key, waiter }
    }
}

impl Drop for PollGuard<'_> {
    fn drop(&mut self) {
        let mut awaited = unpoisoned(&self.engine.poller.awaited);
        if let Some(lock) = awaited.locks.get_mut(self.key) {
            if let Some(at) = lock.waiters.iter().position(|waiter| Arc::ptr_eq(&waiter.news, &self.waiter.news)) {
                lock.waiters.swap_remove(at);
            }
            // The task forgets it when it is due. Without the task nobody would.
            if !lock.is_awaited() && !awaited.running {
                awaited.locks.remove(self.key);
            }
        }
    }
}
