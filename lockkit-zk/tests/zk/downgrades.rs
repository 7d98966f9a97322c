//! Writers that become readers.

use std::{pin::pin, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, Fence, FenceClock, Hold, LockStore, LossReason, Mode, Release,
    Renewal, Renewed,
};
use lockkit_testkit::faults::{Direction, Proxy, poll_until};
use lockkit_zk::{ZkConfig, ZkStore};

use crate::support::*;

/// A request of a reader for the place of a writer.
fn in_place_of(writer: &Claim) -> AcquireRequest {
    let reader = claim_as(Mode::Shared, writer.key.as_str());
    AcquireRequest { from: Some(writer.token), ..request(&reader, Duration::ZERO) }
}

/// Takes a lock as a writer and becomes a reader.
async fn downgraded(store: &ZkStore, name: &str) -> Hold {
    let writer = claim(name);
    hold(store, &writer).await;
    granted(store.acquire(&in_place_of(&writer)).await.expect("downgrade"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_reader_stands_where_the_writer_stood() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let writer = claim("a");
    let held = hold(&store, &writer).await;
    let beside = Waiter::queue(&other, &raw, claim_as(Mode::Shared, "a")).await;
    let next = Waiter::queue(&other, &raw, claim("a")).await;
    let late = Waiter::queue(&other, &raw, claim_as(Mode::Shared, "a")).await;
    let number = |node: &String| node.rsplit('-').next().map(str::to_owned);
    let before = children(&raw, "a").await.iter().filter_map(number).min();
    let asked = in_place_of(&writer);
    let reader = granted(store.acquire(&asked).await.expect("downgrade"));
    assert_eq!(reader.fence, held.fence.offset(1), "it is the next of those that the writer's node stands for");
    let first = children(&raw, "a").await.into_iter().min_by_key(number).expect("its node");
    assert!(first.contains("-read-lock-") && number(&first) == before, "{first}");
    let (data, stat) = raw.get_data(&format!("/lockkit/a/{first}")).await.expect("its node");
    assert_eq!(String::from_utf8_lossy(&data), format!("lockkit:1:1:{}:test: holder", reader.fence));
    assert!(stat.ephemeral_owner != 0, "it does not end with its session");
    let beside = beside.granted().await;
    assert!(beside.fence > reader.fence, "{} beside {}", beside.fence, reader.fence);
    next.waits().await;
    free(&store, &reader.claim).await;
    next.waits().await;
    free(&other, &beside.claim).await;
    let next = next.granted().await;
    assert!(next.fence > beside.fence, "{} after {}", next.fence, beside.fence);
    free(&other, &next.claim).await;
    let late = late.granted().await;
    free(&other, &late.claim).await;
    assert!(children(&raw, "a").await.is_empty());
}

/// A claim that waits keeps its node, which says for how many fences it asked at first. It is granted as many as it asked for at last.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_readers_fence_lies_above_all_that_were_granted() {
    let server = Server::start().await;
    let (store, other) = (server.store().await, server.store().await);
    let (theirs, writer) = (claim("a"), claim("a"));
    hold(&other, &theirs).await;
    let mut asked = request(&writer, Duration::from_millis(100));
    assert!(is_contended(&store.acquire(&asked).await.expect("acquire")));
    free(&other, &theirs).await;
    asked.fence.span = 5;
    let held = granted(store.acquire(&asked).await.expect("acquire"));
    let reader = granted(other.acquire(&in_place_of(&writer)).await.expect("downgrade"));
    let end = held.fence.offset(held.span);
    assert!(reader.fence >= end, "{} is one of the {} from {}", reader.fence, held.span, held.fence);
}

/// The transaction that makes the reader's node has a higher number than those of the nodes that wait.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fences_of_those_that_wait_lie_above_the_readers() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let mut highest = Fence::NONE;
    // A raise by 100 000 is less than the numbers of a thousand transactions. From 2^52 on they are counted, and no longer follow from transactions.
    for (floor, span, raise) in
        [(0, 1, 0), (0, 128, 0), (0, 5000, 7), (0, 1, 100_000), (1 << 52, 65, 0), (0, 128, 100_000), (0, 1, 7)]
    {
        for by in [&store, &other] {
            let writer = claim("a");
            let mut asked = request(&writer, Duration::ZERO);
            (asked.fence.floor, asked.fence.span) = (Fence::new(floor), span);
            let held = granted(store.acquire(&asked).await.expect("acquire"));
            assert!(held.fence > highest, "{} after {highest}", held.fence);
            let next = Waiter::queue(&other, &raw, claim("a")).await;
            let reader = granted(by.acquire(&in_place_of(&writer)).await.expect("downgrade"));
            let end = held.fence.offset(span);
            assert!(reader.fence >= end, "{} is one of the {span} from {}", reader.fence, held.fence);
            let floor = (raise > 0).then(|| Fence::new(reader.fence.get() + raise));
            let renewal = Renewal { fence_floor: floor, ..Renewal::new(reader.claim.clone(), TTL) };
            match by.renew(&[renewal]).await.remove(0).expect("renew") {
                Renewed::Held(hold) => assert_eq!(hold.fence, reader.fence),
                Renewed::Lost(reason) => panic!("{reason}"),
            }
            free(by, &reader.claim).await;
            let next = next.granted().await;
            assert!(next.fence > floor.unwrap_or(reader.fence), "{} after {} and {floor:?}", next.fence, reader.fence);
            highest = next.fence;
            free(&other, &next.claim).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_that_is_dropped_at_any_moment_leaves_nothing_behind() {
    let server = Server::start().await;
    let (other, raw) = (server.store().await, server.raw().await);
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let lag = Duration::from_millis(20);
    for release_reader_first in [true, false] {
        // Two read, one carries out, and the rest find out that the session lives.
        for step in 0..7 {
            let place = format!("dropped after {step} round trips");
            let writer = claim("a");
            hold(&store, &writer).await;
            let asked = in_place_of(&writer);
            proxy.delay(Direction::ToClient, lag);
            drop(tokio::time::timeout(lag / 2 + lag * step, store.acquire(&asked)).await);
            proxy.heal();
            assert!(is_contended(&attempt(&other, &claim("a")).await.expect("ask")), "{place}: a gap");
            let claims = if release_reader_first { [&asked.claim, &writer] } else { [&writer, &asked.claim] };
            for claim in claims {
                store.release(claim).await.unwrap_or_else(|e| panic!("{place}: {e}"));
            }
            assert!(children(&raw, "a").await.is_empty(), "{place}");
            assert!(is_contended(&store.acquire(&asked).await.expect("ask")), "{place}: what was ended came back");
            assert!(children(&raw, "a").await.is_empty(), "{place}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_downgrade_whose_reply_is_lost_is_done() {
    let server = Server::start().await;
    let (other, raw) = (server.store().await, server.raw().await);
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    for span in [1, 128] {
        let writer = claim("a");
        let mut first = request(&writer, Duration::ZERO);
        first.fence.span = span;
        let held = granted(insist("acquire", async || store.acquire(&first).await).await);
        let next = Waiter::queue(&other, &raw, claim("a")).await;
        let asked = in_place_of(&writer);
        proxy.drop_reply_after(format!("_c_{}-", &asked.claim.token.reveal()[..8]), 1);
        let error = store.acquire(&asked).await.expect_err("the answer was lost");
        assert_eq!(error.effect(), Effect::Unknown, "{error}");
        proxy.dropped().await;
        next.waits().await;
        let reader = granted(insist("downgrade", async || store.acquire(&asked).await).await);
        assert_eq!(reader.fence, held.fence.offset(span));
        assert!(matches!(renew(&store, &reader.claim).await.expect("renew"), Renewed::Held(_)));
        assert_eq!(lost(renew(&store, &writer).await), LossReason::Taken);
        // Its fences can be raised, though nobody knows any more which transaction the place is from.
        let raised = Fence::new(reader.fence.get() + 5_000_000);
        let renewal = Renewal { fence_floor: Some(raised), ..Renewal::new(reader.claim.clone(), TTL) };
        assert!(matches!(store.renew(&[renewal]).await.remove(0).expect("renew"), Renewed::Held(_)));
        free(&store, &reader.claim).await;
        let next = next.granted().await;
        assert!(next.fence > raised, "{} after {raised}", next.fence);
        free(&other, &next.claim).await;
    }
}

/// What the reader has it has in the session that asked, whosever the writer's was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_reader_ends_with_its_session() {
    let server = Server::start().await;
    let other = server.store().await;
    let (store, proxy) = server.proxied(Duration::from_secs(4)).await;
    let writer = claim("a");
    hold(&other, &writer).await;
    let reader = granted(store.acquire(&in_place_of(&writer)).await.expect("downgrade"));
    assert_eq!(other.release(&writer).await.expect("release"), Release::NotHeld(LossReason::Taken));
    assert!(is_contended(&attempt(&other, &claim("a")).await.expect("ask")));
    proxy.blackhole();
    let next = claim("a");
    let waited = other.acquire(&request(&next, Duration::from_secs(30))).await;
    assert!(granted(waited.expect("acquire")).fence > reader.fence);
    proxy.heal();
    let renewed = insist("renew", async || renew(&store, &reader.claim).await).await;
    assert_eq!(lost(Ok(renewed)), LossReason::SessionEnded);
}

/// The numbers of its nodes have gaps then, so that nobody is overlooked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_list_of_the_queue_is_not_spared_after_a_downgrade() {
    let server = Server::start().await;
    let (store, other) = (server.store().await, server.store().await);
    for _ in 0..5 {
        for _ in 0..6 {
            let mine = claim("a");
            hold(&store, &mine).await;
            free(&store, &mine).await;
        }
        let reader = downgraded(&store, "a").await;
        assert!(is_contended(&attempt(&store, &claim("a")).await.expect("ask")), "the reader was overlooked");
        let beside = claim_as(Mode::Shared, "a");
        hold(&other, &beside).await;
        free(&store, &reader.claim).await;
        assert!(is_contended(&attempt(&store, &claim("a")).await.expect("ask")), "a reader was overlooked");
        free(&other, &beside).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_not_become_a_reader_is_refused() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    for from in [claim("a"), claim_as(Mode::Shared, "b")] {
        if from.mode == Mode::Shared {
            hold(&store, &from).await;
        }
        let asked = in_place_of(&from);
        let Attempt::Contended(contention) = store.acquire(&asked).await.expect("ask") else { panic!("granted") };
        assert_eq!(contention.holder.is_some(), from.mode == Mode::Shared);
        assert!(children(&raw, from.key.as_str()).await.len() <= 1, "a node was left");
        let unknown = store.release(&asked.claim).await.expect("release");
        assert!(matches!(unknown, Release::NotHeld(_)), "{unknown:?}");
        let renewed = renew(&store, &from).await.expect("renew");
        assert_eq!(matches!(renewed, Renewed::Held(_)), from.mode == Mode::Shared, "it is as it was: {renewed:?}");
    }
    let writer = claim("c");
    hold(&store, &writer).await;
    let mut asked = in_place_of(&writer);
    asked.fence.clock = FenceClock::Floor;
    let error = store.acquire(&asked).await.expect_err("no such fences");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unsupported, Effect::None));
    let permit = AcquireRequest { claim: claim_as(permit(2), "c"), ..in_place_of(&writer) };
    assert_eq!(store.acquire(&permit).await.expect_err("refused").kind(), ErrorKind::Unsupported);
    assert!(matches!(renew(&store, &writer).await.expect("renew"), Renewed::Held(_)), "it is as it was");
    free(&store, &writer).await;
}

/// Another session asks, and has read the queue, or the holder's node, by then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_takes_the_place_of_a_lease_has_a_fence_above_what_that_raises_meanwhile() {
    const PATIENCE: Duration = Duration::from_secs(40);
    let server = Server::start().await;
    let (store, proxy) = (server.store().await, Proxy::start(server.0.addr()).await.expect("proxy"));
    let config = ZkConfig::new([proxy.addr().to_string()]).session(PATIENCE).timeout(PATIENCE / 4);
    let other = connect(config).await;
    for name in ["kept-1", "kept-2", "read-1", "read-2"] {
        let holder = claim(name);
        let held = hold(&store, &holder).await;
        let asked = if name.starts_with("kept") { keeping(&holder, PATIENCE) } else { in_place_of(&holder) };
        let asked = AcquireRequest { ttl: PATIENCE, ..asked };
        let (seen, go_on) =
            pause_at(&proxy, if name.ends_with('1') { node_of(&holder) } else { "lockkit:1:1:".to_owned() });
        let raised = held.fence.offset(1_000_000);
        let (next, ()) = tokio::join!(other.acquire(&asked), async {
            seen.notified().await;
            let renewal = [Renewal { fence_floor: Some(raised), ..Renewal::new(holder.clone(), TTL) }];
            let renewed = store.renew(&renewal).await.remove(0).expect("renew");
            assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}");
            go_on.send(()).expect("it is waited for");
        });
        let next = granted(next.expect("in place"));
        assert!(next.fence > raised, "{name}: {} is not above {raised}", next.fence);
    }
}

/// Another task of the same store asks, and has come so far by then, for each of its awaits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_takes_the_place_of_a_lease_of_its_own_store_has_a_fence_above_what_that_raises_meanwhile() {
    const PATIENCE: Duration = Duration::from_secs(40);
    let server = Server::start().await;
    let store = connect(server.config().timeout(PATIENCE / 4)).await;
    for kind in ["kept", "read"] {
        let (mut raises, mut is_over) = (0, false);
        for polls in 1..=50 {
            let holder = claim(&format!("{kind}-{polls}"));
            let held = hold(&store, &holder).await;
            let asked = if kind == "kept" { keeping(&holder, PATIENCE) } else { in_place_of(&holder) };
            let asked = AcquireRequest { ttl: PATIENCE, ..asked };
            let mut asking = pin!(store.acquire(&asked));
            let early = poll_until(asking.as_mut(), polls, || {}).await;
            is_over = early.is_some();
            let raised = held.fence.offset(1_000_000);
            let renewal = [Renewal { fence_floor: Some(raised), ..Renewal::new(holder.clone(), TTL) }];
            let renewed = store.renew(&renewal).await.remove(0);
            let renewed = renewed.unwrap_or_else(|e| panic!("{kind}, asked by poll {polls}: {e}"));
            let next = match early {
                Some(answer) => answer,
                None => asking.await,
            };
            let next = granted(next.expect("in place"));
            match renewed {
                Renewed::Held(_) => {
                    raises += 1;
                    assert!(next.fence > raised, "{kind}, poll {polls}: {} is not above {raised}", next.fence);
                }
                Renewed::Lost(reason) => assert_eq!(reason, LossReason::Taken, "{kind}, poll {polls}"),
            }
            if is_over {
                break;
            }
        }
        assert!(is_over && raises >= 2, "{kind}: {raises} raises, and it comes to an end: {is_over}");
    }
}

