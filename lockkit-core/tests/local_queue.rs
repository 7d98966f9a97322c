//! The queue of one process: places in it belong to those that took them, and leases go on to those that may have them.

mod paused;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Error, ErrorKind, Fence, LockStore, Locker, MemoryStore, Outcome, Result,
};
use lockkit_testkit::{Alter, Altered};
use tokio::time::timeout;

use crate::paused::paused_store;

/// How long anything awaited may take. Not how long it does take.
const AWAITED: Duration = Duration::from_secs(20);

/// The memory store, out of reach for acquisitions as long as it is said to be.
#[derive(Debug)]
struct Away {
    inner: MemoryStore,
    is_away: Arc<AtomicBool>,
}

#[async_trait]
impl Alter for Away {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if self.is_away.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "away"));
        }
        self.inner.acquire(request).await
    }
}

/// Those that ask again join a new queue, while others have not heard yet that the one before is over.
async fn all_get_the_lock_after_an_outage() -> Result<()> {
    const PATIENCE: Duration = Duration::from_millis(100);
    let is_away = Arc::new(AtomicBool::new(true));
    let store = Away { inner: MemoryStore::new(), is_away: Arc::clone(&is_away) };
    let locker = Locker::builder(Altered(store)).patience(PATIENCE).build();
    let tasks: Vec<_> = (0..8)
        .map(|_| {
            let lock = locker.lock("x");
            tokio::spawn(async move {
                let mut refusals = 0;
                loop {
                    match lock.acquire().await {
                        Ok(guard) => {
                            assert_eq!(guard.release().await?, Outcome::Released);
                            return Ok::<_, Error>(refusals);
                        }
                        Err(error) if error.kind() == ErrorKind::Unavailable => refusals += 1,
                        Err(error) => return Err(error),
                    }
                }
            })
        })
        .collect();
    tokio::time::sleep(PATIENCE * 8).await;
    is_away.store(false, Ordering::SeqCst);
    for task in tasks {
        let refusals = timeout(AWAITED, task).await.expect("the store is back").expect("no panic")?;
        assert!(refusals > 0, "the outage was over before anybody gave up");
    }
    Ok(())
}

