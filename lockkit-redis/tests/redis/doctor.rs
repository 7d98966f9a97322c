//! What a doctor finds on servers that are well, and on each that is not.

use lockkit_core::{ErrorKind, Finding, Severity};
use lockkit_redis::{RedisConfig, RedisStore, diagnose};
use lockkit_testkit::findings::{beyond, codes, only};

use crate::support::{QUEUE_PERMISSIONS, Server, claim, hold, raw};

/// What is worse than a note, and what the default configuration deserves.
const DEFAULT: [(Severity, &str); 5] = [
    (Severity::Warning, "persistence"),
    (Severity::Note, "password"),
    (Severity::Ok, "server"),
    (Severity::Ok, "access"),
    (Severity::Ok, "clock"),
];

pub(crate) async fn findings(config: &RedisConfig) -> Vec<Finding> {
    let mut findings = diagnose(config).await.expect("it can be asked");
    // That depends on the version of the server that is installed.
    findings.retain(|finding| finding.code != "cve");
    findings
}

/// The findings beyond those of a server with the default configuration.
async fn beyond_default(config: &RedisConfig) -> Vec<Finding> {
    beyond(findings(config).await, &DEFAULT)
}

#[tokio::test]
async fn a_healthy_server_has_what_its_configuration_deserves() {
    let server = Server::start().await;
    assert_eq!(codes(&findings(&server.config()).await), DEFAULT);
    assert_eq!(raw::<i32>(&mut server.raw(), "DBSIZE"), 0, "something was left behind");
    let server = Server::start_with(&["--appendonly", "yes", "--appendfsync", "always", "--requirepass", "pw"]).await;
    let codes = codes(&findings(&server.config().password("pw")).await);
    assert_eq!(codes, ["server", "persistence", "access", "clock"].map(|code| (Severity::Ok, code)));
}

#[tokio::test]
async fn what_is_kept_on_disk_decides_what_a_restart_loses() {
    for (args, severity, hint) in [
        (["--save", "", "--appendonly", "no"].as_slice(), Severity::Warning, "nothing is kept"),
        (&["--save", "60 1"], Severity::Warning, "only snapshots"),
        (&["--appendonly", "yes", "--appendfsync", "no"], Severity::Warning, "is no"),
        (&["--appendonly", "yes", "--appendfsync", "everysec"], Severity::Note, "everysec"),
        (
            &["--appendonly", "yes", "--appendfsync", "always", "--no-appendfsync-on-rewrite", "yes"],
            Severity::Note,
            "no-appendfsync-on-rewrite",
        ),
    ] {
        let server = Server::start_with(args).await;
        let found = findings(&server.config()).await;
        let finding = found.iter().find(|finding| finding.code == "persistence").expect("a finding");
        assert_eq!(finding.severity, severity, "{finding:?}");
        assert!(finding.summary.contains(hint), "{finding:?}");
    }
}

#[tokio::test]
async fn eviction_memory_and_idle_timeouts_are_found() {
    let server = Server::start_with(&["--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"]).await;
    only(&beyond_default(&server.config()).await, Severity::Warning, "eviction", "volatile-lru");
    raw::<()>(&mut server.raw(), "CONFIG SET maxmemory 0");
    only(&beyond_default(&server.config()).await, Severity::Note, "eviction", "would be evicted");
    raw::<()>(&mut server.raw(), "CONFIG SET maxmemory-policy noeviction");
    raw::<()>(&mut server.raw(), "CONFIG SET timeout 300");
    only(&beyond_default(&server.config()).await, Severity::Note, "idle", "300 s");
    raw::<()>(&mut server.raw(), "CONFIG SET timeout 0");
    raw::<()>(&mut server.raw(), "CONFIG SET maxmemory 1mb");
    let found = beyond_default(&server.config()).await;
    let memory = found.iter().find(|finding| finding.code == "memory").expect("a finding");
    assert_eq!(memory.severity, Severity::Warning);
}

#[tokio::test]
async fn a_full_server_and_one_that_refuses_writes_are_found() {
    let server = Server::start_with(&["--maxmemory", "1"]).await;
    let found = beyond_default(&server.config()).await;
    assert_eq!(codes(&found), [(Severity::Error, "writes"), (Severity::Warning, "memory")]);
    assert!(found[0].summary.contains("OOM"), "{found:?}");
    let server = Server::start_with(&["--min-replicas-to-write", "1"]).await;
    only(&beyond_default(&server.config()).await, Severity::Error, "writes", "NOREPLICAS");
}

#[tokio::test]
async fn replicas_are_found_from_both_sides() {
    let (primary, replica) = (Server::start().await, Server::start().await);
    raw::<()>(&mut replica.raw(), &format!("REPLICAOF 127.0.0.1 {}", primary.port()));
    crate::support::eventually("the replica is attached", async || {
        raw::<String>(&mut primary.raw(), "INFO replication").contains("connected_slaves:1")
    })
    .await;
    only(&beyond_default(&primary.config()).await, Severity::Warning, "replicas", "(1)");
    let found = beyond_default(&replica.config()).await;
    assert_eq!(codes(&found), [(Severity::Error, "role"), (Severity::Error, "writes")]);
}

