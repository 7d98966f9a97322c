//! `lockkit run` when the lease is in danger: CMD must be gone before it can lapse.

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use crate::support::{
    Line, Redis, Running, by_the_clock, catches, code, complaint, complaints, eventually, lock, lockkit,
    signal_watchdog, stdout,
};
use lockkit::{Clock, Moment, SystemClock};
use rustix::process::Signal;

/// CMD with a child, and a grandchild that left session and group, all of which do not heed TERM.
const STUBBORN: &str = r#"
    exec 2>/dev/null 3>$LINE; trap '' TERM HUP
    loop='trap "" TERM HUP; : >$LINE.alive; echo up >&3; while :; do : >$LINE.alive; sleep 0.01; done'
    sh -c "$loop" & setsid sh -c "$loop" & eval "$loop"
"#;

struct Stubborn {
    redis: Redis,
    line: Line,
    running: Running,
}

/// Starts the stubborn CMD and returns when all three processes are up.
fn stubborn(ttl: &str) -> Stubborn {
    let redis = Redis::start();
    let line = Line::new();
    let running = line.begin(redis.run("k", &["--ttl", ttl], STUBBORN));
    for _ in 0..3 {
        assert_eq!(line.hear(), "up");
    }
    Stubborn { redis, line, running }
}

impl Stubborn {
    /// Stops lockkit; CMD must be gone before its lease can lapse.
    #[track_caller]
    fn ends_in_time_while_lockkit_stands_still(self) {
        let said = self.says_when_lockkit_stood_still();
        assert_eq!(said.lines().count(), 1, "{said}");
    }

    /// The same; what lockkit says on stderr.
    #[track_caller]
    fn says_when_lockkit_stood_still(self) -> String {
        let Self { redis, line, mut running } = self;
        redis.await_renewal("k");
        running.signal("STOP");
        let ends = by_the_clock(Instant::now() + redis.left("k"));
        line.end();
        assert!(line.last_sign() < ends, "{:?} too late", line.last_sign().duration_since(ends));
        running.signal("CONT");
        let output = running.end();
        assert_eq!(output.status.code(), Some(74), "{output:?}");
        complaints(&output)
    }
}

/// The watchdog of a run, if it is there.
fn watchdog(lockkit: &str) -> String {
    let found = Command::new("pgrep").args(["-P", lockkit, "-f", "__watch"]).output();
    stdout(&found.expect("pgrep, of procps")).trim().to_owned()
}

#[test]
fn cmd_is_gone_before_the_lease_of_a_frozen_server_lapses() {
    let Stubborn { redis, line, running } = stubborn("3s");
    let lapse = redis.freeze_while_held("k", Duration::from_secs(3));
    let ends = by_the_clock(lapse);
    let (_, gone) = line.end();
    assert!(line.last_sign() < ends, "{:?} too late", line.last_sign().duration_since(ends));
    // Nor was it stopped without need.
    assert!(gone > lapse - Duration::from_secs(1), "{:?} too early", lapse.saturating_duration_since(gone));
    let output = running.end();
    assert_eq!(code(&output), 74);
    assert!(complaint(&output).contains("stopped CMD before its lease of \"k\" could lapse"), "{}", complaint(&output));
}

/// As `su -` and `sudo` do, with a session of its own for what they run.
#[test]
fn what_has_cleared_its_environment_is_gone_in_time_too() {
    let redis = Redis::start();
    let line = Line::new();
    let script = r#"
        exec 2>/dev/null 3>$LINE
        loop='trap "" TERM HUP; : >$LINE.alive; echo up >&3; while :; do : >$LINE.alive; sleep 0.01; done'
        setsid -w env -i LINE="$LINE" sh -c "$loop"
    "#;
    let running = line.start(redis.run("k", &["--ttl", "3s"], script));
    let ends = by_the_clock(redis.freeze_while_held("k", Duration::from_secs(3)));
    line.end();
    assert!(line.last_sign() < ends, "{:?} too late", line.last_sign().duration_since(ends));
    assert_eq!(code(&running.end()), 74);
}

