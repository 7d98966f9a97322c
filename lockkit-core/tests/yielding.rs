//! When a holder is asked to yield, and when no longer.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Effect, Error, ErrorKind, Guard, HolderInfo, Lock, LockKey, LockStore,
    Locker, MemoryStore, Mode, Outcome, Prefix, Release, Result, Token,
};
use lockkit_testkit::{Alter, Altered, Slow, faults::poll_until};
use tokio::{
    sync::Notify,
    task::JoinHandle,
    time::{sleep, timeout},
};

/// How long anything awaited may take. Not how long it does take.
const PATIENCE: Duration = Duration::from_secs(10);

fn waits(lock: Lock) -> JoinHandle<Result<Guard>> {
    tokio::spawn(async move { lock.acquire().await })
}

async fn until(guard: &Guard, requested: bool) {
    let seen = async {
        while guard.yield_requested().await.expect("in memory") != requested {
            sleep(Duration::from_millis(1)).await;
        }
    };
    timeout(PATIENCE, seen).await.unwrap_or_else(|_| panic!("it should be {requested} that the holder is asked"));
}

async fn taken(guard: JoinHandle<Result<Guard>>) -> Guard {
    timeout(PATIENCE, guard).await.expect("in time").expect("no panic").expect("granted")
}

/// What is asked of requests to yield takes effect, and no answer comes.
#[derive(Debug)]
struct SilentOfRequests {
    inner: MemoryStore,
    is_asked: Notify,
}

#[async_trait]
impl Alter for SilentOfRequests {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let answer = self.inner.acquire(request).await;
        if request.claim.key.as_str().starts_with("lockkit/yield/") {
            self.is_asked.notify_one();
            return pending().await;
        }
        answer
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if claim.key.as_str().starts_with("lockkit/yield/") { pending().await } else { self.inner.release(claim).await }
    }
}

#[tokio::test]
async fn a_holder_is_not_asked_by_its_own_request_whose_answer_is_still_to_come() -> Result<()> {
    let memory = MemoryStore::new();
    let store = Arc::new(Altered(SilentOfRequests { inner: memory.clone(), is_asked: Notify::new() }));
    let (holder, locker) = (Locker::new(memory), Locker::shared_builder(Arc::<Altered<_>>::clone(&store)).build());
    let held = holder.lock("a").acquire().await?;
    let waiting = waits(locker.lock("a").ask_to_yield());
    store.0.is_asked.notified().await;
    assert!(held.yield_requested().await?);
    assert_eq!(held.release().await?, Outcome::Released);
    let mine = taken(waiting).await;
    assert!(!mine.yield_requested().await?, "it is its own request");
    Ok(())
}

/// A lease that takes the place of the one that was waited for, and another hold of it, are the same holder's.
#[tokio::test]
async fn nor_is_it_as_a_reader_or_in_another_hold() -> Result<()> {
    for reads in [true, false] {
        let memory = MemoryStore::new();
        let store = Arc::new(Altered(SilentOfRequests { inner: memory.clone(), is_asked: Notify::new() }));
        let (holder, locker) = (Locker::new(memory), Locker::shared_builder(Arc::<Altered<_>>::clone(&store)).build());
        let held = holder.lock("a").acquire().await?;
        let prices = locker.owner().rw_lock("a");
        let waiting = waits(prices.write().ask_to_yield());
        store.0.is_asked.notified().await;
        assert_eq!(held.release().await?, Outcome::Released);
        let mine = taken(waiting).await;
        let hold = if reads { mine.downgrade().await? } else { prices.write().acquire().await? };
        assert!(!hold.yield_requested().await?, "it is its own request");
    }
    Ok(())
}

/// The first request is answered, and those after it are not.
#[derive(Debug)]
struct SilentLater {
    silent: SilentOfRequests,
    has_answered: AtomicBool,
}

#[async_trait]
impl Alter for SilentLater {
    fn inner(&self) -> &dyn LockStore {
        self.silent.inner()
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let is_request = request.claim.key.as_str().starts_with("lockkit/yield/");
        let is_first = is_request && !self.has_answered.swap(true, Ordering::SeqCst);
        if is_first { self.inner().acquire(request).await } else { self.silent.acquire(request).await }
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.silent.release(claim).await
    }
}

