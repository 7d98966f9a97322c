//! The table: missing, wrong, classic, locked.

use std::{pin::pin, sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Effect, ErrorKind, HolderInfo, LockKey, LockStore, Query};
use lockkit_mysql::{MySqlConfig, MySqlStore, schema};
use sqlx::Executor as _;
use tokio::time::timeout;

use crate::support::{Ctx, claim, config, free, hold, raw, request, tests};

tests! {
    a_missing_table_is_explained
    a_wrong_table_is_explained
    create_makes_the_table_and_changes_none
    a_classic_table_is_brought_forward
    a_column_that_can_not_have_every_name_is_found
    a_classic_table_with_names_twice_is_left_alone
    an_upgrade_waits_for_those_who_use_the_table
    many_locks_are_read_by_index
    what_others_wrote_is_no_lock
    a_locked_table_costs_a_new_store_no_kind_of_lock
    a_table_that_is_changed_costs_a_new_store_no_kind_of_lock
}

async fn a_missing_table_is_explained(ctx: Arc<Ctx>) {
    let config = ctx.config().await.table("not_there");
    let error = MySqlStore::connect(config.clone()).await.expect_err("there is no such table");
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    assert!(error.message().contains("CREATE TABLE IF NOT EXISTS `not_there` ("), "{error}");
    assert_eq!(error.to_string().lines().count(), 1);
    assert_eq!(schema::upgrade(&config).await.expect_err("nothing to upgrade").kind(), ErrorKind::Misconfigured);
    // A store that did not check says it, too.
    let unchecked = MySqlStore::new(config).expect("config");
    let error = crate::support::attempt(&unchecked, &claim()).await.expect_err("there is no such table");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None), "{error}");
    assert!(error.message().contains("missing") && error.message().contains("lockkit init"), "{error}");
}

async fn a_wrong_table_is_explained(ctx: Arc<Ctx>) {
    let mut raw = ctx.raw().await;
    raw.execute("CREATE TABLE wrong (id INT PRIMARY KEY, resource_name VARCHAR(50)) ENGINE=MyISAM").await.expect("ddl");
    let config = ctx.config().await.table("wrong").create(true);
    let error = MySqlStore::connect(config.clone()).await.expect_err("no table of locks");
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    for fault in ["resource_name is varchar(50), not varbinary(512)", "token is missing", "unique", "InnoDB", "CREATE"]
    {
        assert!(error.message().contains(fault), "{fault}: {error}");
    }
    let error = schema::upgrade(&config).await.expect_err("not the classic shape");
    assert!(error.message().contains("no column node_info"), "{error}");
}

async fn create_makes_the_table_and_changes_none(ctx: Arc<Ctx>) {
    let config = ctx.config().await.table("made");
    let store = MySqlStore::connect(config.clone().create(true)).await.expect("made");
    let mine = claim();
    hold(&store, &mine).await;
    schema::create(&config).await.expect("it is there");
    schema::check(&config).await.expect("it is right");
    assert!(!schema::upgrade(&config).await.expect("nothing to do"));
    free(&MySqlStore::connect(config.create(true)).await.expect("connect"), &mine).await;
}

const CLASSIC: &str = "(id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, resource_name VARCHAR(128) NOT NULL, \
     node_info VARCHAR(128) DEFAULT NULL, count VARCHAR(11) DEFAULT NULL, create_time DATETIME DEFAULT NULL, \
     update_time DATETIME DEFAULT NULL";

async fn a_classic_table_is_brought_forward(ctx: Arc<Ctx>) {
    let mut raw = ctx.raw().await;
    let ddl = format!("CREATE TABLE classic {CLASSIC}, UNIQUE KEY uk (resource_name)) DEFAULT CHARSET=latin1");
    raw.execute(sqlx::AssertSqlSafe(ddl)).await.expect("ddl");
    let rows = "INSERT INTO classic (resource_name, node_info, count, create_time) VALUES \
         ('order/ä', 'node 1', '2', '2020-01-01 10:00:00'), ('b', NULL, 'many', NULL), ('c', 'x', NULL, NULL)";
    raw.execute(rows).await.expect("rows");
    let config = ctx.config().await.table("classic");
    let error = MySqlStore::connect(config.clone()).await.expect_err("not yet");
    assert!(error.message().contains("upgrade"), "{error}");
    assert!(schema::upgrade(&config).await.expect("upgrade"));
    assert!(!schema::upgrade(&config).await.expect("again"));
    let store = MySqlStore::connect(config).await.expect("now");
    let kept = "SELECT CAST(resource_name AS CHAR), node_info, CAST(`count` AS CHAR), CAST(YEAR(create_time) AS CHAR) \
         FROM classic ORDER BY id";
    let kept: Vec<(String, String, String, String)> = sqlx::query_as(kept).fetch_all(&mut raw).await.expect("rows");
    assert_eq!(kept.len(), 3);
    assert_eq!(kept[0], ("order/ä".into(), "node 1".into(), "2".into(), "2020".into()));
    assert_eq!((kept[1].1.as_str(), kept[1].2.as_str(), kept[2].2.as_str()), ("", "0", "0"));
    let mut mine = claim();
    mine.key = LockKey::new("order/ä").expect("name");
    hold(&store, &mine).await;
    free(&store, &mine).await;
    let (rows,): (i64,) = sqlx::query_as("SELECT COUNT(*) FROM classic").fetch_one(&mut raw).await.expect("count");
    assert_eq!(rows, 3, "the lock of the old name has the old row");
}

