//! Leases that one client lets go of, and another takes up.

use std::{pin::pin, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, Fence, LockStore, LossReason, Mode, Outcome, Release, Renewal,
    Renewed,
};
use lockkit_testkit::faults::{Direction, Proxy, poll_until};
use lockkit_zk::{ZkConfig, ZkStore};
use tokio::time::{Instant, sleep, timeout};
use zookeeper_client::Client;

use crate::support::*;

/// A request of another client for the place of a lease.
fn in_place_of(giver: &Claim) -> AcquireRequest {
    AcquireRequest { from: Some(giver.token), ..request(&claim(giver.key.as_str()), Duration::ZERO) }
}

/// Raises the fences of a lock that is held.
async fn raise_above(store: &ZkStore, held: &Claim, floor: Fence) {
    let raise = [Renewal { fence_floor: Some(floor), ..Renewal::new(held.clone(), TTL) }];
    let renewed = store.renew(&raise).await.remove(0).expect("renew");
    assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}");
}

/// Has the servers carry out so many transactions, which number those that follow.
async fn transactions(raw: &Client, count: u32) {
    for _ in 0..count {
        raw.set_data("/lockkit", b"", None).await.expect("a transaction");
    }
}

async fn is_held(store: &ZkStore, claim: &Claim) -> bool {
    matches!(renew(store, claim).await.expect("renew"), Renewed::Held(_))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_takes_a_lease_up_stands_where_it_stood() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let giver = claim("a");
    let held = hold(&store, &giver).await;
    let next = Waiter::queue(&store, &raw, claim("a")).await;
    let number = |node: &String| node.rsplit('-').next().map(str::to_owned);
    let before = children(&raw, "a").await.into_iter().min_by_key(number).expect("its node");
    let owner = async |node: &str| {
        let stat = raw.check_stat(&format!("/lockkit/a/{node}")).await.expect("stat");
        stat.expect("a node").ephemeral_owner
    };
    let owned = owner(&before).await;
    let asked = in_place_of(&giver);
    let hold = granted(other.acquire(&asked).await.expect("take up"));
    assert_eq!(hold.fence, held.fence.offset(1), "it is the next of those that the giver's node stands for");
    let first = children(&raw, "a").await.into_iter().min_by_key(number).expect("its node");
    assert!(first.starts_with(&node_of(&hold.claim)) && number(&first) == number(&before), "{first} after {before}");
    let now = owner(&first).await;
    assert!(now != 0 && now != owned, "it does not end with the session that has it");
    next.waits().await;
    // Whatever the giver still does is about a node that is gone.
    assert_eq!(lost(renew(&store, &giver).await), LossReason::Taken);
    assert_eq!(store.release(&giver).await.expect("release"), Release::NotHeld(LossReason::Taken));
    assert!(is_contended(&other.acquire(&in_place_of(&giver)).await.expect("ask")), "it was taken up twice");
    assert!(is_held(&other, &hold.claim).await);
    next.waits().await;
    free(&other, &hold.claim).await;
    let next = next.granted().await;
    assert!(next.fence > hold.fence, "{} after {}", next.fence, hold.fence);
    free(&store, &next.claim).await;
    assert!(children(&raw, "a").await.is_empty());
}

