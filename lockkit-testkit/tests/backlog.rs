//! A store that is away for a minute, while a service goes on asking it for locks and giving up: what it is owed stays
//! bounded, in calls and releases, and comes to an end.

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use lockkit_core::{Effect, ErrorKind, Liveness, Locker, MemoryStore, Result, StoreInfo};
use lockkit_sim::{Fault, Operation, SimStore};
use lockkit_testkit::Altered;
use tokio::{
    runtime::Handle,
    time::{Instant, sleep},
};

const TTL: Duration = Duration::from_secs(10);
/// Acquisitions that are given up, one each millisecond.
const MINUTE: u32 = 60_000;

#[tokio::test(start_paused = true)]
async fn what_is_owed_lapses_with_its_lease() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    store.inject(Fault::LoseRequest.until_healed());
    let (tasks, seen) = (alive(), a_minute_away(&store, &locker).await);
    let owed = owed(&locker).await;
    // Each is owed for a ttl with its drift; at once only so many are tried.
    assert!((9_000..=10_200).contains(&owed), "{owed} releases are owed");
    // A task for each.
    assert!(seen.tasks <= tasks + 10_200, "{seen:?}");
    assert!(seen.calls <= 1_100, "{seen:?}");
    assert_eq!(seen.refused, 0);
    let (start, lapsed) = (Instant::now(), TTL + Duration::from_secs(4));
    locker.shutdown(lapsed).await?;
    assert!(start.elapsed() > TTL / 2, "they were dropped before their leases could lapse");
    drop(locker);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(alive(), tasks, "tasks are left");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn where_nothing_lapses_no_more_is_asked_than_can_be_undone() -> Result<()> {
    let store = sessions();
    let locker = Locker::new(store.clone());
    store.inject(Fault::LoseRequest.until_healed());
    let (tasks, seen) = (alive(), a_minute_away(&store, &locker).await);
    // What is on its way to the limit when it is reached is owed, too.
    assert!(seen.refused > u64::from(MINUTE) * 3 / 4, "{seen:?}");
    assert!(seen.tasks <= tasks + 12_200, "{seen:?}");
    assert!(seen.calls <= 1_100, "{seen:?}");
    store.heal();
    sleep(Duration::from_secs(5)).await;
    // The store is told of each of them, and none was dropped.
    let released = store.take_calls().iter().filter(|call| call.operation == Operation::Release).count();
    assert!((10_000..=12_200).contains(&released), "{released} were released");
    assert!(locker.lock("a").try_acquire().await?.is_some());
    locker.shutdown(Duration::from_secs(1)).await?;
    drop(locker);
    sleep(Duration::from_secs(2)).await;
    assert_eq!(alive(), tasks, "tasks are left");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_store_that_answers_is_asked_however_much_is_given_up() -> Result<()> {
    let store = sessions();
    let locker = Locker::new(store.clone());
    let mut guards = Vec::new();
    for number in 0..12_000 {
        guards.push(locker.lock(format!("{number}")).acquire().await?);
    }
    drop(guards);
    assert!(locker.lock("a").try_acquire().await?.is_some());
    locker.shutdown(Duration::from_secs(1)).await
}

/// An administrator takes the right to release away by mistake, and gives it back.
#[tokio::test(start_paused = true)]
async fn where_nothing_lapses_a_release_that_was_refused_is_tried_again() -> Result<()> {
    let store = sessions();
    let locker = Locker::new(store.clone());
    let guard = locker.lock("a").acquire().await?;
    store.inject(Fault::Fail(ErrorKind::Denied, Effect::None).on(Operation::Release).until_healed());
    assert_eq!(guard.release().await.expect_err("it is forbidden").kind(), ErrorKind::Denied);
    // All this takes less than the ttl, at which the store below lets go of it.
    sleep(Duration::from_secs(10)).await;
    assert!(locker.lock("a").try_acquire().await?.is_none(), "it could not be released");
    store.heal();
    assert!(locker.lock("a").acquire_within(Duration::from_secs(10)).await?.is_some());
    Ok(())
}

/// What a minute came to.
#[derive(Debug, Default)]
struct Seen {
    /// Most tasks at a time.
    tasks: usize,
    /// Most releases that were tried in a second.
    calls: usize,
    /// Acquisitions that were refused without asking the store.
    refused: u64,
}

/// Asks for a thousand locks a second, and gives up each while its request is on its way.
async fn a_minute_away(store: &SimStore, locker: &Locker) -> Seen {
    let mut seen = Seen::default();
    for number in 1..=MINUTE {
        let lock = locker.lock(format!("{number}")).ttl(TTL);
        {
            let mut asking = pin!(lock.acquire());
            if let Poll::Ready(answer) = asking.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                let error = answer.expect_err("the store is away");
                assert_eq!((error.kind(), error.is_retryable()), (ErrorKind::Unavailable, true), "{error}");
                seen.refused += 1;
            }
        }
        sleep(Duration::from_millis(1)).await;
        seen.tasks = seen.tasks.max(alive());
        if number % 1000 == 0 {
            let calls = store.take_calls();
            seen.calls = seen.calls.max(calls.iter().filter(|call| call.operation == Operation::Release).count());
        }
    }
    seen
}

fn alive() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

/// How many releases are under way in the background, as an end that does not wait for them says.
async fn owed(locker: &Locker) -> u32 {
    let said = locker.shutdown(Duration::ZERO).await.map_err(|error| error.message().to_owned());
    said.map_or_else(|said| said.split(' ').next().and_then(|number| number.parse().ok()).expect("a number"), |()| 0)
}

/// A simulated store whose leases end with the session, as ZooKeeper's do.
fn sessions() -> SimStore {
    SimStore::over(|clock| {
        let session = |info: &mut StoreInfo| {
            info.capability.liveness = Liveness { ttl: None, session: Some(Duration::from_secs(20)) }
        };
        Arc::new(Altered::with_info(MemoryStore::with_clock(clock), session))
    })
}
