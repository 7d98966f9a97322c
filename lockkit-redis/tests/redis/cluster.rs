//! The store on a cluster.

use std::{
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    Claim, Effect, ErrorKind, Fencing, LockStore, Locker, LossReason, Query, Release, Renewal, Renewed,
};
use lockkit_redis::{RedisConfig, RedisStore};
use lockkit_testkit::servers::{RedisCluster, RedisOptions, RedisServer};

use crate::support::*;

async fn members() -> RedisCluster {
    RedisCluster::start(flavor(), false).await.expect("servers")
}

async fn store(all: &RedisCluster) -> RedisStore {
    RedisStore::from_url(&format!("{}?failover_pause=no", all.url())).await.expect("connect")
}

/// Names of locks of which each of the three members serves some.
fn names() -> Vec<String> {
    (0..60).map(|i| format!("lock {{{i}}}")).collect()
}

fn lock_key(name: &str) -> String {
    format!("lockkit:{}", name.replace('{', "%7B").replace('}', "%7D"))
}

/// Members that an operation has found are connected to where the store was made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_outlive_the_runtime_of_the_operation_that_found_the_members() {
    let all = members().await;
    let config = RedisConfig::from_url(&format!("{}?failover_pause=no", all.url())).expect("url");
    let (store, mine) = (RedisStore::new(config).expect("no I/O"), claim("a"));
    tokio::task::block_in_place(|| {
        let other = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        other.block_on(hold(&store, &mine));
    });
    held(renew(&store, &renewal(&mine)).await);
    free(&store, &mine).await;
}

#[tokio::test]
async fn the_five_questions_are_answered_wherever_the_lock_is() {
    let all = members().await;
    let (store, other) = (store(&all).await, store(&all).await);
    let claims: Vec<Claim> = names().iter().map(|name| claim(name)).collect();
    let mut first = Vec::new();
    for claim in &claims {
        first.push(hold(&store, claim).await.fence);
    }
    for member in all.members() {
        let keys: usize = member.command(&["DBSIZE"]).await.expect("DBSIZE").parse().expect("number");
        assert!(keys > 10, "every member has some: {keys}");
    }
    let renewals: Vec<Renewal> = claims
        .iter()
        .zip(&first)
        .enumerate()
        .map(|(i, (claim, fence))| {
            let floor = (i % 2 == 0).then(|| fence.offset(100));
            Renewal { depth: 2, ttl: TTL + Duration::from_secs(i as u64 % 3), fence_floor: floor, ..renewal(claim) }
        })
        .collect();
    for (renewed, fence) in store.renew(&renewals).await.into_iter().zip(&first) {
        assert_eq!(held(renewed).fence, *fence);
    }
    let states = other.inspect(&Query::Prefix("lock".into())).await.expect("inspect");
    assert_eq!(states.len(), claims.len());
    assert!(states.is_sorted_by_key(|state| state.key.clone()) && states.iter().all(|s| s.holders[0].depth == 2));
    let keys: Vec<_> = claims.iter().rev().map(|claim| claim.key.clone()).collect();
    let states = other.inspect(&Query::Keys(keys.clone())).await.expect("inspect");
    assert!(states.iter().zip(&keys).all(|(state, key)| state.key == *key && state.holders.len() == 1));
    contended(attempt(&other, &claim("lock {7}")).await.expect("acquire"));
    for claim in &claims {
        free(&store, claim).await;
    }
    assert!(other.inspect(&Query::Prefix(String::new())).await.expect("inspect").is_empty());
    for (claim, before) in claims.iter().zip(&first) {
        assert!(hold(&other, claim).await.fence > *before);
    }
}

#[tokio::test]
async fn waiters_are_woken_wherever_the_lock_is() {
    let all = members().await;
    let (store, other) = (store(&all).await, Arc::new(store(&all).await));
    for name in names().iter().take(9) {
        let mine = claim(name);
        hold(&store, &mine).await;
        let (waiter, wanted) = (Arc::clone(&other), request(&claim(name), TTL));
        let waiting = tokio::spawn(async move { waiter.acquire(&wanted).await });
        until_one_waits(&store, &mine).await;
        let start = Instant::now();
        assert_eq!(store.release(&mine).await.expect("release"), Release::Released { waiters: Some(1) });
        granted(waiting.await.expect("task").expect("acquire"));
        assert!(start.elapsed() < Duration::from_secs(1), "woken, not by chance");
    }
}

