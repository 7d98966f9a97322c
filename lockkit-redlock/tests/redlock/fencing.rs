//! Fences when the nodes' counters are apart, and when nodes come and go.

use std::{
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Effect, ErrorKind, Fence, FenceClock, FenceRequest, Fencing, HolderInfo, LockStore,
    Locker, MemoryStore, Query, Release, Renewal, Renewed, Result,
};
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_testkit::{Alter, Altered, servers::Keep};

use crate::support::{Cluster, Silent, TTL, claim, free, hold, memories, quorum, renew, request};

/// Moves the counter of one node ahead, as an attempt does that fails elsewhere.
async fn move_ahead(store: &MemoryStore, to: Fence) {
    let mine = claim("a");
    let mut ahead = request(&mine);
    ahead.fence = FenceRequest { floor: to, span: 1, clock: FenceClock::Floor };
    assert!(matches!(store.acquire(&ahead).await.expect("acquire"), Attempt::Granted(_)));
    assert!(matches!(store.release(&mine).await.expect("release"), Release::Released { .. }));
}

#[tokio::test]
async fn counters_that_are_apart_cost_one_more_round() {
    let stores = memories(3);
    let store = quorum(&stores);
    let far = Fence::new(3_000_000_000_000_000);
    for (node, ahead) in stores.iter().zip([1, 20, 300]) {
        move_ahead(node, far.offset(ahead)).await;
    }
    let mine = claim("a");
    let mut wide = request(&mine);
    wide.fence.span = 65;
    let Attempt::Granted(first) = store.acquire(&wide).await.expect("acquire") else { panic!("it is free") };
    assert!(first.fence > far && store.stats().raise_rounds == 1);
    assert_eq!(hold(&store, &mine).await.fence, first.fence, "the same claim keeps its fence");
    assert_eq!(
        store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect")[0].holders[0].fence,
        Some(first.fence)
    );
    free(&store, &mine).await;
    let next = hold(&store, &claim("a")).await;
    assert!(next.fence >= first.fence.offset(65), "{} is within the span at {}", next.fence, first.fence);
}

/// After a second round some nodes show another number than the fence of the grant.
#[tokio::test]
async fn the_fence_of_another_client_is_not_made_up() {
    let stores = memories(3);
    let (store, other, mine) = (quorum(&stores), quorum(&stores), claim("a"));
    move_ahead(&stores[1], Fence::new(3_000_000_000_000_000)).await;
    let granted = hold(&store, &mine).await.fence;
    let error = renew(&other, &mine).await.expect_err("its fence is not known here");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unexpected, Effect::Unknown), "{error}");
    let state = store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect");
    assert_eq!(state[0].holders[0].fence, Some(granted));
}

/// A node that loses its leases before it is asked to raise its counter, and grants this one anew to a request that was
/// repeated: another client may have had the lock there in between.
#[derive(Debug)]
struct GrantsAnew(MemoryStore);

#[async_trait]
impl Alter for GrantsAnew {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.0.forget_all();
        for Renewal { claim, .. } in renewals {
            assert!(matches!(self.0.acquire(&request(claim)).await, Ok(Attempt::Granted(_))));
        }
        self.0.renew(renewals).await
    }
}

#[tokio::test]
async fn a_node_that_granted_anew_does_not_count_for_the_raise() {
    let stores = memories(3);
    let far = Fence::new(3_000_000_000_000_000);
    for (node, ahead) in stores.iter().zip([1, 20, 300]) {
        move_ahead(node, far.offset(ahead)).await;
    }
    let nodes = stores.iter().enumerate().map(|(index, node)| match index {
        0 => Node::new(Arc::new(node.clone())),
        _ => Node::new(Arc::new(Altered(GrantsAnew(node.clone())))),
    });
    let store = RedlockStore::new(nodes.collect(), RedlockConfig::new()).expect("a quorum");
    let answer = store.acquire(&request(&claim("a"))).await.expect("acquire");
    assert!(matches!(answer, Attempt::Contended(_)), "one of three has its grant still: {answer:?}");
    assert_eq!(store.stats().raise_rounds, 1);
}

