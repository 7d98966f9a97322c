//! `lockkit elect`: candidates, their leader, and those who watch.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    process::Command,
};

use rustix::process::Signal;

use crate::support::{
    Line, Redis, Running, catches, code, complaint, complaints, eventually, is_pending, lockkit, stdout,
};

const LOCKKIT: &str = env!("CARGO_BIN_EXE_lockkit");

/// Says its term, and leads until it is told to go on.
const LEAD: &str = "exec 3>$LINE; echo $LOCKKIT_KEY $LOCKKIT_FENCE >&3; read x <$GO; exit 3";

fn candidate(redis: &Redis, line: &Line, options: &[&str]) -> Command {
    let mut command = redis.lockkit(&["elect", "--key", "e"]);
    command.args(options).args(["--", "sh", "-c", LEAD]);
    line.give(&mut command);
    command
}

/// The term of a leader that says so.
#[track_caller]
fn term(line: &Line) -> u64 {
    let said = line.hear();
    said.strip_prefix("e ").and_then(|term| term.parse().ok()).unwrap_or_else(|| panic!("{said:?}"))
}

/// The name of the leader, as `lockkit who` sees it.
fn leader(redis: &Redis) -> String {
    redis.who("e")["holders"][0]["holder"].as_str().expect("somebody leads").to_owned()
}

#[test]
fn one_leads_and_when_it_has_ended_another() {
    let redis = Redis::start();
    let (one, two) = (Line::new(), Line::new());
    let mut first = Running::start(candidate(&redis, &one, &["--candidate", "one"]));
    let term_one = term(&one);
    assert!(first.complaint().starts_with("lockkit: leads \"e\", term "));
    let mut second = Running::start(candidate(&redis, &two, &["--candidate", "two"]));
    assert!(second.complaint().starts_with("lockkit: waiting for \"e\", held by one"), "it says so while it waits");
    assert_eq!(leader(&redis), "one");
    one.go();
    let output = first.end();
    assert_eq!((output.status.code(), complaints(&output)), (Some(3), String::new()), "CMD's own status");
    assert!(term(&two) > term_one, "terms are numbered upward");
    assert_eq!(leader(&redis), "two");
    two.go();
    assert_eq!(second.end().status.code(), Some(3));
    assert!(!redis.is_held("e"));
}

#[test]
fn a_leader_that_is_killed_is_followed_by_another() {
    let redis = Redis::start();
    let (one, two) = (Line::new(), Line::new());
    let mut first = Running::start(candidate(&redis, &one, &["--ttl", "1s"]));
    let term_one = term(&one);
    let second = Running::start(candidate(&redis, &two, &["--ttl", "1s"]));
    first.signal("KILL");
    let (rest, _) = one.end();
    assert_eq!(rest, "", "its command is gone with it");
    assert!(term(&two) > term_one);
    two.go();
    assert_eq!(second.end().status.code(), Some(3));
    drop(first);
}

#[test]
fn a_leader_that_loses_its_lease_is_a_candidate_again() {
    let redis = Redis::start();
    let line = Line::new();
    // Two commands say their terms one after the other: the line stays open between them.
    let open = File::options().write(true).open(line.path()).unwrap();
    let mut running = Running::start(candidate(&redis, &line, &["--ttl", "3s"]));
    let before = term(&line);
    assert!(running.complaint().contains("leads"));
    redis.freeze();
    let said = running.complaint();
    assert!(said.starts_with("lockkit: stopped CMD before its lease of \"e\" could lapse"), "{said}");
    redis.thaw();
    assert!(term(&line) > before, "a new term");
    drop(open);
    line.go();
    assert_eq!(running.end().status.code(), Some(3));
}

/// Such as that of a terminal that was stopped by Ctrl-S.
#[test]
fn a_leader_whose_messages_nobody_reads_leads_all_the_same() {
    const ROOM: usize = 65536;
    let redis = Redis::start();
    let line = Line::new();
    let (_messages, mut full) = std::io::pipe().unwrap();
    full.write_all(&vec![b'\n'; ROOM]).unwrap();
    let mut command = candidate(&redis, &line, &["--ttl", "3s"]);
    let mut leads = command.stderr(full).spawn().unwrap();
    drop(command);
    let first = term(&line);
    for _ in 0..3 {
        redis.await_renewal("e");
    }
    assert_eq!(redis.who("e")["holders"][0]["fence"].as_u64(), Some(first));
    line.go();
    assert_eq!(leads.wait().unwrap().code(), Some(3));
}

