//! A run inside a run on the same lock.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    time::{Duration, Instant},
};

use crate::support::{Line, Redis, by_the_clock, code, complaint, lock, stdout};

const LOCKKIT: &str = env!("CARGO_BIN_EXE_lockkit");

#[test]
fn a_nested_run_reenters() {
    let redis = Redis::start();
    let script = format!(
        "echo $LOCKKIT_FENCE
         {LOCKKIT} run --key k --no-wait -- sh -c 'echo $LOCKKIT_FENCE; exit 5'; echo $?
         {LOCKKIT} who k --json"
    );
    let output = redis.run("k", &["--ttl", "7s"], &script).output().unwrap();
    assert_eq!(code(&output), 0);
    let text = stdout(&output);
    let lines: Vec<_> = text.splitn(4, '\n').collect();
    assert_eq!(lines[0], lines[1]);
    assert_eq!(lines[2], "5");
    // The inner run has released nothing.
    let who: serde_json::Value = serde_json::from_str(lines[3]).unwrap();
    assert_eq!(who["holders"][0]["fence"].to_string(), lines[0]);
    assert!(!redis.is_held("k"));
}

/// Only root can become another user.
#[test]
fn a_run_of_another_user_is_told_that_it_would_wait_for_itself() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let (redis, files) = (Redis::start(), tempfile::tempdir().unwrap());
    let lockkit = files.path().join("lockkit");
    fs::copy(LOCKKIT, &lockkit).unwrap();
    fs::set_permissions(files.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let inner = format!("{} run --key k --wait 1s -- true", lockkit.display());
    let script = format!("setpriv --reuid=65534 --regid=65534 --clear-groups {inner}");
    let output = redis.run("k", &[], &script).output().unwrap();
    assert_eq!(code(&output), 64, "{output:?}");
    assert!(complaint(&output).contains("another user's run holds"), "{output:?}");
}

#[test]
fn a_run_on_another_lock_may_lie_between() {
    let redis = Redis::start();
    let script = format!(
        "echo $LOCKKIT_KEY $LOCKKIT_FENCE $LOCKKIT_TTL_MS
         {LOCKKIT} run --key other --no-wait -- {LOCKKIT} run --key k --no-wait -- {LOCKKIT} run --key other --no-wait -- \
            {LOCKKIT} run --key k --no-wait -- sh -c 'echo $LOCKKIT_KEY $LOCKKIT_FENCE $LOCKKIT_TTL_MS'"
    );
    let output = redis.run("k", &["--ttl", "7s"], &script).output().unwrap();
    assert_eq!(code(&output), 0, "{output:?}");
    let text = stdout(&output);
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].starts_with("k ") && lines[0].ends_with(" 7000"), "{text}");
    assert_eq!(lines[0], lines[1]);
}

#[test]
fn the_lease_is_kept_as_long_as_a_nested_run_needs_it() {
    let redis = Redis::start();
    let line = Line::new();
    let script = format!(
        "{LOCKKIT} run --key k --no-wait -- sh -c 'exec 3>$LINE; echo up >&3; read x <$GO' >/dev/null 2>&1 &
         read x <$LINE.started; exit 3"
    );
    let started = line.path().with_extension("started");
    assert!(std::process::Command::new("mkfifo").arg(&started).status().unwrap().success());
    let mut outer =
        line.start(redis.run("k", &["--ttl", "3s"], &script.replace("$LINE.started", started.to_str().unwrap())));
    std::fs::write(&started, "go\n").unwrap();
    // The outer CMD ends now. Two renewals later its lease must still be there.
    redis.await_renewal("k");
    redis.await_renewal("k");
    assert!(outer.is_running());
    line.go();
    assert_eq!(code(&outer.end()), 3);
    assert!(!redis.is_held("k"));
}

#[test]
fn a_nested_run_on_a_lease_that_is_over_acquires_for_itself() {
    let redis = Redis::start();
    // The lock is deleted under the outer run, and so the inner one gets one of its own.
    let inner = format!("{LOCKKIT} run --key k --no-wait -- sh -c 'echo $LOCKKIT_FENCE'");
    let script = format!("echo $LOCKKIT_FENCE; echo up >&2; read x <$GO; {inner}");
    let line = Line::new();
    let mut outer = line.begin(redis.run("k", &["--ttl", "60s"], &script));
    assert_eq!(outer.complaint(), "up");
    redis.command(&["DEL", &lock("k")]);
    line.go();
    let output = outer.end();
    // The outer one finds that out at its end.
    assert_eq!(code(&output), 74);
    let fences: Vec<u64> = stdout(&output).lines().map(|line| line.parse().unwrap()).collect();
    assert!(fences[0] < fences[1], "{fences:?}");
}

#[test]
fn what_is_held_on_another_store_is_not_borrowed() {
    let (redis, other) = (Redis::start(), Redis::start());
    let script = format!("LOCKKIT_STORE={} {LOCKKIT} run --key k --no-wait -- {LOCKKIT} who k --json", other.url());
    let output = redis.run("k", &["--holder", "outer"], &script).output().unwrap();
    assert_eq!(code(&output), 0);
    let who: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert!(who["holders"][0]["holder"].as_str().unwrap().starts_with("lockkit@"), "{who}");
}

