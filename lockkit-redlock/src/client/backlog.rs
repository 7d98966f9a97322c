//! The backlog of a node: releases that failed there, repeated until it has answered or the lease must have lapsed.
//!
//! Each node has its own, and each is one task, so that a node which is away neither holds up the others nor collects tasks.
//! While it is away one release at a time finds out whether it is back.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::{Claim, Clock, LockStore, Moment, Release, Result, Token, store::unpoisoned};
use tokio::{
    runtime::Handle,
    sync::Notify,
    time::{sleep, timeout},
};

use crate::client::{
    calls::Calls,
    claims::{Burn, Entry},
};

/// How many are tried at a time at a node that answers.
const AT_A_TIME: usize = 64;
/// A node that is away for long collects no more than this. What is dropped lapses.
const MOST: usize = 10_000;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// A release that a node has to be told of.
#[derive(Debug)]
pub(crate) struct Owed {
    pub(crate) claim: Claim,
    /// When there is nothing left to release.
    pub(crate) lapse: Moment,
    /// The node has answered the acquisition, so that `NotHeld` is final. Otherwise the acquisition may be on its way to the
    /// node still, over a connection that was given up.
    pub(crate) settled: bool,
    /// Of a claim that may have become a lease meanwhile: the node counts for it again when this has ended.
    pub(crate) burn: Option<Burn>,
}

impl Owed {
    /// The release of a claim at a node that has answered the acquisition, if `settled`.
    pub(crate) fn new(entry: &Entry, settled: bool) -> Self {
        Self { claim: entry.claim.clone(), lapse: entry.lapse(), settled, burn: None }
    }

    /// The same at a node of which it may not be known whether it granted the claim.
    pub(crate) fn at(entry: &Entry, node: usize) -> Self {
        Self::new(entry, entry.is_granted_at(node))
    }

    /// Whether this answer leaves nothing to be done.
    pub(crate) fn is_settled_by(&self, answer: &Result<Release>) -> bool {
        match answer {
            Ok(Release::Released { .. }) => true,
            Ok(Release::NotHeld(_)) => self.settled,
            // What the node refuses now it will refuse the next time.
            Err(error) => !error.is_retryable(),
        }
    }

    /// The node has answered for good.
    fn end(self) {
        if let Some(burn) = self.burn {
            burn.end();
        }
    }

