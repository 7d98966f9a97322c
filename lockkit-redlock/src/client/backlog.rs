//! The backlog of a node: releases that failed there, repeated until it has answered or the lease must have lapsed.
//!
//! Each node has its own, and each is one task, so that a node which is away neither holds up the others nor collects tasks.
//! While it is away one release at a time finds out whether it is back. What the task leaves that ended with its runtime is
//! taken over at the next use of the store; and what one has that shows no sign of life, with the next release that fails.
//!
//! Where leases end with the session, nothing lapses: a release is repeated there until it is answered.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{
    Claim, Clock, LockStore, Moment, Release, Result, Token,
    store::{Background, unpoisoned},
};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

use crate::client::{calls::Calls, claims::Entry};

/// How many are tried at a time at a node that answers.
const AT_A_TIME: usize = 64;
/// A node that is away for long collects no more than this. What is dropped lapses; where nothing does, the node is not asked for
/// leases as long as there are so many.
pub(super) const MOST: usize = 10_000;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Between two tries of a release that a node has not settled and that does not lapse.
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// How late a task may be to show that it is there: longer is a runtime that nobody drives.
const OVERDUE: Duration = Duration::from_secs(2);
/// How long the answers to releases may take, by which the task shows that it is there.
const CALLS: Duration = Duration::from_secs(30);

/// A release that a node has to be told of.
#[derive(Clone, Debug)]
pub(crate) struct Owed {
    pub(crate) claim: Claim,
    /// When there is nothing left to release.
    pub(crate) lapse: Moment,
    /// The node has answered the acquisition, so that `NotHeld` is final. Otherwise the acquisition may be on its way to the
    /// node still, over a connection that was given up.
    pub(crate) settled: bool,
}

impl Owed {
    /// The release of a claim at a node that has answered the acquisition, if `settled`.
    pub(crate) fn new(entry: &Entry, settled: bool) -> Self {
        Self { claim: entry.claim.clone(), lapse: entry.lapse(), settled }
    }

    /// The same at a node of which it may not be known whether it granted the claim.
    pub(crate) fn at(entry: &Entry, node: usize) -> Self {
        Self::new(entry, entry.is_granted_at(node) && !entry.is_in_doubt(node))
    }
}

/// Whether an answer to a release leaves nothing to be done. That the node does not have the claim does if that is `settled`.
pub(crate) fn is_final(answer: &Result<Release>, settled: bool) -> bool {
    match answer {
        Ok(Release::Released { .. }) => true,
        Ok(Release::NotHeld(_)) => settled,
        // What the node refuses now it will refuse the next time.
        Err(error) => !error.is_retryable(),
    }
}

/// What the task of a backlog needs.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) store: &'a Arc<dyn LockStore>,
    pub(crate) clock: &'a Arc<dyn Clock>,
    pub(crate) background: &'a Background,
}

#[derive(Debug, Default)]
pub(crate) struct Backlog {
    queue: Mutex<RetryQueue>,
    arrived: Notify,
    /// Whether there is something in it, and no task.
    is_left: AtomicBool,
}

#[derive(Debug, Default)]
struct RetryQueue {
    /// By the moment of the next try.
    waiting: BTreeMap<(Moment, u64), Try>,
    /// Those that wait, and those that are being tried.
    tokens: HashSet<Token>,
    next_id: u64,
    at_work: Option<AtWork>,
}

/// The task that there is.
#[derive(Clone, Copy, Debug)]
struct AtWork {
    number: u64,
    /// When it shows at the latest that it is there.
    until: Instant,
    /// Whether it hears of what arrives.
    listens: bool,
}

#[derive(Debug)]
struct Try {
    owed: Owed,
    /// How long to wait after it.
    pause: Duration,
}

