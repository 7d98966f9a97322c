//! Waiting on a store that can't wake anyone.

mod paused;

use std::{
    num::NonZeroU32,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Contention, KeyState, Lock, LockStore, Locker, MemoryStore, Query, Result, Waiting,
};
use lockkit_testkit::{Alter, Altered, WithInfo};
use tokio::time::Instant;

use crate::paused::paused_store;

/// The memory store without its wake-ups, counting what it is asked.
#[derive(Debug)]
struct Polled {
    inner: Altered<WithInfo<MemoryStore>>,
    inspections: Arc<AtomicUsize>,
    attempts: Arc<AtomicUsize>,
    /// Says of every lease in the way that it has no end.
    is_endless: bool,
}

impl Polled {
    fn new(inner: &MemoryStore) -> Self {
        Self::waiting(inner, Waiting::Poll)
    }

    fn waiting(inner: &MemoryStore, waiting: Waiting) -> Self {
        let inner = Altered::with_info(inner.clone(), |info| info.capability.waiting = waiting);
        Self { inner, inspections: Arc::default(), attempts: Arc::default(), is_endless: false }
    }
}

#[async_trait]
impl Alter for Polled {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.attempts.fetch_add(1, Ordering::SeqCst);
        let answer = self.inner.acquire(&AcquireRequest { wait: Duration::ZERO, ..request.clone() }).await?;
        Ok(match answer {
            Attempt::Contended(contention) if self.is_endless => {
                Attempt::Contended(Contention { retry_after: Some(Duration::MAX), ..contention })
            }
            answer => answer,
        })
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        let number = self.inspections.fetch_add(1, Ordering::SeqCst);
        let mut states = self.inner.inspect(query).await?;
        // A store has no order of holders.
        for state in &mut states {
            let holders = state.holders.len().max(1);
            state.holders.rotate_left(number % holders);
        }
        Ok(states)
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_is_found_soon_after_a_release() -> Result<()> {
    let store = paused_store();
    let (holder, waiter) = (Locker::new(store.clone()), Locker::new(Altered(Polled::new(&store))));
    let guard = holder.lock("x").acquire().await?;
    let waiting = tokio::spawn(async move { waiter.lock("x").acquire().await.map(drop) });
    tokio::time::sleep(Duration::from_millis(20)).await;
    let released = Instant::now();
    assert_eq!(guard.release().await?, lockkit_core::Outcome::Released);
    waiting.await.expect("no panic")?;
    assert!(released.elapsed() < Duration::from_millis(250), "{:?}", released.elapsed());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_thousand_waiters_cost_few_queries() -> Result<()> {
    let (inspections, attempts) = cost_of_a_thousand(Duration::from_secs(2), |lock| lock).await?;
    // 1000 locks polled one by one at 250 ms would be 8000 queries.
    assert!((4..200).contains(&inspections), "{inspections} queries in 2 s for 1000 waiters");
    assert_eq!(attempts, 0, "nothing was free, and yet it was asked for");
    // Those in order ask for their places again every two seconds, and look no more often for that.
    let (inspections, _) = cost_of_a_thousand(Duration::from_secs(4), Lock::fifo).await?;
    assert!((8..200).contains(&inspections), "{inspections} queries in 4 s for 1000 waiters in order");
    Ok(())
}

/// How often the store is looked at, and asked, in so long, while a thousand locks that stay held are waited for.
async fn cost_of_a_thousand(time: Duration, kind: fn(Lock) -> Lock) -> Result<(usize, usize)> {
    let store = paused_store();
    let holder = Locker::new(store.clone());
    let polled = Polled::new(&store);
    let (inspections, attempts) = (Arc::clone(&polled.inspections), Arc::clone(&polled.attempts));
    let locker = Locker::new(Altered(polled));
    let mut guards = Vec::new();
    let mut waiters = Vec::new();
    for number in 0..1000 {
        guards.push(holder.lock(number.to_string()).acquire().await?);
        let lock = kind(locker.lock(number.to_string()));
        waiters.push(tokio::spawn(async move { lock.acquire().await.map(drop) }));
        // They do not come all at once.
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    tokio::time::sleep(Duration::from_secs(1)).await;
    inspections.store(0, Ordering::SeqCst);
    attempts.store(0, Ordering::SeqCst);
    tokio::time::sleep(time).await;
    let asked = (inspections.load(Ordering::SeqCst), attempts.load(Ordering::SeqCst));
    drop(guards);
    for waiter in waiters {
        waiter.await.expect("no panic")?;
    }
    Ok(asked)
}

/// As soon as nobody waits any more nothing is looked at.
#[tokio::test(start_paused = true)]
async fn who_has_left_costs_no_queries() -> Result<()> {
    let store = paused_store();
    let _held = Locker::new(store.clone()).lock("x").acquire().await?;
    let polled = Polled::new(&store);
    let inspections = Arc::clone(&polled.inspections);
    let lock = Locker::new(Altered(polled)).lock("x");
    assert!(lock.acquire_within(Duration::from_secs(1)).await?.is_none());
    let before = inspections.load(Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert_eq!(inspections.load(Ordering::SeqCst), before);
    Ok(())
}

/// A rival is faster once, when the lock is seen to be free, and goes at once.
#[derive(Debug)]
struct Beaten {
    inner: Altered<Polled>,
    rival: Lock,
    since: Arc<OnceLock<Instant>>,
}

#[async_trait]
impl Alter for Beaten {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if self.inner.0.attempts.load(Ordering::SeqCst) != 1 {
            return self.inner.acquire(request).await;
        }
        let _guard = self.rival.acquire().await?;
        self.since.get_or_init(Instant::now);
        self.inner.acquire(request).await
    }
}

/// However long it was held before: what changes hands will change hands again.
#[tokio::test(start_paused = true)]
async fn a_lock_that_went_to_another_is_looked_at_soon() -> Result<()> {
    let store = paused_store();
    let other = Locker::new(store.clone()).lock("x");
    let (held, since) = (other.acquire().await?, Arc::default());
    let beaten = Beaten { inner: Altered(Polled::new(&store)), rival: other, since: Arc::clone(&since) };
    let lock = Locker::new(Altered(beaten)).lock("x");
    let waiting = tokio::spawn(async move { lock.acquire().await });
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(held.release().await?, lockkit_core::Outcome::Released);
    assert!(waiting.await.expect("no panic")?.is_held());
    let waited = since.get().expect("it was beaten").elapsed();
    assert!(waited < Duration::from_millis(50), "{waited:?}");
    Ok(())
}

/// It grants nothing for a while, although nobody has a lock: as a server does that has just taken over from another.
#[derive(Debug)]
struct Cautious {
    inner: Altered<Polled>,
    until: Instant,
}

#[async_trait]
impl Alter for Cautious {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return self.inner.acquire(request).await;
        }
        self.inner.0.attempts.fetch_add(1, Ordering::SeqCst);
        Ok(Attempt::Contended(Contention { retry_after: Some(left), ..Contention::default() }))
    }
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_looks_free_and_is_not_to_be_had_is_not_asked_for_all_the_time() -> Result<()> {
    let polled = Polled::new(&paused_store());
    let (inspections, attempts) = (Arc::clone(&polled.inspections), Arc::clone(&polled.attempts));
    let (start, pause) = (Instant::now(), Duration::from_secs(60));
    let locker = Locker::new(Altered(Cautious { inner: Altered(polled), until: start + pause }));
    let guard = locker.lock("x").acquire().await?;
    assert!(start.elapsed() < pause + Duration::from_secs(1), "{:?}", start.elapsed());
    let asked = inspections.load(Ordering::SeqCst) + attempts.load(Ordering::SeqCst);
    assert!(asked < 900, "{asked} requests in {pause:?}");
    drop(guard);
    Ok(())
}

/// After a run of hand-overs ended, the next run begins, whatever way others would be woken.
#[tokio::test]
async fn run_after_run_is_handed_over() -> Result<()> {
    const GRANTS: usize = 400;
    for waiting in [Waiting::Poll, Waiting::Notify, Waiting::Queue] {
        let store = Polled::waiting(&MemoryStore::new(), waiting);
        let attempts = Arc::clone(&store.attempts);
        let locker = Locker::new(Altered(store));
        let mut tasks = Vec::new();
        for _ in 0..4 {
            let lock = locker.lock("hot");
            tasks.push(tokio::spawn(async move {
                for _ in 0..GRANTS / 4 {
                    let guard = lock.acquire().await?;
                    tokio::task::yield_now().await;
                    assert_eq!(guard.release().await?, lockkit_core::Outcome::Released);
                }
                Ok::<_, lockkit_core::Error>(())
            }));
        }
        for task in tasks {
            task.await.expect("no panic")?;
        }
        let asked = attempts.load(Ordering::SeqCst);
        assert!(asked < GRANTS / 4, "the store was asked {asked} times for {GRANTS} grants ({waiting:?})");
    }
    Ok(())
}

/// One of several permits is enough to go on, and a reader can go on beside another one.
#[tokio::test(start_paused = true)]
async fn a_waiter_is_found_although_others_hold() -> Result<()> {
    let store = paused_store();
    let (holder, waiter) = (Locker::new(store.clone()), Locker::new(Altered(Polled::new(&store))));
    let two = NonZeroU32::new(2).expect("not zero");

    let permits = [holder.semaphore("p", two).acquire().await?, holder.semaphore("p", two).acquire().await?];
    let lock = waiter.semaphore("p", two);
    let waiting = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(5)).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    let [one, _other] = permits;
    drop(one);
    let start = Instant::now();
    assert!(waiting.await.expect("no panic")?.is_some(), "a permit was free");
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());

