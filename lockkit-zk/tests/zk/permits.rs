//! Permits beside each other, in the one queue with all others.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Claim, Effect, ErrorKind, LockStore, LossReason, Mode, Query, Release};
use lockkit_zk::ZkStore;
use tokio::task::JoinSet;
use zookeeper_client::{Acls, CreateMode};

use crate::support::*;

/// The first is waited for with a watch on each of as many nodes, the second with one on the directory.
const LIMITS: [u32; 2] = [3, 20];

async fn hold_permits(store: &ZkStore, limit: u32, name: &str) -> Vec<Claim> {
    let mut claims = Vec::new();
    for _ in 0..limit {
        let claim = claim_as(permit(limit), name);
        hold(store, &claim).await;
        claims.push(claim);
    }
    claims
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nodes_name_tells_the_limit() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    for (mode, mark) in [(permit(7), "permit7-lock"), (Mode::Shared, "read-lock")] {
        let mine = claim_as(mode, mark);
        let held = hold(&store, &mine).await;
        let hex = mine.token.reveal();
        let uuid = format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
        let nodes = children(&raw, mark).await;
        assert_eq!(nodes, [format!("_c_{uuid}-{mark}-0000000001")]);
        let (data, stat) = raw.get_data(&format!("/lockkit/{mark}/{}", nodes[0])).await.expect("the node");
        assert_eq!(String::from_utf8_lossy(&data), "lockkit:1:1::test: holder");
        assert_eq!(held.fence.get(), u64::try_from(stat.czxid).expect("positive") * 128);
        free(&store, &mine).await;
    }
}

/// Not only when the nearest leaves.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_wakes_whichever_holder_leaves() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    for limit in LIMITS {
        for leaving in [0, limit / 2, limit - 1] {
            let name = format!("{limit} {leaving}");
            let mut holders = hold_permits(&store, limit, &name).await;
            let waiter = Waiter::queue(&other, &raw, claim_as(permit(limit), &name)).await;
            let second = Waiter::queue(&store, &raw, claim_as(permit(limit), &name)).await;
            waiter.waits().await;
            free(&store, &holders.remove(usize::try_from(leaving).expect("small"))).await;
            let held = waiter.granted().await.claim;
            second.waits().await;
            free(&store, &holders.remove(0)).await;
            holders.push(second.granted().await.claim);
            free(&other, &held).await;
            for holder in &holders {
                free(&store, holder).await;
            }
            assert!(children(&raw, &name).await.is_empty());
        }
    }
}

