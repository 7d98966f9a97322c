//! Rows that nobody has used for a week: they go by themselves, a few at a time, and whatever somebody needs stays.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    Attempt, Claim, ErrorKind, Fence, FenceClock, LockKey, LockStore, Mode,
    store::{Record, Records, Swap},
};
use lockkit_mysql::{MySqlConfig, MySqlStore, lock_in_transaction};
use lockkit_testkit::{faults::Direction, servers::MySqlServer};
use sqlx::{Connection as _, Executor as _};
use tokio::{sync::Notify, task::JoinSet};

use crate::support::{
    Ctx, Undriven, claim, config, end, eventually_within, free, hold, lock_rows, proxied, raw, request, rival, status,
    tests,
};

tests! {
    unused_rows_go_by_themselves_and_fences_go_on
    unused_rows_go_where_connections_are_few
    unused_rows_go_where_connections_are_always_waited_for
    the_removal_of_unused_rows_keeps_nothing_for_a_runtime_that_nobody_drives
    a_removal_that_is_not_begun_where_nobody_drives_it_keeps_no_connection_for_long
    a_removal_that_waits_for_an_answer_where_nobody_drives_it_keeps_no_connection_for_long
    rows_that_only_transactions_use_stay
    unused_rows_stay_where_they_are_to_be_kept
    a_user_who_may_not_delete_has_locks_all_the_same
    a_user_who_may_not_remove_rows_removes_claims
    the_claims_of_one_lock_are_removed_however_many_they_are
    unused_locks_are_removed
    unused_locks_that_somebody_keeps_locked_are_left
    records_are_no_unused_locks
    the_removal_of_many_claims_has_the_time_that_it_takes
    a_removal_reads_no_claims_of_other_rows
    a_removal_without_an_answer_counts_among_the_connections
}

const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
const PATIENCE: Duration = Duration::from_secs(20);

/// Locks that were used once.
async fn used(store: &MySqlStore, count: usize) -> Vec<Claim> {
    let claims: Vec<_> = (0..count).map(|_| claim()).collect();
    for claim in &claims {
        hold(store, claim).await;
        free(store, claim).await;
    }
    claims
}

/// Makes all rows look as if they were last used eight days ago.
async fn age(server: &MySqlServer) {
    let age = "UPDATE resource_lock SET update_time = update_time - INTERVAL 8 DAY";
    raw(server).await.execute(age).await.expect("age");
}

async fn there(server: &MySqlServer, claims: &[&Claim]) -> usize {
    let (mut raw, mut there) = (raw(server).await, 0);
    for claim in claims {
        let row = "SELECT id FROM resource_lock WHERE resource_name = ?";
        let row = sqlx::query(row).bind(claim.key.as_str().as_bytes()).fetch_optional(&mut raw).await.expect("row");
        there += usize::from(row.is_some());
    }
    there
}

/// Uses new names until this is how many of the rows are left.
async fn until_left(store: &MySqlStore, server: &MySqlServer, claims: &[&Claim], left: usize) {
    let start = Instant::now();
    while there(server, claims).await != left {
        assert!(start.elapsed() < PATIENCE, "{} rows stay, not {left}", there(server, claims).await);
        used(store, 4).await;
    }
}

async fn unused_rows_go_by_themselves_and_fences_go_on(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    let old = used(&store, 200).await;
    let before = hold(&store, &rival(&old[0])).await;
    free(&store, &before.claim).await;
    let (held, ahead, counted, locked) = (claim(), claim(), claim(), claim());
    hold(&store, &held).await;
    for claim in [&ahead, &locked] {
        hold(&store, claim).await;
        free(&store, claim).await;
    }
    // A counter that nobody ever asked to follow the clock would begin anew.
    let mut asked = request(&counted);
    asked.fence.clock = FenceClock::Floor;
    assert!(matches!(store.acquire(&asked).await.expect("acquire"), Attempt::Granted(hold) if hold.fence.get() == 1));
    free(&store, &counted).await;
    let mut somebody = raw(&server).await;
    let lift = "UPDATE resource_lock SET fence_last = fence_last + 1000000000000 WHERE resource_name = ?";
    sqlx::query(lift).bind(ahead.key.as_str().as_bytes()).execute(&mut somebody).await.expect("lift");
    age(&server).await;
    lock_rows(&mut somebody, &[&locked]).await;
    let fresh = used(&store, 20).await;

    let olds: Vec<_> = old.iter().chain([&locked]).collect();
    let kept: Vec<_> = fresh.iter().chain([&held, &ahead, &counted]).collect();
    until_left(&store, &server, &olds, 1).await;
    assert_eq!(there(&server, &kept).await, kept.len(), "a row that somebody needs is gone");
    // The row that a transaction keeps locked was left, and goes when it is free.
    end(&mut somebody).await;
    until_left(&store, &server, &olds, 0).await;
    assert_eq!(there(&server, &kept).await, kept.len(), "a row that somebody needs is gone");

    let again = hold(&store, &rival(&old[0])).await;
    assert!(again.fence > before.fence, "{} after {}", again.fence, before.fence);
    free(&store, &held).await;
    asked.claim = rival(&counted);
    assert!(
        matches!(store.acquire(&asked).await.expect("acquire"), Attempt::Granted(hold) if hold.fence == Fence::new(2))
    );
}

