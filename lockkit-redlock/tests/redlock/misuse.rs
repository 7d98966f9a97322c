//! What can't work is refused with one line.

use std::{sync::Arc, time::Duration};

use lockkit::redlock::RedisNodes;
use lockkit_core::{ErrorKind, Liveness, LockStore, Locker, MemoryStore, Resume, StoreInfo, store::identity};
use lockkit_redis::RedisConfig;
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_testkit::Altered;

use crate::support::{Cluster, claim, eventually_within, memories, request};

fn refused(nodes: Vec<Node>, config: RedlockConfig, hint: &str) {
    let error = RedlockStore::new(nodes, config).expect_err(hint);
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.message().contains(hint) && error.to_string().lines().count() == 1, "{error}");
}

fn nodes(count: usize) -> Vec<Node> {
    memories(count).into_iter().map(|store| Node::new(Arc::new(store))).collect()
}

#[test]
fn fewer_than_three_or_the_same_twice() {
    refused(nodes(2), RedlockConfig::new(), "three");
    let same: Arc<dyn LockStore> = Arc::new(MemoryStore::new());
    let twice = vec![Node::new(Arc::clone(&same)), Node::new(Arc::new(MemoryStore::new())), Node::new(same)];
    refused(twice, RedlockConfig::new(), "twice");
}

#[test]
fn a_node_timeout_that_no_ttl_survives() {
    for timeout in [Duration::from_secs(100), Duration::MAX] {
        refused(nodes(3), RedlockConfig::new().node_timeout(timeout), "node timeout");
    }
}

#[test]
fn an_even_number_is_a_warning() {
    let store = RedlockStore::new(nodes(4), RedlockConfig::new()).expect("it works");
    assert!(store.warnings()[0].contains("odd"), "{:?}", store.warnings());
    assert!(RedlockStore::new(nodes(5), RedlockConfig::new()).expect("it works").warnings().is_empty());
}

/// A lease lasts as long as sessions do where others can't have a majority before they end. And where any node ends leases with
/// the session, none can be taken up: a grant may rest on a bare majority with that node in it, and ends with its client.
#[tokio::test]
async fn where_one_node_has_sessions_no_lease_outlives_its_client() {
    let quorum = |sessions: &[u64], by_time: usize| {
        let with_session = |seconds: &u64| {
            let by_session = |info: &mut StoreInfo| {
                info.capability.liveness = Liveness { ttl: None, session: Some(Duration::from_secs(*seconds)) };
                info.capability.resume = Resume::WhileSession;
            };
            Node::new(Arc::new(Altered::with_info(MemoryStore::new(), by_session)))
        };
        let nodes = sessions.iter().map(with_session).chain(nodes(by_time)).collect();
        RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum")
    };
    let session = |store: &RedlockStore| store.info().capability.liveness.session.map(|session| session.as_secs());
    assert_eq!(session(&quorum(&[9], 2)), None, "two others are a majority");
    assert_eq!(session(&quorum(&[30, 9], 1)), Some(9), "when one has ended, two are free");
    assert_eq!(session(&quorum(&[9, 30, 20], 0)), Some(20));
    assert_eq!(session(&quorum(&[9, 30], 3)), None);
    assert_eq!(session(&quorum(&[30, 9, 20], 2)), Some(9));
    for (store, can_be_taken_up) in [(quorum(&[], 3), true), (quorum(&[9], 2), false), (quorum(&[30, 9], 1), false)] {
        assert!(store.info().capability.liveness.ttl.is_some());
        let guard = Locker::new(store).lock("a").acquire().await.expect("free");
        let detached = guard.detach().map_err(|error| error.kind());
        assert_eq!(detached.is_ok(), can_be_taken_up);
        assert!(can_be_taken_up || detached == Err(ErrorKind::Unsupported));
    }
}

#[tokio::test]
async fn a_ttl_too_short_for_the_node_timeout() {
    let config = RedlockConfig::new().node_timeout(Duration::from_secs(1));
    let store = RedlockStore::new(nodes(3), config).expect("a quorum");
    let mut short = request(&claim("a"));
    short.ttl = Duration::from_secs(3);
    let error = store.acquire(&short).await.expect_err("four timeouts are more than the ttl");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.message().contains("the ttl must lie between 4"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_server_under_two_addresses() {
    let cluster = Cluster::start(2).await;
    let mut addresses: Vec<_> = cluster.servers.iter().map(|server| server.addr()).collect();
    addresses.push(cluster.proxies[0].addr());
    let node = |at: &std::net::SocketAddr| RedisConfig::new(at.ip().to_string(), at.port());
    let error = RedisNodes::new(addresses.iter().map(node).collect()).connect().await.expect_err("one is there twice");
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(error.message().contains("same server"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_is_no_node_and_a_replica_of_a_node_is_a_warning() {
    let cluster = Cluster::start(4).await;
    let port = cluster.servers[0].port().to_string();
    cluster.servers[3].command(&["REPLICAOF", "127.0.0.1", &port]).await.expect("REPLICAOF");
    let node = |index: usize| {
        let at = cluster.servers[index].addr();
        RedisConfig::new(at.ip().to_string(), at.port())
    };
    let error = RedisNodes::new([1, 2, 3].map(node).to_vec()).connect().await.expect_err("a replica");
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.message().contains("replica"), "{error}");
    let warned = async || {
        let store = RedisNodes::new([0, 1, 2].map(node).to_vec()).connect().await.expect("connect");
        store.warnings().iter().any(|warning| warning.contains("replicas are attached"))
    };
    eventually_within(Duration::from_secs(10), "the replica is attached", warned).await;
}

#[tokio::test]
async fn nobody_there_is_unavailable_for_each_node() {
    let nowhere = (1..=3).map(|port| RedisConfig::new("127.0.0.1", port)).collect();
    let error = RedisNodes::new(nowhere).connect().await.expect_err("nobody is there");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.message().contains("127.0.0.1:2"), "{error}");
}

/// A quorum is its nodes, in whatever order somebody names them.
#[tokio::test]
async fn a_quorum_is_known_by_its_nodes() {
    let memories = memories(4);
    let known = async |nodes: &[usize]| {
        let nodes = nodes.iter().map(|node| Node::new(Arc::new(memories[*node].clone()))).collect();
        identity(&RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum")).await.expect("identity")
    };
    let first = known(&[0, 1, 2]).await;
    assert_eq!(known(&[2, 0, 1]).await, first);
    assert_ne!(known(&[0, 1, 3]).await, first);
    assert_ne!(identity(&memories[0]).await.expect("identity"), first);

    let cluster = Cluster::start(3).await;
    let store = cluster.client().await;
    assert_eq!(identity(&store).await.expect("identity"), identity(&cluster.observer().await).await.expect("identity"));
    cluster.servers[1].kill().await.expect("kill");
    assert_eq!(identity(&store).await.expect_err("one is away").kind(), ErrorKind::Unavailable);
}
