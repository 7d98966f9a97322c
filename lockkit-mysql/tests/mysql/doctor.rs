//! What a doctor finds on servers that are well, and on each that is not.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{ErrorKind, Finding, Severity};
use lockkit_mysql::{MySqlConfig, diagnose, schema};
use lockkit_testkit::{
    findings::{beyond, codes, only},
    servers::{Keep, MySqlServer},
};

use crate::support::{Ctx, claim, config, free, hold, tests};

tests! {
    a_healthy_server_has_what_its_configuration_deserves
    lost_commits_and_idle_connections_are_found
    a_read_only_server_is_found
    a_table_that_is_missing_or_wrong_is_found
    every_missing_right_is_found
    a_missing_table_of_claims_is_found
    unused_rows_are_counted
    too_few_connections_are_found
    replication_is_found_from_both_sides
    a_server_that_can_not_be_asked_is_an_error
}

const DEFAULT: [(Severity, &str); 7] = [
    (Severity::Note, "password"),
    (Severity::Ok, "server"),
    (Severity::Ok, "durability"),
    (Severity::Ok, "session"),
    (Severity::Ok, "table"),
    (Severity::Ok, "access"),
    (Severity::Ok, "clock"),
];

async fn durable(ctx: &Ctx, args: &[&str]) -> MySqlServer {
    ctx.private(&[&["--innodb-flush-log-at-trx-commit=1", "--sync-binlog=1"], args].concat()).await
}

async fn findings(config: &MySqlConfig) -> Vec<Finding> {
    diagnose(config).await.expect("it can be asked")
}

/// The findings beyond those of a server with the default configuration.
async fn beyond_default(config: &MySqlConfig) -> Vec<Finding> {
    beyond(findings(config).await, &DEFAULT)
}

async fn a_healthy_server_has_what_its_configuration_deserves(ctx: Arc<Ctx>) {
    let server = durable(&ctx, &[]).await;
    assert_eq!(codes(&findings(&config(&server)).await), DEFAULT);
    let rows = server.admin("SELECT COUNT(*) FROM resource_lock").await.expect("count");
    assert_eq!(rows[0][0].as_deref(), Some("0"), "something was left behind");
}

async fn lost_commits_and_idle_connections_are_found(ctx: Arc<Ctx>) {
    let args = ["--innodb-flush-log-at-trx-commit=0", "--log-bin=log", "--server-id=1", "--sync-binlog=0"];
    let server = durable(&ctx, &args).await;
    let found = beyond_default(&config(&server)).await;
    assert_eq!(codes(&found), [(Severity::Warning, "durability"); 2]);
    assert!(found[0].summary.contains("innodb_flush_log_at_trx_commit is 0"), "{found:?}");
    assert!(found[1].summary.contains("sync_binlog is 0"), "{found:?}");
    let server = durable(&ctx, &["--wait-timeout=30"]).await;
    only(&beyond_default(&config(&server)).await, Severity::Note, "idle", "30 s");
}

async fn a_read_only_server_is_found(ctx: Arc<Ctx>) {
    let server = durable(&ctx, &[]).await;
    server.admin("SET GLOBAL read_only = 1").await.expect("read-only");
    only(&beyond_default(&config(&server)).await, Severity::Error, "read-only", "primary");
}

async fn a_table_that_is_missing_or_wrong_is_found(ctx: Arc<Ctx>) {
    let server = durable(&ctx, &[]).await;
    only(&beyond_default(&config(&server).table("nowhere")).await, Severity::Error, "table", "CREATE TABLE");
    let classic = "CREATE TABLE classic (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, resource_name VARCHAR(128), \
                   node_info VARCHAR(128), `count` VARCHAR(11), create_time DATETIME, update_time DATETIME)";
    server.admin(classic).await.expect("classic");
    only(&beyond_default(&config(&server).table("classic")).await, Severity::Error, "shape", "init --upgrade");
    for (table, change, code, hint) in [
        ("keyless", "DROP INDEX resource_name", "unique-key", "unique key"),
        ("myisam", "ENGINE=MyISAM", "engine", "InnoDB"),
        ("folding", "MODIFY resource_name VARCHAR(191) NOT NULL", "table", "folds case"),
        ("short", "DROP COLUMN version", "table", "version is missing"),
    ] {
        server.admin(&schema::ddl(table).expect("ddl")).await.expect("a table");
        server.admin(&format!("ALTER TABLE {table} {change}")).await.expect(change);
        only(&beyond_default(&config(&server).table(table)).await, Severity::Error, code, hint);
    }
}

