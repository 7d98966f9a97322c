//! Servers that have no memory left: what is held stays held, and nothing new is taken.

use std::num::NonZeroU32;

use lockkit_core::{Claim, Effect, ErrorKind, Mode, Renewal};
use lockkit_redis::RedisStore;
use lockkit_testkit::servers::{RedisCluster, RedisSentinels, RedisServer};

use crate::support::*;

/// Holds leases of all kinds, has the servers run out of memory, and renews them twice.
async fn what_is_held_is_renewed(url: &str, servers: &[&RedisServer]) {
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
    for server in servers {
        server.command(&["CONFIG", "SET", "maxmemory", "1"]).await.expect("set");
    }
    for _ in 0..2 {
        // Each by itself: one must not rely on what another has written.
        for renewal in &renewals {
            assert_eq!(held(renew(&store, renewal).await).depth, renewal.depth, "{renewal:?}");
        }
    }
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
        what_is_held_is_renewed(&format!("{}{options}", primary.url()), &[primary]).await;
        primary.command(&["CONFIG", "SET", "maxmemory", "0"]).await.expect("set");
    }
}

#[tokio::test]
async fn sentinels() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    let primary = &all.servers()[0];
    a_new_store_connects(&format!("{}?failover_pause=no", all.url()), &[primary]).await;
    for options in ["", "&replicas=1&replica_timeout=3s"] {
        what_is_held_is_renewed(&format!("{}?failover_pause=no{options}", all.url()), &[primary]).await;
        primary.command(&["CONFIG", "SET", "maxmemory", "0"]).await.expect("set");
    }
}

#[tokio::test]
async fn a_cluster() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    let members: Vec<_> = all.members().iter().collect();
    a_new_store_connects(&format!("{}?failover_pause=no", all.url()), &members[..3]).await;
    for options in ["", "&replicas=1&replica_timeout=3s"] {
        what_is_held_is_renewed(&format!("{}?failover_pause=no{options}", all.url()), &members).await;
        for member in &members {
            member.command(&["CONFIG", "SET", "maxmemory", "0"]).await.expect("set");
        }
    }
}
