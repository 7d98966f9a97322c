//! The command as a user runs it.

use std::{
    fs,
    io::Write as _,
    path::Path,
    process::{Command, Output},
};

use lockkit_testkit::servers::{RedisOptions, RedisServer};
use serde_json::Value;

use crate::{
    row,
    support::{self, Redis, Running, eventually, is_alive},
};

fn compare(dir: &Path, args: &[&str]) -> Output {
    let out = dir.join("out");
    Command::new(env!("CARGO_BIN_EXE_lockkit"))
        .args(["compare", "--quick", "--skip", "compliance", "--leases", "200", "--out"])
        .arg(out)
        .args(args)
        .env_remove("LOCKKIT_STORE")
        .output()
        .expect("lockkit runs")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_comparison_prints_a_table_and_writes_its_files() {
    let server = RedisServer::start(RedisOptions::default().password("s3cret")).await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let output = compare(dir.path(), &["--store", &server.url()]);
    assert!(output.status.success(), "{output:?}");
    let meanwhile = String::from_utf8(output.stderr).unwrap();
    for what in ["bare round trip (inspect), p50 (µs): memory ", "acquire + release, p50 (µs): memory "] {
        assert!(meanwhile.contains(what), "the first figures: {meanwhile}");
    }
    let text = String::from_utf8(output.stdout).unwrap();
    let markdown = fs::read_to_string(dir.path().join("out/comparison.md")).unwrap();
    let json = fs::read_to_string(dir.path().join("out/comparison.json")).unwrap();
    for what in [&text, &markdown, &json] {
        assert!(!what.contains("s3cret"), "{what}");
        assert!(what.contains("release to acquired, p50"), "{what}");
    }
    assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");

    let json: Value = serde_json::from_str(&json).unwrap();
    let stores: Vec<_> = json["stores"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    assert_eq!(stores[0], "memory");
    for row in json["rows"].as_array().unwrap() {
        let title = row["title"].as_str().unwrap();
        assert!(markdown.contains(&format!("| {title} |")), "{title} in {markdown}");
        // What nearly all samples did not exceed takes a thousand of them.
        assert!(
            !row["values"][stores[1]].is_null() || row["absent"][stores[1]] == "too few samples for a p99 or p99.9",
            "{row}"
        );
    }
    // They take as long as all the others, which is not quick.
    assert!(text.contains("Left out: takeover, delay, cost, faults, compliance."), "{text}");
    assert_eq!(row(&json, "violations")["values"][stores[1]], 0.0);
    assert_eq!(row(&json, "lease_lost")["values"][stores[1]], 0.0);
    let processes = row(&json, "processes");
    assert!(processes["values"]["memory"].is_null() && processes["absent"]["memory"].is_string(), "{processes}");

    // What it took it gave back, and nothing but the fences' counters is left, which expire by themselves.
    let left = server.command(&["KEYS", "*"]).await.unwrap();
    assert!(left.lines().all(|key| key.ends_with("fence") || key == "(nil)" || key.is_empty()), "{left}");
}

#[test]
fn what_is_not_to_be_measured_is_nowhere() {
    let dir = tempfile::tempdir().unwrap();
    let output = compare(dir.path(), &["--store", "memory:", "--only", "alone,keys", "--skip", "keys"]);
    assert!(output.status.success(), "{output:?}");
    let read = |name: &str| fs::read_to_string(dir.path().join("out").join(name)).unwrap();
    let json: Value = serde_json::from_str(&read("comparison.json")).unwrap();
    assert_eq!(json["groups"], serde_json::json!(["alone"]));
    let groups: Vec<_> = json["rows"].as_array().unwrap().iter().map(|row| row["group"].as_str().unwrap()).collect();
    assert!(groups.iter().all(|group| ["Guarantees", "One task, nobody else"].contains(group)), "{groups:?}");
    let curves: Vec<_> = json["curves"].as_array().unwrap().iter().map(|curve| curve["id"].as_str().unwrap()).collect();
    assert_eq!(curves, ["acquire", "release"]);
    let text = String::from_utf8(output.stdout).unwrap();
    for what in [&text, &read("comparison.md")] {
        assert!(what.contains("Measured only: alone.") && what.contains("acquire + release"), "{what}");
        assert!(!what.contains("overlaps") && !what.contains("acquisitions"), "{what}");
    }
    let page = read("comparison.html");
    assert!(page.contains("Whether a lock lets two in at once was not measured."), "{page}");
    assert!(page.contains(">not measured<") && !page.contains("id=\"cases\""), "{page}");
}

#[test]
fn what_locks_and_waiters_cost_the_server_is_told() {
    let (redis, dir) = (Redis::start(), tempfile::tempdir().unwrap());
    let output = start(&redis, dir.path(), &["--only", "cost", "--leases", "200"]).end();
    assert!(output.status.success(), "{output:?}");
    let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    let json: Value = serde_json::from_str(&read("comparison.json")).unwrap();
    assert_eq!((&json["schema"], &json["groups"]), (&2.into(), &serde_json::json!(["cost"])));
    let store = json["stores"][1].as_str().unwrap();
    for id in ["requests", "processor", "bytes"]
        .map(|what| [format!("cost_lock_{what}"), format!("cost_waiter_{what}")])
        .concat()
    {
        let row = row(&json, &id);
        assert!(row["values"][store].is_number() && row["ranges"][store].is_array(), "{row}");
        assert!(row["absent"]["memory"].as_str().unwrap().contains("no server"), "{row}");
        assert_eq!(row["better"], "lower");
    }
    let renewals = row(&json, "cost_lock_requests")["values"][store].as_f64().unwrap();
    assert!((0.5..20.0).contains(&renewals), "{renewals}");
    let heading = "200 locks, held and renewed at a ttl of 3 s; 20 waiters";
    let table = String::from_utf8(output.stdout).unwrap();
    assert!(table.contains(&heading.to_uppercase()) && table.contains("requests, per waiter"), "{table}");
    for report in [&read("comparison.md"), &read("comparison.html")] {
        assert!(report.contains(heading) && report.contains("memory, per held lock"), "{report}");
    }
    assert!(is_released(&redis), "{}", redis.command(&["KEYS", "*"]));
}

#[test]
fn how_long_a_lock_is_out_of_reach_without_its_holder_is_told() {
    let (redis, dir) = (Redis::start(), tempfile::tempdir().unwrap());
    // With the faults it is measured on a store in use, too, where these are not inflicted.
    let output = start(&redis, dir.path(), &["--only", "faults"]).end();
    assert!(output.status.success(), "{output:?}");
    let why = "faults: faults are inflicted on private servers only, never on a store in use";
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains(&format!("Not measured: {why}")) && !text.contains("FAULTS"), "{text}");
    let json: Value = serde_json::from_slice(&fs::read(dir.path().join("comparison.json")).unwrap()).unwrap();
    let store = json["stores"][1].as_str().unwrap();
    for id in ["takeover_killed", "takeover_frozen"] {
        let row = row(&json, id);
        // A renewal is due a third of the ttl after the one before, give or take a tenth of that.
        let [least, most] = [0, 1].map(|at| row["ranges"][store][at].as_f64().unwrap());
        assert!(least > 3.0 * 0.6 && most < 60.0, "{row}");
        assert!(row["absent"]["memory"].as_str().unwrap().contains("one process"), "{row}");
    }
    assert_eq!(row(&json, "takeover_believed")["values"][store], 0.0);
    assert_eq!((&json["groups"], &json["impossible"]), (&serde_json::json!(["takeover"]), &serde_json::json!([why])));
    assert_eq!(json["timelines"], serde_json::json!([]));
    assert!(is_released(&redis), "{}", redis.command(&["KEYS", "*"]));
}

#[test]
fn all_groups_can_not_be_some() {
    let output = support::lockkit(&["compare", "--full", "--only", "alone"]).output().unwrap();
    assert_eq!(output.status.code(), Some(64), "{output:?}");
}

#[test]
fn the_help_names_all_groups() {
    let output = Command::new(env!("CARGO_BIN_EXE_lockkit")).args(["compare", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains(&lockkit_compare::Group::names()), "{help}");
}

#[test]
fn groups_that_can_not_be_measured_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (args, why) in [
        (
            ["--only", "alone,speed"],
            "alone, keys, kinds, hot, processes, hand-off, takeover, delay, leases, cost, faults, compliance",
        ),
        (["--skip", ""], "there is no such group of measures"),
        (["--only", "delay"], "there is nothing to measure"),
        (["--only", "faults"], "there is nothing to measure"),
        (["--only=alone", "--durability=both"], "--durability is about private servers"),
        (
            ["--skip", "alone,keys,kinds,hot,processes,hand-off,takeover,delay,leases,cost,faults,compliance"],
            "--skip leaves nothing to measure",
        ),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_lockkit"))
            .args(["compare", "--store", "memory:", "--out"])
            .arg(dir.path().join("out"))
            .args(args)
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), stderr.lines().count()), (Some(64), 1), "{stderr}");
        assert!(stderr.contains(why), "{stderr}");
        assert!(!dir.path().join("out").exists(), "nothing was measured");
    }
}

