//! Operations side by side, whose requests leave together.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Effect, ErrorKind, Fence, FenceClock, FenceRequest, LockStore, LossReason, Query, Release};
use lockkit_redis::{RedisConfig, RedisStore};
use lockkit_testkit::faults::{Direction, Proxy};
use tokio::{
    task::JoinSet,
    time::{Instant, timeout},
};

use crate::support::*;

const TASKS: usize = 32;

/// Runs something in many tasks; all must end well.
async fn side_by_side<F>(task: impl Fn(usize) -> F)
where
    F: Future<Output = ()> + Send + 'static,
{
    let mut tasks: JoinSet<()> = (0..TASKS).map(task).collect();
    while let Some(ended) = tasks.join_next().await {
        ended.expect("a task");
    }
}

async fn pair(store: &RedisStore, name: &str) {
    let mine = claim(name);
    hold(store, &mine).await;
    free(store, &mine).await;
}

fn commands(server: &Server, command: &str) -> u64 {
    let stats: String = raw(&mut server.raw(), "INFO commandstats");
    let line = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
    line.and_then(|line| line.split(',').next()).map_or(0, |calls| calls.parse().expect("a number"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_leave_together_and_are_answered_one_by_one() {
    const PAIRS: usize = 100;
    let server = Server::start().await;
    let store = Arc::new(server.store().await);
    let (before, requests) = (commands(&server, "evalsha"), Arc::new(AtomicU64::new(0)));
    side_by_side(|task| {
        let (store, requests) = (Arc::clone(&store), Arc::clone(&requests));
        async move {
            // Half of them are in each other's way.
            let name = if task % 2 == 0 { "one for all".to_owned() } else { task.to_string() };
            let (mut grants, mut last) = (0, None);
            while grants < PAIRS {
                let mine = claim(&name);
                requests.fetch_add(2, Ordering::Relaxed);
                match attempt(&store, &mine).await.expect("acquire") {
                    lockkit_core::Attempt::Granted(hold) => {
                        assert!(last < Some(fence(&hold)), "{last:?}, then {hold:?}");
                        (grants, last) = (grants + 1, Some(fence(&hold)));
                        free(&store, &mine).await;
                    }
                    lockkit_core::Attempt::Contended(_) => {
                        let nothing = store.release(&mine).await.expect("release");
                        assert!(matches!(nothing, Release::NotHeld(_)), "{nothing:?}");
                    }
                }
            }
        }
    })
    .await;
    let (sent, requests) = (commands(&server, "evalsha") - before, requests.load(Ordering::Relaxed));
    assert!(sent * 2 < requests, "{sent} commands for {requests} requests");
}

/// Rule R8: whatever became of an acquisition that was given up, its release comes behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_never_overtakes_what_it_undoes() {
    let server = Server::start().await;
    let store = Arc::new(server.store().await);
    let done = Arc::new(AtomicBool::new(false));
    let flushes = {
        // A forgotten script is sent again, which must not bring back what was given up.
        let (done, mut connection) = (Arc::clone(&done), server.raw());
        tokio::task::spawn_blocking(move || {
            while !done.load(Ordering::Relaxed) {
                raw::<()>(&mut connection, "SCRIPT FLUSH");
                std::thread::sleep(Duration::from_millis(1));
            }
        })
    };
    side_by_side(|task| {
        let store = Arc::clone(&store);
        async move {
            let mut given_up = 0;
            for turn in 0..300 {
                let mine = claim(&task.to_string());
                let patience = Duration::from_micros((turn * 7 % 20) * 20);
                given_up += u32::from(timeout(patience, attempt(&store, &mine)).await.is_err());
                // Every other time the release is given up as well, and repeated.
                if turn % 2 == 0 {
                    _ = timeout(Duration::ZERO, store.release(&mine)).await;
                }
                store.release(&mine).await.expect("release");
                let state = store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect");
                assert!(state[0].holders.is_empty(), "task {task}, turn {turn}: {:?}", state[0].holders);
                // The same claim again is not undone by a release that was given up before.
                hold(&store, &mine).await;
                assert_eq!(held(renew(&store, &renewal(&mine)).await).claim, mine);
                free(&store, &mine).await;
            }
            assert!(given_up > 0, "nothing was given up");
        }
    })
    .await;
    done.store(true, Ordering::Relaxed);
    flushes.await.expect("flushes");
}

/// Nor when more is waiting to be written than the connection takes, and some of those who asked together gave up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_does_not_overtake_in_a_jam_either() {
    const PAIRS: usize = 20;
    let server = Server::start().await;
    let proxy = Proxy::start(([127, 0, 0, 1], server.port()).into()).await.expect("a proxy");
    let config = RedisConfig::new("127.0.0.1", proxy.addr().port()).timeout(Duration::from_secs(30));
    let store = Arc::new(RedisStore::connect(config).await.expect("connect"));
    pair(&store, "a").await;
    proxy.hold(Direction::ToServer);
    let many = Query::Keys((0..50).map(|i| claim(&format!("{i:0100}")).key).collect());
    let jam: JoinSet<_> = (0..2500)
        .map(|_| {
            let (store, many) = (Arc::clone(&store), many.clone());
            async move { store.inspect(&many).await }
        })
        .collect();
    let patient = |name: String| {
        let (store, mine) = (Arc::clone(&store), claim(&name));
        let wanted = lockkit_core::AcquireRequest { ttl: Duration::from_secs(200), ..request(&mine, Duration::ZERO) };
        (mine, tokio::spawn(async move { store.acquire(&wanted).await }))
    };
    let (mut releases, mut others) = (JoinSet::new(), Vec::new());
    for i in 0..600 {
        let ((mine, asking), (_, other)) = (patient(i.to_string()), patient(format!("other {i}")));
        others.push(other);
        tokio::time::sleep(Duration::from_millis(1)).await;
        asking.abort();
        assert!(asking.await.is_err_and(|e| e.is_cancelled()));
        let store = Arc::clone(&store);
        releases.spawn(async move { store.release(&mine).await });
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    proxy.heal();
    for release in releases.join_all().await {
        release.expect("release");
    }
    for other in others {
        granted(other.await.expect("a task").expect("acquire"));
    }
    assert!(jam.join_all().await.iter().all(Result::is_ok));
    let left: Vec<String> = raw(&mut server.raw(), "KEYS lockkit:*");
    let left: Vec<_> = left.iter().filter(|key| !key.contains("other")).collect();
    assert!(left.is_empty(), "{left:?}");
    let before = commands(&server, "evalsha");
    side_by_side(|task| {
        let store = Arc::clone(&store);
        async move {
            for _ in 0..PAIRS {
                pair(&store, &task.to_string()).await;
            }
        }
    })
    .await;
    let (sent, requests) = (commands(&server, "evalsha") - before, 2 * TASKS * PAIRS);
    assert!(sent < requests as u64, "{sent} commands for {requests} requests: the jam is not over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_one_is_nothing_to_the_others() {
    let server = Server::start().await;
    let mut connection = server.raw();
    raw::<()>(&mut connection, "ACL SETUSER app on >pw ~lockkit:may* ~{lockkit:may* +@all");
    raw::<i32>(&mut connection, "HSET lockkit:may-hash f v");
    raw::<i32>(&mut connection, "HSET {lockkit:may-counter}:fence f v");
    let url = server.url("").replace("redis://", "redis://app:pw@");
    // What it checks when it connects is not among the keys that this user may use.
    let store = Arc::new(RedisStore::new(RedisConfig::from_url(&url).expect("url")).expect("a store"));
    pair(&store, "may connect").await;
    side_by_side(|task| {
        let store = Arc::clone(&store);
        async move {
            for _ in 0..50 {
                let refused = match task % 4 {
                    0 => ("may-hash", ErrorKind::Unexpected),
                    1 => ("may-counter", ErrorKind::Unexpected),
                    2 => ("not", ErrorKind::Denied),
                    _ => {
                        pair(&store, &format!("may {task}")).await;
                        continue;
                    }
                };
                let error = attempt(&store, &claim(refused.0)).await.expect_err(refused.0);
                assert_eq!((error.kind(), error.effect()), (refused.1, Effect::None), "{error}");
                assert!(error.to_string().contains(refused.0), "{error}");
            }
        }
    })
    .await;
    let not_mine = store.release(&claim("may-hash")).await.expect("release");
    assert_eq!(not_mine, Release::NotHeld(LossReason::Taken));
}

/// Those who are sent anew because of another are sent side by side: one after the other they would not be in time.
#[tokio::test]
async fn a_refusal_does_not_hold_up_the_others() {
    let server = Server::start().await;
    raw::<()>(&mut server.raw(), "ACL SETUSER app on >pw ~lockkit:may* ~{lockkit:may* +@all");
    let proxy = Proxy::start(([127, 0, 0, 1], server.port()).into()).await.expect("a proxy");
    let url = format!("redis://app:pw@{}/", proxy.addr());
    let store = Arc::new(RedisStore::new(RedisConfig::from_url(&url).expect("url")).expect("a store"));
    pair(&store, "may connect").await;
    proxy.delay(Direction::ToServer, Duration::from_millis(100));
    side_by_side(|task| {
        let store = Arc::clone(&store);
        async move {
            let name = if task == TASKS / 2 { "not".to_owned() } else { format!("may {task}") };
            let granted = attempt(&store, &claim(&name)).await;
            assert_eq!(granted.is_err(), task == TASKS / 2, "{granted:?}");
        }
    })
    .await;
}

/// More than leave in one command.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crowd_is_served() {
    let server = Server::start().await;
    let store = Arc::new(server.store().await);
    let mut crowd = JoinSet::new();
    for i in 0..2000 {
        let store = Arc::clone(&store);
        crowd.spawn(async move { pair(&store, &i.to_string()).await });
    }
    while let Some(served) = crowd.join_next().await {
        served.expect("a task");
    }
}

/// The connection is driven by the runtime that made it. When that ends, others hear of it, and make their own.
#[test]
fn the_end_of_a_runtime_is_an_error_at_once() {
    let first = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let second = tokio::runtime::Runtime::new().expect("a runtime");
    let (server, store) = first.block_on(async {
        let server = Server::start().await;
        let store = Arc::new(server.store().await);
        pair(&store, "a").await;
        (server, store)
    });
    second.block_on(async {
        let start = Instant::now();
        let asked = (0..TASKS).map(|task| {
            let store = Arc::clone(&store);
            async move { attempt(&store, &claim(&task.to_string())).await }
        });
        let asked: JoinSet<_> = asked.collect();
        // Nothing runs there, so nothing is sent.
        assert!(timeout(Duration::from_millis(50), asked_once(&server)).await.is_err(), "it was sent");
        tokio::task::spawn_blocking(move || drop(first)).await.expect("the end of a runtime");
        for answer in asked.join_all().await {
            assert_eq!(answer.expect_err("nobody sent it").kind(), ErrorKind::Unavailable);
        }
        assert!(start.elapsed() < Duration::from_secs(1), "it took {:?}", start.elapsed());
        side_by_side(|task| {
            let store = Arc::clone(&store);
            async move { pair(&store, &task.to_string()).await }
        })
        .await;
    });
}

/// Ends when something is locked.
async fn asked_once(server: &Server) {
    let mut connection = server.raw();
    while raw::<Vec<String>>(&mut connection, "KEYS lockkit:*").is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A store whose user lacks permissions for some commands.
fn user_without(server: &Server, commands: &str) -> RedisStore {
    raw::<()>(&mut server.raw(), &format!("ACL SETUSER app on >pw ~* &* +@all {commands}"));
    let url = server.url("").replace("redis://", "redis://app:pw@");
    RedisStore::new(RedisConfig::from_url(&url).expect("url")).expect("a store")
}

#[tokio::test]
async fn what_was_carried_out_before_an_error_is_told() {
    let server = Server::start().await;
    let store = user_without(&server, "-pttl");
    let (mine, theirs) = (claim("mine"), claim("theirs"));
    hold(&store, &mine).await;
    hold(&store, &theirs).await;
    let (another, third) = (claim("another"), claim("theirs"));
    let (first, released, refused) =
        tokio::join!(attempt(&store, &another), store.release(&mine), attempt(&store, &third));
    granted(first.expect("acquire"));
    let refused = refused.expect_err("no PTTL");
    assert_eq!((refused.kind(), refused.effect()), (ErrorKind::Denied, Effect::None), "{refused}");
    assert!(matches!(released, Ok(Release::Released { .. })), "{released:?}");
}

/// Neither a lock nor a counter that a later grant would go on from.
#[tokio::test]
async fn a_refusal_leaves_nothing_behind() {
    let server = Server::start().await;
    let permitted = server.store().await;
    for command in ["get", "set", "incrby", "time", "pexpire"] {
        let store = user_without(&server, &format!("-{command}"));
        for clock in [FenceClock::Store, FenceClock::Floor] {
            let case = format!("{command} {clock:?}");
            let mine = claim(&case.replace(' ', "-"));
            let before = hold(&permitted, &mine).await;
            free(&permitted, &mine).await;
            raw::<()>(&mut server.raw(), &format!("DEL {{lockkit:{}}}:fence", mine.key));
            let fence = FenceRequest { floor: Fence::new(7), span: 2, clock };
            let wanted = lockkit_core::AcquireRequest { fence, ..request(&mine, Duration::ZERO) };
            // Some commands are not needed.
            let Err(error) = store.acquire(&wanted).await else { continue };
            assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{case}: {error}");
            let after = hold(&permitted, &claim(&case.replace(' ', "-"))).await;
            assert!(after.fence > before.fence || clock == FenceClock::Floor, "{case}: {before:?}, then {after:?}");
        }
    }
}

/// Rule R6: a user who may not look at a lock is not told that another has it, or that it is free.
#[tokio::test]
async fn a_user_who_may_not_look_is_told_nothing_about_the_lock() {
    let server = Server::start().await;
    let (permitted, store) = (server.store().await, user_without(&server, "-get"));
    let (mine, unused) = (claim("mine"), claim("unused"));
    hold(&permitted, &mine).await;
    let refused = store.release(&mine).await.expect_err("no GET");
    assert_eq!((refused.kind(), refused.effect()), (ErrorKind::Denied, Effect::None), "{refused}");
    for with_floor in [false, true] {
        let fence_floor = with_floor.then(|| Fence::new(7));
        let refused = renew(&store, &lockkit_core::Renewal { fence_floor, ..renewal(&mine) }).await;
        assert_eq!(refused.expect_err("no GET").kind(), ErrorKind::Denied);
    }
    for key in [&mine.key, &unused.key] {
        let refused = store.inspect(&Query::Keys(vec![key.clone()])).await.expect_err("no GET");
        assert_eq!((refused.kind(), refused.effect()), (ErrorKind::Denied, Effect::None), "{refused}");
    }
    free(&permitted, &mine).await;
}
