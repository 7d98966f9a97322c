//! `lockkit check`: on stores that are sound, on stores that are not, and when it is interrupted.

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Output},
};

use crate::support::{Redis, Running, code, complaint, eventually, lockkit, stdout};
use lockkit_testkit::{
    cases,
    servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer, hosts},
};
use serde_json::Value;

/// Runs all cases on a sound store, with JSON and JUnit, and compares the two.
fn is_sound(store: &str, least: usize) -> Value {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("junit.xml");
    let mut command = lockkit(&["check", "--json", "--junit", file.to_str().unwrap()]);
    let output = command.env("LOCKKIT_STORE", store).output().unwrap();
    assert_eq!(code(&output), 0, "{} {}", String::from_utf8_lossy(&output.stderr), stdout(&output));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let results = report["cases"].as_array().unwrap();
    assert_eq!(results.len(), cases::all().len());
    let count = |result: &str| results.iter().filter(|case| case["result"] == result).count();
    for result in ["passed", "failed", "ignored"] {
        assert_eq!(report[result], count(result), "{result}");
    }
    assert!(count("passed") >= least, "only {} passed: {report:#}", count("passed"));
    assert!(results.iter().all(|case| (case["result"] == "ignored") == case["reason"].is_string()));
    let suite = junit(&file);
    assert_eq!(
        (suite["tests"].as_u64(), suite["skipped"].as_u64()),
        (Some(results.len() as u64), report["ignored"].as_u64())
    );
    report
}

