//! What holders and waiters see when another server takes over. The same for sentinels and clusters.

use std::{
    future::Future,
    time::{Duration, Instant},
};

use lockkit_core::{Attempt, ErrorKind, Guard, LockStore, Locker, LossReason, Query, Renewal, Renewed};
use lockkit_redis::RedisStore;
use lockkit_testkit::servers::{Keep, RedisCluster, RedisSentinels, RedisServer};

use crate::support::*;

/// The longest ttl of the clients here, and so the pause after a failover.
const SHORT: Duration = Duration::from_secs(3);
const OPTIONS: &str = "max_ttl=3s&timeout=500ms";
/// How long a failover may take on a busy machine, with the pause.
const LONG: Duration = Duration::from_secs(60);

async fn locker(url: &str) -> Locker {
    let first = if url.contains('?') { '&' } else { '?' };
    let store = RedisStore::from_url(&format!("{url}{first}{OPTIONS}")).await.expect("connect");
    Locker::builder(store).patience(LONG).build()
}

async fn acquire(locker: &Locker) -> Guard {
    locker.lock("a").ttl(SHORT).acquire_within(LONG).await.expect("acquire").expect("not free in time")
}

/// A guard is held and somebody waits while the primary fails.
pub(crate) async fn a_guard_is_lost_and_the_waiter_goes_on<F>(url: &str, fail: impl FnOnce() -> F)
where
    F: Future<Output = ()>,
{
    let (holder, waiter) = (locker(url).await, locker(url).await);
    let guard = acquire(&holder).await;
    let before = guard.fence();
    let waiting = tokio::spawn(async move {
        let guard = acquire(&waiter).await;
        (guard, Instant::now(), waiter)
    });
    // Renewed a few times, and somebody is there.
    tokio::time::sleep(SHORT).await;
    assert!(guard.is_held() && !waiting.is_finished());
    let failed = Instant::now();
    fail().await;
    let reason = guard.lost().await;
    let lost = Instant::now();
    let (next, granted, waiter) = waiting.await.expect("task");
    println!("lost ({reason}) after {:?}, granted after {:?}", lost - failed, granted - failed);
    assert!(matches!(reason, LossReason::Gone | LossReason::Unreachable | LossReason::Expired), "{reason}");
    assert!(!guard.is_held() && lost < granted, "two holders at once");
    assert!(granted - failed > SHORT, "leases of the former server have lapsed");
    assert!(next.fence() > before);
    // The new holder goes on undisturbed, and the lock goes round.
    tokio::time::sleep(SHORT + SHORT / 2).await;
    assert!(next.is_held());
    _ = next.release().await.expect("release");
    drop(guard);
    _ = acquire(&waiter).await.release().await.expect("release");
    _ = acquire(&holder).await.release().await.expect("release");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinel_the_primary_dies() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    a_guard_is_lost_and_the_waiter_goes_on(&all.url(), async || all.servers()[0].kill().await.expect("kill")).await;
    all.until_primary(1).await.expect("takes over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinel_the_primary_freezes_and_comes_back() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    let fail = async || {
        all.servers()[0].freeze().await.expect("freeze");
        all.until_primary(1).await.expect("takes over");
        all.servers()[0].thaw().expect("thaw");
    };
    a_guard_is_lost_and_the_waiter_goes_on(&all.url(), fail).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_the_primary_dies() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    let index = all.primary_of("lockkit:a").await.expect("primary");
    let fail = async || all.members()[index].kill().await.expect("kill");
    a_guard_is_lost_and_the_waiter_goes_on(&all.url(), fail).await;
    all.until_primary(index + 3).await.expect("takes over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_the_primary_freezes_and_comes_back() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    let index = all.primary_of("lockkit:a").await.expect("primary");
    let fail = async || {
        all.members()[index].freeze().await.expect("freeze");
        all.until_primary(index + 3).await.expect("takes over");
        all.members()[index].thaw().expect("thaw");
    };
    a_guard_is_lost_and_the_waiter_goes_on(&all.url(), fail).await;
}

/// A lease is there on the new primary, with years to go, and can't be renewed all the same.
async fn a_replicated_lease_is_not_renewed(url: &str, former: &RedisServer, new: &RedisServer) {
    let store = RedisStore::from_url(&format!("{url}?timeout=500ms&failover_pause=no")).await.expect("connect");
    let mine = claim("a");
    hold(&store, &mine).await;
    held(renew(&store, &renewal(&mine)).await);
    let long = Renewal { ttl: Duration::from_secs(60), ..renewal(&mine) };
    held(renew(&store, &long).await);
    until_equal(former, new).await;
    former.kill().await.expect("kill");
    assert_eq!(until_told(&store, &long).await, LossReason::Gone);
    let left: u64 = new.command(&["PTTL", "lockkit:a"]).await.expect("PTTL").parse().expect("it is there");
    assert!(left > 20_000, "it was replicated: {left}");
    let waiting = contended(attempt(&store, &claim("a")).await.expect("acquire"));
    assert_eq!(waiting.holder.expect("holder").as_str(), "test: holder", "it still excludes others");
    free(&store, &mine).await;
    let after = hold(&store, &claim("a")).await;
    held(renew(&store, &renewal(&after.claim)).await);
}

#[tokio::test]
async fn sentinel_a_replicated_lease_is_not_renewed() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    a_replicated_lease_is_not_renewed(&all.url(), &all.servers()[0], &all.servers()[1]).await;
}