#[test]
fn cmd_may_end_in_good_order() {
    let redis = Redis::start();
    let line = Line::new();
    let script = "exec 2>/dev/null 3>$LINE; trap 'sleep 0.2; echo bye >&3; exit 0' TERM; echo up >&3; while :; do sleep 0.01; done";
    let running = line.start(redis.run("k", &["--ttl", "3s"], script));
    redis.freeze();
    assert_eq!(line.end().0, "bye\n");
    assert_eq!(code(&running.end()), 74);
}

/// A shell without a trap ends of TERM at once, before what it waits for.
#[test]
fn what_cmd_started_may_end_in_good_order_after_cmd() {
    let redis = Redis::start();
    let line = Line::new();
    let worker = "trap 'sleep 0.2; echo bye >&3; exit 0' TERM; echo up >&3; while :; do sleep 0.01; done";
    let script = format!("exec 2>/dev/null 3>$LINE; sh -c \"{worker}\"; true");
    let running = line.start(redis.run("k", &["--ttl", "6s"], &script));
    redis.freeze();
    assert_eq!(line.end().0, "bye\n");
    let output = running.end();
    assert_eq!(code(&output), 74);
    assert!(complaint(&output).contains("before its lease of \"k\" could lapse"), "{}", complaint(&output));
}

#[test]
fn a_short_outage_is_survived() {
    let redis = Redis::start();
    let line = Line::new();
    let running = line.start(redis.run("k", &["--ttl", "5s"], "exec 3>$LINE; echo up >&3; read x <$GO; exit 8"));
    redis.await_renewal("k");
    redis.freeze();
    // Past the renewal that is due after a third of the ttl. That nothing happens can't be awaited.
    std::thread::sleep(Duration::from_millis(1900));
    redis.thaw();
    redis.await_renewal("k");
    line.go();
    assert_eq!(code(&running.end()), 8);
}

#[test]
fn a_deleted_lock_stops_cmd() {
    let Stubborn { redis, line, running } = stubborn("3s");
    let ends = by_the_clock(Instant::now() + redis.left("k"));
    assert_eq!(redis.command(&["DEL", &lock("k")]), "1");
    line.end();
    // The next renewal was at most 1.1 s away, and KILL comes 0.1 s after TERM. The lease had 1.9 s left at least.
    let left = ends.duration_since(line.last_sign()).unwrap();
    assert!(left > Duration::from_millis(400), "only {left:?} before its lease would have ended");
    let output = running.end();
    assert_eq!(code(&output), 74);
    let said = complaint(&output);
    assert!(said.contains("may have overlapped") && said.contains("no such lease any more"), "{said}");
}

#[test]
fn a_lock_in_other_hands_stops_cmd_and_stays_there() {
    let Stubborn { redis, line, running } = stubborn("1s");
    redis.command(&["SET", &lock("k"), "somebody else", "PX", "60000"]);
    line.end();
    let output = running.end();
    assert_eq!(code(&output), 74);
    assert!(complaint(&output).contains("another holder has the lock"), "{}", complaint(&output));
    assert_eq!(redis.command(&["GET", &lock("k")]), "somebody else");
}

#[test]
fn a_loss_that_is_found_at_the_end_is_said() {
    let redis = Redis::start();
    let line = Line::new();
    let running = line.start(redis.run("k", &["--ttl", "60s"], "exec 3>$LINE; echo up >&3; read x <$GO; exit 0"));
    redis.command(&["DEL", &lock("k")]);
    line.go();
    let output = running.end();
    assert_eq!(code(&output), 74);
    assert!(complaint(&output).contains("may have overlapped"), "{}", complaint(&output));
}

#[test]
fn cmd_dies_with_lockkit() {
    let Stubborn { redis, line, mut running } = stubborn("30s");
    let start = Instant::now();
    running.signal("KILL");
    let (_, gone) = line.end();
    assert!(gone - start < Duration::from_secs(10), "{:?}", gone - start);
    assert!(running.end().status.code().is_none());
    // Nobody was there to release it.
    assert!(redis.is_held("k"));
}

#[test]
fn cmd_itself_dies_with_lockkit_even_without_a_watchdog() {
    let redis = Redis::start();
    let line = Line::new();
    let mut running = line.begin(redis.run("k", &[], "exec 3>$LINE; echo $PPID >&3; echo up >&3; read x <$GO"));
    let lockkit = line.hear();
    assert_eq!(line.hear(), "up");
    signal_watchdog(&lockkit, "KILL");
    running.signal("KILL");
    line.end();
}