/// Each transaction has a higher number than those of the nodes that wait from the beginning, and each holder may raise the fences.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn however_often_it_is_taken_up_those_that_wait_have_higher_fences() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    for (floor, raise) in [(0, 0), (0, 40), (0, 1000), (1 << 52, 0), (1 << 53, 40), (1 << 53, 1000)] {
        for last in ["taken up", "a reader", "kept"] {
            let place = format!("{last} after {floor} and {raise}");
            let (giver, next) = (claim("a"), claim("a"));
            let mut asked = request(&giver, Duration::ZERO);
            asked.fence.floor = Fence::new(floor);
            let mut held = granted(store.acquire(&asked).await.expect("acquire"));
            let next = Waiter::queue(&store, &raw, next).await;
            let mut highest = held.fence.offset(u32::try_from(raise).expect("small"));
            if raise > 0 {
                raise_above(&store, &held.claim, highest).await;
            }
            for step in 0..4 {
                // Others use the servers meanwhile.
                transactions(&raw, 20).await;
                let (by, before) = if step % 2 == 0 { (&other, &store) } else { (&store, &other) };
                let mut asked = match (step, last) {
                    (3, "a reader") => {
                        let claim = claim_as(Mode::Shared, "a");
                        AcquireRequest { claim, ..in_place_of(&held.claim) }
                    }
                    (3, "kept") => keeping(&held.claim, Duration::from_secs(60)),
                    _ => in_place_of(&held.claim),
                };
                asked.fence.span = 65;
                let hold = granted(by.acquire(&asked).await.unwrap_or_else(|e| panic!("{place}: {e}")));
                assert!(hold.fence > highest, "{place}: {} after {highest} at {step}", hold.fence);
                assert_eq!(lost(renew(before, &held.claim).await), LossReason::Taken, "{place}");
                (held, highest) = (hold.clone(), hold.fence.offset(64));
                if raise > 0 && step < 3 {
                    highest = Fence::new(highest.get() + raise);
                    raise_above(by, &hold.claim, highest).await;
                }
            }
            next.waits().await;
            free(&store, &held.claim).await;
            let next = next.granted().await;
            assert!(next.fence > highest, "{place}: {} after {highest}", next.fence);
            free(&store, &next.claim).await;
        }
    }
}

/// Others write into a node that has taken the place of another, behind which one waits with a number that is lower than its own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_others_write_into_a_node_lets_no_fence_go_back() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let giver = claim("a");
    let held = hold(&store, &giver).await;
    let next = Waiter::queue(&store, &raw, claim("a")).await;
    transactions(&raw, 20).await;
    let second = granted(other.acquire(&in_place_of(&giver)).await.expect("acquire"));
    let nodes = children(&raw, "a").await;
    let node = nodes.iter().find(|node| node.contains(&node_of(&second.claim))).expect("its node");
    raw.set_data(&format!("/lockkit/a/{node}"), b"zkCli", None).await.expect("write");
    let third = granted(store.acquire(&in_place_of(&second.claim)).await.expect("acquire"));
    assert!(held.fence < second.fence && second.fence < third.fence, "{held:?} {second:?} {third:?}");
    free(&store, &third.claim).await;
    let next = next.granted().await;
    assert!(next.fence > third.fence, "{} after {}", next.fence, third.fence);
}

/// The servers tell a watch of one thing alone, and that is the write before the end of the node.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_hears_at_once_that_its_lease_is_taken_up() {
    let server = Server::start().await;
    let store = server.store().await;
    for by in [store.clone(), server.store().await] {
        let (holder, taker) = (locker(&store), locker(&by));
        let guard = holder.lock("a").ttl(Duration::from_secs(20)).acquire().await.expect("acquire");
        // Its node is watched from then on.
        guard.renew().await.expect("renew");
        let taken = taker.lock("a").resume(guard.token()).await.expect("resume").expect("it is held");
        let reason = timeout(Duration::from_secs(3), guard.lost()).await.expect("it is told only when it renews");
        assert_eq!(reason, LossReason::Taken);
        assert!(taken.is_held());
        assert_eq!(taken.release().await.expect("release"), Outcome::Released);
    }
}

