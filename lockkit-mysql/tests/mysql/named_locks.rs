//! Queues on named locks of the server, which wake the waiters of a hot lock.

use std::{
    mem,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lockkit_core::{AcquireRequest, Attempt, Claim, Guard, LockStore, Locker, Outcome};
use lockkit_mysql::{MySqlConfig, MySqlStore};
use lockkit_testkit::{faults::Direction, servers::MySqlServer};
use sqlx::MySqlConnection;
use tokio::{
    sync::oneshot,
    time::{sleep, timeout},
};

use crate::support::*;

tests! {
    clients_that_take_turns_get_the_same
    a_named_lock_that_another_client_keeps_holds_up_nobody
    an_acquisition_that_queues_ends_in_time
    a_waiter_that_leaves_and_a_holder_that_is_lost_leave_no_named_lock
    a_lease_that_is_left_at_the_store_keeps_its_named_lock_no_longer_than_it_lasts
    a_named_lock_goes_in_time_beside_one_that_stays_longer
    without_a_connection_to_spare_waiters_poll
    a_broken_named_lock_is_not_a_broken_lock
    waiters_that_leave_count_until_the_server_is_done_with_them
    where_named_locks_are_refused_waiters_poll_and_connections_stay
    a_runtime_that_nobody_drives_keeps_no_named_lock
    a_store_made_on_a_runtime_that_nobody_drives_keeps_no_named_lock
    waits_that_were_left_where_nobody_drives_them_leave_room_for_others
}

/// The connections of clients that came over the network.
async fn clients(server: &MySqlServer) -> Vec<Option<String>> {
    let all = server.admin("SHOW PROCESSLIST").await.expect("ask");
    let mut ids: Vec<_> = all
        .into_iter()
        .filter(|row| row[2].as_ref().is_some_and(|host| host.contains(':')))
        .map(|mut row| row.swap_remove(0))
        .collect();
    // The last is the one that asks.
    ids.sort_by_key(|id| id.as_ref().and_then(|id| id.parse::<u64>().ok()));
    ids.pop();
    ids
}

const PATIENCE: Duration = Duration::from_secs(10);

/// As documented: FNV-1a, 64 bits, of the table's name, a zero and the lock's name.
fn named_lock(name: &str) -> String {
    let bytes = MySqlConfig::TABLE.bytes().chain([0]).chain(name.bytes());
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325_u64, |hash, b| (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    format!("lockkit:{hash:016x}")
}

/// The connection that has the named lock.
async fn keeper(raw: &mut MySqlConnection, name: &str) -> Option<i64> {
    let keeper =
        sqlx::query_scalar("SELECT CAST(IS_USED_LOCK(?) AS SIGNED)").bind(named_lock(name)).fetch_one(raw).await;
    keeper.expect("IS_USED_LOCK")
}

async fn until_kept(raw: &mut MySqlConnection, name: &str, kept: bool) -> Option<i64> {
    let start = Instant::now();
    loop {
        let keeper = keeper(raw, name).await;
        if keeper.is_some() == kept {
            return keeper;
        }
        assert!(start.elapsed() < PATIENCE, "the named lock is never {}", if kept { "kept" } else { "free" });
        sleep(Duration::from_millis(5)).await;
    }
}

async fn locker(ctx: &Ctx) -> Locker {
    Locker::new(ctx.store().await)
}

/// Two clients that take a lock again as soon as they gave it back. The one that did is always there first.
async fn clients_that_take_turns_get_the_same(ctx: Arc<Ctx>) {
    const GRANTS: usize = 200;
    let (name, grants) = (claim().key, Arc::new(Mutex::new(Vec::new())));
    let mut loops = Vec::new();
    for who in 0..2 {
        let (locker, name, grants) = (locker(&ctx).await, name.clone(), Arc::clone(&grants));
        loops.push(tokio::spawn(async move {
            while grants.lock().expect("unpoisoned").len() < GRANTS {
                let guard = locker.lock(name.as_str()).acquire().await.expect("acquire");
                grants.lock().expect("unpoisoned").push((who, guard.fence()));
                sleep(Duration::from_millis(1)).await;
                assert_eq!(guard.release().await.expect("release"), Outcome::Released);
            }
        }));
    }
    for task in loops {
        task.await.expect("no panic");
    }
    let grants = mem::take(&mut *grants.lock().expect("unpoisoned"));
    assert!(grants.is_sorted_by(|a, b| a.1 < b.1), "fences grow in the order of the grants");
    let first = grants.iter().filter(|(who, _)| *who == 0).count();
    assert!((GRANTS / 4..=GRANTS * 3 / 4).contains(&first), "one had {first} of {GRANTS}");
    until_kept(&mut ctx.raw().await, name.as_str(), false).await;
}

/// Each of its steps is answered late, and in time for a step: all of them together end one bound after its wait.
async fn an_acquisition_that_queues_ends_in_time(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let (timeout, wait) = (Duration::from_secs(2), Duration::from_secs(1));
    let store = MySqlStore::connect(config.timeout(timeout)).await.expect("connect");
    let (mine, mut raw) = (claim(), ctx.raw().await);
    hold(&store, &mine).await;
    let kept: i64 = sqlx::query_scalar("SELECT CAST(GET_LOCK(?, 0) AS SIGNED)")
        .bind(named_lock(mine.key.as_str()))
        .fetch_one(&mut raw)
        .await
        .expect("GET_LOCK");
    assert_eq!(kept, 1);
    // From then on it has connections on which its statements are prepared.
    let waits = AcquireRequest { wait, ..request(&rival(&mine)) };
    contended(store.acquire(&waits).await.expect("acquire"));
    proxy.delay(Direction::ToClient, Duration::from_millis(800));
    let asked = Instant::now();
    let answer = store.acquire(&waits).await;
    let took = asked.elapsed();
    println!("{answer:?} after {took:?}");
    assert!(took < wait + timeout + Duration::from_millis(500), "{took:?}: {answer:?}");
}

/// As a process would that stands still while it has the named lock.
async fn a_named_lock_that_another_client_keeps_holds_up_nobody(ctx: Arc<Ctx>) {
    let (name, mut raw) = (claim().key, ctx.raw().await);
    let kept: i64 = sqlx::query_scalar("SELECT CAST(GET_LOCK(?, 0) AS SIGNED)")
        .bind(named_lock(name.as_str()))
        .fetch_one(&mut raw)
        .await
        .expect("GET_LOCK");
    assert_eq!(kept, 1);
    let lockers = [locker(&ctx).await, locker(&ctx).await];
    let mut guard = lockers[0].lock(name.as_str()).acquire().await.expect("acquire");
    for round in 1..4 {
        let lock = lockers[round % 2].lock(name.as_str());
        let next = tokio::spawn(async move { lock.acquire().await });
        sleep(Duration::from_millis(50)).await;
        assert!(!next.is_finished(), "granted twice");
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
        guard = timeout(PATIENCE, next).await.expect("in time").expect("no panic").expect("acquire");
    }
}

async fn a_waiter_that_leaves_and_a_holder_that_is_lost_leave_no_named_lock(ctx: Arc<Ctx>) {
    let (name, mut raw) = (claim().key, ctx.raw().await);
    let (mine, other) = (locker(&ctx).await, locker(&ctx).await);
    let guard = mine.lock(name.as_str()).acquire().await.expect("acquire");
    // It gets the named lock, for the holder does not have it, and keeps it for a moment.
    assert!(timeout(Duration::from_millis(200), other.lock(name.as_str()).acquire()).await.is_err(), "granted twice");
    until_kept(&mut raw, name.as_str(), false).await;
    // The next one has both, the named lock and the lock.
    let lock = other.lock(name.as_str());
    let next = tokio::spawn(async move { lock.acquire().await });
    until_kept(&mut raw, name.as_str(), true).await;
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    let next = next.await.expect("no panic").expect("acquire");
    until_kept(&mut raw, name.as_str(), true).await;
    // One that waits for the named lock, and leaves.
    let lock = mine.lock(name.as_str());
    let waiter = tokio::spawn(async move { lock.acquire().await });
    sleep(Duration::from_millis(100)).await;
    waiter.abort();
    mine.break_lock(name.as_str(), next.token()).await.expect("break");
    next.renew().await.expect_err("it was broken");
    until_kept(&mut raw, name.as_str(), false).await;
}

/// Acquires a lock that somebody has, with its named lock.
async fn take_over(holder: &Locker, next: &Locker, name: &str, ttl: Duration, raw: &mut MySqlConnection) -> Guard {
    let guard = holder.lock(name).acquire().await.expect("acquire");
    let lock = next.lock(name).ttl(ttl);
    let next = tokio::spawn(async move { lock.acquire().await });
    until_kept(raw, name, true).await;
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    let guard = next.await.expect("no panic").expect("acquire");
    until_kept(raw, name, true).await;
    guard
}

/// The process that the lease was left for has no part in the named lock, and nobody else releases it.
async fn a_lease_that_is_left_at_the_store_keeps_its_named_lock_no_longer_than_it_lasts(ctx: Arc<Ctx>) {
    const SHORT: Duration = Duration::from_secs(2);
    let (name, mut raw) = (claim().key, ctx.raw().await);
    let (mine, other) = (locker(&ctx).await, locker(&ctx).await);
    let guard = take_over(&mine, &other, name.as_str(), SHORT, &mut raw).await;
    let granted = Instant::now();
    // A lease that is renewed lasts for longer than its ttl, and so does its named lock.
    eventually("the lease is renewed", async || granted.elapsed() > SHORT + SHORT / 2).await;
    assert!(guard.is_held());
    until_kept(&mut raw, name.as_str(), true).await;
    let token = guard.detach().expect("detach");
    until_kept(&mut raw, name.as_str(), false).await;
    assert!(mine.lock(name.as_str()).resume(token).await.expect("ask").is_none(), "the lease has ended before");
}

/// What releases them sleeps until the first one's time is over, which may not be the one that was kept first.
async fn a_named_lock_goes_in_time_beside_one_that_stays_longer(ctx: Arc<Ctx>) {
    let (long, short, mut raw) = (claim().key, claim().key, ctx.raw().await);
    let (mine, other) = (locker(&ctx).await, locker(&ctx).await);
    let stays = take_over(&mine, &other, long.as_str(), Duration::from_secs(60), &mut raw).await;
    let left = take_over(&mine, &other, short.as_str(), Duration::from_secs(1), &mut raw).await;
    left.detach().expect("detach");
    until_kept(&mut raw, short.as_str(), false).await;
    until_kept(&mut raw, long.as_str(), true).await;
    assert_eq!(stays.release().await.expect("release"), Outcome::Released);
}

async fn without_a_connection_to_spare_waiters_poll(ctx: Arc<Ctx>) {
    // A quarter of the connections may wait for named locks: none of three.
    let store = async || MySqlStore::connect(ctx.config().await.connections(3)).await.expect("connect");
    let (name, mut raw) = (claim().key, ctx.raw().await);
    let (mine, other) = (Locker::new(store().await), Locker::new(store().await));
    let guard = mine.lock(name.as_str()).acquire().await.expect("acquire");
    let lock = other.lock(name.as_str());
    let next = tokio::spawn(async move { lock.acquire().await });
    sleep(Duration::from_millis(100)).await;
    assert_eq!(keeper(&mut raw, name.as_str()).await, None);
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    let guard = timeout(PATIENCE, next).await.expect("in time").expect("no panic").expect("acquire");
    assert!(guard.is_held());
}

async fn a_broken_named_lock_is_not_a_broken_lock(ctx: Arc<Ctx>) {
    let (name, mut raw) = (claim().key, ctx.raw().await);
    let (mine, other) = (locker(&ctx).await, locker(&ctx).await);
    let guard = mine.lock(name.as_str()).acquire().await.expect("acquire");
    let lock = other.lock(name.as_str());
    let next = tokio::spawn(async move { lock.acquire().await });
    until_kept(&mut raw, name.as_str(), true).await;
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    let guard = next.await.expect("no panic").expect("acquire");
    // The holder's named lock is taken from it.
    let keeper = until_kept(&mut raw, name.as_str(), true).await.expect("a connection");
    sqlx::query(sqlx::AssertSqlSafe(format!("KILL {keeper}"))).execute(&mut raw).await.expect("kill");
    until_kept(&mut raw, name.as_str(), false).await;
    let third = mine.lock(name.as_str()).acquire_within(Duration::from_secs(2)).await.expect("ask");
    assert!(third.is_none(), "granted twice");
    assert!(guard.is_held());
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
}

/// A waiter that leaves the queue leaves a connection in the middle of GET_LOCK.
async fn waiters_that_leave_count_until_the_server_is_done_with_them(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let config = config(&server).keep_rows(true);
    let holder = Locker::new(MySqlStore::connect(config.clone()).await.expect("connect"));
    let name = claim().key;
    let guard = holder.lock(name.as_str()).acquire().await.expect("acquire");
    let holders = clients(&server).await.len();
    // No waiter gets the named lock, so that each leaves while it waits.
    let mut keeper = raw(&server).await;
    sqlx::query("SELECT GET_LOCK(?, 0)").bind(named_lock(name.as_str())).execute(&mut keeper).await.expect("GET_LOCK");
    let store = MySqlStore::connect(config.connections(4)).await.expect("connect");
    for _ in 0..60 {
        let mut asked = request(&rival(&Claim { key: name.clone(), ..claim() }));
        asked.wait = PATIENCE;
        drop(timeout(Duration::from_millis(15), store.acquire(&asked)).await);
    }
    let those = clients(&server).await.len() - holders - 1;
    assert!(those <= 4, "{those} connections for a store that may have 4");
    assert!(guard.is_held());
}

/// As something in between may refuse them, or a server by its settings.
async fn where_named_locks_are_refused_waiters_poll_and_connections_stay(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let holder = Locker::new(MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect"));
    let name = claim().key;
    let guard = holder.lock(name.as_str()).acquire().await.expect("acquire");
    let (proxy, config) = proxied(&server).await;
    proxy.rewrite_requests(|mut bytes| {
        rename(&mut bytes, b"GET_LOCK", b"GOT_LOCK");
        bytes
    });
    let store = Arc::new(MySqlStore::connect(config).await.expect("connect"));
    let mut asked = request(&rival(&Claim { key: name.clone(), ..claim() }));
    asked.wait = PATIENCE;
    let mut connections = Vec::new();
    for _ in 0..5 {
        contended(store.acquire(&asked).await.expect("ask"));
        connections.push(clients(&server).await);
    }
    // One of another store, and one of this; a connection that has just been closed may still be listed now and then.
    let stay = connections[0].iter().filter(|id| connections.iter().all(|listed| listed.contains(id))).count();
    assert_eq!(stay, 2, "they were closed and replaced: {connections:?}");
    let waiter = Locker::shared_builder(store).build();
    let lock = waiter.lock(name.as_str());
    let next = tokio::spawn(async move { lock.acquire().await });
    sleep(Duration::from_millis(50)).await;
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    assert!(timeout(PATIENCE, next).await.expect("in time").expect("no panic").expect("acquire").is_held());
}

/// A lock that two stores take in turn, one of them on a runtime that is driven no longer than its caller waits.
struct Turns {
    store: Arc<MySqlStore>,
    other: MySqlStore,
    undriven: Undriven,
    raw: MySqlConnection,
    holder: Claim,
    next: Claim,
}

impl Turns {
    async fn ask(&mut self, ttl: Duration) -> Attempt {
        let asked = AcquireRequest { ttl, wait: PATIENCE, ..request(&self.next) };
        let store = Arc::clone(&self.store);
        self.undriven.run(async move { store.acquire(&asked).await.expect("acquire") }).await
    }

    /// The other store has the lock, so that this one queues, and gets the named lock.
    async fn queue(&mut self) {
        hold(&self.other, &self.holder).await;
        contended(self.ask(TTL).await);
    }

    /// Takes the lock with the named lock.
    async fn take(&mut self, ttl: Duration) {
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < PATIENCE, "it never gets the named lock");
            self.queue().await;
            free(&self.other, &self.holder).await;
            assert!(matches!(self.ask(ttl).await, Attempt::Granted(_)), "it is free");
            if keeper(&mut self.raw, self.next.key.as_str()).await.is_some() {
                return;
            }
            // This took longer than a named lock is kept for the next attempt.
            free(&self.store, &self.next).await;
        }
    }

    async fn until_no_named_lock(&mut self) {
        until_kept(&mut self.raw, self.next.key.as_str(), false).await;
    }
}

async fn a_runtime_that_nobody_drives_keeps_no_named_lock(ctx: Arc<Ctx>) {
    let (holder, undriven) = (claim(), Undriven::new());
    // One of four may wait for named locks.
    let store = Arc::new(MySqlStore::connect(ctx.config().await.connections(4)).await.expect("connect"));
    let (other, raw, next) = (ctx.store().await, ctx.raw().await, rival(&holder));
    let mut turns = Turns { store, other, undriven, raw, holder, next };
    // Of a lease that ends by itself.
    turns.take(TTL / 5).await;
    turns.until_no_named_lock().await;
    // Released there.
    turns.take(TTL).await;
    let (store, next) = (Arc::clone(&turns.store), turns.next.clone());
    turns.undriven.run(async move { free(&store, &next).await }).await;
    turns.until_no_named_lock().await;
    // Released on another one, which would hear no answer; others can have the connection for named locks all the same.
    turns.take(TTL).await;
    free(&turns.store, &turns.next).await;
    turns.until_no_named_lock().await;
    let left = mem::replace(&mut turns.undriven, Undriven::new());
    turns.take(TTL).await;
    free(&turns.store, &turns.next).await;
    // Kept for another attempt, which does not come.
    turns.queue().await;
    turns.until_no_named_lock().await;
    drop(left);
}

/// Nor does one that was made there, and waited there first. Afterwards it is used elsewhere.
async fn a_store_made_on_a_runtime_that_nobody_drives_keeps_no_named_lock(ctx: Arc<Ctx>) {
    let (holder, mut undriven, config) = (claim(), Undriven::new(), ctx.config().await);
    let store = undriven.run(async move { MySqlStore::connect(config).await.expect("connect") }).await;
    let (other, raw, next) = (ctx.store().await, ctx.raw().await, rival(&holder));
    let mut turns = Turns { store: Arc::new(store), other, undriven, raw, holder, next };
    turns.take(TTL / 5).await;
    // Its time is over there, and its connection with it.
    eventually("the lease lapses", async || {
        matches!(attempt(&turns.other, &turns.holder).await, Ok(Attempt::Granted(_)))
    })
    .await;
    free(&turns.other, &turns.holder).await;
    hold(&turns.other, &turns.holder).await;
    let asked = AcquireRequest { wait: PATIENCE, ..request(&turns.next) };
    contended(turns.store.acquire(&asked).await.expect("acquire"));
    turns.until_no_named_lock().await;
}

/// One of four connections may wait for named locks. What was left closes it there, and is never polled.
async fn waits_that_were_left_where_nobody_drives_them_leave_room_for_others(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = config(&server).connections(4).keep_rows(true).timeout(Duration::from_secs(1));
    let store = Arc::new(MySqlStore::connect(store).await.expect("connect"));
    let (holder, other) = (claim(), MySqlStore::connect(config(&server)).await.expect("connect"));
    hold(&other, &holder).await;
    let (mut somebody, named_lock) = (raw(&server).await, named_lock(holder.key.as_str()));
    sqlx::query("SELECT GET_LOCK(?, 0)").bind(&named_lock).execute(&mut somebody).await.expect("GET_LOCK");
    let asked = AcquireRequest { wait: PATIENCE, ..request(&rival(&holder)) };
    let (mut undriven, (tell, told)) = (Undriven::new(), oneshot::channel());
    let leave = {
        let (store, asked) = (Arc::clone(&store), asked.clone());
        async move {
            tokio::select! {
                answer = store.acquire(&asked) => panic!("it does not wait: {answer:?}"),
                told = told => told.expect("it waits"),
            }
        }
    };
    let tell = async {
        eventually("it waits for the named lock", async || waits_for_named_lock(&server).await).await;
        tell.send(()).expect("it is to leave");
    };
    tokio::join!(undriven.run(leave), tell);
    // Nor does it get the named lock.
    eventually("the server waits no more", async || !waits_for_named_lock(&server).await).await;
    let mut raw = raw(&server).await;
    drop(somebody);
    until_kept(&mut raw, holder.key.as_str(), false).await;
    let gets_it = async || {
        drop(store.acquire(&asked).await);
        keeper(&mut raw, holder.key.as_str()).await.is_some()
    };
    eventually("the named lock is had", gets_it).await;
    drop(undriven);
}

async fn waits_for_named_lock(server: &MySqlServer) -> bool {
    let sessions = server.admin("SHOW PROCESSLIST").await.expect("ask");
    sessions.iter().any(|row| row[6].as_deref() == Some("User lock"))
}

/// Writes another name, of the same length, wherever one stands.
fn rename(bytes: &mut [u8], from: &[u8], to: &[u8]) {
    while let Some(at) = bytes.windows(from.len()).position(|part| part == from) {
        bytes[at..at + from.len()].copy_from_slice(to);
    }
}
