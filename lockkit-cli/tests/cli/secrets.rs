//! Whatever is given in the wrong place or in the wrong way, the command repeats no part of a URL.

use std::{cell::Cell, time::Instant};

use crate::support::{PATIENCE, Redis, code, complaint, lockkit, stdout};
use lockkit_testkit::servers::{MySqlOptions, MySqlServer};
use proptest::{prelude::*, sample::select};

/// What must not be seen of the secret, in whatever case.
const PART: &str = "xs3cr";

/// A URL with a secret in it, and something wrong with it. Nobody listens at its address.
fn url() -> impl Strategy<Value = String> {
    let whole = select(vec![
        "redis://:Xs3cr3tX@127.0.0.1:1",
        "redis://app:12?Xs3cr3tX@127.0.0.1:1",
        "redis://app:12/Xs3cr3tX@127.0.0.1:1",
        "redis://app:12#Xs3cr3tX@127.0.0.1:1",
        "redis://app:pa@Xs3cr3tX@127.0.0.1:1",
        "redis://app:[Xs3cr3tX]@127.0.0.1:1",
        "redis://app:a Xs3cr3tX@127.0.0.1:1",
        "redis://Xs3cr3tX@127.0.0.1:1",
        "redis://127.0.0.1:1?pasword=Xs3cr3tX",
        "redis://127.0.0.1:1?Xs3cr3tX",
        "redis://127.0.0.1:1?timeout=Xs3cr3tX",
        "redis://app@127.0.0.1:1?password_file=Xs3cr3tX",
        "redis://app@127.0.0.1:1?password_env=Xs3cr3tX&password_env=Xs3cr3tX",
        "redlock://app:pa?Xs3cr3tX@a,b,c",
        "mysql://app:12/Xs3cr3tX@127.0.0.1:1/d",
        "mysql://app:12?Xs3cr3tX@127.0.0.1:1/d",
        "MYSQL://Xs3cr3tX:@127.0.0.1:1/d",
        "zk://me:Xs3cr3tX@127.0.0.1:1",
        "zk://127.0.0.1:1?auth=digest:me:p&Xs3cr3tX",
    ]);
    let broken = |url: &str, how: usize| match how {
        0 => url.replacen("://", ":", 1),
        1 => url.replacen("://", ":/", 1),
        2 => format!(" {url}"),
        3 => url.replacen("redis", "rdis", 1),
        4 => url.to_uppercase(),
        _ => url.to_owned(),
    };
    (whole, 0..10_usize).prop_map(move |(url, how)| broken(url, how))
}

/// The same where anything may stand, such as the name of a verb.
fn anywhere() -> impl Strategy<Value = String> {
    prop_oneof![3 => url(), 1 => select(vec!["Xs3cr3tX@host", "Xs3cr3tX", ":Xs3cr3tX@host:1", "--Xs3cr3tX", "-Xs3cr3tX"]).prop_map(str::to_owned)]
}

const VERBS: [&[&str]; 13] = [
    &["run", "--key", "k", "--no-wait"],
    &["run", "--key", "k", "--once-per", "1h"],
    &["elect", "--key", "k"],
    &["ls"],
    &["who", "k"],
    &["top", "--every", "1s"],
    &["top", "--json"],
    &["break", "k", "--token", "0123456789abcdef0123456789abcdef"],
    &["doctor"],
    &["check"],
    &["init"],
    &["gc"],
    &["race", "--total", "1"],
];