impl Backlog {
    /// Has a release repeated, beginning now. Without a runtime it is left to the next use.
    pub(crate) fn add(self: &Arc<Self>, owed: Owed, context: Context<'_>) {
        let mut queue = unpoisoned(&self.queue);
        if !queue.tokens.insert(owed.claim.token) {
            return;
        }
        if lapses(context.store)
            && queue.waiting.len() >= MOST
            && let Some((_, dropped)) = queue.waiting.pop_first()
        {
            queue.tokens.remove(&dropped.owed.claim.token);
        }
        queue.put(context.clock.now(), Try { owed, pause: FIRST_PAUSE });
        let now = Instant::now();
        if let Some(at_work) = &mut queue.at_work {
            if now < at_work.until {
                if at_work.listens {
                    at_work.until = at_work.until.min(now + OVERDUE);
                }
                drop(queue);
                return self.arrived.notify_one();
            }
            context.background.leave();
        }
        let number = queue.begin(now);
        // A runtime that is ending drops the task at once, here and now, and its end takes the queue again.
        drop(queue);
        self.work(number, context);
    }

    pub(crate) fn is_full(&self) -> bool {
        unpoisoned(&self.queue).tokens.len() >= MOST
    }

    /// Goes on with what was left.
    pub(crate) fn take_over(self: &Arc<Self>, context: Context<'_>) {
        if !self.is_left.load(Ordering::Relaxed) || !self.is_left.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut queue = unpoisoned(&self.queue);
        if queue.at_work.is_none() && !queue.waiting.is_empty() {
            let number = queue.begin(Instant::now());
            drop(queue);
            self.work(number, context);
        }
    }

    fn work(self: &Arc<Self>, number: u64, Context { store, clock, background }: Context<'_>) {
        let (backlog, store, clock) = (Arc::clone(self), Arc::clone(store), Arc::clone(clock));
        let lapses = lapses(&store);
        background.spawn(Worker { backlog, store, clock, number, lapses, under_way: Vec::new() }.run());
    }
}

/// Whether leases end at the node without a release, though their client lives.
pub(super) fn lapses(store: &Arc<dyn LockStore>) -> bool {
    store.info().capability.liveness.session.is_none()
}

impl RetryQueue {
    fn put(&mut self, at: Moment, retry: Try) {
        self.next_id += 1;
        self.waiting.insert((at, self.next_id), retry);
    }

    /// Another task begins; its number.
    fn begin(&mut self, now: Instant) -> u64 {
        self.next_id += 1;
        self.at_work = Some(AtWork { number: self.next_id, until: now + OVERDUE, listens: false });
        self.next_id
    }

    /// The task with this number shows that it is there; `false` if another one has taken its place.
    fn show(&mut self, number: u64, next: Duration, listens: bool) -> bool {
        let is_current = self.at_work.is_some_and(|at_work| at_work.number == number);
        if is_current {
            let until = Instant::now() + next.saturating_add(OVERDUE).min(Duration::from_secs(86_400));
            self.at_work = Some(AtWork { number, until, listens });
        }
        is_current
    }

