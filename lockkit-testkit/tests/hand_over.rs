//! Which leases a holder may hand over to the next one of its process, to whom, and for how long while others wait.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, ErrorKind, Event, Fence, Guard, HandOver, Lock, LockStore, Locker, Observer,
    Outcome, Release, Result, Status,
};
use lockkit_sim::{Fault, Operation, SimStore};
use lockkit_testkit::{Alter, Altered, faults::poll_until};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

const TTL: Duration = Duration::from_secs(30);
/// As often and as long as one likes.
const ALWAYS: HandOver = HandOver { times: HandOver::MOST, within: Duration::from_secs(3600) };

type Acquiring = Pin<Box<dyn Future<Output = Result<Guard>> + Send>>;

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn acquiring(lock: &Lock) -> Acquiring {
    let lock = lock.clone();
    Box::pin(async move { lock.acquire().await })
}

async fn poll_once(future: &mut Acquiring) {
    assert!(poll_until(future.as_mut(), 1, || {}).await.is_none());
}

/// A holder whose grant owns more fences than its own, and those who wait behind it.
async fn holder<const N: usize>(holder: &Lock, waiting: [&Lock; N]) -> Result<(Guard, [Acquiring; N])> {
    let first = holder.acquire().await?;
    let mut second = acquiring(holder);
    let mut waiting = waiting.map(acquiring);
    poll_once(&mut second).await;
    for future in &mut waiting {
        poll_once(future).await;
    }
    // Fences have to be earned.
    sleep(millis(10)).await;
    assert_eq!(first.release().await?, Outcome::Released);
    Ok((second.await?, waiting))
}

fn locker(store: &SimStore) -> Locker {
    Locker::builder(store.clone()).hand_over(ALWAYS).build()
}

fn acquisitions(store: &SimStore) -> usize {
    store.calls().iter().filter(|call| call.operation == Operation::Acquire).count()
}

/// What the others here rely on.
#[tokio::test(start_paused = true)]
async fn a_lease_is_handed_over() -> Result<()> {
    let store = SimStore::new();
    let lock = locker(&store).lock("a").ttl(TTL);
    let (guard, [next]) = holder(&lock, [&lock]).await?;
    let asked = acquisitions(&store);
    assert_eq!(guard.release().await?, Outcome::Released);
    assert!(next.await?.is_held());
    assert_eq!(acquisitions(&store), asked);
    Ok(())
}

/// The next one would hold what may have been lost long ago.
#[tokio::test(start_paused = true)]
async fn a_lease_in_doubt_is_not_handed_over() -> Result<()> {
    let store = SimStore::new();
    let lock = locker(&store).lock("a").ttl(TTL);
    let (guard, [next]) = holder(&lock, [&lock]).await?;
    store.inject(Fault::REFUSED.on(Operation::Renew).until_healed());
    sleep(TTL / 2).await;
    assert_eq!(guard.status(), Status::Suspect);
    store.heal();
    assert_eq!(guard.release().await?, Outcome::Released);
    let next = next.await?;
    assert_eq!(next.status(), Status::Held);
    assert!(next.remaining() > TTL * 9 / 10, "{:?} of an old lease", next.remaining());
    Ok(())
}

/// The next one could not use it, and would have to stand at the end of the line again.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_about_to_end_is_not_handed_over() -> Result<()> {
    let store = SimStore::new();
    // The second of two times, so that the next one can't hand it on.
    let rule = HandOver { times: 2, ..ALWAYS };
    let lock = Locker::builder(store.clone()).hand_over(rule).build().lock("a").ttl(TTL);
    let (guard, [next, last]) = holder(&lock.clone().no_renewal(), [&lock, &lock]).await?;
    let order = Arc::new(AtomicU32::new(0));
    let place = |acquiring: Acquiring| {
        let order = Arc::clone(&order);
        tokio::spawn(async move {
            let _guard = acquiring.await?;
            Ok::<_, lockkit_core::Error>(order.fetch_add(1, Ordering::SeqCst))
        })
    };
    let (next, last) = (place(next), place(last));
    sleep(TTL * 7 / 8).await;
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_eq!((next.await.expect("no panic")?, last.await.expect("no panic")?), (0, 1));
    Ok(())
}