#[test]
fn bad_input_costs_no_time() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("out"), "in the way").unwrap();
    let output = compare(dir.path(), &["--store", "memory:"]);
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("out/comparison.md")).unwrap();
    let output = compare(dir.path(), &["--store", "memory:"]);
    assert_eq!(output.status.code(), Some(64), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("comparison.md is a directory"), "{output:?}");
    let dir = tempfile::tempdir().unwrap();
    for (url, code) in [("redis://127.0.0.1:1", 69), ("bogus://h", 64)] {
        let output = compare(dir.path(), &["--store", url]);
        assert_eq!(output.status.code(), Some(code), "{output:?}");
        assert!(!dir.path().join("out").exists(), "nothing was measured: {output:?}");
    }
}

#[test]
fn a_table_that_can_not_be_printed_costs_nobody_the_files() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let status = Command::new(env!("CARGO_BIN_EXE_lockkit"))
        .args(["compare", "--quick", "--skip", "compliance", "--leases", "200", "--store", "memory:", "--out"])
        .arg(&out)
        .stdout(full)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(74));
    assert!(fs::read_to_string(out.join("comparison.md")).unwrap().contains("acquire + release"));
}

#[test]
fn files_that_can_not_be_written_in_the_end_cost_nobody_the_table() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let measuring = std::thread::spawn({
        let dir = dir.path().to_owned();
        move || compare(&dir, &["--store", "memory:"])
    });
    while !fs::read_dir(&out).is_ok_and(|entries| entries.count() == 3) {
        assert!(!measuring.is_finished(), "{:?}", measuring.join());
        std::thread::yield_now();
    }
    fs::remove_dir_all(&out).unwrap();
    let output = measuring.join().unwrap();
    assert_eq!(output.status.code(), Some(74), "{output:?}");
    let (table, why) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(table.contains("acquire + release"), "{table}");
    assert!(why.contains("could not write the files of --out"), "{why}");
}