    /// Takes out what is due, up to this many. What has lapsed goes, where anything does.
    fn due(&mut self, now: Moment, most: usize, lapses: bool) -> Vec<Try> {
        for (_, Try { owed, .. }) in self.waiting.extract_if(.., |_, Try { owed, .. }| lapses && owed.lapse <= now) {
            self.tokens.remove(&owed.claim.token);
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
    number: u64,
    /// Whether leases end there by themselves.
    lapses: bool,
    /// What is being tried.
    under_way: Vec<Option<Try>>,
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

    /// What is due, and how long to wait if that is nothing; `None` if nothing is left at all, or another task is there.
    fn next(&self, most: usize) -> Option<(Vec<Try>, Duration)> {
        let now = self.clock.now();
        let mut queue = unpoisoned(&self.backlog.queue);
        if !queue.show(self.number, CALLS, false) {
            return None;
        }
        let due = queue.due(now, most, self.lapses);
        let next = queue.waiting.first_key_value().map(|((at, _), _)| at.since(now));
        if due.is_empty() {
            let Some(next) = next else {
                queue.at_work = None;
                return None;
            };
            queue.show(self.number, next, true);
        }
        Some((due, next.unwrap_or_default()))
    }

    /// Tries these. Whether the node gave any answer.
    async fn attempt(&mut self, due: Vec<Try>) -> bool {
        let (sent, mut calls) = (self.clock.now(), Calls::with_capacity(due.len()));
        for (index, Try { owed, .. }) in due.iter().enumerate() {
            let (store, claim) = (Arc::clone(&self.store), owed.claim.clone());
            calls.add(index, async move { store.release(&claim).await });
        }
        self.under_way = due.into_iter().map(Some).collect();
        let mut answered = false;
        while let Some((index, answer)) = calls.next_ever().await {
            let Some(Try { owed, pause }) = self.under_way[index].take() else { continue };
            // A session keeps its requests in order, and what a former one had under way has ended with it.
            let is_final = is_final(&answer, owed.settled || !self.lapses && sent >= owed.lapse);
            answered |= is_final || answer.is_ok();
            let mut queue = unpoisoned(&self.backlog.queue);
            if is_final {
                queue.tokens.remove(&owed.claim.token);
            } else {
                // Twice as long each time, to the end of the lease: most of those that are not settled never will be.
                let now = self.clock.now();
                let pause = pause.min(if self.lapses { owed.lapse.since(now) } else { LONGEST_RETRY });
                queue.put(now + pause, Try { owed, pause: pause * 2 });
            }
        }
        answered
    }
}

impl Drop for Worker {
    /// What is dropped with its runtime is taken over by the next.
    fn drop(&mut self) {
        let mut queue = unpoisoned(&self.backlog.queue);
        for retry in self.under_way.drain(..).flatten() {
            queue.put(self.clock.now(), retry);
        }
        if queue.at_work.is_some_and(|at_work| at_work.number == self.number) {
            queue.at_work = None;
        }
        if queue.at_work.is_none() && !queue.waiting.is_empty() {
            self.backlog.is_left.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::{LockKey, MemoryStore, Mode};

    use super::*;

    /// Adds to a backlog when it is dropped, as what is under way does with its runtime.
    struct Late(Arc<Backlog>, Arc<dyn LockStore>, Arc<Background>);

    impl Late {
        fn add(&self) {
            let key = LockKey::new("a").expect("a name");
            let claim = Claim { key, token: Token::random().expect("random"), mode: Mode::Exclusive };
            let clock = &self.1.info().clock;
            let owed = Owed { claim, lapse: clock.now() + Duration::from_secs(60), settled: true };
            self.0.add(owed, Context { store: &self.1, clock, background: &self.2 });
        }

        fn take_over(&self) {
            self.0.take_over(Context { store: &self.1, clock: &self.1.info().clock, background: &self.2 });
        }
    }

    impl Drop for Late {
        fn drop(&mut self) {
            self.add();
        }
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime")
    }

    #[test]
    fn what_a_runtime_leaves_that_ends_is_taken_over_at_the_next_use() {
        let (backlog, store): (_, Arc<dyn LockStore>) = (Arc::default(), Arc::new(MemoryStore::new()));
        let late = || Late(Arc::clone(&backlog), Arc::clone(&store), Arc::default());
        let (first, left) = (runtime(), late());
        first.block_on(async move {
            tokio::spawn(async move {
                let _left = left;
                std::future::pending::<()>().await;
            });
            tokio::task::yield_now().await;
        });
        drop(first);
        let queued = || unpoisoned(&backlog.queue).waiting.len();
        assert!(unpoisoned(&backlog.queue).at_work.is_none() && queued() == 1);
        runtime().block_on(async {
            let next = late();
            next.take_over();
            while queued() > 0 {
                tokio::task::yield_now().await;
            }
            std::mem::forget(next);
        });
        assert!(unpoisoned(&backlog.queue).tokens.is_empty());
    }
}