#[tokio::test]
async fn cluster_a_replicated_lease_is_not_renewed() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    let index = all.primary_of("lockkit:a").await.expect("primary");
    a_replicated_lease_is_not_renewed(&all.url(), &all.members()[index], &all.members()[index + 3]).await;
}

/// The primary dies with a lease that no replica has. Who asks next, and when are they let in?
async fn next_after_a_lease_was_not_replicated(all: &RedisSentinels, options: &str) -> (Instant, Instant) {
    let url = format!("{}?timeout=500ms&max_ttl=12s{options}", all.url());
    let (holder, other) =
        (RedisStore::from_url(&url).await.expect("connect"), RedisStore::from_url(&url).await.expect("connect"));
    // Whatever pause there is at the start is over; the note of the epoch is replicated, and a counter that will lag behind.
    let early = grant_in_time(&other, "a").await;
    free(&other, &early.claim).await;
    until_equal(&all.servers()[0], &all.servers()[1]).await;
    all.servers()[1].freeze().await.expect("freeze");
    // What was sent to it would reach it, however late.
    all.servers()[0].command(&["CLIENT", "KILL", "TYPE", "replica"]).await.expect("cut off");
    for _ in 0..3 {
        let unseen = grant(&holder, &claim("a")).await;
        free(&holder, &unseen.claim).await;
    }
    let mine = claim("a");
    let lease = grant(&holder, &mine).await;
    let lapses = Instant::now() + lease.until.since(holder.info().clock.now());
    all.servers()[0].kill().await.expect("kill");
    all.servers()[1].thaw().expect("thaw");
    all.until_primary(1).await.expect("takes over");
    let there = all.servers()[1].command(&["EXISTS", "lockkit:a"]).await.expect("EXISTS");
    assert_eq!(there, "0", "the lease was not replicated");
    let next = grant_in_time(&other, "a").await;
    let granted = Instant::now();
    assert!(next.fence > lease.fence, "{} follows {}", next.fence, lease.fence);
    assert_eq!(until_told(&holder, &renewal(&mine)).await, LossReason::Taken);
    (lapses, granted)
}

#[tokio::test]
async fn a_lease_that_was_not_replicated_is_waited_for() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    let (lapses, granted) = next_after_a_lease_was_not_replicated(&all, "").await;
    println!("granted {:?} after the lease lapsed", granted.saturating_duration_since(lapses));
    assert!(granted > lapses, "granted while the former holder could believe in its lease");
}