/// It was handed over in time, and its next holder is polled late.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_about_to_end_is_not_taken() -> Result<()> {
    let store = SimStore::new();
    let lock = locker(&store).lock("a").ttl(TTL);
    let (guard, [next]) = holder(&lock, [&lock]).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    sleep(TTL * 7 / 8).await;
    assert_eq!(store.state("a").await?.holders.len(), 1, "it was handed over, and has not ended");
    let next = next.await?;
    assert!(next.remaining() > TTL * 9 / 10, "{:?} of an old lease", next.remaining());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_lease_is_not_handed_over_to_another_ttl() -> Result<()> {
    for ttl in [TTL / 2, TTL * 2] {
        let store = SimStore::new();
        let lock = locker(&store).lock("a").ttl(TTL);
        let (guard, [next]) = holder(&lock, [&lock.clone().ttl(ttl)]).await?;
        assert_eq!(guard.release().await?, Outcome::Released);
        let next = next.await?;
        assert!(next.remaining() > ttl * 9 / 10 && next.remaining() <= ttl, "{:?}, not {ttl:?}", next.remaining());
    }
    Ok(())
}

/// Its next fence may be too low.
#[tokio::test(start_paused = true)]
async fn a_lease_is_not_handed_to_one_who_wants_a_higher_fence() -> Result<()> {
    let store = SimStore::new();
    let lock = locker(&store).lock("a").ttl(TTL);
    let high = Fence::new(1 << 60);
    let above = lock.clone().fence_above(high);
    let (guard, [next]) = holder(&lock, [&above]).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    let next = next.await?;
    assert!(next.fence() > high, "{}", next.fence());
    assert_eq!(next.release().await?, Outcome::Released);
    for wants in [&above, &lock] {
        let (guard, [next]) = holder(&above, [wants]).await?;
        let asked = acquisitions(&store);
        assert_eq!(guard.release().await?, Outcome::Released);
        assert!(next.await?.fence() > high);
        assert_eq!(acquisitions(&store), asked, "it is handed over");
    }
    Ok(())
}

/// Counts how often in a row a lease was handed over, at most.
#[derive(Clone, Debug, Default)]
struct Longest {
    run: Arc<AtomicU32>,
    longest: Arc<AtomicU32>,
}

impl Observer for Longest {
    fn event(&self, event: &Event<'_>) {
        if let Event::Acquired { handed_over, .. } = event {
            let run = if *handed_over { self.run.load(Ordering::SeqCst) + 1 } else { 0 };
            self.run.store(run, Ordering::SeqCst);
            self.longest.fetch_max(run, Ordering::SeqCst);
        }
    }
}

/// How often in a row a lease is handed over among many who hold it for 20 ms.
async fn longest_run(rule: HandOver) -> Result<u32> {
    let log = Longest::default();
    let lock = Locker::builder(SimStore::new()).hand_over(rule).observer(log.clone()).build().lock("a").ttl(TTL);
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                for _ in 0..5 {
                    let guard = lock.acquire().await?;
                    sleep(millis(20)).await;
                    assert_eq!(guard.release().await?, Outcome::Released);
                }
                Ok::<_, lockkit_core::Error>(())
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic")?;
    }
    Ok(log.longest.load(Ordering::SeqCst))
}

#[tokio::test(start_paused = true)]
async fn hand_over_ends_after_its_times() -> Result<()> {
    assert_eq!(longest_run(HandOver { times: 3, ..ALWAYS }).await?, 3);
    Ok(())
}

/// Here after 0, 20 and 40 ms.
#[tokio::test(start_paused = true)]
async fn hand_over_ends_after_its_time() -> Result<()> {
    assert_eq!(longest_run(HandOver { within: millis(50), ..ALWAYS }).await?, 3);
    Ok(())
}