#[tokio::test]
async fn a_moved_slot_is_followed() {
    let all = members().await;
    let (store, other) = (store(&all).await, Arc::new(store(&all).await));
    let (from, slot) =
        (all.primary_of("lockkit:a").await.expect("primary"), all.slot_of("lockkit:a").await.expect("slot"));
    let mine = claim("a");
    let before = hold(&store, &mine).await;
    let (waiter, wanted) = (Arc::clone(&other), request(&claim("a"), TTL));
    let waiting = tokio::spawn(async move { waiter.acquire(&wanted).await });
    until_one_waits(&store, &mine).await;
    all.move_slot(slot, from, (from + 1) % 3).await.expect("move");
    // It came along and excludes others, but only the server that granted it may renew it.
    contended(attempt(&store, &claim("a")).await.expect("acquire"));
    assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Gone);
    let state = store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect").remove(0);
    assert_eq!(state.holders[0].token, Some(mine.token));
    // Messages go to all members, so the waiter hears of the release at the former one.
    free(&store, &mine).await;
    let next = granted(waiting.await.expect("task").expect("acquire"));
    assert!(next.fence > before.fence);
    held(renew(&other, &renewal(&next.claim)).await);
}

#[tokio::test]
async fn a_batch_of_renewals_survives_a_move() {
    let all = members().await;
    let store = store(&all).await;
    let claims: Vec<Claim> = names().iter().map(|name| claim(name)).collect();
    for claim in &claims {
        hold(&store, claim).await;
    }
    let moving = lock_key(&names()[0]);
    let (from, slot) = (all.primary_of(&moving).await.expect("primary"), all.slot_of(&moving).await.expect("slot"));
    all.move_slot(slot, from, (from + 1) % 3).await.expect("move");
    let renewals: Vec<Renewal> = claims.iter().map(renewal).collect();
    let answers = store.renew(&renewals).await;
    let lost = answers.iter().filter(|answer| matches!(answer, Ok(Renewed::Lost(LossReason::Gone)))).count();
    let held = answers.iter().filter(|answer| matches!(answer, Ok(Renewed::Held(_)))).count();
    assert_eq!((lost, held), (1, claims.len() - 1), "{answers:?}");
}

/// While a slot is on its way the member that has it points to the other one for what it does not have.
#[tokio::test]
async fn a_slot_on_its_way_is_asked_for_at_both_ends() {
    let all = members().await;
    let store = store(&all).await;
    let (from, slot) =
        (all.primary_of("lockkit:a").await.expect("primary"), all.slot_of("lockkit:a").await.expect("slot"));
    let to = (from + 1) % 3;
    let mine = claim("a");
    hold(&store, &mine).await;
    all.begin_to_move(slot, from, to).await.expect("begin");
    held(renew(&store, &renewal(&mine)).await);
    contended(attempt(&store, &claim("a")).await.expect("acquire"));
    // The keys are at the other end now, the slot is not.
    let port = all.members()[to].port().to_string();
    let words = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS", "lockkit:a", "{lockkit:a}:fence"];
    all.members()[from].command(&words).await.expect("migrate");
    contended(attempt(&store, &claim("a")).await.expect("acquire"));
    // Nobody can listen there yet, so who waits is sent back to ask again.
    let waiting = contended(store.acquire(&request(&claim("a"), TTL)).await.expect("acquire"));
    assert!(waiting.retry_after.is_some_and(|after| after < Duration::from_secs(1)), "{waiting:?}");
    assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Gone);
    free(&store, &mine).await;
    // A new lock needs both its keys in one place, so it has to wait for the end of the move.
    let error = attempt(&store, &claim("a")).await.expect_err("on its way");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    all.move_slot(slot, from, to).await.expect("move");
    hold(&store, &claim("a")).await;
}

#[tokio::test]
async fn one_member_down_harms_only_its_own_locks() {
    let all = members().await;
    // Else the others would refuse, too.
    for member in all.members() {
        member.command(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).await.expect("set");
    }
    let url = format!("{}?failover_pause=no&timeout=1s", all.url());
    let store = RedisStore::from_url(&url).await.expect("connect");
    let mut claims = Vec::new();
    for name in names() {
        let claim = claim(&name);
        hold(&store, &claim).await;
        claims.push(claim);
    }
    all.members()[0].kill().await.expect("kill");
    let renewals: Vec<Renewal> = claims.iter().map(renewal).collect();
    let answers = store.renew(&renewals).await;
    let held = answers.iter().filter(|answer| matches!(answer, Ok(Renewed::Held(_)))).count();
    assert!(held > 20 && answers.iter().all(|answer| !matches!(answer, Ok(Renewed::Lost(_)))), "{answers:?}");
    for (answer, claim) in answers.iter().zip(&claims) {
        match answer {
            Ok(_) => free(&store, claim).await,
            Err(e) => assert_eq!(e.kind(), ErrorKind::Unavailable, "{e}"),
        }
    }
    // A store that starts now finds the others by itself.
    let late = RedisStore::from_url(&url).await.expect("connect");
    assert!(late.warnings().iter().any(|warning| warning.contains("can't be asked")), "{:?}", late.warnings());
}

/// Ends a member, and has those who connect to it hear nothing, as where packets to a machine are dropped. It blocks the thread: nobody
/// may be refused in between.
fn silence(member: &RedisServer) -> TcpListener {
    let mut last = TcpStream::connect(member.addr()).expect("connect");
    last.write_all(b"SHUTDOWN NOSAVE\r\n").expect("send");
    _ = last.read_to_end(&mut Vec::new());
    loop {
        match TcpListener::bind(member.addr()) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse => std::thread::yield_now(),
            bound => return bound.expect("its port"),
        }
    }
}

