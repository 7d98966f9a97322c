//! Nodes that miss a release, and what is left to do when a lease is lost at some of them.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Error, ErrorKind, LockStore, Locker, MemoryStore, Outcome, Query,
    Release, Renewed, Result, store::unpoisoned,
};
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_testkit::{Alter, Altered};
use tokio::{
    runtime::Handle,
    sync::{Notify, Semaphore},
};

use crate::support::{
    Cluster, Late, TTL, claim, eventually_within, free, hold, memories, quorum, renew, request, until_held_at,
};

/// Of the nodes at which the lock `a` is held, its waiters prefer this one, of five.
const FIRST: usize = 2;

/// A lease that nothing but a release ends within a test.
const LONG: Duration = Duration::from_secs(60);

async fn hold_long(store: &dyn LockStore, claim: &Claim) {
    let asked = store.acquire(&AcquireRequest { ttl: LONG, ..request(claim) }).await.expect("acquire");
    assert!(matches!(asked, Attempt::Granted(_)), "{asked:?}");
}

impl Cluster {
    /// Waits until somebody waits for a lock at this node.
    async fn until_waited_for_at(&self, node: usize) {
        eventually_within(Duration::from_secs(8), "somebody waits", async || {
            !self.servers[node].command(&["PUBSUB", "CHANNELS"]).await.expect("PUBSUB").trim().is_empty()
        })
        .await;
    }

    /// Waits until the lock is free at this node, and says how long that took.
    async fn until_free_at(&self, name: &str, node: usize) -> Duration {
        let (start, key) = (Instant::now(), format!("lockkit:{name}"));
        eventually_within(LONG / 6, &format!("free at node {node}"), async || {
            self.servers[node].command(&["EXISTS", &key]).await.expect("EXISTS") == "0"
        })
        .await;
        start.elapsed()
    }

