//! Who waits is woken, and leaves nothing behind.

use std::{
    future::poll_fn,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use lockkit_core::{AcquireRequest, Attempt, LockStore, Locker, Order, Release};
use lockkit_redis::RedisStore;
use lockkit_testkit::faults::{Direction, Proxy};

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_wakes_the_waiter() {
    let server = Server::start().await;
    let (holder, waiter) = (server.store().await, Arc::new(server.store().await));
    let mut connection = server.raw();
    let mut latencies = Vec::new();
    for round in 0..20 {
        let mine = claim("a");
        hold(&holder, &mine).await;
        let theirs = claim("a");
        let (store, wanted) = (Arc::clone(&waiter), request(&theirs, TTL));
        let waiting =
            tokio::spawn(async move { (granted(store.acquire(&wanted).await.expect("acquire")), Instant::now()) });
        eventually("a subscription", async || subscribers(&mut connection, "a") == 1).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        let released = Instant::now();
        let release = holder.release(&mine).await.expect("release");
        assert_eq!(release, Release::Released { waiters: Some(1) }, "round {round}");
        let (grant, woken) = waiting.await.expect("task");
        latencies.push(woken - released);
        assert_eq!(grant.claim, theirs);
        free(&waiter, &theirs).await;
    }
    latencies.sort();
    println!("release to grant: median {:?}, worst {:?}", latencies[10], latencies[19]);
    // Without the message it would ask after five seconds.
    assert!(latencies[10] < Duration::from_secs(4), "{latencies:?}");
}

/// A client that is not lockkit tells nobody of its release. Its lock may last for long, or for ever.
#[tokio::test]
async fn a_holder_that_tells_nobody_is_not_waited_for_long() {
    let server = Server::start().await;
    let store = Arc::new(server.store().await);
    let mut connection = server.raw();
    for lasts in [" PX 60000", ""] {
        raw::<()>(&mut connection, &format!("SET lockkit:a their-token NX{lasts}"));
        let lock = Locker::shared_builder(store.clone()).build().lock("a");
        let waiting = tokio::spawn(async move { lock.acquire().await });
        eventually("a subscription", async || subscribers(&mut connection, "a") == 1).await;
        let released = Instant::now();
        raw::<i32>(&mut connection, "DEL lockkit:a");
        let guard = waiting.await.expect("task").expect("acquire");
        // Without a look at whose it is, the next question comes after 5 s.
        assert!(released.elapsed() < Duration::from_secs(2), "{:?}", released.elapsed());
        _ = guard.release().await.expect("release");
    }
}

#[tokio::test]
async fn a_lapsed_lease_sends_the_waiter_back_to_ask_again() {
    let server = Server::start().await;
    let store = server.store().await;
    let mut short = request(&claim("a"), Duration::ZERO);
    short.ttl = Duration::from_millis(300);
    granted(store.acquire(&short).await.expect("acquire"));
    let started = Instant::now();
    let wanted = request(&claim("a"), Duration::MAX);
    let contention = contended(store.acquire(&wanted).await.expect("acquire"));
    let waited = started.elapsed();
    assert_eq!(contention.retry_after, Some(Duration::ZERO));
    assert!(waited > Duration::from_millis(250) && waited < Duration::from_secs(2), "{waited:?}");
    granted(store.acquire(&wanted).await.expect("acquire"));
}

#[tokio::test]
async fn a_wait_ends_when_it_is_over() {
    let server = Server::start().await;
    let store = server.store().await;
    hold(&store, &claim("a")).await;
    let started = Instant::now();
    let answer = store.acquire(&request(&claim("a"), Duration::from_millis(150))).await.expect("acquire");
    assert!(matches!(answer, Attempt::Contended(_)));
    let waited = started.elapsed();
    assert!(waited >= Duration::from_millis(150) && waited < Duration::from_secs(2), "{waited:?}");
}

/// There is always a message since the last question, for a client that is far away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_ends_when_it_is_over_however_many_messages_come() {
    const WAIT: Duration = Duration::from_millis(200);
    let server = Server::start().await;
    let proxy = Proxy::start(([127, 0, 0, 1], server.port()).into()).await.expect("a proxy");
    let store = RedisStore::from_url(&format!("redis://{}", proxy.addr())).await.expect("connect");
    hold(&store, &claim("a")).await;
    proxy.delay(Direction::ToServer, Duration::from_millis(20));
    let (mut connection, is_over) = (server.raw(), Arc::new(AtomicBool::new(false)));
    let publishing = {
        let is_over = Arc::clone(&is_over);
        tokio::task::spawn_blocking(move || {
            while !is_over.load(Ordering::Relaxed) {
                raw::<u32>(&mut connection, "PUBLISH lockkit:a x");
            }
        })
    };
    let wanted = request(&claim("a"), WAIT);
    let answer = tokio::time::timeout(Duration::from_secs(2), store.acquire(&wanted)).await;
    is_over.store(true, Ordering::Relaxed);
    publishing.await.expect("task");
    contended(answer.expect("its wait is over").expect("acquire"));
}

