//! What a doctor finds on servers that are well, and on each that is not.

use std::time::Duration;

use lockkit_core::{ErrorKind, Finding, Severity};
use lockkit_testkit::{
    findings::{beyond, codes, only},
    servers::{Keep, ZooKeeperEnsemble, ZooKeeperFlavor},
};
use lockkit_zk::{ZkConfig, diagnose};
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

use crate::support::*;

/// Of one server on its own, which nobody has used yet.
const DEFAULT: [(Severity, &str); 6] = [
    (Severity::Warning, "ensemble"),
    (Severity::Ok, "server"),
    (Severity::Ok, "session"),
    (Severity::Ok, "access"),
    (Severity::Ok, "clock"),
    (Severity::Ok, "nodes"),
];

async fn findings(config: &ZkConfig) -> Vec<Finding> {
    diagnose(config).await.expect("it can be asked")
}

/// The findings beyond those of a server with the default configuration.
async fn beyond_default(config: &ZkConfig) -> Vec<Finding> {
    beyond(findings(config).await, &DEFAULT)
}

async fn make(raw: &Client, path: &str, acls: Acls<'_>) {
    raw.mkdir(path, &CreateMode::Persistent.with_acls(acls)).await.expect("mkdir");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_healthy_server_has_what_its_configuration_deserves() {
    let server = Server::start().await;
    assert_eq!(codes(&findings(&server.config()).await), DEFAULT);
    assert_eq!(codes(&findings(&server.config().chroot("/a/b")).await), DEFAULT);
    let left = server.raw().await.list_children("/").await.expect("list");
    assert_eq!(left, ["zookeeper"], "something was left behind");
    // In use, by lockkit and by itself, nothing of theirs is strange.
    let store = server.store().await;
    hold(&store, &claim("a")).await;
    keep(&store, "b", Duration::from_secs(3600)).await;
    let (one, other) = (beyond_default(&server.config()).await, beyond_default(&server.config()).await);
    only(&one, Severity::Note, "acl", "auth");
    assert_eq!(codes(&one), codes(&other));
    let left = server.raw().await.list_children("/lockkit").await.expect("list");
    assert!(left.iter().all(|node| !node.contains("doctor")), "{left:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clipped_session_is_found() {
    let server = Server::start().await;
    let found = beyond_default(&server.config().session(Duration::from_millis(200))).await;
    only(&found, Severity::Warning, "session", "1s, not 200ms");
    let found = beyond_default(&server.config().session(Duration::from_secs(90))).await;
    only(&found, Severity::Warning, "session", "60s, not 90s");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_too_short_for_its_tick_is_found() {
    const SHORT: Duration = Duration::from_millis(600);
    let server = Server::start().await;
    server.0.limit_sessions(SHORT, Duration::from_secs(60)).expect("configure");
    server.0.restart(Keep::Data).await.expect("restart");
    let found = beyond_default(&server.config().session(SHORT)).await;
    only(&found, Severity::Warning, "tick", "two ticks of 500ms");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_give_different_timeouts_are_found() {
    let (server, other) = (Server::start().await, Server::start().await);
    other.0.limit_sessions(Duration::from_secs(2), Duration::from_secs(2)).expect("configure");
    other.0.restart(Keep::Data).await.expect("restart");
    // They are no ensemble, but are asked like one. Which of them the doctor's session is on is a matter of luck.
    let both = ZkConfig::new([server.0.addr().to_string(), other.0.addr().to_string()]);
    let found = findings(&both).await;
    let on_the_longer = |finding: &&Finding| finding.code == "session" && finding.summary.contains("2s there, not 20s");
    let on_the_shorter = |finding: &&Finding| finding.code == "session" && finding.summary.contains("2s, not 20s");
    assert!(found.iter().any(|found| on_the_longer(&found) || on_the_shorter(&found)), "{found:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_nodes_are_found() {
    let server = Server::start().await;
    let (raw, config) = (server.raw().await, server.config().base("/locks"));
    make(&raw, "/locks/%zz", Acls::anyone_all()).await;
    make(&raw, "/locks/a", Acls::anyone_all()).await;
    let mut found = beyond_default(&config).await;
    assert_eq!(found.pop().expect("a finding").code, "foreign");
    only(&found, Severity::Note, "acl", "world");
    raw.delete("/locks/%zz", None).await.expect("delete");

    make(&raw, "/locks/a/config", Acls::anyone_all()).await;
    let mut found = beyond_default(&config).await;
    assert_eq!(found.pop().expect("a finding").code, "acl");
    only(&found, Severity::Warning, "queue", "/locks/a/config");
    raw.delete("/locks/a/config", None).await.expect("delete");

    make(&raw, "/locks/a/lock-0000000001", Acls::anyone_all()).await;
    let found = beyond_default(&config).await;
    assert_eq!(codes(&found), [(Severity::Warning, "queue"), (Severity::Note, "acl")]);
    assert!(found[0].summary.contains("no session ends"), "{found:?}");
    assert_eq!(raw.list_children("/locks").await.expect("list"), ["a"], "something was left behind");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_lists_are_found() {
    let server = Server::start().await;
    let (raw, long) = (server.raw().await, "x".repeat(10_000));
    for path in ["/lockkit/%kept", "/lockkit/a"] {
        for number in 0..70 {
            make(&raw, &format!("{path}/{long}-lock-{number:010}"), Acls::anyone_all()).await;
        }
        let found = findings(&server.config()).await;
        let mut long = found.iter().filter(|finding| finding.code == "children");
        assert!(long.any(|finding| finding.summary.contains(&format!(" {path} has 701"))), "{found:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_permissions_are_found() {
    let server = Server::start().await;
    let raw = server.raw().await;
    let anyone = |permission| vec![Acl::new(permission, AuthId::anyone())];
    let (read, create) = (Permission::READ, Permission::CREATE);
    for (base, permission, hint) in [
        ("/nothing", Permission::ADMIN, "list the children"),
        ("/read", read, "create nodes"),
        ("/create", read | create | Permission::ADMIN, "delete nodes"),
    ] {
        make(&raw, base, Acls::new(&anyone(permission))).await;
        let config = server.config().base(base);
        let found = findings(&config).await;
        let mut denied = found.iter().filter(|finding| (finding.severity, finding.code) == (Severity::Error, "access"));
        assert!(denied.any(|finding| finding.summary.contains(hint)), "{base}: {found:#?}");
    }
    // What the user may create but not delete ends by itself: it is an empty container.
    raw.set_acl("/create", &anyone(Permission::ALL), None).await.expect("acl");
    let left = raw.list_children("/create").await.expect("list");
    for node in &left {
        let inside = raw.list_children(&format!("/create/{node}")).await.expect("list");
        assert!(inside.is_empty(), "{inside:?}");
    }

    // Logged in, and alone with one's nodes.
    let mine = server.config().base("/mine").digest_auth("me", "pw");
    let store = connect(mine.clone()).await;
    hold(&store, &claim("a")).await;
    assert!(beyond_default(&mine).await.is_empty(), "{:#?}", beyond_default(&mine).await);
    let other = findings(&server.config().base("/mine")).await;
    assert!(other.iter().any(|finding| (finding.severity, finding.code) == (Severity::Error, "access")), "{other:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ensemble_is_counted_and_each_server_looked_at() {
    let ensemble = ZooKeeperEnsemble::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required");
    let config = ZkConfig::from_url(&ensemble.url()).expect("url");
    let mut found = findings(&config).await;
    // That depends on the version that is installed.
    found.retain(|finding| finding.code != "data-loss");
    let expected = ["server", "server", "server", "ensemble", "session", "access", "clock", "nodes"];
    assert_eq!(codes(&found), expected.map(|code| (Severity::Ok, code)), "{found:#?}");
    let roles = |role: &str| found.iter().filter(|finding| finding.summary.ends_with(role)).count();
    assert_eq!((roles("leader"), roles("follower")), (1, 2), "{found:#?}");

    let away = &ensemble.members()[0];
    away.kill().await.expect("kill");
    ensemble.elected().await.expect("a leader");
    eventually("the others go on", async || diagnose(&config).await.is_ok()).await;
    let mut found = findings(&config).await;
    found.retain(|finding| finding.severity == Severity::Warning && finding.code != "data-loss");
    only(&found, Severity::Warning, "server", "can't be reached");
    assert_eq!(found[0].server.as_deref(), Some(away.addr().to_string().as_str()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_can_not_be_asked_are_an_error() {
    let server = Server::start().await;
    let config = server.config();
    server.0.kill().await.expect("kill");
    let error = diagnose(&config).await.expect_err("dead");
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut), "{error}");
}