    /// Ends the connections through a proxy; new ones are refused until it is healed.
    async fn disconnect(&self, node: usize) {
        self.proxies[node].refuse(true);
        self.proxies[node].cut().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_off_does_not_wait_for_the_lease_at_a_node_that_missed_the_release() {
    let cluster = Cluster::start(5).await;
    let (store, waiter) = (cluster.client().await, Locker::new(cluster.observer().await));
    let mut slowest = Duration::ZERO;
    for _ in 0..3 {
        let mine = claim("a");
        hold(&store, &mine).await;
        cluster.until_held_at("a", 5).await;
        let waiting = {
            let waiter = waiter.clone();
            tokio::spawn(async move { waiter.lock("a").ttl(TTL).acquire().await })
        };
        cluster.until_waited_for_at(FIRST).await;
        // Only the release falls into the time without a connection.
        cluster.disconnect(FIRST).await;
        free(&store, &mine).await;
        cluster.proxies[FIRST].heal();
        let start = Instant::now();
        let guard = waiting.await.expect("task").expect("acquire");
        slowest = slowest.max(start.elapsed());
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
        cluster.until_held_at("a", 0).await;
    }
    // Without it the waiter asks the other nodes after the second for which it waits at this one.
    assert!(slowest < Duration::from_millis(400), "{slowest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_missed_releases_is_released_when_it_is_back() {
    let cluster = Cluster::start(5).await;
    let store = cluster.client().await;
    let claims: Vec<_> = (0..200).map(|number| claim(&format!("a{number}"))).collect();
    for mine in &claims {
        hold_long(&store, mine).await;
    }
    cluster.until_held_at("a199", 5).await;
    cluster.disconnect(1).await;
    let tasks = Handle::current().metrics().num_alive_tasks();
    for mine in &claims {
        free(&store, mine).await;
    }
    // Long enough for pauses between its tries to have grown.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let more = Handle::current().metrics().num_alive_tasks().saturating_sub(tasks);
    assert!(more < 100, "200 releases that failed left {more} tasks");
    assert_eq!(cluster.held_at("a0").await, 1);
    cluster.proxies[1].heal();
    for number in 0..claims.len() {
        cluster.until_free_at(&format!("a{number}"), 1).await;
    }
}

/// A black hole: requests are taken and never answered, until the connection is given up.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_a_node_never_answered_is_repeated() {
    let cluster = Cluster::start(3).await;
    let store = cluster.client().await;
    let mine = claim("a");
    hold_long(&store, &mine).await;
    cluster.until_held_at("a", 3).await;
    cluster.proxies[0].blackhole();
    free(&store, &mine).await;
    // With it goes the release that it holds back.
    cluster.disconnect(0).await;
    assert_eq!(cluster.held_at("a").await, 1, "the release never arrived");
    cluster.proxies[0].heal();
    cluster.until_free_at("a", 0).await;
}

/// Of five nodes one is a black hole. One of the others has to be healed for one lease. What is left of another, which is lost, keeps others
/// out until it is released, for its holder may not have heard yet.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_node_does_not_hold_up_what_is_done_at_the_others() {
    let cluster = Cluster::start(5).await;
    let store = Arc::new(cluster.client().await);
    let (lost, kept) = (claim("lost"), claim("kept"));
    for claim in [&lost, &kept] {
        hold_long(&*store, claim).await;
        cluster.until_held_at(claim.key.as_str(), 5).await;
    }
    for node in [1, 2, 3] {
        cluster.servers[node].command(&["DEL", "lockkit:lost"]).await.expect("DEL");
    }
    cluster.servers[1].command(&["DEL", "lockkit:kept"]).await.expect("DEL");
    cluster.proxies[0].blackhole();
    let renewal = |claim: &Claim| lockkit_core::Renewal::new(claim.clone(), LONG);
    let answers = store.renew(&[renewal(&lost), renewal(&kept)]).await;
    assert!(matches!(answers[..], [Ok(Renewed::Lost(_)), Ok(Renewed::Held(_))]), "{answers:?}");

    let start = Instant::now();
    cluster.until_held_at("kept", 5).await;
    assert_eq!(cluster.held_at("lost").await, 2, "the store gave it back by itself");
    assert!(matches!(store.release(&lost).await.expect("release"), Release::NotHeld(_)));
    cluster.until_free_at("lost", 4).await;
    assert!(start.elapsed() < Duration::from_secs(1), "after {:?}", start.elapsed());
    assert!(matches!(store.release(&kept).await.expect("release"), Release::Released { .. }));
    cluster.proxies[0].heal();
    for name in ["lost", "kept"] {
        cluster.until_free_at(name, 0).await;
    }
}

/// A node that answers the first request for a lease with an error, and carries it out behind the first release.
#[derive(Debug, Default)]
struct Overtaken {
    inner: MemoryStore,
    /// Whether it answers when the others have granted the lease.
    is_slow: bool,
    asked: Mutex<Option<AcquireRequest>>,
    told: Notify,
}

#[async_trait]
impl Alter for Overtaken {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        *unpoisoned(&self.asked) = Some(request.clone());
        if self.is_slow {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.told.notify_one();
        Err(Error::new(ErrorKind::Unavailable, "connection reset").unknown_effect())
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let released = self.inner.release(claim).await;
        let late = unpoisoned(&self.asked).take();
        if let Some(late) = late {
            assert!(matches!(self.inner.acquire(&late).await?, Attempt::Granted(_)));
        }
        released
    }
}

/// The request was on its way over a connection that was given up, and the release goes another way.
#[tokio::test]
async fn a_node_that_did_not_answer_may_grant_behind_the_release() {
    for is_slow in [false, true] {
        let overtaken = Arc::new(Altered(Overtaken { is_slow, ..Overtaken::default() }));
        let mut nodes: Vec<_> = memories(2).into_iter().map(|store| Node::new(Arc::new(store))).collect();
        nodes.push(Node::new(Arc::<Altered<Overtaken>>::clone(&overtaken)));
        let store = RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum");
        let mine = claim("a");
        hold_long(&store, &mine).await;
        overtaken.0.told.notified().await;
        // The store hears of that, before the release or after it.
        tokio::task::yield_now().await;
        free(&store, &mine).await;
        let name = Query::Keys(vec![mine.key.clone()]);
        // Whether it came late, and was released again.
        eventually_within(LONG / 6, "the node is free", async || {
            unpoisoned(&overtaken.0.asked).is_none()
                && overtaken.inspect(&name).await.expect("memory")[0].holders.is_empty()
        })
        .await;
    }
}

/// The nodes still have it, but what ended it may arrive in the next moment.
#[tokio::test]
async fn a_claim_that_is_over_is_not_renewed_by_the_word_of_its_nodes() {
    let nodes = memories(3).iter().map(Late::new).collect::<Vec<_>>();
    for node in &nodes {
        node.releases.forget_permits(Semaphore::MAX_PERMITS);
    }
    let nodes = nodes.into_iter().map(|node| Node::new(Arc::new(Altered(node)))).collect();
    let store = RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum");
    let mine = claim("a");
    hold_long(&store, &mine).await;
    let releasing = tokio::time::timeout(Duration::from_millis(10), store.release(&mine)).await;
    assert!(!matches!(releasing, Ok(Ok(_))), "{releasing:?}");
    let renewed = renew(&store, &mine).await.expect("an answer");
    assert!(matches!(renewed, Renewed::Lost(_)), "{renewed:?}");
}

/// A caller that is refused releases nothing.
#[tokio::test]
async fn what_is_left_of_a_lost_claim_that_is_asked_for_again_is_released() {
    let nodes = memories(3);
    let store = quorum(&nodes);
    let mine = claim("a");
    hold_long(&store, &mine).await;
    for node in &nodes {
        until_held_at(node, &mine).await;
    }
    for node in &nodes[..2] {
        free(node, &mine).await;
    }
    let again = store.acquire(&AcquireRequest { ttl: LONG, ..request(&mine) }).await.expect("an answer");
    assert!(matches!(again, Attempt::Contended(Contention { burnt: true, .. })), "{again:?}");
    let name = Query::Keys(vec![mine.key.clone()]);
    eventually_within(LONG / 6, "the node is free", async || {
        nodes[2].inspect(&name).await.expect("memory")[0].holders.is_empty()
    })
    .await;
}
