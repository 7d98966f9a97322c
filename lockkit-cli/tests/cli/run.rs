//! `lockkit run`: CMD's life under a lock that is not in danger.

use std::time::{Duration, Instant};

use crate::support::{Line, Redis, Running, code, complaint, complaints, eventually, ignoring, lock, lockkit, stdout};
use lockkit_testkit::{
    faults::Proxy,
    servers::{RedisOptions, RedisServer},
};

#[test]
fn the_exit_code_passes_through() {
    let redis = Redis::start();
    for (script, expected) in [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -TERM $$", 143)] {
        let output = redis.run("k", &[], script).output().unwrap();
        assert_eq!((code(&output), output.stderr.len()), (expected, 0), "{script}");
        assert!(!redis.is_held("k"), "{script}");
    }
}

#[test]
fn cmd_sees_its_lock() {
    let redis = Redis::start();
    let script = r#"echo "$LOCKKIT_KEY $LOCKKIT_FENCE $LOCKKIT_TTL_MS"; "$0" who "$LOCKKIT_KEY" --json"#;
    let mut command =
        redis.lockkit(&["run", "--key", "a b", "--ttl", "5s", "--holder", "me", "--", "sh", "-c", script]);
    let output = command.arg(env!("CARGO_BIN_EXE_lockkit")).output().unwrap();
    assert_eq!(code(&output), 0);
    let text = stdout(&output);
    let (first, rest) = text.split_once('\n').unwrap();
    let who: serde_json::Value = serde_json::from_str(rest).unwrap();
    let holder = &who["holders"][0];
    assert_eq!(first, format!("a b {} 5000", holder["fence"]));
    assert_eq!(holder["holder"], "me");
    let left = holder["remaining_ms"].as_u64().unwrap();
    assert!((2_000..=5_000).contains(&left), "{left}");
}

#[test]
fn the_holder_is_named_after_cmd() {
    let redis = Redis::start();
    let output = redis.run("k", &[], r#"echo "$PPID""#).output().unwrap();
    assert_eq!(code(&output), 0);
    let line = Line::new();
    let running = line.start(redis.run("k", &[], "exec 3>$LINE; echo up >&3; read x <$GO"));
    let holder = redis.who("k")["holders"][0]["holder"].as_str().unwrap().to_owned();
    assert!(holder.starts_with("sh@") && holder.contains(':'), "{holder}");
    line.go();
    assert_eq!(code(&running.end()), 0);
}

#[test]
fn a_held_lock_is_not_acquired() {
    let redis = Redis::start();
    let line = Line::new();
    let first = line.start(redis.run("k", &["--holder", "the first"], "exec 3>$LINE; echo up >&3; read x <$GO"));

    let output = redis.run("k", &["--no-wait"], "echo ran").output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (75, String::new()));
    assert!(complaint(&output).contains("held by the first"), "{}", complaint(&output));

    let start = Instant::now();
    let output = redis.run("k", &["--wait", "400ms"], "echo ran").output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (75, String::new()));
    assert!(start.elapsed() >= Duration::from_millis(400));

    // The next one waits as long as it takes, and says for whom.
    let mut third = Running::start(redis.run("k", &[], "echo ran"));
    let said = third.complaint();
    assert!(said.contains("waiting for \"k\"") && said.contains("held by the first"), "{said}");
    assert!(said.contains("of its lease left"), "{said}");
    assert!(third.is_running());
    line.go();
    assert_eq!(code(&first.end()), 0);
    let output = third.end();
    assert_eq!((code(&output), stdout(&output)), (0, "ran\n".to_owned()));
}

#[test]
fn who_gives_up_waiting_leaves_nothing_behind() {
    let redis = Redis::start();
    let line = Line::new();
    let first = line.start(redis.run("k", &[], "exec 3>$LINE; echo up >&3; read x <$GO"));
    let mut second = Running::start(redis.run("k", &[], "echo ran"));
    second.complaint();
    second.signal("TERM");
    let output = second.end();
    assert_eq!((code(&output), stdout(&output)), (143, String::new()));
    line.go();
    assert_eq!(code(&first.end()), 0);
    assert!(!redis.is_held("k"));
}

#[test]
fn a_cmd_that_can_not_run_frees_the_lock() {
    let redis = Redis::start();
    for (program, expected) in [("no-such-program", 127), ("/etc/passwd", 126), ("/etc", 126)] {
        let output = redis.lockkit(&["run", "--key", "k", "--", program]).output().unwrap();
        assert_eq!(code(&output), expected);
        assert!(complaint(&output).contains(program));
        assert!(!redis.is_held("k"));
    }
}

#[test]
fn signals_that_end_reach_all_of_cmd() {
    let redis = Redis::start();
    for signal in ["TERM", "INT", "HUP", "QUIT"] {
        let line = Line::new();
        // A grandchild, too, and one that has left the group.
        let child = format!("trap 'echo child >&3; exit' {signal}; echo up >&3; while :; do sleep 0.02; done");
        let script = format!(
            "exec 2>/dev/null 3>$LINE; trap 'echo cmd >&3; wait; exit 9' {signal}
             sh -c \"{child}\" & setsid sh -c \"{child}\" & while :; do wait; done"
        );
        let mut running = line.begin(redis.run("k", &[], &script));
        // A shell ignores INT and QUIT in what it puts into the background, and such a shell can't trap them.
        let background = matches!(signal, "TERM" | "HUP");
        assert_eq!((line.hear(), line.hear()), ("up".into(), "up".into()));
        running.signal(signal);
        if background {
            let mut said: Vec<_> = (0..3).map(|_| line.hear()).collect();
            said.sort();
            assert_eq!(said, ["child", "child", "cmd"], "{signal}");
            assert_eq!(code(&running.end()), 9, "{signal}");
        } else {
            assert_eq!(line.hear(), "cmd", "{signal}");
            running.signal("TERM");
            line.end();
            running.end();
        }
    }
}

