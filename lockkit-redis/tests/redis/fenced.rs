//! Values that check fences.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    ErrorKind, Fence, LockStore, Locker,
    fenced::{Admission, FencedResource},
};
use lockkit_redis::{RedisStore, fenced::RedisResource};
use lockkit_testkit::{BoxError, a_frozen_holder_is_refused};

use crate::support::{Server, raw};

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_was_frozen_past_its_lease_is_refused() {
    let server = Server::start().await;
    let resource = RedisResource::connect(server.config(), "stock/7").await.expect("connect");
    let url = server.url("");
    let open = move || {
        let url = url.clone();
        async move { Ok::<_, BoxError>(Arc::new(RedisStore::from_url(&url).await?) as Arc<dyn LockStore>) }
    };
    let proof = a_frozen_holder_is_refused(open, Arc::new(resource), "stock/7", Duration::from_millis(300)).await;
    proof.expect("the late write is refused");
    assert_eq!(raw::<String>(&mut server.raw(), "GET stock/7"), "third");
}

#[tokio::test]
async fn fences_are_compared_exactly_up_to_the_largest() {
    let server = Server::start().await;
    let resource = RedisResource::connect(server.config(), "a").await.expect("connect");
    for (fence, admitted) in [
        (9, true),
        (10, true),
        (9, false),
        ((1 << 53) + 1, true),
        (1 << 53, false),
        (u64::MAX, true),
        (u64::MAX - 1, false),
    ] {
        assert_eq!(resource.claim(Fence::new(fence)).await.expect("claim").is_admitted(), admitted, "{fence}");
    }
    let other = resource.at("b");
    assert_eq!(other.claim(Fence::NONE).await.expect("claim"), Admission::Refused { highest: Fence::NONE });
    assert_eq!(other.read().await.expect("read"), None);
}

/// The script is forgotten by the server, and the value may be anything.
#[tokio::test]
async fn it_outlives_a_flush_of_the_scripts() {
    let server = Server::start().await;
    let resource = RedisResource::connect(server.config(), "a").await.expect("connect");
    let guard = Locker::new(server.store().await).lock("a").acquire().await.expect("acquire");
    resource.write(guard.fence(), b"").await.expect("write").ok().expect("admitted");
    raw::<String>(&mut server.raw(), "SCRIPT FLUSH");
    resource.write(guard.fence(), &[0, 255, b'\r', b'\n']).await.expect("write").ok().expect("admitted");
    assert_eq!(resource.read().await.expect("read").as_deref(), Some(&[0, 255, b'\r', b'\n'][..]));
    server.kill().await;
    let error = resource.claim(guard.fence()).await.expect_err("the server is gone");
    assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut), "{error}");
}