#[tokio::test]
async fn a_member_that_can_not_be_reached_keeps_no_others_from_being_renewed() {
    const SHORT: Duration = Duration::from_millis(1500);
    let all = members().await;
    for member in all.members() {
        member.command(&["CONFIG", "SET", "cluster-require-full-coverage", "no"]).await.expect("set");
    }
    let (store, locker) = (store(&all).await, Locker::new(store(&all).await));
    let (mut claims, mut guards) = (Vec::new(), Vec::new());
    for (index, name) in names().iter().enumerate() {
        let member = all.primary_of(&lock_key(name)).await.expect("primary");
        if index % 2 == 0 {
            guards.push((member, locker.lock(name).ttl(SHORT).acquire().await.expect("acquire")));
        } else {
            claims.push((member, hold(&store, &claim(name)).await.claim));
        }
    }
    let _silent = silence(&all.members()[0]);
    let renewals: Vec<Renewal> = claims.iter().map(|(_, claim)| Renewal { ttl: SHORT, ..renewal(claim) }).collect();
    // The first one may only find out that the connection is broken.
    _ = store.renew(&renewals).await;
    let started = Instant::now();
    for ((member, _), answer) in claims.iter().zip(store.renew(&renewals).await) {
        match answer {
            Err(e) if *member == 0 => assert_eq!((e.kind(), e.effect()), (ErrorKind::TimedOut, Effect::None), "{e}"),
            answer => _ = held(answer),
        }
    }
    assert!(started.elapsed() < SHORT / 3, "{:?}", started.elapsed());
    tokio::time::sleep(SHORT * 3).await;
    for (member, guard) in &guards {
        assert_eq!(guard.is_held(), *member != 0, "{guard:?} at {member}");
    }
}

/// Whoever asks waits for its own bound and a little more, and not until all members have been asked for the map in vain.
#[tokio::test]
async fn silent_members_are_not_waited_for_twice() {
    let all = members().await;
    let store = RedisStore::from_url(&format!("{}?failover_pause=no", all.url())).await.expect("connect");
    hold(&store, &claim("a")).await;
    for member in all.members() {
        member.freeze().await.expect("freeze");
    }
    for _ in 0..2 {
        let started = Instant::now();
        let error = attempt(&store, &claim("b")).await.expect_err("all are silent");
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        // The bound is 2 s, and a quarter of it for the map.
        assert!(started.elapsed() < Duration::from_millis(3500), "{:?}", started.elapsed());
    }
}

#[tokio::test]
async fn any_member_leads_to_all() {
    let all = members().await;
    let one = all.members()[2].addr();
    let url = format!("redis+cluster://127.0.0.1:1,{one}?failover_pause=no");
    let store = RedisStore::from_url(&url).await.expect("connect");
    for name in names() {
        hold(&store, &claim(&name)).await;
    }
}

#[tokio::test]
async fn what_it_can_do_is_said_and_what_it_is_not_is_refused() {
    let store = RedisStore::new(RedisConfig::cluster([("a", 1)])).expect("no I/O");
    assert_eq!((store.info().scheme, &*store.info().name), ("redis+cluster", "redis cluster a:1"));
    assert_eq!(store.info().capability.fencing, Fencing::BestEffort);
    let server = RedisServer::start(RedisOptions::default()).await.expect("server");
    let url = format!("redis+cluster://{}", server.addr());
    let error = RedisStore::from_url(&url).await.expect_err("no cluster");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None), "{error}");
    assert!(error.message().contains("not part of a cluster"), "{error}");
    let all = members().await;
    let error = RedisStore::from_url(&format!("redis://{}", all.members()[0].addr())).await.expect_err("a member");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.message().contains("redis+cluster://"), "{error}");
}

/// The permissions that docs/backends/redis.md asks for are enough.
#[tokio::test]
async fn the_documented_permissions_suffice() {
    let all = members().await;
    let commands = format!("{PERMISSIONS} +cluster|slots +cluster|info");
    for member in all.members() {
        let rule = format!("ACL SETUSER app on >pw ~lockkit:* ~{{lockkit:* &lockkit:* {commands}");
        member.command(&rule.split(' ').collect::<Vec<_>>()).await.expect("user");
    }
    let url = all.url().replace("redis+cluster://", "redis+cluster://app:pw@");
    let store = RedisStore::from_url(&format!("{url}?failover_pause=no")).await.expect("connect");
    for name in names().iter().take(9) {
        let mine = claim(name);
        hold(&store, &mine).await;
        held(renew(&store, &renewal(&mine)).await);
        contended(store.acquire(&request(&claim(name), Duration::from_millis(20))).await.expect("acquire"));
        free(&store, &mine).await;
    }
    assert!(store.inspect(&Query::Prefix(String::new())).await.expect("inspect").is_empty());
}