/// A comparison of the store in memory with this one.
fn start(redis: &Redis, dir: &Path, args: &[&str]) -> Running {
    let mut command = redis.lockkit(&["compare", "--quick", "--out"]);
    command.arg(dir).args(args);
    Running::start(command)
}

/// Sends a signal, and returns how the command ended, when nothing of it is left.
fn interrupted(mut running: Running, signal: &str) -> Output {
    let started = running.descendants();
    assert!(!started.is_empty(), "servers or workers");
    running.signal(signal);
    let output = running.end();
    eventually("the end of all servers and workers", || !started.iter().any(|process| is_alive(*process)));
    output
}

/// Whether nothing is left but the counters of fences, which go by themselves.
fn is_released(redis: &Redis) -> bool {
    redis.command(&["KEYS", "*"]).lines().all(|key| key.ends_with("fence") || key == "(nil)" || key.is_empty())
}

#[test]
fn an_interrupted_comparison_leaves_a_report_and_nothing_running() {
    let (redis, dir) = (Redis::start(), tempfile::tempdir().unwrap());
    let mut running = start(&redis, dir.path(), &["--only", "alone,processes,leases"]);
    eventually("the workers", || running.descendants().len() == 4);
    let output = interrupted(running, "INT");
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    let says = stderr.lines().last().unwrap().strip_prefix("lockkit: ").unwrap().split(';').next().unwrap();
    assert!(says.starts_with("interrupted after ") && says.ends_with(" measures"), "{stderr}");
    let missing = "Not measured on every store: hot lock, several processes; held leases.";
    for report in [&String::from_utf8(output.stdout).unwrap(), &read("comparison.md"), &read("comparison.html")] {
        assert!(report.contains(&format!("This comparison was {says}. {missing}")), "{report}");
    }
    let json: Value = serde_json::from_str(&read("comparison.json")).unwrap();
    let (taken, of) = (json["interrupted"]["taken"].as_u64().unwrap(), json["interrupted"]["of"].as_u64().unwrap());
    // Two rounds of two measures, two stores; then one round of leases each, and of processes for one.
    assert_eq!((taken, of), (8, 11));
    let store = json["stores"][1].as_str().unwrap();
    assert!(row(&json, "pair_p50")["values"][store].is_number(), "{json:#}");
    assert_eq!(row(&json, "lease_bytes")["absent"][store], "the comparison was interrupted before that");
    assert!(is_released(&redis), "{}", redis.command(&["KEYS", "*"]));
}

