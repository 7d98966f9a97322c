//! Servers that have no memory left: what is held stays held, and nothing new is taken.

use std::{num::NonZeroU32, time::Duration};

use lockkit_core::{AcquireRequest, Claim, Effect, ErrorKind, LockStore, Mode, Order, Renewal};
use lockkit_redis::RedisStore;
use lockkit_testkit::servers::{RedisCluster, RedisSentinels, RedisServer};

use crate::support::*;

/// Holds leases of all kinds, has the servers run out of memory, and renews them twice. Claims in their place get them, too, and a waiter
/// keeps its place.
async fn what_is_held_is_kept(url: &str, servers: &[&RedisServer]) {
    let store = RedisStore::from_url(url).await.expect("connect");
    let permit = Mode::Permit { limit: NonZeroU32::MIN };
    // All on one server of a cluster.
    let kinds = [("{a}", Mode::Exclusive, 1), ("{a}deep", Mode::Exclusive, 2)];
    let shared = [("{a}reader", Mode::Shared, 1), ("{a}permit", permit, 1), ("{a}deep reader", Mode::Shared, 2)];
    let mut renewals = Vec::new();
    for (name, mode, depth) in kinds.into_iter().chain(shared) {
        let mine = Claim { mode, ..claim(name) };
        hold(&store, &mine).await;
        renewals.push(Renewal { depth, ..renewal(&mine) });
    }
    let (kept, written) = (claim("{a}kept"), claim("{a}written"));
    hold(&store, &kept).await;
    hold(&store, &written).await;
    let waits = AcquireRequest { order: Order::Fifo, ..request(&claim("{a}"), Duration::from_millis(20)) };
    contended(store.acquire(&waits).await.expect("acquire"));
    for server in servers {
        server.command(&["CONFIG", "SET", "maxmemory", "1"]).await.expect("set");
    }
    for _ in 0..2 {
        contended(store.acquire(&waits).await.expect("it keeps its place"));
        // Each by itself: one must not rely on what another has written.
        for renewal in &renewals {
            assert_eq!(held(renew(&store, renewal).await).depth, renewal.depth, "{renewal:?}");
        }
    }
    for (former, mode) in [(kept, Mode::Exclusive), (written, Mode::Shared)] {
        let next = Claim { mode, ..claim(former.key.as_str()) };
        let in_its_place = AcquireRequest { from: Some(former.token), ..request(&next, Duration::ZERO) };
        granted(store.acquire(&in_its_place).await.expect("what is held is not new"));
        free(&store, &next).await;
    }
    store.release(&waits.claim).await.expect("release");
    for mode in [Mode::Exclusive, Mode::Shared, permit] {
        let error = attempt(&store, &Claim { mode, ..claim("{a}other") }).await.expect_err("full");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    }
    for renewal in &renewals {
        free(&store, &renewal.claim).await;
    }
}

/// Who connects leaves a note where none is yet, which takes memory.
async fn a_new_store_connects(url: &str, servers: &[&RedisServer]) {
    for server in servers {
        server.command(&["CONFIG", "SET", "maxmemory", "1"]).await.expect("set");
    }
    let store = RedisStore::from_url(url).await.expect("connect");
    let error = attempt(&store, &claim("a")).await.expect_err("full");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    for server in servers {
        let notes = server.command(&["KEYS", "*:reign"]).await.expect("keys");
        for note in notes.lines() {
            assert_eq!(server.command(&["PTTL", note]).await.expect("ttl"), "-1", "{note} has no end");
        }
        server.command(&["CONFIG", "SET", "maxmemory", "0"]).await.expect("set");
    }
    free(&store, &hold(&store, &claim("a")).await.claim).await;
}

#[tokio::test]
async fn one_server() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    let primary = &all.servers()[0];
    for options in ["", "?replicas=1&replica_timeout=3s"] {
        what_is_held_is_kept(&format!("{}{options}", primary.url()), &[primary]).await;
        primary.command(&["CONFIG", "SET", "maxmemory", "0"]).await.expect("set");
    }
}

#[tokio::test]
async fn sentinels() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    let primary = &all.servers()[0];
    a_new_store_connects(&format!("{}?failover_pause=no", all.url()), &[primary]).await;
    for options in ["", "&replicas=1&replica_timeout=3s"] {
        what_is_held_is_kept(&format!("{}?failover_pause=no{options}", all.url()), &[primary]).await;
        primary.command(&["CONFIG", "SET", "maxmemory", "0"]).await.expect("set");
    }
}

#[tokio::test]
async fn a_cluster() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    let members: Vec<_> = all.members().iter().collect();
    a_new_store_connects(&format!("{}?failover_pause=no", all.url()), &members[..3]).await;
    for options in ["", "&replicas=1&replica_timeout=3s"] {
        what_is_held_is_kept(&format!("{}?failover_pause=no{options}", all.url()), &members).await;
        for member in &members {
            member.command(&["CONFIG", "SET", "maxmemory", "0"]).await.expect("set");
        }
    }
}
