//! What a doctor finds where servers can take over from each other: with sentinels, and in clusters.

use std::time::{Duration, Instant};

use lockkit_core::{ErrorKind, Finding, Severity};
use lockkit_redis::{RedisConfig, RedisStore, diagnose};
use lockkit_testkit::{
    findings::{codes, only},
    servers::{RedisCluster, RedisOptions, RedisSentinels, RedisServer},
};

use crate::{
    doctor::findings,
    support::{QUEUE_PERMISSIONS, RedisServerAt, claim, flavor, hold},
};

/// What the default configuration of several servers deserves.
const DEFAULT: [(Severity, &str); 3] =
    [(Severity::Warning, "persistence"), (Severity::Warning, "isolation"), (Severity::Note, "password")];

async fn sentinels() -> RedisSentinels {
    RedisSentinels::start(flavor()).await.expect("servers")
}

async fn members(with_replicas: bool) -> RedisCluster {
    RedisCluster::start(flavor(), with_replicas).await.expect("servers")
}

fn config(url: &str) -> RedisConfig {
    let config: RedisConfig = format!("{url}?timeout=700ms").parse().expect("url");
    config
}

/// What is worse than well, beyond what the default configuration deserves.
async fn troubles(url: &str) -> Vec<Finding> {
    let mut found = findings(&config(url)).await;
    found.retain(|finding| finding.severity > Severity::Ok && !DEFAULT.contains(&(finding.severity, finding.code)));
    found
}

