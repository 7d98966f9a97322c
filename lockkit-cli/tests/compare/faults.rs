//! `lockkit compare --only faults`, on private servers as a user has them.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

use crate::row;

/// A directory with a link to this program alone, to find nothing else with.
fn only(dir: &Path, program: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(program)).find(|at| at.exists());
    let bin = dir.join("bin");
    fs::create_dir(&bin).expect("a directory");
    std::os::unix::fs::symlink(found.expect("it is installed"), bin.join(program)).expect("a link");
    bin
}

#[test]
fn who_held_a_lock_when_while_faults_were_inflicted_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let bin = only(dir.path(), "redis-server");
    // What is not installed can't be started: for the session of a ZooKeeper to end takes half a minute.
    let output = Command::new(env!("CARGO_BIN_EXE_lockkit"))
        .args(["compare", "--only", "faults", "--skip", "takeover", "--out"])
        .arg(dir.path())
        .env("PATH", &bin)
        .env("LOCKKIT_SERVERS", &bin)
        .env_remove("LOCKKIT_STORE")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    let json: Value = serde_json::from_str(&read("comparison.json")).unwrap();
    let stores: Vec<_> = json["stores"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    let [redis, redlock] =
        ["redis ", "redlock"].map(|kind| *stores.iter().find(|name| name.starts_with(kind)).unwrap());
    let all = json["timelines"].as_array().unwrap();
    let timeline = |store, fault| all.iter().find(|one| one["store"] == store && one["fault"] == fault).unwrap();
    for store in [redis, redlock] {
        for fault in ["killed", "frozen", "cut"] {
            let timeline = timeline(store, fault);
            // Half a second after its grant the lease has two and a half to go.
            let taken = timeline["taken"].as_f64().unwrap();
            assert!((1.5..30.0).contains(&taken) && timeline["victim"] == 0, "{timeline}");
            assert_eq!(timeline["overlaps"], serde_json::json!([]), "{timeline}");
            assert!(timeline["written"].as_u64().unwrap() > 10, "{timeline}");
        }
        // It writes before it looks whether it still has the lock, and is told that it has not.
        let frozen = timeline(store, "frozen");
        assert!(!frozen["refused"].as_array().unwrap().is_empty(), "{frozen}");
        assert!(frozen["beliefs"].as_array().unwrap().iter().any(|one| one["process"] == 0 && one["end"] == "lost"));
        assert!(row(&json, "lost_without_lock")["values"][store].as_f64().unwrap() > 0.0);
        assert_eq!(row(&json, "lost_under_lock")["values"][store], 0.0);
    }
    // A server that keeps its locks in memory has none of them when it is back; a majority has them.
    let (alone, quorum) = (timeline(redis, "restarted"), timeline(redlock, "restarted"));
    assert!(alone["forgets"] == true && !alone["overlaps"].as_array().unwrap().is_empty(), "{alone}");
    assert!(quorum["forgets"] == false && quorum["overlaps"].as_array().unwrap().is_empty(), "{quorum}");
    let page = read("comparison.html");
    assert!(page.contains("but where a server came back without its locks"), "{page}");
    assert_eq!(page.matches("<svg").count(), all.len(), "a chart for each");
    for link in page.split("href=\"#").skip(1) {
        let goal = link.split('"').next().unwrap();
        assert!(page.contains(&format!("id=\"{goal}\"")), "{goal}");
    }
}