#[test]
fn leases_that_a_worker_held_are_released_after_an_interruption() {
    let (redis, dir) = (Redis::start(), tempfile::tempdir().unwrap());
    let mut running = start(&redis, dir.path(), &["--only", "leases", "--leases", "300"]);
    eventually("held leases", || {
        assert!(running.is_running());
        redis.command(&["KEYS", "*/held/2*"]).lines().filter(|key| !key.ends_with("fence")).count() > 50
    });
    let output = interrupted(running, "TERM");
    assert_eq!(output.status.code(), Some(143), "{output:?}");
    assert!(is_released(&redis), "{}", redis.command(&["KEYS", "*"]));
}

#[test]
fn compliance_cases_that_have_ended_are_told_after_an_interruption() {
    let (redis, dir) = (Redis::start(), tempfile::tempdir().unwrap());
    let mut running = start(&redis, dir.path(), &["--only", "compliance"]);
    eventually("locks of several cases", || {
        assert!(running.is_running());
        redis.command(&["KEYS", "lockkit:lockkit-compare/*"]).lines().count() > 20
    });
    running.signal("INT");
    let output = running.end();
    assert_eq!(output.status.code(), Some(130), "{output:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    let row = table.lines().find(|line| line.contains("compliance cases: passed")).unwrap();
    assert!(row.contains(" so far"), "{table}");
    assert!(is_released(&redis), "{}", redis.command(&["KEYS", "*"]));
}

#[test]
fn private_servers_end_with_an_interrupted_comparison_and_earlier_files_stay() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("comparison.md"), "earlier").unwrap();
    // The first measure takes more than ten seconds.
    let mut command = support::lockkit(&["compare", "--only", "leases", "--out"]);
    command.arg(dir.path());
    let mut running = Running::start(command);
    loop {
        let line = running.complaint();
        assert!(!line.is_empty(), "it has ended");
        if line.contains("comparing memory, ") {
            break;
        }
    }
    let programs: Vec<_> = running.descendants().into_iter().map(program).collect();
    for server in ["redis-server", "mariadbd", "java"] {
        assert!(programs.iter().any(|program| program == server), "{server} in {programs:?}");
    }
    let output = interrupted(running, "TERM");
    assert_eq!(output.status.code(), Some(143), "{output:?}");
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains("interrupted before anything was measured"), "{stderr}");
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(left, ["comparison.md"]);
    assert_eq!(fs::read_to_string(dir.path().join("comparison.md")).unwrap(), "earlier");
}

/// The name of a process's program.
fn program(process: u32) -> String {
    fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default().trim_end().to_owned()
}

