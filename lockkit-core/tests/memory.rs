//! The memory store by itself.

mod paused;

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Capability, Clock, ErrorKind, Fence, Fencing, HolderInfo, Liveness, LockKey, LockStore,
    Locker, MemoryStore, Mode, Order, Outcome, Query, Renewal, Result, ShiftedClock, Token,
};
use lockkit_testkit::calls::claim;
use tokio::time::Instant;

use crate::paused::paused_store;

fn request(name: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(claim(name), ttl, HolderInfo::new("test"))
}

/// However long it has waited by then.
#[tokio::test(start_paused = true)]
async fn a_release_wakes_who_has_waited_for_minutes() -> Result<()> {
    let store = paused_store();
    let (holder, waiter) = (Locker::new(store.clone()), Locker::new(store));
    let guard = holder.lock("x").ttl(Duration::from_secs(300)).acquire().await?;
    let lock = waiter.lock("x");
    let waiting = tokio::spawn(async move { lock.acquire().await });
    tokio::time::sleep(Duration::from_secs(100)).await;
    let released = Instant::now();
    assert_eq!(guard.release().await?, Outcome::Released);
    drop(waiting.await.expect("no panic")?);
    assert!(released.elapsed() < Duration::from_secs(1), "woken {:?} after the release", released.elapsed());
    Ok(())
}

/// Whether or not anybody released them.
#[tokio::test]
async fn names_that_were_used_once_are_forgotten() -> Result<()> {
    const NAMES: usize = 5000;
    let clock = Arc::new(ShiftedClock::default());
    let store = MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>);
    let mut last = Fence::NONE;
    for number in 0..NAMES {
        let asked = request(&number.to_string(), Duration::from_millis(100));
        let Attempt::Granted(hold) = store.acquire(&asked).await? else { panic!("free") };
        last = last.max(hold.fence);
        clock.advance(Duration::from_millis(200));
    }
    let names = (0..NAMES).map(|number| LockKey::new(number.to_string())).collect::<Result<Vec<_>>>()?;
    let states = store.inspect(&Query::Keys(names)).await?;
    let kept = states.iter().filter(|state| state.fence.is_some()).count();
    assert!(kept <= 2048, "{kept} of {NAMES} are remembered");
    let Attempt::Granted(again) = store.acquire(&request("0", Duration::from_millis(100))).await? else {
        panic!("free")
    };
    assert!(again.fence > last, "folded into one floor");
    Ok(())
}

#[tokio::test]
async fn fences_end_with_an_error() -> Result<()> {
    let store = MemoryStore::new();
    let mut asked = request("x", Duration::from_secs(1));
    // With one just below the end, a typing error perhaps, the first grant would be the last.
    for floor in [u64::MAX, u64::MAX - 1000] {
        asked.fence.floor = Fence::new(floor);
        assert_eq!(store.acquire(&asked).await.expect_err("no room above").kind(), ErrorKind::InvalidInput);
    }
    asked.fence.floor = Fence::NONE;
    let Attempt::Granted(hold) = store.acquire(&asked).await? else { panic!("free") };
    let renewal = Renewal { fence_floor: Some(Fence::new(u64::MAX)), ..Renewal::new(hold.claim, asked.ttl) };
    assert!(store.renew(std::slice::from_ref(&renewal)).await.remove(0).is_ok());
    store.release(&renewal.claim).await?;
    assert_eq!(store.acquire(&request("x", asked.ttl)).await.expect_err("no room").kind(), ErrorKind::InvalidInput);
    Ok(())
}