async fn every_missing_right_is_found(ctx: Arc<Ctx>) {
    let server = durable(&ctx, &[]).await;
    let all = ["SELECT", "INSERT", "UPDATE", "DELETE"];
    for (missing, severity, code) in [
        ("none", Severity::Note, "replication"),
        ("DELETE", Severity::Note, "gc"),
        ("UPDATE", Severity::Error, "access"),
        ("INSERT", Severity::Error, "access"),
        ("SELECT", Severity::Error, "access"),
    ] {
        let user = format!("no_{}@'%'", missing.to_lowercase());
        server.admin(&format!("CREATE USER {user} IDENTIFIED BY 'pw'")).await.expect("user");
        let rights: Vec<_> = all.into_iter().filter(|right| *right != missing).collect();
        server.admin(&format!("GRANT {} ON lockkit.* TO {user}", rights.join(", "))).await.expect("rights");
        let config = config(&server).username(format!("no_{}", missing.to_lowercase())).password("pw");
        let mut found = beyond_default(&config).await;
        if missing != "none" {
            found.retain(|finding| finding.code != "replication");
            assert!(found.iter().all(|finding| finding.in_words().contains(missing)), "{missing}: {found:#?}");
        }
        // Where rows can't be removed, there are no claims either.
        let no_claims = [(Severity::Warning, "claims")];
        let expected = [if missing == "DELETE" { &no_claims[..] } else { &[] }, &[(severity, code)]].concat();
        assert_eq!(codes(&found), expected, "{missing}: {found:#?}");
    }
    server.admin("CREATE USER stranger@'%' IDENTIFIED BY 'pw'").await.expect("user");
    server.admin("CREATE TABLE other (id INT)").await.expect("table");
    server.admin("GRANT ALL ON lockkit.other TO stranger@'%'").await.expect("rights");
    let mut found = beyond_default(&config(&server).username("stranger").password("pw")).await;
    found.retain(|finding| finding.code != "replication");
    only(&found, Severity::Error, "access", "no rights on the table");
}

async fn a_missing_table_of_claims_is_found(ctx: Arc<Ctx>) {
    let server = durable(&ctx, &[]).await;
    server.admin("ALTER TABLE resource_lock_claim DROP COLUMN ttl").await.expect("changed");
    only(&beyond_default(&config(&server)).await, Severity::Warning, "claims", "not as lockkit needs it");
    server.admin("DROP TABLE resource_lock_claim").await.expect("dropped");
    only(&beyond_default(&config(&server)).await, Severity::Warning, "claims", "lockkit init");
}

async fn unused_rows_are_counted(ctx: Arc<Ctx>) {
    let server = durable(&ctx, &[]).await;
    let store = lockkit_mysql::MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    let mine = claim();
    hold(&store, &mine).await;
    free(&store, &mine).await;
    assert!(beyond_default(&config(&server)).await.is_empty());
    server.admin("UPDATE resource_lock SET update_time = update_time - INTERVAL 8 DAY").await.expect("old");
    only(&beyond_default(&config(&server)).await, Severity::Note, "unused", "week: 1");
}

async fn too_few_connections_are_found(ctx: Arc<Ctx>) {
    let server = durable(&ctx, &["--max-connections=10"]).await;
    only(&beyond_default(&config(&server)).await, Severity::Warning, "connections", "max_connections is 10");
    assert!(beyond_default(&config(&server).connections(10)).await.is_empty());
}

async fn replication_is_found_from_both_sides(ctx: Arc<Ctx>) {
    let mut args = vec!["--log-bin=log", "--server-id=1"];
    if !ctx.is_mariadb() {
        args.push("--performance-schema=ON");
    }
    let primary = durable(&ctx, &args).await;
    let replica = durable(&ctx, &["--server-id=2"]).await;
    let port = config_port(&primary);
    let begin = if ctx.is_mariadb() {
        [
            format!("CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={port}, MASTER_USER='root'"),
            "START SLAVE".into(),
        ]
    } else {
        let source = format!("SOURCE_HOST='127.0.0.1', SOURCE_PORT={port}, SOURCE_USER='root'");
        [format!("CHANGE REPLICATION SOURCE TO {source}, GET_SOURCE_PUBLIC_KEY=1"), "START REPLICA".into()]
    };
    if !ctx.is_mariadb() {
        // Both were copied from one directory, and with it the name that has to be unique among servers.
        let data = replica.admin("SELECT @@datadir").await.expect("datadir")[0][0].clone().expect("a path");
        replica.kill().await.expect("kill");
        std::fs::remove_file(std::path::Path::new(&data).join("auto.cnf")).expect("auto.cnf");
        replica.restart(Keep::Data).await.expect("restart");
    }
    for statement in begin {
        replica.admin(&statement).await.expect("replication");
    }
    only(&beyond_default(&config(&replica)).await, Severity::Warning, "replica", "takes writes");
    let start = Instant::now();
    loop {
        let found = beyond_default(&config(&primary)).await;
        if !found.is_empty() {
            return only(&found, Severity::Warning, "replicas", "(1)");
        }
        assert!(start.elapsed() < Duration::from_secs(20), "no replica was ever seen");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn config_port(server: &MySqlServer) -> u16 {
    server.addr().port()
}

async fn a_server_that_can_not_be_asked_is_an_error(ctx: Arc<Ctx>) {
    let server = durable(&ctx, &[]).await;
    let error = diagnose(&config(&server).username("nobody").password("pw")).await.expect_err("no such user");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    server.kill().await.expect("kill");
    let error = diagnose(&config(&server)).await.expect_err("dead");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}
