//! The backlog: releases that failed, and are tried again until the store answers or their leases must have lapsed.
//!
//! While a store is away, each acquisition that is given up leaves one. They wait as entries of one task, not as a task
//! each, and few are tried at a time, so that a store which comes back is not met by all of them at once.

use std::{
    collections::BTreeMap,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::mpsc::{self, UnboundedReceiver, UnboundedSender, error::SendError},
    task::JoinSet,
    time::sleep,
};

use super::reaper::{Owed, PendingRelease};
use crate::{Clock, Moment, store::unpoisoned};

/// How many are tried at a time.
const AT_A_TIME: usize = 64;
/// How often those are looked for whose leases have lapsed while others were tried.
const SWEEP: Duration = Duration::from_secs(1);

/// The releases of one `Locker` that failed at least once.
#[derive(Default)]
pub(super) struct Backlog {
    /// The way to the task that works it off, as long as there is one.
    worker: Mutex<Option<UnboundedSender<Retry>>>,
    length: AtomicUsize,
    /// Those that were dropped before they were answered.
    left: Mutex<Vec<PendingRelease>>,
    has_left: AtomicBool,
}

/// A release, and when it is to be tried again.
type Retry = (Moment, Owed);

impl Backlog {
    /// How many there are.
    pub(super) fn length(&self) -> usize {
        let left = if self.has_left() { unpoisoned(&self.left).len() } else { 0 };
        self.length.load(Ordering::Relaxed) + left
    }

    /// Keeps a release that ended with its runtime until there is [another one](super::Engine::take_over).
    pub(super) fn leave(&self, pending: PendingRelease) {
        let mut left = unpoisoned(&self.left);
        left.push(pending);
        self.has_left.store(true, Ordering::Release);
    }

    pub(super) fn has_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    pub(super) fn take_left(&self) -> Vec<PendingRelease> {
        if !self.has_left() {
            return Vec::new();
        }
        let mut left = unpoisoned(&self.left);
        self.has_left.store(false, Ordering::Release);
        mem::take(&mut left)
    }

    /// Has a release tried at `at`.
    pub(super) fn add(self: &Arc<Self>, at: Moment, owed: Owed) {
        let engine = Arc::clone(owed.engine());
        let mut worker = unpoisoned(&self.worker);
        let retry = match &*worker {
            None => (at, owed),
            Some(way_in) => match way_in.send((at, owed)) {
                Ok(()) => return,
                // The worker is gone with its runtime.
                Err(SendError(retry)) => retry,
            },
        };
        let (way_in, arrivals) = mpsc::unbounded_channel();
        *worker = Some(way_in);
        let mut work = Worker {
            backlog: Arc::clone(self),
            clock: Arc::clone(&engine.store.info().clock),
            arrivals,
            waiting: BTreeMap::new(),
            next_id: 0,
            tries: JoinSet::new(),
        };
        work.put(retry);
        drop(worker);
        engine.at_home(work.run());
    }

    /// Lets the worker end, unless something arrived in this moment.
    fn dismiss(&self, arrivals: &UnboundedReceiver<Retry>) -> bool {
        let mut worker = unpoisoned(&self.worker);
        let is_done = arrivals.is_empty();
        if is_done {
            *worker = None;
        }
        is_done
    }
}

/// The task. It owns the entries, which hold the engine: if they were the engine's own, neither would ever be dropped.
struct Worker {
    backlog: Arc<Backlog>,
    clock: Arc<dyn Clock>,
    arrivals: UnboundedReceiver<Retry>,
    waiting: BTreeMap<(Moment, u64), Owed>,
    next_id: u64,
    tries: JoinSet<Option<Retry>>,
}

impl Worker {
    async fn run(mut self) {
        let mut swept = self.clock.now();
        loop {
            let now = self.clock.now();
            if now >= swept + SWEEP {
                self.waiting.retain(|_, owed| !owed.has_lapsed(now));
                swept = now;
            }
            self.try_due(now);
            self.backlog.length.store(self.waiting.len() + self.tries.len(), Ordering::Relaxed);
            if self.waiting.is_empty() && self.tries.is_empty() && self.backlog.dismiss(&self.arrivals) {
                return;
            }
            let next = match self.waiting.first_key_value() {
                Some(((at, _), _)) if self.tries.len() < AT_A_TIME => at.since(now).min(SWEEP),
                _ => SWEEP,
            };
            tokio::select! {
                Some(retry) = self.arrivals.recv() => self.put(retry),
                Some(tried) = self.tries.join_next() => {
                    if let Ok(Some(retry)) = tried {
                        self.put(retry);
                    }
                }
                () = sleep(next) => {}
            }
        }
    }

    fn put(&mut self, (at, owed): Retry) {
        self.next_id += 1;
        self.waiting.insert((at, self.next_id), owed);
    }

    fn try_due(&mut self, now: Moment) {
        while self.tries.len() < AT_A_TIME
            && let Some(first) = self.waiting.first_entry()
            && first.key().0 <= now
        {
            let mut owed = first.remove();
            if !owed.has_lapsed(now) {
                self.tries.spawn(async move {
                    let again = owed.settle(&mut None).await?;
                    Some((again, owed))
                });
            }
        }
    }
}

impl Drop for Worker {
    /// What is dropped with its runtime is [left](Backlog::leave).
    fn drop(&mut self) {
        self.backlog.length.store(0, Ordering::Relaxed);
    }
}
