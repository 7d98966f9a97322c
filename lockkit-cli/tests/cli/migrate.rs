//! `lockkit migrate`, as a person or a script uses it.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Output, Stdio},
};

use lockkit_testkit::servers::{ZooKeeperFlavor, ZooKeeperServer};
use serde_json::Value;

use crate::support::{Line, Redis, Terminal, code, complaint, eventually, lockkit, stdout};

/// Two private servers, and what moves between them.
struct Stores {
    old: Redis,
    new: Redis,
    /// The URL of the new store.
    to: String,
}

impl Stores {
    fn new() -> Self {
        let new = Redis::start();
        Self { old: Redis::start(), to: new.url(), new }
    }

    fn migrate(&self, args: &[&str]) -> Output {
        self.command(&[&["migrate"], args].concat()).output().unwrap()
    }

    /// With both stores, and as a service has them.
    fn command(&self, args: &[&str]) -> Command {
        let mut command = lockkit(args);
        command.env("LOCKKIT_FROM", self.old.url()).env("LOCKKIT_TO", &self.to);
        command.env("LOCKKIT_STORE", format!("migrate:?from={}&to={}", self.old.url(), self.to));
        command
    }

    fn started(self) -> Self {
        let output = self.migrate(&["start", "--max-ttl", "2s", "--fresh", "200ms", "--yes"]);
        assert_eq!(code(&output), 0, "{output:?}");
        self
    }

    fn status(&self) -> Value {
        let output = self.migrate(&["status", "--json"]);
        assert_eq!(code(&output), 0, "{output:?}");
        serde_json::from_str(&stdout(&output)).unwrap()
    }

    /// Waits until it holds the lock in these stores, as of these phases.
    #[track_caller]
    fn held_as(&self, wanted: &[(&str, &str)]) {
        eventually("the lock as of the phase", || {
            let status = self.status();
            let holders = status["holders"].as_array().unwrap();
            let text = |holder: &Value, field: &str| holder[field].as_str().unwrap().to_owned();
            let held: Vec<_> = holders.iter().map(|holder| (text(holder, "store"), text(holder, "phase"))).collect();
            held.iter().map(|(store, phase)| (&**store, &**phase)).eq(wanted.iter().copied())
        });
    }

    fn step(&self, args: &[&str], phase: &str) {
        let output = self.migrate(args);
        assert_eq!(code(&output), 0, "{output:?}");
        assert!(stdout(&output).starts_with(&format!("the phase is {phase}")), "{output:?}");
        assert_eq!(self.status()["phase"], phase.split(':').next().unwrap());
    }
}

/// That it failed with this code, and what the one line says.
#[track_caller]
fn refused(output: &Output, expected: i32) -> String {
    assert_eq!(code(output), expected, "{output:?}");
    complaint(output)
}

/// Nobody is at work in a window, and it ends by itself.
#[test]
fn a_plan_tells_windows_from_locks_that_are_held() {
    let stores = Stores::new();
    let mut job = stores.command(&["run", "--key", "job", "--once-per", "1h", "--", "true"]);
    assert_eq!(code(&job.env("LOCKKIT_STORE", stores.old.url()).output().unwrap()), 0);
    let plan = stores.migrate(&["plan", "--json"]);
    assert_eq!(code(&plan), 0, "{plan:?}");
    let plan: Value = serde_json::from_str(&stdout(&plan)).unwrap();
    let says = |list: &str, text: &str| {
        plan[list].as_array().unwrap().iter().any(|line| line.as_str().unwrap().contains(text))
    };
    assert!(says("advice", "job is kept for ") && says("lost_on_the_way", "keep_for"), "{plan}");
}