/// The safeguard off: the test above shows something.
#[tokio::test]
async fn without_the_pause_a_lease_that_was_not_replicated_has_two_holders() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    let (lapses, granted) = next_after_a_lease_was_not_replicated(&all, "&failover_pause=no").await;
    assert!(granted < lapses, "the failover took longer than the lease");
}

/// The holder need not wait for its next renewal to learn of it.
async fn an_alarm_is_raised(url: &str, switch: impl AsyncFnOnce()) {
    let store = RedisStore::from_url(&format!("{url}?failover_pause=no&timeout=1s")).await.expect("connect");
    let locker = Locker::builder(store).patience(LONG).build();
    let start = Instant::now();
    // The next renewal is due in some 18 seconds.
    let guard = locker.lock("a").ttl(Duration::from_secs(55)).acquire_within(LONG).await.expect("acquire");
    let guard = guard.expect("free");
    switch().await;
    assert_eq!(guard.lost().await, LossReason::Gone);
    println!("lost after {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(15), "{:?}", start.elapsed());
}

#[tokio::test]
async fn sentinel_a_planned_switch_raises_the_alarm() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    an_alarm_is_raised(&all.url(), async || {
        RedisServerAt(all.sentinels()[0].addr()).command("SENTINEL FAILOVER lockkit");
        all.until_primary(1).await.expect("takes over");
    })
    .await;
}

#[tokio::test]
async fn sentinel_the_death_of_the_primary_raises_the_alarm() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    an_alarm_is_raised(&all.url(), async || all.servers()[0].kill().await.expect("kill")).await;
}

#[tokio::test]
async fn cluster_the_death_of_the_primary_raises_the_alarm() {
    let all = RedisCluster::start(flavor(), true).await.expect("servers");
    let index = all.primary_of("lockkit:a").await.expect("primary");
    an_alarm_is_raised(&all.url(), async || all.members()[index].kill().await.expect("kill")).await;
}

/// The primary goes on for its clients while the sentinels take it for dead, and can't tell it that it was replaced. Only
/// they can say so; and they have all been restarted since the store connected.
#[tokio::test]
async fn sentinels_that_were_restarted_are_listened_to_again() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    for server in all.servers() {
        RedisServerAt(server.addr()).command("ACL SETUSER app on >pw ~* &* +@all");
    }
    let url = format!("{}?failover_pause=no&timeout=1s", all.url().replace("//", "//app:pw@"));
    let locker = Locker::builder(RedisStore::from_url(&url).await.expect("connect")).patience(LONG).build();
    let guard = locker.lock("a").ttl(SHORT).acquire_within(LONG).await.expect("acquire").expect("free");
    for sentinel in all.sentinels() {
        sentinel.restart(Keep::Data).await.expect("restart");
    }
    // Longer than it takes to ask them again.
    tokio::time::sleep(Duration::from_secs(7)).await;
    assert!(guard.is_held(), "the sentinels are no concern of the primary");
    RedisServerAt(all.servers()[0].addr()).command("ACL SETUSER default -@all");
    let start = Instant::now();
    let reason = tokio::time::timeout(Duration::from_secs(20), guard.lost()).await;
    let reason = reason.expect("it goes on with a primary that was replaced");
    println!("lost ({reason}) after {:?}", start.elapsed());
    assert_eq!(reason, LossReason::Gone);
    all.until_primary(1).await.expect("takes over");
}

/// Demoted and promoted again, behind the back of a client that did nothing meanwhile.
#[tokio::test]
async fn a_change_that_nobody_saw_is_noticed() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    let server = &all.servers()[0];
    let store = RedisStore::from_url(&format!("{}?failover_pause=no", all.url())).await.expect("connect");
    let mine = claim("a");
    hold(&store, &mine).await;
    // The sentinels would undo it, and cut the connections.
    for sentinel in all.sentinels() {
        sentinel.kill().await.expect("kill");
    }
    let connections = server.command(&["INFO", "stats"]).await.expect("INFO");
    let port = all.servers()[1].port().to_string();
    all.servers()[1].command(&["REPLICAOF", "NO", "ONE"]).await.expect("promote");
    server.command(&["REPLICAOF", "127.0.0.1", &port]).await.expect("demote");
    until_equal(&all.servers()[1], server).await;
    server.command(&["REPLICAOF", "NO", "ONE"]).await.expect("promote again");
    assert!(!connections.is_empty());
    let error = renew(&store, &renewal(&mine)).await.expect_err("not the same epoch");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.message().contains("not the one that it was"), "{error}");
}