#[test]
fn other_signals_reach_cmd_alone() {
    let redis = Redis::start();
    for signal in ["USR1", "USR2"] {
        let line = Line::new();
        let script = format!(
            "exec 3>$LINE; trap 'echo cmd >&3' {signal}
             sh -c \"trap 'echo child >&3' {signal}; echo up >&3; read x <$GO; echo child ends >&3\" &
             wait; wait; echo cmd ends >&3; exit 4"
        );
        let mut running = line.start(redis.run("k", &[], &script));
        running.signal(signal);
        assert_eq!(line.hear(), "cmd");
        line.go();
        assert_eq!((line.hear(), line.hear()), ("child ends".into(), "cmd ends".into()));
        assert_eq!(code(&running.end()), 4);
    }
}

#[test]
fn what_was_ignored_stays_ignored() {
    let redis = Redis::start();
    let line = Line::new();
    // No `read`: a signal that comes in the moment before the shell blocks in it is trapped only when it returns.
    let script =
        "exec 3>$LINE; trap 'echo term >&3' TERM; trap 'exit 5' USR1; echo up >&3; while :; do sleep 0.02; done";
    // As nohup does.
    let mut command = ignoring("HUP", &["run", "--key", "k", "--", "sh", "-c", script]);
    command.env("LOCKKIT_STORE", redis.url());
    let mut running = line.start(command);
    running.signal("HUP");
    // If HUP had killed anyone, TERM would not be answered.
    running.signal("TERM");
    assert_eq!(line.hear(), "term");
    running.signal("USR1");
    assert_eq!(code(&running.end()), 5);
}

#[test]
fn what_cmd_leaves_behind_does_not_keep_the_lock() {
    let redis = Redis::start();
    let line = Line::new();
    let running = line.begin(redis.run("k", &[], "(exec 3>$LINE; echo up >&3; read x <$GO) >/dev/null 2>&1 & exit 3"));
    assert_eq!(code(&running.end()), 3);
    assert!(!redis.is_held("k"));
    assert_eq!(line.hear(), "up");
    line.go();
}

#[test]
fn an_unreachable_store_is_said_to_be() {
    let redis = Redis::start();
    redis.freeze();
    let output = redis.run("k", &[], "echo ran").output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (69, String::new()));
    redis.thaw();
    redis.kill();
    let output = redis.run("k", &[], "echo ran").output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (69, String::new()));
    assert!(complaint(&output).contains("refused"), "{}", complaint(&output));
}

#[test]
fn a_release_that_fails_does_not_change_the_exit_code() {
    let redis = Redis::start();
    let line = Line::new();
    let running = line.start(redis.run("k", &[], "exec 3>$LINE; echo up >&3; read x <$GO; exit 6"));
    redis.kill();
    line.go();
    let output = running.end();
    assert_eq!(code(&output), 6);
    assert!(complaint(&output).contains("stays locked for up to"), "{}", complaint(&output));
}

/// The answer to the release is lost with the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_that_fails_once_is_repeated_before_the_end() {
    let server = RedisServer::start(RedisOptions::default()).await.unwrap();
    let proxy = Proxy::start(server.addr()).await.unwrap();
    let url = server.url().replace(&server.addr().to_string(), &proxy.addr().to_string());
    let line = Line::new();
    let script = "exec 3>$LINE; echo up >&3; read x <$GO; exit 6";
    let running =
        line.begin(lockkit(&["run", "--store", &url, "--key", "k", "--ttl", "60s", "--", "sh", "-c", script]));
    let (heard, line) = tokio::task::spawn_blocking(move || (line.hear(), line)).await.unwrap();
    assert_eq!(heard, "up");
    proxy.drop_reply_after(lock("k"), 1);
    let output = tokio::task::spawn_blocking(move || {
        line.go();
        running.end()
    });
    let output = output.await.unwrap();
    proxy.dropped().await;
    assert_eq!((code(&output), complaints(&output)), (6, String::new()));
    let who = tokio::task::spawn_blocking(move || lockkit(&["who", "--store", &server.url(), "k"]).output().unwrap());
    assert_eq!(stdout(&who.await.unwrap()), "k is free\n");
}

#[test]
fn waiters_are_gone_with_their_process() {
    let redis = Redis::start();
    let line = Line::new();
    let first = line.start(redis.run("k", &[], "exec 3>$LINE; echo up >&3; read x <$GO"));
    let second = Running::start(redis.run("k", &[], "true"));
    eventually("a waiter", || redis.who("k")["waiters"] == 1);
    drop(second);
    eventually("no waiter", || redis.who("k")["waiters"] == 0);
    line.go();
    assert_eq!(code(&first.end()), 0);
}