/// A store of which waiters hear that a lock was released, and have to ask for it then. Both take their time.
#[derive(Clone, Debug)]
struct Wakes {
    inner: SimStore,
    /// How long an answer is on its way. One that is woken needs twice as long to ask, and half a millisecond.
    trip: Duration,
    waiters: Arc<AtomicUsize>,
    released: Arc<Notify>,
}

#[async_trait]
impl Alter for Wakes {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let end = Instant::now() + request.wait;
        let request = AcquireRequest { wait: Duration::ZERO, ..request.clone() };
        self.waiters.fetch_add(1, Ordering::SeqCst);
        let answer = loop {
            let released = self.released.notified();
            let answer = self.inner.acquire(&request).await;
            if !matches!(answer, Ok(Attempt::Contended(_))) || Instant::now() >= end {
                break answer;
            }
            drop(tokio::time::timeout_at(end, released).await);
            sleep(2 * self.trip + Duration::from_micros(500)).await;
        };
        self.waiters.fetch_sub(1, Ordering::SeqCst);
        answer
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let answer = self.inner.release(claim).await?;
        self.released.notify_waiters();
        let waiters = u32::try_from(self.waiters.load(Ordering::SeqCst)).expect("few");
        sleep(self.trip).await;
        Ok(match answer {
            Release::Released { .. } => Release::Released { waiters: Some(waiters) },
            not_held @ Release::NotHeld(_) => not_held,
        })
    }
}

/// A process of one or more tasks that take and release a lock in a loop lets others have it, too, after so many holders.
#[tokio::test(start_paused = true)]
async fn a_busy_process_lets_others_go_first() -> Result<()> {
    const TIMES: usize = 10;
    for (tasks, trip) in [(1, 0), (2, 0), (1, 5), (2, 5)] {
        let (inner, trip) = (SimStore::new(), millis(trip));
        let store = Wakes { inner, trip, waiters: Arc::default(), released: Arc::default() };
        let rule = HandOver { times: u32::try_from(TIMES).expect("few"), ..ALWAYS };
        let (busy, holders) =
            (Locker::builder(Altered(store.clone())).hand_over(rule).build(), Arc::new(AtomicUsize::new(0)));
        for _ in 0..tasks {
            let (lock, holders) = (busy.lock("a").ttl(TTL), Arc::clone(&holders));
            tokio::spawn(async move {
                while let Ok(guard) = lock.acquire().await {
                    holders.fetch_add(1, Ordering::SeqCst);
                    sleep(millis(5)).await;
                    drop(guard.release().await);
                }
            });
        }
        sleep(millis(1)).await;
        let other = Locker::new(Altered(Wakes { inner: store.inner.another_client(), ..store.clone() }));
        let guard = timeout(Duration::from_secs(5), other.lock("a").ttl(TTL).acquire()).await;
        assert!(guard.is_ok_and(|guard| guard.is_ok()), "never got the lock from {tasks} tasks, {trip:?} away");
        let holders = holders.load(Ordering::SeqCst);
        assert!(holders <= TIMES + 1, "{holders} of one process in a row");
    }
    Ok(())
}

/// The lease is the process's until the next holder has taken it, or given it back.
#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_a_lease_that_is_handed_over() -> Result<()> {
    let store = SimStore::new();
    let locker = locker(&store);
    let lock = locker.lock("a").ttl(TTL);
    let (guard, [waiting]) = holder(&lock, [&lock]).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    let shutdown = locker.shutdown(TTL / 2);
    tokio::pin!(shutdown);
    assert!(timeout(millis(10), &mut shutdown).await.is_err(), "the lease is on its way");
    assert_eq!(waiting.await.expect_err("shut down").kind(), ErrorKind::Closed);
    shutdown.await?;
    let other = Locker::new(store.clone());
    assert!(other.lock("a").try_acquire().await?.is_some(), "the lease is nobody's");
    Ok(())
}
