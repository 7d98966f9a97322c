//! What a doctor finds on quorums that are well, and on each that is not.

use std::time::Duration;

use lockkit::redlock::{RedisNodes, diagnose};
use lockkit_core::{ErrorKind, Finding, Severity};
use lockkit_redis::RedisConfig;
use lockkit_redlock::RedlockConfig;
use lockkit_testkit::{
    findings::{beyond, codes, only},
    servers::{Persistence, RedisOptions, RedisServer},
};

use crate::support::Cluster;

/// Of three nodes as they are by default.
const DEFAULT: [(Severity, &str); 9] = [
    (Severity::Note, "durability"),
    (Severity::Note, "password"),
    (Severity::Ok, "quorum"),
    (Severity::Ok, "ttl"),
    (Severity::Ok, "clocks"),
    (Severity::Ok, "server"),
    (Severity::Ok, "server"),
    (Severity::Ok, "server"),
    (Severity::Ok, "durability"),
];

async fn findings(nodes: &RedisNodes) -> Vec<Finding> {
    let mut findings = diagnose(nodes).await.expect("they can be asked");
    // That depends on the version of the servers that are installed.
    findings.retain(|finding| finding.code != "cve");
    findings
}

async fn beyond_default(nodes: &RedisNodes) -> Vec<Finding> {
    beyond(findings(nodes).await, &DEFAULT)
}

fn at(servers: &[&RedisServer]) -> RedisNodes {
    let node = |server: &&RedisServer| RedisConfig::new("127.0.0.1", server.port());
    RedisNodes::new(servers.iter().map(node).collect())
}

/// The servers of tests have just been started, which is not what most of them are about.
fn of(cluster: &Cluster, count: usize) -> RedisNodes {
    at(&cluster.servers.iter().take(count).collect::<Vec<_>>()).delayed_restart(false)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_quorum_has_what_its_configuration_deserves() {
    let cluster = Cluster::start(3).await;
    let found = findings(&of(&cluster, 3)).await;
    assert_eq!(codes(&found), DEFAULT[..8], "{found:#?}");
    assert_eq!(found[1].server.as_deref(), Some("all nodes"));
    assert_eq!(found[5].server.as_deref(), Some(&*format!("redis 127.0.0.1:{}", cluster.servers[0].port())));

    let options = RedisOptions::default().persistence(Persistence::AppendAlways);
    let servers = RedisServer::start_many(3, options).await.expect("servers");
    let found = findings(&at(&servers.iter().collect::<Vec<_>>()).delayed_restart(false)).await;
    let worse: Vec<_> = codes(&found).into_iter().filter(|(severity, _)| *severity > Severity::Ok).collect();
    assert_eq!(worse, [(Severity::Note, "password")], "{found:#?}");
    assert!(codes(&found).contains(&(Severity::Ok, "durability")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_count_that_makes_no_good_quorum_is_found() {
    let cluster = Cluster::start(4).await;
    only(&beyond_default(&of(&cluster, 2)).await, Severity::Error, "quorum", "at least three");
    only(&beyond_default(&of(&cluster, 4)).await, Severity::Warning, "quorum", "odd number");
    let config = RedlockConfig::new().node_timeout(Duration::from_secs(100));
    only(&beyond_default(&of(&cluster, 3).config(config)).await, Severity::Error, "quorum", "node timeout");
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_started_just_now_are_found() {
    let cluster = Cluster::start(3).await;
    let found = beyond_default(&of(&cluster, 3).delayed_restart(true)).await;
    let restart = (Severity::Warning, "restart");
    assert_eq!(codes(&found), [(Severity::Error, "quorum"), restart, restart, restart]);
    assert!(found[0].summary.starts_with("0 of 3 nodes vote by now, and 2 are needed"), "{found:?}");
    let of_nodes = &found[1..];
    assert!(of_nodes.iter().all(|it| it.summary.contains("votes in") && it.server.is_some()), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_server_twice_is_found() {
    let cluster = Cluster::start(2).await;
    let (one, two) = (&cluster.servers[0], &cluster.servers[1]);
    let through_a_proxy = cluster.proxies[0].addr();
    let mut nodes: Vec<_> = [one, two].map(|server| RedisConfig::new("127.0.0.1", server.port())).into();
    nodes.push(RedisConfig::new(through_a_proxy.ip().to_string(), through_a_proxy.port()));
    let found = beyond_default(&RedisNodes::new(nodes).delayed_restart(false)).await;
    only(&found, Severity::Error, "twice", "once");
    assert!(found[0].server.as_deref().is_some_and(|server| server.ends_with(&through_a_proxy.port().to_string())));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_wrong_with_one_node_is_said_of_that_node() {
    let cluster = Cluster::start(3).await;
    let (evicting, replica) = (&cluster.servers[0], &cluster.servers[1]);
    evicting.command(&["CONFIG", "SET", "maxmemory", "100mb"]).await.expect("CONFIG");
    evicting.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).await.expect("CONFIG");
    let found = beyond_default(&of(&cluster, 3)).await;
    only(&found, Severity::Warning, "eviction", "allkeys-lru");
    assert_eq!(found[0].server.as_deref(), Some(&*format!("redis 127.0.0.1:{}", evicting.port())));

    evicting.command(&["CONFIG", "SET", "maxmemory", "0"]).await.expect("CONFIG");
    evicting.command(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]).await.expect("CONFIG");
    replica.command(&["REPLICAOF", "127.0.0.1", "1"]).await.expect("REPLICAOF");
    let found = beyond_default(&of(&cluster, 3)).await;
    assert_eq!(codes(&found), [(Severity::Error, "role"), (Severity::Error, "writes")], "{found:#?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_are_away_are_named() {
    let cluster = Cluster::start(3).await;
    cluster.servers[2].kill().await.expect("kill");
    let found = beyond_default(&of(&cluster, 3)).await;
    only(&found, Severity::Warning, "node", "can't be asked");
    cluster.servers[1].kill().await.expect("kill");
    let found = beyond_default(&of(&cluster, 3)).await;
    let expected = [(Severity::Error, "quorum"), (Severity::Warning, "node"), (Severity::Warning, "node")];
    assert_eq!(codes(&found), expected, "{found:#?}");
    cluster.servers[0].kill().await.expect("kill");
    let error = diagnose(&of(&cluster, 3)).await.expect_err("nobody is there");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}