#[tokio::test]
async fn all_get_the_lock_after_an_outage_on_one_thread() -> Result<()> {
    all_get_the_lock_after_an_outage().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_get_the_lock_after_an_outage_on_two_threads() -> Result<()> {
    all_get_the_lock_after_an_outage().await
}

/// An acquisition that is not polled any more outlasts the queue that it was in. Dropping it leaves no other queue.
#[tokio::test]
async fn a_place_is_left_in_no_later_queue() -> Result<()> {
    let lock = Locker::new(MemoryStore::new()).lock("x");
    let first = lock.acquire().await?;
    let mut kept = Box::pin(lock.acquire());
    assert!(timeout(Duration::from_millis(10), &mut kept).await.is_err(), "the lock is held");
    assert_eq!(first.release().await?, Outcome::Released);
    // It was handed the lease, and is passed after a second or two.
    let second = timeout(AWAITED, lock.acquire()).await.expect("the lease was taken back")?;
    assert_eq!(second.release().await?, Outcome::Released);
    let held = lock.acquire().await?;
    let mut other = Box::pin(lock.acquire());
    assert!(timeout(Duration::from_millis(10), &mut other).await.is_err(), "the lock is held");
    drop(kept);
    let (released, got) = tokio::join!(held.release(), timeout(AWAITED, other));
    assert_eq!(released?, Outcome::Released);
    assert!(got.expect("it is up")?.is_held());
    Ok(())
}

/// Where a plain lock and an election have one name: what observers see is the term of the leader.
#[tokio::test]
async fn a_leader_is_handed_no_lease_of_another() -> Result<()> {
    let store = MemoryStore::new();
    // Elsewhere candidates wait in the queue of the store.
    let without_order = Capability { fifo: false, ..store.info().capability.clone() };
    let locker = Locker::new(store.like(&without_order));
    let (lock, election) = (locker.lock("x"), locker.election("x"));
    let first = lock.acquire().await?;
    let (mut second, mut candidate) = (Box::pin(lock.acquire()), Box::pin(election.campaign()));
    // So long is a hold that the next one may own more fences than its own: one for a holder that it could go on to.
    assert!(timeout(Duration::from_millis(10), &mut second).await.is_err(), "the lock is held");
    assert!(timeout(Duration::from_millis(10), &mut candidate).await.is_err(), "the lock is held");
    let (released, second) = tokio::join!(first.release(), timeout(AWAITED, second));
    assert_eq!(released?, Outcome::Released);
    let (released, term) = tokio::join!(second.expect("it is up")?.release(), timeout(AWAITED, candidate));
    assert_eq!(released?, Outcome::Released);
    let term = term.expect("it is up")?;
    let seen = election.leader().await?.expect("it leads").term;
    assert_eq!(seen, Some(term.fence()), "the term that observers see");
    Ok(())
}

/// The other way round: observers would go on seeing the term of a leader that has resigned.
#[tokio::test]
async fn the_lease_of_a_leader_is_handed_to_no_other() -> Result<()> {
    let store = MemoryStore::new();
    let without_order = Capability { fifo: false, ..store.info().capability.clone() };
    let locker = Locker::new(store.like(&without_order));
    let (lock, election) = (locker.lock("x"), locker.election("x"));
    let first = lock.acquire().await?;
    let (mut candidate, mut next) = (Box::pin(election.campaign()), Box::pin(lock.acquire()));
    for is_held in [
        timeout(Duration::from_millis(10), &mut candidate).await.is_err(),
        timeout(Duration::from_millis(10), &mut next).await.is_err(),
    ] {
        assert!(is_held, "the lock is held");
    }
    let (released, term) = tokio::join!(first.release(), timeout(AWAITED, candidate));
    assert_eq!(released?, Outcome::Released);
    let term = term.expect("it is up")?;
    // As the store tells it: a lease whose token a holder has told is handed to nobody anyway.
    let led = lock.inspect().await?.holders[0].token;
    let (resigned, next) = tokio::join!(term.resign(), timeout(AWAITED, next));
    assert_eq!(resigned?, Outcome::Released);
    let next = next.expect("it is up")?;
    assert_ne!(Some(next.token()), led, "the leader's lease went on to another");
    Ok(())
}

/// The memory store, which refuses at once to give the highest fence, also while the lock is held.
#[derive(Debug)]
struct Bounded(MemoryStore);

#[async_trait]
impl Alter for Bounded {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if request.fence.floor == Fence::new(u64::MAX) {
            return Err(Error::new(ErrorKind::InvalidInput, "no fence is so high"));
        }
        self.0.acquire(request).await
    }
}

/// An error about what one of them asked for says nothing to the others.
#[tokio::test(start_paused = true)]
async fn what_one_asked_in_vain_is_no_error_of_others() -> Result<()> {
    let store = paused_store();
    let _held = Locker::new(store.clone()).lock("x").acquire().await?;
    let lock = Locker::new(Altered(Bounded(store))).lock("x");
    let too_high = lock.clone().fence_above(Fence::new(u64::MAX));
    let millis = Duration::from_millis;
    // The second is up when the first has left; then the third asks, and hears nothing for as long as the lock is held.
    let (first, second, _third, fourth) = tokio::join!(
        lock.acquire_within(millis(200)),
        too_high.acquire(),
        timeout(millis(5000), lock.acquire()),
        lock.acquire_within(millis(1000)),
    );
    assert!(first?.is_none());
    assert_eq!(second.expect_err("it is too high").kind(), ErrorKind::InvalidInput);
    assert!(fourth?.is_none(), "the lock is held");
    Ok(())
}
