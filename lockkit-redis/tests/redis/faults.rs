//! Servers that die, freeze, forget and refuse.

use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lockkit_core::{Claim, Effect, ErrorKind, LockStore, Locker, LossReason, Mode, Query, Release, Renewal};
use lockkit_redis::{RedisConfig, RedisStore, ServerFacts};
use lockkit_testkit::faults::{Direction, Proxy, ServerClock};

use crate::support::*;

#[tokio::test]
async fn a_forgotten_script_is_sent_again() {
    let server = Server::start().await;
    let store = server.store().await;
    let mut connection = server.raw();
    let mut forget = || raw::<()>(&mut connection, "SCRIPT FLUSH");
    let mine = claim("a");
    hold(&store, &mine).await;
    forget();
    held(renew(&store, &renewal(&mine)).await);
    forget();
    assert_eq!(store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect")[0].holders.len(), 1);
    forget();
    contended(store.acquire(&request(&claim("a"), Duration::from_millis(10))).await.expect("acquire"));
    forget();
    free(&store, &mine).await;
}

/// One after the other they would not be answered in time.
#[tokio::test]
async fn many_requests_with_a_forgotten_script_are_sent_again_together() {
    const MANY: usize = 64;
    let server = Server::start().await;
    let proxy = Proxy::start(([127, 0, 0, 1], server.port()).into()).await.expect("a proxy");
    let store = RedisStore::connect(RedisConfig::new("127.0.0.1", proxy.addr().port())).await.expect("connect");
    let shared = |name: String| Claim { mode: Mode::Shared, ..claim(&name) };
    let claims: Vec<Claim> = (0..MANY).map(|number| shared(number.to_string())).collect();
    for claim in &claims {
        hold(&store, claim).await;
    }
    let renewals: Vec<_> =
        claims.iter().map(|claim| Renewal { ttl: Duration::from_secs(6), ..renewal(claim) }).collect();
    proxy.delay(Direction::ToServer, Duration::from_millis(100));
    raw::<()>(&mut server.raw(), "SCRIPT FLUSH");
    for renewed in store.renew(&renewals).await {
        held(renewed);
    }
}

#[tokio::test]
async fn a_restarted_server_is_found_again_and_fences_go_on() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    let before = hold(&store, &mine).await;
    server.kill().await;
    eventually("the end of the connection", async || {
        std::net::TcpStream::connect(("127.0.0.1", server.port())).is_err()
    })
    .await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let started = Instant::now();
    let error = attempt(&store, &claim("a")).await.expect_err("down");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    assert!(error.message().contains("refused"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(1), "fails fast");
    server.restart().await;
    assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Gone);
    let after = hold(&store, &claim("a")).await;
    assert!(after.fence > before.fence, "the server came back empty");
    raw::<()>(&mut server.raw(), "FLUSHALL");
    assert!(hold(&store, &claim("a")).await.fence > after.fence);
}

#[tokio::test]
async fn a_request_under_way_when_the_server_dies_has_an_unknown_effect() {
    let server = Server::start().await;
    let store = Arc::new(server.store().await);
    server.freeze().await;
    let (inner, mine) = (Arc::clone(&store), claim("a"));
    let asking = tokio::spawn(async move { attempt(&inner, &mine).await });
    tokio::time::sleep(Duration::from_millis(50)).await;
    server.kill().await;
    let error = asking.await.expect("task").expect_err("died");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
}

#[tokio::test]
async fn a_frozen_server_times_out_and_the_release_runs_behind() {
    let server = Server::start().await;
    let store = RedisStore::connect(server.config().timeout(Duration::from_millis(500))).await.expect("connect");
    let mine = claim("a");
    // Once, so that the server knows the script: a request by an unknown hash would have no effect to undo.
    hold(&store, &claim("b")).await;
    server.freeze().await;
    let started = Instant::now();
    let error = attempt(&store, &mine).await.expect_err("frozen");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::Unknown), "{error}");
    assert!(started.elapsed() < Duration::from_secs(2));
    let (release, ()) = tokio::join!(store.release(&mine), async {
        tokio::time::sleep(Duration::from_millis(30)).await;
        server.thaw();
    });
    assert!(matches!(release, Ok(Release::Released { .. })), "the acquisition took effect, then its end: {release:?}");
    assert_eq!(raw::<i32>(&mut server.raw(), "EXISTS lockkit:a"), 0);
}