    let writer = holder.rw_lock("rw").write().acquire().await?;
    let lock = waiter.rw_lock("rw").read();
    let waiting = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(5)).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(writer.release().await?, lockkit_core::Outcome::Released);
    let _reader = holder.rw_lock("rw").read().acquire().await?;
    assert!(waiting.await.expect("no panic")?.is_some(), "only readers had it");
    Ok(())
}

/// As long as all permits are taken, a waiter asks the store for nothing but the sight of them.
#[tokio::test]
async fn a_full_semaphore_is_not_asked_for() -> Result<()> {
    let store = MemoryStore::new();
    let holder = Locker::new(store.clone());
    let polled = Polled::new(&store);
    let attempts = Arc::clone(&polled.attempts);
    let two = NonZeroU32::new(2).expect("not zero");
    let _permits = [holder.semaphore("p", two).acquire().await?, holder.semaphore("p", two).acquire().await?];
    let lock = Locker::new(Altered(polled)).semaphore("p", two);
    assert!(lock.acquire_within(Duration::from_millis(600)).await?.is_none());
    assert!(attempts.load(Ordering::SeqCst) <= 3, "{attempts:?}");
    Ok(())
}

/// Of a lease that never ends by itself a store may say so.
#[tokio::test]
async fn a_lease_without_end_is_waited_for() -> Result<()> {
    let store = MemoryStore::new();
    let guard = Locker::new(store.clone()).lock("x").acquire().await?;
    let mut endless = Polled::new(&store);
    endless.is_endless = true;
    let lock = Locker::new(Altered(endless)).lock("x");
    assert!(lock.acquire_within(Duration::from_millis(50)).await?.is_none());
    drop(guard);
    assert!(lock.acquire_within(Duration::from_secs(5)).await?.is_some());
    Ok(())
}

/// In whatever order a store shows those who share a lock, they are the same.
#[tokio::test]
async fn many_holders_that_stay_cost_few_queries() -> Result<()> {
    let store = MemoryStore::new();
    let holder = Locker::new(store.clone());
    let mut readers = Vec::new();
    for _ in 0..20 {
        readers.push(holder.rw_lock("rw").read().acquire().await?);
    }
    let polled = Polled::new(&store);
    let inspections = Arc::clone(&polled.inspections);
    let lock = Locker::new(Altered(polled)).lock("rw");
    let waiting = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(10)).await });
    tokio::time::sleep(Duration::from_secs(1)).await;
    inspections.store(0, Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let inspections = inspections.load(Ordering::SeqCst);
    // It is 8 or 9 at 250 ms, and a thousand at 2 ms.
    assert!((4..40).contains(&inspections), "{inspections} queries in 2 s for 20 readers");
    drop(readers);
    assert!(waiting.await.expect("no panic")?.is_some(), "the readers are gone");
    Ok(())
}
