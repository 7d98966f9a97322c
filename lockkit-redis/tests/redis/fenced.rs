//! Values that check fences.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use lockkit_core::{
    Effect, ErrorKind, Fence, LockStore, Locker,
    fenced::{Admission, FencedResource, SeenFences},
};
use lockkit_redis::{RedisStore, fenced::RedisResource};
use lockkit_testkit::{
    AsyncOpen, BoxError, a_frozen_holder_is_refused, a_frozen_writer_is_refused_after_readers,
    faults::{Direction, Proxy},
};
use tokio::time::timeout;

use crate::{
    herald::Herald,
    snag::Snag,
    support::{Server, eventually, raw},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_was_frozen_past_its_lease_is_refused() {
    let server = Server::start().await;
    let resource = RedisResource::connect(server.config(), "stock/7").await.expect("connect");
    let (open, ttl) = (opens(server.url("")), Duration::from_millis(300));
    let proof = a_frozen_holder_is_refused(open, Arc::new(resource), "stock/7", ttl).await;
    proof.expect("the late write is refused");
    assert_eq!(raw::<String>(&mut server.raw(), "GET stock/7"), "third");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_was_frozen_is_refused_after_readers() {
    let server = Server::start().await;
    let resource = RedisResource::connect(server.config(), "stock/7").await.expect("connect");
    let (open, ttl) = (opens(server.url("")), Duration::from_millis(300));
    let proof = a_frozen_writer_is_refused_after_readers(open, Arc::new(resource), "stock/7", ttl).await;
    proof.expect("the late write is refused, and readers share");
    assert_eq!(raw::<String>(&mut server.raw(), "GET stock/7"), "second");
}

/// Clients of the locks' server.
fn opens(url: String) -> impl AsyncOpen + Clone {
    move || {
        let url = url.clone();
        async move { Ok::<_, BoxError>(Arc::new(RedisStore::from_url(&url).await?) as Arc<dyn LockStore>) }
    }
}

/// Whatever was seen before: numbers of one length and of two, of writers alone and of readers above them.
#[tokio::test]
async fn the_scripts_keep_the_rule_of_the_core() {
    let server = Server::start().await;
    let resource = RedisResource::connect(server.config(), "a").await.expect("connect");
    let fences = [0, 1, 9, 10, 11, (1 << 53) + 1, u64::MAX - 1, u64::MAX].map(Fence::new);
    for before in fences {
        for above in fences {
            for (fence, is_reader) in fences.into_iter().flat_map(|fence| [(fence, false), (fence, true)]) {
                let (mut seen, here) =
                    (SeenFences::default(), resource.at(format!("{before} {above} {fence} {is_reader}")));
                assert_eq!(here.claim(before).await.expect("claim"), seen.admit(before));
                assert_eq!(here.claim_shared(above).await.expect("claim"), seen.admit_shared(above));
                let (claimed, admission) = match is_reader {
                    true => (here.claim_shared(fence).await, seen.admit_shared(fence)),
                    false => (here.claim(fence).await, seen.admit(fence)),
                };
                let of = format!("{fence} after {before} and {above}, as a reader: {is_reader}");
                assert_eq!(claimed.expect("claim"), admission, "{of}");
                // What was remembered shows in what is refused.
                let (writer, reader) = (here.claim(Fence::NONE).await, here.claim_shared(Fence::NONE).await);
                assert_eq!(writer.expect("claim"), Admission::Refused { highest: seen.highest() }, "{of}");
                assert_eq!(reader.expect("claim"), Admission::Refused { highest: seen.writer() }, "{of}");
            }
        }
    }
}

#[tokio::test]
async fn what_is_no_fence_admits_nobody() {
    let server = Server::start().await;
    let resource = RedisResource::connect(server.config(), "a").await.expect("connect");
    for odd in ["x", "-1", "1,2", "1.5", "12-11", "12x11"] {
        raw::<String>(&mut server.raw(), &format!("SET a:highest-fence {odd}"));
        for error in [resource.claim(Fence::new(99)).await, resource.claim_shared(Fence::new(99)).await] {
            assert_eq!(error.expect_err(odd).kind(), ErrorKind::Unexpected, "{odd}");
        }
        assert_eq!(raw::<String>(&mut server.raw(), "GET a:highest-fence"), odd);
    }
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

/// A write that is held up on its way arrives when the holder has written something else, over another connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_comes_late_undoes_no_later_one_of_its_holder() {
    let server = Server::start().await;
    let snag = Snag::start(([127, 0, 0, 1], server.port()).into(), "held up").await;
    let resource =
        RedisResource::connect(format!("redis://{}", snag.addr).parse().expect("a URL"), "a").await.expect("connect");
    let fence = Fence::new(7);
    // The server has the script from here on.
    resource.claim(fence).await.expect("claim").ok().expect("admitted");
    resource.write(fence, b"held up").await.expect_err("its connection broke");
    snag.caught().await;
    for value in ["held up", "second"] {
        resource.write(fence, value.as_bytes()).await.expect("write").ok().expect("admitted");
    }
    snag.let_go().await;
    assert_eq!(resource.read().await.expect("read").as_deref(), Some(b"second".as_slice()));
    // Another client with that fence has numbers of its own, and so has another fence.
    let other = RedisResource::connect(server.config(), "a").await.expect("connect");
    other.write(fence, b"third").await.expect("write").ok().expect("admitted");
    assert_eq!(resource.read().await.expect("read").as_deref(), Some(b"third".as_slice()));
    resource.write(fence.offset(1), b"fourth").await.expect("write").ok().expect("admitted");
    assert_eq!(resource.read().await.expect("read").as_deref(), Some(b"fourth".as_slice()));
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

/// The former primary has written, and will be told to be a replica: what it wrote is gone then.
#[tokio::test(flavor = "multi_thread")]
async fn what_the_former_primary_says_after_a_switch_does_not_count() {
    let (former, next) = (Server::start().await, Server::start().await);
    let address = |port| SocketAddr::from(([127, 0, 0, 1], port));
    let proxy = Proxy::start(address(former.port())).await.expect("proxy");
    let herald = Herald::start(proxy.addr()).await;
    let url = format!("redis+sentinel://{}/{}?timeout=5s", herald.addr, Herald::PRIMARY);
    let resource = RedisResource::connect(url.parse().expect("a URL"), "a").await.expect("connect");
    let fence = Fence::new(7);
    resource.write(fence, b"before").await.expect("write").ok().expect("admitted");
    proxy.hold(Direction::ToClient);
    let writer = resource.clone();
    let writing = tokio::spawn(async move { writer.write(fence, b"late").await });
    eventually("the former primary has written", async || raw::<String>(&mut former.raw(), "GET a") == "late").await;
    herald.announce(address(next.port()));
    eventually("the next primary is asked", async || {
        // The former one would not answer.
        matches!(timeout(Duration::from_millis(200), resource.read()).await, Ok(Ok(None)))
    })
    .await;
    proxy.release(Direction::ToClient);
    let error = writing.await.expect("task").expect_err("another server is in charge");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
}

/// Nothing is promised in silence that is not kept.
#[tokio::test]
async fn an_option_that_is_for_locks_alone_is_refused() {
    let server = Server::start().await;
    let error = RedisResource::connect(server.config().replicas(1), "a").await.expect_err("no replicas");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::InvalidInput, Effect::None), "{error}");
    assert!(error.message().contains("replicas") && error.to_string().lines().count() == 1, "{error}");
}
