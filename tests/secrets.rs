//! Whatever is wrong with the URL of a store, what it has of a password is told to nobody: not in an error, nor in its
//! causes, nor in the `Debug` output of what was made of it. `PROPTEST_CASES` says how many URLs are tried.

use std::{error::Error, fmt::Write as _};

use lockkit::{mysql::MySqlConfig, redis::RedisConfig, redlock::RedisNodes, zk::ZkConfig};
use proptest::{prelude::*, sample::select};

/// The secret.
const SECRET: &str = "Xs3cr3tX";
/// What must not be seen of it, in whatever case: a part is too much.
const PART: &str = "xs3cr";

/// Where nobody listens.
const NOWHERE: &str = "127.0.0.1:1";

/// What a URL is made of.
#[derive(Clone, Debug)]
struct Pieces {
    scheme: String,
    separator: &'static str,
    login: String,
    hosts: String,
    path: &'static str,
    options: String,
}

impl Pieces {
    fn url(&self) -> String {
        let Self { scheme, separator, login, hosts, path, options } = self;
        let at = if login.is_empty() { "" } else { "@" };
        format!("{scheme}{separator}{login}{at}{hosts}{path}{options}")
    }
}

fn scheme() -> impl Strategy<Value = String> {
    let known = select(vec![
        "redis",
        "rediss",
        "valkey",
        "valkeys",
        "redis+sentinel",
        "valkey+cluster",
        "redlock",
        "redlocks",
        "mysql",
        "mariadb",
        "zk",
        "zks",
    ]);
    let odd =
        select(vec!["", "Redis", "MYSQL", "rdis", "http", "memory", " redis", "redis+x", SECRET, "redis+Xs3cr3tX"]);
    prop_oneof![6 => known, 1 => odd].prop_map(str::to_owned)
}

/// A password that was not percent-encoded, though it should have been.
fn password() -> impl Strategy<Value = (String, bool)> {
    let odd = vec![
        "",
        "?",
        "#",
        "/",
        "@",
        ":",
        "[",
        "]",
        " ",
        "%",
        "&",
        "=",
        "+",
        "\\",
        "//",
        "?x=",
        "?timeout=",
        "%zz",
        "%2F",
    ];
    (select(vec!["", "12", "pa", "12345"]), select(odd), select(vec!["", "]", "?", "y"])).prop_map(
        |(before, odd, after)| {
            // Cut off behind one of these, it is a URL like any other, whose path or host happens to be a password.
            let may_be_cut = !matches!(odd, "/" | "@" | "//" | "\\");
            (format!("{before}{odd}{SECRET}{after}"), may_be_cut)
        },
    )
}

fn login() -> impl Strategy<Value = (String, bool)> {
    prop_oneof![
        8 => (select(vec!["app:", ":", "a%40b:"]), password()).prop_map(|(user, (word, cut))| (user.to_owned() + &word, cut)),
        1 => Just((SECRET.to_owned(), false)),
        1 => Just((format!("{SECRET}:"), false)),
        1 => Just((String::new(), false)),
    ]
}

fn options() -> impl Strategy<Value = String> {
    let value_of = select(vec![
        "timeout",
        "password_env",
        "password_file",
        "ca",
        "cert",
        "key",
        "replicas",
        "replica_timeout",
        "max_ttl",
        "failover_pause",
        "sentinel_user",
        "sentinel_password",
        "sentinel_password_env",
        "sentinel_password_file",
        "node_timeout",
        "durable",
        "delayed_restart",
        "connections",
        "create",
        "tls",
        "session",
        "auth",
        "pasword",
        "PREFIX",
        "",
        SECRET,
    ]);
    let value =
        select(vec![SECRET, "Xs3cr3tX@a", "digest:me:Xs3cr3tX", "digest:me:p&Xs3cr3tX", "a%zzXs3cr3tX", "{Xs3cr3tX}"]);
    prop_oneof![
        4 => Just(String::new()),
        4 => (value_of.clone(), value.clone()).prop_map(|(name, value)| format!("?{name}={value}")),
        2 => (value_of, value).prop_map(|(name, value)| format!("?{name}={value}&{name}={value}")),
        1 => select(vec!["?Xs3cr3tX", "?Xs3cr3tX&Xs3cr3tX", "?timeout=1s?Xs3cr3tX", "#Xs3cr3tX", "?prefix={Xs3cr3tX"])
            .prop_map(str::to_owned),
    ]
}

