//! Readers, permits and strict order: beside each other, beside those that know nothing of them, and after what goes wrong.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Lock, LockStore, Locker, LossReason, Mode, Order, Outcome, Release, store::PLACE,
};
use lockkit_testkit::{
    crowd::{self, Random, Resource},
    faults::Proxy,
};

use crate::support::*;

/// One that waits and is not told of anything asks again after two seconds.
const TOLD: Duration = Duration::from_millis(1800);
/// No crowd needs so long for what is asked of it.
const HANGS: Duration = Duration::from_secs(60);
/// All that a lock may leave: its fence counter.
const LEFT: [&str; 1] = ["{lockkit:a}:fence"];

/// How long a crowd stays: for a while, and until there were enough grants.
#[derive(Clone, Copy)]
struct Stay {
    begun: Instant,
    least: Duration,
    enough: fn(&[u64; 3]) -> bool,
}

impl Stay {
    fn new(least: Duration, enough: fn(&[u64; 3]) -> bool) -> Self {
        Self { begun: Instant::now(), least, enough }
    }

    fn is_over(&self, resource: &Resource) -> bool {
        let stayed = self.begun.elapsed();
        let is_enough = || (self.enough)(&resource.grants());
        stayed >= HANGS || stayed >= self.least && is_enough()
    }
}

fn kind(locker: &Locker, number: u64) -> (Lock, Mode) {
    crowd::kind(locker, "a", number)
}

/// All keys of the server, once nothing is left but what may stay.
async fn empties(server: &Server) {
    let mut raw_connection = server.raw();
    eventually("nothing is left", async || {
        let mut keys: Vec<String> = raw(&mut raw_connection, "KEYS *");
        keys.sort();
        keys == LEFT
    })
    .await;
}

async fn crowd(server: &Server, lockers: Vec<Locker>, stay: Stay, ttl: Duration) {
    let resource = Arc::new(Resource::default());
    let seed = Instant::now().elapsed().subsec_nanos() ^ std::process::id();
    let visits = lockers.clone().into_iter().enumerate().map(|(number, locker)| {
        let (resource, mut random) = (Arc::clone(&resource), Random((u64::from(seed) << 8) + number as u64 + 1));
        tokio::spawn(async move {
            while !stay.is_over(&resource) {
                crowd::visit(&locker, "a", &resource, &mut random, ttl).await;
            }
        })
    });
    for visit in visits.collect::<Vec<_>>() {
        visit.await.expect("no two hold what excludes each other");
    }
    for locker in &lockers {
        locker.shutdown(ttl.max(2 * PLACE)).await.expect("all is released");
    }
    empties(server).await;
    let grants = resource.grants();
    println!("writers, readers, permits: {grants:?}");
    assert!((stay.enough)(&grants), "no more in {HANGS:?} than {grants:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn all_kinds_of_holders_exclude_each_other() {
    let server = Server::start().await;
    let mut lockers = Vec::new();
    for _ in 0..4 {
        let locker = Locker::new(server.store().await);
        lockers.extend([locker.clone(), locker]);
    }
    let stay = Stay::new(Duration::from_secs(3), |grants| grants.iter().all(|grants| *grants > 50));
    crowd(&server, lockers, stay, TTL).await;
}

/// Connections end all the time: messages, answers and releases get lost.
#[tokio::test(flavor = "multi_thread")]
async fn they_do_when_connections_are_cut() {
    let server = Server::start().await;
    let (mut lockers, mut proxies) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let proxy = Proxy::start(([127, 0, 0, 1], server.port()).into()).await.expect("proxy");
        let config = lockkit_redis::RedisConfig::new("127.0.0.1", proxy.addr().port());
        let config = config.timeout(Duration::from_millis(500));
        lockers.push(Locker::new(lockkit_redis::RedisStore::connect(config).await.expect("connect")));
        proxies.push(proxy);
    }
    let done = Arc::new(AtomicBool::new(false));
    let cuts = tokio::spawn({
        let done = Arc::clone(&done);
        async move {
            let mut random = Random(4711);
            while !done.load(SeqCst) {
                tokio::time::sleep(Duration::from_millis(random.below(60))).await;
                proxies[usize::try_from(random.below(4)).expect("small")].cut().await;
            }
        }
    });
    let lockers = [lockers.clone(), lockers].concat();
    let stay = Stay::new(Duration::from_secs(4), |grants| grants.iter().sum::<u64>() > 20);
    crowd(&server, lockers, stay, Duration::from_secs(3)).await;
    done.store(true, SeqCst);
    cuts.await.expect("cuts");
}

