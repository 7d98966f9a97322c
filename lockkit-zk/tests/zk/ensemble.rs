//! Three servers, and the loss of the one that leads.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    LockKey, Outcome, Status,
    store::{Record, Records, Swap},
};
use lockkit_testkit::servers::{Keep, ZooKeeperEnsemble, ZooKeeperFlavor};
use lockkit_zk::ZkConfig;

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
        let (resource, running) = (Arc::clone(&resource), Arc::clone(&running));
        let locker = locker(&connect(config()).await);
        workers.push(tokio::spawn(async move {
            while running.load(Ordering::SeqCst) {
                let lock = locker.lock("busy").ttl(session);
                let Ok(guard) = lock.acquire().await.inspect_err(|e| assert!(e.is_retryable(), "{e}")) else {
                    continue;
                };
                if guard.is_held() {
                    resource.work(guard.fence().get()).await;
                }
                drop(guard.release().await);
            }
        }));
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

/// A server that stood still has not heard of what the others decided meanwhile, and answers reads by what it knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_is_never_read_as_it_was() {
    let ensemble = ZooKeeperEnsemble::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required");
    let leader = ensemble.elected().await.expect("a leader");
    let members = ensemble.members();
    let at = async |member: usize| connect(ZkConfig::new([members[member].addr().to_string()])).await;
    let follower = (leader + 1) % members.len();
    let (writer, reader) = (at(leader).await, at(follower).await);
    let (name, mut seen) = (LockKey::new("a").expect("name"), None);
    for round in 0..20 {
        let new = Record::new(format!("text-{round}")).expect("text");
        members[follower].freeze().await.expect("freeze");
        insist("it is written", async || {
            let swap = writer.compare_and_set(&name, seen.as_ref(), Some(&new)).await?;
            assert_eq!(swap, Swap::Done);
            Ok(())
        })
        .await;
        members[follower].thaw().expect("thaw");
        let read = insist("it is read", async || reader.read(&name).await).await;
        assert_eq!(read.as_ref(), Some(&new), "round {round}");
        let late = reader.compare_and_set(&name, seen.as_ref(), None).await.expect("an answer");
        assert_eq!(late, Swap::Differs(Some(new.clone())), "round {round}");
        seen = Some(new);
    }
}