/// Waits until there is such a trouble; servers take a moment to notice each other's.
async fn until_found(url: &str, severity: Severity, code: &str, hint: &str) -> Finding {
    let start = Instant::now();
    loop {
        let found = troubles(url).await;
        let fits = |finding: &&Finding| {
            (finding.severity, finding.code) == (severity, code) && finding.in_words().contains(hint)
        };
        if let Some(finding) = found.iter().find(fits) {
            return finding.clone();
        }
        assert!(start.elapsed() < Duration::from_secs(20), "never found: {code}, {hint}: {found:#?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[track_caller]
fn is_at(finding: &Finding, server: &RedisServer) {
    assert_eq!(finding.server.as_deref(), Some(&*server.addr().to_string()), "{finding:?}");
}

#[track_caller]
fn only_of(found: &[Finding], codes: &[&str]) {
    assert!(found.iter().all(|finding| codes.contains(&finding.code)), "{found:#?}");
}

async fn set(server: &RedisServer, setting: &str, value: &str) {
    server.command(&["CONFIG", "SET", setting, value]).await.expect("set");
}

#[tokio::test]
async fn healthy_sentinels_have_what_their_configuration_deserves() {
    let all = sentinels().await;
    let found = findings(&config(&all.url())).await;
    let well = ["sentinel", "sentinel", "sentinel", "sentinels", "server", "server"].map(|code| (Severity::Ok, code));
    assert_eq!(codes(&found), [&DEFAULT[..], &well].concat(), "{found:#?}");
    assert!(found[..3].iter().all(|finding| finding.server.as_deref() == Some("all servers")), "{found:#?}");
    for server in all.servers() {
        assert_eq!(server.command(&["DBSIZE"]).await.expect("DBSIZE"), "0", "something was left behind");
        set(server, "min-replicas-to-write", "1").await;
        set(server, "appendonly", "yes").await;
        set(server, "appendfsync", "always").await;
    }
    let codes = codes(&findings(&config(&all.url())).await);
    assert_eq!(codes, [&DEFAULT[2..], &well].concat());
}

#[tokio::test]
async fn sentinels_that_are_away_or_few_are_found() {
    let all = sentinels().await;
    let one = format!("redis+sentinel://{}/{}", all.sentinels()[0].addr(), RedisSentinels::PRIMARY);
    only(&troubles(&one).await, Severity::Note, "sentinels", "names 1 of 3");
    all.sentinels()[1].freeze().await.expect("freeze");
    let frozen = until_found(&all.url(), Severity::Warning, "sentinel", "it can't be asked").await;
    assert_eq!(frozen.server.as_deref(), Some(&*all.sentinels()[1].addr().to_string()));
    all.sentinels()[1].kill().await.expect("kill");
    all.sentinels()[2].kill().await.expect("kill");
    until_found(&all.url(), Severity::Warning, "sentinels", "would not be replaced").await;
    all.command(0, &["SENTINEL", "RESET", RedisSentinels::PRIMARY]).await.expect("reset");
    until_found(&all.url(), Severity::Warning, "sentinels", "1 of them: fewer than three").await;
    all.sentinels()[0].kill().await.expect("kill");
    let error = diagnose(&config(&all.url())).await.expect_err("nobody is left");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[tokio::test]
async fn sentinels_that_disagree_or_know_nothing_are_found() {
    let all = sentinels().await;
    let stranger = RedisServer::start(RedisOptions::default().flavor(flavor())).await.expect("a server");
    all.command(2, &["SENTINEL", "REMOVE", RedisSentinels::PRIMARY]).await.expect("remove");
    let found = troubles(&all.url()).await;
    only(&found, Severity::Warning, "sentinel", "knows no primary called");
    let port = stranger.port().to_string();
    let words = ["SENTINEL", "MONITOR", RedisSentinels::PRIMARY, "127.0.0.1", &port, "2"];
    all.command(2, &words).await.expect("monitor");
    let found = until_found(&all.url(), Severity::Warning, "sentinels", "do not agree").await;
    assert!(found.summary.contains(&stranger.addr().to_string()), "{found:?}");
    assert!(found.summary.contains(&all.servers()[0].addr().to_string()), "{found:?}");
}

#[tokio::test]
async fn a_login_that_sentinels_refuse_is_an_error_if_all_do() {
    let all = sentinels().await;
    let lock_up = |index: usize| RedisServerAt(all.sentinels()[index].addr()).command("ACL SETUSER default off");
    lock_up(0);
    only(&troubles(&all.url()).await, Severity::Warning, "sentinel", "correct the URL");
    [1, 2].into_iter().for_each(lock_up);
    let error = diagnose(&config(&all.url())).await.expect_err("nobody lets us in");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}

#[tokio::test]
async fn replicas_that_could_not_take_over_are_found() {
    let all = sentinels().await;
    let replica = &all.servers()[1];
    replica.freeze().await.expect("freeze");
    is_at(&until_found(&all.url(), Severity::Warning, "replicas", "acknowledged nothing").await, &all.servers()[0]);
    is_at(&until_found(&all.url(), Severity::Warning, "member", "can't take over").await, replica);
    replica.kill().await.expect("kill");
    is_at(&until_found(&all.url(), Severity::Warning, "replicas", "nobody can take over").await, &all.servers()[0]);
}

/// A replica is looked at as what it will be one day.
#[tokio::test]
async fn what_a_replica_lacks_for_taking_over_is_found() {
    let all = sentinels().await;
    let [primary, replica] = all.servers();
    set(replica, "maxmemory", "100mb").await;
    set(replica, "maxmemory-policy", "allkeys-lru").await;
    let found = troubles(&all.url()).await;
    only(&found, Severity::Warning, "eviction", "allkeys-lru");
    is_at(&found[0], replica);
    set(replica, "maxmemory-policy", "noeviction").await;
    assert!(troubles(&all.url()).await.is_empty());
    set(primary, "min-replicas-to-write", "1").await;
    let found = findings(&config(&all.url())).await;
    is_at(found.iter().find(|finding| finding.code == "isolation").expect("a finding"), replica);
    // Users are not replicated.
    let url = all.url().replace("//", "//app:pw@");
    let allow = |server: &RedisServer, rules: &str| {
        RedisServerAt(server.addr()).command(&format!("ACL SETUSER app reset on >pw {rules}"));
    };
    let rules = "~* &* +@all";
    allow(primary, rules);
    let found = troubles(&url).await;
    only(&found, Severity::Warning, "member", "as it is it can't take over");
    is_at(&found[0], replica);
    allow(replica, &format!("{rules} -incrby"));
    let found = troubles(&url).await;
    only(&found, Severity::Warning, "commands", "once it takes over: the user may not use incrby");
    is_at(&found[0], replica);
    allow(replica, rules);
    assert!(troubles(&url).await.is_empty());
}

#[tokio::test]
async fn a_primary_that_nobody_replaces_is_found() {
    let all = sentinels().await;
    for server in all.servers() {
        server.kill().await.expect("kill");
    }
    let down = until_found(&all.url(), Severity::Warning, "sentinel", "that it is down").await;
    assert!(down.summary.contains(&all.servers()[0].addr().to_string()), "{down:?}");
    is_at(&until_found(&all.url(), Severity::Error, "member", "its locks can't be taken").await, &all.servers()[0]);
}

#[tokio::test]
async fn a_healthy_cluster_has_what_its_configuration_deserves() {
    let all = members(true).await;
    let found = findings(&config(&all.url())).await;
    let well = ["slots", "members", "server", "server", "server", "server", "server", "server"];
    assert_eq!(codes(&found), [&DEFAULT[..], &well.map(|code| (Severity::Ok, code))].concat(), "{found:#?}");
    assert!(found[..3].iter().all(|finding| finding.server.as_deref() == Some("all servers")), "{found:#?}");
    for member in all.members() {
        assert_eq!(member.command(&["DBSIZE"]).await.expect("DBSIZE"), "0", "something was left behind");
    }
}

#[tokio::test]
async fn each_member_of_a_cluster_is_looked_at() {
    let all = members(false).await;
    let url = format!("redis+cluster://{}", all.members()[0].addr());
    let mut found = troubles(&url).await;
    only(&found, Severity::Warning, "replicas", "nobody can take over");
    assert_eq!(found.remove(0).server.as_deref(), Some("all servers"));
    let beyond = async |url: &str| {
        let mut found = troubles(url).await;
        found.retain(|finding| finding.code != "replicas");
        found
    };
    for member in all.members() {
        set(member, "maxmemory", "100mb").await;
        set(member, "maxmemory-policy", "volatile-ttl").await;
        let found = beyond(&url).await;
        only(&found, Severity::Warning, "eviction", "volatile-ttl");
        is_at(&found[0], member);
        set(member, "maxmemory-policy", "noeviction").await;
    }
    // Each is tried under names that it serves.
    let url = url.replace("//", "//app:pw@");
    let allow = |server: &RedisServer, rules: &str| {
        RedisServerAt(server.addr()).command(&format!("ACL SETUSER app reset on >pw ~* &* +@all {rules}"));
    };
    all.members().iter().for_each(|member| allow(member, ""));
    for member in all.members() {
        allow(member, "-pexpire");
        let found = beyond(&url).await;
        only(&found, Severity::Error, "commands", "pexpire");
        is_at(&found[0], member);
        allow(member, "");
    }
}

#[tokio::test]
async fn slots_that_nobody_serves_are_found() {
    let all = members(false).await;
    let (from, slot) = (all.primary_of("a").await.expect("primary"), all.slot_of("a").await.expect("slot"));
    let to = (from + 1) % 3;
    all.begin_to_move(slot, from, to).await.expect("begin");
    let mut found = troubles(&all.url()).await;
    found.retain(|finding| finding.code == "slots");
    assert_eq!(codes(&found), [(Severity::Warning, "slots"); 2], "{found:#?}");
    assert!(found.iter().all(|finding| finding.summary.starts_with("1 slots are on their way")), "{found:#?}");
    all.move_slot(slot, from, to).await.expect("move");
    for member in all.members() {
        member.command(&["CLUSTER", "DELSLOTS", &slot.to_string()]).await.expect("forget");
    }
    until_found(&all.url(), Severity::Error, "slots", "1 of 16384 slots belong to nobody").await;
    until_found(&all.url(), Severity::Error, "slots", "it refuses all locks").await;
}

#[tokio::test]
async fn a_member_that_is_away_is_found() {
    let all = members(true).await;
    all.members()[4].kill().await.expect("kill");
    is_at(&until_found(&all.url(), Severity::Warning, "member", "can't take over").await, &all.members()[4]);
    is_at(&until_found(&all.url(), Severity::Warning, "replicas", "nobody can take over").await, &all.members()[1]);
    only_of(&troubles(&all.url()).await, &["member", "replicas"]);
    all.members()[1].kill().await.expect("kill");
    is_at(&until_found(&all.url(), Severity::Error, "member", "its locks can't be taken").await, &all.members()[1]);
    for member in all.members() {
        member.kill().await.expect("kill");
    }
    let error = diagnose(&config(&all.url())).await.expect_err("nobody is left");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// What docs/backends/redis.md asks for, on servers that several share the work of.
const DOCUMENTED: &str = "~lockkit:* ~{lockkit:* &lockkit:* +evalsha +eval +get +set +del +incrby +pexpire +pttl +time \
                          +publish +subscribe +unsubscribe +type +info +scan +pubsub +config|get";

#[tokio::test]
async fn the_documented_permissions_suffice_in_a_cluster() {
    let all = members(true).await;
    let allow = |rules: &str| {
        for member in all.members() {
            RedisServerAt(member.addr())
                .command(&format!("ACL SETUSER app reset on >pw {DOCUMENTED} {QUEUE_PERMISSIONS} {rules}"));
        }
    };
    let url = all.url().replace("//", "//app:pw@");
    allow("+cluster|slots +cluster|info +cluster|nodes");
    let found = troubles(&url).await;
    assert!(found.is_empty(), "{found:#?}");
    let store = RedisStore::from_url(&format!("{url}?failover_pause=no")).await.expect("connect");
    for name in ["a", "b", "c", "d"] {
        hold(&store, &claim(name)).await;
    }
    allow("+cluster|slots +cluster|info +cluster|nodes -info");
    let found = troubles(&url).await;
    let refused = found.iter().find(|finding| finding.code == "info").expect("a finding");
    assert_eq!(refused.severity, Severity::Error, "{refused:?}");
    let error = RedisStore::from_url(&url).await.expect_err("every script asks who is in charge");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    allow("+cluster|info");
    let error = diagnose(&config(&url)).await.expect_err("nobody may say who serves what");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}

#[tokio::test]
async fn the_documented_permissions_suffice_at_sentinels() {
    let all = sentinels().await;
    for (index, sentinel) in all.sentinels().iter().enumerate() {
        let rules = "+sentinel|master +sentinel|get-master-addr-by-name +subscribe &+switch-master +sentinel|replicas \
                     +sentinel|ckquorum";
        all.command(
            index,
            &[&["ACL", "SETUSER", "watch", "on", ">pw"], &rules.split(' ').collect::<Vec<_>>()[..]].concat(),
        )
        .await
        .expect("allow");
        RedisServerAt(sentinel.addr()).command("ACL SETUSER default off");
    }
    let url = format!("{}?failover_pause=no&sentinel_user=watch&sentinel_password=pw", all.url());
    let found = diagnose(&url.parse().expect("url")).await.expect("they can be asked");
    assert!(found.iter().all(|finding| !finding.code.starts_with("sentinel") || finding.severity == Severity::Ok));
    assert!(found.iter().any(|finding| finding.summary.ends_with("slave")));
    hold(&RedisStore::from_url(&url).await.expect("connect"), &claim("a")).await;
}