/// A client that waits, in the way that `number` says, and whose connection was closed.
async fn gone(server: &Server, holder: &Locker, number: u64) -> tokio::task::JoinHandle<()> {
    let proxy = Proxy::start(([127, 0, 0, 1], server.port()).into()).await.expect("proxy");
    let config = lockkit_redis::RedisConfig::new("127.0.0.1", proxy.addr().port());
    let locker = Locker::new(lockkit_redis::RedisStore::connect(config).await.expect("connect"));
    let waiting = tokio::spawn(async move { kind(&locker, number).0.acquire().await.map(drop).expect("acquire") });
    waits(holder, 1).await;
    proxy.refuse(true);
    proxy.cut().await;
    eventually("the server knows", async || turns(server) == 0).await;
    waiting
}

/// How many listen for their turn.
fn turns(server: &Server) -> usize {
    raw::<Vec<String>>(&mut server.raw(), "PUBSUB CHANNELS lockkit:%turn-*").len()
}

async fn waits(holder: &Locker, count: u32) {
    let lock = holder.lock("a");
    eventually("they wait", async || lock.inspect().await.expect("inspect").waiters >= Some(count)).await;
}

/// A waiter whose connection is closed is passed by without a pause, by those who wait behind it, and by those who only try.
#[tokio::test]
async fn a_waiter_that_is_gone_is_passed_by() {
    let server = Server::start().await;
    let (holder, next) = (Locker::new(server.store().await), Locker::new(server.store().await));
    let guard = holder.lock("a").fifo().acquire().await.expect("acquire");
    let dead = gone(&server, &holder, 0).await;
    let served = tokio::spawn(async move { next.lock("a").fifo().acquire().await });
    eventually("it waits", async || turns(&server) == 1).await;
    let released = Instant::now();
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    let guard = served.await.expect("task").expect("acquire");
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    let tried = holder.lock("a").fifo().try_acquire().await.expect("try").expect("nobody has it");
    assert!(released.elapsed() < TOLD, "{:?}", released.elapsed());
    assert_eq!(tried.release().await.expect("release"), Outcome::Released);
    dead.abort();
}

/// A place that nobody asked for in time is over, though nobody has removed it yet.
#[tokio::test]
async fn a_place_that_is_over_is_not_shown() {
    let server = Server::start().await;
    let (holder, waiter) = (Locker::new(server.store().await), Locker::new(server.store().await));
    let _guard = holder.lock("a").fifo().acquire().await.expect("acquire");
    let mode = kind(&waiter, 2).1;
    let waiting = tokio::spawn(async move { kind(&waiter, 2).0.acquire().await.map(drop) });
    waits(&holder, 1).await;
    // Forty places that ended long ago, more than one look takes, in front of the one that waits.
    let [queue, places] = ["queue", "places"].map(|word| format!("{{lockkit:a}}:{word}:fence"));
    for number in 0..40 {
        let token = format!("{number:032x}");
        raw::<u32>(&mut server.raw(), &format!("ZADD {queue} {number} {token}"));
        raw::<u32>(&mut server.raw(), &format!("HSET {places} {token} x|1000|1|1|1000|0|:1:gone"));
    }
    let shown = holder.lock("a").inspect_queue().await.expect("inspect").queue.expect("a queue");
    assert_eq!(shown.iter().map(|waiter| waiter.mode).collect::<Vec<_>>(), [mode]);
    waiting.abort();
}

