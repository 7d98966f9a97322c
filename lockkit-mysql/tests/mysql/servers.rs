//! Servers that refuse: logins, writes, connections; and settings that change what statements mean.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{Effect, ErrorKind, LockStore, LossReason, Query};
use lockkit_mysql::{MySqlConfig, MySqlStore};
use lockkit_testkit::servers::{RedisOptions, RedisServer};
use sqlx::Connection as _;
use tokio::{io::AsyncWriteExt as _, net::TcpListener};

use crate::support::{
    Ctx, Undriven, attempt, claim, config, eventually, free, hold, is_held, lost, raw, renew, renewal, status, tests,
};

tests! {
    a_wrong_password_is_denied
    an_unknown_database_is_misconfigured
    a_password_works_without_tls
    missing_rights_are_denied
    a_read_only_server_is_unavailable
    too_many_connections_are_unavailable
    a_server_that_is_not_there_is_unavailable
    hostile_settings_change_nothing
    limits_for_people_end_no_leases
    weak_durability_is_warned_of
    a_server_that_logs_statements_is_refused
    what_else_answers_is_named
    what_says_nothing_is_given_up_in_time
    two_runtimes_keep_their_connections
}

async fn a_wrong_password_is_denied(ctx: Arc<Ctx>) {
    let config = ctx.config().await.username("root").password("hunter2");
    let error = MySqlStore::connect(config).await.expect_err("wrong password");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
    assert!(!format!("{error} {error:?}").contains("hunter2"));
}

async fn an_unknown_database_is_misconfigured(ctx: Arc<Ctx>) {
    let url = ctx.server().await.url().replace("/lockkit", "/nowhere");
    let error = MySqlStore::from_url(&url).await.expect_err("no such database");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    assert!(error.message().contains("nowhere") && error.message().contains("path of the URL"), "{error}");
}

async fn with_user(ctx: &Ctx, name: &str, rights: &str) -> lockkit_mysql::MySqlConfig {
    let server = ctx.server().await;
    server.admin(&format!("CREATE USER {name}@'%' IDENTIFIED BY 'p@ss/w:rd'")).await.expect("user");
    server.admin(&format!("GRANT {rights} ON lockkit.* TO {name}@'%'")).await.expect("rights");
    ctx.config().await.username(name).password("p@ss/w:rd")
}

/// MySQL's way to log in sends the password, encrypted by a key of the server if there is no TLS.
async fn a_password_works_without_tls(ctx: Arc<Ctx>) {
    let config = with_user(&ctx, "plain", "SELECT, INSERT, UPDATE, DELETE").await;
    let (store, mine) = (MySqlStore::connect(config).await.expect("connect"), claim());
    hold(&store, &mine).await;
    assert!(is_held(&renew(&store, &renewal(&mine)).await));
    free(&store, &mine).await;
}

async fn missing_rights_are_denied(ctx: Arc<Ctx>) {
    let config = with_user(&ctx, "reader", "SELECT").await;
    let error = MySqlStore::connect(config.clone().table("t2").create(true)).await.expect_err("may not create");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let store = MySqlStore::connect(config).await.expect("it may look");
    let error = attempt(&store, &claim()).await.expect_err("may not write");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
}

async fn a_read_only_server_is_unavailable(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    server.admin("CREATE USER app@'%' IDENTIFIED BY 'pw'").await.expect("user");
    server.admin("GRANT SELECT, INSERT, UPDATE ON lockkit.* TO app@'%'").await.expect("rights");
    let config = config(&server).username("app").password("pw");
    let (store, mine) = (MySqlStore::connect(config.clone()).await.expect("connect"), claim());
    hold(&store, &mine).await;
    server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
    for error in [
        attempt(&store, &claim()).await.expect_err("no writes"),
        store.release(&mine).await.expect_err("no writes"),
        renew(&store, &renewal(&mine)).await.expect_err("no writes"),
        MySqlStore::connect(config).await.map(drop).expect_err("no primary"),
    ] {
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    }
    server.admin("SET GLOBAL read_only = 0").await.expect("writable");
    free(&store, &mine).await;
}

