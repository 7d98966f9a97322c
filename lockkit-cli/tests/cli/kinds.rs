//! Runs that share a lock, and those that come in order.

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
    process::Stdio,
};

use crate::support::{Line, Redis, Running, code, complaint, complaints, eventually, stdout};

const LOCKKIT: &str = env!("CARGO_BIN_EXE_lockkit");

/// A run that holds the lock until it is told to go on.
fn holding(redis: &Redis, line: &Line, options: &[&str]) -> Running {
    line.start(redis.run("k", options, "exec 3>$LINE; echo up >&3; read x <$GO"))
}

fn try_run(redis: &Redis, options: &[&str]) -> i32 {
    let options = [options, &["--no-wait"]].concat();
    code(&redis.run("k", &options, "true").output().expect("it runs"))
}

#[test]
fn readers_run_together_and_keep_writers_out() {
    let redis = Redis::start();
    let (one, two) = (Line::new(), Line::new());
    let first = holding(&redis, &one, &["--read"]);
    let second = holding(&redis, &two, &["--read"]);
    let who = redis.who("k");
    let modes: Vec<_> =
        who["holders"].as_array().unwrap().iter().map(|holder| holder["mode"].as_str().unwrap()).collect();
    assert_eq!(modes, ["shared", "shared"]);
    for refused in [&["--write"][..], &["--fifo"], &["--permit", "2"], &[]] {
        assert_eq!(try_run(&redis, refused), 75, "{refused:?}");
    }
    assert_eq!(try_run(&redis, &["--read"]), 0);
    for (line, run) in [(one, first), (two, second)] {
        line.go();
        assert_eq!(code(&run.end()), 0);
    }
    assert_eq!(try_run(&redis, &["--write"]), 0);
}

#[test]
fn a_semaphore_has_as_many_permits_as_its_users_say() {
    let redis = Redis::start();
    let (one, two) = (Line::new(), Line::new());
    let permit = ["--permit", "2"];
    let (first, second) = (holding(&redis, &one, &permit), holding(&redis, &two, &permit));
    assert_eq!(try_run(&redis, &permit), 75);
    assert_eq!(try_run(&redis, &["--permit", "3"]), 64);
    one.go();
    assert_eq!(code(&first.end()), 0);
    assert_eq!(try_run(&redis, &permit), 0);
    two.go();
    assert_eq!(code(&second.end()), 0);
    assert_eq!(try_run(&redis, &["--permit", "3"]), 0);
    assert_eq!(try_run(&redis, &["--permit", "0"]), 64);
    assert_eq!(try_run(&redis, &["--read", "--write"]), 64);
}

#[test]
fn a_job_runs_once_per_window() {
    let redis = Redis::start();
    let output = redis.run("k", &["--once-per", "1h"], "echo done; exit 3").output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (3, "done\n".to_owned()));
    let again = redis.run("k", &["--once-per", "1h"], "echo twice").output().unwrap();
    assert_eq!((code(&again), stdout(&again)), (75, String::new()));
    let said = complaints(&again);
    assert!(said.contains("(done), 59m") || said.contains("(done), 1h00m"), "{said}");
    // Those without a window are kept out as well.
    assert_eq!(try_run(&redis, &[]), 75);

    let token = redis.who("k")["holders"][0]["token"].as_str().unwrap().to_owned();
    assert_eq!(code(&redis.lockkit(&["break", "k", "--token", &token]).output().unwrap()), 0);
    assert_eq!(try_run(&redis, &[]), 0);
}

/// Its work is half done: another host may do it.
#[test]
fn a_command_that_is_stopped_keeps_no_window() {
    let (redis, line) = (Redis::start(), Line::new());
    let script =
        "exec 3>$LINE 2>/dev/null; trap 'echo stopped >&3; exit' TERM; echo up >&3; while :; do sleep 0.05; done";
    let job = line.start(redis.run("k", &["--once-per", "1h", "--ttl", "2s"], script));
    redis.freeze();
    assert_eq!(line.hear(), "stopped");
    redis.thaw();
    assert_eq!(code(&job.end()), 74);
    eventually("the window to be free", || !redis.is_held("k"));
}

#[test]
fn a_command_that_is_not_there_keeps_no_window() {
    let redis = Redis::start();
    let no_command = ["run", "--key", "k", "--once-per", "1h", "--", "/nonexistent"];
    assert_eq!(code(&redis.lockkit(&no_command).output().unwrap()), 127);
    assert_eq!(try_run(&redis, &["--once-per", "1h"]), 0);
}

/// It is there, and looks as if it could be executed.
#[test]
fn a_command_that_does_not_begin_keeps_no_window() {
    let (redis, directory) = (Redis::start(), tempfile::tempdir().unwrap());
    let job = directory.path().join("job");
    let once = || redis.lockkit(&["run", "--key", "k", "--once-per", "1h", "--", job.to_str().unwrap()]);
    for (text, expected) in [("#!/nonexistent/interpreter\n", 127), ("#!/etc/passwd\n", 126)] {
        fs::write(&job, text).unwrap();
        fs::set_permissions(&job, Permissions::from_mode(0o755)).unwrap();
        assert_eq!(code(&once().output().unwrap()), expected, "{text:?}");
        assert!(!redis.is_held("k"), "{text:?}");
    }
    fs::write(&job, "#!/bin/cat -\n").unwrap();
    let mut reads = once();
    reads.stdin(Stdio::from(fs::File::open("/proc/version").unwrap()));
    let output = reads.output().unwrap();
    assert!(stdout(&output).contains("Linux version"), "CMD has the standard input of lockkit: {output:?}");
    assert!(redis.is_held("k"));
}

#[test]
fn a_window_that_makes_no_sense_is_refused() {
    let redis = Redis::start();
    for options in [&["--once-per", "0s"][..], &["--once-per", "10000h"], &["--once-per", "1h", "--read"]] {
        let output = redis.run("k", options, "echo up").output().unwrap();
        assert_eq!((code(&output), stdout(&output)), (64, String::new()), "{options:?}");
        assert!(complaint(&output).starts_with("lockkit: "), "{output:?}");
    }
    let inner = format!("{LOCKKIT} run --key k --once-per 1h -- echo up");
    let nested = redis.run("k", &[], &inner).output().unwrap();
    assert_eq!((code(&nested), stdout(&nested)), (64, String::new()));
}

#[test]
fn a_run_inside_another_asks_for_no_more_than_that_has() {
    let redis = Redis::start();
    let inner = |options: &str| format!("{LOCKKIT} run --key k {options} -- sh -c 'echo $LOCKKIT_FENCE'");
    for (outer, inside, expected) in [
        (&["--read"][..], "--read", 0),
        (&["--write"], "--read", 0),
        (&["--fifo"], "", 0),
        (&["--permit", "2"], "--permit 2", 0),
        (&["--read"], "--write", 64),
        (&["--read"], "", 64),
        (&["--permit", "2"], "--permit 3", 64),
    ] {
        let script = format!("echo $LOCKKIT_FENCE; {}", inner(inside));
        let output = redis.run("k", outer, &script).output().unwrap();
        assert_eq!(code(&output), expected, "{outer:?} {inside}: {output:?}");
        if expected == 0 {
            let text = stdout(&output);
            let fences: Vec<_> = text.lines().collect();
            assert_eq!(fences[0], fences[1], "it runs on the lease of the other");
        } else {
            assert!(complaints(&output).contains("does not cover"), "{output:?}");
        }
    }
    assert!(!redis.is_held("k"));
}