async fn grant(store: &RedisStore, claim: &lockkit_core::Claim) -> lockkit_core::Hold {
    granted(store.acquire(&request(claim, Duration::ZERO)).await.expect("acquire"))
}

/// Asks, patiently, until the lock is granted.
async fn grant_in_time(store: &RedisStore, name: &str) -> lockkit_core::Hold {
    let (start, mine) = (Instant::now(), claim(name));
    loop {
        match attempt(store, &mine).await {
            Ok(Attempt::Granted(hold)) => return hold,
            Ok(Attempt::Contended(_)) => {}
            Err(e) => assert!(e.is_retryable(), "{e}"),
        }
        assert!(start.elapsed() < LONG, "never granted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Renews until the store has an answer.
async fn until_told(store: &RedisStore, renewal: &Renewal) -> LossReason {
    let start = Instant::now();
    loop {
        match renew(store, renewal).await {
            Ok(Renewed::Lost(reason)) => return reason,
            Ok(Renewed::Held(hold)) => panic!("renewed by another server: {hold:?}"),
            Err(e) => assert!(e.is_retryable(), "{e}"),
        }
        assert!(start.elapsed() < LONG, "never told");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Waits until the replica has all that the primary has.
async fn until_equal(primary: &RedisServer, replica: &RedisServer) {
    let offset = async |server: &RedisServer| {
        let info = server.command(&["INFO", "replication"]).await.expect("INFO");
        let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        (field("master_repl_offset:"), field("master_replid:"))
    };
    eventually_within(LONG, "in sync", async || offset(primary).await == offset(replica).await).await;
}

/// Inspecting finds what is there, wherever it is.
#[tokio::test]
async fn a_dead_primary_is_an_error_not_an_empty_answer() {
    let all = RedisCluster::start(flavor(), false).await.expect("servers");
    let store = RedisStore::from_url(&format!("{}?failover_pause=no&timeout=500ms", all.url())).await.expect("connect");
    hold(&store, &claim("a")).await;
    let index = all.primary_of("lockkit:a").await.expect("primary");
    all.members()[index].kill().await.expect("kill");
    for query in [Query::Prefix("a".into()), Query::Keys(vec![claim("a").key])] {
        let error = store.inspect(&query).await.expect_err("nobody knows");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
}

/// A server that failed and took over again at the same address: a waiter's subscription is there before its next request, while its
/// place is still that of the former epoch.
#[tokio::test]
async fn no_lease_is_granted_with_the_mark_of_a_former_epoch() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    let store =
        async || RedisStore::from_url(&format!("{}?prefix=&failover_pause=no", all.url())).await.expect("connect");
    let (holds, waits, server) = (store().await, store().await, &all.servers()[0]);
    let (theirs, mine) = (claim("a"), claim("a"));
    in_order(&holds, &theirs).await;
    let fails_over = async {
        until_one_waits(&holds, &mine).await;
        let (places, token) = ("{a}:places:fence", mine.token.reveal());
        let place = server.command(&["HGET", places, &token]).await.expect("HGET");
        let at = place.find(":1@").expect("a mark") + ":1@".len();
        let former = format!("{}00000000{}", &place[..at], &place[at + 8..]);
        server.command(&["HSET", places, &token, &former]).await.expect("HSET");
        free(&holds, &theirs).await;
    };
    let (hold, ()) = tokio::join!(in_order(&waits, &mine), fails_over);
    assert_eq!(held(renew(&waits, &renewal(&mine)).await).fence, hold.fence);
    free(&waits, &mine).await;
}