/// What another's parser finds in the file.
fn junit(file: &std::path::Path) -> Value {
    let script = "import json, sys, xml.etree.ElementTree as e\n\
        r = e.parse(sys.argv[1]).getroot()\n\
        assert r.tag == 'testsuites' and [s.tag for s in r] == ['testsuite'], r\n\
        c = r[0].findall('testcase')\n\
        assert len(c) == len(r[0]) and all(float(x.get('time')) >= 0 and x.get('classname') for x in c)\n\
        n = lambda tag: sum(x.find(tag) is not None for x in c)\n\
        assert [int(r[0].get(k)) for k in ('tests', 'failures', 'skipped')] == [len(c), n('failure'), n('skipped')]\n\
        why = [x.find('failure').text for x in c if x.find('failure') is not None]\n\
        print(json.dumps({'tests': len(c), 'failures': n('failure'), 'skipped': n('skipped'), 'why': why}))\n";
    let output = Command::new("python3").args(["-c", script]).arg(file).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Names of locks that `check` took and that are still held.
fn held(store: &str) -> Vec<Value> {
    let output = lockkit(&["ls", "lockkit-check/", "--json"]).env("LOCKKIT_STORE", store).output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    serde_json::from_slice::<Value>(&output.stdout).unwrap().as_array().unwrap().clone()
}

#[test]
fn memory_is_sound() {
    let report = is_sound("memory:", 65);
    assert_eq!((&report["store"], report["left"].as_array().unwrap().len()), (&"memory".into(), 0));
}

#[test]
fn redis_is_sound_and_left_as_it_was() {
    let redis = Redis::start_with(RedisOptions::default().password("s3cret"));
    let report = is_sound(&redis.url(), 65);
    assert!(report["left"][0].as_str().unwrap().contains("expire"), "{report:#}");
    assert!(!report.to_string().contains("s3cret"));
    // Asked at the server, for names of keys may contain anything. Nine days: some counters run ahead of the clock.
    let script = "local seen, odd = 0, 0
        for _, key in ipairs(redis.call('KEYS', '*')) do
            local ttl = redis.call('TTL', key)
            local fine = key:find('lockkit-check/', 1, true) and key:sub(-6) == ':fence' and ttl > 0 and ttl < 9 * 86400
            seen, odd = seen + 1, odd + (fine and 0 or 1)
        end
        return (seen > 100 and 'many' or seen) .. ' counters and ' .. odd .. ' others'";
    assert_eq!(redis.command(&["EVAL", script, "0"]), "many counters and 0 others");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mariadb_is_sound() {
    // It is never started again: a disk that is busy for half a second must not look like a fault of the store.
    let options = MySqlOptions::default().args(["--innodb-flush-log-at-trx-commit=2"]);
    let mysql = MySqlServer::start(options).await.unwrap();
    let store = format!("{}?create=true", mysql.url());
    is_sound(&store, 65);
    assert_eq!(held(&store), [] as [Value; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn zookeeper_is_sound() {
    let zookeeper = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.unwrap();
    is_sound(&zookeeper.url(), 45);
    assert_eq!(held(&zookeeper.url()), [] as [Value; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redlock_is_sound() {
    let nodes = RedisServer::start_many(5, RedisOptions::default()).await.unwrap();
    let store = format!("redlock://{}?delayed_restart=no&node_timeout=150ms", hosts(&nodes));
    is_sound(&store, 65);
    assert_eq!(held(&store), [] as [Value; 0]);
}

#[test]
fn a_store_that_is_not_there_leaves_no_empty_report() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("junit.xml");
    let mut command = lockkit(&["check", "--store", "redis://127.0.0.1:1", "--junit"]);
    assert_eq!(command.arg(&file).output().unwrap().status.code(), Some(69));
    assert!(!file.exists());
}

#[test]
fn a_store_that_drops_locks_fails() {
    let redis = Redis::start();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("junit.xml");
    let mut command = redis.lockkit(&["check", "--filter", "a_renewed_lease_outlives_its_ttl", "--junit"]);
    command.arg(&file);
    let mut check = Running::start(command);
    // Somebody empties the database: it is in use as a cache, too. Not before the rival has been refused and waits, or it
    // would be granted what the guard lost.
    eventually("a waiter", || {
        assert!(check.is_running());
        !redis.command(&["PUBSUB", "CHANNELS", "lockkit:lockkit-check/*"]).is_empty()
    });
    redis.command(&["FLUSHALL"]);
    let output = check.end();
    assert_eq!(code(&output), 1, "{output:?}");
    assert_eq!(complaint(&output), "lockkit: 1 of 1 cases failed");
    let text = stdout(&output);
    let line = text.lines().nth(1).unwrap();
    assert!(line.starts_with("expiry::a_renewed_lease_outlives_its_ttl") && line.contains(" failed "), "{text}");
    assert!(line.contains("Seen: lost while it was renewed"), "{text}");
    assert!(text.contains(": 0 passed, 1 failed, 0 ignored, in "), "{text}");
    let suite = junit(&file);
    assert!(suite["failures"] == 1 && suite["why"][0].as_str().unwrap().contains("lost while"), "{suite}");
}

#[test]
fn a_server_that_is_out_of_memory_fails() {
    let redis = Redis::start();
    redis.command(&["CONFIG", "SET", "maxmemory", "1"]);
    let output = redis.lockkit(&["check", "--filter", "lifecycle::a_free", "--json"]).output().unwrap();
    assert_eq!(code(&output), 1, "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["failed"], &report["cases"][0]["result"]), (&1.into(), &"failed".into()));
    assert!(report["cases"][0]["reason"].as_str().unwrap().contains("memory"), "{report:#}");
}

#[test]
fn a_server_that_goes_away_is_69() {
    let redis = Redis::start();
    let mut check = Running::start(redis.lockkit(&["check", "--filter", "expiry::"]));
    eventually("a lock that is taken", || {
        assert!(check.is_running());
        !redis.command(&["KEYS", "lockkit:lockkit-check/*"]).is_empty()
    });
    redis.kill();
    let output = check.end();
    assert_eq!(code(&output), 69, "{output:?}");
    assert!(complaint(&output).contains("can't be used any more, since expiry::"), "{}", complaint(&output));
    assert!(stdout(&output).contains(" failed ") && stdout(&output).contains("may still be held"), "{output:?}");
}

/// Runs the cases about waiting, and sends a signal as soon as one has ended: more have begun than run at once.
fn interrupted(signal: &str, junit: &Path, args: &[&str]) -> Output {
    let redis = Redis::start();
    let mut command = redis.lockkit(&["check", "--filter", "waiting", "--junit"]);
    command.arg(junit).args(args);
    let mut check = Running::start(command);
    eventually("a fifth case", || {
        assert!(check.is_running());
        let counters = redis.command(&["KEYS", "{lockkit:lockkit-check/*"]);
        counters.lines().filter_map(|name| name.split('/').nth(2)).collect::<BTreeSet<_>>().len() > 4
    });
    check.signal(signal);
    let output = check.end();
    assert_eq!(held(&redis.url()), [] as [Value; 0]);
    output
}

#[test]
fn an_interrupted_check_tells_what_it_knows_and_leaves_no_lock() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("junit.xml");
    let output = interrupted("INT", &file, &[]);
    assert_eq!(code(&output), 130, "{output:?}");
    let all = cases::all().into_iter().filter(|case| case.name.contains("waiting")).count();
    let (said, end) = (complaint(&output), format!(" of {all} cases"));
    let ended: usize =
        said.strip_prefix("lockkit: interrupted after ").unwrap().strip_suffix(&end).unwrap().parse().unwrap();
    assert!((1..all).contains(&ended), "{said}");
    let (text, count) = (stdout(&output), |what: &str| stdout(&output).matches(what).count());
    assert_eq!((count(" passed  "), count("interrupted")), (ended, all - ended), "{text}");
    assert!(text.contains(&format!(": {ended} passed, 0 failed, {} ignored, in ", all - ended)), "{text}");
    assert!(text.contains("Left in the store: the fence counters"), "{text}");
    let suite = junit(&file);
    assert_eq!((suite["tests"].as_u64(), suite["failures"].as_u64()), (Some(all as u64), Some(0)));
    assert_eq!(suite["skipped"].as_u64(), Some((all - ended) as u64));
}

#[test]
fn a_terminated_check_is_json_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let output = interrupted("TERM", &dir.path().join("junit.xml"), &["--json"]);
    assert_eq!(code(&output), 143, "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let results = report["cases"].as_array().unwrap();
    assert!(results.iter().any(|case| case["result"] == "passed"), "{report:#}");
    let last = results.last().unwrap();
    assert_eq!((&last["result"], &last["reason"]), (&"ignored".into(), &"not run to its end: interrupted".into()));
}

#[test]
fn the_cases_are_listed_without_a_store() {
    let output = lockkit(&["check", "--list"]).output().unwrap();
    assert_eq!(code(&output), 0);
    let text = stdout(&output);
    for case in cases::all() {
        let line = text.lines().find(|line| line.split(' ').next() == Some(case.name)).unwrap();
        assert!(line.trim_end().ends_with(case.doc), "{line}");
    }
    let output: Output = lockkit(&["check", "--list", "--filter", "fencing::never"]).output().unwrap();
    assert_eq!(stdout(&output).lines().count(), 2);
}

#[test]
fn bad_usage_costs_no_time() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("junit.xml")).unwrap();
    let taken = dir.path().join("junit.xml");
    let bad: [(&str, &[&str]); 5] = [
        ("", &["check"]),
        ("nonsense", &["check"]),
        ("memory:", &["check", "--filter", "frob"]),
        ("memory:", &["check", "--junit", taken.to_str().unwrap()]),
        ("memory:", &["check", "--list", "--json"]),
    ];
    for (store, args) in bad {
        let output = lockkit(args).env("LOCKKIT_STORE", store).output().unwrap();
        assert_eq!((code(&output), stdout(&output)), (64, String::new()), "{args:?} {output:?}");
    }
    let output = lockkit(&["check", "--store", "redis://u:hunter2@127.0.0.1:1"]).output().unwrap();
    assert_eq!(code(&output), 69);
    assert!(!complaint(&output).contains("hunter2"));
}