#[tokio::test]
async fn a_short_ttl_shortens_the_bound() {
    let server = Server::start().await;
    let store = server.store().await;
    server.freeze().await;
    let mut short = request(&claim("a"), Duration::ZERO);
    short.ttl = Duration::from_millis(200);
    let started = Instant::now();
    let error = store.acquire(&short).await.expect_err("frozen");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(started.elapsed() < Duration::from_secs(1), "not the two seconds of the store");
    server.thaw();
}

/// A black hole in the network: what was accepted leads nowhere, but new connections work.
#[tokio::test]
async fn a_black_hole_is_left_behind() {
    let server = Server::start().await;
    let (front, hole) = proxy(server.port()).await;
    let config = lockkit_redis::RedisConfig::new("127.0.0.1", front).timeout(Duration::from_millis(400));
    let store = Arc::new(RedisStore::connect(config).await.expect("connect"));
    let mine = claim("a");
    hold(&store, &mine).await;
    // Somebody waits through all of it.
    let (waiter, wanted) = (Arc::clone(&store), request(&claim("a"), TTL));
    let waiting = tokio::spawn(async move { waiter.acquire(&wanted).await });
    eventually("a subscription", async || subscribers(&mut server.raw(), "a") == 1).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    hole.send_replace(true);
    // A burst that times out together counts once.
    let burst = tokio::join!(attempt(&store, &mine), attempt(&store, &mine), attempt(&store, &mine));
    for answer in [burst.0, burst.1, burst.2] {
        assert_eq!(answer.expect_err("hole").kind(), ErrorKind::TimedOut);
    }
    assert_eq!(renew(&store, &renewal(&mine)).await.expect_err("hole").kind(), ErrorKind::TimedOut);
    held(renew(&store, &renewal(&mine)).await);
    eventually("the waiter subscribes anew", async || subscribers(&mut server.raw(), "a") >= 1).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    free(&store, &mine).await;
    granted(waiting.await.expect("task").expect("acquire"));
}

/// The connection is given up for two callers that went away, who hear nothing of it. The release of the second goes over another
/// connection, and is faster than what it is to undo.
#[tokio::test]
async fn a_release_that_overtakes_what_was_abandoned_is_repeated() {
    const BOUND: Duration = Duration::from_millis(400);
    let server = Server::start().await;
    let (front, hole) = proxy(server.port()).await;
    let config = lockkit_redis::RedisConfig::new("127.0.0.1", front).timeout(BOUND);
    let store = Arc::new(RedisStore::connect(config).await.expect("connect"));
    let (locker, other) = (Locker::new(Arc::clone(&store)), Locker::new(store));
    // So that the server knows the script.
    _ = locker.lock("c").try_acquire().await.expect("acquire").expect("free").release().await.expect("release");
    let mut connection = server.raw();
    let mut ran = || {
        let told = raw::<String>(&mut connection, "INFO commandstats");
        let calls = told.lines().find_map(|line| line.strip_prefix("cmdstat_evalsha:calls=")?.split(',').next());
        calls.and_then(|calls| calls.parse::<u32>().ok()).expect("a number")
    };
    let before = ran();
    hole.send_replace(true);
    for name in ["a", "b"] {
        let lock = locker.lock(name);
        let left = tokio::time::timeout(BOUND * 6 / 10, lock.try_acquire()).await;
        assert!(left.is_err(), "{left:?}");
    }
    // Another one of this store is the first to use the next connection.
    _ = other.lock("d").try_acquire().await.expect("acquire").expect("free").release().await.expect("release");
    eventually("the release on another connection", async || ran() >= before + 2).await;
    hole.send_replace(false);
    let mut connection = server.raw();
    let mut is_there = |key: &str| raw::<i32>(&mut connection, &format!("EXISTS {key}")) == 1;
    eventually("the acquisition", async || is_there("{lockkit:b}:fence")).await;
    eventually("its end", async || !is_there("lockkit:b")).await;
}