/// A place is kept for 6 s, and no longer for a client that does not ask again.
#[tokio::test(start_paused = true)]
async fn a_place_is_kept_for_six_seconds() -> Result<()> {
    let store = paused_store();
    let holder = Locker::new(store.clone()).lock("x").ttl(Duration::from_secs(300)).acquire().await?;
    let mut dead = request("x", Duration::from_secs(30));
    (dead.order, dead.wait) = (Order::Fifo, Duration::from_secs(60));
    let asked = Instant::now();
    let Attempt::Contended(by) = store.acquire(&dead).await? else { panic!("it is held") };
    assert_eq!(by.retry_after, Some(Duration::ZERO), "to be asked again at once");
    assert!(asked.elapsed() < Duration::from_millis(2100), "too late to ask again: {:?}", asked.elapsed());
    let asked = Instant::now();
    let lock = Locker::new(store.clone()).rw_lock("x").read();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    while store.inspect(&Query::Keys(vec![dead.claim.key.clone()])).await?[0].waiters != Some(2) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let left = asked + Duration::from_secs(5);
    assert_eq!(holder.release().await?, Outcome::Released);
    tokio::time::sleep_until(left).await;
    assert!(!waiting.is_finished(), "the place of the one before it is kept");
    let guard = waiting.await.expect("no panic")?;
    assert!(asked.elapsed() < Duration::from_millis(6100), "{:?}", asked.elapsed());
    // What asks again after its place has lapsed has none.
    let Attempt::Contended(_) = store.acquire(&dead).await? else { panic!("it is held") };
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

/// Nobody has to wake up for those behind to get in.
#[tokio::test(start_paused = true)]
async fn readers_do_not_wait_for_the_readers_before_them() -> Result<()> {
    let store = paused_store();
    let writer = Locker::new(store.clone()).rw_lock("x").write().acquire().await?;
    let reader = || {
        let mut asked = request("x", Duration::from_secs(30));
        (asked.claim.mode, asked.order, asked.wait) = (Mode::Shared, Order::Fifo, Duration::from_nanos(1));
        asked
    };
    let (sleeps, late) = (reader(), reader());
    for reader in [&sleeps, &late] {
        assert!(matches!(store.acquire(reader).await?, Attempt::Contended(_)));
    }
    assert_eq!(writer.release().await?, Outcome::Released);
    let try_it = AcquireRequest { wait: Duration::ZERO, ..reader() };
    assert!(matches!(store.acquire(&try_it).await?, Attempt::Contended(_)), "a try has no place");
    let Attempt::Granted(hold) = store.acquire(&late).await? else { panic!("a reader stands before it, no writer") };
    let Attempt::Granted(same) = store.acquire(&sleeps).await? else { panic!("readers have it") };
    assert_eq!(hold.fence, same.fence, "the group's");
    Ok(())
}

/// A reader whose fence is to lie above that of its group gets another, and so do those after it.
#[tokio::test]
async fn a_reader_gets_the_fence_that_it_asks_for() -> Result<()> {
    let store = MemoryStore::new();
    let prices = Locker::new(store.clone()).rw_lock("x");
    let (first, second) = (prices.read().acquire().await?, prices.read().acquire().await?);
    assert_eq!(first.fence(), second.fence());
    let third = prices.read().fence_above(first.fence()).acquire().await?;
    assert!(third.fence() > first.fence());
    assert_eq!(third.release().await?, Outcome::Released);
    assert!(prices.read().acquire().await?.fence() > first.fence(), "not below one that ended before");
    drop((first, second));
    assert!(prices.write().acquire().await?.fence() > Fence::NONE);
    Ok(())
}

/// What the other store can't do is refused by the store itself, not only by the core in front of it.
#[tokio::test]
async fn a_store_like_another_does_no_more() -> Result<()> {
    let own = MemoryStore::new().info().capability.clone();
    let liveness = Liveness { ttl: Some(Duration::from_secs(1)..=Duration::from_secs(60)), session: None };
    let least = Capability { max_key_bytes: 64, ..Capability::exclusive(own.waiting, liveness, Fencing::None) };
    let store = MemoryStore::new().like(&least);
    assert_eq!(store.info().capability, least);
    assert!(!store.clone().like(&own).info().capability.shared, "what is refused stays refused");

    let good = request("x", Duration::from_secs(10));
    let mut shared = good.clone();
    shared.claim.mode = Mode::Shared;
    let ordered = AcquireRequest { order: Order::Fifo, ..good.clone() };
    let taken_up = AcquireRequest { from: Some(Token::random()?), ..good.clone() };
    for refused in [&shared, &ordered, &taken_up] {
        assert_eq!(store.acquire(refused).await.expect_err("not there").kind(), ErrorKind::Unsupported);
    }
    assert_eq!(store.release(&shared.claim).await.expect_err("not there").kind(), ErrorKind::Unsupported);
    let short = AcquireRequest { ttl: Duration::from_millis(500), ..good.clone() };
    assert_eq!(store.acquire(&short).await.expect_err("too short").kind(), ErrorKind::InvalidInput);

    let Attempt::Granted(hold) = store.acquire(&good).await? else { panic!("free") };
    assert_eq!(hold.fence, Fence::NONE);
    let state = store.inspect(&Query::Keys(vec![good.claim.key.clone()])).await?.remove(0);
    assert!(state.fence.is_none() && state.holders.iter().all(|holder| holder.fence.is_none()), "{state:?}");
    let locker = Locker::new(store);
    assert_eq!(locker.lock("n".repeat(65)).acquire().await.expect_err("too long").kind(), ErrorKind::InvalidInput);
    assert!(locker.lock("n".repeat(64)).acquire().await.is_ok());
    Ok(())
}

/// Who is in the room, and the fences of those that left it.
#[derive(Debug, Default)]
struct Room {
    inside: Vec<Mode>,
    /// The highest fence of a grant that was returned, and of one to others than readers.
    highest: (Fence, Fence),
}

/// Every kind of lock, by clients in all threads, with acquisitions that are given up while they wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn all_kinds_in_a_crowd_exclude_and_are_served() -> Result<()> {
    const TWO: std::num::NonZeroU32 = std::num::NonZeroU32::MIN.saturating_add(1);
    let (store, room) = (MemoryStore::new(), Arc::new(std::sync::Mutex::new(Room::default())));
    let mut tasks = Vec::new();
    for number in 0..12_u32 {
        let (locker, room) = (Locker::new(store.clone()), Arc::clone(&room));
        tasks.push(tokio::spawn(async move {
            let kinds = [
                (Mode::Shared, locker.rw_lock("x").read()),
                (Mode::Exclusive, locker.rw_lock("x").write()),
                (Mode::Permit { limit: TWO }, locker.semaphore("x", TWO)),
                (Mode::Exclusive, locker.lock("x").fifo()),
            ];
            for round in 0..100_u32 {
                let (mode, lock) = &kinds[((number + round * 7 + round / 5) % 4) as usize];
                let before = room.lock().unwrap().highest;
                let patience = Duration::from_micros(if round % 3 == 0 { 200 } else { 60_000_000 });
                let Ok(guard) = tokio::time::timeout(patience, lock.acquire()).await else { continue };
                let guard = guard?;
                // Rule R9: above all that were returned before it was asked for, or not below if both are shared.
                let least = if *mode == Mode::Shared { before.1 } else { before.0 };
                assert!(guard.fence() > least, "{mode}: {} after {least}", guard.fence());
                {
                    let mut room = room.lock().unwrap();
                    room.inside.push(*mode);
                    let kinds_agree = room.inside.iter().all(|other| other == mode);
                    let most = match mode {
                        Mode::Shared => usize::MAX,
                        Mode::Permit { .. } => 2,
                        _ => 1,
                    };
                    assert!(kinds_agree && room.inside.len() <= most, "{:?}", room.inside);
                    room.highest.0 = room.highest.0.max(guard.fence());
                    if *mode != Mode::Shared {
                        room.highest.1 = room.highest.1.max(guard.fence());
                    }
                }
                tokio::task::yield_now().await;
                {
                    let mut room = room.lock().unwrap();
                    let at = room.inside.iter().position(|other| other == mode).expect("it is inside");
                    room.inside.remove(at);
                }
                assert_eq!(guard.release().await?, Outcome::Released);
            }
            locker.shutdown(Duration::from_secs(10)).await
        }));
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(60), task).await.expect("nobody is forgotten").expect("no panic")?;
    }
    let state = store.inspect(&Query::Keys(vec![LockKey::new("x")?])).await?.remove(0);
    assert!(state.holders.is_empty() && state.waiters == Some(0), "{state:?}");
    Ok(())
}

#[tokio::test]
async fn those_that_wait_are_told_that_all_is_forgotten() -> Result<()> {
    let store = MemoryStore::new();
    let held = Locker::new(store.clone()).lock("a").acquire().await?;
    let lock = Locker::new(store.clone()).lock("a");
    let waiter = tokio::spawn(async move { lock.acquire().await });
    while Locker::new(store.clone()).lock("a").inspect().await?.waiters != Some(1) {
        tokio::task::yield_now().await;
    }
    store.forget_all();
    let granted = tokio::time::timeout(Duration::from_secs(5), waiter).await.expect("at once").expect("no panic")?;
    assert!(granted.is_held());
    drop(held);
    Ok(())
}
