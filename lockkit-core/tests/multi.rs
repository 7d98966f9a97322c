//! Several locks, all or none.

mod paused;

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, ErrorKind, Lock, LockKey, LockStore, Locker, LossReason, MemoryStore,
    MultiLock, Observed, Outcome, Prefix, Release, Result, ShiftedClock,
    store::{Record, Records, Swap, identity},
};
use lockkit_testkit::{Alter, Altered};

use self::paused::paused_store;

const SHORT: Duration = Duration::from_millis(300);

async fn is_free(locker: &Locker, name: &str) -> Result<bool> {
    Ok(match locker.lock(name).try_acquire().await? {
        Some(guard) => guard.release().await? == Outcome::Released,
        None => false,
    })
}

#[tokio::test]
async fn all_or_none() -> Result<()> {
    let store = MemoryStore::new();
    let (mine, other) = (Locker::new(store.clone()), Locker::new(store));
    let in_the_way = other.lock("b").acquire().await?;
    let multi = mine.multi(["c", "b", "a"]);
    assert!(multi.try_acquire().await?.is_none());
    assert!(multi.acquire_within(SHORT).await?.is_none());
    assert!(is_free(&other, "a").await? && is_free(&other, "c").await?, "nothing is kept");
    assert_eq!(in_the_way.release().await?, Outcome::Released);
    let guard = multi.try_acquire().await?.expect("all are free");
    let names: Vec<_> = guard.guards().iter().map(|guard| guard.key().as_str()).collect();
    assert_eq!(names, ["c", "b", "a"], "as they were named");
    for name in ["a", "b", "c"] {
        assert!(other.lock(name).try_acquire().await?.is_none(), "{name}");
    }
    assert!(guard.is_held() && guard.remaining() > Duration::from_secs(20));
    assert_eq!(guard.release().await?, Outcome::Released);
    assert!(is_free(&other, "a").await? && is_free(&other, "b").await? && is_free(&other, "c").await?);
    Ok(())
}

#[tokio::test]
async fn what_is_named_twice_is_taken_once() -> Result<()> {
    let store = MemoryStore::new();
    let (mine, again) = (Locker::new(store.clone()), Locker::new(store));
    // Two clients of one store, which is known by its identity.
    let guard = MultiLock::new([mine.lock("a"), again.lock("a"), mine.lock("a")]).acquire().await?;
    assert_eq!(guard.guards().len(), 1);
    assert_eq!(guard.release().await?, Outcome::Released);
    let error = MultiLock::new([mine.lock("a"), mine.rw_lock("a").read()]).acquire().await.expect_err("two modes");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.message().contains("twice"), "{error}");
    assert_eq!(mine.multi([""; 0]).acquire().await.expect_err("none").kind(), ErrorKind::InvalidInput);
    assert_eq!(mine.multi(["a", ""]).acquire().await.expect_err("no name").kind(), ErrorKind::InvalidInput);
    assert!(is_free(&again, "a").await?);
    Ok(())
}

/// Two parts of a store are two stores, and their names are in each client's own order.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nobody_waits_in_a_circle() -> Result<()> {
    let store = MemoryStore::new();
    let part = |name: &str, store: MemoryStore| Prefix::new(name, store).map(Locker::new);
    let locks = |store: &MemoryStore| -> Result<Vec<Lock>> {
        let (left, right) = (part("left/", store.clone())?, part("right/", store.clone())?);
        Ok(vec![left.lock("a"), right.lock("a"), left.lock("b"), right.lock("b")])
    };
    let (inside, done) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut tasks = Vec::new();
    for turn in 0..4 {
        let mut locks = locks(&store)?;
        locks.rotate_left(turn);
        if turn % 2 == 1 {
            locks.reverse();
        }
        let (inside, done) = (Arc::clone(&inside), Arc::clone(&done));
        tasks.push(tokio::spawn(async move {
            let multi = MultiLock::new(locks);
            for _ in 0..50 {
                let guard = multi.acquire().await?;
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are in");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                assert_eq!(guard.release().await?, Outcome::Released);
                done.fetch_add(1, Ordering::SeqCst);
            }
            Result::Ok(())
        }));
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(30), task).await.expect("a circle").expect("no panic")?;
    }
    assert_eq!(done.load(Ordering::SeqCst), 200);
    Ok(())
}

