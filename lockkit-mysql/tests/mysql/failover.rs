//! Servers that are not what they were: a primary that became a replica, data that is older than it was.

use std::{
    path::{Path, PathBuf},
    pin::pin,
    process::Command,
    sync::Arc,
    time::Duration,
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, Fence, LockKey, LockStore as _, Mode, Order, Query, Result,
    store::{Record, Records, Swap},
};
use lockkit_mysql::{MySqlStore, lock_in_transaction};
use lockkit_testkit::{
    faults::{Direction, poll_until},
    servers::{Keep, MySqlServer},
};
use sqlx::{Connection as _, MySqlConnection};
use tokio::time::sleep;

use crate::support::{
    Ctx, attempt, claim, config, end, eventually, free, hold, lock_rows, proxied, raw, renew, renewal, request, rival,
    status, tests,
};

tests! {
    a_new_connection_to_a_replica_is_refused
    what_a_former_primary_knows_of_locks_is_told_to_nobody
    a_refused_connection_makes_others_look_again
    a_refused_statement_makes_other_connections_look_again
    a_former_primary_says_of_no_lease_that_it_is_over
    a_statement_that_grants_looks_itself_whether_the_server_takes_writes
    a_server_with_older_data_gives_no_fence_twice
    a_server_that_became_a_replica_is_asked_for_no_record
    what_is_granted_while_a_server_becomes_a_replica_is_no_lease
    what_is_released_while_a_server_becomes_a_replica_may_be_held
    a_client_that_stood_still_changes_nothing_at_a_former_primary
    a_transaction_is_told_nothing_by_a_former_primary
}

/// The administrator, who could write to a replica.
async fn administrated(ctx: &Ctx) -> (MySqlServer, MySqlStore) {
    let server = ctx.private(&[]).await;
    // Or the removal of unused rows would ask in the background.
    let store = MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    know(&server).await;
    (server, store)
}

/// Makes the row that is looked for.
async fn know(server: &MySqlServer) {
    let row = "INSERT INTO resource_lock (resource_name, create_time, update_time) \
               VALUES ('known', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6))";
    server.admin(row).await.expect("a row");
}

#[track_caller]
fn is_refused(error: &lockkit_core::Error) {
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    assert!(error.message().contains("read_only") && error.message().contains("primary"), "{error}");
}

async fn a_new_connection_to_a_replica_is_refused(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (proxy, config) = proxied(&server).await;
    let (store, mine) = (MySqlStore::connect(config).await.expect("connect"), claim());
    hold(&store, &mine).await;
    server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
    proxy.cut().await;
    // The first may find that its connection is gone.
    drop(attempt(&store, &claim()).await);
    is_refused(&attempt(&store, &claim()).await.expect_err("no writes"));
    server.admin("SET GLOBAL read_only = 0").await.expect("writable");
    free(&store, &mine).await;
}

/// It does not know who has a lock at the new one, also in the seconds in which no connection is probed.
async fn what_a_former_primary_knows_of_locks_is_told_to_nobody(ctx: Arc<Ctx>) {
    let (server, store) = administrated(&ctx).await;
    let (mine, without_claims) = (claim(), MySqlStore::new(config(&server)).expect("config"));
    hold(&store, &mine).await;
    let beginning = mine.key.as_str().split('/').next().expect("a part").to_owned();
    for store in [&store, &without_claims] {
        for query in [
            Query::Keys(vec![mine.key.clone()]),
            Query::Keys(vec![claim().key]),
            Query::Queue(mine.key.clone()),
            Query::Prefix(beginning.clone()),
            Query::Prefix("nobody/".to_owned()),
        ] {
            look(store).await.expect("it has a connection that is known to be good");
            server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
            is_refused(&store.inspect(&query).await.expect_err("it may be old"));
            server.admin("SET GLOBAL read_only = 0").await.expect("writable");
        }
    }
}