/// The request was lost, and made anew: the new one is its own, too.
#[tokio::test]
async fn a_holder_is_not_asked_by_the_request_that_it_made_after_a_lost_one() -> Result<()> {
    let memory = MemoryStore::new();
    let silent = SilentOfRequests { inner: memory.clone(), is_asked: Notify::new() };
    let store = Arc::new(Altered(SilentLater { silent, has_answered: AtomicBool::new(false) }));
    let (holder, locker) = (Locker::new(memory), Locker::shared_builder(Arc::<Altered<_>>::clone(&store)).build());
    let held = holder.lock("a").acquire().await?;
    let waiting = waits(locker.lock("a").ttl(Duration::from_secs(3)).ask_to_yield());
    until(&held, true).await;
    let request = holder.lock("lockkit/yield/a").inspect().await?.holders[0].token.expect("a client of lockkit");
    // It is renewed after a third of the ttl, and the loss found out by that.
    assert!(matches!(holder.break_lock("lockkit/yield/a", request).await?, Release::Released { .. }));
    timeout(PATIENCE, store.0.silent.is_asked.notified()).await.expect("it asks again");
    assert_eq!(held.release().await?, Outcome::Released);
    let mine = taken(waiting).await;
    assert!(!mine.yield_requested().await?, "it is its own request");
    Ok(())
}

#[tokio::test]
async fn one_that_asks_takes_over_the_request_of_another() -> Result<()> {
    let memory = MemoryStore::new();
    let [holder, one, another] = [(); 3].map(|()| Locker::new(memory.clone()));
    let held = holder.lock("a").acquire().await?;
    assert!(!held.yield_requested().await?);
    let first = waits(one.lock("a").ask_to_yield());
    until(&held, true).await;
    let second = waits(another.lock("a").ask_to_yield());
    first.abort();
    drop(first.await);
    // The other one still asks, or does so in a moment.
    until(&held, true).await;
    second.abort();
    drop(second.await);
    until(&held, false).await;
    Ok(())
}

#[tokio::test]
async fn each_holder_is_asked_by_those_that_still_wait() -> Result<()> {
    let memory = MemoryStore::new();
    let locker = Locker::new(memory.clone());
    let held = locker.lock("a").acquire().await?;
    let waiting: Vec<_> = (0..2).map(|_| waits(Locker::new(memory.clone()).lock("a").ask_to_yield())).collect();
    until(&held, true).await;
    assert_eq!(held.release().await?, Outcome::Released);
    let (first, mut left) = timeout(PATIENCE, first_of(waiting)).await.expect("one of them");
    // The request of the other one takes a moment.
    until(&first, true).await;
    assert_eq!(first.release().await?, Outcome::Released);
    let last = taken(left.pop().expect("two waited")).await;
    assert!(!last.yield_requested().await?, "nobody is left");
    Ok(())
}

/// The first that is granted, and the others.
async fn first_of(mut waiting: Vec<JoinHandle<Result<Guard>>>) -> (Guard, Vec<JoinHandle<Result<Guard>>>) {
    loop {
        if let Some(place) = waiting.iter().position(JoinHandle::is_finished) {
            return (taken(waiting.remove(place)).await, waiting);
        }
        sleep(Duration::from_millis(1)).await;
    }
}

/// Their requests are of one process, too: each has a token of its own.
#[tokio::test]
async fn a_holder_is_asked_by_others_of_its_process() -> Result<()> {
    let memory = MemoryStore::new();
    let held = Locker::new(memory.clone()).lock("a").acquire().await?;
    let locker = Locker::new(memory);
    let mut waiting: Vec<_> = (0..3).map(|_| waits(locker.lock("a").ask_to_yield())).collect();
    let mut holder = held;
    while !waiting.is_empty() {
        until(&holder, true).await;
        assert_eq!(holder.release().await?, Outcome::Released);
        (holder, waiting) = timeout(PATIENCE, first_of(waiting)).await.expect("one of them");
    }
    assert!(!holder.yield_requested().await?, "nobody is left");
    Ok(())
}

#[tokio::test]
async fn nobody_is_asked_for_a_free_lock_nor_by_a_try() -> Result<()> {
    let memory = MemoryStore::new();
    let locker = Locker::new(memory.clone());
    let held = locker.lock("a").ask_to_yield().acquire().await?;
    assert!(locker.lock("a").ask_to_yield().try_acquire().await?.is_none());
    assert!(!held.yield_requested().await?);
    // What was asked at the store: the lock alone has ever had a holder.
    let request = locker.lock("lockkit/yield/a").inspect().await?;
    assert_eq!(request.fence, None, "a request was made");
    Ok(())
}

#[tokio::test]
async fn the_request_of_one_that_died_lapses() -> Result<()> {
    let memory = MemoryStore::new();
    let held = Locker::new(memory.clone()).lock("a").acquire().await?;
    let store: Arc<dyn LockStore> = Arc::new(memory);
    let claim = Claim { key: LockKey::new("lockkit/yield/a")?, token: Token::random()?, mode: Mode::Exclusive };
    let request = AcquireRequest::new(claim, Duration::from_millis(300), HolderInfo::this_process());
    assert!(matches!(store.acquire(&request).await?, Attempt::Granted(_)));
    until(&held, true).await;
    until(&held, false).await;
    Ok(())
}

