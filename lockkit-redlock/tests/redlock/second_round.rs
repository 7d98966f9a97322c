//! A lease that was granted after a wait, while a node has yet to answer the release of what it was asked for before the wait: under
//! another token, so that the release takes nothing from the lease, however late it arrives.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Error, ErrorKind, LockStore, Locker, MemoryStore, Query, Release, Renewed, Result,
    store::unpoisoned,
};
use lockkit_redis::RedisStore;
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_testkit::{Alter, Altered, faults::Direction};

use crate::support::{
    Cluster, Late, TTL, attempt, claim, free, hold, hold_in_time, is_held, memories, quorum, renew, until_held_at,
};

/// A node whose connection breaks before a request arrives: the next acquisition, or the next release.
#[derive(Debug)]
struct Breaks {
    inner: MemoryStore,
    acquisition: AtomicBool,
    release: AtomicBool,
    /// What is still on its way.
    stray: Arc<Mutex<Vec<Claim>>>,
}

fn broken() -> Error {
    Error::new(ErrorKind::Unavailable, "the connection broke").unknown_effect()
}

#[async_trait]
impl Alter for Breaks {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if self.acquisition.swap(false, Ordering::SeqCst) {
            unpoisoned(&self.stray).push(request.claim.clone());
            return Err(broken());
        }
        self.inner.acquire(request).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if self.release.swap(false, Ordering::SeqCst) {
            unpoisoned(&self.stray).push(claim.clone());
            return Err(broken());
        }
        self.inner.release(claim).await
    }
}

/// A quorum of which the last node is this one, in the place of the first of `stores`.
pub(crate) fn with_last(last: impl Alter, stores: &[MemoryStore], config: RedlockConfig) -> RedlockStore {
    let others = stores[1..].iter().map(|node| Node::new(Arc::new(node.clone())));
    RedlockStore::new(others.chain([Node::new(Arc::new(Altered(last)))]).collect(), config).expect("a quorum")
}

/// Gets the lock after a wait: another holds it at first, at all nodes but the first of `stores`.
pub(crate) async fn hold_after_a_wait(store: &RedlockStore, stores: &[MemoryStore]) -> Claim {
    let theirs = claim("a");
    for node in &stores[1..] {
        hold(node, &theirs).await;
    }
    let leave = async {
        let waiters = async |node: &MemoryStore| {
            node.inspect(&Query::Keys(vec![theirs.key.clone()])).await.expect("inspect")[0].waiters
        };
        while waiters(&stores[1]).await.max(waiters(&stores[2]).await) != Some(1) {
            tokio::task::yield_now().await;
        }
        for node in &stores[1..] {
            free(node, &theirs).await;
        }
    };
    tokio::join!(hold_in_time(store, "a"), leave).0
}

/// Lets the tasks in the background run until they wait for something.
async fn yield_to_tasks() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// The node granted a lease before the wait, and still has it. Its release may arrive at any time.
#[tokio::test]
async fn a_node_whose_release_is_under_way_does_not_count() {
    let stores = memories(3);
    let late = Late::new(&stores[0]);
    late.releases.forget_permits(usize::MAX);
    let store = with_last(late.clone(), &stores, RedlockConfig::new());
    let mine = hold_after_a_wait(&store, &stores).await;
    for _ in 0..2 {
        assert!(is_held(&store, &mine).await, "by two of three");
        yield_to_tasks().await;
    }
    stores[2].forget_all();
    let renewed = renew(&store, &mine).await.expect("renew");
    late.releases.add_permits(1);
    yield_to_tasks().await;
    // In case it was healed meanwhile.
    stores[2].forget_all();
    let other = attempt(&quorum(&stores), &claim("a")).await;
    let both = matches!(renewed, Renewed::Held(_)) && matches!(other, Ok(Attempt::Granted(_)));
    assert!(!both, "two holders: {renewed:?}, {other:?}");
    assert!(matches!(renewed, Renewed::Lost(_)), "one of three has it for certain: {renewed:?}");
}