/// A connection is trusted for some seconds after a probe, but not after another one showed that the server has changed.
async fn a_refused_connection_makes_others_look_again(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (proxy, config) = proxied(&server).await;
    // It waits for the answer for as long as the rest takes.
    let config = config.timeout(Duration::from_secs(20));
    let (store, mut raw) = (MySqlStore::connect(config).await.expect("connect"), raw(&server).await);
    know(&server).await;
    look(&store).await.expect("its statement is prepared");
    // One has the connection that there is, until its answer comes. The other needs a new one.
    proxy.hold(Direction::ToClient);
    let asked = status(&mut raw, "Com_select").await;
    let demote = async {
        // It is counted before it is run.
        eventually("the server was asked", async || status(&mut raw, "Com_select").await > asked).await;
        eventually("the server has answered", async || is_idle(&server).await).await;
        server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
        let (new, ()) = tokio::join!(look(&store), async { proxy.release(Direction::ToClient) });
        is_refused(&new.expect_err("a new connection"));
    };
    let (old, ()) = tokio::join!(look(&store), demote);
    old.expect("it was asked before");
    looks_again(&server, &store).await;
}

/// So does each, also when the refusal was the answer to a statement.
async fn a_refused_statement_makes_other_connections_look_again(ctx: Arc<Ctx>) {
    let ((server, store), mine) = (administrated(&ctx).await, claim());
    let (one, two) = tokio::join!(look(&store), look(&store));
    one.and(two).expect("two connections");
    hold(&store, &mine).await;
    server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
    is_refused(&renew(&store, &renewal(&mine)).await.expect_err("no writes"));
    looks_again(&server, &store).await;
}

/// A connection whose next question would be answered is probed before.
async fn looks_again(server: &MySqlServer, store: &MySqlStore) {
    server.admin("SET GLOBAL read_only = 0").await.expect("writable");
    let mut raw = raw(server).await;
    let before = status(&mut raw, "Com_select").await;
    look(store).await.expect("it takes writes");
    assert_eq!(status(&mut raw, "Com_select").await - before, 2, "a probe and a question");
}

/// After a planned switch-over it does not know what its successor granted.
async fn a_former_primary_says_of_no_lease_that_it_is_over(ctx: Arc<Ctx>) {
    let (server, store) = administrated(&ctx).await;
    let (no_row, freed, theirs) = (claim(), claim(), claim());
    hold(&store, &freed).await;
    free(&store, &freed).await;
    hold(&store, &theirs).await;
    // Its release would free a row that the new primary has as it was.
    let held = theirs.clone();
    for unknown in [no_row, rival(&freed), rival(&theirs), held] {
        for what in ["renew", "release"] {
            look(&store).await.expect("it has a connection that is known to be good");
            server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
            let answer = match what {
                "renew" => renew(&store, &renewal(&unknown)).await.map(|answer| format!("{answer:?}")),
                _ => store.release(&unknown).await.map(|answer| format!("{answer:?}")),
            };
            let error = answer.expect_err(what);
            assert!(error.message().contains("read_only") && error.message().contains("primary"), "{error}");
            server.admin("SET GLOBAL read_only = 0").await.expect("writable");
        }
    }
    free(&store, &theirs).await;
}