/// Whatever the ttl: it must be the store that finds out that a renewal is not answered, not only the engine.
#[tokio::test]
async fn a_short_lease_outlives_a_black_hole() {
    let server = Server::start().await;
    let (front, hole) = proxy(server.port()).await;
    let store = RedisStore::connect(lockkit_redis::RedisConfig::new("127.0.0.1", front)).await.expect("connect");
    let ttl = Duration::from_secs(5);
    let guard = Locker::new(store).lock("a").ttl(ttl).acquire().await.expect("acquire");
    hole.send_replace(true);
    tokio::time::sleep(ttl * 3 / 2).await;
    assert_eq!(guard.status(), lockkit_core::Status::Held);
}

/// Operations that come one after the other must not each begin the connection anew when the one before gives up: then no
/// caller whose patience is shorter than connecting takes would ever have one, nor would a crowd of callers.
#[tokio::test]
async fn a_connection_is_made_although_those_who_asked_for_it_gave_up() {
    const DELAY: Duration = Duration::from_millis(250);
    let server = Server::start().await;
    // So that the server knows the script.
    hold(&server.store().await, &claim("c")).await;
    let proxy = Proxy::start(([127, 0, 0, 1], server.port()).into()).await.expect("proxy");
    proxy.delay(Direction::ToServer, DELAY);
    proxy.delay(Direction::ToClient, DELAY);
    let store = RedisStore::new(RedisConfig::new("127.0.0.1", proxy.addr().port())).expect("a store");
    for _ in 0..5 {
        let impatient = tokio::time::timeout(DELAY, attempt(&store, &claim("a"))).await;
        assert!(impatient.is_err(), "no answer comes so soon");
    }
    // There and back takes twice the delay, and connecting as long again.
    let patient = tokio::time::timeout(DELAY * 7 / 2, attempt(&store, &claim("b"))).await;
    granted(patient.expect("it was connected already").expect("acquire"));
}

/// A clock that was late at the start, and is set right before anybody asks.
#[tokio::test]
async fn a_run_that_follows_upon_another_is_no_older_than_the_end_of_that() {
    let clock = ServerClock::build().expect("a C compiler");
    let server = Server::start_on(&clock).await;
    let told = Arc::new(Mutex::new(Vec::new()));
    let vet = {
        let told = Arc::clone(&told);
        move |facts: &ServerFacts| {
            told.lock().expect("told").push(facts.uptime);
            Ok(())
        }
    };
    let store = RedisStore::new(server.config().vet(vet)).expect("a store");
    clock.forward(Duration::from_secs(3600)).expect("set");
    hold(&store, &claim("a")).await;
    clock.set_right().expect("set");
    server.restart().await;
    clock.forward(Duration::from_secs(7200)).expect("set");
    eventually("a connection", async || attempt(&store, &claim("b")).await.is_ok()).await;
    let told = told.lock().expect("told").clone();
    assert!(told[0] > Duration::from_secs(3000), "there was no other before: {told:?}");
    assert!(told[1..].iter().all(|uptime| *uptime < Duration::from_secs(60)) && told.len() > 1, "{told:?}");
}

