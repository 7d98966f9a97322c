//! Grants that replicas have to have.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, LockKey, LockStore, Locker, LossReason, Mode, Order, Release,
    store::{Record, Records, Swap},
};
use lockkit_redis::RedisStore;
use lockkit_testkit::servers::RedisSentinels;

use crate::{snag::Snag, support::*};

async fn servers() -> RedisSentinels {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    // Nobody is to take over here.
    for sentinel in all.sentinels() {
        sentinel.kill().await.expect("kill");
    }
    all
}

async fn store(all: &RedisSentinels, options: &str) -> lockkit_core::Result<RedisStore> {
    RedisStore::from_url(&format!("{}?{options}", all.servers()[0].url())).await
}

/// A client that waits longer for a replica than this machine stands still.
async fn patient(all: &RedisSentinels) -> RedisStore {
    store(all, "replicas=1&replica_timeout=3s").await.expect("connect")
}

#[tokio::test]
async fn a_grant_is_answered_when_the_replica_has_it() {
    let all = servers().await;
    let store = store(&all, "replicas=1").await.expect("connect");
    for i in 0..20 {
        let mine = claim(&i.to_string());
        hold(&store, &mine).await;
        let there = all.servers()[1].command(&["EXISTS", &format!("lockkit:{i}")]).await.expect("EXISTS");
        assert_eq!(there, "1");
        held(renew(&store, &renewal(&mine)).await);
    }
}