async fn a_column_that_can_not_have_every_name_is_found(ctx: Arc<Ctx>) {
    let config = ctx.config().await.table("letters");
    schema::create(&config).await.expect("made");
    let mut raw = ctx.raw().await;
    let latin = "ALTER TABLE letters MODIFY node_info VARCHAR(256) CHARACTER SET latin1 NOT NULL DEFAULT ''";
    raw.execute(latin).await.expect("ddl");
    let error = MySqlStore::connect(config.clone()).await.expect_err("it is not as it was made");
    assert!(error.message().contains("node_info is varchar(256) in latin1, not varchar(256)"), "{error}");
    assert!(schema::upgrade(&config).await.expect("upgrade"));
    let store = MySqlStore::connect(config).await.expect("now");
    let asked = AcquireRequest { holder: HolderInfo::new("worker@Łódź"), ..request(&claim()) };
    assert!(matches!(store.acquire(&asked).await.expect("acquire"), Attempt::Granted(_)));
}

async fn a_classic_table_with_names_twice_is_left_alone(ctx: Arc<Ctx>) {
    let mut raw = ctx.raw().await;
    raw.execute(sqlx::AssertSqlSafe(format!("CREATE TABLE twice {CLASSIC})"))).await.expect("ddl");
    let rows = "INSERT INTO twice (resource_name, count) VALUES ('a', '1'), ('A', '1'), ('a', '1')";
    raw.execute(rows).await.expect("rows");
    let config = ctx.config().await.table("twice");
    let error = schema::upgrade(&config).await.expect_err("one name in two rows");
    assert!(error.message().contains("Duplicate"), "{error}");
    raw.execute("DELETE FROM twice WHERE id = 3").await.expect("delete");
    assert!(schema::upgrade(&config).await.expect("now"), "names that differ in case are two names");
}

/// A change of the table waits for longer than a statement on a lock does.
async fn an_upgrade_waits_for_those_who_use_the_table(ctx: Arc<Ctx>) {
    let mut raw = ctx.raw().await;
    raw.execute(sqlx::AssertSqlSafe(format!("CREATE TABLE in_use {CLASSIC})"))).await.expect("ddl");
    raw.execute("BEGIN").await.expect("begin");
    raw.execute("SELECT * FROM in_use").await.expect("read");
    let config = ctx.config().await.table("in_use");
    let upgrade = tokio::spawn(async move { schema::upgrade(&config).await });
    // Twice as long as a statement on a lock waits.
    tokio::time::sleep(Duration::from_millis(2500)).await;
    assert!(!upgrade.is_finished(), "it did not wait: {:?}", upgrade.await);
    raw.execute("COMMIT").await.expect("commit");
    assert!(upgrade.await.expect("no panic").expect("upgrade"));
}

/// One statement for hundreds of names, and no scan of the table.
async fn many_locks_are_read_by_index(ctx: Arc<Ctx>) {
    let (store, mut raw) = (ctx.store().await, ctx.raw().await);
    let claims: Vec<_> = (0..3).map(|_| claim()).collect();
    for claim in &claims {
        hold(&store, claim).await;
    }
    let mut keys: Vec<_> = (0..1200).map(|number| LockKey::new(format!("free/{number}")).expect("name")).collect();
    keys[700] = claims[1].key.clone();
    keys[1199] = claims[1].key.clone();
    let states = store.inspect(&Query::Keys(keys.clone())).await.expect("inspect");
    assert_eq!(states.len(), keys.len());
    for (number, (state, key)) in states.iter().zip(&keys).enumerate() {
        assert_eq!((&state.key, state.holders.len()), (key, usize::from(number == 700 || number == 1199)));
    }
    raw.execute("CREATE TABLE many LIKE resource_lock").await.expect("ddl");
    let fill = "INSERT INTO many (resource_name, create_time, update_time) SELECT CONCAT('n', id), NOW(), NOW() FROM \
         (SELECT ROW_NUMBER() OVER () AS id FROM information_schema.columns a, information_schema.columns b \
          LIMIT 20000) AS numbers";
    raw.execute(fill).await.expect("rows");
    raw.execute("ANALYZE TABLE many").await.expect("analyze");
    let names: Vec<String> = (0..64).map(|number| format!("x'{:02x}{:02x}'", b'n', b'0' + number % 10)).collect();
    let pairs: Vec<String> = names.iter().map(|name| format!("({name}, x'00')")).collect();
    let (names, pairs) = (names.join(","), pairs.join(","));
    // MySQL shows an update as a tree that says nothing, unless it is asked for the old form, which MariaDB always shows.
    let explain = if ctx.is_mariadb() { "EXPLAIN" } else { "EXPLAIN FORMAT=TRADITIONAL" };
    let held =
        format!("resource_name IN ({names}) AND (resource_name, token) IN ({pairs}) AND expires > UTC_TIMESTAMP(6)");
    let free = format!("SELECT id AS free FROM many WHERE {held} LIMIT 64 FOR UPDATE SKIP LOCKED");
    let by_name = ["range"].as_slice();
    for (statement, accesses) in [
        (format!("SELECT * FROM many WHERE resource_name IN ({names})"), by_name),
        (format!("UPDATE many SET span = 1 WHERE {held}"), by_name),
        (format!("UPDATE ({free}) AS unlocked STRAIGHT_JOIN many ON id = free SET span = 1"), &["range", "eq_ref"]),
    ] {
        let plan = ctx.server().await.admin(&format!("{explain} {statement}")).await.expect("plan");
        for access in accesses {
            assert!(plan.iter().flatten().flatten().any(|cell| cell == access), "{}: {plan:?}", &statement[..40]);
        }
        let scans = plan.iter().filter(|step| step.iter().flatten().any(|cell| cell == "ALL"));
        let of_table = scans.filter(|step| step.iter().flatten().any(|cell| cell == "many"));
        assert_eq!(of_table.count(), 0, "{}: {plan:?}", &statement[..40]);
    }
}

