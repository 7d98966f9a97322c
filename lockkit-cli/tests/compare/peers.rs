//! `lockkit compare --peers`: other lock libraries beside the stores. (`./run` installs redis-py and Curator.)

use std::{
    fs,
    path::Path,
    process::{Command, Output},
};

use serde_json::Value;

use crate::{row, support};

/// All that is installed, or the servers in this directory alone.
fn compare(dir: &Path, servers: Option<&Path>, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lockkit"));
    command.args(["compare", "--quick", "--out"]).arg(dir.join("out")).args(args).env_remove("LOCKKIT_STORE");
    if !args.iter().any(|arg| arg.starts_with("--store")) {
        command.args(["--durability", "usual"]);
    }
    if let Some(servers) = servers {
        command.env("PATH", servers).env("LOCKKIT_SERVERS", servers);
    }
    command.output().expect("lockkit runs")
}

#[test]
fn each_peer_is_a_column_after_the_stores() {
    let dir = tempfile::tempdir().unwrap();
    let output = compare(dir.path(), None, &["--peers", "--only", "alone"]);
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    let read = |name: &str| fs::read_to_string(dir.path().join("out").join(name)).unwrap();
    let json: Value = serde_json::from_str(&read("comparison.json")).unwrap();
    let names = |member: &str| -> Vec<String> {
        json[member].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()).collect()
    };
    let (stores, peers) = (names("stores"), names("peers"));
    assert_eq!((&json["schema"], &stores[stores.len() - peers.len()..]), (&2.into(), &peers[..]));
    let expected =
        ["rslock 0.", "redis-py ", "curator "].map(|name| (name != "rslock 0." || cfg!(feature = "peers"), name));
    let expected: Vec<_> = expected.into_iter().filter_map(|(built, name)| built.then_some(name)).collect();
    assert_eq!(peers.len(), expected.len(), "{peers:?}, not compared: {}", json["not_compared"]);
    let page = read("comparison.html");
    let guarantees = page.split("id=\"guarantees\"").nth(1).unwrap().split("id=\"figures\"").next().unwrap();
    for (peer, name) in peers.iter().zip(expected) {
        let version = peer.strip_prefix(name).unwrap().strip_suffix(" (peer)").unwrap();
        assert!(version.starts_with(|first: char| first.is_ascii_digit()), "{peer}");
        for report in [&table, &read("comparison.md"), &page] {
            assert!(report.contains(peer), "{peer} in {report}");
        }
        let number = |id: &str| row(&json, id)["values"][peer].as_f64().unwrap_or_else(|| panic!("{peer}: {id}"));
        let (pair, acquire, release) = (number("pair_p50"), number("acquire_p50"), number("release_p50"));
        // In µs, between what a system call takes and what no busy machine takes.
        assert!(acquire > 10.0 && release > 10.0 && pair > acquire.max(release) && pair < 1e6, "{peer}: {pair}");
        let rate = number("pair_rate");
        assert!(rate > 1.0 && rate < 1e5, "{peer}: {rate}");
        // What was not measured of it is said nowhere.
        for id in ["fencing", "fifo", "round_trip_p50"] {
            assert!(row(&json, id)["absent"][peer].as_str().unwrap().contains("another lock library"), "{peer}: {id}");
        }
        let facts = page.split("id=\"facts\"").nth(1).unwrap();
        assert!(
            !guarantees.split("id=\"questions\"").next().unwrap().contains(peer) && !facts.contains(peer),
            "{peer}"
        );
    }
}

#[test]
fn peers_are_measured_under_contention_and_from_process_to_process() {
    let dir = tempfile::tempdir().unwrap();
    let output = compare(dir.path(), None, &["--peers=redis-py,curator", "--only", "processes,hand-off"]);
    assert!(output.status.success(), "{output:?}");
    let json = fs::read_to_string(dir.path().join("out/comparison.json")).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    let peers: Vec<_> = json["peers"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert!(peers.len() == 2 && peers[1].starts_with("curator "), "in the order that was asked for: {peers:?}");
    for peer in peers {
        let number = |id: &str| row(&json, id)["values"][peer].as_f64().unwrap_or_else(|| panic!("{peer}: {id}"));
        assert!(number("processes") > 1.0 && (0.25..=1.0).contains(&number("processes_fairness")), "{peer}");
        assert_eq!(number("violations"), 0.0, "{peer}");
        assert!((10.0..5e6).contains(&number("hand_off_p50")), "{peer}: {}", number("hand_off_p50"));
    }
}

#[test]
fn a_peer_that_is_missing_is_left_out_unless_it_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    // No Python, no Java and no server.
    let nothing = dir.path().join("bin");
    fs::create_dir(&nothing).unwrap();
    let output = compare(dir.path(), Some(&nothing), &["--peers", "--only", "alone"]);
    assert!(output.status.success(), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    for peer in ["rslock", "redis-py", "curator"] {
        let told = table.lines().filter(|line| line.contains(&format!("the peer {peer} is missing: "))).count();
        assert_eq!(told, 1, "{table}");
    }
    let output = compare(dir.path(), Some(&nothing), &["--peers=curator", "--only", "alone"]);
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert!(support::complaint(&output).contains("the peer curator is missing: "), "{output:?}");
}

#[test]
fn what_can_be_no_peer_is_bad_usage() {
    let dir = tempfile::tempdir().unwrap();
    for (args, why) in [
        (["--peers=curator,etcd", "--only=alone"], "there is no such peer; there are rslock, redis-py, curator"),
        (["--peers=", "--only=alone"], "there is no such peer"),
        (["--peers", "--store=memory:"], "--peers is about private servers"),
    ] {
        let output = compare(dir.path(), None, &args);
        assert_eq!(output.status.code(), Some(64), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{output:?}");
        assert!(!dir.path().join("out").exists(), "nothing was measured");
    }
    let help = support::stdout(&support::lockkit(&["compare", "--help"]).output().unwrap());
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains(&lockkit_compare::Peer::names()), "{help}");
}