/// The fewest that a store may have: one for all that is not a renewal or a release.
async fn unused_rows_go_where_connections_are_few(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server).connections(2)).await.expect("connect");
    let old = used(&store, 20).await;
    age(&server).await;
    until_left(&store, &server, &old.iter().collect::<Vec<_>>(), 0).await;
}

/// Those that acquire in turns are given it before anything that only looks whether it is free.
async fn unused_rows_go_where_connections_are_always_waited_for(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let old = used(&MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect"), 20).await;
    age(&server).await;
    // Nobody is to give up on a busy machine.
    let few = config(&server).connections(2).timeout(Duration::from_secs(20));
    let store = Arc::new(MySqlStore::connect(few).await.expect("connect"));
    let mut users = JoinSet::new();
    for _ in 0..2 {
        let store = Arc::clone(&store);
        users.spawn(async move {
            loop {
                used(&store, 1).await;
            }
        });
    }
    until_left(&store, &server, &old.iter().collect::<Vec<_>>(), 0).await;
    assert!(users.try_join_next().is_none(), "nobody waited for a connection any more");
    users.shutdown().await;
}

/// The first row that a store makes has it look for unused ones, in the background.
async fn the_removal_of_unused_rows_keeps_nothing_for_a_runtime_that_nobody_drives(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let old = used(&MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect"), 20).await;
    age(&server).await;
    let store = Arc::new(MySqlStore::connect(config(&server).connections(2)).await.expect("connect"));
    let mut undriven = Undriven::new();
    let first = Arc::clone(&store);
    undriven.run(async move { hold(&first, &claim()).await }).await;
    hold(&store, &claim()).await;
    until_left(&store, &server, &old.iter().collect::<Vec<_>>(), 0).await;
    drop(undriven);
}

/// It has been given the one connection that is not set aside.
async fn a_removal_that_is_not_begun_where_nobody_drives_it_keeps_no_connection_for_long(ctx: Arc<Ctx>) {
    let (mut undriven, config) = (Undriven::new(), config(ctx.server().await).connections(2));
    let once = async move {
        let store = MySqlStore::connect(config).await.expect("connect");
        hold(&store, &claim()).await;
        store
    };
    let store = undriven.run(once).await;
    let asks = async || store.acquire(&request(&claim())).await.is_ok();
    eventually_within(PATIENCE, "a connection is there", asks).await;
    drop(undriven);
}

async fn a_removal_that_waits_for_an_answer_where_nobody_drives_it_keeps_no_connection_for_long(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let mut undriven = Undriven::new();
    let begin = async move {
        let store = MySqlStore::connect(config.connections(2)).await.expect("connect");
        proxy.drop_reply_after("id > ?", 1);
        hold(&store, &claim()).await;
        proxy.dropped().await;
        (store, proxy)
    };
    let (store, _proxy) = undriven.run(begin).await;
    let asks = async || store.acquire(&request(&claim())).await.is_ok();
    eventually_within(PATIENCE, "a connection is there", asks).await;
    drop(undriven);
}

/// A transaction's lock changes nothing in the row, so that the row looks unused; and where it has to be made anew, two
/// transactions that make it may be a deadlock.
async fn rows_that_only_transactions_use_stay(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (store, mut raw, name) =
        (MySqlStore::connect(config(&server)).await.expect("connect"), raw(&server).await, claim());
    let mut transaction = raw.begin().await.expect("begin");
    assert!(lock_in_transaction(&mut transaction, name.key.as_str()).await.expect("lock").is_locked());
    transaction.commit().await.expect("commit");
    let old = used(&store, 20).await;
    age(&server).await;
    until_left(&store, &server, &old.iter().collect::<Vec<_>>(), 0).await;
    // Each page was looked at.
    used(&store, 40).await;
    assert_eq!(there(&server, &[&name]).await, 1, "transactions use it");
    assert_eq!(store.remove_unused(WEEK).await.expect("gc"), 1, "whoever says so may remove it");
}

async fn unused_rows_stay_where_they_are_to_be_kept(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let keeps = MySqlConfig::from_url(&format!("{}?keep_rows=true", server.url())).expect("url");
    let keeps = MySqlStore::connect(keeps).await.expect("connect");
    let removed = async || server.admin("SHOW GLOBAL STATUS LIKE 'Com_delete%'").await.expect("ask");
    // Connecting asks whether this user may.
    let before = removed().await;
    let old = used(&keeps, 20).await;
    let old: Vec<_> = old.iter().collect();
    age(&server).await;
    used(&keeps, 40).await;
    // Whatever else was asked on the store's connections was asked before this.
    assert_eq!(removed().await, before);
    assert_eq!(there(&server, &old).await, old.len());
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    until_left(&store, &server, &old, 0).await;
}

async fn a_user_who_may_not_delete_has_locks_all_the_same(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let mut admin = raw(&server).await;
    let (database,): (String,) = sqlx::query_as("SELECT DATABASE()").fetch_one(&mut admin).await.expect("database");
    admin.execute("CREATE USER careful@'%'").await.expect("user");
    let grant = format!("GRANT SELECT, INSERT, UPDATE ON `{database}`.* TO careful@'%'");
    admin.execute(sqlx::AssertSqlSafe(grant)).await.expect("grant");
    // What it makes must not have it look for unused rows: it may delete them.
    let owner = MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    let old = used(&owner, 20).await;
    age(&server).await;
    let store = MySqlStore::connect(config(&server).username("careful")).await.expect("connect");
    let fresh = used(&store, 40).await;
    for claim in &fresh {
        hold(&store, &rival(claim)).await;
    }
    assert_eq!(there(&server, &old.iter().collect::<Vec<_>>()).await, old.len());
}

/// Rows of locks that are old enough to go are on the same pages.
async fn a_user_who_may_not_remove_rows_removes_claims(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let mut admin = raw(&server).await;
    admin.execute("CREATE USER careful@'%'").await.expect("user");
    admin.execute("GRANT SELECT, INSERT, UPDATE ON lockkit.* TO careful@'%'").await.expect("grant");
    admin.execute("GRANT DELETE ON lockkit.resource_lock_claim TO careful@'%'").await.expect("grant");
    let owner = MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    let old = used(&owner, 8).await;
    let reader = Claim { mode: Mode::Shared, ..claim() };
    hold(&owner, &reader).await;
    hold(&owner, &rival(&reader)).await;
    age(&server).await;
    admin.execute("UPDATE resource_lock_claim SET expires = expires - INTERVAL 1 HOUR").await.expect("age");
    let store = MySqlStore::connect(config(&server).username("careful")).await.expect("connect");
    eventually_within(PATIENCE, "what lapsed is gone", async || {
        used(&store, 8).await;
        let left = "SELECT COUNT(*) FROM resource_lock_claim";
        sqlx::query_scalar::<_, i64>(left).fetch_one(&mut admin).await.expect("count") == 0
    })
    .await;
    assert_eq!(there(&server, &old.iter().collect::<Vec<_>>()).await, old.len());
}

async fn the_claims_of_one_lock_are_removed_however_many_they_are(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    let reader = Claim { mode: Mode::Shared, ..claim() };
    hold(&store, &reader).await;
    hold(&store, &rival(&reader)).await;
    server
        .admin(
            "INSERT INTO resource_lock_claim WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < 900), \
             one AS (SELECT * FROM resource_lock_claim LIMIT 1), three AS (SELECT 1 AS k UNION SELECT 2 UNION SELECT 3) \
             SELECT lock_id, UNHEX(LPAD(HEX(i * 4 + k), 32, '0')), place, mode, permits, fence, span, `count`, ttl, expires, kept, node_info \
             FROM n, one, three",
        )
        .await
        .expect("claims");
    server.admin("UPDATE resource_lock_claim SET expires = expires - INTERVAL 1 HOUR").await.expect("age");
    let left = async || server.admin("SELECT COUNT(*) FROM resource_lock_claim").await.expect("count")[0][0].clone();
    assert_eq!(left().await.as_deref(), Some("2702"));
    store.remove_unused(WEEK).await.expect("gc");
    assert_eq!(left().await.as_deref(), Some("0"));
}

async fn unused_locks_are_removed(ctx: Arc<Ctx>) {
    // Or rows would go by themselves as well, whenever the background comes to it.
    let config = ctx.config().await.table("unused").create(true).keep_rows(true);
    let (store, mut raw) = (MySqlStore::connect(config).await.expect("connect"), ctx.raw().await);
    let (old, held, ahead, fresh) = (claim(), claim(), claim(), claim());
    for claim in [&old, &held, &ahead, &fresh] {
        hold(&store, claim).await;
    }
    for claim in [&old, &ahead, &fresh] {
        free(&store, claim).await;
    }
    let age = "UPDATE unused SET update_time = UTC_TIMESTAMP(6) - INTERVAL 8 DAY WHERE resource_name <> ?";
    sqlx::query(age).bind(fresh.key.as_str().as_bytes()).execute(&mut raw).await.expect("age");
    let lift = "UPDATE unused SET fence_last = fence_last + 1000000000000 WHERE resource_name = ?";
    sqlx::query(lift).bind(ahead.key.as_str().as_bytes()).execute(&mut raw).await.expect("lift");
    assert_eq!(store.remove_unused(WEEK).await.expect("gc"), 1);
    assert_eq!(store.remove_unused(WEEK).await.expect("gc"), 0);
    let (rows,): (i64,) = sqlx::query_as("SELECT COUNT(*) FROM unused").fetch_one(&mut raw).await.expect("count");
    assert_eq!(rows, 3);
    free(&store, &held).await;
    hold(&store, &old).await;
    let error = store.remove_unused(Duration::from_secs(1)).await.expect_err("too short");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

async fn unused_locks_that_somebody_keeps_locked_are_left(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    // Shorter than the server waits for a row.
    let config = config(&server).timeout(Duration::from_millis(700)).keep_rows(true);
    let (store, mut raw) = (MySqlStore::connect(config).await.expect("connect"), raw(&server).await);
    let claims: Vec<_> = (0..5).map(|_| claim()).collect();
    for claim in &claims {
        hold(&store, claim).await;
        free(&store, claim).await;
    }
    raw.execute("UPDATE resource_lock SET update_time = update_time - INTERVAL 8 DAY").await.expect("old");
    lock_rows(&mut raw, &[&claims[1], &claims[3]]).await;
    assert_eq!(store.remove_unused(WEEK).await.expect("two are left"), 3);
    end(&mut raw).await;
    assert_eq!(store.remove_unused(WEEK).await.expect("gc"), 2);
}

async fn records_are_no_unused_locks(ctx: Arc<Ctx>) {
    let config = ctx.config().await.table("records").create(true).keep_rows(true);
    let (store, mut raw) = (MySqlStore::connect(config).await.expect("connect"), ctx.raw().await);
    let name = |name: &str| LockKey::new(name).expect("name");
    let text = Record::new("text").expect("text");
    for kept in ["kept", "removed"] {
        assert_eq!(store.compare_and_set(&name(kept), None, Some(&text)).await.expect("set"), Swap::Done);
    }
    assert_eq!(store.compare_and_set(&name("removed"), Some(&text), None).await.expect("set"), Swap::Done);
    let long = name(&"x".repeat(LockKey::MAX_BYTES));
    assert_eq!(store.read(&long).await.expect_err("too long").kind(), ErrorKind::InvalidInput);
    let age = "UPDATE records SET update_time = update_time - INTERVAL 8 DAY";
    raw.execute(age).await.expect("age");
    assert_eq!(store.remove_unused(WEEK).await.expect("remove"), 1, "that of the record that was removed");
    assert_eq!(store.read(&name("kept")).await.expect("read"), Some(text.clone()));
    assert_eq!(store.read(&name("removed")).await.expect("read"), None);
    let folding =
        "ALTER TABLE records MODIFY node_info VARCHAR(256) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci NULL";
    raw.execute(folding).await.expect("alter");
    let shout = Record::new("TEXT").expect("text");
    let swap = store.compare_and_set(&name("kept"), Some(&shout), None).await.expect("set");
    assert_eq!(swap, Swap::Differs(Some(text.clone())), "letters are told apart on any table");
    assert_eq!(store.compare_and_set(&name("new"), None, Some(&text)).await.expect("set"), Swap::Done);
    let foreign = "UPDATE records SET node_info = 'no record'";
    raw.execute(foreign).await.expect("update");
    assert_eq!(store.read(&name("kept")).await.expect_err("foreign").kind(), ErrorKind::Unexpected);
}

/// Each lock is looked at in a transaction of its own: on a slow link all of a page take longer than one operation may.
async fn the_removal_of_many_claims_has_the_time_that_it_takes(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    for _ in 0..40 {
        let reader = Claim { mode: Mode::Shared, ..claim() };
        hold(&store, &reader).await;
        hold(&store, &rival(&reader)).await;
    }
    let mut raw = raw(&server).await;
    raw.execute("UPDATE resource_lock_claim SET expires = expires - INTERVAL 1 HOUR").await.expect("age");
    let (proxy, config) = proxied(&server).await;
    let store = MySqlStore::connect(config.timeout(Duration::from_secs(1))).await.expect("connect");
    proxy.delay(Direction::ToClient, Duration::from_millis(50));
    store.remove_unused(WEEK).await.expect("gc");
    let (left,): (i64,) =
        sqlx::query_as("SELECT COUNT(*) FROM resource_lock_claim").fetch_one(&mut raw).await.expect("count");
    assert_eq!(left, 0);
}

/// Whoever makes a row, of whatever kind its lock is, may have a page looked through: that is to cost the same however many share locks.
async fn a_removal_reads_no_claims_of_other_rows(ctx: Arc<Ctx>) {
    const LIVING: u64 = 20_000;
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    let reader = Claim { mode: Mode::Shared, ..claim() };
    hold(&store, &reader).await;
    let lapsed = rival(&reader);
    hold(&store, &lapsed).await;
    let mut raw = raw(&server).await;
    // Those of rows that are made later.
    raw.execute("SET @n = 1000000").await.expect("a variable");
    raw.execute(
        "INSERT INTO resource_lock_claim \
         SELECT @n := @n + 1, token, place, mode, permits, fence, span, `count`, ttl, UTC_TIMESTAMP(6) + INTERVAL 1 HOUR, kept, node_info \
         FROM (SELECT * FROM resource_lock_claim LIMIT 1) AS one, \
         (SELECT 1 FROM information_schema.COLLATIONS a, information_schema.COLLATIONS b LIMIT 20000) AS many",
    )
    .await
    .expect("claims");
    let (count,): (i64,) =
        sqlx::query_as("SELECT COUNT(*) FROM resource_lock_claim").fetch_one(&mut raw).await.expect("count");
    assert!(u64::try_from(count).expect("a number") > LIVING, "{count} claims");
    let before = status(&mut raw, "Handler_read_next").await;
    for _ in 0..80 {
        hold(&store, &claim()).await;
    }
    let read = status(&mut raw, "Handler_read_next").await - before;
    assert!(read < LIVING, "{read} rows are read for 80 new ones");
    // Those that lapsed on its own page go.
    raw.execute("UPDATE resource_lock_claim SET expires = expires - INTERVAL 1 HOUR WHERE lock_id < 1000000")
        .await
        .expect("age");
    let left = "SELECT COUNT(*) FROM resource_lock_claim WHERE lock_id < 1000000";
    eventually_within(PATIENCE, "what lapsed is gone", async || {
        hold(&store, &claim()).await;
        sqlx::query_as::<_, (i64,)>(left).fetch_one(&mut raw).await.expect("count").0 == 0
    })
    .await;
}

/// Others may have a connection in its place only when the server is done with it, or no answer can come any more.
async fn a_removal_without_an_answer_counts_among_the_connections(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (proxy, config) = proxied(&server).await;
    let timeout = Duration::from_millis(500);
    let store = MySqlStore::connect(config.connections(2).timeout(timeout)).await.expect("connect");
    let mut raw = raw(&server).await;
    let (lost, mut is_lost) = (Arc::new(Notify::new()), false);
    let tell = Arc::clone(&lost);
    proxy.rewrite_requests(move |request| {
        let is_it = !is_lost && request.windows(6).any(|part| part == b"id > ?");
        if is_it {
            is_lost = true;
            tell.notify_one();
        }
        if is_it { Vec::new() } else { request }
    });
    hold(&store, &claim()).await;
    lost.notified().await;
    let until = Instant::now() + 4 * timeout;
    while Instant::now() < until {
        // One of them has a connection that is set aside for releases.
        let (asked, over) = (request(&claim()), claim());
        let _ = tokio::join!(store.acquire(&asked), store.release(&over));
        let connected = status(&mut raw, "Threads_connected").await - 1;
        assert!(connected <= 2, "{connected} connections of two");
    }
}