#[tokio::test]
async fn a_dropped_waiter_leaves_no_interest_and_the_channel_is_given_up() {
    let server = Server::start().await;
    let (holder, waiter) = (server.store().await, server.store().await);
    let mine = claim("a");
    hold(&holder, &mine).await;
    let mut connection = server.raw();
    for after in [0, 50, 100, 200, 400, 1000, 5000] {
        let wanted = request(&claim("a"), TTL);
        let waiting = waiter.acquire(&wanted);
        _ = tokio::time::timeout(Duration::from_micros(after), waiting).await;
    }
    {
        let (one, two) = (request(&claim("a"), TTL), request(&claim("a"), TTL));
        let both = async { tokio::join!(waiter.acquire(&one), waiter.acquire(&two)) };
        _ = tokio::time::timeout(Duration::from_millis(20), both).await;
    }
    eventually("the channel is given up", async || subscribers(&mut connection, "a") == 0).await;
    // And it works again from there.
    let theirs = request(&claim("a"), TTL);
    let (grant, ()) = tokio::join!(waiter.acquire(&theirs), async {
        eventually("a subscription", async || subscribers(&mut connection, "a") == 1).await;
        free(&holder, &mine).await;
    });
    granted(grant.expect("acquire"));
}

#[tokio::test]
async fn a_store_does_not_count_itself_among_the_waiters() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    hold(&store, &mine).await;
    contended(store.acquire(&request(&claim("a"), Duration::from_millis(20))).await.expect("acquire"));
    assert_eq!(store.release(&mine).await.expect("release"), Release::Released { waiters: Some(0) });
}

#[tokio::test]
async fn channels_that_nobody_waits_for_are_given_up() {
    let server = Server::start().await;
    let (holder, waiter) = (server.store().await, server.store().await);
    for i in 0..100 {
        let name = format!("k{i}");
        hold(&holder, &claim(&name)).await;
        contended(waiter.acquire(&request(&claim(&name), Duration::from_millis(1))).await.expect("acquire"));
    }
    let mut connection = server.raw();
    eventually("no channel", async || raw::<Vec<String>>(&mut connection, "PUBSUB CHANNELS").is_empty()).await;
}

/// A task that did much before it gave up, so that the runtime wants it to give way.
#[tokio::test]
async fn a_busy_waiter_gives_its_channel_up_too() {
    let server = Server::start().await;
    let (holder, waiter) = (server.store().await, Arc::new(server.store().await));
    hold(&holder, &claim("a")).await;
    let mut connection = server.raw();
    let (store, wanted) = (Arc::clone(&waiter), request(&claim("a"), TTL));
    let (work, mut to_do) = tokio::sync::mpsc::unbounded_channel();
    let mut waiting = Some(Box::pin(async move { store.acquire(&wanted).await }));
    let mut is_subscribed = async || {
        eventually("a subscription", async || subscribers(&mut connection, "a") == 1).await;
        for piece in 0..1000 {
            work.send(piece).expect("the receiver is here");
        }
    };
    tokio::select! {
        answer = waiting.as_mut().expect("it waits") => panic!("{answer:?}"),
        () = is_subscribed() => {}
    }
    poll_fn(|cx| {
        while to_do.poll_recv(cx).is_ready() {}
        drop(waiting.take());
        Poll::Ready(())
    })
    .await;
    assert!(!to_do.is_empty(), "the runtime did not ask to give way");
    eventually("the channel is given up", async || subscribers(&mut connection, "a") == 0).await;
}