#[test]
fn a_second_interruption_ends_a_comparison_whose_report_nobody_reads() {
    let (redis, dir) = (Redis::start(), tempfile::tempdir().unwrap());
    let (_unread, mut full) = std::io::pipe().unwrap();
    // As much as fits into a pipe.
    full.write_all(&[b'x'; 1 << 16]).unwrap();
    let mut command = redis.lockkit(&["compare", "--quick", "--only", "alone,leases", "--out"]);
    command.arg(dir.path()).stdout(full);
    let mut running = Running::start(command);
    eventually("the worker", || running.descendants().len() == 1);
    running.signal("INT");
    eventually("the files", || dir.path().join("comparison.html").exists());
    assert!(running.is_running(), "it has a table to print");
    running.signal("INT");
    assert_eq!(running.end().status.code(), Some(130));
    let mut left: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["comparison.html", "comparison.json", "comparison.md"], "the files were written before");
}

#[test]
fn a_store_that_lets_two_in_is_told() {
    let (redis, dir) = (Redis::start(), tempfile::tempdir().unwrap());
    let mut running = start(&redis, dir.path(), &["--only", "processes"]);
    // A server that loses its data again and again grants what is held.
    while running.is_running() {
        redis.command(&["FLUSHALL"]);
    }
    let output = running.end();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.lines().last().unwrap().ends_with("critical sections overlapped"), "{stderr}");
    let json: Value = serde_json::from_str(&fs::read_to_string(dir.path().join("comparison.json")).unwrap()).unwrap();
    let store = json["stores"][1].as_str().unwrap();
    assert!(row(&json, "violations")["values"][store].as_f64().unwrap() > 0.0, "{json:#}");
}

#[test]
fn a_baseline_tells_what_is_worse_now() {
    let dir = tempfile::tempdir().unwrap();
    let output = compare(dir.path(), &["--store", "memory:"]);
    assert!(output.status.success(), "{output:?}");
    let mut earlier: Value =
        serde_json::from_slice(&fs::read(dir.path().join("out/comparison.json")).unwrap()).unwrap();
    // An earlier comparison in which everything was a hundred times better.
    for row in earlier["rows"].as_array_mut().unwrap() {
        let factor = match row["better"].as_str() {
            Some("higher") => 100.0,
            Some("lower") => 0.01,
            _ => continue,
        };
        let Some(value) = row["values"]["memory"].as_f64() else { continue };
        row["values"]["memory"] = (value * factor).into();
        if let Some(range) = row["ranges"].get_mut("memory").and_then(Value::as_array_mut) {
            range.iter_mut().for_each(|end| *end = (end.as_f64().unwrap() * factor).into());
        }
    }
    let baseline = dir.path().join("earlier.json");
    fs::write(&baseline, earlier.to_string()).unwrap();
    let baseline = baseline.to_str().unwrap();
    let output = compare(dir.path(), &["--store", "memory:", "--baseline", baseline]);
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("worse: memory: One task, nobody else: acquire + release, p50:"), "{text}");
    let changes = |json: &Value, verdict| {
        let figures = json["changes"]["figures"].as_array().unwrap().iter();
        figures.filter(|figure| figure["verdict"] == verdict).count()
    };
    let now: Value = serde_json::from_slice(&fs::read(dir.path().join("out/comparison.json")).unwrap()).unwrap();
    assert!(changes(&now, "worse") >= 5 && changes(&now, "better") == 0, "{}", now["changes"]);
    assert!(fs::read_to_string(dir.path().join("out/comparison.html")).unwrap().contains("id=\"changes\""));

    // What can't be a baseline is refused before anything is measured.
    let other = dir.path().join("other.json");
    fs::write(&other, earlier.to_string().replace("\"memory\"", "\"redis 1\"")).unwrap();
    let none = dir.path().join("none.json");
    for (file, why) in [(&other, "--baseline has none of these stores (memory), but redis 1"), (&none, "can't use")] {
        let fresh = tempfile::tempdir().unwrap();
        let output = compare(fresh.path(), &["--store", "memory:", "--baseline", file.to_str().unwrap()]);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(64) && stderr.contains(why), "{stderr}");
        assert!(fs::read_dir(fresh.path().join("out")).map_or(true, |mut files| files.next().is_none()), "{stderr}");
    }
}