#[tokio::test]
async fn if_one_is_lost_the_whole_is() -> Result<()> {
    let store = MemoryStore::new();
    let (mine, other) = (Locker::new(store.clone()), Locker::new(store));
    let guard = mine.multi(["a", "b"]).acquire().await?;
    other.break_lock("b", guard.guards()[1].token()).await?;
    let work = async {
        guard.guards()[1].renew().await.expect_err("it was broken");
        std::future::pending::<()>().await;
    };
    assert_eq!(guard.run(work).await.expect_err("it is stopped").kind(), ErrorKind::Lost);
    assert_eq!(guard.lost().await, LossReason::Gone);
    assert!(!guard.is_held() && guard.remaining().is_zero());
    assert_eq!(guard.ensure(Duration::ZERO).expect_err("lost").kind(), ErrorKind::Lost);
    assert!(guard.guards()[0].is_held());
    assert!(matches!(guard.release().await?, Outcome::NotHeld(_)));
    assert!(is_free(&other, "a").await? && is_free(&other, "b").await?);
    let sum = mine.multi(["a", "b"]).acquire().await?.run(async { 3 }).await?;
    assert_eq!(sum, 3);
    Ok(())
}

#[tokio::test]
async fn a_dropped_future_releases_those_that_were_taken() -> Result<()> {
    let store = MemoryStore::new();
    let (mine, other) = (Locker::new(store.clone()), Locker::new(store));
    let in_the_way = other.lock("b").acquire().await?;
    let multi = mine.multi(["a", "b"]);
    {
        let mut waiting = pin!(multi.acquire());
        while other.lock("a").inspect().await?.holders.is_empty() {
            assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            tokio::task::yield_now().await;
        }
    }
    let guard = other.lock("a").acquire_within(Duration::from_secs(10)).await?;
    assert!(guard.is_some(), "it was released");
    drop(in_the_way);
    Ok(())
}

/// Wrapped as it may be, it is one store; a store that keeps no records can't be told from others.
#[tokio::test]
async fn stores_are_told_apart_by_their_identities() -> Result<()> {
    let store = MemoryStore::new();
    let wrapped: Arc<dyn LockStore> = Arc::new(Observed::new(store.clone()));
    assert_eq!(identity(&store).await?, identity(&*wrapped).await?);
    assert_ne!(identity(&store).await?, identity(&MemoryStore::new()).await?);
    assert_eq!(identity(&store).await?.to_string().len(), 32);
    Ok(())
}

/// The machine sleeps while the second lock is waited for, and the lease of the first lapses.
#[tokio::test]
async fn one_that_was_lost_while_another_was_waited_for() -> Result<()> {
    let clock = Arc::new(ShiftedClock::default());
    let store = MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>);
    let (mine, other, third) = (Locker::new(store.clone()), Locker::new(store.clone()), Locker::new(store));
    let in_the_way = other.lock("b").acquire().await?;
    let multi = mine.multi(["a", "b"]);
    let mut waiting = pin!(multi.acquire());
    while other.lock("a").inspect().await?.holders.is_empty() {
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        tokio::task::yield_now().await;
    }
    clock.advance(Duration::from_secs(3600));
    // This one lapsed, too. A third client that takes and releases it wakes the waiter.
    assert!(is_free(&third, "b").await?);
    drop(in_the_way);
    assert_eq!(waiting.await.expect_err("the first is lost").kind(), ErrorKind::Lost);
    assert!(third.lock("b").acquire_within(Duration::from_secs(10)).await?.is_some(), "the second is released");
    Ok(())
}

/// Another client holds the second lock for good. Nothing can come of waiting for it once the first is lost.
#[tokio::test]
async fn the_loss_of_one_ends_the_wait_for_another() -> Result<()> {
    let store = MemoryStore::new();
    let (mine, other) = (Locker::new(store.clone()), Locker::new(store));
    let in_the_way = other.lock("b").acquire().await?;
    // It is renewed each second, and its loss found out by that.
    let multi = MultiLock::new([mine.lock("a").ttl(Duration::from_secs(3)), mine.lock("b")]);
    let mut waiting = pin!(multi.acquire());
    let token = loop {
        assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        if let Some(holder) = other.lock("a").inspect().await?.holders.first() {
            break holder.token.expect("a client of lockkit");
        }
        tokio::task::yield_now().await;
    };
    assert!(matches!(other.break_lock("a", token).await?, Release::Released { .. }));
    let ended = tokio::time::timeout(Duration::from_secs(10), waiting).await.expect("it still waits");
    assert_eq!(ended.expect_err("the first is lost").kind(), ErrorKind::Lost);
    assert_eq!(in_the_way.release().await?, Outcome::Released);
    assert!(other.lock("b").acquire_within(Duration::from_secs(10)).await?.is_some(), "its place is given up");
    Ok(())
}

