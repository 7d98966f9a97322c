//! The local queue in front of a server that is killed, and of one whose lease nobody takes.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use lockkit_core::{AcquireRequest, ErrorKind, LockStore, Locker, LossReason, Order, Outcome, Query, Release};
use lockkit_redis::RedisStore;
use lockkit_testkit::faults::poll_until;

use crate::{snag::Snag, support::*};

/// Many wait in one process while the server dies: all of them are told that it is away, at about the same time, and none
/// that another has the lock.
#[tokio::test]
async fn a_killed_server_is_no_holder() {
    let server = Server::start().await;
    let patience = Duration::from_millis(1500);
    let other = Locker::new(server.store().await);
    let guard = other.lock("a").acquire().await.expect("acquire");
    let locker = Locker::builder(server.store().await).patience(patience).build();
    let mut waiting = Vec::new();
    for _ in 0..10 {
        let lock = locker.lock("a");
        waiting.push(tokio::spawn(async move { lock.acquire().await }));
    }
    eventually("a subscription", async || subscribers(&mut server.raw(), "a") == 1).await;
    let contended = locker.lock("a").acquire_within(Duration::from_millis(100)).await.expect("the server answers");
    assert!(contended.is_none(), "the other one has it");

    let killed = Instant::now();
    server.kill().await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    for wait in [Duration::ZERO, Duration::from_millis(300)] {
        let error = locker.lock("a").acquire_within(wait).await.expect_err("the server is dead");
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut), "{error}");
    }
    for task in waiting {
        let error = task.await.expect("task").expect_err("the server is dead");
        assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut), "{error}");
    }
    let waited = killed.elapsed();
    println!("ten gave up {waited:?} after the end of the server");
    // One patience and what two answers may take, not ten of them.
    assert!(waited >= patience && waited < patience + Duration::from_secs(6), "{waited:?}");
    drop(guard);
}

/// An acquisition that is kept and not polled gets the lease of the one before it. Nobody renews that.
#[tokio::test]
async fn a_lease_that_nobody_takes_lapses() {
    const SHORT: Duration = Duration::from_secs(2);
    let server = Server::start().await;
    let locker = Locker::new(server.store().await);
    let lock = locker.lock("a").ttl(SHORT);
    let first = lock.acquire().await.expect("acquire");
    let (mut second, mut third) = (Box::pin(lock.acquire()), Box::pin(lock.acquire()));
    for future in [&mut second, &mut third] {
        assert!(poll_until(future.as_mut(), 1, || {}).await.is_none());
    }
    tokio::time::sleep(Duration::from_millis(5)).await;
    assert_eq!(first.release().await.expect("release"), Outcome::Released);
    assert_eq!(second.await.expect("acquire").release().await.expect("release"), Outcome::Released);
    let holders = locker.lock("a").inspect().await.expect("inspect").holders;
    assert_eq!(holders.len(), 1, "it was handed over");
    let started = Instant::now();
    let other = Locker::new(server.store().await);
    let guard = other.lock("a").ttl(SHORT).acquire_within(SHORT * 5).await.expect("acquire");
    println!("another process got it after {:?}", started.elapsed());
    assert!(guard.is_some(), "a lease that nobody has was renewed for {:?}", started.elapsed());
    drop(guard);
    let late = tokio::time::timeout(SHORT, third).await.expect("it is free").expect("acquire");
    assert_eq!(late.release().await.expect("release"), Outcome::Released);
}

/// That the next one can't be granted the lock says nothing of the one that gave it back.
#[tokio::test]
async fn a_release_is_one_though_the_next_can_not_be_served() {
    let server = Server::start().await;
    let (one, other) = (Locker::new(server.store().await), Locker::new(server.store().await));
    let held = one.lock("a").fifo().acquire().await.expect("granted");
    let lock = other.lock("a").fifo();
    let waiting = tokio::spawn(async move { lock.acquire().await });
    eventually("it waits", async || one.lock("a").inspect().await.expect("asked").waiters == Some(1)).await;
    raw::<()>(&mut server.raw(), "SET {lockkit:a}:fence abc");
    assert_eq!(held.release().await.expect("an answer"), Outcome::Released);
    waiting.abort();
}

/// The server counts in milliseconds, and the lease does not begin on one.
#[tokio::test]
async fn a_lease_that_shares_a_lock_lasts_no_less_than_its_ttl() {
    let server = Server::start().await;
    let (locker, mut connection) = (Locker::new(server.store().await), server.raw());
    let others = server.store().await;
    for _ in 0..50 {
        let asked = SystemTime::now().duration_since(UNIX_EPOCH).expect("a clock");
        let reader = locker.rw_lock("a").read().ttl(TTL).acquire().await.expect("granted");
        // The lease is stored beside the lock once another has asked for that.
        let writer = AcquireRequest { order: Order::Fifo, ..request(&claim("a"), Duration::ZERO) };
        contended(others.acquire(&writer).await.expect("an answer"));
        let [_, ends]: [String; 2] = raw(&mut connection, "ZRANGE {lockkit:a}:members:fence 0 -1 WITHSCORES");
        let ends = Duration::from_millis(ends.parse().expect("milliseconds"));
        assert!(ends >= asked + TTL, "{:?} too early", asked + TTL - ends);
        assert_eq!(reader.release().await.expect("an answer"), Outcome::Released);
    }
}

/// A request that was given up reaches the server behind the release of its claim. The core releases such a claim again.
#[tokio::test]
async fn a_place_that_comes_late_is_found_by_the_next_release() {
    /// For how long a request keeps a place, in ms. The first one for a claim asks for none.
    const PLACE: &str = "$4\r\n6000\r\n";
    let server = Server::start().await;
    let snag = Snag::start(([127, 0, 0, 1], server.port()).into(), PLACE).await;
    let store = RedisStore::from_url(&format!("redis://{}", snag.addr)).await.expect("connect");
    let (held, waits) = (claim("a"), claim("a"));
    let direct = server.store().await;
    // The server knows the script from then on.
    in_order(&direct, &held).await;
    let asked = AcquireRequest { order: Order::Fifo, ..request(&waits, TTL) };
    store.acquire(&asked).await.expect_err("its connection breaks");
    let not_held = Release::NotHeld(LossReason::Taken);
    assert_eq!(store.release(&waits).await.expect("release"), not_held);
    snag.let_go().await;
    until_one_waits(&direct, &held).await;
    assert_eq!(store.release(&waits).await.expect("release"), not_held);
    let states = direct.inspect(&Query::Keys(vec![held.key.clone()])).await.expect("inspect");
    assert_eq!(states[0].waiters, Some(0), "its place stays");
}