/// A process that was frozen takes its connections for as fresh as they were, and a grant would be a second one beside the new
/// primary's.
async fn a_statement_that_grants_looks_itself_whether_the_server_takes_writes(ctx: Arc<Ctx>) {
    let ((server, store), mine, reader) = (administrated(&ctx).await, claim(), claim());
    let reader = Claim { mode: Mode::Shared, ..reader };
    let (name, text) = (LockKey::new("a").expect("name"), Record::new("text").expect("text"));
    hold(&store, &mine).await;
    hold(&store, &reader).await;
    // It makes the row.
    let (free_lock, free_reader) = (claim(), Claim { mode: Mode::Shared, ..claim() });
    for claim in [&free_lock, &free_reader] {
        hold(&store, claim).await;
        free(&store, claim).await;
    }
    assert_eq!(store.compare_and_set(&name, None, Some(&text)).await.expect("set"), Swap::Done);
    let ask = async |what| match what {
        "acquire" => attempt(&store, &rival(&free_lock)).await.map(drop),
        "replace" => {
            store.acquire(&AcquireRequest { from: Some(mine.token), ..request(&rival(&mine)) }).await.map(drop)
        }
        "share" => attempt(&store, &rival(&free_reader)).await.map(drop),
        "renew" => renew(&store, &renewal(&mine)).await.map(drop),
        "renew a share" => renew(&store, &renewal(&reader)).await.map(drop),
        _ => store.compare_and_set(&name, Some(&text), None).await.map(drop),
    };
    for what in ["acquire", "replace", "share", "renew", "renew a share", "change a record"] {
        look(&store).await.expect("it has a connection that is known to be good");
        server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
        let answer = ask(what).await;
        is_refused(&answer.expect_err(what));
        server.admin("SET GLOBAL read_only = 0").await.expect("writable");
    }
    for what in ["acquire", "share", "renew", "renew a share", "change a record", "replace"] {
        ask(what).await.expect(what);
    }
}

/// Asks what needs no write.
async fn look(store: &MySqlStore) -> lockkit_core::Result<()> {
    store.inspect(&Query::Keys(vec![LockKey::new("known").expect("name")])).await.map(drop)
}

/// A backup that was put back, or a crash that lost what was not on the disk yet: the counter is there, but an old one.
async fn a_server_with_older_data_gives_no_fence_twice(ctx: Arc<Ctx>) {
    let (server, store) = administrated(&ctx).await;
    let (old, new) = (claim(), claim());
    let mut last = grants(&store, &old.key, 5).await;
    let data = server.admin("SELECT @@datadir").await.expect("datadir")[0][0].clone().expect("a path");
    let kept = PathBuf::from(format!("{}.kept", data.trim_end_matches('/')));
    server.kill().await.expect("kill");
    copy(Path::new(&data), &kept);
    server.restart(Keep::Data).await.expect("restart");
    // The first finds that its connection is gone.
    drop(attempt(&store, &claim()).await);
    last = last.max(grants(&store, &old.key, 50).await).max(grants(&store, &new.key, 50).await);
    server.kill().await.expect("kill");
    std::fs::remove_dir_all(&data).expect("remove");
    copy(&kept, Path::new(&data));
    server.restart(Keep::Data).await.expect("restart");
    let fresh = MySqlStore::connect(config(&server)).await.expect("connect");
    drop(attempt(&store, &claim()).await);
    for (store, key) in [(&fresh, &old.key), (&store, &old.key), (&fresh, &new.key), (&store, &new.key)] {
        let next = grants(store, key, 1).await;
        assert!(next > last, "{next} after {last}");
    }
}

/// Takes a lock and gives it back, so many times; gives the last fence.
async fn grants(store: &MySqlStore, key: &lockkit_core::LockKey, times: usize) -> Fence {
    let mut last = Fence::NONE;
    for _ in 0..times {
        let mine = rival(&lockkit_core::Claim { key: key.clone(), ..claim() });
        let fence = hold(store, &mine).await.fence;
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        free(store, &mine).await;
    }
    last
}

fn copy(from: &Path, to: &Path) {
    let done = Command::new("cp").arg("-a").arg(from).arg(to).status().expect("cp");
    assert!(done.success(), "{} could not be copied", from.display());
}