/// A place that nobody asks for keeps one permit, and no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_does_not_rely_on_the_one_before_it() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    for limit in LIMITS {
        let name = limit.to_string();
        let holders = hold_permits(&store, limit, &name).await;
        let idle = claim_as(permit(limit), &name);
        assert!(is_contended(&other.acquire(&request(&idle, Duration::from_millis(20))).await.expect("ask")));
        let waiter = Waiter::queue(&store, &raw, claim_as(permit(limit), &name)).await;
        free(&store, &holders[1]).await;
        waiter.waits().await;
        free(&store, &holders[0]).await;
        let held = waiter.granted().await;
        let asked = other.acquire(&request(&idle, Duration::ZERO)).await.expect("ask");
        assert!(granted(asked).fence < held.fence, "its place was not kept");
        free(&other, &idle).await;
        free(&store, &held.claim).await;
        for holder in &holders[2..] {
            free(&store, holder).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_wait_for_others_and_others_for_permits() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    for limit in LIMITS {
        let (name, reader) = (limit.to_string(), claim_as(Mode::Shared, &limit.to_string()));
        hold(&store, &reader).await;
        let mut permits = Vec::new();
        for _ in 0..=limit {
            permits.push(Waiter::queue(&other, &raw, claim_as(permit(limit), &name)).await);
        }
        let writer = Waiter::queue(&store, &raw, claim(&name)).await;
        permits[0].waits().await;
        free(&store, &reader).await;
        let last = permits.pop().expect("one too many");
        let mut held = Vec::new();
        for permit in permits {
            held.push(permit.granted().await.claim);
        }
        last.waits().await;
        for claim in &held {
            writer.waits().await;
            free(&other, claim).await;
        }
        let last = last.granted().await.claim;
        writer.waits().await;
        free(&other, &last).await;
        free(&store, &writer.granted().await.claim).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_limit_is_refused_while_somebody_holds_or_waits() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let refused = async || {
        for wait in [Duration::ZERO, Duration::from_secs(5)] {
            let error = other.acquire(&request(&claim_as(permit(3), "a"), wait)).await.expect_err("limits differ");
            assert_eq!((error.kind(), error.effect()), (ErrorKind::InvalidInput, Effect::None), "{error}");
        }
    };
    let (holder, writer) = (claim_as(permit(2), "a"), claim("a"));
    hold(&store, &holder).await;
    refused().await;
    assert_eq!(children(&raw, "a").await.len(), 1, "a refused claim has left its node");
    free(&store, &holder).await;
    hold(&store, &writer).await;
    let waiter = Waiter::queue(&store, &raw, claim_as(permit(2), "a")).await;
    refused().await;
    assert_eq!(children(&raw, "a").await.len(), 2, "a refused claim has left its node");
    free(&store, &writer).await;
    free(&store, &waiter.granted().await.claim).await;
    // One that is about to be refused does others no harm whose limit is that of the holder.
    let writer = claim("a");
    hold(&store, &writer).await;
    let waiter = Waiter::queue(&store, &raw, claim_as(permit(2), "a")).await;
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let prefix = "/lockkit/a/_c_6d3b9a3e-0000-4000-8000-000000000001-permit3-lock-";
    let (_, odd) = raw.create(prefix, b"", &options).await.expect("create");
    let late = Waiter::queue(&store, &raw, claim_as(permit(2), "a")).await;
    free(&store, &writer).await;
    let held = waiter.granted().await.claim;
    late.waits().await;
    raw.delete(&format!("{prefix}{odd}"), None).await.expect("delete");
    free(&store, &late.granted().await.claim).await;
    free(&store, &held).await;
    let other_limit = claim_as(permit(3), "a");
    hold(&other, &other_limit).await;
    free(&other, &other_limit).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn permits_are_never_exceeded_and_all_come_back() {
    for limit in [1, 3, 20] {
        storm(limit).await;
    }
}

/// Several clients take permits for a moment, and give up waiting for them at any moment.
async fn storm(limit: u32) {
    const CLIENTS: usize = 4;
    const ROUNDS: u64 = 25;
    let server = Server::start().await;
    let (inside, most, raw) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), server.raw().await);
    let (mut tasks, mut lockers, limit) =
        (JoinSet::new(), Vec::new(), std::num::NonZeroU32::new(limit).expect("not zero"));
    let crowd = usize::try_from(limit.get()).expect("small") + 4;
    for number in 0..CLIENTS {
        let locker = locker(&server.store().await);
        lockers.push(locker.clone());
        for task in 0..crowd.div_ceil(2) {
            let (locker, inside, most) = (locker.clone(), Arc::clone(&inside), Arc::clone(&most));
            tasks.spawn(async move {
                let mut state = u64::try_from(number * 31 + task + 1).expect("small");
                for _ in 0..ROUNDS {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    let semaphore = locker.semaphore("a", limit);
                    // A third gives up soon.
                    let patience = if state >> 33 & 3 == 0 { (state >> 40) % 20_000 } else { 30_000_000 };
                    let asked = tokio::time::timeout(Duration::from_micros(patience), semaphore.acquire()).await;
                    let Ok(guard) = asked else { continue };
                    let guard = guard.expect("acquire");
                    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_micros((state >> 50) % 3000)).await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    _ = guard.release().await.expect("release");
                }
            });
        }
    }
    while let Some(task) = tasks.join_next().await {
        task.expect("no panic");
    }
    for locker in lockers {
        locker.shutdown(Duration::from_secs(10)).await.expect("drained");
    }
    let most = most.load(Ordering::SeqCst);
    assert!(most <= usize::try_from(limit.get()).expect("small"), "{most} held {limit} permits at once");
    assert!(most > 1 || limit.get() == 1, "nobody ever held beside another");
    assert!(children(&raw, "a").await.is_empty(), "nodes are left");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_herd_watches_one_node() {
    const WAITERS: usize = 12;
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let holders = hold_permits(&store, 2, "a").await;
    let mut waiters = Vec::new();
    for _ in 0..WAITERS {
        waiters.push(Waiter::queue(&other, &raw, claim_as(permit(2), "a")).await);
    }
    let writer = Waiter::queue(&store, &raw, claim("a")).await;
    // "wchp" lists each watched path, and below it the sessions that watch it.
    let mut watches = String::new();
    eventually("all watch", async || {
        watches = server.0.word("wchp").await.expect("wchp");
        watches.matches("/lockkit/a/").count() == WAITERS + 2
    })
    .await;
    assert!(!watches.lines().any(|line| line == "/lockkit/a"), "all watch the directory: {watches}");
    for holder in &holders {
        free(&store, holder).await;
    }
    for waiter in waiters {
        free(&other, &waiter.granted().await.claim).await;
    }
    free(&store, &writer.granted().await.claim).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_holders_are_shown_and_one_can_be_broken() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let holders = hold_permits(&store, 3, "a").await;
    let waiter = Waiter::queue(&other, &raw, claim_as(permit(3), "a")).await;
    let state = other.inspect(&Query::Keys(vec![holders[0].key.clone()])).await.expect("inspect").remove(0);
    let shown: Vec<_> = state.holders.iter().map(|holder| (holder.token, holder.mode)).collect();
    let expected: Vec<_> = holders.iter().map(|claim| (Some(claim.token), permit(3))).collect();
    assert_eq!((shown, state.waiters), (expected, Some(1)));
    let released = other.release(&holders[1]).await.expect("release");
    assert!(matches!(released, Release::Released { waiters: Some(1) }), "{released:?}");
    let held = waiter.granted().await.claim;
    eventually("it is lost", async || match renew(&store, &holders[1]).await.expect("renew") {
        lockkit_core::Renewed::Held(_) => false,
        gone @ lockkit_core::Renewed::Lost(_) => {
            assert_eq!(lost(Ok(gone)), LossReason::Revoked);
            true
        }
    })
    .await;
    assert!(matches!(other.release(&claim_as(permit(3), "a")).await.expect("release"), Release::NotHeld(_)));
    for (store, claim) in [(&store, &holders[0]), (&store, &holders[2]), (&other, &held)] {
        free(store, claim).await;
    }
}