/// What a quorum costs can be seen from outside.
#[cfg(feature = "metrics")]
#[tokio::test]
async fn rounds_are_counted_as_metrics() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};

    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let _recording = metrics::set_default_local_recorder(&recorder);
    let stores = memories(3);
    let store = quorum(&stores);
    for (node, ahead) in stores.iter().zip([1, 20, 300]) {
        move_ahead(node, Fence::new(3_000_000_000_000_000).offset(ahead)).await;
    }
    hold(&store, &claim("a")).await;
    hold(&store, &claim("b")).await;
    let counted = snapshotter.snapshot().into_vec();
    for (name, count) in [("lockkit_redlock_grants_total", 2), ("lockkit_redlock_raise_rounds_total", 1)] {
        let found = counted.iter().find(|(key, ..)| key.key().name() == name);
        assert_eq!(found.map(|(.., value)| value), Some(&DebugValue::Counter(count)), "{name}");
    }
}

#[tokio::test]
async fn equal_counters_ahead_of_the_clock_cost_nothing() {
    let stores = memories(5);
    let store = quorum(&stores);
    for node in &stores {
        move_ahead(node, Fence::new(3_000_000_000_000_000)).await;
    }
    for _ in 0..20 {
        let mine = claim("a");
        hold(&store, &mine).await;
        free(&store, &mine).await;
    }
    assert_eq!((store.stats().grants, store.stats().raise_rounds), (20, 0));
}

/// Every grant is at another majority of the nodes, and by another client.
#[tokio::test]
async fn fences_grow_whatever_majority_grants() {
    let stores = memories(5);
    let clients = [quorum(&stores), quorum(&stores)];
    let mut last = Fence::NONE;
    for round in 0..60_usize {
        // Two nodes are held by somebody else who is gone, so the other three decide.
        let away = claim("a");
        for node in [round % 5, (round * 3 + 1) % 5] {
            drop(stores[node].acquire(&request(&away)).await);
        }
        let mine = claim("a");
        let store = &clients[round % 2];
        let hold = hold(store, &mine).await;
        assert!(hold.fence > last, "{} came after {last}", hold.fence);
        last = hold.fence;
        free(store, &mine).await;
        for node in &stores {
            drop(node.release(&away).await);
        }
    }
}

#[tokio::test]
async fn fences_are_strict_only_if_all_nodes_are_durable() {
    let nodes = |durable: usize| {
        let stores = memories(3).into_iter().enumerate();
        stores.map(|(index, store)| Node::new(Arc::new(store)).durable(index < durable)).collect()
    };
    let fencing = |nodes| RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum").info().capability.fencing;
    assert_eq!(fencing(nodes(3)), Fencing::Strict);
    assert_eq!(fencing(nodes(2)), Fencing::BestEffort);
}

impl Cluster {
    /// All nodes come back at once with what they had when they were last saved.
    async fn back_to_the_snapshot(&self) {
        for server in &self.servers {
            server.kill().await.expect("kill");
        }
        for server in &self.servers {
            server.restart(Keep::Data).await.expect("restart");
        }
    }

    async fn save(&self) {
        for server in &self.servers {
            assert_eq!(server.command(&["SAVE"]).await.expect("SAVE"), "OK");
        }
    }
}

