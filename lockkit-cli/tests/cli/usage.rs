//! Bad usage and bad surroundings: the right exit code, one clear line, never a panic.

use std::{fs::File, process::Stdio};

use crate::support::{Redis, code, complaint, lockkit, stdout};
use lockkit_testkit::servers::RedisOptions;

#[test]
fn bad_usage_is_64_and_one_line() {
    let long = "x".repeat(513);
    let commands: [&[&str]; 26] = [
        &[],
        &["frob"],
        &["run"],
        &["run", "--key", "k"],
        &["run", "--key", "k", "--"],
        &["run", "--key", "k", "true"],
        &["run", "--key", "", "--", "true"],
        &["run", "--key", &long, "--", "true"],
        &["run", "--key", "k", "--ttl", "10", "--", "true"],
        &["run", "--key", "k", "--ttl", "10ms", "--", "true"],
        &["run", "--key", "k", "--ttl", "99999999999999999999s", "--", "true"],
        &["run", "--key", "k", "--wait", "1x", "--", "true"],
        &["run", "--key", "k", "--wait", "1s", "--no-wait", "--", "true"],
        &["run", "--key", "k", "--frob", "--", "true"],
        &["who"],
        &["who", ""],
        &["break", "k", "--token", "short"],
        &["top", "--every", "10"],
        &["top", "--every", "99ms"],
        &["top", "--every", "2h"],
        &["top", "--sort", "frob"],
        &["top", "a", "b"],
        &["top", "--frob"],
        &["completions", "tcsh"],
        &["man", "frob"],
        &["man", "__exec"],
    ];
    for args in commands {
        let output = lockkit(args).env("LOCKKIT_STORE", "memory:").output().unwrap();
        assert_eq!((code(&output), stdout(&output)), (64, String::new()), "{args:?} {output:?}");
        assert!(complaint(&output).starts_with("lockkit: "), "{args:?}");
    }
}

#[test]
fn a_bad_store_is_64_and_its_password_stays_secret() {
    for url in ["", "nonsense", "ftp://host", "redis://", "redis://:hunter2@127.0.0.1:1?frob=1", "memory://x"] {
        let output = lockkit(&["ls"]).env("LOCKKIT_STORE", url).output().unwrap();
        assert_eq!(code(&output), 64, "{url} {output:?}");
        assert!(!complaint(&output).contains("hunter2"));
    }
    let output = lockkit(&["ls"]).output().unwrap();
    assert_eq!(code(&output), 64);
    assert!(complaint(&output).contains("LOCKKIT_STORE"));
    let output = lockkit(&["ls", "--help"]).env("LOCKKIT_STORE", "redis://:hunter2@host").output().unwrap();
    assert_eq!(code(&output), 0);
    assert!(stdout(&output).contains("LOCKKIT_STORE") && !stdout(&output).contains("hunter2"));
}

#[test]
fn a_store_that_refuses_is_69() {
    let redis = Redis::start_with(RedisOptions::default().password("hunter2"));
    let wrong = redis.url().replace("hunter2", "wrong");
    for args in
        [&["ls"][..], &["who", "k"], &["top"], &["top", "--json", "--once"], &["run", "--key", "k", "--", "true"]]
    {
        let output = redis.lockkit(args).env("LOCKKIT_STORE", &wrong).output().unwrap();
        assert_eq!(code(&output), 69, "{output:?}");
        assert!(complaint(&output).contains("denied") && !complaint(&output).contains("wrong@"));
        assert_eq!(code(&redis.lockkit(args).output().unwrap()), 0);
    }
}

#[test]
fn the_store_may_stand_on_the_command_line() {
    let redis = Redis::start();
    let output = lockkit(&["ls", "--store", &redis.url()]).env("LOCKKIT_STORE", "nonsense").output().unwrap();
    assert_eq!(code(&output), 0);
    let output = lockkit(&["run", "--store", &redis.url(), "--key", "k", "--", "echo", "ran"]).output().unwrap();
    assert_eq!((code(&output), stdout(&output)), (0, "ran\n".to_owned()));
}

#[test]
fn help_and_version_are_no_errors() {
    for args in [&["--help"][..], &["--version"], &["help"], &["run", "--help"], &["who", "-h"], &["help", "break"]] {
        let output = lockkit(args).output().unwrap();
        assert_eq!((code(&output), output.stderr.len()), (0, 0), "{args:?}");
        assert!(stdout(&output).contains("lockkit"), "{args:?}");
        assert!(!stdout(&output).contains("__exec"), "{args:?}");
    }
}

#[test]
fn completions_and_manual_are_printed() {
    for shell in ["bash", "zsh", "fish"] {
        let output = lockkit(&["completions", shell]).output().unwrap();
        assert_eq!(code(&output), 0);
        assert!(stdout(&output).contains("no-wait"), "{shell}");
    }
    for (args, text) in [(&["man"][..], "lockkit\\-run(1)"), (&["man", "run"], "LOCKKIT_FENCE")] {
        let output = lockkit(args).output().unwrap();
        assert_eq!(code(&output), 0);
        assert!(stdout(&output).contains(".TH lockkit") && stdout(&output).contains(text), "{}", stdout(&output));
    }
}

#[test]
fn nobody_who_reads_is_no_error() {
    for args in [&["ls"][..], &["top"], &["top", "--json"], &["man"], &["completions", "bash"], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = lockkit(args).env("LOCKKIT_STORE", "memory:").stdout(writer).output().unwrap();
        assert_eq!((code(&output), output.stderr.len()), (0, 0), "{args:?} {output:?}");
    }
}

#[test]
fn a_full_disk_is_an_error() {
    for args in [
        &["ls"][..],
        &["who", "k", "--json"],
        &["top"],
        &["top", "--json"],
        &["man"],
        &["completions", "bash"],
        &["--help"],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = lockkit(args).env("LOCKKIT_STORE", "memory:").stdout(full).output().unwrap();
        assert_eq!(code(&output), 74, "{args:?}");
        assert!(complaint(&output).contains("could not write the output"), "{args:?}");
    }
}

#[test]
fn a_closed_stderr_does_no_harm() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let status = lockkit(&["frob"]).stdout(Stdio::null()).stderr(writer).status().unwrap();
    assert_eq!(status.code(), Some(64));
}
