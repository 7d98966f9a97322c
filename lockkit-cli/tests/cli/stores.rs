//! Each kind of lock on MariaDB and on ZooKeeper, whose ways to have them differ: what the other tests of the command see on Redis.

use std::io::{BufRead as _, BufReader};

use lockkit_testkit::servers::{MySqlOptions, MySqlServer, ZooKeeperFlavor, ZooKeeperServer};
use serde_json::json;

use crate::support::{Line, Running, Store, code, complaint, complaints, eventually, stdout};

/// Says that it is up, and ends when it is told to.
const HOLD: &str = "exec 3>$LINE; echo up >&3; read x <$GO";

fn try_run(store: &Store, key: &str, options: &[&str]) -> i32 {
    let options = [options, &["--no-wait"]].concat();
    code(&store.run(key, &options, "true").output().expect("it runs"))
}

fn ends(line: &Line, run: Running) {
    line.go();
    assert_eq!(code(&run.end()), 0);
}

/// Two of one kind hold the lock together, and no other gets in.
fn shared(store: &Store, key: &str, kind: &[&str], refused: &[&[&str]], mode: &str) {
    let lines = [Line::new(), Line::new()];
    let runs = lines.each_ref().map(|line| line.start(store.run(key, kind, HOLD)));
    let who = store.who(key);
    let modes: Vec<_> = who["holders"].as_array().unwrap().iter().map(|holder| &holder["mode"]).collect();
    assert_eq!(modes, [mode, mode], "{who}");
    for other in refused {
        assert_eq!(try_run(store, key, other), 75, "{other:?} beside {kind:?}");
    }
    for (line, run) in lines.iter().zip(runs) {
        ends(line, run);
    }
    assert_eq!(try_run(store, key, &["--write"]), 0);
}

fn a_semaphore_has_one_number_of_permits(store: &Store) {
    let line = Line::new();
    let run = line.start(store.run("limit", &["--permit", "2"], HOLD));
    assert_eq!((try_run(store, "limit", &["--permit", "3"]), try_run(store, "limit", &["--permit", "2"])), (64, 0));
    ends(&line, run);
}

/// Each is let in when the one before it has ended, and shown in its place until then.
fn those_that_wait_come_in_order(store: &Store) {
    let lines = [Line::new(), Line::new(), Line::new()];
    let modes = ["--write", "--read", "--fifo"];
    let mut runs = Vec::new();
    for (number, (line, mode)) in lines.iter().zip(modes).enumerate() {
        let run = store.run("order", &["--holder", &format!("number {number}"), mode], HOLD);
        runs.push(if number == 0 { line.start(run) } else { line.begin(run) });
        eventually("it waits", || store.who("order")["queue"].as_array().unwrap().len() == number);
    }
    let queue =
        [json!({ "holder": "number 1", "mode": "shared" }), json!({ "holder": "number 2", "mode": "exclusive" })];
    assert_eq!(store.who("order")["queue"], json!(queue));
    let text = stdout(&store.lockkit(&["who", "order"]).output().unwrap());
    assert!(text.contains("  next 1    number 1 (shared)\n  next 2    number 2 (exclusive)\n"), "{text}");
    for (number, (line, run)) in lines.iter().zip(runs).enumerate() {
        if number > 0 {
            assert_eq!(line.hear(), "up");
            assert_eq!(store.who("order")["holders"][0]["holder"], format!("number {number}"));
        }
        ends(line, run);
    }
    assert_eq!(store.who("order")["held"], json!(false));
}

fn one_leads_and_then_the_next(store: &Store) {
    let mut observer =
        Running::start(store.lockkit(&["elect", "--key", "e", "--observe", "--json", "--every", "100ms"]));
    let mut seen = BufReader::new(observer.stdout()).lines().map(|line| line.unwrap());
    assert_eq!(seen.next().unwrap(), r#"{"leader":null,"term":null}"#);
    let lines = [Line::new(), Line::new()];
    let mut runs = Vec::new();
    for (line, name) in lines.iter().zip(["one", "two"]) {
        let script = format!("{}; exit 3", HOLD.replace("echo up", "echo $LOCKKIT_FENCE"));
        let mut run =
            line.begin(store.lockkit(&["elect", "--key", "e", "--candidate", name, "--", "sh", "-c", &script]));
        let said = run.complaint();
        assert!(
            said.starts_with(["lockkit: leads \"e\"", "lockkit: waiting for \"e\", held by one"][runs.len()]),
            "{said}"
        );
        runs.push(run);
    }
    let mut before = 0;
    for ((line, run), name) in lines.iter().zip(runs).zip(["one", "two"]) {
        let term = line.hear().parse::<u64>().unwrap();
        assert!(term > before, "the term {term} after {before}");
        let told = format!(r#"{{"leader":"{name}","term":{term}}}"#);
        // That nobody leads for a moment may be seen.
        assert!(seen.by_ref().take(2).any(|line| line == told), "{told}");
        line.go();
        assert_eq!(run.end().status.code(), Some(3), "the command's own status");
        before = term;
    }
}

fn a_job_runs_once_per_window(store: &Store) {
    let job = |window: &str, script: &str| store.run("job", &["--once-per", window], script).output().unwrap();
    let first = job("8s", "echo done; exit 3");
    assert_eq!((code(&first), stdout(&first)), (3, "done\n".to_owned()), "{first:?}");
    let second = job("8s", "echo twice");
    assert_eq!((code(&second), stdout(&second)), (75, String::new()), "{second:?}");
    assert!(complaints(&second).contains("(done)"), "{second:?}");
    eventually("the next window comes", || code(&job("1h", "true")) == 0);
    assert_eq!(code(&job("1h", "true")), 75);
}

/// One server has all of them, side by side as far as they wait for time.
fn all_kinds(store: &Store) {
    let windows = store.clone();
    let windows = std::thread::spawn(move || a_job_runs_once_per_window(&windows));
    shared(store, "readers", &["--read"], &[&["--write"], &["--fifo"], &["--permit", "2"], &[]], "shared");
    let permits = ["--permit", "2"];
    shared(store, "permits", &permits, &[&permits, &["--read"], &["--fifo"]], "permit of 2");
    a_semaphore_has_one_number_of_permits(store);
    those_that_wait_come_in_order(store);
    one_leads_and_then_the_next(store);
    let refused = store.run("k", &["--permit", "0"], "true").output().unwrap();
    assert_eq!(code(&refused), 64, "{}", complaint(&refused));
    windows.join().unwrap();
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn mariadb_has_every_kind_of_lock() {
    let runtime = runtime();
    let server = runtime.block_on(MySqlServer::start(MySqlOptions::default())).unwrap();
    all_kinds(&Store::at(format!("{}?create=true", server.url())));
}

#[test]
fn zookeeper_has_every_kind_of_lock() {
    let runtime = runtime();
    let server = runtime.block_on(ZooKeeperServer::start(ZooKeeperFlavor::Installed)).unwrap();
    all_kinds(&Store::at(server.url()));
}