#[test]
fn cmd_does_not_outlive_its_lease_while_lockkit_stands_still() {
    stubborn("2s").ends_in_time_while_lockkit_stands_still();
}

/// `systemctl kill` sends a signal to all processes of a service, such as USR1 for CMD to open its log anew.
#[test]
fn the_watchdog_outlives_the_signals_that_are_meant_for_cmd() {
    let mut cmd = stubborn("2s");
    let lockkit = cmd.running.id().to_string();
    let before = watchdog(&lockkit);
    // CMD may be up before its watchdog is. Handlers are set in an order that ends with this one.
    eventually("the watchdog has its handlers", || catches(&before, Signal::USR2));
    let name = fs::read_to_string(format!("/proc/{before}/comm")).unwrap();
    assert_eq!(
        name, "exe\n",
        "a run around this one asks those of this name whether they are watchdogs, and spares them"
    );
    for signal in ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"] {
        signal_watchdog(&lockkit, signal);
    }
    // After each renewal lockkit looks whether its watchdog is there.
    for _ in 0..2 {
        cmd.redis.await_renewal("k");
    }
    assert_eq!(watchdog(&lockkit), before);
    cmd.ends_in_time_while_lockkit_stands_still();
}

#[test]
fn a_watchdog_that_was_killed_is_replaced() {
    let mut cmd = stubborn("2s");
    let lockkit = cmd.running.id().to_string();
    let before = watchdog(&lockkit);
    signal_watchdog(&lockkit, "KILL");
    eventually("another watchdog", || !["", &before].contains(&watchdog(&lockkit).as_str()));
    let said = cmd.says_when_lockkit_stood_still();
    assert!(said.lines().count() == 2 && said.contains("another one has taken its place"), "{said}");
}

/// Its lease is renewed although nobody reads what is said of that.
#[test]
fn a_watchdog_is_replaced_while_stderr_is_full() {
    const ROOM: usize = 65536;
    let (redis, line) = (Redis::start(), Line::new());
    let (messages, mut full) = std::io::pipe().unwrap();
    full.write_all(&vec![b'\n'; ROOM]).unwrap();
    let mut command = redis.run("k", &["--ttl", "2s"], "exec 3>$LINE; echo $PPID >&3; read x <$GO; exit 8");
    line.give(&mut command);
    let mut running = command.stderr(full).spawn().unwrap();
    drop(command);
    let lockkit = line.hear();
    for _ in 0..2 {
        let before = watchdog(&lockkit);
        signal_watchdog(&lockkit, "KILL");
        eventually("another watchdog", || !["", &before].contains(&watchdog(&lockkit).as_str()));
        redis.await_renewal("k");
        redis.await_renewal("k");
    }
    line.go();
    assert_eq!(running.wait().unwrap().code(), Some(8));
    drop(messages);
}

#[test]
fn cmd_does_not_outlive_its_grace_when_lockkit_is_stopped_after_a_loss() {
    let redis = Redis::start();
    let line = Line::new();
    let script = r#"
        exec 2>/dev/null 3>$LINE
        trap 'echo term >&3' TERM; echo up >&3; while :; do : >$LINE.alive; sleep 0.01; done
    "#;
    let mut running = line.start(redis.run("k", &["--ttl", "30s"], script));
    let who = redis.who("k");
    let token = who["holders"][0]["token"].as_str().unwrap();
    assert!(redis.lockkit(&["break", "k", "--token", token]).output().unwrap().status.success());
    assert_eq!(line.hear(), "term");
    running.signal("STOP");
    let stopped = Instant::now();
    let (_, gone) = line.end();
    // KILL is due 0.1 s after TERM. By the last renewal the lease would have had 19 s at least.
    assert!(gone - stopped < Duration::from_secs(5), "{:?} too late", gone - stopped);
    running.signal("CONT");
    let output = running.end();
    assert_eq!(code(&output), 74);
    assert!(complaint(&output).contains("may have overlapped"), "{}", complaint(&output));
}

