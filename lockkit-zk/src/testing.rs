//! Short names for what the tests beside the code ask for.

use std::time::Duration;

use lockkit_core::{
    AcquireRequest, Attempt, Claim, FenceRequest, Hold, HolderInfo, LockKey, Mode, Order, Result, Token,
};
use lockkit_testkit::servers::{ZooKeeperFlavor, ZooKeeperServer};

pub(crate) async fn server() -> ZooKeeperServer {
    ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required")
}

/// A new claim on the lock `a`.
pub(crate) fn claim() -> Claim {
    let (key, token) = (LockKey::new("a").expect("name"), Token::random().expect("random"));
    Claim { key, token, mode: Mode::Exclusive }
}

pub(crate) fn request(claim: &Claim, wait: Duration) -> AcquireRequest {
    AcquireRequest {
        claim: claim.clone(),
        ttl: Duration::from_secs(20),
        wait,
        order: Order::Any,
        fence: FenceRequest::default(),
        holder: HolderInfo::new("test"),
        from: None,
    }
}

pub(crate) fn granted(answer: Result<Attempt>) -> Hold {
    match answer.expect("acquire") {
        Attempt::Granted(hold) => hold,
        other @ Attempt::Contended(_) => panic!("not granted: {other:?}"),
    }
}