/// Forwards connections; those that exist when `true` is sent forward nothing until `false` is, and stay open.
async fn proxy(to: u16) -> (u16, tokio::sync::watch::Sender<bool>) {
    let (hole, watch) = tokio::sync::watch::channel(false);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let port = listener.local_addr().expect("address").port();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut watch = watch.clone();
            watch.mark_unchanged();
            tokio::spawn(async move {
                let mut server = tokio::net::TcpStream::connect(("127.0.0.1", to)).await.expect("server");
                let mut copying = pin!(tokio::io::copy_bidirectional(&mut client, &mut server));
                loop {
                    tokio::select! {
                        _ = &mut copying => return,
                        changed = watch.changed() => {
                            if changed.is_err() || watch.wait_for(|hole| !hole).await.is_err() {
                                return;
                            }
                        }
                    }
                }
            });
        }
    });
    (port, hole)
}

#[tokio::test]
async fn waiters_survive_the_loss_of_the_connection() {
    let server = Server::start().await;
    let (holder, waiter) = (server.store().await, server.store().await);
    let mine = claim("a");
    hold(&holder, &mine).await;
    let wanted = request(&claim("a"), TTL);
    let mut connection = server.raw();
    let (grant, ()) = tokio::join!(waiter.acquire(&wanted), async {
        eventually("a subscription", async || subscribers(&mut connection, "a") == 1).await;
        raw::<i32>(&mut connection, "CLIENT KILL TYPE pubsub");
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert_eq!(subscribers(&mut connection, "a"), 1, "subscribed anew");
        free(&holder, &mine).await;
    });
    granted(grant.expect("acquire"));
}

#[tokio::test]
async fn many_operations_share_one_reconnection() {
    let server = Server::start().await;
    let store = Arc::new(server.store().await);
    server.kill().await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    server.restart().await;
    let tasks: Vec<_> = (0..200)
        .map(|i| {
            let store = Arc::clone(&store);
            tokio::spawn(async move { attempt(&store, &claim(&i.to_string())).await })
        })
        .collect();
    for task in tasks {
        granted(task.await.expect("task").expect("acquire"));
    }
    let info: String = raw(&mut server.raw(), "INFO stats");
    let total = info.lines().find_map(|line| line.strip_prefix("total_connections_received:")).expect("total");
    assert!(total.trim().parse::<u32>().expect("number") <= 3, "one for the store, some for the test: {total}");
}

#[tokio::test]
async fn wrong_credentials_are_denied_and_never_shown() {
    let server = Server::start_with(&["--requirepass", "right-secret"]).await;
    let try_with = async |config: lockkit_redis::RedisConfig| RedisStore::connect(config).await.expect_err("denied");
    for error in [try_with(server.config()).await, try_with(server.config().password("wrong-secret")).await] {
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
        assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
    }
    let config = server.config().password("right-secret");
    assert!(!format!("{config:?}").contains("secret"));
    let store = RedisStore::connect(config).await.expect("connect");
    assert!(!format!("{store:?}").contains("secret"));
    hold(&store, &claim("a")).await;
}

#[tokio::test]
async fn a_user_without_permission_is_denied() {
    let server = Server::start().await;
    let mut connection = server.raw();
    raw::<()>(&mut connection, "ACL SETUSER app on >pw ~lockkit:* ~{lockkit:* resetchannels +@all -@admin -info");
    let url = server.url("").replace("redis://", "redis://app:pw@");
    let store = RedisStore::from_url(&url).await.expect("connect");
    assert!(store.warnings()[0].contains("INFO"), "{:?}", store.warnings());
    let mine = claim("a");
    hold(&store, &mine).await;
    let error = store.acquire(&request(&claim("a"), TTL)).await.expect_err("no channels");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert_eq!(store.release(&mine).await.expect("release"), Release::Released { waiters: None });
    let elsewhere = format!("{url}?prefix=other:");
    let error = RedisStore::from_url(&elsewhere).await.expect_err("no such keys");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    // Nor where nothing was checked when it connected.
    let other = RedisStore::new(RedisConfig::from_url(&elsewhere).expect("url")).expect("a store");
    let error = attempt(&other, &mine).await.expect_err("no such keys");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
}