/// A writer that is gone does not keep readers from those that hold the lock.
#[tokio::test]
async fn readers_pass_a_writer_that_is_gone() {
    let server = Server::start().await;
    let (holder, next) = (Locker::new(server.store().await), Locker::new(server.store().await));
    let _reader = kind(&holder, 2).0.acquire().await.expect("acquire");
    let dead = gone(&server, &holder, 0).await;
    let another = kind(&next, 2).0.acquire_within(TOLD).await.expect("ask");
    assert!(another.is_some_and(|guard| guard.is_held()));
    dead.abort();
}

/// More than the server grants in one step.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_and_fifty_readers_get_in_behind_a_writer() {
    let server = Server::start().await;
    let (holder, readers) = (Locker::new(server.store().await), Locker::new(server.store().await));
    let guard = holder.lock("a").fifo().acquire().await.expect("acquire");
    let inside = Arc::new(tokio::sync::Barrier::new(150));
    let tasks: Vec<_> = (0..150)
        .map(|_| {
            let (lock, inside) = (kind(&readers, 2).0, Arc::clone(&inside));
            tokio::spawn(async move {
                let guard = lock.acquire().await.expect("acquire");
                inside.wait().await;
                assert_eq!(guard.release().await.expect("release"), Outcome::Released);
            })
        })
        .collect();
    waits(&holder, 150).await;
    let released = Instant::now();
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    for task in tasks {
        task.await.expect("all were inside together");
    }
    assert!(released.elapsed() < TOLD, "{:?}", released.elapsed());
}

/// A server that lost the last second has readers again that had ended. Those who join them are above all that was given out since.
#[tokio::test]
async fn readers_that_came_back_let_others_join_above_writers_since() {
    let server = Server::start().await;
    for count in 1..=2 {
        come_back(&server, count).await;
    }
}

async fn come_back(server: &Server, count: usize) {
    let mut root = server.raw();
    let before = Locker::new(server.store().await);
    let mut readers = Vec::new();
    for _ in 0..count {
        readers.push(kind(&before, 2).0.acquire().await.expect("acquire"));
    }
    // What there is of a lock that one claim alone shares.
    let alone = ["lockkit:a", "{lockkit:a}:fence"];
    let parts = [&alone[..], &["{lockkit:a}:members:fence", "{lockkit:a}:leases:fence"]].concat();
    let parts = if count == 1 { &alone[..] } else { &parts };
    assert_eq!(raw::<Vec<String>>(&mut root, "KEYS *").len(), parts.len());
    let saved: Vec<Vec<u8>> =
        parts.iter().map(|key| redis::cmd("DUMP").arg(key).query(&mut root).expect("dump")).collect();
    for reader in readers {
        assert_eq!(reader.release().await.expect("release"), Outcome::Released);
    }
    let writer = before.lock("a").acquire().await.expect("acquire");
    let fence = writer.fence();
    assert_eq!(writer.release().await.expect("release"), Outcome::Released);
    for (key, value) in parts.iter().zip(saved) {
        let mut restore = redis::cmd("RESTORE");
        restore.arg(key).arg(20_000).arg(value).arg("REPLACE");
        restore.query::<()>(&mut root).expect("restore");
    }
    // A connection does not outlive its server.
    let after = Locker::new(server.store().await);
    let reader = kind(&after, 2).0.acquire().await.expect("acquire");
    assert!(reader.fence() > fence, "{} after {fence}", reader.fence());
    raw::<()>(&mut root, "DEL lockkit:a");
}

