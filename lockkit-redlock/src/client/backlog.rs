//! The backlog of a node: releases that failed there, repeated until it has answered or the lease must have lapsed.
//!
//! Each node has its own, and each is one task, so that a node which is away neither holds up the others nor collects tasks.
//! While it is away one release at a time finds out whether it is back. What the task leaves that ended with its runtime is
//! taken over at the next use of the store; and what one has that shows no sign of life, with the next release that fails.
//!
//! Where leases end with the session, nothing lapses: a release is repeated there until it is answered.

use std::{
    collections::{BTreeMap, HashMap},
    mem,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lockkit_core::{
    Claim, Clock, Error, LockStore, Moment, Release, Result, StoreInfo, Token,
    store::{Background, RETRIED_AT_ONCE, unpoisoned},
};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

use crate::client::{calls::Calls, claims::Entry};

const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// Between two tries of a release that a node has answered, but not settled, and that does not lapse.
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

    /// What was known is to be released as long as this is, too: something of the claim may have come later, or may yet.
    fn merge(&mut self, other: &Self) {
        (self.settled, self.lapse) = (self.settled && other.settled, self.lapse.max(other.lapse));
    }

    /// The same at a node of which it may not be known whether it granted the claim.
    pub(crate) fn at(entry: &Entry, node: usize) -> Self {
        Self::new(entry, entry.is_granted_at(node) && !entry.in_doubt.contains(node))
    }
}

/// Whether an answer to a release at this node leaves nothing to be done. That it does not have the claim does if that is `settled`.
pub(crate) fn is_final(node: &Arc<dyn LockStore>, answer: &Result<Release>, settled: bool) -> bool {
    match answer {
        Ok(Release::Released { .. }) => true,
        Ok(Release::NotHeld(_)) => settled,
        // What the node refuses now it will refuse the next time, until it lapses. Where nothing does, whatever is in the way may be put
        // right, such as rights that an administrator took away.
        Err(error) => !error.is_retryable() && lapses(node),
    }
}

/// Whether the node has answered, if only to refuse.
fn came_through(answer: &Result<Release>) -> bool {
    !answer.as_ref().is_err_and(Error::is_retryable)
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
}

#[derive(Debug, Default)]
struct RetryQueue {
    /// By the moment of the next try.
    waiting: BTreeMap<(Moment, u64), Try>,
    /// What the present task is trying.
    under_way: Vec<Option<Try>>,
    /// What waits and what is being tried, by token.
    owed: HashMap<Token, Owed>,
    next_id: u64,
    at_work: Option<AtWork>,
}

/// The task that there is.
#[derive(Debug)]
struct AtWork {
    /// When it shows at the latest that it is there.
    until: Instant,
    /// Whether it hears of what arrives.
    listens: bool,
    /// Its own, by which it is known, too: one that stands still takes no wake-up of the next.
    arrived: Arc<Notify>,
}

#[derive(Debug)]
struct Try {
    token: Token,
    /// How long to wait after it.
    pause: Duration,
}

impl Backlog {
    /// Has a release repeated, beginning now. Without a runtime it is left to the next use.
    pub(crate) fn add(self: &Arc<Self>, owed: Owed, context: Context<'_>) {
        let mut queue = unpoisoned(&self.queue);
        let token = owed.claim.token;
        let is_new = !queue.owed.contains_key(&token);
        if is_new {
            // A node that is away for long collects no more than that. What is dropped lapses; where nothing does, the node is not
            // asked for leases as long as there are so many.
            if lapses(context.store)
                && queue.waiting.len() >= StoreInfo::MOST_OWED
                && let Some((_, dropped)) = queue.waiting.pop_first()
            {
                queue.owed.remove(&dropped.token);
            }
            queue.put(context.clock.now(), Try { token, pause: FIRST_PAUSE });
        }
        queue.owed.entry(token).and_modify(|known| known.merge(&owed)).or_insert(owed);
        let now = Instant::now();
        if let Some(at_work) = &mut queue.at_work {
            if now < at_work.until {
                if !is_new {
                    return;
                }
                if at_work.listens {
                    at_work.until = at_work.until.min(now + OVERDUE);
                }
                let arrived = Arc::clone(&at_work.arrived);
                drop(queue);
                return arrived.notify_one();
            }
            context.background.leave();
        }
        let worker = self.worker(&mut queue, context);
        // A runtime that is ending drops the task at once, here and now, and its end takes the queue again.
        drop(queue);
        context.background.spawn(worker.run());
    }