/// More waiters in order than the connection has room for requests, who leave at the same time. Nothing is ever published on their
/// channels after that.
#[tokio::test]
async fn a_crowd_that_leaves_at_once_gives_all_its_channels_up() {
    const CROWD: usize = 2500;
    let server = Server::start().await;
    let (holder, waiter) = (Locker::new(server.store().await), Locker::new(server.store().await));
    let _held = holder.lock("a").acquire().await.expect("acquire");
    let mut connection = server.raw();
    let mut crowd = tokio::task::JoinSet::new();
    for _ in 0..CROWD {
        let lock = waiter.lock("a").fifo();
        crowd.spawn(async move { lock.acquire().await.map(drop) });
    }
    let mut turns = || raw::<Vec<String>>(&mut connection, "PUBSUB CHANNELS lockkit:%turn-*").len();
    let (most, started) = (Duration::from_secs(60), Instant::now());
    while turns() < CROWD {
        assert!(started.elapsed() < most, "{} wait", turns());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("{CROWD} wait after {:?}", started.elapsed());
    let made = connections_made(&server);
    crowd.shutdown().await;
    let left = Instant::now();
    while turns() > 0 {
        assert!(left.elapsed() < most, "{} channels are kept", turns());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("all are given up after {:?}", left.elapsed());
    assert_eq!(connections_made(&server), made + 1, "but the one that asks");
}

/// How many connections the server has had, with the one that asks.
fn connections_made(server: &Server) -> u32 {
    let info: String = raw(&mut server.raw(), "INFO stats");
    let line = info.lines().find_map(|line| line.strip_prefix("total_connections_received:")).expect("total");
    line.trim().parse().expect("number")
}

/// Waiters that come and go at any moment take no message away from one that stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn those_who_leave_take_no_message_along() {
    let server = Server::start().await;
    let (holder, waiter) = (server.store().await, Arc::new(server.store().await));
    let mut slowest = Duration::ZERO;
    for round in 0_u64..300 {
        let mine = claim("a");
        hold(&holder, &mine).await;
        let staying = {
            let (store, theirs) = (Arc::clone(&waiter), claim("a"));
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_micros(round * 37 % 1500)).await;
                granted(store.acquire(&request(&theirs, Duration::from_secs(60))).await.expect("acquire"));
                let woken = Instant::now();
                free(&store, &theirs).await;
                woken
            })
        };
        let leaving: Vec<_> = (0_u64..6)
            .map(|i| {
                let (store, wanted) = (Arc::clone(&waiter), request(&claim("a"), TTL));
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_micros((round * 53 + i * 211) % 1300)).await;
                    let patience = Duration::from_micros((round * 71 + i * 397) % 2100);
                    let left = tokio::time::timeout(patience, store.acquire(&wanted)).await;
                    if !matches!(left, Ok(Ok(Attempt::Contended(_)))) {
                        store.release(&wanted.claim).await.expect("release");
                    }
                })
            })
            .collect();
        tokio::time::sleep(Duration::from_micros(round * 97 % 4000)).await;
        let released = Instant::now();
        free(&holder, &mine).await;
        slowest = slowest.max(staying.await.expect("a task").saturating_duration_since(released));
        for left in leaving {
            left.await.expect("a task");
        }
    }
    println!("the slowest of 300: {slowest:?}");
    // Without the message it would ask after five seconds.
    assert!(slowest < Duration::from_secs(4), "{slowest:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn contenders_take_turns() {
    let server = Server::start().await;
    let stores: Vec<_> = [server.store().await, server.store().await, server.store().await].map(Arc::new).into();
    let mut tasks = Vec::new();
    let counter = Arc::new(std::sync::atomic::AtomicU64::new(0));
    for i in 0..12 {
        let (store, counter): (Arc<RedisStore>, _) = (Arc::clone(&stores[i % 3]), Arc::clone(&counter));
        tasks.push(tokio::spawn(async move {
            for _ in 0..50 {
                let mine = claim("a");
                let wanted = request(&mine, TTL);
                loop {
                    if let Attempt::Granted(_) = store.acquire(&wanted).await.expect("acquire") {
                        break;
                    }
                }
                let seen = counter.load(std::sync::atomic::Ordering::Relaxed);
                tokio::task::yield_now().await;
                counter.store(seen + 1, std::sync::atomic::Ordering::Relaxed);
                free(&store, &mine).await;
            }
        }));
    }
    let started = Instant::now();
    for task in tasks {
        task.await.expect("task");
    }
    assert_eq!(counter.load(std::sync::atomic::Ordering::Relaxed), 600);
    println!("600 turns of 12 contenders: {:?}", started.elapsed());
}

/// The server serves nobody else meanwhile.
#[tokio::test]
async fn more_places_that_are_over_than_one_step_removes_are_removed_in_two() {
    let server = Server::start().await;
    let (store, mut root) = (server.store().await, server.raw());
    let [queue, places] = ["queue", "places"].map(|word| format!("{{lockkit:a}}:{word}:fence"));
    let mut over = redis::pipe();
    for number in 0..1500 {
        let token = format!("{number:032x}");
        over.zadd(&queue, &token, number).ignore();
        over.hset(&places, &token, "x|1000|1|1|1000|0|:1:gone").ignore();
    }
    over.query::<()>(&mut root).expect("pipeline");
    let mine = claim("a");
    let request = AcquireRequest { order: Order::Fifo, ..request(&mine, Duration::ZERO) };
    contended(store.acquire(&request).await.expect("acquire"));
    assert_eq!(raw::<u32>(&mut root, &format!("ZCARD {queue}")), 500);
    granted(store.acquire(&request).await.expect("acquire"));
    assert_eq!(raw::<u32>(&mut root, &format!("EXISTS {queue} {places}")), 0);
}

/// Another client's value may be empty. It says nothing when it releases.
#[tokio::test]
async fn a_lock_that_is_set_to_nothing_is_held() {
    let server = Server::start().await;
    let (store, mut root) = (Arc::new(server.store().await), server.raw());
    redis::cmd("SET").arg("lockkit:a").arg("").exec(&mut root).expect("set");
    let mine = claim("a");
    let tried = AcquireRequest { order: Order::Fifo, ..request(&mine, Duration::ZERO) };
    let plain = contended(attempt(&store, &mine).await.expect("acquire")).holder;
    assert_eq!(contended(store.acquire(&tried).await.expect("acquire")).holder, plain);
    let waiting = {
        let store = Arc::clone(&store);
        tokio::spawn(async move { in_order(&store, &mine).await })
    };
    until_one_waits(&store, &claim("a")).await;
    let freed = Instant::now();
    raw::<()>(&mut root, "DEL lockkit:a");
    waiting.await.expect("granted");
    assert!(freed.elapsed() < Duration::from_secs(1), "{:?}", freed.elapsed());
}