/// A command line with the secret in it, and whether that is also in the environment.
fn command_line() -> impl Strategy<Value = (Vec<String>, Option<String>)> {
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let verb = || select(VERBS.to_vec());
    let in_environment = (verb(), url()).prop_map(move |(verb, url)| (words(verb), Some(url)));
    let as_option =
        (verb(), select(vec!["--store", "--stroe", "--store=", "-s", "--", "--json", "--stroe="]), anywhere())
            .prop_map(move |(verb, option, url)| {
                let given =
                    if option.ends_with('=') { vec![format!("{option}{url}")] } else { vec![option.to_owned(), url] };
                ([words(verb), given].concat(), None)
            });
    let as_argument = (verb(), anywhere()).prop_map(move |(verb, url)| ([words(verb), vec![url]].concat(), None));
    // Where a name may stand, a URL is refused that can be told for one.
    let as_name = (
        select(vec![
            &["who"][..],
            &["ls"],
            &["top"],
            &["top", "--sort"],
            &["top", "--every"],
            &["break"],
            &["run", "--key"],
            &["run", "--holder"],
            &["elect", "--candidate"],
            &["check", "--filter"],
            &["check", "--junit"],
            &["compare", "--out"],
        ]),
        select(vec![
            "redis://:Xs3cr3tX@127.0.0.1:1",
            "redis:/:Xs3cr3tX@h",
            "REDIS:Xs3cr3tX@h",
            "rdis://:Xs3cr3tX@h",
            "mysql://Xs3cr3tX",
        ]),
    )
        .prop_map(move |(verb, url)| ([words(verb), vec![url.to_owned()]].concat(), None));
    let as_value = (
        select(vec![
            &["run", "--ttl"][..],
            &["run", "--wait"],
            &["break", "k", "--token"],
            &["gc", "--unused-for"],
            &["race", "--workers"],
            &["race", "--total"],
            &["compare", "--leases"],
            &["completions"],
            &["man"],
            &["help"],
            &[],
            &["who", "k", "--json", "--json"],
        ]),
        anywhere(),
    )
        .prop_map(move |(verb, url)| ([words(verb), vec![url]].concat(), None));
    prop_oneof![2 => in_environment, 3 => as_option, 2 => as_argument, 1 => as_name, 1 => as_value]
}

/// Processes are slow to start: what can be tried without the command is tried on the library, by a test of its own.
#[test]
fn no_verb_tells_a_secret() {
    let (place, tried, started) = (tempfile::tempdir().unwrap(), Cell::new(0), Instant::now());
    let config =
        ProptestConfig { failure_persistence: None, cases: 200, max_shrink_iters: 20, ..ProptestConfig::default() };
    proptest!(config, |((mut args, store) in command_line())| {
        if args.first().is_some_and(|verb| verb == "run" || verb == "elect") && !args.iter().any(|arg| arg == "--") {
            args.extend(["--".to_owned(), "true".to_owned()]);
        }
        let mut command = lockkit(&args.iter().map(String::as_str).collect::<Vec<_>>());
        command.current_dir(place.path());
        if let Some(url) = store.as_ref() {
            command.env("LOCKKIT_STORE", url);
        } else if !args.iter().any(|arg| arg.starts_with("--store")) {
            command.env("LOCKKIT_STORE", "redis://127.0.0.1:1");
        }
        let output = command.output().unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        prop_assert!(!said.to_lowercase().contains(PART), "{args:?} {store:?}: {said}");
        // What needs no preparation is not connected to.
        let is_idle = args.first().is_some_and(|verb| verb == "init" || verb == "gc");
        prop_assert!(is_idle || !output.status.success(), "{args:?} {store:?}: {said}");
        prop_assert!(!said.contains("panicked"), "{said}");
        tried.set(tried.get() + 1);
    });
    println!("{} command lines in {:?}", tried.get(), started.elapsed());
}