/// The lease of a claim that shares a lock with nobody is in the lock's own value, until anything but its end is asked for.
#[tokio::test]
async fn one_that_shares_a_lock_alone_is_one_of_those_that_share_it() {
    let server = Server::start().await;
    let (store, mut root) = (server.store().await, server.raw());
    let permit = Mode::Permit { limit: NonZeroU32::MIN.saturating_add(1) };
    for mode in [Mode::Shared, permit] {
        let [first, second, writer] = [mode, mode, Mode::Exclusive].map(|mode| Claim { mode, ..claim("a") });
        for next in 0..6 {
            let mine = hold(&store, &first).await;
            assert_eq!(raw::<u32>(&mut root, "EXISTS {lockkit:a}:members:fence {lockkit:a}:leases:fence"), 0);
            let holders = Locker::new(server.store().await).lock("a").inspect().await.expect("inspect").holders;
            assert!(matches!(&holders[..], [one] if one.token == Some(first.token) && one.mode == mode), "{holders:?}");
            match next {
                // It ends below.
                0 => {}
                1 => assert_eq!(held(renew(&store, &renewal(&first)).await).fence, mine.fence),
                2 => assert_eq!(hold(&store, &first).await.fence, mine.fence),
                3 => assert!(matches!(attempt(&store, &writer).await, Ok(Attempt::Contended(_)))),
                4 => {
                    let another = hold(&store, &second).await;
                    assert_eq!(another.fence == mine.fence, mode == Mode::Shared, "{another:?} {mine:?}");
                    free(&store, &first).await;
                    assert!(matches!(attempt(&store, &writer).await, Ok(Attempt::Contended(_))));
                    assert_eq!(held(renew(&store, &renewal(&second)).await).fence, another.fence);
                    hold(&store, &first).await;
                    free(&store, &second).await;
                }
                // Another's end is not its own.
                _ => assert_eq!(store.release(&second).await.expect("release"), Release::NotHeld(LossReason::Taken)),
            }
            free(&store, &first).await;
            assert_eq!(lost(renew(&store, &renewal(&first)).await), LossReason::Gone);
            empties(&server).await;
        }
        // It is waited for in order, and lapses in its time.
        let short = AcquireRequest { ttl: Duration::from_millis(300), ..request(&first, Duration::ZERO) };
        let asked = Instant::now();
        granted(store.acquire(&short).await.expect("acquire"));
        in_order(&store, &writer).await;
        assert!(asked.elapsed() >= short.ttl, "{:?}", asked.elapsed());
        free(&store, &writer).await;
    }
}

/// The server's clock was an hour ahead when the leases were granted, and is set right: a renewal ends them in their time, as it does
/// with one that holds the lock alone.
#[tokio::test]
async fn a_renewed_lease_of_several_lasts_no_longer_than_its_ttl_after_the_clock_was_set_back() {
    let server = Server::start().await;
    let (store, mut root) = (server.store().await, server.raw());
    for count in [1, 2] {
        let readers: Vec<_> = (0..count).map(|_| Claim { mode: Mode::Shared, ..claim("a") }).collect();
        for reader in &readers {
            hold(&store, reader).await;
        }
        for key in ["lockkit:a", "{lockkit:a}:members:fence", "{lockkit:a}:leases:fence"] {
            raw::<i64>(&mut root, &format!("PEXPIRE {key} 3600000"));
        }
        for reader in readers.iter().filter(|_| count > 1) {
            raw::<f64>(&mut root, &format!("ZINCRBY {{lockkit:a}}:members:fence 3600000 {}", reader.token.reveal()));
        }
        for reader in &readers {
            held(renew(&store, &renewal(reader)).await);
        }
        let left = raw::<u64>(&mut root, "PTTL lockkit:a");
        assert!(left <= 10_001, "{left} ms, renewed for {TTL:?}");
        for reader in &readers {
            free(&store, reader).await;
        }
    }
}