/// Its release is the end of what was asked before the wait: it is healed then, and counts when a renewal succeeded without it.
#[tokio::test]
async fn a_node_that_has_answered_the_release_is_healed() {
    let stores = memories(3);
    let late = Late::new(&stores[0]);
    late.releases.forget_permits(usize::MAX);
    let store = with_last(late.clone(), &stores, RedlockConfig::new());
    let mine = hold_after_a_wait(&store, &stores).await;
    late.releases.add_permits(1);
    while late.releases.available_permits() > 0 {
        tokio::task::yield_now().await;
    }
    yield_to_tasks().await;
    assert!(is_held(&store, &mine).await, "by two of three");
    until_held_at(&stores[0], &mine).await;
    yield_to_tasks().await;
    assert!(is_held(&store, &mine).await, "by two of three, and the third may count from now on");
    stores[2].forget_all();
    assert!(is_held(&store, &mine).await, "by the first and the third");
}

/// The request before the wait broke off, so its release is repeated until that lease must have lapsed. The node counts for the lease after
/// the wait like any other.
#[tokio::test]
async fn a_release_that_is_repeated_takes_nothing_away() {
    let (stores, stray) = (memories(3), Arc::<Mutex<_>>::default());
    let node =
        Breaks { inner: stores[0].clone(), acquisition: true.into(), release: false.into(), stray: Arc::clone(&stray) };
    let store = with_last(node, &stores, RedlockConfig::new());
    let mine = hold_after_a_wait(&store, &stores).await;
    until_held_at(&stores[0], &mine).await;
    let before = unpoisoned(&stray).pop().expect("a request broke off");
    assert_ne!(before.token, mine.token, "a burnt token was asked for again");
    assert!(matches!(stores[0].release(&before).await, Ok(Release::NotHeld(_))));
    stores[2].forget_all();
    for _ in 0..3 {
        assert!(is_held(&store, &mine).await, "by the first and the second");
        yield_to_tasks().await;
    }
}

/// A release whose answer never came may be under way for as long as it likes, though another was answered.
#[tokio::test]
async fn a_node_is_healed_where_a_release_got_no_answer() {
    let (stores, stray) = (memories(3), Arc::<Mutex<_>>::default());
    let node =
        Breaks { inner: stores[0].clone(), acquisition: false.into(), release: true.into(), stray: Arc::clone(&stray) };
    let store = with_last(node, &stores, RedlockConfig::new());
    let mine = hold_after_a_wait(&store, &stores).await;
    let start = Instant::now();
    let holder = async || {
        let states = stores[0].inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect");
        states[0].holders.first().and_then(|holder| holder.token)
    };
    while holder().await != Some(mine.token) {
        assert!(start.elapsed() < TTL / 2, "it is never healed");
        assert!(is_held(&store, &mine).await, "by two of three");
        yield_to_tasks().await;
    }
    let before = unpoisoned(&stray).pop().expect("a release broke off");
    assert!(matches!(stores[0].release(&before).await, Ok(Release::NotHeld(_))));
    assert!(is_held(&store, &mine).await, "by two of three, and the third may count from now on");
    stores[2].forget_all();
    assert!(is_held(&store, &mine).await, "by the first and the third");
}

