//! What the command says, and with which exit code: that it is true, and of use.

use std::time::Duration;

use crate::support::{Line, Redis, Running, code, complaint, eventually, ignoring, lock, lockkit, stdout};
use lockkit_testkit::servers::{
    MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer,
};

#[test]
fn a_lock_that_excludes_nobody_is_refused() {
    for store in ["memory:", "MEMORY:"] {
        let output = lockkit(&["run", "--store", store, "--key", "k", "--", "echo", "ran"]).output().unwrap();
        assert_eq!((code(&output), stdout(&output)), (64, String::new()));
        let said = complaint(&output);
        assert!(said.contains("excludes nobody") && said.contains("redis://"), "{said}");
    }
    // To look at it does no harm.
    assert_eq!(code(&lockkit(&["ls", "--store", "memory:"]).output().unwrap()), 0);
}

#[test]
fn a_url_is_no_name() {
    let redis = Redis::start();
    for args in [&["ls"][..], &["who"], &["top"], &["break"]] {
        let output = redis.lockkit(&[args, &["redis://:hunter2@127.0.0.1:1"]].concat()).output().unwrap();
        assert_eq!((code(&output), stdout(&output)), (64, String::new()), "{args:?}");
        let said = complaint(&output);
        assert!(said.contains("--store") && !said.contains("hunter2"), "{said}");
    }
    // A name may look like many a thing.
    for name in ["redis:cache:42", "https://example.com/42", "a@b", "zk", "mysql:backup"] {
        let output = redis.lockkit(&["who", name]).output().unwrap();
        assert_eq!((code(&output), stdout(&output)), (0, format!("{name} is free\n")));
    }
}

#[test]
fn a_negative_time_gets_the_right_advice() {
    for option in ["--ttl", "--wait"] {
        let output = lockkit(&["run", "--key", "k", option, "-1s", "--", "true"]).output().unwrap();
        assert_eq!(code(&output), 64);
        let said = complaint(&output);
        assert!(said.contains("negative") && said.contains("10s") && !said.contains("--"), "{said}");
    }
    let output = lockkit(&["gc", "--unused-for", "-1h"]).output().unwrap();
    assert!(complaint(&output).contains("negative"), "{output:?}");
}

#[test]
fn a_key_that_is_too_long_is_not_repeated() {
    let long = "x".repeat(513);
    for args in [&["who"][..], &["break"], &["run", "--key"]] {
        let output = lockkit(&[args, &[&long]].concat()).output().unwrap();
        assert_eq!(code(&output), 64);
        let said = complaint(&output);
        assert!(said.contains("at most 512 bytes") && said.len() < 200, "{said}");
    }
}

#[test]
fn who_waited_is_told_so() {
    let redis = Redis::start();
    let line = Line::new();
    let first = line.start(redis.run("k", &["--holder", "the first"], "exec 3>$LINE; echo up >&3; read x <$GO"));
    let output = redis.run("k", &["--wait", "300ms"], "true").output().unwrap();
    assert_eq!(code(&output), 75);
    let said = complaint(&output);
    assert!(said.contains("waited 300ms") && said.contains("held by the first"), "{said}");
    let output = redis.run("k", &["--no-wait"], "true").output().unwrap();
    assert!(!complaint(&output).contains("waited"), "{output:?}");
    line.go();
    assert_eq!(code(&first.end()), 0);
}

#[test]
fn what_others_keep_at_the_key_is_not_shown() {
    let redis = Redis::start();
    redis.command(&["SET", &lock("k"), "their-token-hunter2", "PX", "60000"]);
    for args in [
        &["ls"][..],
        &["ls", "--json"],
        &["top"],
        &["top", "--json", "--once"],
        &["who", "k"],
        &["who", "k", "--json"],
        &["break", "k", "--token", "0123456789abcdef0123456789abcdef"],
    ] {
        let output = redis.lockkit(args).output().unwrap();
        let said = format!("{}{}", stdout(&output), String::from_utf8_lossy(&output.stderr));
        assert!(said.contains("a client that is not lockkit") && !said.contains("hunter2"), "{args:?} {said}");
    }
    let output = redis.run("k", &["--no-wait"], "true").output().unwrap();
    assert_eq!(code(&output), 75);
    assert!(!complaint(&output).contains("hunter2"), "{output:?}");
    assert_eq!(redis.command(&["GET", &lock("k")]), "their-token-hunter2");
}

