//! A node that restarts without its data inside a lease, with delayed restart and without.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Clock, ErrorKind, Fencing, LockStore, Release, Renewal, Renewed, SystemClock,
};
use lockkit_redlock::{Node, RedlockConfig, RedlockStore, RestartPolicy};
use lockkit_testkit::servers::{Keep, Persistence, RedisOptions, RedisServer, hosts};

use crate::support::{
    Cluster, NODE_TIMEOUT, TTL, attempt, claim, contended, hold, hold_soon, is_held, memories, request,
};

/// The first client holds three of five nodes. One of them restarts empty, and a second client asks.
async fn amnesia(cluster: &Cluster) -> lockkit_core::Claim {
    for proxy in &cluster.proxies[3..] {
        proxy.refuse(true);
        proxy.cut().await;
    }
    let first = cluster.client().await;
    let mine = claim("a");
    hold(&first, &mine).await;
    cluster.until_held_at("a", 3).await;
    for proxy in &cluster.proxies[3..] {
        proxy.heal();
    }
    cluster.servers[2].kill().await.expect("kill");
    cluster.servers[2].restart(Keep::Nothing).await.expect("restart");
    assert_eq!(cluster.held_at("a").await, 2);
    assert!(first.nodes().len() == 5);
    mine
}

#[tokio::test(flavor = "multi_thread")]
async fn without_delayed_restart_a_second_client_gets_in() {
    let cluster = Cluster::start(5).await;
    amnesia(&cluster).await;
    // This is the hole that the safeguard closes: two clients hold the lock now.
    let second = cluster.client().await;
    hold(&second, &claim("a")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_delayed_restart_it_is_refused_until_the_longest_ttl_is_over() {
    let cluster = Cluster::start(5).await;
    // The servers are new too, so they have to be older than the longest ttl first.
    let longest = TTL;
    tokio::time::sleep(longest + Duration::from_secs(2)).await;
    amnesia(&cluster).await;
    let nodes = cluster.nodes().config(RedlockConfig::new().node_timeout(NODE_TIMEOUT).max_ttl(longest));
    let second = nodes.connect().await.expect("connect");
    assert_eq!(second.info().capability.fencing, Fencing::BestEffort);
    assert!(second.warnings().iter().any(|warning| warning.contains("votes in")), "{:?}", second.warnings());
    let theirs = claim("a");
    match attempt(&second, &theirs).await {
        Ok(Attempt::Contended(_)) => {}
        other => panic!("two of five nodes were free and one must not vote: {other:?}"),
    }
    tokio::time::sleep(longest + Duration::from_secs(2)).await;
    hold(&second, &claim("a")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn new_nodes_do_not_vote_and_say_why() {
    let cluster = Cluster::start(3).await;
    let store = cluster.nodes().connect().await.expect("a majority answers, though it does not vote yet");
    assert_eq!(store.warnings().len(), 3, "{:?}", store.warnings());
    let error = attempt(&store, &claim("a")).await.expect_err("nobody votes");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.message().contains("votes again in 5m") || error.message().contains("votes"), "{error}");
}

/// What a server says of its uptime is the difference of two truncated seconds: one that says 1 may have been up for no time.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_of_uptime_may_be_none() {
    let cluster = Cluster::start(3).await;
    let (server, name) = (&cluster.servers[0], cluster.proxies[0].addr().to_string());
    let config = RedlockConfig::new().max_ttl(Duration::from_millis(950));
    let says = async |uptime: &str| {
        let info = server.command(&["INFO", "server"]).await.expect("INFO");
        info.contains(&format!("uptime_in_seconds:{uptime}\r"))
    };
    for _ in 0..8 {
        server.kill().await.expect("kill");
        server.restart(Keep::Nothing).await.expect("restart");
        while says("0").await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        let store = cluster.nodes().config(config.clone()).connect().await.expect("connect");
        if says("1").await {
            let refused = |warning: &String| warning.contains(&name) && warning.contains("votes in 1s");
            assert!(store.warnings().iter().any(refused), "{:?}", store.warnings());
            return;
        }
    }
    panic!("connecting takes a second each time");
}

#[tokio::test(flavor = "multi_thread")]
async fn durable_nodes_vote_at_once_and_keep_leases_and_fences() {
    let options = RedisOptions::default().persistence(Persistence::AppendAlways);
    let servers = RedisServer::start_many(3, options).await.expect("servers");
    let hosts = hosts(&servers);
    // Nobody knows of a run before this one. The first client waits until all leases of it must have lapsed.
    let (young, url) = (format!("redlock://{hosts}?max_ttl=2s"), format!("redlock://{hosts}?max_ttl=1m"));
    let first = lockkit::open(&young).await.expect("connect");
    assert_eq!(first.info().warnings.len(), 3, "{:?}", first.info().warnings);
    tokio::time::sleep(Duration::from_secs(4)).await;
    let (store, other) = (lockkit::open(&young).await.expect("connect"), lockkit::open(&young).await.expect("connect"));
    assert_eq!(store.info().capability.fencing, Fencing::Strict);
    assert!(store.info().warnings.is_empty(), "{:?}", store.info().warnings);
    let mine = claim("a");
    let ttl = Duration::from_secs(2);
    let asked = AcquireRequest { ttl, ..request(&mine) };
    let Attempt::Granted(before) = store.acquire(&asked).await.expect("acquire") else { panic!("it is free") };
    for server in &servers {
        server.kill().await.expect("kill");
        server.restart(Keep::Data).await.expect("restart");
    }
    // They know its former run.
    let theirs = AcquireRequest { ttl, ..request(&claim("a")) };
    assert!(matches!(other.acquire(&theirs).await, Ok(Attempt::Contended(_))));
    // The connections of the holder are gone, so its first renewal may fail.
    while !is_held_or_retry(&*store, &mine, ttl).await {}
    assert!(matches!(store.release(&mine).await, Ok(Release::Released { .. })));
    let theirs = AcquireRequest { ttl, ..request(&claim("a")) };
    let Attempt::Granted(after) = other.acquire(&theirs).await.expect("acquire") else { panic!("it is free") };
    assert!(after.fence > before.fence);
    // For one that does not, unless it is told.
    let new = lockkit::open(&url).await.expect("connect");
    assert_eq!(new.info().warnings.len(), 3, "{:?}", new.info().warnings);
    let told = lockkit::open(&format!("{url}&durable=yes")).await.expect("connect");
    assert!(told.info().warnings.is_empty(), "{:?}", told.info().warnings);
    contended(&*told, &claim("a")).await;
}

/// A log that was switched on after the last start, or whose directory is a new one, says nothing of what was answered before.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_becomes_durable_is_one_that_may_have_lost_leases() {
    let cluster = Cluster::start(5).await;
    tokio::time::sleep(TTL + Duration::from_secs(2)).await;
    let config = RedlockConfig::new().node_timeout(NODE_TIMEOUT).max_ttl(TTL);
    let client = async || cluster.nodes().config(config.clone()).connect().await.expect("connect");
    let before = client().await;
    amnesia(&cluster).await;
    for setting in [["appendfsync", "always"], ["appendonly", "yes"]] {
        cluster.servers[2].command(&["CONFIG", "SET", setting[0], setting[1]]).await.expect("CONFIG SET");
    }
    for other in [before, client().await] {
        for _ in 0..3 {
            let attempt = attempt(&other, &claim("a")).await;
            assert!(!matches!(attempt, Ok(Attempt::Granted(_))), "another has three of five: {attempt:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_does_not_tell_its_age_is_refused_where_that_matters() {
    let cluster = Cluster::start(3).await;
    for server in &cluster.servers {
        let user = ["ACL", "SETUSER", "default", "-info"];
        server.command(&user).await.expect("ACL");
    }
    let refused = cluster.nodes().connect().await.expect_err("they would never vote");
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    let store = cluster.nodes().delayed_restart(false).connect().await.expect("it does not matter");
    assert!(store.warnings().iter().any(|warning| warning.contains("INFO")), "{:?}", store.warnings());
}

async fn is_held_or_retry(store: &dyn LockStore, mine: &lockkit_core::Claim, ttl: Duration) -> bool {
    let renewed = store.renew(&[Renewal::new(mine.clone(), ttl)]).await.remove(0);
    assert!(!matches!(renewed, Ok(Renewed::Lost(_))), "{renewed:?}");
    renewed.is_ok()
}

#[tokio::test]
async fn a_restart_policy_takes_the_vote_of_any_store() {
    let (stores, policy) = (memories(3), RestartPolicy::new());
    let nodes = || {
        let plain = stores[..2].iter().map(|store| Node::new(Arc::new(store.clone())));
        plain.chain([Node::new(Arc::new(stores[2].clone())).restart_policy(policy.clone())]).collect()
    };
    let (first, second) = (
        RedlockStore::new(nodes(), RedlockConfig::new()).expect("a quorum"),
        RedlockStore::new(nodes(), RedlockConfig::new()).expect("a quorum"),
    );
    let mine = claim("a");
    hold(&first, &mine).await;
    stores[0].forget_all();
    stores[2].forget_all();
    policy.no_vote_before(SystemClock.now() + Duration::from_secs(60));
    assert!(attempt(&second, &claim("a")).await.is_ok_and(|attempt| !matches!(attempt, Attempt::Granted(_))));
    policy.no_vote_before(SystemClock.now());
    hold_soon(&second, &claim("a")).await;
    assert!(!is_held(&first, &mine).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_quorum_can_do_is_known_without_a_server() {
    let store = Cluster::start(3).await.nodes().config(RedlockConfig::new()).connect().await.expect("connect");
    assert_eq!(store.info().capability, RedlockStore::CAPABILITY);
}