/// What only looks like the lease of one that shares the lock alone is another client's, and stays as it is.
#[tokio::test]
async fn what_is_no_lease_of_ours_is_left_alone() {
    let server = Server::start().await;
    let (store, mut root) = (server.store().await, server.raw());
    let (token, reader) = ("0123456789abcdef".repeat(2), Claim { mode: Mode::Shared, ..claim("a") });
    for value in
        ["#s:abc:1", "#s:abc:1:2:3:h", "#s::1:2:3:h", &format!("#x:{token}:1:2:3:h"), &format!("#s:{token}:1:2")]
    {
        raw::<()>(&mut root, &format!("SET lockkit:a {value}"));
        for claim in [&reader, &claim("a")] {
            for order in [Order::Any, Order::Fifo] {
                let asked = AcquireRequest { order, ..request(claim, Duration::ZERO) };
                assert!(matches!(store.acquire(&asked).await, Ok(Attempt::Contended(_))), "{value}");
            }
        }
        assert_eq!(lost(renew(&store, &renewal(&reader)).await), LossReason::Taken, "{value}");
        assert_eq!(store.release(&reader).await.expect("release"), Release::NotHeld(LossReason::Taken), "{value}");
        assert_eq!(raw::<String>(&mut root, "GET lockkit:a"), value);
    }
    // A lease whose end is not known, for somebody took it away.
    raw::<()>(&mut root, &format!("SET lockkit:a #s:{token}:1:2:3:h"));
    assert!(matches!(attempt(&store, &claim("a")).await, Ok(Attempt::Contended(_))));
    assert!(matches!(attempt(&store, &reader).await, Ok(Attempt::Granted(_))));
    free(&store, &reader).await;
    assert!(matches!(attempt(&store, &claim("a")).await, Ok(Attempt::Contended(_))));
}

/// In its last millisecond a lease has no whole one left.
#[tokio::test]
async fn one_that_shares_a_lock_alone_can_be_met_in_its_last_millisecond() {
    let server = Server::start().await;
    let (store, mut root) = (server.store().await, server.raw());
    let (lease, reader) = (format!("#s:{}:1:2:3:h", "0123456789abcdef".repeat(2)), claim("a"));
    let reader = Claim { mode: Mode::Shared, ..reader };
    for _ in 0..500 {
        raw::<()>(&mut root, &format!("SET lockkit:a {lease} PX 1"));
        granted(attempt(&store, &reader).await.expect("an answer"));
        free(&store, &reader).await;
    }
}

/// The separators of what is stored may stand in a prefix.
#[tokio::test]
async fn a_prefix_may_have_any_characters() {
    let server = Server::start().await;
    let connect = || async {
        let config = server.config().prefix("a|b:1|");
        Locker::new(lockkit_redis::RedisStore::connect(config).await.expect("connect"))
    };
    let (one, other) = (connect().await, connect().await);
    let guard = one.lock("a").fifo().acquire().await.expect("acquire");
    let waiting = tokio::spawn(async move { other.lock("a").fifo().acquire().await });
    waits(&one, 1).await;
    let released = Instant::now();
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    assert!(waiting.await.expect("task").expect("acquire").is_held());
    assert!(released.elapsed() < TOLD, "{:?}", released.elapsed());
}

/// A user who may not use channels hands the lock over all the same. The next one comes a little later.
#[tokio::test]
async fn a_release_that_may_tell_nobody_is_one() {
    let server = Server::start().await;
    raw::<()>(
        &mut server.raw(),
        &format!("ACL SETUSER app on >pw resetchannels ~lockkit:* ~{{lockkit:* {PERMISSIONS} {QUEUE_PERMISSIONS}"),
    );
    let config = server.config().username("app").password("pw");
    let mute = Locker::new(lockkit_redis::RedisStore::connect(config).await.expect("connect"));
    let other = Locker::new(server.store().await);
    let guard = mute.lock("a").fifo().acquire().await.expect("acquire");
    let waiting = tokio::spawn(async move { other.lock("a").fifo().acquire_within(Duration::from_secs(5)).await });
    eventually("it waits", async || turns(&server) == 1).await;
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    assert!(waiting.await.expect("task").expect("ask").is_some_and(|guard| guard.is_held()));
    // It can't wait, and leaves nothing in the queue.
    let holder = Locker::new(server.store().await);
    let guard = holder.lock("a").fifo().acquire().await.expect("acquire");
    let error = mute.lock("a").fifo().ttl(Duration::from_secs(1)).acquire().await.expect_err("it can't listen");
    assert_eq!(error.kind(), lockkit_core::ErrorKind::Denied, "{error}");
    mute.shutdown(TTL).await.expect("all is released");
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    empties(&server).await;
}

