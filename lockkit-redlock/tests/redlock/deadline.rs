//! How long a lease may be believed in, and which nodes count for it.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Clock, HolderInfo, LockStore, LossReason, Query, Renewal, Renewed};
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_testkit::{Altered, faults::Direction};

use crate::support::{Ahead, Cluster, Late, TTL, claim, hold, is_held, memories, quorum, renew, until_held_at};

fn quorum_by(clock: &Arc<Ahead>, nodes: Vec<Arc<dyn LockStore>>) -> RedlockStore {
    let config = RedlockConfig::new().clock(Arc::clone(clock) as Arc<dyn Clock>);
    RedlockStore::new(nodes.into_iter().map(Node::new).collect(), config).expect("a quorum")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lease_is_counted_from_the_moment_of_its_request() {
    let (cluster, slow) = (Cluster::start(3).await, Duration::from_millis(20));
    let store = cluster.client().await;
    hold(&store, &claim("warm")).await;
    for proxy in &cluster.proxies {
        proxy.delay(Direction::ToClient, slow);
    }
    let granted = hold(&store, &claim("a")).await;
    assert!(granted.until + slow <= store.info().clock.now() + TTL, "the answers took {slow:?}");
}

/// The nodes have the lease still, or again: another client may have had it in between.
#[tokio::test]
async fn a_renewal_after_the_deadline_is_none() {
    let (clock, stores) = (Arc::new(Ahead::default()), memories(3));
    let nodes = stores.iter().map(|node| Arc::new(node.clone()) as Arc<dyn LockStore>);
    let store = quorum_by(&clock, nodes.collect());
    let mine = claim("a");
    hold(&store, &mine).await;
    assert!(is_held(&store, &mine).await);
    clock.by(TTL);
    let renewed = renew(&store, &mine).await.expect("renew");
    assert!(matches!(renewed, Renewed::Lost(LossReason::Expired)), "{renewed:?}");
}

/// Else who was out at each node for as long as another had the lock would never learn of it.
#[tokio::test]
async fn a_healed_node_does_not_count_at_once() {
    let stores = memories(3);
    let store = quorum(&stores);
    let mine = claim("a");
    hold(&store, &mine).await;
    for node in &stores {
        until_held_at(node, &mine).await;
    }
    stores[0].forget_all();
    assert!(is_held(&store, &mine).await, "by two of three");
    until_held_at(&stores[0], &mine).await;
    stores[1].forget_all();
    let renewed = renew(&store, &mine).await.expect("renew");
    assert!(matches!(renewed, Renewed::Lost(_)), "one node has had it all the time: {renewed:?}");
}

/// A renewal that changes the name is sent once: those after it leave the name that is there.
#[tokio::test]
async fn a_healed_node_shows_the_name_that_a_renewal_gave() {
    let stores = memories(3);
    let store = quorum(&stores);
    let mine = claim("a");
    hold(&store, &mine).await;
    for node in &stores {
        until_held_at(node, &mine).await;
    }
    let taken_up = HolderInfo::new("another process");
    let renewal = Renewal { holder: Some(taken_up.clone()), ..Renewal::new(mine.clone(), TTL) };
    let renewed = store.renew(&[renewal]).await.remove(0).expect("renew");
    assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}");
    stores[0].forget_all();
    assert!(is_held(&store, &mine).await, "by two of three");
    until_held_at(&stores[0], &mine).await;
    let state = stores[0].inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect").remove(0);
    assert_eq!(state.holders[0].info, taken_up);
}

/// A node says that it lost the lease when its deadline is over: by then the lock may be another's there.
#[tokio::test]
async fn after_the_deadline_no_node_is_healed() {
    let (clock, stores) = (Arc::new(Ahead::default()), memories(3));
    let late = Late::new(&stores[0]);
    late.renewals.forget_permits(usize::MAX);
    let others = stores[1..].iter().map(|node| Arc::new(node.clone()) as Arc<dyn LockStore>);
    let store = quorum_by(&clock, others.chain([Arc::new(Altered(late.clone())) as Arc<dyn LockStore>]).collect());
    let mine = claim("a");
    hold(&store, &mine).await;
    until_held_at(&stores[0], &mine).await;
    stores[0].forget_all();
    assert!(is_held(&store, &mine).await, "by two of three");
    late.renewals.add_permits(1);
    until_held_at(&stores[0], &mine).await;
    assert_eq!(late.asked(), 2, "it is healed before the deadline");
    stores[0].forget_all();
    assert!(is_held(&store, &mine).await, "by two of three");
    clock.by(TTL);
    late.renewals.add_permits(1);
    for _ in 0..50 {
        // What goes on in the background needs no more than to be let.
        tokio::task::yield_now().await;
    }
    assert_eq!(late.renewals.available_permits(), 0, "it has answered");
    assert_eq!(late.asked(), 2, "it was asked for a lease that is over");
}