/// A store that does not answer a release keeps no lock of another store.
#[tokio::test]
async fn a_silent_store_holds_up_no_release_at_another() -> Result<()> {
    let (store, silent) = (MemoryStore::new(), MemoryStore::new());
    let (mine, other) = (Locker::new(store.clone()), Locker::new(store));
    let stuck = Locker::new(Altered(NeverReleases(silent)));
    let multi = MultiLock::new([mine.lock("a"), stuck.lock("a"), mine.lock("b")]);
    let guard = multi.acquire().await?;
    let mut releasing = pin!(guard.release());
    for name in ["a", "b"] {
        while !is_free(&other, name).await? {
            assert!(releasing.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            tokio::task::yield_now().await;
        }
    }
    Ok(())
}

#[derive(Debug)]
struct NeverReleases(MemoryStore);

#[async_trait]
impl Alter for NeverReleases {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn release(&self, _: &Claim) -> Result<Release> {
        std::future::pending().await
    }
}

/// The memory store, which takes its time.
#[derive(Debug)]
struct Late(MemoryStore);

#[async_trait]
impl Alter for Late {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        tokio::time::sleep(Duration::from_millis(400)).await;
        self.0.acquire(request).await
    }
}

/// However many there are: not each of them may take as long as one lock may.
#[tokio::test]
async fn the_time_of_a_caller_is_that_of_all_locks() -> Result<()> {
    let locker = Locker::new(Altered(Late(MemoryStore::new())));
    let start = tokio::time::Instant::now();
    let names: Vec<_> = (0..20).map(|number| number.to_string()).collect();
    let error = locker.multi(&names).acquire_within(Duration::from_millis(100)).await.expect_err("not in time");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    Ok(())
}

/// By the clock of the store, which stands still here unless somebody sleeps.
#[tokio::test(start_paused = true)]
async fn the_time_of_a_caller_is_on_the_clock_of_the_store() -> Result<()> {
    let store = paused_store();
    let (mine, other) = (Locker::new(store.clone()), Locker::new(store));
    let (first, _second) = (other.lock("a").acquire().await?, other.lock("b").acquire().await?);
    let released = async {
        tokio::time::sleep(SHORT * 2).await;
        first.release().await
    };
    let start = tokio::time::Instant::now();
    let multi = mine.multi(["a", "b"]);
    let (answer, released) = tokio::join!(multi.acquire_within(SHORT * 3), released);
    assert_eq!(released?, Outcome::Released);
    assert!(answer?.is_none(), "another has the second");
    assert!(start.elapsed() < SHORT * 4, "it waited for {:?}", start.elapsed());
    Ok(())
}

/// The memory store, which takes its time to say who it is.
#[derive(Debug)]
struct LateToTell(MemoryStore, AtomicU32);

#[async_trait]
impl Alter for LateToTell {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        vec![Box::new(self)]
    }
}

#[async_trait]
impl Records for LateToTell {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        if self.1.fetch_add(1, Ordering::SeqCst) == 0 {
            tokio::time::sleep(SHORT * 10).await;
        }
        self.0.read(name).await
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        self.0.compare_and_set(name, seen, new).await
    }
}

/// The identities of stores are asked for once, and for no lock.
#[tokio::test(start_paused = true)]
async fn the_time_of_a_caller_is_for_the_locks() -> Result<()> {
    let store = paused_store();
    let (other, mine) = (Locker::new(store.clone()), Locker::new(Altered(LateToTell(store, AtomicU32::new(0)))));
    let in_the_way = other.lock("a").acquire().await?;
    let multi = MultiLock::new([mine.lock("a"), Locker::new(paused_store()).lock("b")]);
    let released = async {
        tokio::time::sleep(SHORT * 11).await;
        in_the_way.release().await
    };
    let (answer, released) = tokio::join!(multi.acquire_within(SHORT * 3), released);
    assert_eq!(released?, Outcome::Released);
    assert!(answer?.is_some(), "no time was left for the locks");
    Ok(())
}