async fn too_many_connections_are_unavailable(ctx: Arc<Ctx>) {
    let server = ctx.private(&["--max-connections=10"]).await;
    server.admin("CREATE USER app@'%' IDENTIFIED BY 'pw'").await.expect("user");
    server.admin("GRANT ALL ON lockkit.* TO app@'%'").await.expect("rights");
    let url = server.url().replace("root@", "app:pw@");
    let mut open = Vec::new();
    // A connection that was closed just now, as those of an administrator were, counts for a moment longer.
    eventually("all are taken", async || {
        open.extend(sqlx::MySqlConnection::connect(&url).await);
        open.len() == 10
    })
    .await;
    let error = MySqlStore::from_url(&url).await.expect_err("no room");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    assert!(error.message().contains("connections"), "{error}");
}

async fn a_server_that_is_not_there_is_unavailable(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (store, mine) = (MySqlStore::connect(config(&server)).await.expect("connect"), claim());
    hold(&store, &mine).await;
    server.kill().await.expect("kill");
    // The first finds a connection that is gone, the second none.
    let error = attempt(&store, &claim()).await.expect_err("it is dead");
    assert!(matches!(error.kind(), ErrorKind::Unavailable), "{error}");
    let error = attempt(&store, &claim()).await.expect_err("it is dead");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    assert!(error.message().contains("refused"), "the reason is hidden: {error}");
}

/// What a server is set to must not change what the statements mean: the order of assignments, autocommit, quotes.
async fn hostile_settings_change_nothing(ctx: Arc<Ctx>) {
    let modes = if ctx.is_mariadb() {
        "--sql-mode=ANSI,SIMULTANEOUS_ASSIGNMENT,NO_BACKSLASH_ESCAPES,ORACLE"
    } else {
        "--sql-mode=ANSI,NO_BACKSLASH_ESCAPES,NO_UNSIGNED_SUBTRACTION,PAD_CHAR_TO_FULL_LENGTH"
    };
    let settings = [
        modes,
        "--autocommit=0",
        "--transaction-isolation=SERIALIZABLE",
        "--default-time-zone=-08:00",
        "--collation-server=latin1_swedish_ci",
        "--character-set-server=latin1",
    ];
    let server = ctx.private(&settings).await;
    let (store, other) = (
        MySqlStore::connect(config(&server)).await.expect("connect"),
        MySqlStore::connect(config(&server)).await.expect("connect"),
    );
    let mut last = 0;
    for _ in 0..3 {
        let mut mine = claim();
        mine.key = lockkit_core::LockKey::new("ä ").expect("name");
        let granted = hold(&store, &mine).await;
        assert!(granted.fence.get() > last, "{} after {last}", granted.fence);
        last = granted.fence.get();
        crate::support::contended(attempt(&other, &crate::support::rival(&mine)).await.expect("acquire"));
        assert!(is_held(&renew(&store, &renewal(&mine)).await));
        free(&store, &mine).await;
    }
}

/// A server may be set to give no more than so many rows, and to refuse updates that look careless.
async fn limits_for_people_end_no_leases(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    server.admin("SET GLOBAL sql_select_limit = 5").await.expect("limit");
    server.admin("SET GLOBAL sql_safe_updates = 1").await.expect("limit");
    let store = MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    let claims: Vec<_> = (0..40).map(|_| claim()).collect();
    for claim in &claims {
        hold(&store, claim).await;
    }
    free(&store, &claims[7]).await;
    // One is gone: so the rows are read.
    let renewals: Vec<_> = claims.iter().map(renewal).collect();
    for (number, answer) in store.renew(&renewals).await.into_iter().enumerate() {
        match number {
            7 => assert_eq!(lost(answer), LossReason::Gone),
            _ => assert!(is_held(&answer), "{number}: {answer:?}"),
        }
    }
    let keys = claims.iter().map(|claim| claim.key.clone()).collect();
    let states = store.inspect(&Query::Keys(keys)).await.expect("inspect");
    assert_eq!(states.iter().filter(|state| state.holders.is_empty()).count(), 1, "one is free");
    let age = "UPDATE lockkit.resource_lock SET update_time = update_time - INTERVAL 1 DAY LIMIT 40";
    server.admin(age).await.expect("age");
    assert_eq!(store.remove_unused(Duration::from_secs(3600)).await.expect("gc"), 1);
}