/// By a task of its own process that is dropped while the answer is on its way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_hears_at_once_of_what_took_its_lease_up_and_was_dropped() {
    let server = Server::start().await;
    let (raw, proxy) = (server.raw().await, Proxy::start(server.0.addr()).await.expect("proxy"));
    let store = connect(ZkConfig::new([proxy.addr().to_string()])).await;
    let (holder, taker) = (locker(&store), locker(&store));
    let guard = holder.lock("a").ttl(Duration::from_secs(20)).acquire().await.expect("acquire");
    // Its node is watched from then on.
    guard.renew().await.expect("renew");
    let (before, lock) = (children(&raw, "a").await, taker.lock("a"));
    // The reads behind which the transaction is sent are answered, late enough for the replies to be held back from then on.
    proxy.delay(Direction::ToClient, Duration::from_millis(500));
    let has_place = async {
        eventually("it has the place", async || children(&raw, "a").await != before).await;
    };
    tokio::select! {
        biased;
        () = has_place => {}
        taken = lock.resume(guard.token()) => panic!("it was answered: {taken:?}"),
    }
    proxy.heal();
    let reason = timeout(Duration::from_secs(3), guard.lost()).await.expect("it is told only when it renews");
    assert!(matches!(reason, LossReason::Taken | LossReason::Gone), "{reason}");
    eventually("nobody wants it", async || children(&raw, "a").await.is_empty()).await;
}

/// Each hand-over has the next of the fences that the first node stands for, so that nothing is left of a name that is used once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_taken_up_a_few_times_leaves_no_record() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    let mut held = hold(&store, &claim("a")).await;
    for _ in 0..6 {
        transactions(&raw, 1).await;
        let next = granted(store.acquire(&in_place_of(&held.claim)).await.expect("take up"));
        assert_eq!(next.fence, held.fence.offset(1));
        held = next;
    }
    assert_eq!(children(&raw, "a").await.len(), 1, "there is a record");
    free(&store, &held.claim).await;
}

/// One that asks to take it up, and is dropped before it has sent anything that could end it, leaves it as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_question_leaves_the_lease_of_its_own_process_alone() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    let giver = claim("a");
    let held = hold(&store, &giver).await;
    let asked = in_place_of(&giver);
    for polls in 1..=2 {
        assert!(poll_until(pin!(store.acquire(&asked)), polls, || {}).await.is_none());
    }
    raise_above(&store, &giver, held.fence.offset(1000)).await;
    let [node] = &*children(&raw, "a").await.into_iter().filter(|node| node.contains("lock")).collect::<Vec<_>>()
    else {
        panic!("one node")
    };
    raw.delete(&format!("/lockkit/a/{node}"), None).await.expect("it is ended without a word");
    assert_eq!(store.release(&giver).await.expect("release"), Release::NotHeld(LossReason::Gone));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_whose_reply_is_lost_is_taken_up_by_its_claim_alone() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let (receiver, proxy) = server.proxied(Duration::from_secs(20)).await;
    let giver = claim("a");
    let held = hold(&store, &giver).await;
    let next = Waiter::queue(&other, &raw, claim("a")).await;
    let asked = in_place_of(&giver);
    proxy.drop_reply_after(node_of(&asked.claim), 1);
    let error = receiver.acquire(&asked).await.expect_err("the answer was lost");
    assert_eq!(error.effect(), Effect::Unknown, "{error}");
    proxy.dropped().await;
    for (by, asked) in [(&store, &giver), (&other, &giver)] {
        assert!(is_contended(&by.acquire(&in_place_of(asked)).await.expect("ask")), "it was taken up twice");
    }
    next.waits().await;
    let hold = granted(insist("take up", async || receiver.acquire(&asked).await).await);
    assert_eq!(hold.fence, held.fence.offset(1));
    assert!(is_held(&receiver, &hold.claim).await);
    free(&receiver, &hold.claim).await;
    free(&other, &next.granted().await.claim).await;
    assert!(children(&raw, "a").await.is_empty());
}