    /// It is not tried any more.
    fn lapse(self) {
        if let Some(burn) = self.burn {
            burn.lapse();
        }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Backlog {
    queue: Mutex<RetryQueue>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct RetryQueue {
    /// By the moment of the next try.
    waiting: BTreeMap<(Moment, u64), Try>,
    /// Those that wait, and those that are being tried.
    tokens: HashSet<Token>,
    next_id: u64,
    at_work: bool,
}

#[derive(Debug)]
struct Try {
    owed: Owed,
    /// How long to wait after it.
    pause: Duration,
}

impl Backlog {
    /// Has a release repeated, beginning now. Without a runtime it is forgotten, and the lease lapses.
    pub(crate) fn add(self: &Arc<Self>, owed: Owed, store: &Arc<dyn LockStore>, clock: &Arc<dyn Clock>) {
        let Ok(runtime) = Handle::try_current() else { return };
        let mut queue = unpoisoned(&self.queue);
        if !queue.tokens.insert(owed.claim.token) {
            return;
        }
        if queue.waiting.len() >= MOST
            && let Some((_, dropped)) = queue.waiting.pop_first()
        {
            queue.tokens.remove(&dropped.owed.claim.token);
        }
        queue.put(clock.now(), Try { owed, pause: FIRST_PAUSE });
        let is_at_work = std::mem::replace(&mut queue.at_work, true);
        // A runtime that is ending drops the task at once, here and now, and its end takes the queue again.
        drop(queue);
        if is_at_work {
            self.arrived.notify_one();
        } else {
            let (backlog, store, clock) = (Arc::clone(self), Arc::clone(store), Arc::clone(clock));
            runtime.spawn(Worker { backlog, store, clock, is_done: false }.run());
        }
    }
}

impl RetryQueue {
    fn put(&mut self, at: Moment, retry: Try) {
        self.next_id += 1;
        self.waiting.insert((at, self.next_id), retry);
    }

    /// Takes out what is due, up to this many.
    fn due(&mut self, now: Moment, most: usize) -> Vec<Try> {
        for (_, Try { owed, .. }) in self.waiting.extract_if(.., |_, Try { owed, .. }| owed.lapse <= now) {
            self.tokens.remove(&owed.claim.token);
            owed.lapse();
        }
        let mut due = Vec::new();
        while due.len() < most
            && let Some(first) = self.waiting.first_entry()
            && first.key().0 <= now
        {
            due.push(first.remove());
        }
        due
    }
}

/// The task of one backlog, there only while there is something in it.
struct Worker {
    backlog: Arc<Backlog>,
    store: Arc<dyn LockStore>,
    clock: Arc<dyn Clock>,
    is_done: bool,
}

impl Worker {
    async fn run(mut self) {
        let mut away = None;
        while let Some((due, next)) = self.next(if away.is_some() { 1 } else { AT_A_TIME }) {
            if due.is_empty() {
                let _ = timeout(next, self.backlog.arrived.notified()).await;
            } else if self.attempt(due).await {
                away = None;
            } else {
                let pause = away.map_or(FIRST_PAUSE, |pause: Duration| (pause * 2).min(LONGEST_PAUSE));
                away = Some(pause);
                sleep(pause).await;
            }
        }
    }

    /// What is due, and how long to wait if that is nothing; `None` if nothing is left at all.
    fn next(&mut self, most: usize) -> Option<(Vec<Try>, Duration)> {
        let now = self.clock.now();
        let mut queue = unpoisoned(&self.backlog.queue);
        let due = queue.due(now, most);
        let next = queue.waiting.first_key_value().map(|((at, _), _)| at.since(now));
        if due.is_empty() && next.is_none() {
            queue.at_work = false;
            self.is_done = true;
            return None;
        }
        Some((due, next.unwrap_or_default()))
    }

    /// Tries these. Whether the node gave any answer.
    async fn attempt(&self, due: Vec<Try>) -> bool {
        let mut calls = Calls::with_capacity(due.len());
        for (index, Try { owed, .. }) in due.iter().enumerate() {
            let (store, claim) = (Arc::clone(&self.store), owed.claim.clone());
            calls.add(index, async move { store.release(&claim).await });
        }
        let mut due: Vec<_> = due.into_iter().map(Some).collect();
        let mut answered = false;
        while let Some((index, answer)) = calls.next_ever().await {
            let Some(Try { mut owed, pause }) = due[index].take() else { continue };
            if let Some(burn) = &mut owed.burn {
                burn.hear(&answer);
            }
            let settled = owed.is_settled_by(&answer);
            answered |= settled || answer.is_ok();
            // When the lease must have lapsed it is not tried any more, but is to end then.
            let again = (self.clock.now() + pause).min(owed.lapse);
            let mut queue = unpoisoned(&self.backlog.queue);
            if settled {
                queue.tokens.remove(&owed.claim.token);
                if answer.is_ok() {
                    owed.end();
                }
            } else {
                // Twice as long each time, to the end of the lease: most of those that are not settled never will be.
                queue.put(again, Try { owed, pause: pause * 2 });
            }
        }
        answered
    }
}

impl Drop for Worker {
    /// What is dropped with its runtime lapses.
    fn drop(&mut self) {
        if !self.is_done {
            *unpoisoned(&self.backlog.queue) = RetryQueue::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::{LockKey, MemoryStore, Mode};

    use super::*;

    /// Adds to a backlog when it is dropped, as what is under way does with its runtime.
    struct Late(Arc<Backlog>, Arc<dyn LockStore>);

    impl Drop for Late {
        fn drop(&mut self) {
            let key = LockKey::new("a").expect("a name");
            let claim = Claim { key, token: Token::random().expect("random"), mode: Mode::Exclusive };
            let clock = Arc::clone(&self.1.info().clock);
            let owed = Owed { claim, lapse: clock.now() + Duration::from_secs(60), settled: false, burn: None };
            self.0.add(owed, &self.1, &clock);
        }
    }

    #[test]
    fn a_runtime_that_ends_takes_its_backlog_along() {
        let backlog = Arc::new(Backlog::default());
        let late = Late(Arc::clone(&backlog), Arc::new(MemoryStore::new()));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async move {
            tokio::spawn(async move {
                let _late = late;
                std::future::pending::<()>().await;
            });
            tokio::task::yield_now().await;
        });
        drop(runtime);
        assert!(!unpoisoned(&backlog.queue).at_work);
    }
}