/// With servers: a node that is healed between two tries of a release counts until the next of them.
#[tokio::test(flavor = "multi_thread")]
async fn no_other_gets_in_while_a_release_is_repeated() {
    let cluster = Cluster::start(3).await;
    let (store, other) = (cluster.client().await, cluster.observer().await);
    hold(&store, &claim("warm")).await;
    let theirs = claim("a");
    let mut nodes = Vec::new();
    for server in &cluster.servers[1..] {
        let node = RedisStore::from_url(&server.url()).await.expect("connect");
        hold(&node, &theirs).await;
        nodes.push(node);
    }
    cluster.proxies[0].hold(Direction::ToServer);
    let leave = async {
        let waiters = async |node: &RedisStore| {
            node.inspect(&Query::Keys(vec![theirs.key.clone()])).await.expect("inspect")[0].waiters
        };
        while waiters(&nodes[0]).await.max(waiters(&nodes[1]).await) != Some(1) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        cluster.proxies[0].cut().await;
        cluster.proxies[0].heal();
        // So long a release must have been answered there, and others are due.
        tokio::time::sleep(Duration::from_millis(200)).await;
        for node in &nodes {
            free(node, &theirs).await;
        }
        Instant::now()
    };
    let (mine, start) = tokio::join!(hold_in_time(&store, "a"), leave);
    // The releases are tried 0.75, 1.55 and 3.15 s after the first of them. Two renewals come between two tries.
    for after in [600, 800] {
        tokio::time::sleep_until((start + Duration::from_millis(after)).into()).await;
        assert!(is_held(&store, &mine).await, "by two of three");
    }
    let forget = async || cluster.servers[2].command(&["DEL", "lockkit:a"]).await.expect("DEL");
    forget().await;
    tokio::time::sleep_until((start + Duration::from_millis(1000)).into()).await;
    let Renewed::Held(hold) = renew(&store, &mine).await.expect("renew") else { return };
    let watched = Instant::now();
    while watched.elapsed() < TTL / 3 {
        // In case it was healed meanwhile.
        forget().await;
        let attempt = attempt(&other, &claim("a")).await;
        let now = store.info().clock.now();
        assert!(now >= hold.until || !matches!(attempt, Ok(Attempt::Granted(_))), "two holders: {hold:?}, {attempt:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A refusal that says "at once" leads to the wait, and not to the next round.
#[tokio::test]
async fn who_waits_asks_seldom_and_gives_up_in_time() {
    let stores = memories(3);
    hold(&quorum(&stores), &claim("a")).await;
    let node = Late::new(&stores[0]);
    let locker = Locker::new(with_last(node.clone(), &stores, RedlockConfig::new()));
    let (start, within) = (Instant::now(), Duration::from_millis(1500));
    assert!(locker.lock("a").acquire_within(within).await.expect("acquire").is_none());
    assert!(start.elapsed() >= within && start.elapsed() < within * 2, "after {:?}", start.elapsed());
    // Three rounds, around two waits that may be at this node.
    assert!((3..=5).contains(&node.asked()), "asked {} times", node.asked());
    assert!(locker.lock("a").try_acquire().await.expect("try").is_none());
    assert!(node.asked() <= 6, "a try is one round");
}

/// A node whose user may hear of no release, so that each wait is refused at once.
#[derive(Debug)]
struct LetsNobodyWait {
    inner: MemoryStore,
    asked: Arc<AtomicUsize>,
}

#[async_trait]
impl Alter for LetsNobodyWait {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        if !request.wait.is_zero() {
            return Err(Error::new(ErrorKind::Denied, "no permission to subscribe"));
        }
        self.inner.acquire(request).await
    }
}

/// Then there is no wait before the next round, and the pause between two rounds is all that keeps its callers from asking as fast as
/// they can.
#[tokio::test]
async fn who_may_wait_nowhere_asks_seldom_too() {
    let stores = memories(3);
    hold(&quorum(&stores), &claim("a")).await;
    let asked: [Arc<AtomicUsize>; 3] = Default::default();
    let nodes = stores.iter().zip(&asked).map(|(inner, asked)| {
        Node::new(Arc::new(Altered(LetsNobodyWait { inner: inner.clone(), asked: Arc::clone(asked) })))
    });
    let locker = Locker::new(RedlockStore::new(nodes.collect(), RedlockConfig::new()).expect("a quorum"));
    let within = Duration::from_secs(1);
    assert!(locker.lock("a").acquire_within(within).await.expect("acquire").is_none());
    for asked in asked {
        let asked = asked.load(Ordering::SeqCst);
        assert!((3..250).contains(&asked), "asked {asked} times");
    }
}
