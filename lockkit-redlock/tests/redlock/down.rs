//! One, two and three of five nodes down, frozen or slow.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Effect, ErrorKind, LockStore, Locker, LossReason, Outcome, Query, Release, Renewed,
};
use lockkit_redlock::{Node, NodeErrors, RedlockConfig, RedlockStore};
use lockkit_sim::{Fault, Operation, SimStore};
use lockkit_testkit::{faults::Direction, servers::Keep};

use crate::support::{Cluster, NODE_TIMEOUT, TTL, attempt, claim, contended, free, hold, is_held, renew, request};

/// A lease that nothing but a release ends within a test.
const LONG: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_minority_down_costs_nothing() {
    let cluster = Cluster::start(5).await;
    let store = cluster.client().await;
    for down in 0..2 {
        cluster.servers[down].kill().await.expect("kill");
        let mine = claim("a");
        let first = hold(&store, &mine).await;
        assert!(is_held(&store, &mine).await);
        assert_eq!(hold(&store, &mine).await.fence, first.fence, "the same claim keeps its fence");
        free(&store, &mine).await;
        assert!(hold(&store, &claim(&format!("b{down}"))).await.fence > lockkit_core::Fence::NONE);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_down_is_unavailable_and_says_so_for_each_node() {
    let cluster = Cluster::start(5).await;
    let store = cluster.client().await;
    for server in &cluster.servers[..3] {
        server.kill().await.expect("kill");
    }
    // The first request to each finds out that its connection is gone.
    let (first, mine) = (claim("b"), claim("a"));
    drop(attempt(&store, &first).await);
    let error = attempt(&store, &mine).await.expect_err("two of five are no majority");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
    assert_eq!(error.to_string().lines().count(), 1);
    assert_eq!(NodeErrors::of(&error).expect("each node's error").iter().count(), 3);
    // As the core does. Three of five can't be asked, so it is told that it has to go on.
    for mine in [&first, &mine] {
        let error = store.release(mine).await.expect_err("two of five are no majority");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
        cluster.until_held_at_by_living(mine.key.as_str(), &[3, 4]).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_renewal_by_a_minority_is_an_error() {
    let nodes = [SimStore::new(), SimStore::new(), SimStore::new()];
    let members = nodes.iter().map(|node| Node::new(Arc::new(node.clone()))).collect();
    let store = RedlockStore::new(members, RedlockConfig::new()).expect("a quorum");
    let mine = claim("a");
    hold(&store, &mine).await;
    for node in &nodes[..2] {
        node.inject(Fault::REFUSED.on(Operation::Renew));
    }
    let error = renew(&store, &mine).await.expect_err("one of three is no majority");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
}

impl Cluster {
    /// Waits until all these nodes have granted the lock to somebody.
    async fn until_granted_at(&self, name: &str, nodes: &[usize]) {
        let key = format!("lockkit:{name}");
        for node in nodes {
            while self.servers[*node].command(&["EXISTS", &key]).await.expect("EXISTS") != "1" {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    /// Waits until none of these nodes holds the lock: what they granted to a failed attempt was released.
    async fn until_held_at_by_living(&self, name: &str, living: &[usize]) {
        let start = Instant::now();
        let key = format!("lockkit:{name}");
        for node in living {
            while self.servers[*node].command(&["EXISTS", &key]).await.expect("EXISTS") != "0" {
                assert!(start.elapsed() < Duration::from_secs(3), "node {node} still holds it");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }
}

/// The median time of an acquisition. A store that waited for the slowest node would need the node timeout each time.
async fn median(store: &dyn LockStore) -> Duration {
    let mut took = Vec::new();
    for round in 0..60 {
        let mine = claim(&format!("m{round}"));
        let start = Instant::now();
        hold(store, &mine).await;
        took.push(start.elapsed());
        free(store, &mine).await;
    }
    took.sort_unstable();
    took[took.len() / 2]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_does_not_slow_down_the_others() {
    let cluster = Cluster::start(5).await;
    let store = cluster.client().await;
    cluster.servers[1].freeze().await.expect("freeze");
    let median = median(&store).await;
    assert!(median < NODE_TIMEOUT / 2, "{median:?}");
    cluster.servers[1].thaw().expect("thaw");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_slow_nodes_do_not_slow_down_the_others() {
    let cluster = Cluster::start(5).await;
    let store = cluster.client().await;
    for proxy in &cluster.proxies[..2] {
        proxy.delay(Direction::ToClient, NODE_TIMEOUT * 3 / 4);
    }
    let median = median(&store).await;
    assert!(median < NODE_TIMEOUT / 2, "{median:?}");
}

/// The median time of a refusal, of a client that asks again and again.
async fn median_refusal(store: &dyn LockStore, name: &str) -> Duration {
    let mut took = Vec::new();
    for _ in 0..20 {
        let start = Instant::now();
        contended(store, &claim(name)).await;
        took.push(start.elapsed());
    }
    took.sort_unstable();
    took[took.len() / 2]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_does_not_keep_who_was_refused_from_asking_again() {
    let cluster = Cluster::start(5).await;
    let (store, other) = (cluster.client().await, cluster.observer().await);
    hold(&other, &claim("a")).await;
    cluster.proxies[1].blackhole();
    let median = median_refusal(&store, "a").await;
    assert!(median < NODE_TIMEOUT / 2, "{median:?}");
}

/// Of five nodes one is down, one frozen, and at one of the others somebody else holds the lock. With a client that waits so
/// long for a node.
async fn split(node_timeout: Duration) -> (Cluster, RedlockStore) {
    let cluster = Cluster::start(5).await;
    let config = RedlockConfig::new().node_timeout(node_timeout);
    let (store, other) = (cluster.client_with(config).await, cluster.observer().await);
    let theirs = other.acquire(&AcquireRequest { ttl: LONG, ..request(&claim("a")) }).await.expect("acquire");
    assert!(matches!(theirs, Attempt::Granted(_)), "{theirs:?}");
    cluster.until_held_at("a", 5).await;
    for free in [3, 4] {
        cluster.servers[free].command(&["DEL", "lockkit:a"]).await.expect("DEL");
    }
    cluster.servers[0].kill().await.expect("kill");
    cluster.proxies[1].blackhole();
    (cluster, store)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_node_does_not_prolong_a_split_vote() {
    let (_cluster, store) = split(NODE_TIMEOUT).await;
    // Two nodes grant it and one refuses. The frozen one could still decide, but it was waited for once.
    let median = median_refusal(&store, "a").await;
    assert!(median < NODE_TIMEOUT / 2, "{median:?}");
    // Not each time: who asks again at once may meet what it got before, which is being released.
    assert!(store.stats().split_votes > 3, "{:?}", store.stats());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_given_up_is_released_by_those_that_answer() {
    let (cluster, store) = split(LONG / 6).await;
    let (store, mine) = (Arc::new(store), claim("a"));
    let (asked, request) = (Arc::clone(&store), AcquireRequest { ttl: LONG, ..request(&mine) });
    let mut asking = Box::pin(async move { asked.acquire(&request).await });
    tokio::select! {
        answer = &mut asking => panic!("it waits for the frozen node, but: {answer:?}"),
        () = cluster.until_granted_at("a", &[3, 4]) => {}
    }
    // Dropped without a runtime, so that the store can't release it by itself before it is asked to.
    std::thread::spawn(move || drop(asking)).join().expect("a thread");
    let released = store.release(&mine).await.expect("a majority has answered");
    assert_eq!(released, Release::NotHeld(LossReason::Taken), "two of those that answer say so");
    cluster.until_held_at_by_living("a", &[3, 4]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_inspection_waits_for_a_majority_that_is_slow() {
    let cluster = Cluster::start(5).await;
    let (store, mine) = (cluster.client().await, claim("a"));
    hold(&store, &mine).await;
    cluster.until_held_at("a", 5).await;
    let query = Query::Keys(vec![mine.key.clone()]);
    // So that the servers know the script.
    store.inspect(&query).await.expect("inspect");
    for proxy in &cluster.proxies[..3] {
        // An inspection takes two of these.
        proxy.delay(Direction::ToClient, NODE_TIMEOUT * 5 / 4);
    }
    let states = store.inspect(&query).await.expect("slow is not away");
    assert_eq!(states[0].holders.first().and_then(|holder| holder.token), Some(mine.token), "{states:?}");
}

/// The core has to know when what it sent to a node may be overtaken.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_a_node_replaces_is_counted() {
    let cluster = Cluster::start(3).await;
    let store = cluster.client().await;
    let (query, count) = (Query::Keys(vec![claim("a").key]), || store.info().reconnections.count());
    store.inspect(&query).await.expect("inspect");
    let before = count();
    for (cut, proxy) in (1..).zip(&cluster.proxies) {
        proxy.cut().await;
        let start = Instant::now();
        while count() < before + cut {
            assert!(start.elapsed() < Duration::from_secs(10), "nothing was counted");
            // An error may come first.
            drop(store.inspect(&query).await);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_frozen_is_an_error_within_the_node_timeout() {
    let cluster = Cluster::start(5).await;
    let store = cluster.client_with(RedlockConfig::new()).await;
    for proxy in &cluster.proxies[..3] {
        proxy.blackhole();
    }
    let start = Instant::now();
    let mine = claim("a");
    let error = attempt(&store, &mine).await.expect_err("two of five are no majority");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::Unknown), "{error}");
    assert!(start.elapsed() < Duration::from_secs(1), "not the two seconds of the nodes: {:?}", start.elapsed());
    // To look has no effect, by the word of each node, too.
    let unseen = store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect_err("two of five are no majority");
    assert_eq!(unseen.effect(), Effect::None, "{unseen}");
    let said = NodeErrors::of(&unseen).expect("each node's error");
    assert!(said.iter().count() == 3 && said.iter().all(|node| node.error.effect() == Effect::None), "{said:?}");
    // What is held up at the proxies takes effect when it comes through, and its release comes through behind it.
    store.release(&mine).await.expect_err("two of five are no majority");
    cluster.proxies[..3].iter().for_each(|proxy| proxy.heal());
    cluster.until_held_at("a", 0).await;
    hold(&store, &claim("a")).await;
}

/// What keeps three of five nodes from voting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Away {
    Down,
    Frozen,
    /// Slower than the node timeout by default, and than a renewal may take.
    Slow,
}

impl Cluster {
    async fn lose_three(&self, how: Away) {
        for (server, proxy) in self.servers.iter().zip(&self.proxies).take(3) {
            match how {
                Away::Down => server.kill().await.expect("kill"),
                Away::Frozen => server.freeze().await.expect("freeze"),
                Away::Slow => proxy.delay(Direction::ToClient, Duration::from_millis(500)),
            }
        }
    }

    async fn bring_three_back(&self, how: Away) {
        for (server, proxy) in self.servers.iter().zip(&self.proxies).take(3) {
            match how {
                Away::Down => server.restart(Keep::Nothing).await.expect("restart"),
                Away::Frozen => server.thaw().expect("thaw"),
                Away::Slow => proxy.heal(),
            }
        }
    }
}

/// A holder keeps its lock until its deadline, nobody gets one, each error names the three, and all goes on as soon as
/// they are back.
async fn a_majority_away(how: Away) {
    let cluster = Cluster::start(5).await;
    let holder = Locker::new(cluster.client_with(RedlockConfig::new()).await);
    let store = cluster.client_with(RedlockConfig::new()).await;
    let guard = holder.lock("held").ttl(Duration::from_secs(2)).acquire().await.expect("acquire");
    cluster.until_held_at("held", 5).await;
    hold(&store, &claim("warm")).await;

    cluster.lose_three(how).await;
    let (away_since, left) = (Instant::now(), guard.remaining());
    let end = Instant::now() + left;
    let asking = async {
        let mut asked = 0;
        while guard.is_held() {
            let error =
                attempt(&store, &claim(&format!("free{asked}"))).await.expect_err("two of five are no majority");
            assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut), "{error}");
            let said = NodeErrors::of(&error).expect("each node's error");
            for proxy in &cluster.proxies[..3] {
                let name = proxy.addr().to_string();
                assert!(said.iter().any(|node| node.node.contains(&name)), "nothing of {name}: {error}");
            }
            asked += 1;
            tokio::time::sleep(RedlockConfig::SHORTEST_TIMEOUT).await;
        }
        asked
    };
    let in_the_end = async {
        tokio::time::sleep_until(end.into()).await;
        assert!(!guard.is_held(), "held for longer than the {left:?} that were left");
    };
    let (asked, reason, ()) = tokio::join!(asking, guard.lost(), in_the_end);
    let held_for = away_since.elapsed();
    assert!(asked > 2, "asked {asked} times");
    assert_eq!(reason, LossReason::Unreachable);
    assert!(held_for >= left, "{left:?} were left, held for {held_for:?}");

    cluster.bring_three_back(how).await;
    let after =
        holder.lock("held").ttl(TTL).acquire_within(Duration::from_secs(8)).await.expect("acquire").expect("free");
    assert!(after.fence() > guard.fence());
    // Another client comes to know of it by itself, with connections of its own.
    let other = Locker::new(store);
    let free =
        other.lock("free0").ttl(TTL).acquire_within(Duration::from_secs(8)).await.expect("acquire").expect("free");
    for guard in [after, free] {
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_down_grants_nothing_until_it_is_back() {
    a_majority_away(Away::Down).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_frozen_grants_nothing_until_it_is_back() {
    a_majority_away(Away::Frozen).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_majority_that_is_too_slow_grants_nothing_until_it_is_not() {
    a_majority_away(Away::Slow).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_cut_off_from_a_majority_loses_in_time_and_two_nodes_more_bring_nothing_back() {
    let cluster = Cluster::start(5).await;
    let (mine, other) = (Locker::new(cluster.client().await), Locker::new(cluster.observer().await));
    // As short as the node timeout allows.
    let ttl = NODE_TIMEOUT * 4;
    let guard = mine.lock("a").ttl(ttl).acquire().await.expect("acquire");
    for proxy in &cluster.proxies[..3] {
        proxy.blackhole();
    }
    assert_eq!(guard.lost().await, LossReason::Unreachable);
    let next = other.lock("a").ttl(TTL).acquire_within(Duration::from_secs(5)).await.expect("acquire").expect("free");
    assert!(next.fence() > guard.fence());
    cluster.proxies[..3].iter().for_each(|proxy| proxy.heal());
    assert!(mine.lock("a").try_acquire().await.map_or(true, |guard| guard.is_none()));
    assert_eq!(next.release().await.expect("release"), Outcome::Released);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_outlives_its_nodes_one_by_one_because_they_are_healed() {
    let cluster = Cluster::start(5).await;
    let store = cluster.client().await;
    let mine = claim("a");
    let fence = hold(&store, &mine).await.fence;
    cluster.until_held_at("a", 5).await;
    // Each node in turn loses the lease. Without healing the third loss would be the end.
    for lost in 0..5 {
        cluster.servers[lost].command(&["DEL", "lockkit:a"]).await.expect("DEL");
        let renewed = renew(&store, &mine).await.expect("renew");
        assert!(matches!(renewed, Renewed::Held(hold) if hold.fence == fence), "after {lost}");
        cluster.until_held_at("a", 5).await;
        // The healed node counts when a round has succeeded without it.
        assert!(is_held(&store, &mine).await);
    }
    assert!(store.stats().heals >= 5);
    free(&store, &mine).await;
    cluster.until_held_at("a", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn healed_nodes_do_not_make_a_majority() {
    let cluster = Cluster::start(5).await;
    let store = cluster.client().await;
    let mine = claim("a");
    hold(&store, &mine).await;
    cluster.until_held_at("a", 5).await;
    for server in &cluster.servers[..3] {
        server.command(&["DEL", "lockkit:a"]).await.expect("DEL");
    }
    let answer = renew(&store, &mine).await.expect("renew");
    assert!(matches!(answer, Renewed::Lost(LossReason::Gone)), "{answer:?}");
    // What is left of it keeps others out until its holder has heard, and releases it.
    assert_eq!(cluster.held_at("a").await, 2, "the store gave it back by itself");
    assert!(matches!(store.release(&mine).await.expect("release"), Release::NotHeld(_)));
    cluster.until_held_at("a", 0).await;
}