async fn weak_durability_is_warned_of(ctx: Arc<Ctx>) {
    let (weak, strong) = (ctx.store().await, ctx.private(&["--innodb-flush-log-at-trx-commit=1"]).await);
    assert_eq!(weak.warnings().len(), 1);
    assert!(weak.warnings()[0].contains("innodb_flush_log_at_trx_commit is 2"));
    let strong = MySqlStore::connect(config(&strong)).await.expect("connect");
    assert!(strong.warnings().is_empty(), "{:?}", strong.warnings());
}

/// With READ COMMITTED each write would fail.
async fn a_server_that_logs_statements_is_refused(ctx: Arc<Ctx>) {
    let server = ctx.private(&["--log-bin=log", "--server-id=1", "--binlog-format=STATEMENT"]).await;
    let error = MySqlStore::connect(config(&server)).await.expect_err("no write would succeed");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.message().contains("set binlog_format to ROW or MIXED"), "{error}");
    // One that did not check says the same, and nothing happened.
    let unchecked = MySqlStore::new(config(&server)).expect("config");
    let error = attempt(&unchecked, &claim()).await.expect_err("a write");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unsupported, Effect::None), "{error}");
    assert!(error.message().contains("set binlog_format to ROW or MIXED"), "{error}");
    server.admin("SET GLOBAL binlog_format = ROW").await.expect("row");
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    hold(&store, &claim()).await;
}

/// Each end waits for the other to speak first.
async fn what_else_answers_is_named(_: Arc<Ctx>) {
    let (open, closed) = (
        RedisServer::start(RedisOptions::default()).await.expect("a server"),
        RedisServer::start(RedisOptions::default().password("hunter2")).await.expect("a server"),
    );
    for (addr, what) in [
        (open.addr(), "a Redis server answers"),
        (closed.addr(), "a Redis server answers"),
        (speaker(b"-ERR max number of clients reached\r\n").await, "a Redis server answers"),
        (speaker(b"SSH-2.0-something\r\n").await, "no MySQL server"),
    ] {
        let config = MySqlConfig::new("127.0.0.1", addr.port(), "lockkit").timeout(Duration::from_secs(5));
        let asked = Instant::now();
        for error in [
            MySqlStore::connect(config.clone()).await.map(drop).expect_err("no MySQL"),
            lockkit_mysql::diagnose(&config).await.map(drop).expect_err("no MySQL"),
            lockkit_mysql::schema::create(&config).await.expect_err("no MySQL"),
        ] {
            assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None), "{error}");
            assert!(error.message().contains(what), "{what}: {error}");
        }
        assert!(asked.elapsed() < Duration::from_secs(15), "{what}: it took {:?}", asked.elapsed());
    }
}

async fn what_says_nothing_is_given_up_in_time(_: Arc<Ctx>) {
    let addr = speaker(b"").await;
    let config = MySqlConfig::new("127.0.0.1", addr.port(), "lockkit").timeout(Duration::from_secs(2));
    let asked = Instant::now();
    let error = MySqlStore::connect(config).await.expect_err("nothing");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::None), "{error}");
    // Not twice as long, once for the driver and once for the question what else may answer.
    assert!(asked.elapsed() < Duration::from_secs(3), "it took {:?}", asked.elapsed());
}

/// A server that says this to whoever comes, and nothing more.
async fn speaker(words: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let addr = listener.local_addr().expect("address");
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut client, _)) = listener.accept().await {
            client.write_all(words).await.expect("words");
            open.push(client);
        }
    });
    addr
}

/// What one runtime is done with is of no use to the other, and stays for its next operation: to connect anew takes several round trips.
async fn two_runtimes_keep_their_connections(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = Arc::new(MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect"));
    let (mut raw, mut other) = (raw(&server).await, Undriven::new());
    let before = status(&mut raw, "Connections").await;
    for _ in 0..20 {
        let mine = claim();
        hold(&store, &mine).await;
        let store = Arc::clone(&store);
        other.run(async move { free(&store, &mine).await }).await;
    }
    let opened = status(&mut raw, "Connections").await - before;
    assert!(opened < 8, "{opened} connections were opened for 40 operations");
}