/// Connecting is refused, too.
#[tokio::test]
async fn replicas_that_can_not_confirm_are_found() {
    let server = Server::start().await;
    let config: RedisConfig = server.url("?replicas=1").parse().expect("url");
    only(&beyond_default(&config).await, Severity::Error, "replicas", "0 of the 1 replicas");
    assert_eq!(RedisStore::connect(config).await.expect_err("none").kind(), ErrorKind::Unavailable);
    raw::<()>(&mut server.raw(), "ACL SETUSER app on >pw ~* &* +@all -wait");
    let config = server.url("?replicas=1").replace("//", "//app:pw@").parse().expect("url");
    let found = beyond_default(&config).await;
    assert!(found.iter().any(|finding| finding.summary.contains("WAIT is refused")), "{found:#?}");
    assert_eq!(RedisStore::connect(config).await.expect_err("denied").kind(), ErrorKind::Denied);
}

#[tokio::test]
async fn a_member_of_a_cluster_is_found() {
    let server = Server::start_with(&["--cluster-enabled", "yes"]).await;
    let found = beyond_default(&server.config()).await;
    assert_eq!(codes(&found)[0], (Severity::Error, "cluster"), "{found:#?}");
}

/// Each permission that the documentation asks for, taken away one at a time.
#[tokio::test]
async fn every_missing_permission_is_found() {
    const ALL: [&str; 17] = [
        "evalsha",
        "eval",
        "get",
        "set",
        "del",
        "incrby",
        "pexpire",
        "pttl",
        "time",
        "publish",
        "subscribe",
        "unsubscribe",
        "type",
        "info",
        "scan",
        "pubsub",
        "config",
    ];
    let server = Server::start().await;
    let config = server.config().username("app").password("pw");
    let allow = |rules: &str| raw::<()>(&mut server.raw(), &format!("ACL SETUSER app reset on >pw {rules}"));
    let all = format!("~lockkit:* ~{{lockkit:* &lockkit:* +{} {QUEUE_PERMISSIONS}", ALL.join(" +"));
    allow(&all);
    assert!(beyond_default(&config).await.is_empty());
    for (missing, severity, code) in [
        ("evalsha", Severity::Error, "scripts"),
        ("eval", Severity::Error, "scripts"),
        ("get", Severity::Error, "commands"),
        ("set", Severity::Error, "commands"),
        ("del", Severity::Error, "commands"),
        ("incrby", Severity::Error, "commands"),
        ("pexpire", Severity::Error, "commands"),
        ("pttl", Severity::Error, "commands"),
        ("publish", Severity::Warning, "channels"),
        ("subscribe", Severity::Warning, "channels"),
        ("unsubscribe", Severity::Warning, "channels"),
        ("info", Severity::Warning, "info"),
        ("scan", Severity::Note, "inspection"),
        ("pubsub", Severity::Note, "inspection"),
        ("type", Severity::Note, "inspection"),
        ("zadd", Severity::Note, "kinds"),
        ("hset", Severity::Note, "kinds"),
    ] {
        // What an EVAL has brought to the server once, EVALSHA finds there.
        raw::<()>(&mut server.raw(), "SCRIPT FLUSH");
        allow(&format!("{all} -{missing}"));
        let found = beyond_default(&config).await;
        assert!(
            found.iter().any(|finding| (finding.severity, finding.code) == (severity, code)),
            "{missing}: {found:#?}"
        );
        assert!(found.iter().all(|finding| finding.severity <= severity), "{missing}: {found:#?}");
    }
    allow(&all.replace("~lockkit:*", "~other:*"));
    only(&beyond_default(&config).await, Severity::Error, "scripts", "~lockkit:*");
    allow(&all.replace("&lockkit:*", "&other:*"));
    only(&beyond_default(&config).await, Severity::Warning, "channels", "&lockkit:*");
}

#[tokio::test]
async fn renamed_commands_are_found() {
    let server = Server::start_with(&["--rename-command", "INCRBY", "hidden"]).await;
    only(&beyond_default(&server.config()).await, Severity::Error, "commands", "incrby");
    let server = Server::start_with(&["--rename-command", "EVALSHA", ""]).await;
    only(&beyond_default(&server.config()).await, Severity::Error, "scripts", "EVALSHA");
}

/// Connecting refuses what the doctor calls an error of the basics, and warns of what it warns of.
#[tokio::test]
async fn connecting_shares_the_findings() {
    let server = Server::start().await;
    let config = server.config().username("app").password("pw");
    raw::<()>(&mut server.raw(), "ACL SETUSER app on >pw ~lockkit:* ~{lockkit:* &lockkit:* +@all -eval -evalsha");
    let error = RedisStore::connect(config.clone()).await.expect_err("no scripts");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.message().contains("+evalsha"), "{error}");
    raw::<()>(&mut server.raw(), "ACL SETUSER app resetchannels +@all");
    let store = RedisStore::connect(config).await.expect("it can lock");
    assert!(store.warnings()[0].contains("wakes nobody"), "{:?}", store.warnings());
    hold(&store, &claim("a")).await;
}

#[tokio::test]
async fn a_server_that_can_not_be_asked_is_an_error() {
    let server = Server::start_with(&["--requirepass", "pw"]).await;
    let error = diagnose(&server.config()).await.expect_err("no password");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    server.kill().await;
    let error = diagnose(&server.config()).await.expect_err("dead");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}
