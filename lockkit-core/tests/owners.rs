//! Owners of many locks, and of one that several of their tasks want.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use lockkit_core::{
    Effect, Error, ErrorKind, Liveness, Lock, LockStore, Locker, MemoryStore, Outcome, Renewal, Renewed, Result,
};
use lockkit_testkit::{Alter, Altered, Slow, calls::eventually, faults::poll_until};
use tokio::sync::Notify;

/// Longer than any of these acquisitions may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// Takes and keeps so many locks.
async fn take(keys: usize, lock: impl Fn(String) -> Lock) -> Result<Duration> {
    let start = Instant::now();
    let mut guards = Vec::new();
    for number in 0..keys {
        guards.push(lock(number.to_string()).acquire().await?);
    }
    Ok(start.elapsed())
}

/// An owner looks through what it holds now and then, not for each new lock.
#[tokio::test]
async fn many_locks_of_one_owner_cost_as_much_each_as_a_few() -> Result<()> {
    const KEYS: usize = 8000;
    let mut least = f64::MAX;
    // The best of three, for others may use the machine.
    for _ in 0..3 {
        let locker = Locker::new(MemoryStore::new());
        let plain = take(KEYS, |name| locker.lock(name)).await?;
        let locker = Locker::new(MemoryStore::new());
        let owner = locker.owner();
        let owned = take(KEYS, |name| owner.lock(name)).await?;
        println!("{KEYS} locks: {plain:?}, with an owner {owned:?}");
        least = least.min(owned.as_secs_f64() / plain.as_secs_f64());
        if least < 8.0 {
            return Ok(());
        }
    }
    panic!("{KEYS} locks cost {least:.1} times as much with an owner");
}

/// Whichever way it came to read: as another task of the owner, beside it, or by a downgrade.
#[tokio::test]
async fn one_that_reads_is_told_so_while_it_waits_to_write() -> Result<()> {
    let store = MemoryStore::new();
    let (other, owner) = (Locker::new(store.clone()), Locker::new(store).owner());
    let prices = owner.rw_lock("x");
    // It waits to write behind others, and gets to read as a writer that becomes a reader.
    let held = other.rw_lock("x").write().acquire().await?;
    let first = tokio::spawn({
        let write = prices.write();
        async move { write.acquire().await }
    });
    eventually("one waits", async || other.lock("x").inspect_queue().await.is_ok_and(|state| state.waiters == Some(1)))
        .await;
    let second = tokio::spawn({
        let write = prices.write();
        async move { write.acquire().await }
    });
    eventually("both wait", async || other.lock("x").inspect_queue().await.is_ok_and(|state| state.waiters == Some(2)))
        .await;
    assert_eq!(held.release().await?, Outcome::Released);
    let writer = first.await.expect("no panic")?;
    assert_eq!(second.await.expect("no panic")?.release().await?, Outcome::Released, "it nests in the other");
    let reader = writer.downgrade().await?;
    assert_eq!(prices.write().acquire_within(PATIENCE).await.expect_err("it reads").kind(), ErrorKind::InvalidInput);
    let again = prices.read().acquire().await?;
    assert_eq!(reader.release().await?, Outcome::Released);
    assert_eq!(
        prices.write().acquire_within(PATIENCE).await.expect_err("it still reads").kind(),
        ErrorKind::InvalidInput
    );
    assert_eq!(again.release().await?, Outcome::Released);
    assert_eq!(prices.write().acquire().await?.release().await?, Outcome::Released);

    // Another task of the owner comes to read, while the claim of the one that waits to write is at the store.
    let held = other.rw_lock("x").write().acquire().await?;
    let waiting = async |number| {
        eventually("it waits", async || {
            other.lock("x").inspect_queue().await.is_ok_and(|state| state.waiters == Some(number))
        })
        .await;
    };
    let read = prices.read();
    let reader = tokio::spawn(async move { read.acquire().await });
    waiting(1).await;
    let write = prices.write();
    let writer = tokio::spawn(async move { write.acquire().await });
    waiting(2).await;
    assert_eq!(held.release().await?, Outcome::Released);
    let reader = reader.await.expect("no panic")?;
    let error = writer.await.expect("no panic").expect_err("the owner reads");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::InvalidInput, Effect::Unknown));
    assert_eq!(reader.release().await?, Outcome::Released);
    Ok(())
}