/// A reader that asks for no order waits without a place, and leaves none.
#[tokio::test]
async fn without_an_order_there_is_no_place() {
    let server = Server::start().await;
    let (store, holder) = (server.store().await, Locker::new(server.store().await));
    let guard = holder.lock("a").acquire().await.expect("acquire");
    let mut asked = request(&claim("a"), TTL);
    asked.claim.mode = Mode::Shared;
    contended(store.acquire(&asked).await.expect("acquire"));
    assert_eq!(turns(&server), 0);
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    empties(&server).await;
}

/// Those who queue hear at once of a release by those who don't, and the reverse.
#[tokio::test]
async fn both_hear_of_each_others_releases() {
    let server = Server::start().await;
    let (one, other) = (Locker::new(server.store().await), Locker::new(server.store().await));
    let lock = |locker: &Locker, fifo: bool| if fifo { locker.lock("a").fifo() } else { locker.lock("a") };
    for fifo in [true, false] {
        let guard = lock(&one, fifo).acquire().await.expect("acquire");
        let waiting = tokio::spawn({
            let lock = lock(&other, !fifo);
            async move { lock.acquire().await }
        });
        eventually("it listens", async || subscribers(&mut server.raw(), "a") == 1).await;
        let released = Instant::now();
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
        let guard = waiting.await.expect("task").expect("acquire");
        assert!(released.elapsed() < TOLD, "{:?}", released.elapsed());
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    }
}

/// A client that sets the key of a lock, as any other library does, is kept out by readers, and keeps them out.
#[tokio::test]
async fn readers_exclude_clients_that_know_nothing_of_them() {
    let server = Server::start().await;
    let (locker, mut other) = (Locker::new(server.store().await), server.raw());
    let reader = locker.rw_lock("a").read().fifo().acquire().await.expect("acquire");
    assert_eq!(raw::<Option<String>>(&mut other, "SET lockkit:a mine NX PX 500"), None);
    assert_eq!(reader.release().await.expect("release"), Outcome::Released);
    assert_eq!(raw::<Option<String>>(&mut other, "SET lockkit:a mine NX PX 500").as_deref(), Some("OK"));
    assert!(locker.rw_lock("a").read().fifo().try_acquire().await.expect("try").is_none());
    raw::<()>(&mut other, "DEL lockkit:a");
    assert!(locker.rw_lock("a").read().fifo().try_acquire().await.expect("try").is_some());
}

/// A user who may do no more than plain locks need is refused the others, and nothing is left of them.
#[tokio::test]
async fn a_user_may_be_refused_what_they_need() {
    let server = Server::start().await;
    let mut root = server.raw();
    let user = format!("ACL SETUSER app on >pw ~lockkit:* ~{{lockkit:* &lockkit:* {PERMISSIONS}");
    let connect = || async {
        let config = server.config().username("app").password("pw");
        Locker::new(lockkit_redis::RedisStore::connect(config).await.expect("connect"))
    };
    raw::<()>(&mut root, &user);
    let locker = connect().await;
    for number in 0..7 {
        let (lock, mode) = kind(&locker, number);
        let error = lock.try_acquire().await.expect_err("refused");
        assert_eq!(error.kind(), lockkit_core::ErrorKind::Denied, "{mode}: {error}");
    }
    assert_eq!(locker.lock("a").acquire().await.expect("acquire").release().await.expect("release"), Outcome::Released);
    // Who holds the lock can be read all the same.
    let guard = locker.lock("a").acquire().await.expect("acquire");
    let state = locker.lock("a").inspect_queue().await.expect("inspect");
    assert!(state.holders.len() == 1 && state.queue.is_none(), "{state:?}");
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    // What docs/backends/redis.md asks for.
    raw::<()>(&mut root, &format!("{user} {QUEUE_PERMISSIONS}"));
    let locker = connect().await;
    assert!(locker.lock("a").inspect_queue().await.expect("inspect").queue.is_some_and(|queue| queue.is_empty()));
    for number in 0..7 {
        let guard = kind(&locker, number).0.acquire().await.expect("acquire");
        let waiting = kind(&locker, 0).0.acquire_within(Duration::from_millis(20)).await.expect("ask");
        assert!(waiting.is_none());
        guard.renew().await.expect("renew");
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    }
    empties(&server).await;
}