async fn a_server_that_became_a_replica_is_asked_for_no_record(ctx: Arc<Ctx>) {
    let (server, store) = administrated(&ctx).await;
    let (name, text) = (LockKey::new("a").expect("name"), Record::new("text").expect("text"));
    for known in [None, Some(text.clone())] {
        if known.is_some() {
            assert_eq!(store.compare_and_set(&name, None, Some(&text)).await.expect("set"), Swap::Done);
        }
        assert_eq!(store.read(&name).await.expect("read"), known);
        server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
        is_refused(&store.read(&name).await.expect_err("it may be old"));
        server.admin("SET GLOBAL read_only = 0").await.expect("writable");
    }
}

/// The server is told to take no writes while a transaction waits for the row of the lock, after it has looked at that. It is set so between
/// two statements of the transaction, unless it comes to be only after the last. Says whether the effect is left open then.
async fn is_in_doubt<T>(
    server: &MySqlServer,
    somebody: &mut MySqlConnection,
    locked: &Claim,
    asking: impl Future<Output = Result<T>>,
) -> bool {
    lock_rows(somebody, &[locked]).await;
    let set = async {
        sleep(Duration::from_millis(100)).await;
        server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
    };
    let unlock = async {
        sleep(Duration::from_millis(300)).await;
        end(somebody).await;
    };
    let (answer, (), ()) = tokio::join!(asking, set, unlock);
    server.admin("SET GLOBAL read_only = 0").await.expect("writable");
    answer.is_err_and(|error| {
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
        true
    })
}

/// The primary in its place may not have the lease.
async fn what_is_granted_while_a_server_becomes_a_replica_is_no_lease(ctx: Arc<Ctx>) {
    let (server, store) = administrated(&ctx).await;
    let used = claim();
    let mut somebody = raw(&server).await;
    for _ in 0..20 {
        let asked = rival(&used);
        let in_order = AcquireRequest { order: Order::Fifo, wait: Duration::from_secs(30), ..request(&asked) };
        // One that has waited asks by a transaction.
        hold(&store, &used).await;
        assert!(matches!(store.acquire(&in_order).await, Ok(Attempt::Contended(_))));
        free(&store, &used).await;
        if is_in_doubt(&server, &mut somebody, &used, store.acquire(&in_order)).await {
            return;
        }
        free(&store, &asked).await;
    }
    panic!("each was told of a lease that the primary in its place may not have");
}

/// The primary in its place may still have the lease.
async fn what_is_released_while_a_server_becomes_a_replica_may_be_held(ctx: Arc<Ctx>) {
    let (server, store) = administrated(&ctx).await;
    let shared = || Claim { mode: Mode::Shared, ..claim() };
    let mut somebody = raw(&server).await;
    for _ in 0..20 {
        let (one, two) = (shared(), shared());
        let other = Claim { key: one.key.clone(), ..two };
        // One that found others there is released by a transaction.
        hold(&store, &one).await;
        hold(&store, &other).await;
        if is_in_doubt(&server, &mut somebody, &one, store.release(&other)).await {
            return;
        }
        free(&store, &one).await;
    }
    panic!("each was told that a lease has ended that the primary in its place may still have");
}