/// Two tasks of an owner that ask to read at once may get a lease each: none of them is forgotten.
#[tokio::test]
async fn an_owner_knows_each_of_its_readers_leases() -> Result<()> {
    let owner = Locker::new(MemoryStore::new()).owner();
    let prices = owner.rw_lock("x");
    let read = prices.read();
    let (one, two) = tokio::join!(read.acquire(), read.acquire());
    let (one, two) = (one?, two?);
    assert_eq!(two.release().await?, Outcome::Released);
    assert_eq!(prices.write().try_acquire().await.expect_err("one is left").kind(), ErrorKind::InvalidInput);
    assert_eq!(one.release().await?, Outcome::Released);
    assert!(prices.write().try_acquire().await?.is_some());
    Ok(())
}

/// Two tasks of one owner wait for a lock in different ways. Whichever gets it can take it once more.
#[tokio::test]
async fn who_has_it_can_nest_whoever_else_waits() -> Result<()> {
    let store = MemoryStore::new();
    let other = Locker::new(store.clone()).lock("x").acquire().await?;
    let owner = Locker::new(store).owner();
    let lock = owner.lock("x");
    let patient = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await }
    });
    let hasty = tokio::spawn({
        let lock = lock.clone();
        async move {
            let outer = loop {
                if let Some(guard) = lock.try_acquire().await? {
                    break guard;
                }
                tokio::task::yield_now().await;
            };
            let inner = lock.acquire().await?;
            assert_eq!(inner.fence(), outer.fence());
            Ok::<_, lockkit_core::Error>(())
        }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(other);
    let timeout = Duration::from_secs(10);
    let guard = tokio::time::timeout(timeout, patient).await.expect("it waits on").expect("no panic")?;
    tokio::time::timeout(timeout, hasty).await.expect("it waits on").expect("no panic")?;
    drop(guard);
    Ok(())
}

/// An acquisition that is kept and not polled any more is in nobody's way, least of all in that of its own owner.
#[tokio::test]
async fn an_acquisition_that_is_not_polled_keeps_no_other_of_the_owner() -> Result<()> {
    let store = MemoryStore::new();
    let other = Locker::new(store.clone()).lock("x").acquire().await?;
    let owner = Locker::new(store).owner();
    let lock = owner.lock("x");
    let mut kept = [Box::pin(lock.acquire()), Box::pin(lock.acquire())];
    for asking in &mut kept {
        assert!(tokio::time::timeout(Duration::from_millis(10), asking).await.is_err(), "the lock is held");
    }
    let asking = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await }
    });
    tokio::task::yield_now().await;
    assert_eq!(other.release().await?, Outcome::Released);
    let outer = tokio::time::timeout(Duration::from_secs(20), asking).await.expect("it is free").expect("no panic")?;
    // Those that are polled again nest in what the owner has by now.
    for asking in kept {
        let inner = tokio::time::timeout(Duration::from_secs(20), asking).await.expect("the owner has it")?;
        assert_eq!(inner.fence(), outer.fence());
    }
    Ok(())
}

/// A nested acquisition is one, too.
#[tokio::test]
async fn nothing_is_nested_after_a_shutdown() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let lock = locker.owner().lock("x");
    let outer = lock.acquire().await?;
    locker.shutdown(Duration::from_secs(1)).await?;
    assert_eq!(lock.acquire().await.expect_err("closed").kind(), ErrorKind::Closed);
    assert!(outer.is_held());
    Ok(())
}

/// A nested acquisition that is kept and not polled, as by a `select!` on `&mut acquiring`, holds nothing.
#[tokio::test]
async fn a_nested_acquisition_that_is_not_polled_keeps_no_lease() -> Result<()> {
    let memory = MemoryStore::new();
    let lock = Locker::new(Altered(Slow(memory.clone()))).owner().lock("x");
    let outer = lock.acquire().await?;
    let mut nested = std::pin::pin!(lock.acquire());
    assert!(poll_until(nested.as_mut(), 1, || ()).await.is_none(), "it waits for the store's answer");
    assert_eq!(outer.release().await?, Outcome::Released);
    let other = Locker::new(memory).lock("x").try_acquire().await?.expect("nobody has it");
    assert!(tokio::time::timeout(Duration::from_millis(20), nested.as_mut()).await.is_err(), "another has it");
    assert_eq!(other.release().await?, Outcome::Released);
    assert!(nested.await?.is_held());
    Ok(())
}