#[test]
fn a_candidate_waits_for_a_store_that_is_away() {
    let redis = Redis::start();
    let (one, two) = (Line::new(), Line::new());
    let first = Running::start(candidate(&redis, &one, &["--ttl", "60s"]));
    term(&one);
    let mut second = Running::start(candidate(&redis, &two, &[]));
    assert!(second.complaint().contains("waiting for"));
    redis.freeze();
    let said = second.complaint();
    assert!(said.ends_with("; will keep trying"), "{said}");
    redis.thaw();
    one.go();
    assert_eq!(first.end().status.code(), Some(3));
    term(&two);
    two.go();
    assert_eq!(second.end().status.code(), Some(3));
}

/// They are for CMD.
#[test]
fn a_candidate_that_is_connecting_outlives_usr1() {
    let redis = Redis::start();
    let line = Line::new();
    redis.freeze();
    let mut command = candidate(&redis, &line, &["--ttl", "60s"]);
    command.env("LOCKKIT_STORE", format!("{}?timeout=30s", redis.url()));
    let mut connecting = Running::start(command);
    let pid = connecting.id().to_string();
    eventually("it has its handlers", || catches(&pid, Signal::USR2) && catches(&pid, Signal::USR1));
    connecting.signal("USR1");
    eventually("it has got the signal", || !is_pending(&pid, Signal::USR1));
    redis.thaw();
    term(&line);
    line.go();
    assert_eq!(connecting.end().status.code(), Some(3));
}

#[test]
fn signals_end_candidates_and_leaders() {
    let redis = Redis::start();
    let (one, two) = (Line::new(), Line::new());
    let mut first = Running::start(candidate(&redis, &one, &[]));
    term(&one);
    let mut second = Running::start(candidate(&redis, &two, &[]));
    assert!(second.complaint().contains("waiting for"));
    second.signal("USR1");
    assert!(second.is_running());
    second.signal("TERM");
    assert_eq!(second.end().status.code(), Some(143));
    first.signal("TERM");
    assert_eq!(first.end().status.code(), Some(143), "what its command died of");
    assert!(!redis.is_held("e"));
}

#[test]
fn an_observer_prints_each_leader() {
    let redis = Redis::start();
    let mut observer = redis.lockkit(&["elect", "--key", "e", "--observe", "--json", "--every", "100ms"]);
    let mut observer = observer.spawn().unwrap();
    let mut lines = BufReader::new(observer.stdout.take().unwrap()).lines().map(|line| line.unwrap());
    assert_eq!(lines.next().unwrap(), r#"{"leader":null,"term":null}"#);
    let line = Line::new();
    let running = Running::start(candidate(&redis, &line, &["--candidate", "one"]));
    let term = term(&line);
    assert_eq!(lines.next().unwrap(), format!(r#"{{"leader":"one","term":{term}}}"#));
    line.go();
    assert_eq!(running.end().status.code(), Some(3));
    assert_eq!(lines.next().unwrap(), r#"{"leader":null,"term":null}"#);
    // Nobody reads any more: it ends when it has something to say.
    drop(lines);
    let line = Line::new();
    let running = Running::start(candidate(&redis, &line, &[]));
    assert!(observer.wait().unwrap().success());
    line.go();
    assert_eq!(running.end().status.code(), Some(3));
}

#[test]
fn what_is_asked_wrongly_is_refused() {
    let redis = Redis::start();
    for args in [
        &["--key", "e"][..],
        &["--key", "e", "--every", "1s", "--", "true"],
        &["--key", "e", "--observe", "--", "true"],
        &["--key", "e", "--ttl", "1ms", "--", "true"],
        &["--", "true"],
    ] {
        let output = redis.lockkit(&[&["elect"], args].concat()).output().unwrap();
        assert_eq!(code(&output), 64, "{args:?}: {}", complaint(&output));
    }
    let memory = lockkit(&["elect", "--store", "memory:", "--key", "e", "--", "true"]).output().unwrap();
    assert_eq!(code(&memory), 64);
    let absent = redis.lockkit(&["elect", "--key", "e", "--", "/nonexistent"]).output().unwrap();
    assert_eq!(code(&absent), 127);
    assert!(!redis.is_held("e"));

    // It would wait for the run around it, which waits for it.
    let inside = redis.run("e", &[], &format!("{LOCKKIT} elect --key e -- true")).output().unwrap();
    assert_eq!(code(&inside), 64);
    assert!(complaint(&inside).contains("the candidate would wait for itself"), "{}", complaint(&inside));
    // A run inside the leader's command runs on its lease.
    let script = format!("{LOCKKIT} run --key e --no-wait -- echo inside");
    let nested = redis.lockkit(&["elect", "--key", "e", "--", "sh", "-c", &script]).output().unwrap();
    assert_eq!((nested.status.code(), stdout(&nested)), (Some(0), "inside\n".to_owned()));
}