/// Of two renewals at once, one that knows nothing of the other's floor may be the last to write the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_says_no_fence_any_more_hides_no_raise() {
    let (server, mut is_over) = (Server::start().await, false);
    let (store, raw) = (server.store().await, server.raw().await);
    for polls in 1..=50 {
        let name = format!("a-{polls}");
        let (holder, patience) = (claim(&name), Duration::from_secs(40));
        let held = hold(&store, &holder).await;
        let node = children(&raw, &name).await.into_iter().find(|node| !node.starts_with('~')).expect("its node");
        let node = format!("/lockkit/{name}/{node}");
        let (as_granted, _) = raw.get_data(&node).await.expect("the node");
        let asked = AcquireRequest { ttl: patience, ..in_place_of(&holder) };
        let mut asking = pin!(store.acquire(&asked));
        let early = poll_until(asking.as_mut(), polls, || {}).await;
        is_over = early.is_some();
        let raised = held.fence.offset(1_000_000);
        let renewal = [Renewal { fence_floor: Some(raised), ..Renewal::new(holder.clone(), TTL) }];
        let renewed = store.renew(&renewal).await.remove(0).expect("renew");
        let is_written = raw.set_data(&node, &as_granted, None).await.is_ok();
        let next = match early {
            Some(answer) => answer,
            None => asking.await,
        };
        let next = granted(next.expect("in place"));
        if matches!(renewed, Renewed::Held(_)) && is_written {
            assert!(next.fence > raised, "poll {polls}: {} is not above {raised}", next.fence);
        }
        if is_over {
            break;
        }
    }
    assert!(is_over);
}

/// Its transaction never arrives, and the store does not know that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_whose_place_nobody_took_raises_its_fences() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let holder = claim("a");
    let held = hold(&store, &holder).await;
    let (seen, go_on) = pause_at(&proxy, "lockkit:1:1:".to_owned());
    let asked = in_place_of(&holder);
    let (answer, ()) = tokio::join!(store.acquire(&asked), async {
        seen.notified().await;
        proxy.hold(Direction::ToServer);
        go_on.send(()).expect("it is waited for");
    });
    assert_eq!(answer.expect_err("it has not arrived").effect(), Effect::Unknown);
    // All that is held is lost with the connection.
    proxy.cut().await;
    proxy.heal();
    let raised = held.fence.offset(1_000_000);
    let renewal = [Renewal { fence_floor: Some(raised), ..Renewal::new(holder.clone(), TTL) }];
    let renewed = insist("raise", async || store.renew(&renewal).await.remove(0)).await;
    assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}");
    free(&store, &holder).await;
    let next = claim("a");
    assert!(hold(&store, &next).await.fence > raised);
}