async fn what_others_wrote_is_no_lock(ctx: Arc<Ctx>) {
    let config = ctx.config().await.table("others").create(true);
    let (store, mut raw) = (MySqlStore::connect(config).await.expect("connect"), ctx.raw().await);
    let rows = "INSERT INTO others (resource_name, create_time, update_time, expires) VALUES \
         (x'ff', NOW(), NOW(), '2100-01-01'), ('mine', NOW(), NOW(), '2100-01-01')";
    raw.execute(rows).await.expect("rows");
    let states = store.inspect(&Query::Prefix(String::new())).await.expect("inspect");
    assert_eq!(states.len(), 1);
    assert_eq!((states[0].key.as_str(), states[0].holders[0].token), ("mine", None));
    let mut mine = claim();
    mine.key = states[0].key.clone();
    let contention = crate::support::contended(crate::support::attempt(&store, &mine).await.expect("acquire"));
    assert!(contention.retry_after.is_some_and(|after| after > Duration::from_secs(3600)));
}

/// Connects as a new process would. It may fail for the moment, but a store that it gives has all kinds of locks.
async fn connect_to_all_kinds(config: &MySqlConfig, meanwhile: &str) -> bool {
    match MySqlStore::connect(config.clone()).await {
        Ok(store) => {
            assert!(store.info().capability.fifo, "{meanwhile}: {:?}", store.warnings());
            true
        }
        Err(error) => {
            assert!(error.is_retryable(), "{meanwhile}: {error}");
            false
        }
    }
}

async fn a_locked_table_costs_a_new_store_no_kind_of_lock(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (config, mut raw) = (config(&server).timeout(Duration::from_secs(6)), raw(&server).await);
    for lock in [
        "LOCK TABLES resource_lock_claim WRITE",
        "LOCK TABLES resource_lock WRITE, resource_lock_claim WRITE",
        "FLUSH TABLES WITH READ LOCK",
    ] {
        raw.execute(lock).await.expect("lock");
        connect_to_all_kinds(&config, lock).await;
        raw.execute("UNLOCK TABLES").await.expect("unlock");
        assert!(connect_to_all_kinds(&config, "no lock").await, "nothing is locked");
    }
}

/// Whoever changes a table keeps all others from it, and MariaDB does not even say then that there is one.
async fn a_table_that_is_changed_costs_a_new_store_no_kind_of_lock(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (config, mut raw) = (config(&server).timeout(Duration::from_secs(6)), raw(&server).await);
    let fill = "INSERT INTO resource_lock (resource_name, create_time, update_time) VALUES ('a', NOW(), NOW()); \
         INSERT INTO resource_lock_claim SELECT 0, 'a', 0, 0, 0, 0, 0, 0, 0, NOW(), NOW(), ''";
    raw.execute(sqlx::raw_sql(fill)).await.expect("rows");
    for table in ["resource_lock_claim", "resource_lock"] {
        // To check the one row takes seconds.
        let hashes = vec!["LENGTH(SHA2(REPEAT('a', 16000000), 512))"; 25].join(" + ");
        let change = format!(
            "ALTER TABLE {table} ADD CONSTRAINT slow_{table} CHECK ({hashes} > 0), ALGORITHM=COPY, LOCK=EXCLUSIVE"
        );
        let mut changing = pin!(raw.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(change))));
        let mut asked = 0;
        while timeout(Duration::from_millis(50), &mut changing).await.is_err() {
            connect_to_all_kinds(&config, table).await;
            asked += 1;
        }
        assert!(asked > 0, "{table} was changed at once");
    }
}