#[test]
fn a_lock_is_held_all_the_way_there_and_back() {
    let stores = Stores::new();
    assert!(refused(&stores.migrate(&["status"]), 78).contains("migrate start"));
    let plan = stores.migrate(&["plan", "--json"]);
    let plan: Value = serde_json::from_str(&stdout(&plan)).unwrap();
    assert_eq!((plan["in_the_way"].as_array().unwrap().len(), &plan["home"]), (0, &Value::from("old")));
    // Nobody can be asked here.
    assert!(refused(&stores.migrate(&["start"]), 64).contains("--yes"));
    let stores = stores.started();
    let line = Line::new();
    let script = "exec 3>$LINE; echo up >&3; read x <$GO";
    let running = line.start(stores.command(&["run", "--key", "job", "--ttl", "1s", "--", "sh", "-c", script]));
    let held_as = |wanted: &[(&str, &str)]| stores.held_as(wanted);
    held_as(&[("old", "old")]);
    stores.step(&["advance", "--to-phase", "shadow", "--yes"], "shadow");
    held_as(&[("old", "old"), ("new", "old")]);
    stores.step(&["advance", "--yes"], "both");
    held_as(&[("old", "both"), ("new", "both")]);
    stores.step(&["advance", "--to-phase", "both", "--yes"], "both");
    stores.step(&["advance", "--yes"], "new");
    held_as(&[("new", "new")]);
    assert!(refused(&stores.migrate(&["finish", "--yes"]), 69).contains("lower fences"));
    stores.step(&["rollback", "--yes"], "both");
    held_as(&[("old", "both"), ("new", "both")]);
    stores.step(&["rollback", "--yes"], "old");
    held_as(&[("old", "old")]);
    assert!(refused(&stores.migrate(&["finish", "--yes", "--fences-are-set"]), 69).contains("holds"));
    line.go();
    assert_eq!(code(&running.end()), 0);
    for _ in 0..2 {
        let output = stores.migrate(&["finish", "--yes", "--fences-are-set"]);
        assert_eq!((code(&output), stdout(&output)), (0, "the migration is over\n".to_owned()), "{output:?}");
    }
    refused(&stores.command(&["ls"]).output().unwrap(), 78);
}

/// The new store has given a number of its own to the lease that was taken along.
#[test]
fn a_run_inside_has_the_fence_of_the_grant_in_each_phase() {
    let stores = Stores::new().started();
    let line = Line::new();
    let inner = env!("CARGO_BIN_EXE_lockkit");
    let script = format!(
        "exec 3>$LINE; echo up >&3; echo $LOCKKIT_FENCE >&3; read x <$GO
         {inner} run --key job --no-wait -- sh -c 'echo $LOCKKIT_FENCE'"
    );
    let mut command = stores.command(&["run", "--key", "job", "--ttl", "1s", "--", "sh", "-c", &script]);
    command.stdout(Stdio::piped());
    let running = line.start(command);
    let granted = line.hear();
    stores.step(&["advance", "--yes"], "both");
    stores.held_as(&[("old", "both"), ("new", "both")]);
    line.go();
    let output = running.end();
    assert_eq!((code(&output), stdout(&output).trim()), (0, granted.trim()), "{output:?}");
}

/// On ZooKeeper a lease lasts for what a renewal proves of the session: here for less than the time before its end at which CMD would
/// have been stopped in the old store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cmd_goes_on_under_a_lease_that_becomes_shorter() {
    let zookeeper = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.unwrap();
    let to = format!("{}?session=6s", zookeeper.url());
    let moved = tokio::task::spawn_blocking(move || {
        let stores = Stores { to, ..Stores::new() };
        let output = stores.migrate(&["start", "--max-ttl", "18s", "--fresh", "200ms", "--yes"]);
        assert_eq!(code(&output), 0, "{output:?}");
        let line = Line::new();
        let script = "exec 3>$LINE; echo up >&3; read x <$GO";
        let running = line.start(stores.command(&["run", "--key", "job", "--ttl", "18s", "--", "sh", "-c", script]));
        stores.step(&["advance", "--yes"], "both");
        stores.held_as(&[("old", "both"), ("new", "both")]);
        for _ in 0..2 {
            stores.old.await_renewal("job");
        }
        line.go();
        assert_eq!(code(&running.end()), 0);
    });
    moved.await.unwrap();
}

