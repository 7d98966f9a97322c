//! The same session on another connection, and a session that is established twice.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{LockStore, LossReason, Renewed};
use lockkit_testkit::{
    faults::{Direction, Proxy},
    servers::Keep,
};
use lockkit_zk::{ZkConfig, ZkStore};

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_back_is_found_soon_however_long_it_was_away() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let mine = claim("a");
    hold(&store, &mine).await;
    proxy.refuse(true);
    proxy.cut().await;
    // The driver doubles its pauses: with one address it would sleep from here for longer than it was away.
    tokio::time::sleep(Duration::from_secs(7)).await;
    proxy.heal();
    let back = Instant::now();
    let renewed = insist("renew", async || renew(&store, &mine).await).await;
    assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}");
    assert!(back.elapsed() < Duration::from_secs(3), "it took {:?}", back.elapsed());
    free(&store, &mine).await;
}

/// The servers give each session its whole timeout anew when they start, so they know one that its client has not heard of
/// for longer than that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_outlived_its_servers_keeps_its_places_though_they_answer_slowly_at_first() {
    const SESSION: Duration = Duration::from_secs(12);
    let server = Server::start().await;
    let (other, (store, proxy)) = (server.store().await, server.proxied(SESSION).await);
    let (holder, waiter) = (claim("a"), claim("a"));
    hold(&other, &holder).await;
    let queue = |wait| request(&waiter, wait);
    let waits = store.acquire(&queue(Duration::from_millis(100))).await.expect("it waits");
    assert!(is_contended(&waits), "{waits:?}");
    let before = children(&server.raw().await, "a").await;
    assert_eq!(before.len(), 2);
    proxy.blackhole();
    let cut = Instant::now();
    // The second time so late that the servers know the session for long enough.
    for since_cut in [Duration::ZERO, SESSION * 2 / 3] {
        tokio::time::sleep(since_cut.saturating_sub(cut.elapsed())).await;
        server.0.restart(Keep::Data).await.expect("restart");
    }
    tokio::time::sleep((SESSION + Duration::from_millis(500)).saturating_sub(cut.elapsed())).await;
    // Longer than the bound on one request.
    proxy.delay(Direction::ToClient, Duration::from_millis(700));
    proxy.release(Direction::ToServer);
    proxy.release(Direction::ToClient);
    tokio::time::sleep(Duration::from_secs(2)).await;
    proxy.heal();
    insist("renew", async || renew(&store, &waiter).await).await;
    let after = children(&server.raw().await, "a").await;
    assert_eq!(after, before, "it lost its place");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_lasts_no_longer_than_the_timeout_that_a_reconnection_gave() {
    const ASKED: Duration = Duration::from_secs(12);
    const GIVEN: Duration = Duration::from_secs(2);
    let server = Server::start().await;
    let (store, proxy) = server.proxied(ASKED).await;
    let lock = locker(&store).lock("a").ttl(ASKED);
    let promised = lock.try_acquire().await.expect("ask").expect("free");
    server.0.kill().await.expect("kill");
    server.0.limit_sessions(GIVEN, GIVEN).expect("configure");
    server.0.restart(lockkit_testkit::servers::Keep::Data).await.expect("restart");
    let reason = tokio::time::timeout(ASKED / 3, promised.lost()).await.expect("nobody keeps that promise");
    assert_eq!(reason, LossReason::Expired);

    let guard = lock.acquire_within(ASKED).await.expect("ask").expect("free");
    assert!(guard.is_held() && guard.remaining() <= GIVEN, "it is believed in for {:?}", guard.remaining());
    let waiting = locker(&server.store().await);
    proxy.blackhole();
    let next = waiting.lock("a").acquire_within(Duration::from_secs(30)).await.expect("ask").expect("granted");
    assert!(
        !guard.is_held(),
        "two holders: the lock was given away {:?} before the end of the lease",
        guard.remaining()
    );
    assert!(next.fence() > guard.fence());
}

/// The driver goes on in the new session. The node that the lease is stays until the old one ends, which nothing puts off.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconnection_in_a_new_session_ends_the_leases_of_the_old_one() {
    const SESSION: Duration = Duration::from_secs(8);
    let server = Server::start().await;
    let proxy = Proxy::start(server.0.addr()).await.expect("proxy");
    // Each connection gets a session of its own, whatever session the client asks for when it greets (by version 0 of the protocol):
    // its id and its password come behind lengths, version, last change and timeout.
    proxy.rewrite_requests(|mut bytes| {
        if bytes.len() >= 48 && bytes[4..8] == [0; 4] {
            bytes[20..28].fill(0);
            bytes[32..48].fill(0);
        }
        bytes
    });
    let config = ZkConfig::new([proxy.addr().to_string()]).session(SESSION).timeout(Duration::from_millis(500));
    let store = connect(config).await;
    let raw = server.raw().await;
    let guard = locker(&store).lock("a").ttl(SESSION).try_acquire().await.expect("ask").expect("free");
    // What it writes to, to show that it lives.
    eventually("the session has a node", async || {
        raw.list_children("/lockkit").await.expect("list").iter().any(|node| node.starts_with("%session-"))
    })
    .await;
    proxy.cut().await;
    let reason = guard.lost().await;
    assert_eq!(children(&raw, "a").await.len(), 1, "the old session has ended before ({reason})");
    assert_eq!(reason, LossReason::SessionEnded);
}

/// A session that the store does not keep ends with the last of those that got it, and with it the locks that they have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_granted_while_another_attempt_to_connect_takes_the_place_of_one_stays_held() {
    const BOUND: Duration = Duration::from_millis(500);
    let server = Server::start().await;
    let other = server.store().await;
    let proxy = Proxy::start(server.0.addr()).await.expect("proxy");
    proxy.blackhole();
    let config = ZkConfig::new([proxy.addr().to_string()]).timeout(BOUND);
    let store = Arc::new(ZkStore::new(config).expect("a store"));
    let begun = Instant::now();
    attempt(&store, &claim("b")).await.expect_err("nobody answers");
    // Whoever comes after four times the bound begins another attempt. This one comes before, and waits for a while longer.
    tokio::time::sleep((BOUND * 37 / 10).saturating_sub(begun.elapsed())).await;
    let (mine, waiting) = (claim("a"), Arc::clone(&store));
    let asked = mine.clone();
    let waiter = tokio::spawn(async move { attempt(&waiting, &asked).await });
    tokio::time::sleep((BOUND * 41 / 10).saturating_sub(begun.elapsed())).await;
    let asking = Arc::clone(&store);
    let next = tokio::spawn(async move { attempt(&asking, &claim("b")).await });
    tokio::time::sleep(BOUND / 20).await;
    proxy.heal();
    let answer = waiter.await.expect("no panic");
    drop(next.await.expect("no panic"));
    let held = match answer {
        Ok(answer) => granted(answer),
        Err(_) => hold(&store, &mine).await,
    };
    let until = Instant::now() + BOUND;
    while Instant::now() < until {
        let theirs = attempt(&other, &claim("a")).await.expect("ask");
        let left = held.until.since(store.info().clock.now());
        assert!(is_contended(&theirs), "two holders, of which one believes for {left:?}");
        tokio::time::sleep(BOUND / 50).await;
    }
}