#[tokio::test]
async fn a_grant_that_the_replica_lacks_is_left_to_its_caller() {
    let all = servers().await;
    let patient = patient(&all).await;
    let store = store(&all, "replicas=1&replica_timeout=300ms").await.expect("connect");
    let kept = claim("kept");
    hold(&store, &kept).await;
    all.servers()[1].freeze().await.expect("freeze");
    let (mine, started) = (claim("a"), Instant::now());
    let error = attempt(&store, &mine).await.expect_err("no replica");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
    assert!(error.message().contains("0 of 1 replicas"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert_eq!(all.servers()[0].command(&["EXISTS", "lockkit:a"]).await.expect("EXISTS"), "1", "nobody released it");
    free(&store, &mine).await;
    let error = renew(&store, &renewal(&kept)).await.expect_err("no replica");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
    // Releasing needs nobody, and is not held up by those who wait for replicas.
    let (unsafe_too, has_waited) = (claim("a"), Cell::new(false));
    let release = async {
        while all.servers()[0].command(&["EXISTS", "lockkit:a"]).await.expect("EXISTS") == "0" {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        assert!(matches!(patient.release(&kept).await, Ok(Release::Released { .. })));
        assert!(!has_waited.get(), "it was held up until the wait for the replica was over");
    };
    let ask = async {
        let asked = attempt(&patient, &unsafe_too).await;
        has_waited.set(true);
        asked
    };
    let ((), asked) = tokio::join!(biased; release, ask);
    assert_eq!(asked.expect_err("no replica").kind(), ErrorKind::Unavailable);
    all.servers()[1].thaw().expect("thaw");
    hold(&store, &claim("b")).await;
}

/// The release of a grant that was not safe is held up on its way, and arrives when the lock was taken anew.
#[tokio::test]
async fn a_late_release_ends_no_later_grant() {
    // The length of what a release has to say: a token and a colon.
    const RELEASE: &str = "$33\r\n";
    let all = servers().await;
    let snag = Snag::start(all.servers()[0].addr(), RELEASE).await;
    let url = format!("redis://{}?replicas=1&replica_timeout=300ms", snag.addr);
    let careful = RedisStore::from_url(&url).await.expect("connect");
    let locker = Locker::builder(careful).patience(Duration::from_secs(20)).build();
    all.servers()[1].freeze().await.expect("freeze");
    let lock = locker.lock("a");
    let (guard, ()) = tokio::join!(lock.acquire(), async {
        snag.caught().await;
        all.servers()[1].thaw().expect("thaw");
    });
    let guard = guard.expect("acquire");
    snag.let_go().await;
    let other = Locker::new(store(&all, "").await.expect("connect"));
    let second = other.lock("a").try_acquire().await.expect("ask");
    assert!(guard.is_held());
    assert!(second.is_none(), "two holders");
}

#[tokio::test]
async fn many_grants_share_the_wait() {
    let all = servers().await;
    let store = store(&all, "replicas=1&replica_timeout=400ms").await.expect("connect");
    let claims: Vec<_> = (0..30).map(|i| claim(&i.to_string())).collect();
    all.servers()[1].freeze().await.expect("freeze");
    let started = Instant::now();
    let asked = claims.iter().map(|claim| attempt(&store, claim));
    for answer in join_all(asked).await {
        assert_eq!(answer.expect_err("no replica").kind(), ErrorKind::Unavailable);
    }
    assert!(started.elapsed() < Duration::from_secs(3), "one after the other: {:?}", started.elapsed());
}

/// Whoever waits for replicas may stop there for as long as it likes.
#[tokio::test]
async fn nobody_waits_for_a_caller_that_stands_still() {
    let all = servers().await;
    let store = store(&all, "replicas=1&replica_timeout=1s").await.expect("connect");
    all.servers()[1].freeze().await.expect("freeze");
    let (standing, mine) = (claim("a"), claim("b"));
    let mut stands_still = Box::pin(attempt(&store, &standing));
    // The grant is there, so from the next time on it waits for the replica.
    eventually("the first grant", async || {
        assert!(tokio::time::timeout(Duration::from_millis(5), &mut stands_still).await.is_err(), "no replica");
        all.servers()[0].command(&["EXISTS", "lockkit:a"]).await.expect("EXISTS") == "1"
    })
    .await;
    assert!(tokio::time::timeout(Duration::from_millis(5), &mut stands_still).await.is_err(), "no replica");
    all.servers()[1].thaw().expect("thaw");
    let asked = tokio::time::timeout(Duration::from_secs(10), attempt(&store, &mine)).await;
    granted(asked.expect("it waits for the other").expect("acquire"));
    granted(stands_still.await.expect("acquire"));
}

#[tokio::test]
async fn a_server_without_replicas_is_found_out_at_once() {
    let all = servers().await;
    all.servers()[1].kill().await.expect("kill");
    let error = store(&all, "replicas=1&replica_timeout=200ms").await.expect_err("no replica");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    assert!(error.message().contains("0 of 1 replicas"), "{error}");
}

/// What a former primary can do that does not know of its successor, and what it can't.
#[tokio::test]
async fn a_former_primary_can_not_complete_a_grant() {
    let all = servers().await;
    let careless = store(&all, "").await.expect("connect");
    let careful = store(&all, "replicas=1&replica_timeout=300ms").await.expect("connect");
    let mine = claim("mine");
    hold(&careful, &mine).await;
    all.servers()[1].command(&["REPLICAOF", "NO", "ONE"]).await.expect("promote");
    hold(&careless, &claim("a")).await;
    let error = attempt(&careful, &claim("b")).await.expect_err("nobody follows it");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
    let error = renew(&careful, &renewal(&mine)).await.expect_err("nobody follows it");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
}

/// The permissions that docs/backends/redis.md asks for are enough.
#[tokio::test]
async fn the_documented_permissions_suffice() {
    let all = servers().await;
    let commands = format!("{PERMISSIONS} +wait");
    for server in all.servers() {
        let rule = format!("ACL SETUSER app on >pw ~lockkit:* ~{{lockkit:* &lockkit:* {commands}");
        server.command(&rule.split(' ').collect::<Vec<_>>()).await.expect("user");
    }
    let url = all.servers()[0].url().replace("redis://", "redis://app:pw@");
    let store = RedisStore::from_url(&format!("{url}?replicas=1")).await.expect("connect");
    let mine = claim("a");
    hold(&store, &mine).await;
    held(renew(&store, &renewal(&mine)).await);
    free(&store, &mine).await;
}

/// What was read or written could be another's after a fail-over, as long as no replica has it.
#[tokio::test]
async fn a_record_that_the_replica_lacks_is_neither_read_nor_written() {
    let all = servers().await;
    let store = store(&all, "replicas=1&replica_timeout=300ms").await.expect("connect");
    let (name, text) = (LockKey::new("a").expect("name"), |text: &str| Record::new(text).expect("text"));
    let (first, second) = (text("first"), text("second"));
    assert_eq!(store.compare_and_set(&name, None, Some(&first)).await.expect("set"), Swap::Done);
    let there = all.servers()[1].command(&["GET", "lockkit:%record:a"]).await.expect("GET");
    assert_eq!(there, "first");
    all.servers()[1].freeze().await.expect("freeze");
    let error = store.compare_and_set(&name, Some(&first), Some(&second)).await.expect_err("no replica");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
    let error = store.read(&name).await.expect_err("no replica");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    all.servers()[1].thaw().expect("thaw");
    assert_eq!(store.compare_and_set(&name, Some(&first), Some(&second)).await.expect("set"), Swap::Done);
    assert_eq!(store.read(&name).await.expect("read"), Some(second));
}

/// A server that was made a replica behind a living connection has what it had, or what its primary sends it.
#[tokio::test]
async fn a_demoted_server_is_asked_for_no_record_and_no_place() {
    let server = Server::start().await;
    let (store, name) = (server.store().await, LockKey::new("a").expect("name"));
    assert_eq!(store.read(&name).await.expect("read"), None);
    let asked = AcquireRequest { from: Some(claim("b").token), ..request(&claim("b"), Duration::ZERO) };
    assert!(matches!(store.acquire(&asked).await.expect("an answer"), Attempt::Contended(_)));
    let mut raw = server.raw();
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(1).exec(&mut raw).expect("REPLICAOF");
    let error = store.read(&name).await.expect_err("a replica");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut raw).expect("REPLICAOF");
    assert_eq!(store.read(&name).await.expect("a primary again"), None);
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(1).exec(&mut raw).expect("REPLICAOF");
    let error = store.acquire(&asked).await.expect_err("a replica");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
}

/// The answers that change nothing are those that it could give: that a lock is another's, or not held.
#[tokio::test]
async fn a_demoted_server_says_nothing_of_shared_locks() {
    let server = Server::start().await;
    let store = server.store().await;
    let reader = Claim { mode: Mode::Shared, ..claim("a") };
    let (gone, exclusive) = (Claim { mode: Mode::Shared, ..claim("b") }, claim("a"));
    hold(&store, &reader).await;
    let in_order = AcquireRequest { order: Order::Fifo, ..request(&exclusive, Duration::ZERO) };
    let downgrade = AcquireRequest { from: Some(exclusive.token), ..request(&gone, Duration::ZERO) };
    assert!(matches!(store.acquire(&in_order).await.expect("an answer"), Attempt::Contended(_)));
    assert!(matches!(store.acquire(&downgrade).await.expect("an answer"), Attempt::Contended(_)));
    assert_eq!(lost(renew(&store, &renewal(&gone)).await), LossReason::Gone);
    redis::cmd("REPLICAOF").arg("127.0.0.1").arg(1).exec(&mut server.raw()).expect("REPLICAOF");
    let refusals = [
        store.acquire(&in_order).await.map(drop),
        store.acquire(&downgrade).await.map(drop),
        store.release(&gone).await.map(drop),
        store.release(&reader).await.map(drop),
    ];
    for error in refusals.map(|answer| answer.expect_err("a replica")) {
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    }
    for claim in [&gone, &reader] {
        let error = renew(&store, &renewal(claim)).await.map(drop).expect_err("a replica");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
}

#[tokio::test]
async fn the_place_of_a_lease_is_not_taken_as_long_as_the_replica_lacks_it() {
    let all = servers().await;
    let store = store(&all, "replicas=1&replica_timeout=300ms").await.expect("connect");
    let (mine, next) = (claim("a"), claim("a"));
    hold(&store, &mine).await;
    all.servers()[1].freeze().await.expect("freeze");
    let asked = AcquireRequest { from: Some(mine.token), ..request(&next, Duration::ZERO) };
    let error = store.acquire(&asked).await.expect_err("no replica");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
    all.servers()[1].thaw().expect("thaw");
    assert!(matches!(store.acquire(&asked).await, Ok(Attempt::Granted(_))), "the same claim again");
    free(&store, &next).await;
}