#[test]
fn the_new_store_is_tried_out_and_clients_are_shown() {
    let stores = Stores::new().started();
    stores.step(&["advance", "--to-phase", "shadow", "--yes"], "shadow");
    stores.step(&["advance", "--to-phase", "shadow", "--yes"], "shadow");
    let (line, other) = (Line::new(), Line::new());
    // Somebody else has the lock in the new store, where nothing is decided.
    let taken = other.start(stores.new.run("job", &[], "exec 3>$LINE; echo up >&3; read x <$GO"));
    let script = "exec 3>$LINE; echo up >&3; read x <$GO";
    let running = line.start(stores.command(&["run", "--key", "job", "--ttl", "1s", "--", "sh", "-c", script]));
    eventually("its refusal is shown", || {
        let status = stores.status();
        let client = &status["clients"][0];
        client["phase"] == "old" && client["new_store"]["refused"] == 1 && client["seen_ms"].is_u64()
    });
    let status = stdout(&stores.migrate(&["status"]));
    assert!(status.contains("CLIENT") && status.contains("refused 1,") && status.contains("warning"), "{status}");
    stores.step(&["rollback", "--yes"], "old");
    for line in [&line, &other] {
        line.go();
    }
    assert_eq!((code(&running.end()), code(&taken.end())), (0, 0));
    assert!(refused(&stores.migrate(&["rollback", "--to-phase", "shadow", "--yes"]), 64).contains("shadow"));
}

#[test]
fn who_looks_on_sees_how_long_a_drain_goes_on() {
    let stores = Stores::new();
    let output = stores.migrate(&["start", "--max-ttl", "2s", "--fresh", "200ms", "--durable", "--yes"]);
    assert_eq!(code(&output), 0, "{output:?}");
    stores.step(&["advance", "--yes"], "both");
    // On a terminal a bar.
    let (old, new, line) = (stores.old.url(), stores.new.url(), Line::new());
    let script = format!("LOCKKIT_FROM='{old}' LOCKKIT_TO='{new}' exec $LOCKKIT migrate status --watch");
    let mut terminal = Terminal::start(&stores.old, &line, &script);
    terminal.await_text("nobody acts on the phase before: ");
    stores.step(&["rollback", "--yes"], "old");
    terminal.await_text("phase   old");
    terminal.typed("\x03");
    let (interrupted, screen) = terminal.end();
    assert!(interrupted == 130 && !screen.contains("drain   at most"), "{interrupted} {screen}");
    // Elsewhere a line, until the drain is over.
    let mut watch = stores.command(&["migrate", "status", "--watch"]);
    let mut watch = watch.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut round = || lines.by_ref().take_while(|line| !line.starts_with("phase ")).collect::<Vec<_>>();
    assert_eq!(round(), [""; 0]);
    let has_drain = |round: &[String]| round.iter().any(|line| line.starts_with("drain   at most "));
    let first = round();
    assert!(has_drain(&first), "{first:?}");
    let last = (0..30).map(|_| round()).find(|round| !has_drain(round));
    assert!(last.is_some_and(|last| last.iter().any(|line| line.starts_with("limits "))));
    watch.kill().unwrap();
    watch.wait().unwrap();
    // Who looks once does not know since when.
    assert!(!stdout(&stores.migrate(&["status"])).contains("drain "));
}

