//! Lost replies, ended sessions, and servers that die, freeze or forget.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{Attempt, Effect, ErrorKind, LockStore, LossReason, Outcome, Query, Release, Renewed, Status};
use lockkit_testkit::{
    faults::{Direction, Proxy},
    servers::Keep,
};
use lockkit_zk::ZkConfig;

use crate::support::*;

const SESSION: Duration = Duration::from_secs(2);

/// The text in a request that names the claim's node.
fn protection(claim: &lockkit_core::Claim) -> Vec<u8> {
    let hex = claim.token.reveal();
    format!("_c_{}-", &hex[..8]).into_bytes()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_creations_without_a_reply_make_one_node_each() {
    let server = Server::start().await;
    let raw = server.raw().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    for round in 0..100 {
        let mine = claim("a");
        proxy.drop_reply_after(protection(&mine), 1);
        let error = attempt(&store, &mine).await.expect_err("its reply was lost");
        assert!(error.is_retryable() && error.effect() == Effect::Unknown, "{error}");
        proxy.dropped().await;
        if round % 2 == 0 {
            let hold = insist("ask again", async || attempt(&store, &mine).await).await;
            assert!(matches!(hold, Attempt::Granted(_)), "its own node kept it out in round {round}");
            assert_eq!(children(&raw, "a").await.len(), 1, "round {round}");
        }
        let release = insist("release", async || store.release(&mine).await).await;
        assert!(matches!(release, Release::Released { .. }), "round {round}: {release:?}");
        assert!(children(&raw, "a").await.is_empty(), "round {round}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_without_a_reply_is_a_release() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    for _ in 0..10 {
        let mine = claim("a");
        hold(&store, &mine).await;
        proxy.drop_reply_after(protection(&mine), 1);
        let error = store.release(&mine).await.expect_err("its reply was lost");
        assert_eq!(error.effect(), Effect::Unknown);
        proxy.dropped().await;
        let release = insist("release", async || store.release(&mine).await).await;
        assert!(matches!(release, Release::Released { .. }), "{release:?}");
        let again = insist("release", async || store.release(&mine).await).await;
        assert!(matches!(again, Release::NotHeld(LossReason::Gone)), "{again:?}");
    }
}

/// It has found the node gone that the release had ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_makes_a_release_without_a_reply_no_loss() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let mine = claim("a");
    hold(&store, &mine).await;
    proxy.drop_reply_after(protection(&mine), 1);
    store.release(&mine).await.expect_err("its reply was lost");
    proxy.dropped().await;
    let renewed = insist("renew", async || renew(&store, &mine).await).await;
    assert!(matches!(renewed, Renewed::Lost(_)), "{renewed:?}");
    let release = insist("release", async || store.release(&mine).await).await;
    assert!(matches!(release, Release::Released { .. }), "{release:?}");
}

/// One answer after the other would take more than ten seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_look_at_many_locks_far_away_is_bounded() {
    let server = Server::start().await;
    let (store, (far, proxy)) = (server.store().await, server.proxied(Duration::from_secs(20)).await);
    for n in 0..200 {
        hold(&store, &claim(&format!("n{n}"))).await;
    }
    proxy.delay(Direction::ToClient, Duration::from_millis(50));
    let looked = tokio::time::timeout(Duration::from_secs(5), far.inspect(&Query::Prefix(String::new()))).await;
    let states = looked.expect("in time").expect("inspect");
    assert!(states.len() == 200 && states.iter().all(|state| state.holders.len() == 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_cut_off_knows_before_the_lock_goes_to_another() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(SESSION).await;
    let other = server.store().await;
    let lock = locker(&store).lock("a").ttl(SESSION);
    let guard = lock.acquire_within(Duration::from_secs(10)).await.expect("ask").expect("free");
    tokio::time::sleep(SESSION * 2).await;
    assert_eq!(guard.status(), Status::Held, "a lease in a living session lasts");
    proxy.blackhole();
    let cut = Instant::now();
    let (waiting, guard) = (locker(&other), Arc::new(guard));
    let before = Arc::clone(&guard);
    let next = tokio::spawn(async move {
        let next = waiting.lock("a").acquire_within(Duration::from_secs(20)).await;
        (next, before.is_held())
    });
    tokio::time::sleep_until((cut + SESSION).into()).await;
    assert!(!guard.is_held(), "it believes for longer than its session lasts");
    assert_eq!(guard.lost().await, LossReason::Unreachable);
    let (next, believed) = next.await.expect("no panic");
    assert!(!believed, "the lock was given away while the guard believed");
    let next = next.expect("acquire").expect("granted");
    assert!(next.fence() > guard.fence());
    proxy.heal();
    assert!(!guard.is_held());
    assert!(next.is_held());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ended_session_is_said_at_once() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(SESSION).await;
    let (mine, never) = (claim("a"), claim("b"));
    hold(&store, &mine).await;
    proxy.blackhole();
    // The driver gives a session up on its own after 7/5 of its timeout; the server has ended it by then.
    tokio::time::sleep(SESSION * 2).await;
    assert_eq!(lost(renew(&store, &mine).await), LossReason::SessionEnded);
    proxy.heal();
    let asked = insist("renew", async || renew(&store, &never).await).await;
    assert_eq!(lost(Ok(asked)), LossReason::Gone);
    let next = claim("a");
    let answer = insist("acquire", async || attempt(&store, &next).await).await;
    granted(answer);
    free(&store, &next).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_after_the_session_says_so() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(SESSION).await;
    let mine = claim("a");
    hold(&store, &mine).await;
    proxy.blackhole();
    tokio::time::sleep(SESSION * 2).await;
    proxy.heal();
    let release = insist("release", async || store.release(&mine).await).await;
    assert_eq!(release, Release::NotHeld(LossReason::SessionEnded));
    let again = insist("release", async || store.release(&mine).await).await;
    assert_eq!(again, Release::NotHeld(LossReason::Gone));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_outlives_its_session() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(SESSION).await;
    let (other, raw) = (server.store().await, server.raw().await);
    let mine = claim("a");
    hold(&other, &mine).await;
    let waiting = locker(&store);
    let waiter =
        tokio::spawn(async move { waiting.lock("a").ttl(SESSION).acquire_within(Duration::from_secs(30)).await });
    eventually("it queues", async || children(&raw, "a").await.len() == 2).await;
    proxy.blackhole();
    eventually("its session ends", async || children(&raw, "a").await.len() == 1).await;
    tokio::time::sleep(SESSION).await;
    proxy.heal();
    eventually("it queues again", async || children(&raw, "a").await.len() == 2).await;
    free(&other, &mine).await;
    let guard = waiter.await.expect("no panic").expect("acquire").expect("granted");
    assert!(guard.is_held());
    assert_eq!(children(&raw, "a").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_node_is_noticed() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    for renewals in [0, 1, 3] {
        let mine = claim("a");
        hold(&store, &mine).await;
        for _ in 0..renewals {
            assert!(matches!(renew(&store, &mine).await.expect("renew"), Renewed::Held(_)));
        }
        let node = children(&raw, "a").await.remove(0);
        raw.delete(&format!("/lockkit/a/{node}"), None).await.expect("delete");
        // The watch's event comes right behind, but need not have been looked at yet.
        eventually("it notices", async || matches!(renew(&store, &mine).await, Ok(Renewed::Lost(LossReason::Gone))))
            .await;
        assert_eq!(store.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Gone));
    }
}

/// The next regular renewal is 3.6 s away at least, so what comes sooner comes from the watch.
const LONG: Duration = Duration::from_secs(12);
const AT_ONCE: Duration = Duration::from_secs(3);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_hears_at_once_that_its_node_is_gone_and_why() {
    let server = Server::start().await;
    let (store, raw) = (connect(server.config().session(LONG)).await, server.raw().await);
    let (mine, other) = (locker(&store), locker(&server.store().await));
    for (name, broken) in [("a", false), ("b", true)] {
        let guard = mine.lock(name).ttl(LONG).try_acquire().await.expect("ask").expect("free");
        guard.renew().await.expect("renew");
        let waiter = other.lock(name).ttl(LONG);
        let waiter = tokio::spawn(async move { waiter.acquire().await });
        eventually("it queues", async || children(&raw, name).await.len() == 2).await;
        if broken {
            let ended = other.break_lock(name, guard.token()).await.expect("break");
            assert!(matches!(ended, Release::Released { .. }), "{ended:?}");
        } else {
            let node = children(&raw, name).await.into_iter().min_by_key(|node| node[node.len() - 10..].to_owned());
            raw.delete(&format!("/lockkit/{name}/{}", node.expect("a node")), None).await.expect("delete");
        }
        let reason = tokio::time::timeout(AT_ONCE, guard.lost()).await.expect("at once");
        assert_eq!(reason, if broken { LossReason::Revoked } else { LossReason::Taken });
        let next = waiter.await.expect("no panic").expect("acquire");
        assert_eq!(guard.release().await.expect("release"), Outcome::NotHeld(reason));
        assert_eq!(next.release().await.expect("release"), Outcome::Released);
    }
}

/// The store takes the break for the holder's release, and its watch is silent about what the store itself deletes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guard_hears_at_once_that_its_own_store_broke_its_lease() {
    let server = Server::start().await;
    let store = connect(server.config().session(LONG)).await;
    let (mine, second) = (locker(&store), locker(&store));
    for breaker in [&mine, &second] {
        let guard = mine.lock("a").ttl(LONG).try_acquire().await.expect("ask").expect("free");
        guard.renew().await.expect("renew");
        let ended = breaker.break_lock("a", guard.token()).await.expect("break");
        assert!(matches!(ended, Release::Released { .. }), "{ended:?}");
        let reason = tokio::time::timeout(AT_ONCE, guard.lost()).await.expect("at once");
        assert_eq!(reason, LossReason::Gone);
        assert_eq!(guard.release().await.expect("release"), Outcome::NotHeld(reason));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sessions_own_node_may_be_deleted() {
    let server = Server::start().await;
    let (store, raw) = (connect(server.config().session(SESSION)).await, server.raw().await);
    let guard = locker(&store).lock("a").ttl(SESSION).try_acquire().await.expect("ask").expect("free");
    for _ in 0..3 {
        let mut own = None;
        eventually("the session has a node", async || {
            own = raw
                .list_children("/lockkit")
                .await
                .expect("list")
                .into_iter()
                .find(|node| node.starts_with("%session-"));
            own.is_some()
        })
        .await;
        raw.delete(&format!("/lockkit/{}", own.expect("found")), None).await.expect("delete");
        tokio::time::sleep(SESSION).await;
        assert_eq!(guard.status(), Status::Held);
    }
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_with_data_costs_a_holder_nothing() {
    let server = Server::start().await;
    // The longest that it gives: on a busy machine it needs seconds to come back.
    let session = Duration::from_secs(60);
    let store = connect(server.config().session(session)).await;
    let guard = locker(&store).lock("a").ttl(session).try_acquire().await.expect("ask").expect("free");
    let fence = guard.fence();
    server.0.kill().await.expect("kill");
    server.0.restart(Keep::Data).await.expect("restart");
    insist("renew", async || guard.renew().await).await;
    assert_eq!(guard.fence(), fence);
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    let next = locker(&store).lock("a").ttl(session).try_acquire().await.expect("ask").expect("free");
    assert!(next.fence() > fence);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_without_data_ends_the_session() {
    let server = Server::start().await;
    let store = connect(server.config().session(Duration::from_secs(6))).await;
    let guard = locker(&store).lock("a").ttl(Duration::from_secs(6)).try_acquire().await.expect("ask").expect("free");
    server.0.restart(Keep::Nothing).await.expect("restart");
    let reason = tokio::time::timeout(Duration::from_secs(6), guard.lost()).await.expect("it notices");
    // On a busy machine the lease's time is up before the server is back.
    assert!(matches!(reason, LossReason::SessionEnded | LossReason::Unreachable), "{reason}");
    assert!(
        locker(&store)
            .lock("a")
            .ttl(Duration::from_secs(6))
            .acquire_within(Duration::from_secs(10))
            .await
            .expect("ask")
            .is_some()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_down_or_frozen_is_an_error_in_time() {
    let server = Server::start().await;
    let store = connect(server.config().timeout(Duration::from_millis(500))).await;
    let mine = claim("a");
    hold(&store, &mine).await;
    server.0.freeze().await.expect("freeze");
    for _ in 0..3 {
        let asked = Instant::now();
        let error = attempt(&store, &claim("a")).await.expect_err("nobody answers");
        assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Unavailable), "{error}");
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    }
    let error = store.release(&mine).await.expect_err("nobody answers");
    assert_eq!(error.effect(), Effect::Unknown, "{error}");
    server.0.thaw().expect("thaw");
    let release = insist("release", async || store.release(&mine).await).await;
    assert!(matches!(release, Release::Released { .. }), "{release:?}");
    server.0.kill().await.expect("kill");
    for _ in 0..3 {
        let asked = Instant::now();
        let error = attempt(&store, &claim("a")).await.expect_err("nobody there");
        assert!(matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::Unavailable), "{error}");
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_black_holed_connection_is_replaced() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let mine = claim("a");
    hold(&store, &mine).await;
    let opened = proxy.connections();
    proxy.hold(Direction::ToServer);
    assert_eq!(attempt(&store, &claim("b")).await.expect_err("nothing comes through").kind(), ErrorKind::TimedOut);
    eventually("it tries another connection", async || proxy.connections() > opened).await;
    proxy.heal();
    let renewed = insist("renew", async || renew(&store, &mine).await).await;
    assert!(matches!(renewed, Renewed::Held(_)), "the session lives on: {renewed:?}");
    free(&store, &mine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_connection_is_given_up_when_requests_are() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.0.addr()).await.expect("proxy");
    let store = connect(ZkConfig::new([proxy.addr().to_string()]).session(Duration::from_secs(10))).await;
    hold(&store, &claim("a")).await;
    let opened = proxy.connections();
    proxy.blackhole();
    let silent = Instant::now();
    eventually("it tries another connection", async || proxy.connections() > opened).await;
    assert!(silent.elapsed() < ZkConfig::TIMEOUT * 9 / 5, "it took {:?}", silent.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_whose_answers_can_not_be_read_is_replaced() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(SESSION).await;
    let mine = claim("a");
    hold(&store, &mine).await;
    spoil_a_length(&proxy);
    // Requests go on all the time, and so do their answers: the driver does not hear silence.
    eventually("it serves again", async || attempt(&store, &claim("b")).await.is_ok()).await;
    assert_eq!(lost(renew(&store, &mine).await), LossReason::SessionEnded);
}

/// The driver of a session that was given up reconnects, and would keep it alive at the servers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_was_given_up_holds_no_lock_though_nobody_asks_the_store_again() {
    let server = Server::start().await;
    let raw = server.raw().await;
    let (store, proxy) = server.proxied(SESSION).await;
    let mine = claim("a");
    hold(&store, &mine).await;
    spoil_a_length(&proxy);
    eventually("it is given up", async || matches!(renew(&store, &mine).await, Ok(Renewed::Lost(_)))).await;
    eventually("its node is gone", async || children(&raw, "a").await.is_empty()).await;
    drop(store);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_storm_of_cuts_loses_no_update() {
    let server = Server::start().await;
    let (resource, storm) = (Arc::new(Resource::default()), Arc::new(AtomicBool::new(true)));
    let (mut workers, mut proxies): (Vec<_>, Vec<Proxy>) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let (store, proxy) = server.proxied(Duration::from_secs(6)).await;
        proxies.push(proxy);
        let lock = locker(&store).lock("a").ttl(Duration::from_secs(6));
        workers.push(tokio::spawn(work(lock, Arc::clone(&resource), Arc::clone(&storm))));
    }
    let until = Instant::now() + Duration::from_secs(6);
    let mut next = 0;
    while Instant::now() < until {
        proxies[next % 4].cut().await;
        next += 1;
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    storm.store(false, Ordering::SeqCst);
    for worker in workers {
        tokio::time::timeout(Duration::from_secs(30), worker).await.expect("it ends").expect("no panic");
    }
    let uses = resource.uses.load(Ordering::SeqCst);
    assert!(uses > 20, "only {uses} rounds");
    let after = locker(&server.store().await);
    assert!(after.lock("a").acquire_within(Duration::from_secs(15)).await.expect("ask").is_some(), "left held");
}