/// The permissions that docs/backends/redis.md asks for are enough.
#[tokio::test]
async fn the_documented_permissions_suffice() {
    let server = Server::start().await;
    let mut connection = server.raw();
    let rule = format!("ACL SETUSER app on >pw ~lockkit:* ~{{lockkit:* &lockkit:* {PERMISSIONS}");
    raw::<()>(&mut connection, &rule);
    let store = RedisStore::from_url(&server.url("").replace("redis://", "redis://app:pw@")).await.expect("connect");
    assert!(store.warnings().is_empty(), "{:?}", store.warnings());
    let mine = claim("a");
    let grant = hold(&store, &mine).await;
    contended(store.acquire(&request(&claim("a"), Duration::from_millis(20))).await.expect("acquire"));
    hold(&store, &mine).await;
    let deeper = Renewal { depth: 2, fence_floor: Some(grant.fence.offset(5)), ..renewal(&mine) };
    held(renew(&store, &deeper).await);
    for query in [Query::Prefix("a".into()), Query::Keys(vec![mine.key.clone()])] {
        let states = store.inspect(&query).await.expect("inspect");
        assert_eq!((states[0].holders.len(), states[0].waiters), (1, Some(0)));
    }
    assert_eq!(store.release(&mine).await.expect("release"), Release::Released { waiters: Some(0) });
    raw::<i32>(&mut connection, "RPUSH lockkit:b x");
    assert!(attempt(&store, &claim("b")).await.expect_err("list").message().contains("list"));
}

#[tokio::test]
async fn an_unfit_server_is_refused_or_warned_of() {
    let server = Server::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"]).await;
    let warnings = server.store().await;
    assert!(warnings.warnings()[0].contains("volatile-lru"));
    raw::<()>(&mut server.raw(), "REPLICAOF 127.0.0.1 1");
    let error = RedisStore::connect(server.config()).await.expect_err("replica");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("replica"));
    let error = attempt(&warnings, &claim("a")).await.expect_err("read only");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    raw::<()>(&mut server.raw(), "REPLICAOF NO ONE");
    hold(&warnings, &claim("a")).await;
}

#[tokio::test]
async fn a_full_server_is_unavailable() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    hold(&store, &mine).await;
    raw::<()>(&mut server.raw(), "CONFIG SET maxmemory 1");
    let error = attempt(&store, &claim("b")).await.expect_err("full");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    free(&store, &mine).await;
}

#[tokio::test]
async fn nothing_listens() {
    // Bound, so that nobody else gets the port, but nobody listens.
    let socket = tokio::net::TcpSocket::new_v4().expect("socket");
    socket.bind((std::net::Ipv4Addr::LOCALHOST, 0).into()).expect("bind");
    let port = socket.local_addr().expect("address").port();
    let config = lockkit_redis::RedisConfig::new("127.0.0.1", port);
    let error = RedisStore::connect(config.clone()).await.expect_err("refused");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    assert!(error.to_string().starts_with("connect on redis 127.0.0.1:"), "{error}");
    let lazy = RedisStore::new(config).expect("no I/O yet");
    assert_eq!(lazy.release(&claim("a")).await.expect_err("refused").effect(), Effect::None);
}

/// A primary that became a replica refuses. It is asked over a new connection each time, for the address may lead to another by
/// then.
#[tokio::test]
async fn a_server_that_became_a_replica_is_noticed() {
    let (server, primary) = (Server::start().await, Server::start().await);
    let store = server.store().await;
    hold(&store, &claim("a")).await;
    raw::<()>(&mut server.raw(), &format!("REPLICAOF 127.0.0.1 {}", primary.port()));
    for _ in 0..2 {
        let error = attempt(&store, &claim("b")).await.expect_err("a replica");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    }
    raw::<()>(&mut server.raw(), "REPLICAOF NO ONE");
    hold(&store, &claim("b")).await;
}