#[test]
fn what_is_wrong_is_said_all_the_same() {
    for (args, hint) in [
        (&["doctor", "redis://:Xs3cr3tX@h"][..], "--store"),
        (&["ls", "redis://:Xs3cr3tX@h"], "--store"),
        (&["who", "redis://:Xs3cr3tX@h"], "--store"),
        (&["top", "redis://:Xs3cr3tX@h"], "--store"),
        (&["ls", "--stroe", "redis://:Xs3cr3tX@h"], "--store"),
        (&["ls", "--stroe=redis://:Xs3cr3tX@h"], "--store"),
        (&["ls", "--store", "Xs3cr3tX@host"], "redis://"),
        (&["lss"], "ls"),
        (&["__worke"], "no such subcommand; lockkit --help"),
        (&["completions", "bush"], "bash"),
        (&["race", "--workers", "0"], "from 1 to 256"),
        (&["run", "--key", "k", "--ttl", "--", "true"], "--ttl"),
        (&["run", "--key", "k", "--wait", "1s", "--no-wait", "--", "true"], "--no-wait"),
        (&["run", "--", "true"], "--key"),
        (&["who"], "KEY"),
        (&["run", "--key", "k", "--", "redis://:Xs3cr3tX@h"], "--store"),
    ] {
        let output = lockkit(args).env("LOCKKIT_STORE", "redis://127.0.0.1:1").output().unwrap();
        let said = complaint(&output);
        assert_eq!((code(&output), stdout(&output)), (64, String::new()), "{args:?} {said}");
        assert!(!said.to_lowercase().contains(PART), "{args:?} {said}");
        assert!(said.contains(hint), "{args:?} {said}");
    }
}

/// The server repeats the user when it refuses the login.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_password_in_the_place_of_the_user_is_not_told_by_the_server_either() {
    let mysql = MySqlServer::start(MySqlOptions::default()).await.unwrap();
    let url = format!("mysql://Xs3cr3tX@{}/test", mysql.addr());
    let output = lockkit(&["ls"]).env("LOCKKIT_STORE", &url).output().unwrap();
    let said = complaint(&output);
    assert_eq!(code(&output), 69, "{said}");
    assert!(said.contains("refused the login from '") && !said.to_lowercase().contains(PART), "{said}");
    let error = lockkit::open(&url).await.expect_err("no such user");
    assert!(!format!("{error:?}").to_lowercase().contains(PART), "{error:?}");
}

/// For scripts that hide the password as the documentation advises.
#[test]
fn the_environment_is_not_shown() {
    let output = lockkit(&["race", "--help"]).env("LOCKKIT_STORE", "redis://:Xs3cr3tX@h").output().unwrap();
    assert!(!stdout(&output).contains("Xs3cr3tX"));
}

/// What each process that this one started was started with: its arguments, and its environment.
#[cfg(target_os = "linux")]
fn children(parent: u32) -> Vec<(String, String)> {
    // Each thread has a list of those that it started.
    let threads = std::fs::read_dir(format!("/proc/{parent}/task")).into_iter().flatten().flatten();
    let lists = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
    let list = lists.collect::<Vec<_>>().concat();
    let read = |pid: &str, file| {
        std::fs::read(format!("/proc/{pid}/{file}")).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
    };
    list.split_whitespace().filter_map(|pid| read(pid, "cmdline").ok().zip(read(pid, "environ").ok())).collect()
}

/// Each program that is started is one more place where a password can be read.
#[cfg(target_os = "linux")]
#[test]
fn what_the_command_starts_for_itself_is_told_no_url() {
    let redis = Redis::start_with(lockkit_testkit::servers::RedisOptions::default().password("Xs3cr3tX"));
    for (args, verb, least) in [
        (&["race", "--total", "100000000", "--workers", "3"][..], "__worker", 3),
        (&["run", "--key", "k", "--", "sleep", "600"], "__watch", 1),
    ] {
        let mut command = redis.lockkit(args).stdout(std::process::Stdio::null()).spawn().unwrap();
        let until = Instant::now() + PATIENCE;
        let found = loop {
            // Not those that are about to become what they are started as.
            let found: Vec<_> = children(command.id()).into_iter().filter(|(args, _)| args.contains(verb)).collect();
            if found.len() >= least {
                break found;
            }
            assert!(Instant::now() < until, "no {verb} in {found:?}");
            std::thread::yield_now();
        };
        command.kill().unwrap();
        command.wait().unwrap();
        for (args, environment) in found {
            assert!(!args.to_lowercase().contains(PART), "{args}");
            assert!(
                environment.contains("PATH=") && !environment.to_lowercase().contains(PART),
                "{args}: {environment}"
            );
        }
    }
}