fn ls(store: &str) -> (i32, String) {
    let output = lockkit(&["ls", "--store", store]).output().expect("lockkit runs");
    (code(&output), complaint(&output))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_missing_is_configuration() {
    let redis = RedisServer::start(RedisOptions::default()).await.unwrap();
    let mysql = MySqlServer::start(MySqlOptions::default()).await.unwrap();
    let (redis, at) = (redis.addr(), mysql.addr());
    let no_database = mysql.url().rsplit_once('/').unwrap().0.to_owned() + "/no_such_database";
    for (store, hint) in [
        (mysql.url(), "the table resource_lock is missing"),
        (no_database, "no_such_database"),
        (format!("redis+sentinel://{redis}/p"), "not a sentinel"),
        (format!("redis+cluster://{redis}"), "not part of a cluster"),
        (format!("redis://app@{redis}?password_file=/no/such/file"), "password_file"),
        (format!("redis://{at}"), "MySQL or MariaDB"),
    ] {
        let (code, said) = ls(&store);
        assert_eq!(code, 78, "{store}: {said}");
        assert!(said.contains(hint), "{store}: {said}");
    }
    // What is badly written is bad usage.
    for store in ["redis://h?timeout=x", "mysql://h"] {
        assert_eq!(ls(store).0, 64, "{store}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_no_lease_without_end() {
    let zookeeper = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.unwrap();
    let url = format!("{}?session=5s", zookeeper.url());
    let output = tokio::task::spawn_blocking(move || {
        let line = Line::new();
        let script = "exec 3>$LINE; echo $LOCKKIT_TTL_MS >&3; read x <$GO";
        let mut command = lockkit(&["run", "--key", "k", "--ttl", "60s", "--", "sh", "-c", script]);
        command.env("LOCKKIT_STORE", &url);
        let first = line.begin(command);
        let ttl = Duration::from_millis(line.hear().parse().unwrap());
        assert!(ttl <= Duration::from_secs(5) && ttl > Duration::from_secs(2), "{ttl:?}");
        let mut command = lockkit(&["run", "--key", "k", "--no-wait", "--", "true"]);
        let output = command.env("LOCKKIT_STORE", &url).output().unwrap();
        line.go();
        first.end();
        output
    })
    .await
    .unwrap();
    assert_eq!(code(&output), 75);
    let said = complaint(&output);
    assert!(said.contains("until it is released or its session ends") && !said.contains("without end"), "{said}");
}

/// A line from every verb that uses the store.
#[test]
fn what_connecting_warns_of_is_said() {
    let redis = Redis::start();
    redis.command(&["CONFIG", "SET", "maxmemory", "100mb"]);
    redis.command(&["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    let verbs: [&[&str]; 7] = [
        &["ls"],
        &["who", "k"],
        &["top"],
        &["run", "--key", "k", "--", "true"],
        &["check", "--filter", "fencing::never_decreases", "--json"],
        &["race", "--total", "10", "--workers", "2"],
        &["break", "k", "--token", "0123456789abcdef0123456789abcdef"],
    ];
    for args in verbs {
        let output = redis.lockkit(args).output().unwrap();
        let said = String::from_utf8(output.stderr.clone()).unwrap();
        let warnings: Vec<_> = said.lines().filter(|line| line.starts_with("lockkit: warning: ")).collect();
        assert!(warnings.len() == 1 && warnings[0].contains("allkeys-lru"), "{args:?} {said}");
        assert!(!stdout(&output).contains("allkeys-lru"), "{args:?}");
    }
    // The doctor has it in its table, and says it once.
    let output = redis.lockkit(&["doctor"]).output().unwrap();
    assert!(stdout(&output).contains("allkeys-lru") && output.stderr.is_empty(), "{output:?}");
}

/// `nohup lockkit check &`, and a script's background: what was ignored does not end it.
#[test]
fn what_was_ignored_does_not_interrupt() {
    let redis = Redis::start();
    let mut command = ignoring("HUP INT", &["check", "--filter", "fencing::"]);
    command.env("LOCKKIT_STORE", redis.url());
    let mut running = Running::start(command);
    eventually("a case under way", || !redis.command(&["KEYS", "lockkit:lockkit-check/*"]).is_empty());
    running.signal("HUP");
    running.signal("INT");
    assert_eq!(code(&running.end()), 0);
}