/// A process that stands still between two questions takes the server for what it was. What it changes there then is missing at the new
/// primary, or is there already, and replication stops at the next change of that row.
async fn a_client_that_stood_still_changes_nothing_at_a_former_primary(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (proxy, config) = proxied(&server).await;
    let store = MySqlStore::connect(config.keep_rows(true)).await.expect("connect");
    // It waits for each answer.
    proxy.delay(Direction::ToClient, Duration::from_millis(2));
    let (holder, text) = (claim(), Record::new("text").expect("text"));
    let (first, second) = (rival(&holder), rival(&holder));
    let wait = async |claim: &Claim| {
        let in_order = AcquireRequest { order: Order::Fifo, wait: Duration::from_secs(30), ..request(claim) };
        store.acquire(&in_order).await.map(drop)
    };
    let ask = async |what| match what {
        "make a row" => attempt(&store, &claim()).await.map(drop),
        "make a record" => store.compare_and_set(&claim().key, None, Some(&text)).await.map(drop),
        "keep a place" => wait(&second).await,
        _ => store.remove_unused(Duration::from_secs(3600)).await.map(drop),
    };
    hold(&store, &holder).await;
    for what in ["make a row", "make a record", "keep a place", "remove what is unused"] {
        for polls in 1..100 {
            leave_unused(&server).await;
            for waiter in [&first, &second] {
                wait(waiter).await.expect("it has a place");
            }
            // It begins on a new connection.
            server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
            is_refused(&look(&store).await.expect_err("no writes"));
            server.admin("SET GLOBAL read_only = 0").await.expect("writable");
            let mut asking = pin!(ask(what));
            if poll_until(asking.as_mut(), polls, || {}).await.is_some() {
                assert!(polls > 3, "{what}: it is asked for on a new connection");
                break;
            }
            server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
            eventually("the server has done what it was asked", async || is_idle(&server).await).await;
            let before = contents(&server).await;
            let answer = asking.await;
            assert_eq!(contents(&server).await, before, "{what}, from poll {polls} on: {answer:?}");
            server.admin("SET GLOBAL read_only = 0").await.expect("writable");
        }
    }
}

/// Others may have the lock at the new primary, while the transaction began at the former one, and could commit there.
async fn a_transaction_is_told_nothing_by_a_former_primary(ctx: Arc<Ctx>) {
    let ((former, _), (_new, store)) = tokio::join!(administrated(&ctx), administrated(&ctx));
    let mut raw = raw(&former).await;
    let unused = claim().key;
    let mut transaction = raw.begin().await.expect("begin");
    former.admin("SET GLOBAL read_only = 1").await.expect("read-only");
    for name in ["known", unused.as_str()] {
        is_refused(&lock_in_transaction(&mut transaction, name).await.expect_err("it may be locked elsewhere"));
        // The row's id is that at the new primary.
        is_refused(&store.lock_in_transaction(&mut transaction, name).await.expect_err("it may be locked elsewhere"));
    }
    former.admin("SET GLOBAL read_only = 0").await.expect("writable");
    for name in ["known", unused.as_str()] {
        assert!(lock_in_transaction(&mut transaction, name).await.expect("lock").is_locked());
        assert!(store.lock_in_transaction(&mut transaction, name).await.expect("lock").is_locked());
    }
}

/// Makes a row that nobody has used for long, and a claim that is long over.
async fn leave_unused(server: &MySqlServer) {
    let row = "INSERT INTO resource_lock (resource_name, create_time, update_time) \
               VALUES (UUID(), UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) - INTERVAL 1 DAY)";
    let claim = "INSERT INTO resource_lock_claim (lock_id, token, place, mode, permits, fence, span, `count`, ttl, expires, kept, node_info) \
                 SELECT MAX(id), '0123456789abcdef', 0, 1, 0, 1, 1, 1, 1, UTC_TIMESTAMP(6) - INTERVAL 1 DAY, UTC_TIMESTAMP(6), '' \
                 FROM resource_lock";
    // What others left is gone, so that there is as much to do each time.
    let rows = "DELETE FROM resource_lock WHERE fence_last = 0 AND resource_name <> 'known'";
    for made in [rows, "DELETE FROM resource_lock_claim WHERE place = 0", row, claim] {
        server.admin(made).await.expect("made");
    }
}

/// Whether it does nothing but to answer this.
async fn is_idle(server: &MySqlServer) -> bool {
    let sessions = server.admin("SHOW PROCESSLIST").await.expect("ask");
    sessions.iter().filter(|row| !matches!(row[4].as_deref(), Some("Sleep" | "Daemon" | "Connect"))).count() == 1
}

/// What is in the tables.
async fn contents(server: &MySqlServer) -> Vec<Vec<Option<String>>> {
    server.admin("CHECKSUM TABLE resource_lock, resource_lock_claim").await.expect("ask")
}
