//! `lockkit doctor`.

use std::process::Output;

use crate::support::{Redis, code, complaint, lockkit, stdout};
use lockkit_testkit::servers::{
    MySqlOptions, MySqlServer, Persistence, RedisCluster, RedisFlavor, RedisOptions, RedisSentinels, RedisServer,
    ZooKeeperFlavor, ZooKeeperServer, hosts,
};
use serde_json::{Value, json};

fn doctor(store: &str, arguments: &[&str]) -> Output {
    lockkit(&[&["doctor"], arguments].concat()).env("LOCKKIT_STORE", store).output().unwrap()
}

/// What the doctor says, after a check that the documentation lists all of it.
fn report(output: &Output) -> Value {
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    for finding in report["findings"].as_array().unwrap() {
        let code = finding["code"].as_str().unwrap();
        assert!(include_str!("../../../docs/doctor.md").contains(&format!("`{code}`")), "{code} is not documented");
    }
    report
}

/// Severity and code of what is worse than a note.
fn troubles(report: &Value) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let findings = report["findings"].as_array().unwrap().iter();
    let pairs = findings.map(|finding| (text(&finding["severity"]), text(&finding["code"])));
    pairs.filter(|(severity, _)| severity == "error" || severity == "warning").collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(severity, code)| ((*severity).to_owned(), (*code).to_owned())).collect()
}

#[test]
fn the_exit_status_says_whether_there_is_something_to_do() {
    let sound = Redis::start_with(RedisOptions::default().persistence(Persistence::AppendAlways));
    let output = sound.lockkit(&["doctor"]).output().unwrap();
    assert_eq!(code(&output), 0, "{}", stdout(&output));
    sound.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
    sound.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let output = sound.lockkit(&["doctor"]).output().unwrap();
    assert_eq!(code(&output), 78);
    let text = stdout(&output);
    let mut lines = text.lines();
    assert_eq!(
        lines.next().unwrap().split_whitespace().collect::<Vec<_>>(),
        ["SEVERITY", "FINDING", "WHAT", "TO", "DO"]
    );
    let first = lines.next().unwrap();
    assert!(first.starts_with("warning ") && first.contains("allkeys-lru") && first.contains("noeviction"), "{text}");
    // One line each, for it is no terminal.
    assert!(lines.all(|line| line.starts_with("note ") || line.starts_with("ok ")), "{text}");
    assert!(output.stderr.is_empty());

    sound.kill();
    let output = sound.lockkit(&["doctor", "--json"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (69, String::new()));
    assert!(complaint(&output).contains("refused"), "{}", complaint(&output));
}

#[test]
fn json_is_for_scripts() {
    let redis = Redis::start();
    redis.command(&["REPLICAOF", "127.0.0.1", "1"]);
    let output = redis.lockkit(&["doctor", "--json"]).output().unwrap();
    assert_eq!(code(&output), 78);
    let report = report(&output);
    assert_eq!(report["worst"], json!("error"));
    let first = &report["findings"][0];
    let keys: Vec<_> = first.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["advice", "code", "finding", "server", "severity"]);
    assert_eq!((&first["severity"], &first["code"], &first["server"]), (&json!("error"), &json!("role"), &json!(null)));
    assert!(first["finding"].as_str().unwrap().contains("replica"));
    let ranks: Vec<_> = report["findings"].as_array().unwrap().iter().map(|finding| &finding["severity"]).collect();
    let mut sorted = ranks.clone();
    sorted.sort_by_key(|rank| ["error", "warning", "note", "ok"].iter().position(|known| json!(known) == **rank));
    assert_eq!(ranks, sorted, "the worst comes first");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_store_is_looked_at() {
    let output = doctor("memory:", &[]);
    assert_eq!(code(&output), 0);
    assert!(stdout(&output).contains("nothing to check"), "{}", stdout(&output));

    let mysql = MySqlServer::start(MySqlOptions::default()).await.unwrap();
    let output = doctor(&mysql.url(), &["--json"]);
    assert_eq!(code(&output), 78);
    assert_eq!(troubles(&report(&output)), pairs(&[("error", "table")]));
    assert_eq!(code(&lockkit(&["init", "--store", &mysql.url()]).output().unwrap()), 0);
    assert_eq!(code(&doctor(&mysql.url(), &[])), 0);

    let zookeeper = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.unwrap();
    let output = doctor(&zookeeper.url(), &["--json"]);
    assert_eq!((code(&output), troubles(&report(&output))), (78, pairs(&[("warning", "ensemble")])));
    let server =
        report(&output)["findings"].as_array().unwrap().iter().find(|f| f["code"] == "server").unwrap().clone();
    assert_eq!(server["server"], json!(zookeeper.addr().to_string()));

    let nodes = RedisServer::start_many(3, RedisOptions::default()).await.unwrap();
    let hosts = hosts(&nodes);
    let output = doctor(&format!("redlock://{hosts}?delayed_restart=no"), &[]);
    let text = stdout(&output);
    assert_eq!(code(&output), 0, "{text}");
    assert!(hosts.split(',').all(|host| text.contains(host)) && text.contains("all nodes"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_that_replace_each_other_are_looked_at_one_by_one() {
    let sentinels = RedisSentinels::start(RedisFlavor::Installed).await.unwrap();
    let output = doctor(&sentinels.url(), &["--json"]);
    let common = [("warning", "persistence"), ("warning", "isolation")];
    assert_eq!((code(&output), troubles(&report(&output))), (78, pairs(&common)));
    sentinels.sentinels()[1].kill().await.unwrap();
    sentinels.servers()[1].kill().await.unwrap();
    let text = stdout(&doctor(&sentinels.url(), &[]));
    for (subject, what) in [
        (sentinels.sentinels()[1].addr(), "it can't be asked"),
        (sentinels.servers()[1].addr(), "it can't take over"),
        (sentinels.servers()[0].addr(), "nobody can take over"),
    ] {
        let is_told = |line: &str| line.contains(&subject.to_string()) && line.contains(what);
        assert!(text.lines().any(is_told), "{subject} {what}: {text}");
    }

    let cluster = RedisCluster::start(RedisFlavor::Installed, false).await.unwrap();
    let output = doctor(&cluster.url(), &["--json"]);
    let all = [&common[..1], &[("warning", "replicas")], &common[1..]].concat();
    assert_eq!((code(&output), troubles(&report(&output))), (78, pairs(&all)));
    cluster.members()[2].kill().await.unwrap();
    let report = report(&doctor(&cluster.url(), &["--json"]));
    let first = &report["findings"][0];
    assert_eq!((&first["severity"], &first["code"]), (&json!("error"), &json!("member")), "{report}");
    assert_eq!(first["server"], json!(cluster.members()[2].addr().to_string()));
}

#[test]
fn bad_usage_is_told_apart() {
    for store in ["nonsense", "redis://h?retry=1", "etcd://h", ""] {
        let output = doctor(store, &[]);
        assert_eq!(code(&output), 64, "{store}: {}", complaint(&output));
    }
    let output = doctor("redis://u:hunter2@127.0.0.1:1", &[]);
    assert_eq!(code(&output), 69);
    assert!(!complaint(&output).contains("hunter2"));
}
