//! Readers beside each other, in the one queue with all others.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    Effect, ErrorKind, Fence, FenceClock, FenceRequest, LockStore, LossReason, Mode, Query, Release, Renewal, Renewed,
};
use tokio::{sync::Barrier, task::JoinSet};

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_are_served_in_the_order_in_which_they_came() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let first = claim("a");
    let mut last = hold(&store, &first).await.fence;
    let early = [
        Waiter::queue(&store, &raw, claim_as(Mode::Shared, "a")).await,
        Waiter::queue(&other, &raw, claim_as(Mode::Shared, "a")).await,
        Waiter::queue(&store, &raw, claim_as(Mode::Shared, "a")).await,
    ];
    let writer = Waiter::queue(&other, &raw, claim("a")).await;
    let late = Waiter::queue(&store, &raw, claim_as(Mode::Shared, "a")).await;
    early[0].waits().await;
    free(&store, &first).await;
    let mut readers = Vec::new();
    for reader in early {
        let held = reader.granted().await;
        assert!(held.fence > last, "{} after {last}", held.fence);
        last = held.fence;
        readers.push(held.claim);
    }
    for (reader, store) in readers.iter().zip([&store, &other, &store]) {
        assert!(!is_contended(&attempt(store, reader).await.expect("ask")), "its lease is its own (R1)");
        late.waits().await;
        writer.waits().await;
        free(store, reader).await;
    }
    let held = writer.granted().await;
    assert!(held.fence > last, "{} after {last}", held.fence);
    late.waits().await;
    free(&other, &held.claim).await;
    let late = late.granted().await;
    assert!(late.fence > held.fence);
    free(&store, &late.claim).await;
    assert!(children(&raw, "a").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_at_the_front_enter_together() {
    const READERS: usize = 20;
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let writer = claim("a");
    hold(&store, &writer).await;
    let (all, mut tasks) = (Arc::new(Barrier::new(READERS)), JoinSet::new());
    for number in 0..READERS {
        let (store, all) = (Arc::clone(if number % 2 == 0 { &store } else { &other }), Arc::clone(&all));
        tasks.spawn(async move {
            let reader = claim_as(Mode::Shared, "a");
            granted(store.acquire(&request(&reader, Duration::from_secs(20))).await.expect("acquire"));
            // Nobody leaves before all are there.
            all.wait().await;
            free(&store, &reader).await;
        });
    }
    eventually("all queue", async || children(&raw, "a").await.len() == READERS + 1).await;
    free(&store, &writer).await;
    let together = async { while tasks.join_next().await.transpose().expect("no panic").is_some() {} };
    tokio::time::timeout(Duration::from_secs(10), together).await.expect("they do not hold together");
    assert!(children(&raw, "a").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_passes_nobody_and_leaves_nothing_behind() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let reader = claim_as(Mode::Shared, "a");
    hold(&store, &reader).await;
    let writer = Waiter::queue(&other, &raw, claim("a")).await;
    for mode in [Mode::Shared, permit(2), Mode::Exclusive] {
        assert!(is_contended(&attempt(&store, &claim_as(mode, "a")).await.expect("ask")), "{mode} passed a writer");
    }
    assert_eq!(children(&raw, "a").await.len(), 2);
    free(&store, &reader).await;
    free(&other, &writer.granted().await.claim).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_place_of_a_reader_whose_session_ended_is_free() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    let (dead, proxy) = server.proxied(Duration::from_secs(2)).await;
    let (reader, lost_reader) = (claim_as(Mode::Shared, "a"), claim_as(Mode::Shared, "a"));
    hold(&dead, &lost_reader).await;
    hold(&store, &reader).await;
    let writer = Waiter::queue(&store, &raw, claim("a")).await;
    let dead_waiter = Waiter::queue(&dead, &raw, claim_as(Mode::Shared, "a")).await;
    let late = Waiter::queue(&store, &raw, claim_as(Mode::Shared, "a")).await;
    proxy.blackhole();
    free(&store, &reader).await;
    writer.waits().await;
    let held = writer.granted().await;
    drop(dead_waiter);
    free(&store, &held.claim).await;
    free(&store, &late.granted().await.claim).await;
    let reason = lost(Ok(insist("renew", async || renew(&dead, &lost_reader).await).await));
    assert_eq!(reason, LossReason::SessionEnded);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_reader_leaves_no_node() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let writer = claim("a");
    hold(&store, &writer).await;
    let waiting = locker(&other);
    for round in 0..100_u64 {
        let reader = waiting.rw_lock("a").read();
        drop(tokio::time::timeout(Duration::from_micros(round * 40), reader.acquire()).await);
    }
    waiting.shutdown(Duration::from_secs(10)).await.expect("drained");
    assert_eq!(children(&raw, "a").await.len(), 1, "only the holder's node is left");
    free(&store, &writer).await;
}

/// Those of one session watch the same node, and the driver sets its watches anew on another connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reconnection_costs_no_reader_its_place() {
    let server = Server::start().await;
    let (other, raw) = (server.store().await, server.raw().await);
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let (writer, held) = (claim("a"), claim_as(Mode::Shared, "b"));
    hold(&other, &writer).await;
    hold(&store, &held).await;
    let mut waiters = Vec::new();
    for _ in 0..3 {
        waiters.push(Waiter::queue(&store, &raw, claim_as(Mode::Shared, "a")).await);
    }
    waiters[0].waits().await;
    proxy.cut().await;
    assert!(matches!(insist("renew", async || renew(&store, &held).await).await, Renewed::Held(_)));
    free(&other, &writer).await;
    for waiter in waiters {
        free(&store, &waiter.granted().await.claim).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_holders_are_shown_and_each_can_be_broken() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let locker = locker(&store);
    let (one, two) = (locker.rw_lock("a").read(), locker.rw_lock("a").read());
    let guards = [one.acquire().await.expect("acquire"), two.acquire().await.expect("acquire")];
    let third = claim_as(Mode::Shared, "a");
    hold(&other, &third).await;
    let writer = Waiter::queue(&other, &raw, claim("a")).await;
    let late = Waiter::queue(&other, &raw, claim_as(Mode::Shared, "a")).await;

    let states = other.inspect(&Query::Prefix(String::new())).await.expect("inspect");
    let [state] = &states[..] else { panic!("{states:?}") };
    assert_eq!((state.holders.len(), state.waiters), (3, Some(2)), "{state:?}");
    assert!(state.holders.iter().all(|holder| holder.mode == Mode::Shared && holder.token.is_some()), "{state:?}");
    assert_eq!(
        state.holders[..2].iter().map(|holder| holder.fence).collect::<Vec<_>>(),
        guards.each_ref().map(|guard| Some(guard.fence()))
    );

    for guard in &guards {
        // Only from then on it watches its node.
        guard.renew().await.expect("renew");
    }
    let breaker = crate::support::locker(&server.store().await);
    for holder in &state.holders[..2] {
        let released = breaker.break_lock("a", holder.token.expect("shown")).await.expect("break");
        assert!(matches!(released, Release::Released { waiters: Some(2) }), "{released:?}");
    }
    for guard in &guards {
        let reason = tokio::time::timeout(Duration::from_secs(5), guard.lost()).await.expect("at once");
        assert_eq!(reason, LossReason::Revoked);
    }
    assert!(matches!(renew(&other, &third).await.expect("renew"), Renewed::Held(_)));
    free(&other, &third).await;
    free(&other, &writer.granted().await.claim).await;
    free(&other, &late.granted().await.claim).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_whose_node_is_deleted_has_lost_its_lease() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    let (mine, beside) = (claim_as(Mode::Shared, "a"), claim_as(Mode::Shared, "a"));
    hold(&store, &mine).await;
    let own = children(&raw, "a").await;
    hold(&store, &beside).await;
    assert!(matches!(renew(&store, &mine).await.expect("renew"), Renewed::Held(_)));
    raw.delete(&format!("/lockkit/a/{}", own[0]), None).await.expect("delete");
    eventually("it is lost", async || !matches!(renew(&store, &mine).await, Ok(Renewed::Held(_)))).await;
    assert!(matches!(renew(&store, &beside).await.expect("renew"), Renewed::Held(_)));
    assert!(matches!(store.release(&mine).await.expect("release"), Release::NotHeld(_)));
    free(&store, &beside).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_floor_that_one_of_them_has_lifts_those_to_come() {
    let server = Server::start().await;
    let (store, other) = (server.store().await, server.store().await);
    let (plain, lifting, late, writer) =
        (claim_as(Mode::Shared, "a"), claim_as(Mode::Shared, "a"), claim_as(Mode::Shared, "a"), claim("a"));
    let low = hold(&store, &plain).await;
    let mut floored = request(&lifting, Duration::ZERO);
    floored.fence = FenceRequest { floor: Fence::new(1 << 50), ..FenceRequest::default() };
    let high = granted(other.acquire(&floored).await.expect("acquire"));
    assert!(high.fence.get() > 1 << 50);
    let above = hold(&store, &late).await;
    assert!(above.fence > high.fence);
    let shown = store.inspect(&Query::Keys(vec![plain.key.clone()])).await.expect("inspect").remove(0);
    let fences: Vec<_> = shown.holders.iter().map(|holder| holder.fence).collect();
    assert_eq!(fences, [low.fence, high.fence, above.fence].map(Some), "another's floor is no part of one's fence");

    let lift = |claim: &lockkit_core::Claim| Renewal {
        fence_floor: Some(Fence::new(1 << 55)),
        ..Renewal::new(claim.clone(), TTL)
    };
    let renewed = store.renew(&[lift(&plain)]).await.remove(0).expect("renew");
    assert!(matches!(&renewed, Renewed::Held(hold) if hold.fence == low.fence), "{renewed:?}");
    for (store, claim) in [(&store, &plain), (&other, &lifting), (&store, &late)] {
        free(store, claim).await;
    }
    assert!(hold(&other, &writer).await.fence.get() > 1 << 55);
    free(&other, &writer).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_floors_at_once_are_all_kept() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    let writer = claim("a");
    hold(&store, &writer).await;
    let mut tasks = JoinSet::new();
    for number in 0..12_u64 {
        let store = Arc::clone(&store);
        tasks.spawn(async move {
            let reader = claim_as(permit(12), "a");
            let floor = Fence::new((1 << 50) + number % 3 * (1 << 45));
            let mut asked = request(&reader, Duration::from_secs(20));
            asked.fence = FenceRequest { floor, ..FenceRequest::default() };
            let held = granted(store.acquire(&asked).await.expect("acquire"));
            assert!(held.fence > floor);
            (held.fence, reader)
        });
    }
    eventually("all queue", async || children(&raw, "a").await.len() == 13).await;
    free(&store, &writer).await;
    let mut held = tasks.join_all().await;
    held.sort_by_key(|(fence, _)| *fence);
    assert!(held.windows(2).all(|two| two[0].0 < two[1].0), "a fence came twice: {held:?}");
    for (_, reader) in &held {
        free(&store, reader).await;
    }
    let next = claim("a");
    assert!(hold(&store, &next).await.fence > held[11].0);
    free(&store, &next).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fences_without_the_stores_clock_are_for_exclusive_locks() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    for mode in [Mode::Shared, permit(2)] {
        let mut asked = request(&claim_as(mode, "a"), Duration::ZERO);
        asked.fence.clock = FenceClock::Floor;
        let error = store.acquire(&asked).await.expect_err("others may hold");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unsupported, Effect::None));
    }
    assert!(children(&raw, "a").await.is_empty());
}