/// A lease that shares its lock can be ended by its token alone.
#[tokio::test]
async fn the_lease_of_a_reader_can_be_broken() {
    let server = Server::start().await;
    let (mine, other) = (Locker::new(server.store().await), Locker::new(server.store().await));
    let reader = mine.rw_lock("a").read().fifo().acquire().await.expect("acquire");
    let holders = other.lock("a").inspect().await.expect("inspect").holders;
    let [holder] = &holders[..] else { panic!("{holders:?}") };
    assert_eq!((holder.mode, holder.fence), (Mode::Shared, Some(reader.fence())));
    let released = other.break_lock("a", holder.token.expect("token")).await.expect("break");
    assert!(matches!(released, lockkit_core::Release::Released { .. }), "{released:?}");
    assert!(matches!(reader.release().await.expect("release"), Outcome::NotHeld(_)));
}

/// What is left of readers whose lock was deleted by hand comes to no new life with the next ones.
#[tokio::test]
async fn members_of_a_group_that_ended_are_lost() {
    let server = Server::start().await;
    let (store, other) = (server.store().await, Locker::new(server.store().await));
    let mut mine = request(&claim("a"), Duration::ZERO);
    (mine.claim.mode, mine.order) = (Mode::Shared, lockkit_core::Order::Fifo);
    granted(store.acquire(&mine).await.expect("acquire"));
    held(renew(&store, &renewal(&mine.claim)).await);
    raw::<()>(&mut server.raw(), "DEL lockkit:a");
    assert_eq!(lost(renew(&store, &renewal(&mine.claim)).await), LossReason::Gone);
    let writer = other.lock("a").acquire().await.expect("acquire");
    assert_eq!(lost(renew(&store, &renewal(&mine.claim)).await), LossReason::Taken);
    assert_eq!(writer.release().await.expect("release"), Outcome::Released);
    let reader = other.rw_lock("a").read().fifo().acquire().await.expect("acquire");
    assert_eq!(lost(renew(&store, &renewal(&mine.claim)).await), LossReason::Taken);
    assert_eq!(reader.release().await.expect("release"), Outcome::Released);
}