/// The next question, whose node it is, is answered with an error that says of itself that it had no effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_that_was_taken_up_is_not_said_to_be_as_it_was() {
    const NO_AUTH: i32 = -102;
    let server = Server::start().await;
    let (raw, (store, proxy)) = (server.raw().await, server.proxied(Duration::from_secs(20)).await);
    let giver = claim("a");
    let held = hold(&store, &giver).await;
    let asked = in_place_of(&giver);
    let (node, mut is_done, mut is_spoilt) = (node_of(&asked.claim), false, false);
    proxy.rewrite_replies(move |mut replies| {
        let mut rest = &mut replies[..];
        while let Some(length) = rest.first_chunk() {
            let length = usize::try_from(u32::from_be_bytes(*length)).expect("a length");
            let Some((reply, after)) = rest.split_at_mut_checked(4 + length) else { break };
            // Its length, the number of its request, that of the last transaction, and the error. Events have negative numbers.
            if is_done && !is_spoilt && reply[4] == 0 {
                reply[16..20].copy_from_slice(&NO_AUTH.to_be_bytes());
                is_spoilt = true;
            }
            is_done |= reply.windows(node.len()).any(|part| part == node.as_bytes());
            rest = after;
        }
        replies
    });
    let error = store.acquire(&asked).await.expect_err("the answer was spoilt");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::Unknown), "{error}");
    assert_eq!(lost(renew(&store, &giver).await), LossReason::Taken);
    let taken = granted(store.acquire(&asked).await.expect("ask again"));
    assert_eq!(taken.fence, held.fence.offset(1));
    free(&store, &taken.claim).await;
    assert!(children(&raw, "a").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_question_that_is_dropped_at_any_moment_leaves_the_lease_to_one() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let (receiver, proxy) = server.proxied(Duration::from_secs(20)).await;
    let lag = Duration::from_millis(20);
    // Two read, one carries out, and the rest find out that the session lives.
    for step in 0..7 {
        let place = format!("dropped after {step} round trips");
        let giver = claim("a");
        hold(&store, &giver).await;
        let (asked, again) = (in_place_of(&giver), in_place_of(&giver));
        proxy.delay(Direction::ToClient, lag);
        drop(timeout(lag / 2 + lag * step, receiver.acquire(&asked)).await);
        proxy.heal();
        assert!(is_contended(&attempt(&other, &claim("a")).await.expect("ask")), "{place}: a gap");
        receiver.release(&asked.claim).await.unwrap_or_else(|e| panic!("{place}: {e}"));
        // Either it came to nothing, and another may have the lease, or it is over.
        let taken = other.acquire(&again).await.expect("ask");
        assert_eq!(children(&raw, "a").await.len(), usize::from(!is_contended(&taken)), "{place}");
        assert_eq!(lost(renew(&store, &giver).await) == LossReason::Taken, !is_contended(&taken), "{place}");
        assert!(matches!(store.release(&giver).await, Ok(Release::NotHeld(_))), "{place}");
        if let Attempt::Granted(hold) = taken {
            free(&other, &hold.claim).await;
        }
        assert!(is_contended(&receiver.acquire(&asked).await.expect("ask")), "{place}: what was ended came back");
        assert!(children(&raw, "a").await.is_empty(), "{place}");
    }
}

/// The end of the giver's session is the end of what it has let go of, and of nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_taken_up_outlives_the_session_of_its_giver_and_what_was_not_ends_with_it() {
    let server = Server::start().await;
    let (other, raw) = (server.store().await, server.raw().await);
    let (store, proxy) = server.proxied(Duration::from_secs(4)).await;
    let (giver, unused) = (claim("a"), claim("b"));
    for lease in [&giver, &unused] {
        hold(&store, lease).await;
    }
    let waiting = Waiter::queue(&other, &raw, claim("a")).await;
    let behind = Waiter::queue(&other, &raw, claim("b")).await;
    proxy.blackhole();
    let hold = granted(other.acquire(&in_place_of(&giver)).await.expect("take up"));
    // Whoever waits for the other lock is told of the end of the session.
    let behind = timeout(Duration::from_secs(20), behind.granted()).await.expect("its session ends");
    assert!(is_contended(&other.acquire(&in_place_of(&unused)).await.expect("ask")), "taken up after its end");
    waiting.waits().await;
    assert!(is_held(&other, &hold.claim).await);
    proxy.heal();
    // The giver's store has another session by now, and undoes what it had.
    for lease in [&giver, &unused] {
        let release = insist("release", async || store.release(lease).await).await;
        assert!(matches!(release, Release::NotHeld(_)), "{release:?}");
    }
    waiting.waits().await;
    assert!(is_held(&other, &hold.claim).await && is_held(&other, &behind.claim).await);
    free(&other, &hold.claim).await;
    free(&other, &waiting.granted().await.claim).await;
}