    /// How many there are.
    pub(crate) fn length(&self) -> usize {
        unpoisoned(&self.queue).owed.len()
    }

    /// Goes on with what was left.
    pub(crate) fn adopt_work(self: &Arc<Self>, context: Context<'_>) {
        let mut queue = unpoisoned(&self.queue);
        if queue.at_work.is_none() && !queue.waiting.is_empty() {
            let worker = self.worker(&mut queue, context);
            drop(queue);
            context.background.spawn(worker.run());
        }
    }

    /// The next task. It begins with the releases that the one before had under way: nobody drives its runtime.
    fn worker(self: &Arc<Self>, queue: &mut RetryQueue, Context { store, clock, .. }: Context<'_>) -> Worker {
        let (backlog, store, clock) = (Arc::clone(self), Arc::clone(store), Arc::clone(clock));
        let lapses = lapses(&store);
        let arrived = queue.begin(clock.now());
        Worker { backlog, store, clock, arrived, lapses }
    }
}

/// Whether leases end at the node without a release, though their client lives.
fn lapses(store: &Arc<dyn LockStore>) -> bool {
    store.info().capability.liveness.session.is_none()
}

impl RetryQueue {
    fn put(&mut self, at: Moment, retry: Try) {
        self.next_id += 1;
        self.waiting.insert((at, self.next_id), retry);
    }

    /// Another task begins; how it hears of what arrives.
    fn begin(&mut self, now: Moment) -> Arc<Notify> {
        self.put_back(now);
        let (until, arrived) = (Instant::now() + OVERDUE, Arc::<Notify>::default());
        self.at_work = Some(AtWork { until, listens: false, arrived: Arc::clone(&arrived) });
        arrived
    }

    /// What is under way is to be tried again.
    fn put_back(&mut self, now: Moment) {
        for retry in mem::take(&mut self.under_way).into_iter().flatten() {
            self.put(now, retry);
        }
    }

    /// The task that there is, if it is this one.
    fn current(&mut self, task: &Arc<Notify>) -> Option<&mut AtWork> {
        self.at_work.as_mut().filter(|at_work| Arc::ptr_eq(&at_work.arrived, task))
    }

    /// This task shows that it is there; `false` if another one has taken its place.
    fn show(&mut self, task: &Arc<Notify>, next: Duration, listens: bool) -> bool {
        let Some(at_work) = self.current(task) else { return false };
        at_work.until = Instant::now() + next.saturating_add(OVERDUE).min(Duration::from_secs(86_400));
        at_work.listens = listens;
        true
    }

    /// Takes out what is due, up to this many. What has lapsed goes, where anything does.
    fn due(&mut self, now: Moment, most: usize, lapses: bool) -> Vec<Try> {
        let has_lapsed = |token: &Token| lapses && self.owed.get(token).is_none_or(|owed| owed.lapse <= now);
        let lapsed: Vec<_> = self.waiting.extract_if(.., |_, Try { token, .. }| has_lapsed(token)).collect();
        lapsed.iter().for_each(|(_, Try { token, .. })| drop(self.owed.remove(token)));
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
    arrived: Arc<Notify>,
    /// Whether leases end there by themselves.
    lapses: bool,
}

impl Worker {
    async fn run(self) {
        let mut away = None;
        while let Some((due, next)) = self.next(if away.is_some() { 1 } else { RETRIED_AT_ONCE }) {
            if due.is_empty() {
                let _ = timeout(next, self.arrived.notified()).await;
            } else if self.attempt(due).await {
                away = None;
            } else {
                let pause = away.map_or(FIRST_PAUSE, |pause: Duration| (pause * 2).min(LONGEST_PAUSE));
                away = Some(pause);
                sleep(pause).await;
            }
        }
    }

