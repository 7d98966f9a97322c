//! The queue: order, wake-ups, and places that are given up.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{AcquireRequest, Attempt, Fence, LockStore, LossReason, Release, Renewal, Renewed};
use lockkit_testkit::faults::{Direction, Proxy, poll_until};
use lockkit_zk::ZkConfig;
use tokio::{runtime::Handle, task::block_in_place};
use zookeeper_client::{Acls, CreateMode};

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_come_is_first_served_and_each_watches_the_one_before() {
    const WAITERS: usize = 20;
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let mine = claim("a");
    hold(&store, &mine).await;
    let (order, mut served) = tokio::sync::mpsc::unbounded_channel();
    for number in 0..WAITERS {
        let (store, order) = (Arc::clone(if number % 2 == 0 { &store } else { &other }), order.clone());
        tokio::spawn(async move {
            let waiter = claim("a");
            granted(store.acquire(&request(&waiter, Duration::from_secs(20))).await.expect("acquire"));
            order.send(number).expect("the test listens");
            free(&store, &waiter).await;
        });
        let expected = number + 2;
        eventually("it queues", async || children(&raw, "a").await.len() == expected).await;
    }
    // "wchp" lists each watched path, and below it the sessions that watch it.
    let (mut watches, lock) = (String::new(), "/lockkit/a/");
    eventually("all watch", async || {
        watches = server.0.word("wchp").await.expect("wchp");
        watches.matches(lock).count() >= WAITERS
    })
    .await;
    let watchers: Vec<_> = watches.split("/lockkit/").map(|path| path.matches("\n\t0x").count()).collect();
    // The second in the queue watches its own node too, and has a session of two.
    assert!(watchers.iter().all(|count| *count <= 2), "a herd watches one node: {watches}");
    free(&store, &mine).await;
    for number in 0..WAITERS {
        assert_eq!(served.recv().await, Some(number));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_may_wait_for_ever() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let (mine, next) = (claim("a"), claim("a"));
    hold(&store, &mine).await;
    let endless = request(&next, Duration::MAX);
    let waiter = tokio::spawn(async move { other.acquire(&endless).await });
    eventually("it queues", async || children(&raw, "a").await.len() == 2).await;
    free(&store, &mine).await;
    granted(waiter.await.expect("no panic").expect("acquire"));
}

#[test]
fn a_waiter_outlives_the_runtime_of_its_session() {
    let runtime = || {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        builder.worker_threads(1).enable_all().build().expect("a runtime")
    };
    let (servers, sessions, waiters) = (runtime(), runtime(), runtime());
    let server = servers.block_on(Server::start());
    let (mine, next) = (claim("a"), claim("a"));
    let store = sessions.block_on(async {
        let store = connect(server.config().session(Duration::from_secs(2))).await;
        hold(&store, &mine).await;
        store
    });
    let patient = request(&next, Duration::from_secs(20));
    let waiter = std::thread::spawn(move || {
        waiters.block_on(async {
            let asked = store.acquire(&patient).await;
            assert!(asked.is_err() || is_contended(&asked.expect("an answer")));
            // In a new session, once the old one is over.
            let again = request(&next, Duration::from_secs(1));
            eventually("it is free", async || matches!(store.acquire(&again).await, Ok(Attempt::Granted(_)))).await;
        });
    });
    // The holder's node is watched by the next, and the next watches its own.
    servers.block_on(eventually("it watches", async || {
        server.0.word("wchp").await.expect("wchp").matches("/lockkit/a/").count() == 2
    }));
    drop(sessions);
    waiter.join().expect("no panic");
}

/// Its driver, which nobody drives any more, neither connects again nor says that its session has expired.
#[test]
fn a_store_outlives_a_runtime_that_nobody_drives_since_it_lost_its_connection() {
    let runtime = |mut builder: tokio::runtime::Builder| builder.enable_all().build().expect("a runtime");
    let servers = runtime(tokio::runtime::Builder::new_multi_thread());
    let sessions = runtime(tokio::runtime::Builder::new_current_thread());
    let (server, proxy) = servers.block_on(async {
        let server = Server::start().await;
        let proxy = Proxy::start(server.0.addr()).await.expect("proxy");
        (server, proxy)
    });
    let config = ZkConfig::new([proxy.addr().to_string()]).session(Duration::from_secs(2));
    let store = sessions.block_on(connect(config.timeout(Duration::from_millis(500))));
    servers.block_on(async {
        proxy.refuse(true);
        proxy.cut().await;
    });
    sessions.block_on(attempt(&store, &claim("a"))).expect_err("it is cut off");
    proxy.refuse(false);
    let is_granted = async || matches!(attempt(&store, &claim("a")).await, Ok(Attempt::Granted(_)));
    servers.block_on(eventually("it is granted", is_granted));
    servers.block_on(async { drop((server, proxy)) });
}

/// Its session hears nothing and ends at the servers, and its driver, which nobody drives either, does not say so.
#[test]
fn a_store_outlives_a_runtime_that_nobody_drives() {
    let runtime = |mut builder: tokio::runtime::Builder| builder.enable_all().build().expect("a runtime");
    let servers = runtime(tokio::runtime::Builder::new_multi_thread());
    let sessions = runtime(tokio::runtime::Builder::new_current_thread());
    let server = servers.block_on(Server::start());
    let config = server.config().session(Duration::from_secs(2)).timeout(Duration::from_millis(500));
    for held in [false, true] {
        let mine = claim("a");
        let store = sessions.block_on(async {
            let store = connect(config.clone()).await;
            if held {
                hold(&store, &mine).await;
            }
            store
        });
        servers.block_on(async {
            if held {
                let mut reason = None;
                eventually("its end is told", async || {
                    reason = renew(&store, &mine).await.ok().map(|renewed| lost(Ok(renewed)));
                    reason.is_some()
                })
                .await;
                assert_eq!(reason, Some(LossReason::SessionEnded));
            }
            let next = claim("a");
            eventually("it is granted", async || matches!(attempt(&store, &next).await, Ok(Attempt::Granted(_)))).await;
            free(&store, &next).await;
        });
    }
    // It ends its processes on a runtime.
    servers.block_on(async { drop(server) });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_is_kept_from_call_to_call() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let (mine, first, second) = (claim("a"), claim("a"), claim("a"));
    hold(&store, &mine).await;
    assert!(is_contended(&other.acquire(&request(&first, Duration::from_millis(20))).await.expect("ask")));
    assert!(is_contended(&store.acquire(&request(&second, Duration::from_millis(20))).await.expect("ask")));
    let places = children(&raw, "a").await;
    assert!(is_contended(&other.acquire(&request(&first, Duration::from_millis(20))).await.expect("ask")));
    let mut same = children(&raw, "a").await;
    same.sort();
    let mut places = places;
    places.sort();
    assert_eq!(same, places, "asking again must not queue again");
    free(&store, &mine).await;
    assert!(is_contended(&store.acquire(&request(&second, Duration::from_millis(20))).await.expect("ask")));
    granted(other.acquire(&request(&first, Duration::from_secs(1))).await.expect("acquire"));
    free(&other, &first).await;
    granted(store.acquire(&request(&second, Duration::from_secs(1))).await.expect("acquire"));
    free(&store, &second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_waiter_leaves_no_node() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let mine = claim("a");
    hold(&store, &mine).await;
    let waiting = locker(&other);
    for round in 0..100_u64 {
        let lock = waiting.lock("a");
        drop(tokio::time::timeout(Duration::from_micros(round * 40), lock.acquire()).await);
    }
    waiting.shutdown(Duration::from_secs(10)).await.expect("drained");
    assert_eq!(children(&raw, "a").await.len(), 1, "only the holder's node is left");
    free(&store, &mine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_whose_place_was_deleted_starts_again() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let mine = claim("a");
    hold(&store, &mine).await;
    let waiter = locker(&other);
    let waiting = tokio::spawn(async move { waiter.lock("a").acquire_within(Duration::from_secs(10)).await });
    eventually("it queues", async || children(&raw, "a").await.len() == 2).await;
    let last = children(&raw, "a").await.into_iter().max_by_key(|node| node.rsplit("lock-").next().map(str::to_owned));
    raw.delete(&format!("/lockkit/a/{}", last.expect("a waiter")), None).await.expect("delete");
    free(&store, &mine).await;
    let guard = waiting.await.expect("no panic").expect("acquire").expect("granted");
    assert_eq!(children(&raw, "a").await.len(), 1);
    drop(guard);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_list_is_spared_only_while_nobody_else_comes() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let mut last = lockkit_core::Fence::NONE;
    for round in 0..60_u32 {
        let mine = claim("a");
        let held = hold(&store, &mine).await;
        assert!(held.fence > last);
        last = held.fence;
        assert!(is_contended(&attempt(&other, &claim("a")).await.expect("ask")), "granted twice in round {round}");
        assert!(matches!(store.release(&mine).await.expect("release"), Release::Released { .. }));
        // Somebody takes it in between, or makes the directory anew; or else the session is warm.
        if round % 20 == 13 {
            let theirs = claim("a");
            hold(&other, &theirs).await;
            assert!(is_contended(&attempt(&store, &claim("a")).await.expect("ask")), "granted twice in round {round}");
            free(&other, &theirs).await;
        }
        if round % 20 == 17 {
            raw.delete("/lockkit/a", None).await.expect("empty");
            let theirs = claim("a");
            for _ in 0..round {
                hold(&other, &theirs).await;
                free(&other, &theirs).await;
            }
            let theirs = claim("a");
            hold(&other, &theirs).await;
            assert!(is_contended(&attempt(&store, &claim("a")).await.expect("ask")), "granted twice in round {round}");
            free(&other, &theirs).await;
        }
    }
}

/// The first one, which was alone, raises the fences of the lock and leaves; the next has its node already, and hears of it later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_whose_node_is_older_than_the_record_of_fences_reads_it() {
    let server = Server::start().await;
    let store = server.store().await;
    for _ in 0..6 {
        let warm = claim("a");
        hold(&store, &warm).await;
        free(&store, &warm).await;
    }
    let (first, second) = (claim("a"), claim("a"));
    let mut high = request(&first, Duration::ZERO);
    high.fence.floor = Fence::new(1 << 52);
    let low = request(&second, Duration::ZERO);
    let (mut raising, mut next) = (pin!(store.acquire(&high)), pin!(store.acquire(&low)));
    assert!(poll_until(raising.as_mut(), 1, || {}).await.is_none());
    assert!(poll_until(next.as_mut(), 1, || {}).await.is_none());
    let held = granted(raising.await.expect("acquire"));
    free(&store, &first).await;
    let after = granted(next.await.expect("acquire"));
    assert!(after.fence > held.fence, "{} after {}", after.fence, held.fence);
}

/// All who are before it leave while it reads who they are, and each look at two of them takes its time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_ends_in_time_however_many_leave_meanwhile() {
    const AHEAD: usize = 80;
    const WAIT: Duration = Duration::from_secs(1);
    let server = Server::start().await;
    let (raw, proxy) = (Arc::new(server.raw().await), Proxy::start(server.0.addr()).await.expect("proxy"));
    let store = connect(ZkConfig::new([proxy.addr().to_string()])).await;
    let open = Acls::anyone_all();
    raw.mkdir("/lockkit/a", &CreateMode::Container.with_acls(open)).await.expect("the directory");
    let mut nodes = Vec::new();
    for _ in 0..AHEAD {
        let prefix = "/lockkit/a/_c_6d3b9a3e-0000-4000-8000-000000000001-permit2-lock-";
        let (_, sequence) =
            raw.create(prefix, b"", &CreateMode::EphemeralSequential.with_acls(open)).await.expect("a node");
        nodes.push(format!("{prefix}{sequence}"));
    }
    let (leaving, seen) = (Arc::clone(&raw), AtomicBool::new(false));
    proxy.rewrite_replies(move |replies| {
        let is_list = replies.windows(13).filter(|text| text == b"permit2-lock-").count() > AHEAD / 2;
        if is_list && !seen.swap(true, Ordering::SeqCst) {
            let leave = async {
                for node in &nodes {
                    leaving.delete(node, None).await.expect("it is there");
                }
            };
            block_in_place(|| Handle::current().block_on(leave));
        }
        replies
    });
    proxy.delay(Direction::ToClient, Duration::from_millis(400));
    let mine = claim_as(permit(2), "a");
    // The bound on one operation is two seconds, as ever.
    let asked = AcquireRequest { ttl: Duration::from_secs(20), ..request(&mine, WAIT) };
    let since = Instant::now();
    let answer = store.acquire(&asked).await.expect("it waits");
    let (took, limit) = (since.elapsed(), WAIT + ZkConfig::TIMEOUT);
    assert!(is_contended(&answer), "{answer:?}");
    assert!(took < limit, "it took {took:?}");
    let left = children(&raw, "a").await;
    assert_eq!(left.len(), 1, "its place is kept, and all others are gone: {left:?}");
    proxy.heal();
    granted(store.acquire(&asked).await.expect("acquire"));
    assert_eq!(children(&raw, "a").await, left);
}

/// The holder's first write of its fence gets no answer. The next one reads the queue before that, and looks at the holder's node when a
/// nested hold was written there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fence_that_was_written_without_an_answer_is_known_to_the_next() {
    let server = Server::start().await;
    let first = server.store().await;
    let (store, lossy) = server.proxied(Duration::from_secs(20)).await;
    let slow = Proxy::start(server.0.addr()).await.expect("proxy");
    let config = ZkConfig::new([slow.addr().to_string()]).session(Duration::from_secs(40));
    let other = connect(config.timeout(Duration::from_secs(10))).await;
    let (theirs, mine, next) = (claim("a"), claim("a"), claim("a"));
    hold(&first, &theirs).await;
    let mut asked = request(&mine, Duration::from_millis(20));
    asked.fence.floor = Fence::new(1 << 52);
    assert!(is_contended(&insist("queue", async || store.acquire(&asked).await).await));
    free(&first, &theirs).await;

    let (listed, go_on) = pause_at(&slow, node_of(&mine));
    let waiting = AcquireRequest { ttl: Duration::from_secs(40), ..request(&next, Duration::from_secs(30)) };
    let (waited, held) = tokio::join!(other.acquire(&waiting), async {
        listed.notified().await;
        lossy.drop_reply_after("~fence", 1);
        store.acquire(&asked).await.expect_err("its reply was lost");
        lossy.dropped().await;
        let held = granted(insist("acquire", async || store.acquire(&asked).await).await);
        let nested = [Renewal { depth: 2, ..Renewal::new(mine.clone(), TTL) }];
        let renewed = insist("nest", async || store.renew(&nested).await.remove(0)).await;
        assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}");
        go_on.send(()).expect("it is waited for");
        // The holder's own watch, and those of the next one on that node and on its own.
        let watches = async || server.0.word("wchp").await.expect("wchp").matches("0x").count();
        eventually("it waits", async || watches().await == 3).await;
        free(&store, &mine).await;
        held
    });
    let waited = granted(waited.expect("acquire"));
    assert!(waited.fence > held.fence, "{} after {}", waited.fence, held.fence);
}
