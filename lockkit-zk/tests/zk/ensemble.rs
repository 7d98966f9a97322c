//! Three servers, and the loss of the one that leads.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    Guard, LockKey, Outcome, Status,
    store::{Record, Records, Swap},
};
use lockkit_testkit::{
    faults::Proxy,
    servers::{Keep, ZooKeeperEnsemble, ZooKeeperFlavor},
};
use lockkit_zk::{ZkConfig, ZkStore};

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_loss_of_the_leader_loses_no_lease_and_no_order() {
    // The longest that the servers give: a lease outlives a loss of the leader if the ensemble has a new one in time, and
    // on a busy machine an election takes it up to fifteen seconds.
    let session = Duration::from_secs(60);
    let ensemble = ZooKeeperEnsemble::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required");
    let config = || ZkConfig::from_url(&ensemble.url()).expect("url").session(session);
    let keeper = connect(config()).await;
    let kept = locker(&keeper).lock("kept").ttl(session).try_acquire().await.expect("ask").expect("free");

    let (resource, running) = (Arc::new(Resource::default()), Arc::new(AtomicBool::new(true)));
    let mut workers = Vec::new();
    for _ in 0..3 {
        let lock = locker(&connect(config()).await).lock("busy").ttl(session);
        workers.push(tokio::spawn(work(lock, Arc::clone(&resource), Arc::clone(&running))));
    }
    let go_on = async || {
        let before = resource.uses.load(Ordering::SeqCst);
        eventually("they work", async || resource.uses.load(Ordering::SeqCst) > before + 20).await;
    };
    for _ in 0..2 {
        go_on().await;
        let leader = ensemble.elected().await.expect("a leader");
        ensemble.members()[leader].kill().await.expect("kill");
        ensemble.elected().await.expect("another leader");
        go_on().await;
        insist("the lease is renewed", async || kept.renew().await).await;
        ensemble.members()[leader].restart(Keep::Data).await.expect("restart");
    }
    running.store(false, Ordering::SeqCst);
    for worker in workers {
        tokio::time::timeout(Duration::from_secs(30), worker).await.expect("it ends").expect("no panic");
    }
    assert_eq!(kept.status(), Status::Held, "a lease outlives the leader");
    let outcome = kept.release().await.expect("release");
    assert_eq!(outcome, Outcome::Released, "its node does, too");
}

/// An ensemble, and a client each of its leader and of a follower, which is frozen while something is done at the leader: so it
/// has not heard of that, and answers reads by what it knows.
struct Behind {
    ensemble: ZooKeeperEnsemble,
    follower: usize,
    ahead: Arc<ZkStore>,
    behind: Arc<ZkStore>,
}

impl Behind {
    async fn start() -> Self {
        let ensemble = ZooKeeperEnsemble::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required");
        let leader = ensemble.elected().await.expect("a leader");
        let follower = (leader + 1) % ensemble.members().len();
        let at = async |member: usize| connect(ZkConfig::new([ensemble.members()[member].addr().to_string()])).await;
        let (ahead, behind) = (at(leader).await, at(follower).await);
        Self { ensemble, follower, ahead, behind }
    }

    /// Changes a record at the leader while the follower is frozen, and asks the follower `then`: the question waits for it
    /// beside what it missed.
    async fn change<T>(&self, name: &LockKey, changes: &[[Option<&Record>; 2]], then: impl Future<Output = T>) -> T {
        let follower = &self.ensemble.members()[self.follower];
        follower.freeze().await.expect("freeze");
        for [seen, new] in changes {
            let set = insist("it is written", async || self.ahead.compare_and_set(name, *seen, *new).await).await;
            assert_eq!(set, Swap::Done);
        }
        let thaw = async {
            // Long enough for the question to be sent.
            tokio::time::sleep(Duration::from_millis(20)).await;
            follower.thaw().expect("thaw");
        };
        tokio::join!(then, thaw).0
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_is_never_read_as_it_was() {
    let (world, name) = (Behind::start().await, LockKey::new("a").expect("name"));
    let mut seen = None;
    for round in 0..20 {
        let new = Record::new(format!("text-{round}")).expect("text");
        let asked = insist("it is read", async || world.behind.read(&name).await);
        let read = world.change(&name, &[[seen.as_ref(), Some(&new)]], asked).await;
        assert_eq!(read.as_ref(), Some(&new), "round {round}");
        let late = insist("an answer", async || world.behind.compare_and_set(&name, seen.as_ref(), None).await).await;
        assert_eq!(late, Swap::Differs(Some(new.clone())), "round {round}");
        seen = Some(new);
    }
}

/// The versions of a node that was made anew are those of the one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_that_was_made_anew_is_another() {
    let (world, name) = (Behind::start().await, LockKey::new("a").expect("name"));
    for round in 0..20 {
        let text = |text: &str| Record::new(format!("{text}-{round}")).expect("text");
        let (first, second) = (text("first"), text("second"));
        let made = insist("it is made", async || world.behind.compare_and_set(&name, None, Some(&first)).await).await;
        assert_eq!(made, Swap::Done);
        let asked = async || world.behind.compare_and_set(&name, Some(&first), Some(&text("third"))).await;
        let asked = insist("an answer", asked);
        let answer = world.change(&name, &[[Some(&first), None], [None, Some(&second)]], asked).await;
        assert_eq!(answer, Swap::Differs(Some(second.clone())), "round {round}");
        let gone = insist("it goes", async || world.ahead.compare_and_set(&name, Some(&second), None).await).await;
        assert_eq!(gone, Swap::Done);
    }
}

/// All clients are connected to a server that hears nothing and says nothing any more, and still takes connections. Which one they
/// try next is left to chance, so that one client or another may come back to it too often.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_falls_silent_does_not_cost_its_clients_their_leases() {
    const SESSION: Duration = Duration::from_secs(10);
    const CLIENTS: usize = 24;
    let ensemble = ZooKeeperEnsemble::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required");
    let mut proxies = Vec::new();
    for member in ensemble.members() {
        proxies.push(Proxy::start(member.addr()).await.expect("proxy"));
    }
    let others = || proxies[1..].iter();
    others().for_each(|proxy| proxy.refuse(true));
    let config = ZkConfig::new(proxies.iter().map(|proxy| proxy.addr().to_string())).session(SESSION);
    let mut guards = Vec::new();
    for client in 0..CLIENTS {
        let lock = locker(&connect(config.clone()).await).lock(format!("of-{client}")).ttl(SESSION);
        guards.push(lock.try_acquire().await.expect("ask").expect("free"));
    }
    others().for_each(|proxy| proxy.refuse(false));
    // As long as this, leases have to be renewed.
    tokio::time::sleep(SESSION).await;
    assert!(guards.iter().all(Guard::is_held), "they were not renewed before");
    proxies[0].blackhole();
    tokio::time::sleep(SESSION).await;
    let lost = guards.iter().filter(|guard| !guard.is_held()).count();
    assert!(lost <= CLIENTS / 4, "{lost} of {CLIENTS} leases are lost");
}
