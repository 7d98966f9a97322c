//! `lockkit ls`, `who` and `break`.

use crate::support::{Line, Redis, Running, code, complaint, eventually, lock, stdout};
use serde_json::json;

/// A run that holds a lock until the line says go.
fn hold(redis: &Redis, key: &str, line: &Line) -> Running {
    line.start(redis.run(key, &["--ttl", "60s", "--holder", "the holder"], "exec 3>$LINE; echo up >&3; read x <$GO"))
}

#[test]
fn ls_lists_what_is_held() {
    let redis = Redis::start();
    let output = redis.lockkit(&["ls"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output).lines().count()), (0, 1));

    let lines = [Line::new(), Line::new(), Line::new()];
    let keys = ["a/1", "a/2", "b\u{1b}[31m*"];
    let running: Vec<_> = keys.iter().zip(&lines).map(|(key, line)| hold(&redis, key, line)).collect();

    let output = redis.lockkit(&["ls"]).output().unwrap();
    assert_eq!(code(&output), 0);
    let text = stdout(&output);
    assert_eq!(text.lines().count(), 4, "{text}");
    assert!(text.lines().nth(1).unwrap().starts_with("a/1 ") && text.contains("the holder"), "{text}");
    assert!(!text.contains('\u{1b}') && text.contains("b\\u{1b}[31m*"), "{text}");

    let output = redis.lockkit(&["ls", "a/", "--json"]).output().unwrap();
    let locks: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let names: Vec<_> = locks.as_array().unwrap().iter().map(|lock| lock["key"].clone()).collect();
    assert_eq!(names, ["a/1", "a/2"]);
    let holder = &locks[0]["holders"][0];
    assert_eq!(
        (&holder["holder"], &holder["mode"], &holder["depth"]),
        (&json!("the holder"), &json!("exclusive"), &json!(1))
    );
    assert!(holder["fence"].as_u64().unwrap() > 0 && holder["remaining_ms"].as_u64().unwrap() > 30_000);
    assert!(holder.get("token").is_none(), "a list need not spread secrets");

    lines.iter().for_each(Line::go);
    running.into_iter().for_each(|running| assert_eq!(code(&running.end()), 0));
}

#[test]
fn who_tells_of_free_held_and_foreign_locks() {
    let redis = Redis::start();
    let output = redis.lockkit(&["who", "k"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (0, "k is free\n".to_owned()));
    let who = redis.who("k");
    assert_eq!((&who["key"], &who["held"], &who["holders"]), (&json!("k"), &json!(false), &json!([])));

    let line = Line::new();
    let running = hold(&redis, "k", &line);
    let output = redis.lockkit(&["who", "k"]).output().unwrap();
    assert_eq!(code(&output), 0);
    let token = redis.who("k")["holders"][0]["token"].as_str().unwrap().to_owned();
    let text = stdout(&output);
    assert!(text.starts_with("k is held\n") && text.contains("the holder") && text.contains(&token), "{text}");
    line.go();
    assert_eq!(code(&running.end()), 0);

    redis.command(&["SET", &lock("k"), "plain", "PX", "60000"]);
    let who = redis.who("k");
    assert_eq!((&who["held"], &who["holders"][0]["foreign"]), (&json!(true), &json!(true)));
    assert_eq!(who["holders"][0]["token"], json!(null));
    let text = stdout(&redis.lockkit(&["who", "k"]).output().unwrap());
    assert!(text.contains("a client that is not lockkit") && text.contains("can't be broken"), "{text}");
}

#[test]
fn who_shows_the_queue_in_order() {
    let redis = Redis::start();
    let lines = [Line::new(), Line::new(), Line::new()];
    let modes: [&[&str]; 3] = [&["--write"], &["--read"], &["--fifo"]];
    let mut running = Vec::new();
    for (number, (line, mode)) in lines.iter().zip(modes).enumerate() {
        let holder = format!("number {number}");
        let arguments = [&["--ttl", "60s", "--holder", holder.as_str()][..], mode].concat();
        running.push(line.begin(redis.run("k", &arguments, "exec 3>$LINE; echo up >&3; read x <$GO")));
        if number == 0 {
            assert_eq!(line.hear(), "up");
        }
        eventually("it waits", || redis.who("k")["queue"].as_array().unwrap().len() == number);
    }
    let queue = json!([
        { "holder": "number 1", "mode": "shared" },
        { "holder": "number 2", "mode": "exclusive" },
    ]);
    assert_eq!(redis.who("k")["queue"], queue);
    let text = stdout(&redis.lockkit(&["who", "k"]).output().unwrap());
    assert!(text.contains("  next 1    number 1 (shared)\n  next 2    number 2 (exclusive)\n"), "{text}");
    for (line, running) in lines.iter().zip(running) {
        line.go();
        assert_eq!(code(&running.end()), 0);
    }
    assert_eq!(redis.who("k")["queue"], json!([]));
}

#[test]
fn break_ends_the_lease_of_that_token_only() {
    let redis = Redis::start();
    let line = Line::new();
    let running = hold(&redis, "k", &line);
    let token = redis.who("k")["holders"][0]["token"].as_str().unwrap().to_owned();

    let other = "0123456789abcdef0123456789abcdef";
    let output = redis.lockkit(&["break", "k", "--token", other]).output().unwrap();
    assert_eq!(code(&output), 75);
    assert!(complaint(&output).contains("not held by that token; it is held by the holder"), "{}", complaint(&output));
    assert!(redis.is_held("k"));

    let output = redis.lockkit(&["break", "k", "--token", &token, "--json"]).output().unwrap();
    assert_eq!(code(&output), 0);
    let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(answer, json!({ "key": "k", "broken": true }));
    assert!(!redis.is_held("k"));

    // What was broken can't be broken again.
    let output = redis.lockkit(&["break", "k", "--token", &token]).output().unwrap();
    assert_eq!(code(&output), 75);
    assert!(complaint(&output).contains("free"), "{}", complaint(&output));

    // Its holder learns of it.
    line.go();
    assert_eq!(code(&running.end()), 74);
}

#[test]
fn who_is_no_client_can_not_be_broken() {
    let redis = Redis::start();
    redis.command(&["SET", &lock("k"), "plain", "PX", "60000"]);
    let output = redis.lockkit(&["break", "k", "--token", "0123456789abcdef0123456789abcdef"]).output().unwrap();
    assert_eq!(code(&output), 75);
    assert!(complaint(&output).contains("can't be broken"), "{}", complaint(&output));
    assert_eq!(redis.command(&["GET", &lock("k")]), "plain");
}

#[test]
fn without_a_token_and_a_terminal_nothing_is_broken() {
    let redis = Redis::start();
    let output = redis.lockkit(&["break", "k"]).output().unwrap();
    assert_eq!(code(&output), 64);
    assert!(complaint(&output).contains("--token"), "{}", complaint(&output));
}
