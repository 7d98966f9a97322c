//! The examples run, without a server and, where they take a URL, on private servers.

#![cfg(feature = "redis")]

use std::{
    collections::BTreeMap,
    env,
    path::PathBuf,
    process::{Command, Stdio},
    sync::LazyLock,
};

use lockkit_testkit::servers::{RedisOptions, RedisServer};
use serde_json::Value;

/// The examples' programs, by name. Cargo says where they are, and first builds those that are older than their sources: `cargo test`
/// has built them with the same packages and features, `cargo test --test examples` has not.
static PROGRAMS: LazyLock<BTreeMap<String, PathBuf>> = LazyLock::new(|| {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.current_dir(env!("CARGO_MANIFEST_DIR")).args(["build", "--workspace", "--examples", "--all-features"]);
    cargo.args(["--message-format", "json-render-diagnostics", "--target-dir"]).arg(target());
    // The profile of `cargo test`: with that of `cargo build`, all that has a profile of its own in tests is built once more.
    cargo.args(["--profile", if cfg!(debug_assertions) { "test" } else { "release" }]);
    let output = cargo.stderr(Stdio::inherit()).output().expect("cargo");
    assert!(output.status.success(), "the examples do not compile");
    let program = |line| {
        let message: Value = serde_json::from_slice(line).ok()?;
        let is_example = message["target"]["kind"][0] == "example";
        let name = message["target"]["name"].as_str().filter(|_| is_example)?;
        Some((name.to_owned(), PathBuf::from(message["executable"].as_str()?)))
    };
    output.stdout.split(|byte| *byte == b'\n').filter_map(program).collect()
});

/// Where this test was built: `TARGET/<profile>/deps/examples-…`.
fn target() -> PathBuf {
    let test = env::current_exe().expect("this test has a path");
    test.ancestors().nth(3).expect("three directories above").to_owned()
}

fn program(name: &str) -> &'static PathBuf {
    PROGRAMS.get(name).unwrap_or_else(|| panic!("there is no example {name}"))
}

/// Runs an example to its end, and returns what it printed.
fn run(name: &str, url: Option<&str>) -> String {
    let program = program(name);
    let output = Command::new(program).args(url).output();
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", program.display()));
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{name} {url:?}: {}\n{out}{err}", output.status);
    out.into_owned()
}

async fn redis() -> RedisServer {
    RedisServer::start(RedisOptions::default()).await.expect("a Redis server")
}

#[tokio::test]
async fn quickstart_lets_one_in_after_the_other() {
    let server = redis().await;
    for url in [None, Some(server.url())] {
        let printed = run("quickstart", url.as_deref());
        let lines: Vec<_> = printed.lines().collect();
        assert!(lines.len() == 4 && lines[1].ends_with("released") && lines[3].ends_with("released"), "{printed}");
    }
}

#[tokio::test]
async fn leader_has_three_terms() {
    let server = redis().await;
    for url in [None, Some(server.url())] {
        let printed = run("leader", url.as_deref());
        let hosts: Vec<_> = printed.lines().filter(|line| line.starts_with("host-")).collect();
        assert!(hosts.len() == 6, "{printed}");
        for turn in hosts.chunks(2) {
            let (host, _) = turn[0].split_once(": leads").expect(&printed);
            assert_eq!(turn[1], format!("{host}: steps down"), "{printed}");
        }
        assert!(printed.contains("follower: host-"), "{printed}");
    }
}

#[tokio::test]
async fn scheduled_job_runs_once_each_time() {
    let server = redis().await;
    for url in [None, Some(server.url())] {
        let printed = run("scheduled_job", url.as_deref());
        assert_eq!(printed.matches("runs the job").count(), 2, "{printed}");
        assert_eq!(printed.matches("somebody else does it").count(), 8, "{printed}");
    }
}

#[test]
fn fenced_write_and_migration_come_to_their_end() {
    let printed = run("fenced_write", None);
    assert!(printed.contains("the old holder's write:  refused"), "{printed}");
    run("migration", None);
}

#[test]
fn a_lost_lock_is_survived() {
    assert_eq!(run("lost_lock", None), "after each fault all pages were imported\n");
}

#[cfg(feature = "metrics")]
#[tokio::test]
async fn metrics_are_exported() {
    let server = redis().await;
    for url in [None, Some(server.url())] {
        let printed = run("metrics", url.as_deref());
        for line in [
            r#"lockkit_acquire_wait_seconds_count{class="invoice",outcome="contended"} 1"#,
            r#"lockkit_hold_seconds_count{class="invoice"} 1"#,
            "lockkit_renew_margin_seconds_bucket{",
            r#"operation="renew",outcome="renewed""#,
        ] {
            assert!(printed.contains(line), "no {line} in {printed}");
        }
    }
}

#[cfg(feature = "mysql")]
mod web_service;
