//! The command on Redlock with five nodes, of which one, two and three are down, frozen or slow.

use std::{
    net::SocketAddr,
    process::{Command, Output},
    time::Duration,
};

use crate::support::{Line, code, complaint, complaints, lockkit, stdout};
use lockkit_testkit::{
    faults::{Direction, Proxy},
    servers::{RedisOptions, RedisServer},
};
use serde_json::Value;

const NODES: usize = 5;
const MINORITY: usize = 2;
/// Well above the timeout of a node at the ttls used here.
const SLOW: Duration = Duration::from_millis(600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Down,
    Frozen,
    Slow,
}

/// A test for each fault, for most of the time is spent waiting for nodes that do not answer.
macro_rules! with_each_fault {
    ($test:ident) => {
        mod $test {
            use super::Fault;

            #[tokio::test(flavor = "multi_thread", worker_threads = 3)]
            async fn down() {
                super::$test(Fault::Down).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 3)]
            async fn frozen() {
                super::$test(Fault::Frozen).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 3)]
            async fn slow() {
                super::$test(Fault::Slow).await;
            }
        }
    };
}

with_each_fault!(run_needs_a_majority);
with_each_fault!(race_loses_no_update);
with_each_fault!(cmd_lives_as_long_as_a_majority);

/// Five servers, each behind a proxy.
struct Nodes {
    servers: Vec<RedisServer>,
    proxies: Vec<Proxy>,
}

impl Nodes {
    async fn start() -> Self {
        let servers = RedisServer::start_many(NODES, RedisOptions::default()).await.unwrap();
        let mut proxies = Vec::new();
        for server in &servers {
            proxies.push(Proxy::start(server.addr()).await.unwrap());
        }
        Self { servers, proxies }
    }

    /// As the command is told. The servers have just been started, which is not what this is about.
    fn url(&self) -> String {
        let hosts: Vec<_> = (0..NODES).map(|node| self.addr(node).to_string()).collect();
        format!("redlock://{}?delayed_restart=no", hosts.join(","))
    }

    fn addr(&self, node: usize) -> SocketAddr {
        self.proxies[node].addr()
    }

    async fn harm(&self, node: usize, fault: Fault) {
        match fault {
            Fault::Down => {
                self.proxies[node].refuse(true);
                self.servers[node].kill().await.unwrap();
            }
            Fault::Frozen => self.servers[node].freeze().await.unwrap(),
            Fault::Slow => self.proxies[node].delay(Direction::ToClient, SLOW),
        }
    }

    fn lockkit(&self, args: &[&str]) -> Command {
        let mut command = lockkit(args);
        command.env("LOCKKIT_STORE", self.url());
        command
    }

    /// Nothing ran, and one line says which of the nodes could not be used. While it tries, it may say that it waits.
    #[track_caller]
    fn fails(&self, output: &Output) {
        assert_eq!((output.status.code(), stdout(output)), (Some(69), String::new()), "{output:?}");
        let told = String::from_utf8(output.stderr.clone()).unwrap();
        let lines: Vec<_> = told.lines().filter(|line| !line.starts_with("lockkit: waiting for")).collect();
        let [line] = lines[..] else { panic!("{told}") };
        assert!(
            line.contains("on redlock of 5 nodes: ") && line.contains(" of 5 nodes did it, 3 are needed"),
            "{line}"
        );
        for node in 0..NODES {
            let is_harmed = node <= MINORITY;
            assert_eq!(line.contains(&self.addr(node).to_string()), is_harmed, "node {node}: {line}");
        }
    }
}

/// What works with each minority harmed, and fails with a majority.
async fn needs_a_majority(fault: Fault, args: &[&str], works: impl Fn(&Output)) {
    let nodes = Nodes::start().await;
    for node in 0..MINORITY {
        nodes.harm(node, fault).await;
        println!("{} nodes", node + 1);
        works(&nodes.lockkit(args).output().unwrap());
    }
    nodes.harm(MINORITY, fault).await;
    nodes.fails(&nodes.lockkit(args).output().unwrap());
}

async fn run_needs_a_majority(fault: Fault) {
    needs_a_majority(fault, &["run", "--key", "k", "--", "echo", "ran"], |output| {
        assert_eq!((code(output), &*stdout(output), &*complaints(output)), (0, "ran\n", ""), "{output:?}");
    })
    .await;
}

async fn race_loses_no_update(fault: Fault) {
    needs_a_majority(fault, &["race", "--total", "30", "--workers", "3", "--json"], |output| {
        assert_eq!(code(output), 0, "{output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let shared = report["schemes"].as_array().unwrap().iter().find(|scheme| scheme["shared_lock"] == true).unwrap();
        assert_eq!((&shared["counted"], &shared["lost"]), (&30.into(), &0.into()), "{report}");
    })
    .await;
}

/// A test for each group, for most of the time is spent as above.
mod compare_measures_what_is_left {
    #[tokio::test(flavor = "multi_thread", worker_threads = 3)]
    async fn one_task() {
        super::compare_measures_what_is_left("alone", None).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 3)]
    async fn processes() {
        super::compare_measures_what_is_left("processes", Some("violations")).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 3)]
    async fn leases() {
        super::compare_measures_what_is_left("leases", Some("lease_lost")).await;
    }
}

/// A group asks with one task, with processes, or holds leases. The others ask in the same ways.
async fn compare_measures_what_is_left(group: &str, nothing: Option<&str>) {
    let nodes = Nodes::start().await;
    let dir = tempfile::tempdir().unwrap();
    let compare = || {
        let only = ["compare", "--quick", "--only", group, "--leases", "20"];
        nodes.lockkit(&only).args(["--store", &nodes.url(), "--out"]).arg(dir.path().join("out")).output().unwrap()
    };
    nodes.harm(0, Fault::Frozen).await;
    nodes.harm(1, Fault::Slow).await;
    let output = compare();
    assert!(output.status.success(), "{output:?}");
    let json = std::fs::read_to_string(dir.path().join("out/comparison.json")).unwrap();
    let report: Value = serde_json::from_str(&json).unwrap();
    let store = report["stores"][1].as_str().unwrap();
    if let Some(id) = nothing {
        let row = report["rows"].as_array().unwrap().iter().find(|row| row["id"] == id).unwrap();
        assert_eq!(row["values"][store], 0.0, "{row}");
    }
    nodes.harm(2, Fault::Down).await;
    let output = compare();
    assert_eq!(output.status.code(), Some(69), "{output:?}");
}

/// Nodes that go while CMD runs: a minority costs nothing, a majority the lease, before it can lapse at the others.
async fn cmd_lives_as_long_as_a_majority(fault: Fault) {
    let nodes = Nodes::start().await;
    let line = Line::new();
    let script =
        "exec 2>/dev/null 3>$LINE; trap 'echo told >&3; exit 9' TERM; echo up >&3; while :; do sleep 0.02; done";
    let mut running = line.start(nodes.lockkit(&["run", "--key", "k", "--ttl", "2s", "--", "sh", "-c", script]));
    for node in 0..MINORITY {
        nodes.harm(node, fault).await;
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(running.is_running(), "{fault:?}");
    nodes.harm(MINORITY, fault).await;
    assert_eq!(line.hear(), "told", "{fault:?}");
    let output = running.end();
    assert_eq!(code(&output), 74, "{fault:?} {output:?}");
    let line = complaint(&output);
    assert!((0..=MINORITY).all(|node| line.contains(&nodes.addr(node).to_string())), "{fault:?} {line}");
}
