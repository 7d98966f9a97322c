//! Short names for what the tests beside the code ask for.

use std::{pin::pin, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Claim, Effect, Hold, HolderInfo, LockKey, LockStore as _, Result};
use lockkit_testkit::{
    calls,
    faults::{Direction, Proxy},
    servers::{ZooKeeperFlavor, ZooKeeperServer},
};

use crate::{
    ZkConfig, ZkStore,
    wire::{name, queue},
};

const BOUND: Duration = Duration::from_secs(5);

pub(crate) async fn server() -> ZooKeeperServer {
    ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required")
}

/// A new claim on the lock `a`.
pub(crate) fn claim() -> Claim {
    calls::claim("a")
}

pub(crate) fn request(claim: &Claim, wait: Duration) -> AcquireRequest {
    AcquireRequest { wait, ..AcquireRequest::new(claim.clone(), Duration::from_secs(20), HolderInfo::new("test")) }
}

pub(crate) fn granted(answer: Result<Attempt>) -> Hold {
    calls::granted(answer.expect("acquire"))
}

/// Gives a session up while the answer to `asked` is on its way, when it holds these claims and one more: for the sake of that one the
/// servers keep the session, and the node of the claim with it. So the claim may have a lease, which a release ends.
pub(crate) async fn is_given_up_while_it_asks(holds: &[Claim], asked: AcquireRequest) {
    let server = server().await;
    let proxy = Proxy::start(server.addr()).await.expect("proxy");
    let store = ZkStore::connect(ZkConfig::new([proxy.addr().to_string()])).await.expect("connect");
    let other = ZkStore::connect(ZkConfig::new([server.addr().to_string()])).await.expect("connect");
    let (session, witness) = [&store, &other].map(|store| store.sessions().present().expect("a session")).into();
    let one_more = Claim { key: LockKey::new("held").expect("name"), ..claim() };
    for claim in holds.iter().chain([&one_more]) {
        granted(store.acquire(&request(claim, Duration::ZERO)).await);
    }
    let (lock, protection) = (session.names.lock(&asked.claim.key), name::protection(&asked.claim.token));
    session.make_lock(&lock, BOUND).await.expect("the directory");
    let has_node = async || {
        let children = witness.list(&lock, BOUND).await.expect("list");
        queue::of_claim(&children, &protection).next().is_some()
    };
    // What it reads first comes late, and so does the answer when the node is there.
    proxy.delay(Direction::ToClient, Duration::from_millis(500));
    let mut asking = pin!(store.acquire(&asked));
    let asked_for = async {
        while !has_node().await {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        answer = &mut asking => panic!("it was answered: {answer:?}"),
        () = asked_for => session.end(),
    }
    proxy.heal();
    let error = asking.await.expect_err("the session is over");
    assert_eq!(error.effect(), Effect::Unknown, "{error}");
    assert!(has_node().await, "the servers know the session still");
    // Nobody revokes a lease that its own store gives up.
    store.release(&asked.claim).await.expect("release");
    assert!(!has_node().await && !witness.is_revoked(&lock, &asked.claim.token, BOUND).await.expect("a directory"));
}