/// What becomes of the renewals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    FailsOnce,
    /// When the test says so.
    FailsLate,
    IsNotAnswered,
}

/// The memory store, with trouble for the renewals, by which a nested acquisition asks whether the lease is held.
#[derive(Debug)]
struct Troubled(MemoryStore, Mutex<Option<Fate>>, Notify);

#[async_trait]
impl Alter for Troubled {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let fate = *self.1.lock().expect("unpoisoned");
        match fate {
            None => self.0.renew(renewals).await,
            Some(fate @ (Fate::FailsOnce | Fate::FailsLate)) => {
                if fate == Fate::FailsLate {
                    self.2.notified().await;
                }
                *self.1.lock().expect("unpoisoned") = None;
                renewals.iter().map(|_| Err(Error::new(ErrorKind::Unavailable, "it is away"))).collect()
            }
            Some(Fate::IsNotAnswered) => std::future::pending().await,
        }
    }
}

async fn outer(fate: Fate) -> Result<(Lock, lockkit_core::Guard)> {
    troubled(fate).await.map(|(_, lock, outer)| (lock, outer))
}

async fn troubled(fate: Fate) -> Result<(Arc<Altered<Troubled>>, Lock, lockkit_core::Guard)> {
    let store = Arc::new(Altered(Troubled(MemoryStore::new(), Mutex::default(), Notify::new())));
    let lock = Locker::new(Arc::clone(&store)).owner().lock("x");
    let outer = lock.acquire().await?;
    *store.0.1.lock().expect("unpoisoned") = Some(fate);
    Ok((store, lock, outer))
}

#[tokio::test]
async fn a_nested_acquisition_is_as_patient_as_any() -> Result<()> {
    let (lock, outer) = outer(Fate::FailsOnce).await?;
    assert_eq!(lock.acquire().await?.fence(), outer.fence());
    let (lock, _outer) = self::outer(Fate::FailsOnce).await?;
    assert_eq!(lock.try_acquire().await.expect_err("a try has no patience").kind(), ErrorKind::Unavailable);
    Ok(())
}

#[tokio::test]
async fn a_nested_acquisition_ends_with_the_time_of_its_caller() -> Result<()> {
    let (lock, outer) = outer(Fate::IsNotAnswered).await?;
    let within = tokio::time::timeout(Duration::from_secs(5), lock.acquire_within(Duration::from_millis(50))).await;
    assert_eq!(within.expect("it ends").expect_err("no answer").kind(), ErrorKind::TimedOut);
    assert!(outer.is_held());
    Ok(())
}

/// Whether the lease was still held is of no interest any more.
#[tokio::test]
async fn an_acquisition_whose_outer_hold_is_given_back_meanwhile_asks_for_the_lock() -> Result<()> {
    let (store, lock, outer) = troubled(Fate::FailsLate).await?;
    let mut nested = std::pin::pin!(lock.acquire());
    assert!(poll_until(nested.as_mut(), 1, || ()).await.is_none(), "it waits for the store's answer");
    let before = outer.fence();
    assert_eq!(outer.release().await?, Outcome::Released);
    store.0.2.notify_one();
    let after = nested.await?;
    assert!(after.is_held() && after.fence() > before);
    Ok(())
}

/// Where leases end with the session, too: there the ttl is for how long the holder believes in its lease without an answer.
#[tokio::test]
async fn a_nested_acquisition_with_another_ttl_is_refused_in_a_session() -> Result<()> {
    let store = Altered::with_info(MemoryStore::new(), |info| {
        info.capability.liveness = Liveness { ttl: None, session: Some(Duration::from_secs(20)) };
    });
    let lock = Locker::new(store).owner().lock("x");
    let outer = lock.clone().ttl(Duration::from_secs(1)).acquire().await?;
    let longer = lock.clone().ttl(Duration::from_secs(60)).try_acquire().await.expect_err("they share one lease");
    assert_eq!(longer.kind(), ErrorKind::InvalidInput);
    assert!(lock.try_acquire().await?.is_some(), "it takes the ttl as it is");
    assert_eq!(outer.release().await?, Outcome::Released);
    Ok(())
}