/// Requests of the giver are on their way to the servers while another takes the lease up, and arrive afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_giver_sends_late_concerns_nobody_else() {
    let server = Server::start().await;
    let (other, raw) = (server.store().await, server.raw().await);
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    for late in ["renewal", "raise", "release"] {
        let giver = claim("a");
        let held = hold(&store, &giver).await;
        let raised = held.fence.offset(1_000_000);
        let renewal = match late {
            "renewal" => Renewal { depth: 2, ..Renewal::new(giver.clone(), TTL) },
            _ => Renewal { fence_floor: Some(raised), ..Renewal::new(giver.clone(), TTL) },
        };
        if late == "raise" {
            // When it has read the queue, it changes the record of the fences and its node.
            let (seen, go_on) = pause_at(&proxy, node_of(&giver));
            let sent = async { store.renew(&[renewal]).await.remove(0).expect_err("it has not arrived") };
            tokio::join!(sent, async {
                seen.notified().await;
                proxy.hold(Direction::ToServer);
                go_on.send(()).expect("it is waited for");
            });
        } else {
            proxy.hold(Direction::ToServer);
            match late {
                "renewal" => drop(store.renew(&[renewal]).await.remove(0).expect_err("it has not arrived")),
                _ => drop(store.release(&giver).await.expect_err("it has not arrived")),
            }
        }
        let waiting = Waiter::queue(&other, &raw, claim("a")).await;
        let hold = granted(other.acquire(&in_place_of(&giver)).await.expect("take up"));
        let node = children(&raw, "a").await.into_iter().find(|node| node.starts_with(&node_of(&hold.claim)));
        let path = format!("/lockkit/a/{}", node.expect("its node"));
        let before = raw.get_data(&path).await.expect("its node");
        proxy.heal();
        // Behind all that was sent before.
        let release = insist("release", async || store.release(&giver).await).await;
        assert!(matches!(release, Release::NotHeld(_)), "{late}: {release:?}");
        assert_eq!(raw.get_data(&path).await.expect("its node"), before, "{late}");
        waiting.waits().await;
        assert!(is_held(&other, &hold.claim).await, "{late}");
        free(&other, &hold.claim).await;
        let next = waiting.granted().await;
        assert!(next.fence > hold.fence && next.fence < raised, "{late}: {} after {}", next.fence, hold.fence);
        free(&other, &next.claim).await;
    }
}

/// The servers end it with its session only, so its own client does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_takes_up_ends_when_its_ttl_is_over() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let (mine, ttl) = (locker(&store), Duration::from_secs(2));
    let [used, unused] = ["a", "b"].map(|name| mine.lock(name).ttl(ttl));
    let guard = used.acquire().await.expect("acquire");
    let taken_up = locker(&other).lock("a").resume(guard.detach().expect("detach")).await;
    let taken_up = taken_up.expect("resume").expect("it is there");
    let guard = unused.acquire().await.expect("acquire");
    let behind = Waiter::queue(&other, &raw, claim("b")).await;
    let (token, since) = (guard.detach().expect("detach"), Instant::now());
    // Nothing of it depends on the locker, nor does that wait for it.
    mine.shutdown(ttl / 2).await.expect("shutdown");
    drop((mine, used, unused));
    let behind = behind.granted().await;
    assert!(since.elapsed() >= ttl, "it ended after {:?}", since.elapsed());
    assert!(locker(&store).lock("b").resume(token).await.expect("ask").is_none(), "it is another's");
    free(&other, &behind.claim).await;
    sleep(ttl / 4).await;
    taken_up.renew().await.expect("whoever took it up has it still");
}

#[tokio::test]
async fn what_a_store_can_do_is_known_without_a_server() {
    assert_eq!(Server::start().await.store().await.info().capability, ZkStore::CAPABILITY);
}