fn url() -> impl Strategy<Value = String> {
    let separator = prop_oneof![8 => Just("://"), 1 => select(vec![":", ":/", "", "//", ":///"])];
    let hosts = select(vec![NOWHERE, "127.0.0.1:1,127.0.0.1:1,[::1]:1", "h:Xs3cr3tX", "[Xs3cr3tX", "", "a b", "h:"]);
    let path = select(vec!["", "/", "/0", "/db", "/a/1", "/../x"]);
    let pieces = (scheme(), separator, login(), hosts, path, options()).prop_map(
        |(scheme, separator, login, hosts, path, options)| {
            (Pieces { scheme, separator, login: login.0, hosts: hosts.to_owned(), path, options }, login.1)
        },
    );
    (pieces, any::<bool>(), any::<prop::sample::Index>()).prop_map(|((pieces, may_be_cut), cut, at)| {
        let mut url = pieces.url();
        if cut && may_be_cut {
            url = url.chars().take(at.index(url.chars().count() + 1)).collect();
        }
        url
    })
}

/// All that an error says, and its causes.
fn told(error: &(dyn Error + 'static)) -> String {
    let mut text = format!("{error}\n{error:?}\n{error:#?}\n");
    let mut cause = error.source();
    while let Some(next) = cause {
        _ = writeln!(text, "{next}\n{next:?}");
        cause = next.source();
    }
    text
}

fn made<T: std::fmt::Debug>(outcome: lockkit::Result<T>) -> String {
    match outcome {
        Ok(made) => format!("{made:?}"),
        Err(error) => told(&error),
    }
}

fn check(url: &str, said: &str) -> Result<(), TestCaseError> {
    prop_assert!(!said.to_lowercase().contains(PART), "{url:?}: {said}");
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn no_configuration_tells_a_secret(url in url()) {
        check(&url, &made(RedisConfig::from_url(&url)))?;
        check(&url, &made(RedisNodes::from_url(&url)))?;
        check(&url, &made(MySqlConfig::from_url(&url)))?;
        check(&url, &made(ZkConfig::from_url(&url)))?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 512, ..ProptestConfig::default() })]

    /// Also when the URL is understood, and nobody answers.
    #[test]
    fn no_connection_tells_a_secret(url in url()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        let (opened, findings) = runtime.block_on(async { (lockkit::open(&url).await, lockkit::diagnose(&url).await) });
        check(&url, &made(opened))?;
        check(&url, &made(findings))?;
    }
}

/// The cases that were seen, each with what the user gets to know.
#[tokio::test]
async fn what_is_wrong_is_said_all_the_same() {
    for (url, hint) in [
        ("redlock://app:pa?Xs3cr3tX@a,b", "%3F"),
        ("redis://app:12?Xs3cr3tX@a", "%3F"),
        ("mysql://app:12?Xs3cr3tX@a/d", "%3F"),
        ("mysql://app:12/Xs3cr3tX@a/d", "%2F"),
        ("redis://app:12/Xs3cr3tX@a", "%2F"),
        ("mysql://app:12#Xs3cr3tX@a/d", "%23"),
        ("zk://me:12/Xs3cr3tX@a", "%2F"),
        ("Xs3cr3tX@host", "redis://"),
        ("Xs3cr3tX@host:6379", "redis://"),
        ("redis:Xs3cr3tX@host", "redis://"),
        ("redis://h?pasword=Xs3cr3tX", "password_env"),
        ("redis://h?timeout=Xs3cr3tX", "timeout"),
        ("redis://app@h?password_env=Xs3cr3tX", "password_env"),
        ("redis://app@h?password_file=Xs3cr3tX", "password_file"),
    ] {
        let said = told(&lockkit::open(url).await.expect_err(url));
        assert!(!said.to_lowercase().contains(PART), "{url}: {said}");
        assert!(said.contains(hint), "{url}: {said}");
    }
    drop(lockkit::open("redlock://a").await.expect_err("one node"));
}

#[tokio::test]
async fn schemes_are_understood_in_any_case_and_hours_are_times() {
    for url in ["REDIS://127.0.0.1:1", "Valkey+Sentinel://127.0.0.1:1/p", "MySQL://127.0.0.1:1/d", "ZK://127.0.0.1:1"] {
        let error = lockkit::open(url).await.expect_err("nobody listens there");
        assert_eq!(error.kind(), lockkit::ErrorKind::Unavailable, "{url}: {error}");
    }
    assert!(lockkit::open("Memory:").await.is_ok());
    RedisConfig::from_url("REDIS://h?max_ttl=250ms&timeout=1m").expect("a URL");
    MySqlConfig::from_url("MariaDB://h/d?timeout=1h").expect("a URL");
    ZkConfig::from_url("Zk://h?session=1h").expect("a URL");
    let error = RedisConfig::from_url("redis://h?timeout=1h").expect_err("an hour is too long for Redis");
    assert!(error.message().contains("5 minutes"), "{error}");
}