/// What the nodes remember of the last fence of a lock.
async fn remembered(store: &RedlockStore, name: &str) -> Option<Fence> {
    let states = store.inspect(&Query::Keys(vec![claim(name).key])).await.expect("inspect");
    states[0].fence
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_grow_when_all_nodes_come_back_with_older_counters() {
    let cluster = Cluster::start(3).await;
    let store = cluster.client().await;
    let mine = claim("a");
    hold(&store, &mine).await;
    free(&store, &mine).await;
    cluster.until_held_at("a", 0).await;
    cluster.save().await;
    let mut last = Fence::NONE;
    for _ in 0..50 {
        let mine = claim("a");
        // As many as are handed out among the tasks of one process.
        let asked = AcquireRequest { fence: FenceRequest { span: 65, ..FenceRequest::default() }, ..request(&mine) };
        let Attempt::Granted(hold) = store.acquire(&asked).await.expect("acquire") else { panic!("it is free") };
        last = hold.fence.offset(64);
        free(&store, &mine).await;
        cluster.until_held_at("a", 0).await;
    }
    cluster.back_to_the_snapshot().await;
    let store = cluster.client().await;
    let counters = remembered(&store, "a").await;
    assert!(counters < Some(last), "the counters are {counters:?}, no older than {last}");
    let next = hold(&store, &claim("a")).await.fence;
    assert!(next > last, "{next} came after {last}");
}

/// The limit of that: what keeps fences growing is the wall clock of whoever asks next, so they go back where the last one came
/// from a clock that was further ahead than the nodes were away.
#[tokio::test(flavor = "multi_thread")]
async fn fences_from_a_clock_far_ahead_are_lost_with_the_counters() {
    let cluster = Cluster::start(3).await;
    let store = cluster.client().await;
    hold(&store, &claim("b")).await;
    cluster.save().await;
    let mine = claim("a");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros();
    let hour_ahead = Fence::new(u64::try_from(now).expect("before 586524") + 3_600_000_000);
    let fence = FenceRequest { floor: hour_ahead, ..FenceRequest::default() };
    let asked = AcquireRequest { fence, ..request(&mine) };
    let Attempt::Granted(ahead) = store.acquire(&asked).await.expect("acquire") else { panic!("it is free") };
    free(&store, &mine).await;
    cluster.until_held_at("a", 0).await;
    let next = claim("a");
    assert!(hold(&store, &next).await.fence > ahead.fence, "counters know better than clocks");
    free(&store, &next).await;
    cluster.back_to_the_snapshot().await;
    assert!(hold(&cluster.client().await, &claim("a")).await.fence < ahead.fence);
}

/// A renewal with another name reached one of the two nodes that have the lease.
#[tokio::test]
async fn a_lease_is_taken_up_whose_nodes_show_different_names() {
    let stores = memories(3);
    let mine = claim("a");
    let hold = hold(&quorum(&stores), &mine).await;
    assert!(matches!(stores[2].release(&mine).await.expect("release"), Release::Released { .. }));
    let holder = Some(HolderInfo::new("the next"));
    let renewal = Renewal { holder, ..Renewal::new(mine.clone(), TTL) };
    assert!(matches!(stores[1].renew(&[renewal]).await.remove(0).expect("renew"), Renewed::Held(_)));
    let next = Locker::builder(quorum(&stores)).holder(HolderInfo::new("the next")).build();
    assert_eq!(next.lock("a").inspect().await.expect("inspect").holders.len(), 1);
    let guard = next.lock("a").ttl(TTL).resume(mine.token).await.expect("resume").expect("two nodes have it");
    assert!(guard.fence() > hold.fence);
    assert_eq!(next.lock("a").inspect().await.expect("inspect").holders[0].info.as_str(), "the next");
}

/// The nodes show different fences, and only the client that was granted the lease knows which of them is its own.
#[tokio::test]
async fn a_renewal_that_can_not_tell_the_fence_may_have_changed_something() {
    let stores = memories(3);
    for (node, ahead) in stores.iter().zip([1, 20, 300]) {
        move_ahead(node, Fence::new(3_000_000_000_000_000).offset(ahead)).await;
    }
    let mine = claim("a");
    let hold = hold(&quorum(&stores), &mine).await;
    let renewal = Renewal::new(mine.clone(), TTL);
    let error = quorum(&stores).renew(&[renewal]).await.remove(0).expect_err("no fence");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unexpected, Effect::Unknown), "{error}");
    // Another claim takes its place all the same.
    let next = Locker::new(quorum(&stores));
    let guard = next.lock("a").ttl(TTL).resume(mine.token).await.expect("resume").expect("all have it");
    assert!(guard.fence() > hold.fence);
}

/// One of the two nodes that have the lease is known as slow. That the third has none is no reason to say that it is gone.
#[tokio::test]
async fn a_slow_node_may_have_the_lease_that_is_taken_up() {
    let stores = memories(3);
    let mine = claim("a");
    hold(&quorum(&stores), &mine).await;
    assert!(matches!(stores[2].release(&mine).await.expect("release"), Release::Released { .. }));
    let mut nodes: Vec<_> = stores.iter().map(|store| Node::new(Arc::new(store.clone()))).collect();
    nodes[0] = Node::new(Arc::new(Altered(Silent(stores[0].clone()))));
    let next = RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum");
    // It has not answered this in time, and is waited for no more where that would only prolong a refusal.
    hold(&stores[1], &claim("b")).await;
    assert!(matches!(next.acquire(&request(&claim("b"))).await.expect("two answer"), Attempt::Contended(_)));
    let error = Locker::new(next).lock("a").ttl(TTL).resume(mine.token).await.expect_err("one has it for certain");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
}
