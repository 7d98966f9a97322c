//! Answers that come after the verdict, futures that are dropped, and votes that split.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, LockStore, Locker, LossReason, MemoryStore, Outcome, Query,
    Release, Result,
};
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_testkit::{
    Alter, Altered,
    faults::{Direction, Proxy},
};

use crate::support::{
    Cluster, Late, Silent, TTL, attempt, claim, contended, eventually_within, free, hold, hold_soon, is_held, memories,
    quorum, refused_to_wait, request,
};

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_grants_after_the_verdict_is_released() {
    let cluster = Cluster::start(5).await;
    let (mine, other) = (cluster.client().await, cluster.observer().await);
    let theirs = claim("a");
    hold(&other, &theirs).await;
    cluster.until_held_at("a", 5).await;
    // Two nodes are free, and answer only when the other three have refused.
    for node in [0, 1] {
        cluster.servers[node].command(&["DEL", "lockkit:a"]).await.expect("DEL");
        cluster.proxies[node].hold(Direction::ToServer);
    }
    let refused = contended(&mine, &claim("a")).await;
    assert_eq!(refused.holder.expect("a holder").as_str(), "test");
    assert_eq!(cluster.held_at("a").await, 3, "the late two have not granted yet");
    for node in [0, 1] {
        cluster.proxies[node].release(Direction::ToServer);
    }
    while mine.stats().late_grants_released < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    cluster.until_held_at("a", 3).await;
    free(&other, &theirs).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_that_is_dropped_leaves_nothing_even_where_it_arrives_later() {
    let cluster = Cluster::start(5).await;
    let store = cluster.client().await;
    hold(&store, &claim("warm")).await;
    for proxy in &cluster.proxies {
        proxy.hold(Direction::ToServer);
    }
    let mine = claim("a");
    drop(tokio::time::timeout(Duration::from_millis(10), attempt(&store, &mine)).await);
    // As the core does (rule R8). It goes the way of the acquisition, behind it.
    let (released, ()) = tokio::join!(store.release(&mine), async {
        tokio::time::sleep(Duration::from_millis(10)).await;
        cluster.proxies.iter().for_each(|proxy| proxy.heal());
    });
    assert!(matches!(released, Ok(Release::Released { .. })), "{released:?}");
    cluster.until_held_at("a", 0).await;
    hold(&store, &claim("a")).await;
}

/// A caller that breaks rule R2.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_whose_release_is_under_way_is_not_asked_for_again() {
    let cluster = Cluster::start(5).await;
    let (store, other) = (cluster.client().await, cluster.observer().await);
    let refused = async |mine: &Claim| {
        let error = attempt(&store, mine).await.expect_err("it is burnt");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::InvalidInput, Effect::None), "{error}");
    };
    // Refused, with the answer of one node still to come.
    let theirs = claim("a");
    hold(&other, &theirs).await;
    cluster.until_held_at("a", 5).await;
    cluster.proxies[0].blackhole();
    let mine = claim("a");
    assert!(contended(&store, &mine).await.burnt);
    refused(&mine).await;
    free(&other, &theirs).await;
    cluster.until_held_at("a", 0).await;
    refused(&mine).await;
    assert_eq!(cluster.held_at("a").await, 0);
    // Released, and not answered by one node.
    let mine = claim("a");
    hold(&store, &mine).await;
    let (released, ()) = tokio::join!(store.release(&mine), refused(&mine));
    assert!(matches!(released, Ok(Release::Released { .. })), "{released:?}");
    refused(&mine).await;
    // When all have answered nothing is left that could arrive late.
    cluster.proxies[0].heal();
    eventually_within(TTL * 2, "it is burnt no more", async || attempt(&store, &mine).await.is_ok()).await;
    assert!(is_held(&store, &mine).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_failed_can_be_repeated() {
    is_released_again(async |store, mine| {
        store.release(mine).await.expect_err("one of three is no majority");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_release_that_was_dropped_can_be_repeated() {
    is_released_again(async |store, mine| {
        let dropped = tokio::time::timeout(Duration::from_millis(20), store.release(mine)).await;
        assert!(dropped.is_err(), "one of three is no majority");
    })
    .await;
}

/// Releases a claim: first as told, while two of three nodes are out of reach.
async fn is_released_again(first: impl AsyncFnOnce(&RedlockStore, &Claim)) {
    let cluster = Cluster::start(3).await;
    let store = cluster.client().await;
    let mine = claim("a");
    hold(&store, &mine).await;
    cluster.until_held_at("a", 3).await;
    cluster.proxies[..2].iter().for_each(|proxy| proxy.hold(Direction::ToServer));
    first(&store, &mine).await;
    cluster.until_held_at("a", 2).await;
    // With all that is held back.
    for proxy in &cluster.proxies[..2] {
        proxy.cut().await;
    }
    // Before anything gets through again: what failed there is repeated soon.
    assert_eq!(cluster.held_at("a").await, 2, "the release never arrived");
    cluster.proxies[..2].iter().for_each(Proxy::heal);
    let released = store.release(&mine).await;
    assert!(!matches!(released, Ok(Release::NotHeld(LossReason::Taken))), "nobody else has it");
    cluster.until_held_at("a", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn releasing_what_is_held_by_less_than_a_majority_says_so() {
    let stores = memories(5);
    let store = quorum(&stores);
    let mine = claim("a");
    hold(&store, &mine).await;
    for forgetful in &stores[..3] {
        forgetful.forget_all();
    }
    let released = store.release(&mine).await.expect("release");
    assert!(matches!(released, Release::NotHeld(_)), "{released:?}");
    hold(&store, &claim("a")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vote_that_splits_is_made_good() {
    let stores = memories(5);
    let (first, second) = (quorum(&stores), quorum(&stores));
    // Two nodes each for two others that are gone, one is left: nobody can have it before their leases lapse.
    let (one, two) = (claim("a"), claim("a"));
    for (store, claim) in [(&stores[0], &one), (&stores[1], &one), (&stores[2], &two), (&stores[3], &two)] {
        hold(store, claim).await;
    }
    contended(&first, &claim("a")).await;
    assert_eq!((first.stats().split_votes, first.stats().grants), (1, 0));
    stores[0].release(&one).await.expect("release");
    stores[1].release(&one).await.expect("release");
    hold_soon(&second, &claim("a")).await;
}

/// Many clients want one lock all the time. Votes split; everyone gets there.
#[tokio::test(flavor = "multi_thread")]
async fn split_votes_do_not_starve_anyone() {
    let cluster = Cluster::start(5).await;
    let (inside, total) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut clients = Vec::new();
    for _ in 0..6 {
        let store = Arc::new(cluster.observer().await);
        let locker = Locker::shared_builder(Arc::clone(&store) as Arc<dyn LockStore>).build();
        let (inside, total) = (Arc::clone(&inside), Arc::clone(&total));
        clients.push(tokio::spawn(async move {
            let mut last = lockkit_core::Fence::NONE;
            for _ in 0..40 {
                let guard = locker.lock("hot").ttl(TTL).acquire().await.expect("acquire");
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are inside");
                assert!(guard.fence() > last);
                last = guard.fence();
                total.fetch_add(1, Ordering::SeqCst);
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                assert_eq!(guard.release().await.expect("release"), Outcome::Released);
            }
            store.stats()
        }));
    }
    let (mut splits, mut raises, mut grants) = (0, 0, 0);
    for client in clients {
        let stats = client.await.expect("a client");
        (splits, raises, grants) = (splits + stats.split_votes, raises + stats.raise_rounds, grants + stats.grants);
    }
    assert_eq!(total.load(Ordering::SeqCst), 240);
    println!("{grants} grants, {splits} split votes, {raises} second rounds for a fence");
}

/// Two nodes have yet to release what was granted there before the wait, and one does not answer at all: without them there is no
/// majority. That is no reason for an error, for a majority answers.
#[tokio::test(start_paused = true)]
async fn after_a_wait_nodes_that_are_still_releasing_are_no_failure() {
    let stores = memories(5);
    let late = stores[..2].iter().map(Late::new).collect::<Vec<_>>();
    late.iter().for_each(|node| _ = node.releases.forget_permits(usize::MAX));
    let silent = Node::new(Arc::new(Altered(Silent(stores[4].clone()))));
    let held = stores[2..4].iter().map(|node| Node::new(Arc::new(node.clone())));
    let slow = late.iter().map(|node| Node::new(Arc::new(Altered(node.clone()))));
    let store = RedlockStore::new(slow.chain(held).chain([silent]).collect(), RedlockConfig::new()).expect("a quorum");
    let theirs = claim("a");
    for node in &stores[2..4] {
        hold(node, &theirs).await;
    }
    let mut waiting = request(&claim("a"));
    waiting.wait = TTL / 2;
    let leave = async {
        let waiters = async |node: &MemoryStore| {
            node.inspect(&Query::Keys(vec![theirs.key.clone()])).await.expect("inspect")[0].waiters
        };
        while waiters(&stores[2]).await.max(waiters(&stores[3]).await) != Some(1) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        for node in &stores[2..4] {
            free(node, &theirs).await;
        }
    };
    refused_to_wait(&store, &claim("a")).await;
    let (answer, ()) = tokio::join!(store.acquire(&waiting), leave);
    assert!(matches!(&answer, Ok(Attempt::Contended(contention)) if contention.burnt), "{answer:?}");
    late.iter().for_each(|node| node.releases.add_permits(1));
    for node in &stores[..4] {
        while !is_free_at(node).await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// A node that answers all but a request that waits.
#[derive(Debug)]
struct NeverWakes(MemoryStore);

#[async_trait]
impl Alter for NeverWakes {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if request.wait.is_zero() { self.0.acquire(request).await } else { std::future::pending().await }
    }
}

/// It is waited for at one of them for a second. By then the lock is free at all.
#[tokio::test(start_paused = true)]
async fn a_node_that_stops_answering_in_the_middle_of_a_wait_keeps_nobody_from_the_others() {
    let (stores, theirs) = (memories(3), claim("a"));
    let nodes = stores.iter().map(|node| Node::new(Arc::new(Altered(NeverWakes(node.clone())))));
    let store = RedlockStore::new(nodes.collect(), RedlockConfig::new()).expect("a quorum");
    for node in &stores {
        hold(node, &theirs).await;
    }
    refused_to_wait(&store, &claim("a")).await;
    for node in &stores {
        free(node, &theirs).await;
    }
    let waiting = AcquireRequest { wait: TTL, ..request(&claim("a")) };
    let (start, answer) = (tokio::time::Instant::now(), tokio::time::timeout(TTL, store.acquire(&waiting)).await);
    assert!(matches!(answer, Ok(Ok(Attempt::Granted(_)))), "{answer:?}");
    assert!(start.elapsed() < Duration::from_millis(1500), "{:?}", start.elapsed());
}

/// Whether the lock `a` can be had at a node.
async fn is_free_at(node: &MemoryStore) -> bool {
    let mine = claim("a");
    match attempt(node, &mine).await {
        Ok(Attempt::Granted(_)) => {
            free(node, &mine).await;
            true
        }
        _ => false,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_at_the_rendezvous_leaves_nothing_when_it_goes() {
    let cluster = Cluster::start(5).await;
    let (mine, other) = (cluster.client().await, cluster.observer().await);
    let held = claim("a");
    hold(&mine, &held).await;
    let mut waiting = request(&claim("a"));
    waiting.wait = Duration::from_secs(20);
    refused_to_wait(&other, &claim("a")).await;
    drop(tokio::time::timeout(Duration::from_millis(100), other.acquire(&waiting)).await);
    // As the core does.
    let released = other.release(&waiting.claim).await.expect("release");
    assert!(matches!(released, Release::NotHeld(_)), "{released:?}");
    free(&mine, &held).await;
    cluster.until_held_at("a", 0).await;
    hold(&mine, &claim("a")).await;
}

/// A release says that it is done with the answer of a node that was slow before, while a node that was not has yet to free the
/// lock: then the next attempt must count on the former too.
#[tokio::test(start_paused = true)]
async fn a_node_that_answered_the_release_is_not_slow() {
    let stores = memories(3);
    let late = Late::new(&stores[1]);
    late.releases.forget_permits(usize::MAX);
    let slow = SlowOnce { inner: stores[2].clone(), was_slow: AtomicBool::default() };
    let nodes: [Arc<dyn LockStore>; 3] =
        [Arc::new(stores[0].clone()), Arc::new(Altered(late)), Arc::new(Altered(slow))];
    let store = RedlockStore::new(nodes.map(Node::new).into(), RedlockConfig::new()).expect("a quorum");
    let (first, second) = (claim("a"), claim("a"));
    hold(&store, &first).await;
    tokio::time::sleep(SlowOnce::FOR * 2).await;
    assert!(is_held(&stores[2], &first).await);
    free(&store, &first).await;
    hold(&store, &second).await;
}

/// A node that answers the first acquisition late, and the others not at once.
#[derive(Debug)]
struct SlowOnce {
    inner: MemoryStore,
    was_slow: AtomicBool,
}

impl SlowOnce {
    const FOR: Duration = Duration::from_secs(1);
}

#[async_trait]
impl Alter for SlowOnce {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let late = if self.was_slow.swap(true, Ordering::SeqCst) { Duration::from_millis(1) } else { Self::FOR };
        tokio::time::sleep(late).await;
        self.inner.acquire(request).await
    }
}