#[tokio::test]
async fn readers_are_asked_too() -> Result<()> {
    let memory = MemoryStore::new();
    let (mine, other) = (Locker::new(memory.clone()), Locker::new(memory));
    let prices = mine.rw_lock("prices");
    let readers = [prices.read().acquire().await?, prices.read().acquire().await?];
    let writer = waits(other.rw_lock("prices").write().ask_to_yield());
    for reader in readers {
        until(&reader, true).await;
        assert_eq!(reader.release().await?, Outcome::Released);
    }
    assert!(!taken(writer).await.yield_requested().await?);
    Ok(())
}

/// Nobody hears what became of the first acquisition.
#[derive(Debug)]
struct Mute {
    inner: MemoryStore,
    is_heard: AtomicBool,
    /// Whether releases have answers; else they take as long as the test.
    releases: bool,
}

impl Mute {
    fn locker(inner: &MemoryStore, releases: bool) -> Locker {
        Locker::new(Altered(Self { inner: inner.clone(), is_heard: AtomicBool::new(false), releases }))
    }
}

#[async_trait]
impl Alter for Mute {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let answer = self.inner.acquire(request).await;
        if self.is_heard.swap(true, Ordering::SeqCst) {
            return answer;
        }
        Err(Error::new(ErrorKind::TimedOut, "no answer").unknown_effect())
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if self.releases || claim.key.as_str() != "a" { self.inner.release(claim).await } else { pending().await }
    }
}

#[tokio::test]
async fn that_its_own_first_claim_was_in_the_way_is_no_answer() {
    let locker = Mute::locker(&MemoryStore::new(), false);
    let asked = locker.lock("a").ask_to_yield().acquire_within(Duration::from_millis(50)).await;
    assert_eq!(asked.expect_err("nobody else has it").effect(), Effect::Unknown);
}

/// A claim without an answer is in nobody's way once it must have lapsed: from then on the lock is another's.
#[tokio::test]
async fn a_first_claim_that_is_over_does_not_spoil_the_answer() -> Result<()> {
    let memory = MemoryStore::new();
    let held = Locker::new(memory.clone()).lock("a").acquire().await?;
    let lock = Mute::locker(&memory, true).lock("a").ttl(Duration::from_millis(200)).ask_to_yield();
    assert!(lock.acquire_within(Duration::from_secs(1)).await?.is_none(), "another has it");
    held.release().await.map(drop)
}

#[tokio::test]
async fn a_name_that_is_too_long_to_ask_for_is_refused() -> Result<()> {
    let prefixed = Prefix::new("billing/", MemoryStore::new())?;
    for (locker, most) in [(Locker::new(MemoryStore::new()), 512), (Locker::new(prefixed), 504)] {
        for length in [most, most - 13] {
            let name = "n".repeat(length);
            let held = locker.lock(&name).acquire().await?;
            let refused = locker.lock(&name).ask_to_yield().acquire().await.expect_err("the request has no name");
            assert_eq!(refused.kind(), ErrorKind::InvalidInput);
            assert!(refused.to_string().contains(&format!("at most {} bytes", most - 14)), "{refused}");
            assert!(!held.yield_requested().await?);
        }
        let held = locker.lock("n".repeat(most - 14)).acquire().await?;
        assert!(!held.yield_requested().await?);
    }
    Ok(())
}

/// A store that does not let this user have the locks with which requests are made.
#[derive(Debug)]
struct NoRequests(MemoryStore);

#[async_trait]
impl Alter for NoRequests {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if request.claim.key.as_str().starts_with("lockkit/yield/") {
            return Err(Error::new(ErrorKind::Denied, "no permission"));
        }
        self.0.acquire(request).await
    }
}

#[tokio::test]
async fn a_request_that_is_refused_keeps_nobody_from_waiting() -> Result<()> {
    let memory = MemoryStore::new();
    let held = Locker::new(memory.clone()).lock("a").acquire().await?;
    let waiter = waits(Locker::new(Altered(NoRequests(memory))).lock("a").ask_to_yield());
    sleep(Duration::from_millis(50)).await;
    assert!(!waiter.is_finished() && !held.yield_requested().await?);
    assert_eq!(held.release().await?, Outcome::Released);
    assert!(taken(waiter).await.is_held());
    Ok(())
}

/// Nobody answers the release of a request.
#[derive(Debug)]
struct KeepsRequests(MemoryStore);

#[async_trait]
impl Alter for KeepsRequests {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if claim.key.as_str() == "a" { self.0.release(claim).await } else { pending().await }
    }
}