    /// What is due, which is under way from here on, and how long to wait if that is nothing; `None` if nothing is left at all, or another
    /// task is there.
    fn next(&self, most: usize) -> Option<(Vec<Claim>, Duration)> {
        let now = self.clock.now();
        let mut queue = unpoisoned(&self.backlog.queue);
        if !queue.show(&self.arrived, CALLS, false) {
            return None;
        }
        let due = queue.due(now, most, self.lapses);
        let next = queue.waiting.first_key_value().map(|((at, _), _)| at.since(now));
        if due.is_empty() {
            let Some(next) = next else {
                queue.at_work = None;
                return None;
            };
            queue.show(&self.arrived, next, true);
        }
        let claims = due.iter().filter_map(|retry| Some(queue.owed.get(&retry.token)?.claim.clone())).collect();
        queue.under_way = due.into_iter().map(Some).collect();
        Some((claims, next.unwrap_or_default()))
    }

    /// Tries these. Whether the node gave any answer.
    async fn attempt(&self, due: Vec<Claim>) -> bool {
        let (sent, mut calls) = (self.clock.now(), Calls::with_capacity(due.len()));
        for (index, claim) in due.into_iter().enumerate() {
            let store = Arc::clone(&self.store);
            calls.add(index, async move { store.release(&claim).await });
        }
        let mut answered = false;
        while let Some((index, answer)) = calls.next_ever().await {
            let mut queue = unpoisoned(&self.backlog.queue);
            // Another task has taken over what is under way, or this one has it.
            let is_current = queue.current(&self.arrived).is_some();
            let retry = queue.under_way.get_mut(index).filter(|_| is_current).and_then(Option::take);
            let Some(Try { token, pause }) = retry else { continue };
            let Some(&Owed { lapse, settled, .. }) = queue.owed.get(&token) else { continue };
            // A session keeps its requests in order, and what a former one had under way has ended with it.
            let (settled, came_through) = (settled || !self.lapses && sent >= lapse, came_through(&answer));
            answered |= came_through;
            if is_final(&self.store, &answer, settled) {
                queue.owed.remove(&token);
            } else {
                // Twice as long each time, to the end of the lease: most of those that are not settled never will be.
                let now = self.clock.now();
                let longest = match came_through {
                    false => LONGEST_PAUSE,
                    true if self.lapses => lapse.since(now),
                    true => LONGEST_RETRY,
                };
                let pause = pause.min(longest);
                queue.put(now + pause, Try { token, pause: pause * 2 });
            }
        }
        answered
    }
}

impl Drop for Worker {
    /// What is dropped with its runtime is taken over by the next.
    fn drop(&mut self) {
        let mut queue = unpoisoned(&self.backlog.queue);
        if queue.current(&self.arrived).is_some() {
            queue.put_back(self.clock.now());
            queue.at_work = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use async_trait::async_trait;
    use lockkit_core::{LockKey, MemoryStore, Mode};
    use lockkit_testkit::{Alter, Altered};

    use super::*;

    /// Adds to a backlog when it is dropped, as what is under way does with its runtime.
    struct Late(Arc<Backlog>, Arc<dyn LockStore>, Arc<Background>);

    impl Late {
        fn add(&self) {
            self.owe(Token::random().expect("random"), Duration::from_secs(60), true);
        }

        fn owe(&self, token: Token, left: Duration, settled: bool) {
            let claim = Claim { key: LockKey::new("a").expect("a name"), token, mode: Mode::Exclusive };
            let clock = &self.1.info().clock;
            let owed = Owed { claim, lapse: clock.now() + left, settled };
            self.0.add(owed, Context { store: &self.1, clock, background: &self.2 });
        }

        fn adopt_work(&self) {
            self.0.adopt_work(Context { store: &self.1, clock: &self.1.info().clock, background: &self.2 });
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

    /// Answers no release at first.
    #[derive(Debug)]
    struct Silent {
        store: MemoryStore,
        is_silent: AtomicBool,
        asked: Mutex<Vec<Token>>,
    }

    #[async_trait]
    impl Alter for Silent {
        fn inner(&self) -> &dyn LockStore {
            &self.store
        }

        async fn release(&self, claim: &Claim) -> Result<Release> {
            unpoisoned(&self.asked).push(claim.token);
            while self.is_silent.load(Ordering::Relaxed) {
                tokio::task::yield_now().await;
            }
            self.store.release(claim).await
        }
    }

    #[test]
    fn what_a_runtime_tries_that_stands_still_is_tried_by_the_next() {
        let silent = Silent { store: MemoryStore::new(), is_silent: AtomicBool::new(true), asked: Mutex::default() };
        let silent = Arc::new(Altered(silent));
        let (backlog, store): (Arc<Backlog>, Arc<dyn LockStore>) = (Arc::default(), silent.clone());
        let asked = || unpoisoned(&silent.0.asked).clone();
        let start = Instant::now();
        let eventually = async |is_so: &dyn Fn() -> bool| {
            while !is_so() {
                assert!(start.elapsed() < Duration::from_secs(5), "asked for {:?}", asked());
                tokio::task::yield_now().await;
            }
        };
        let late = || std::mem::ManuallyDrop::new(Late(Arc::clone(&backlog), Arc::clone(&store), Arc::default()));
        let still = runtime();
        still.block_on(async {
            late().add();
            eventually(&|| asked().len() == 1).await;
        });
        silent.0.is_silent.store(false, Ordering::Relaxed);
        unpoisoned(&backlog.queue).at_work.as_mut().expect("a task").until = Instant::now();
        runtime().block_on(async {
            late().add();
            eventually(&|| asked()[1..].contains(&asked()[0])).await;
            eventually(&|| unpoisoned(&backlog.queue).owed.is_empty()).await;
        });
        drop(still);
        assert!(unpoisoned(&backlog.queue).waiting.is_empty(), "what is done is not left by the one before");
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
            next.adopt_work();
            while queued() > 0 {
                tokio::task::yield_now().await;
            }
            std::mem::forget(next);
        });
        assert!(unpoisoned(&backlog.queue).owed.is_empty());
    }

    /// That the node does not have the claim is final at first, and no more when another request for it may be on its way.
    #[test]
    fn a_release_that_is_known_learns_that_it_is_not_settled() {
        let silent = Silent { store: MemoryStore::new(), is_silent: AtomicBool::new(true), asked: Mutex::default() };
        let silent = Arc::new(Altered(silent));
        let (backlog, store): (Arc<Backlog>, Arc<dyn LockStore>) = (Arc::default(), silent.clone());
        let late = std::mem::ManuallyDrop::new(Late(Arc::clone(&backlog), store, Arc::default()));
        let token = Token::random().expect("random");
        runtime().block_on(async {
            late.owe(token, Duration::from_millis(1), true);
            while unpoisoned(&silent.0.asked).is_empty() {
                tokio::task::yield_now().await;
            }
            late.owe(token, Duration::from_millis(500), false);
            silent.0.is_silent.store(false, Ordering::Relaxed);
            while !unpoisoned(&backlog.queue).owed.is_empty() {
                tokio::task::yield_now().await;
            }
        });
        assert!(unpoisoned(&silent.0.asked).len() > 1, "the node was asked once");
    }
}