#[test]
fn nothing_is_started_once_the_time_for_it_is_over() {
    let start = |until: Moment| {
        let (parent, until) = (std::process::id().to_string(), until.as_nanos().to_string());
        lockkit(&["__exec", &parent, &until, "--", "echo", "started"]).output().unwrap()
    };
    let output = start(SystemClock.now());
    assert_eq!((code(&output), output.stdout), (74, Vec::new()));
    let output = start(SystemClock.now() + Duration::from_secs(60));
    assert_eq!((code(&output), output.stdout), (0, b"started\n".to_vec()));
}

/// Whether it came before the lock was taken, before CMD was there, or after that.
#[test]
fn an_interrupt_at_any_moment_of_the_start_frees_the_lock() {
    let redis = Redis::start();
    for millis in 0..40 {
        let mut running = Running::start(redis.run("k", &[], "exec sleep 60"));
        std::thread::sleep(Duration::from_millis(millis));
        running.signal("INT");
        drop(running.end());
        assert!(!redis.is_held("k"), "{millis} ms after the start");
    }
}

#[test]
fn cmd_does_not_outlive_its_lease_in_a_stopped_job() {
    // Ctrl-Z stops lockkit and CMD; when the job goes on, CMD must not have lived to see it.
    let redis = Redis::start();
    let line = Line::new();
    let mut running =
        line.start(redis.run("k", &["--ttl", "1s"], "exec 3>$LINE; echo up >&3; kill -STOP $$; echo woke >&3"));
    running.signal("STOP");
    assert_eq!(line.end().0, "");
    running.signal("CONT");
    assert_eq!(code(&running.end()), 74);
}

#[test]
fn a_watchdog_that_stands_still_or_is_gone_does_no_harm() {
    for signal in ["STOP", "KILL"] {
        let redis = Redis::start();
        let line = Line::new();
        let running = line.begin(redis.run("k", &["--ttl", "3s"], "exec 3>$LINE; echo $PPID >&3; read x <$GO; exit 8"));
        let lockkit = line.hear();
        signal_watchdog(&lockkit, signal);
        redis.await_renewal("k");
        redis.await_renewal("k");
        line.go();
        let output = running.end();
        assert_eq!(code(&output), 8, "{signal}");
        let is_said = complaints(&output).contains("another one has taken its place");
        assert_eq!(is_said, signal == "KILL", "one that stands still is not missed");
        assert!(!redis.is_held("k"));
    }
}

/// A program that has become another user's is out of reach, and works on. Only root can make one.
#[test]
fn the_lock_is_kept_for_what_can_not_be_killed() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("left out: only root can start what it may not kill");
        return;
    }
    let (redis, line, files) = (Redis::start(), Line::new(), tempfile::tempdir().unwrap());
    let file = |name: &str| files.path().join(name);
    fs::copy(env!("CARGO_BIN_EXE_lockkit"), file("lockkit")).unwrap();
    fs::copy("/usr/bin/perl", file("perl")).unwrap();
    let modes = [(file("perl"), 0o4755), (files.path().to_owned(), 0o755)];
    for (path, mode) in modes.into_iter().chain(line.files().map(|path| (path, 0o777))) {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let script = r#"trap 'echo term >&3' TERM; exec 3>$LINE 2>/dev/null
        $PERL -e '$< = $>; print "ready\n"; close STDOUT; open(my $go, "<", $ENV{GO}); <$go>' >&3 3>&- &
        while :; do sleep 0.05; done"#;
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(file("lockkit"));
    command.args(["run", "--key", "k", "--ttl", "6s", "--", "sh", "-c", script]);
    command.env("LOCKKIT_STORE", redis.url()).env("PERL", file("perl"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut running = line.begin(command);
    assert_eq!(line.hear(), "ready");
    redis.freeze();
    assert_eq!(line.hear(), "term");
    redis.thaw();
    let said = running.complaint();
    assert!(said.contains("is still there"), "{said}");
    for _ in 0..2 {
        redis.await_renewal("k");
    }
    assert!(redis.is_held("k") && running.is_running());
    line.go();
    assert_eq!(code(&running.end()), 74);
    assert!(!redis.is_held("k"));
}