/// A hand-over costs the same, however many wait: two scripts, and one message to one client.
#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_wakes_one_of_a_thousand() {
    let server = Server::start().await;
    let mut costs = Vec::new();
    for waiters in [10, 100, 1000] {
        let holder = Locker::new(server.store().await);
        let guard = holder.lock("a").fifo().acquire().await.expect("acquire");
        let mut lockers = Vec::new();
        for _ in 0..10 {
            lockers.push(Locker::new(server.store().await));
        }
        let served = Arc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..waiters)
            .map(|number| {
                let (lock, served) = (lockers[number % 10].lock("a").fifo(), Arc::clone(&served));
                tokio::spawn(async move {
                    let guard = lock.acquire().await.expect("acquire");
                    served.fetch_add(1, SeqCst);
                    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
                })
            })
            .collect();
        let lock = holder.lock("a");
        let wanted = u32::try_from(waiters).expect("small");
        eventually("they wait", async || lock.inspect().await.expect("inspect").waiters == Some(wanted)).await;
        let calls = |command: &str| {
            let stats: String = raw(&mut server.raw(), "INFO commandstats");
            let found = stats.lines().find_map(|line| line.strip_prefix(&format!("cmdstat_{command}:calls=")));
            found.unwrap_or("0,").split(',').next().and_then(|calls| calls.parse::<u64>().ok()).expect("a number")
        };
        let (before, messages, begun) = (calls("evalsha"), calls("publish"), Instant::now());
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
        for task in tasks {
            task.await.expect("served");
        }
        // Each that waits asks every two seconds, to keep its place.
        let refreshes = begun.elapsed().as_secs() / 2 * waiters as u64;
        let each = (calls("evalsha") - before).saturating_sub(refreshes) / waiters as u64;
        let messages = calls("publish") - messages;
        println!("{waiters} waiters: {each} scripts for each, {messages} messages and {:?} for all", begun.elapsed());
        costs.push(each);
        // To the next one each, and when the last has left, to those who wait in no order.
        assert_eq!(messages, waiters as u64 + 1, "messages for {waiters}");
    }
    assert!(costs.iter().all(|each| *each <= 4), "{costs:?}");
}

fn in_place_of(from: &Claim, next: &Claim) -> AcquireRequest {
    AcquireRequest { from: Some(from.token), ..request(next, Duration::ZERO) }
}

#[tokio::test]
async fn nobody_is_named_as_the_holder_of_a_lock_whose_lease_is_gone() {
    let server = Server::start().await;
    let (store, gone) = (server.store().await, claim("a"));
    for next in [claim("a"), Claim { mode: Mode::Shared, ..claim("a") }] {
        let answer = contended(store.acquire(&in_place_of(&gone, &next)).await.expect("acquire"));
        assert_eq!((answer.holder, answer.retry_after), (None, None), "{next:?}");
    }
}

/// It is released as any other whose lease is not there: nothing is looked for in a queue.
#[tokio::test]
async fn a_lease_in_order_whose_place_was_taken_is_forgotten() {
    let server = Server::start().await;
    let (store, mine, next) = (server.store().await, claim("a"), claim("a"));
    in_order(&store, &mine).await;
    granted(store.acquire(&in_place_of(&mine, &next)).await.expect("acquire"));
    let mut connection = server.raw();
    let mut looked = || raw::<String>(&mut connection, "INFO commandstats").contains("cmdstat_zrem:");
    assert!(!looked(), "nobody has left a queue");
    assert_eq!(store.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Taken));
    assert!(!looked(), "it was not forgotten");
    free(&store, &next).await;
}

/// What goes wrong with the next in the queue is no answer to the one who was granted the lock.
#[tokio::test]
async fn an_error_with_the_next_in_the_queue_takes_no_grant_back() {
    let server = Server::start().await;
    let store = server.store().await;
    let (mut connection, other) = (server.raw(), claim("a").token.reveal());
    let mut listening = server.raw();
    let mut listening = listening.as_pubsub();
    listening.subscribe("c").expect("subscribe");
    let mut spoil_queue = || {
        raw::<()>(&mut connection, &format!("ZADD {{lockkit:a}}:queue:fence 1 {other}"));
        // Its span is no number.
        let place = format!("s|10000|x|1|{}|1|c:1:other", u64::MAX >> 12);
        raw::<()>(&mut connection, &format!("HSET {{lockkit:a}}:places:fence {other} {place}"));
    };
    let (mine, next) = (claim("a"), Claim { mode: Mode::Shared, ..claim("a") });
    hold(&store, &mine).await;
    spoil_queue();
    granted(store.acquire(&in_place_of(&mine, &next)).await.expect("takes the place"));
    spoil_queue();
    granted(attempt(&store, &next).await.expect("the same claim again"));
    free(&store, &next).await;
}

#[tokio::test]
async fn what_a_store_can_do_is_known_without_a_server() {
    assert_eq!(Server::start().await.store().await.info().capability, lockkit_redis::RedisStore::CAPABILITY);
}