/// From the grant on, an acquisition waits for nothing that somebody would have to poll it for.
#[tokio::test]
async fn the_end_of_a_request_keeps_nobody_from_a_lock_that_was_granted() -> Result<()> {
    let memory = MemoryStore::new();
    let held = Locker::new(memory.clone()).lock("a").acquire().await?;
    let waiter = waits(Locker::new(Altered(KeepsRequests(memory.clone()))).lock("a").ask_to_yield());
    until(&held, true).await;
    drop(held);
    let guard = taken(waiter).await;
    assert!(!guard.yield_requested().await?, "it asked for nobody else");
    assert_eq!(Locker::new(memory).lock("lockkit/yield/a").inspect().await?.holders.len(), 1);
    Ok(())
}

/// The first acquisition takes effect, and is told to have failed when another one of the process waits. Those that come
/// later are not told when the lock is free.
#[derive(Debug)]
struct LateToFail {
    inner: MemoryStore,
    asked: AtomicUsize,
    fail: Notify,
}

#[async_trait]
impl Alter for LateToFail {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let first = request.claim.key.as_str() == "a" && self.asked.fetch_add(1, Ordering::SeqCst) == 0;
        match self.inner.acquire(&AcquireRequest { wait: Duration::ZERO, ..request.clone() }).await? {
            Attempt::Granted(_) if first => {
                self.fail.notified().await;
                Err(Error::new(ErrorKind::TimedOut, "no answer").unknown_effect())
            }
            Attempt::Contended(contention) => {
                Ok(Attempt::Contended(Contention { retry_after: Some(PATIENCE), ..contention }))
            }
            granted @ Attempt::Granted(_) => Ok(granted),
        }
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        // The other one asks before that.
        while claim.key.as_str() == "a" && self.asked.load(Ordering::SeqCst) < 2 {
            tokio::task::yield_now().await;
        }
        self.inner.release(claim).await
    }
}

/// What another task of the process was told of the lock may have been about the claim of this one.
#[tokio::test]
async fn that_its_own_first_claim_was_in_the_way_of_others_is_no_answer() -> Result<()> {
    let store = LateToFail { inner: MemoryStore::new(), asked: AtomicUsize::new(0), fail: Notify::new() };
    let store = Arc::new(Altered(store));
    let locker = Locker::new(Arc::clone(&store));
    let lock = locker.lock("a").ask_to_yield();
    let asking = tokio::spawn(async move { lock.acquire_within(Duration::from_millis(300)).await });
    while store.0.asked.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let behind = waits(locker.lock("a"));
    tokio::task::yield_now().await;
    store.0.fail.notify_one();
    let asked = timeout(PATIENCE, asking).await.expect("in time").expect("no panic");
    assert!(!matches!(asked, Ok(None)), "nobody else has had it");
    behind.abort();
    Ok(())
}

/// A server that stands still.
#[derive(Debug)]
struct Still(MemoryStore);

#[async_trait]
impl Alter for Still {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn acquire(&self, _: &AcquireRequest) -> Result<Attempt> {
        pending().await
    }
}

/// The first question is bounded by the caller's time, too.
#[tokio::test]
async fn one_that_asks_a_server_that_stands_still_waits_no_longer_than_another() {
    let locker = Locker::new(Altered(Still(MemoryStore::new())));
    for lock in [locker.lock("a"), locker.lock("b").ask_to_yield()] {
        let asked = timeout(PATIENCE, lock.acquire_within(Duration::from_millis(50))).await.expect("in time");
        let error = asked.expect_err("no answer");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::Unknown));
    }
}

/// While it waits, while it is granted, and while it gives its request back.
#[tokio::test]
async fn one_that_is_dropped_anywhere_leaves_neither_lock_nor_request() -> Result<()> {
    let mut ended = false;
    for polls in 1..200 {
        let memory = MemoryStore::new();
        let (holder, waiter) = (Locker::new(memory.clone()), Locker::new(Altered(Slow(memory.clone()))));
        let held = holder.lock("a").acquire().await?;
        let lock = waiter.lock("a").ask_to_yield();
        {
            let mut asking = std::pin::pin!(lock.acquire());
            // The holder yields as soon as it is asked.
            let yields = async {
                while !held.yield_requested().await? {
                    tokio::task::yield_now().await;
                }
                held.release().await
            };
            let (asked, yielded) =
                tokio::join!(poll_until(asking.as_mut(), polls, || ()), timeout(Duration::from_millis(100), yields));
            ended = asked.is_some();
            drop((asked, yielded));
        }
        for name in ["a", "lockkit/yield/a"] {
            let free = timeout(PATIENCE, Locker::new(memory.clone()).lock(name).acquire()).await;
            assert!(free.is_ok_and(|guard| guard.is_ok()), "{name} stays held, dropped at poll {polls}");
        }
        if ended {
            break;
        }
    }
    assert!(ended, "it does not end");
    Ok(())
}