/// What was killed before both stores knew of its step is brought to its end first.
#[test]
fn a_step_that_is_repeated_leads_no_further() {
    const RECORD: &str = "lockkit:%record:lockkit/migration";
    let stores = Stores::new().started();
    // A step that did not come to this store.
    let missed = |args: &[&str], phase: &str| {
        assert_eq!(stores.new.command(&["COPY", RECORD, "before", "REPLACE"]), "1");
        stores.step(args, phase);
        assert_eq!(stores.new.command(&["COPY", "before", RECORD, "REPLACE"]), "1");
    };
    missed(&["advance", "--yes"], "both");
    stores.step(&["advance", "--yes"], "both: a store did not know");
    stores.step(&["advance", "--yes"], "new");
    missed(&["rollback", "--yes"], "both");
    stores.step(&["rollback", "--yes"], "both: a store did not know");
    // The other way is open.
    missed(&["advance", "--yes"], "new");
    stores.step(&["rollback", "--yes"], "both");
}

#[test]
fn a_plain_client_stops_a_step() {
    let stores = Stores::new().started();
    let line = Line::new();
    let plain = line.start(stores.old.run("job", &[], "exec 3>$LINE; echo up >&3; read x <$GO"));
    let complaint = refused(&stores.migrate(&["advance", "--yes"]), 78);
    assert!(complaint.contains("\"job\"") && complaint.contains("know nothing"), "{complaint}");
    assert_eq!(stores.status()["phase"], "old");
    let status = stdout(&stores.migrate(&["status"]));
    assert!(status.contains("warning") && status.contains("BY OTHERS"), "{status}");
    stores.step(&["advance", "--yes", "--despite-others"], "both");
    line.go();
    assert_eq!(code(&plain.end()), 0);
}

#[test]
fn other_stores_than_it_was_started_with_are_refused() {
    let stores = Stores::new().started();
    let third = Redis::start();
    let between =
        |from: &str, to: &str| lockkit(&["migrate", "advance", "--yes", "--from", from, "--to", to]).output().unwrap();
    let (old, new, third) = (stores.old.url(), stores.new.url(), third.url());
    for (from, to) in [(&new, &old), (&old, &third), (&third, &new)] {
        refused(&between(from, to), 78);
    }
    assert_eq!(stores.status()["phase"], "old");
    let swapped = format!("migrate:?from={new}&to={old}");
    refused(&lockkit(&["ls", "--store", &swapped]).output().unwrap(), 78);
}

#[test]
fn what_can_not_be_done_is_said_in_one_line() {
    let stores = Stores::new();
    let secret = "redis://:s3cret@127.0.0.1:1";
    let given = |args: &[&str]| lockkit(&[&["migrate"], args].concat()).output().unwrap();
    refused(&given(&["status"]), 64);
    assert!(refused(&given(&[]), 64).contains("lockkit migrate --help"));
    let mistyped = refused(&given(&["advanse"]), 64);
    assert!(mistyped.contains("did you mean advance") && mistyped.contains("lockkit migrate --help"), "{mistyped}");
    refused(&given(&["status", "--from", "memory:", "--to", &stores.new.url()]), 64);
    refused(&given(&["start", "--yes", "--from", &stores.old.url(), "--to", &stores.old.url()]), 64);
    refused(&stores.migrate(&["start", "--yes", "--max-ttl", "1h"]), 64);
    refused(&stores.migrate(&["start", "--yes", "--max-ttl", "0s"]), 64);
    refused(&stores.migrate(&["start", "--yes", "--fresh", "1ms"]), 64);
    refused(&stores.migrate(&["advance", "--to-phase", "newer"]), 64);
    let output = given(&["status", "--from", secret, "--to", secret]);
    assert!(!refused(&output, 69).contains("s3cret"));
    for (from, to) in [(&*stores.old.url(), secret), (secret, &*stores.new.url())] {
        refused(&given(&["plan", "--from", from, "--to", to]), 69);
    }
    let both = format!("{}?fence_above=7", stores.old.url());
    assert!(refused(&given(&["status", "--from", &both, "--to", &stores.new.url()]), 64).contains("fence_above"));
    for url in
        ["migrate:", "migrate:?from=redis://h", "migrate:?to=redis://h&from=redis://g", "redis://h?fence_above=x"]
    {
        refused(&lockkit(&["ls", "--store", url]).output().unwrap(), 64);
    }
}