#[test]
fn a_forged_or_stale_environment_opens_nothing() {
    let redis = Redis::start();
    let line = Line::new();
    let holder = line.start(redis.run("k", &[], "exec 3>$LINE; echo up >&3; echo $LOCKKIT_HELD >&3; read x <$GO"));
    let held = line.hear();
    // A token that is not the holder's, at a desk that is there.
    let mut parts: Vec<_> = held.split(':').collect();
    parts[1] = "0123456789abcdef0123456789abcdef";
    let run = "fedcba9876543210fedcba9876543210";
    // The holder's token, at a desk that is not.
    let stale = [&held[..held.rfind(':').unwrap()], run].join(":");
    for forged in [parts.join(":"), stale, "nonsense".to_owned()] {
        let output = redis.run("k", &["--no-wait"], "echo ran").env("LOCKKIT_HELD", &forged).output().unwrap();
        assert_eq!((code(&output), stdout(&output)), (75, String::new()), "{forged}");
    }
    line.go();
    assert_eq!(code(&holder.end()), 0);
}

#[test]
fn a_nested_run_is_stopped_with_the_lease() {
    let redis = Redis::start();
    let line = Line::new();
    let stubborn =
        "exec 2>/dev/null 3>$LINE; trap \"\" TERM; echo up >&3; while :; do : >$LINE.alive; sleep 0.01; done";
    let script = format!("{LOCKKIT} run --key k --no-wait -- setsid -w sh -c '{stubborn}'; exit $?");
    let outer = line.start(redis.run("k", &["--ttl", "3s"], &script));
    let ends = by_the_clock(redis.freeze_while_held("k", Duration::from_secs(3)));
    line.end();
    assert!(line.last_sign() < ends, "{:?} too late", line.last_sign().duration_since(ends));
    let output = outer.end();
    assert_eq!(output.status.code(), Some(74), "{output:?}");
}

#[test]
fn a_nested_run_finds_out_by_itself_that_the_lease_is_lost() {
    let redis = Redis::start();
    let line = Line::new();
    let stubborn =
        "exec 2>/dev/null 3>$LINE; trap \"\" TERM; echo $PPID >&3; while :; do : >$LINE.alive; sleep 0.01; done";
    let script = format!("{LOCKKIT} run --key k --no-wait -- sh -c '{stubborn}'; echo \"inner $?\" >&2; read x <$GO");
    let mut outer = line.begin(redis.run("k", &["--ttl", "6s"], &script));
    line.hear();
    redis.await_renewal("k");
    // The outer run stands still, and its watchdog lets CMD live until the lease would have lapsed.
    outer.signal("STOP");
    let ends = by_the_clock(Instant::now() + redis.left("k"));
    redis.command(&["DEL", &lock("k")]);
    line.end();
    let left = ends.duration_since(line.last_sign()).unwrap();
    assert!(left > Duration::from_millis(500), "only {left:?} before");
    assert!(outer.complaint().contains("no such lease any more"));
    assert_eq!(outer.complaint(), "inner 74");
    outer.signal("CONT");
    assert_eq!(outer.end().status.code(), Some(74));
}

/// If it asked for the lock itself, the two would wait for each other.
#[test]
fn a_nested_run_waits_for_the_answer_of_an_outer_one_that_stands_still() {
    let redis = Redis::start();
    let line = Line::new();
    let inner = format!("{LOCKKIT} run --key k --no-wait -- sh -c 'echo $LOCKKIT_FENCE >&3'");
    let script = format!("exec 3>$LINE; echo $LOCKKIT_FENCE >&3; read x <$GO; {inner}");
    let mut outer = line.begin(redis.run("k", &["--ttl", "60s"], &script));
    let fence = line.hear();
    outer.signal("STOP");
    line.go();
    // Longer than any answer takes. That nothing happens can't be awaited.
    std::thread::sleep(Duration::from_secs(3));
    outer.signal("CONT");
    assert_eq!(line.hear(), fence);
    assert_eq!(code(&outer.end()), 0);
}

/// What a killed run has left may still be at work until its watchdog has killed it. So the watchdog has a handle of the loan, whose
/// end the outer run waits for. (It can't be held up to see that: the system ends a stopped group whose parent is gone.)
#[test]
fn the_watchdog_of_a_run_that_is_killed_keeps_the_loan_until_it_is_done() {
    let redis = Redis::start();
    let line = Line::new();
    let inner = format!("{LOCKKIT} run --key k --no-wait -- sh -c 'exec 3>$LINE; echo $PPID >&3; sleep 1000 & wait'");
    let outer = line.begin(redis.run("k", &["--ttl", "3s"], &format!("{inner}; exit 3")));
    let killed = line.hear();
    let watchdog = std::process::Command::new("pgrep").args(["-P", &killed, "-f", "__watch"]).output().unwrap();
    let handle = std::fs::read_link(format!("/proc/{}/fd/1", stdout(&watchdog).trim())).unwrap();
    assert!(handle.to_string_lossy().starts_with("socket:"), "{handle:?} is no loan");
    assert!(std::process::Command::new("kill").args(["-KILL", &killed]).status().unwrap().success());
    assert_eq!(code(&outer.end()), 3);
    assert!(!redis.is_held("k"));
}
