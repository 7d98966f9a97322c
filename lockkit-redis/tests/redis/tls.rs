//! TLS, with an authority made for the occasion (by the program `openssl`): a single server, and those that can take over
//! from each other.

use std::{path::Path, sync::Arc, time::Duration};

use lockkit_core::{Effect, ErrorKind, LockStore, Query, Release};
use lockkit_redis::RedisStore;
use lockkit_testkit::servers::{Authority, RedisCluster, RedisOptions, RedisSentinels, RedisServer};

use crate::{failover, support::*};

fn authority() -> Authority {
    let authority = Authority::new().expect("an authority");
    ["server", "client"].iter().for_each(|name| authority.sign(name).expect("sign"));
    authority
}

fn options() -> RedisOptions {
    RedisOptions::default().flavor(flavor())
}

/// What a URL takes to trust the authority.
fn trusting(authority: &Authority) -> String {
    format!("ca={}", path(&authority.file("ca.crt")))
}

/// The same, and to prove who one is.
fn proving(authority: &Authority) -> String {
    let [certificate, key] = ["client.crt", "client.key"].map(|name| authority.file(name));
    format!("{}&cert={}&key={}", trusting(authority), path(&certificate), path(&key))
}

fn path(path: &Path) -> &str {
    path.to_str().expect("path")
}

async fn refused(url: &str) -> lockkit_core::Error {
    let error = RedisStore::from_url(url).await.expect_err("refused");
    assert_eq!((error.effect(), error.to_string().lines().count()), (Effect::None, 1), "{error}");
    error
}

#[tokio::test]
async fn only_a_trusted_server_is_talked_to() {
    let authority = authority();
    let server = RedisServer::start(options().tls(&authority)).await.expect("a server");
    let (port, trusting) = (server.port(), trusting(&authority));
    for host in ["127.0.0.1", "localhost"] {
        let store = RedisStore::from_url(&format!("rediss://{host}:{port}?{trusting}")).await.expect("connect");
        hold(&store, &claim(host)).await;
    }
    let error = refused(&server.url()).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    let error = refused(&format!("{}?{trusting}.no", server.url())).await;
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    assert!(error.message().contains("that ca names"), "{error}");
}

#[tokio::test]
async fn a_client_proves_who_it_is() {
    let (authority, stranger) = (authority(), authority());
    let server = RedisServer::start(options().mutual_tls(&authority)).await.expect("a server");
    let store = RedisStore::from_url(&format!("{}?{}", server.url(), proving(&authority))).await.expect("connect");
    hold(&store, &claim("a")).await;
    strangers_are_refused(&server.url(), &authority, &stranger).await;
    // Mistakes in the files are named by the option.
    let files = |authority: &Authority| ["client.crt", "client.key"].map(|name| authority.file(name));
    let ([certificate, key], [_, their_key]) = (files(&authority), files(&stranger));
    for (cert, key, hint) in [
        (&certificate, &certificate, "that key names"),
        (&key, &key, "that cert names"),
        (&certificate, &their_key, "key"),
    ] {
        let (cert, key) = (path(cert), path(key));
        let error = refused(&format!("{}?{}&cert={cert}&key={key}", server.url(), trusting(&authority))).await;
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(error.message().to_lowercase().contains(hint), "{error}");
        assert!(!format!("{error:?}").contains("PRIVATE KEY"));
    }
}

/// Servers that demand a certificate are not reached without one, nor with that of a stranger; and who trusts a stranger
/// alone talks to none of them.
async fn strangers_are_refused(url: &str, authority: &Authority, stranger: &Authority) {
    let trusting_them = proving(authority).replace(&trusting(authority), &trusting(stranger));
    let proving_theirs = proving(stranger).replace(&trusting(stranger), &trusting(authority));
    for (what, options) in [
        ("no certificate", trusting(authority)),
        ("that of a stranger", proving_theirs),
        ("another authority", trusting_them),
    ] {
        let error = refused(&format!("{url}?{options}")).await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{what}: {error}");
    }
}

/// The life of a few locks, and a waiter that is woken.
async fn locks_go_round(url: &str, names: &[&str]) {
    let connect = async || RedisStore::from_url(&format!("{url}&failover_pause=no")).await.expect("connect");
    let (store, other) = (connect().await, Arc::new(connect().await));
    for name in names {
        let mine = claim(name);
        let first = hold(&store, &mine).await;
        assert_eq!(held(renew(&store, &renewal(&mine)).await).fence, first.fence);
        let (waiter, wanted) = (Arc::clone(&other), request(&claim(name), TTL));
        let waiting = tokio::spawn(async move { waiter.acquire(&wanted).await });
        until_one_waits(&store, &mine).await;
        let start = std::time::Instant::now();
        assert_eq!(store.release(&mine).await.expect("release"), Release::Released { waiters: Some(1) });
        let next = granted(waiting.await.expect("task").expect("acquire"));
        assert!(start.elapsed() < Duration::from_secs(1), "woken, not by chance");
        assert!(next.fence > first.fence);
    }
    assert_eq!(store.inspect(&Query::Prefix(String::new())).await.expect("inspect").len(), names.len());
}

#[tokio::test]
async fn sentinels_lead_to_their_primary() {
    let (authority, stranger) = (authority(), authority());
    let all = RedisSentinels::start_with(options().mutual_tls(&authority), flavor()).await.expect("servers");
    assert!(all.url().starts_with("rediss+sentinel://"));
    locks_go_round(&format!("{}?{}", all.url(), proving(&authority)), &["a"]).await;
    strangers_are_refused(&all.url(), &authority, &stranger).await;
    let plain = refused(&format!("{}?timeout=500ms", all.url().replace("rediss", "redis"))).await;
    assert!(plain.is_retryable(), "{plain}");
}

#[tokio::test]
async fn a_cluster_is_found_by_any_member() {
    let (authority, stranger) = (authority(), authority());
    let all = RedisCluster::start_with(options().mutual_tls(&authority), false).await.expect("servers");
    let url = format!("rediss+cluster://{}", all.members()[1].addr());
    let names = ["lock {0}", "lock {1}", "lock {2}", "lock {3}", "lock {4}", "lock {5}", "lock {6}", "lock {7}"];
    locks_go_round(&format!("{url}?{}", proving(&authority)), &names).await;
    for member in all.members() {
        let keys = member.command(&["DBSIZE"]).await.expect("DBSIZE");
        assert_ne!(keys, "1", "each member has some, beside its note");
    }
    strangers_are_refused(&all.url(), &authority, &stranger).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_fail_over() {
    let authority = authority();
    let all = RedisSentinels::start_with(options().mutual_tls(&authority), flavor()).await.expect("servers");
    let url = format!("{}?{}", all.url(), proving(&authority));
    let fail = async || all.servers()[0].kill().await.expect("kill");
    failover::a_guard_is_lost_and_the_waiter_goes_on(&url, fail).await;
    all.until_primary(1).await.expect("takes over");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_fails_over() {
    let authority = authority();
    let all = RedisCluster::start_with(options().mutual_tls(&authority), true).await.expect("servers");
    let index = all.primary_of("lockkit:a").await.expect("primary");
    let url = format!("{}?{}", all.url(), proving(&authority));
    let fail = async || all.members()[index].kill().await.expect("kill");
    failover::a_guard_is_lost_and_the_waiter_goes_on(&url, fail).await;
    all.until_primary(index + 3).await.expect("takes over");
}
