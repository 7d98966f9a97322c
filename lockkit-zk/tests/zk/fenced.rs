//! Nodes that check fences.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    Effect, ErrorKind, Fence, LockStore,
    fenced::{Admission, FencedResource},
};
use lockkit_testkit::{
    AsyncOpen, BoxError, a_frozen_holder_is_refused, a_frozen_writer_is_refused_after_readers, faults::Proxy,
};
use lockkit_zk::{ZkConfig, ZkStore, fenced::ZkResource};
use tokio::{
    runtime::{Handle, Runtime},
    task::block_in_place,
};
use zookeeper_client::{Acls, CreateMode};

use crate::support::{Server, eventually, spoil_a_length};

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_was_frozen_past_its_session_is_refused() {
    let server = Server::start().await;
    let resource = ZkResource::connect(server.config(), "/route").await.expect("connect");
    let (open, ttl) = (opens(&server), Duration::from_secs(1));
    let proof = a_frozen_holder_is_refused(open, Arc::new(resource), "route", ttl).await;
    proof.expect("the late write is refused");
    assert_eq!(server.raw().await.get_data("/route").await.expect("the node").0, b"third");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_was_frozen_is_refused_after_readers() {
    let server = Server::start().await;
    let resource = ZkResource::connect(server.config(), "/route").await.expect("connect");
    let (open, ttl) = (opens(&server), Duration::from_secs(1));
    let proof = a_frozen_writer_is_refused_after_readers(open, Arc::new(resource), "route", ttl).await;
    proof.expect("the late write is refused, and readers share");
    assert_eq!(server.raw().await.get_data("/route").await.expect("the node").0, b"second");
}

/// Clients whose sessions end soon.
fn opens(server: &Server) -> impl AsyncOpen + Clone {
    let url = format!("{}?session=1s", server.0.url());
    move || {
        let url = url.clone();
        async move { Ok::<_, BoxError>(Arc::new(ZkStore::from_url(&url).await?) as Arc<dyn LockStore>) }
    }
}

/// Readers that find their fence recorded change nothing, so that any number of them may claim at once.
#[tokio::test]
async fn readers_are_not_in_each_others_way() {
    let server = Server::start().await;
    let resource = ZkResource::connect(server.config(), "/a").await.expect("connect");
    resource.write(Fence::new(5), b"a").await.expect("write").ok().expect("admitted");
    resource.claim_shared(Fence::new(7)).await.expect("claim").ok().expect("admitted");
    let before = server.raw().await.get_data("/a.highest-fence").await.expect("the node");
    assert_eq!(before.0, b"7 5");
    let claims = (0..64_u64).map(|reader| {
        let resource = resource.clone();
        tokio::spawn(async move { resource.claim_shared(Fence::new(6 + reader % 2)).await })
    });
    for claim in claims.collect::<Vec<_>>() {
        assert_eq!(claim.await.expect("no panic").expect("an answer"), Admission::Admitted);
    }
    assert_eq!(server.raw().await.get_data("/a.highest-fence").await.expect("the node").1.version, before.1.version);
    assert_eq!(resource.claim(Fence::new(6)).await.expect("claim"), Admission::Refused { highest: Fence::new(7) });
    resource.claim(Fence::new(8)).await.expect("claim").ok().expect("admitted");
    assert_eq!(server.raw().await.get_data("/a.highest-fence").await.expect("the node").0, b"8");
    assert_eq!(
        resource.claim_shared(Fence::new(7)).await.expect("claim"),
        Admission::Refused { highest: Fence::new(8) }
    );
}

#[tokio::test]
async fn of_many_at_once_the_highest_wins() {
    let server = Server::start().await;
    let resource = ZkResource::connect(server.config(), "/a").await.expect("connect");
    let writes = (1..=8_u64).map(|fence| {
        let resource = resource.clone();
        tokio::spawn(async move { resource.write(Fence::new(fence), &[fence as u8]).await })
    });
    for write in writes.collect::<Vec<_>>() {
        _ = write.await.expect("no panic").expect("an answer");
    }
    assert_eq!(resource.read().await.expect("read"), Some(vec![8]));
    let late = resource.write(Fence::new(7), &[7]).await.expect("write");
    assert_eq!(late, Admission::Refused { highest: Fence::new(8) });
}

#[tokio::test]
async fn a_path_that_is_none_and_a_missing_parent_are_said() {
    let server = Server::start().await;
    for path in ["", "/", "a", "/a/"] {
        let error = ZkResource::connect(server.config(), path).await.expect_err(path);
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{path}");
    }
    let orphan = ZkResource::connect(server.config(), "/no/parent").await.expect("connect");
    assert!(orphan.claim(Fence::new(1)).await.is_err());
    assert_eq!(orphan.read().await.expect("read"), None);
}

/// As locks do: services that share an ensemble have a chroot each, and the same paths below it.
#[tokio::test]
async fn values_lie_below_the_chroot() {
    let (server, options) = (Server::start().await, CreateMode::Persistent.with_acls(Acls::anyone_all()));
    let raw = server.raw().await;
    for (chroot, value, fence) in [("/x", b"x", 5), ("/y", b"y", 3)] {
        raw.create(chroot, b"", &options).await.expect("the chroot");
        let resource = ZkResource::connect(server.config().chroot(chroot), "/a").await.expect("connect");
        for resource in [resource.clone(), resource.at("/b")] {
            // The second one changes nodes that the first one has made.
            for fence in [fence, fence + 1] {
                let written = resource.write(Fence::new(fence), value).await.expect("write");
                assert_eq!(written, Admission::Admitted, "it met {chroot}'s neighbour");
            }
            assert_eq!(resource.read().await.expect("read").as_deref(), Some(&value[..]));
        }
        for path in ["/a", "/b"] {
            assert_eq!(raw.get_data(&format!("{chroot}{path}")).await.expect("the value").0, value);
            let highest = raw.get_data(&format!("{chroot}{path}.highest-fence")).await.expect("the fence").0;
            assert_eq!(String::from_utf8_lossy(&highest), (fence + 1).to_string());
            assert!(raw.check_stat(path).await.expect("stat").is_none(), "{path} is in front of the chroot");
        }
    }
    let root = ZkResource::connect(server.config().chroot("/"), "/x/a").await.expect("connect");
    assert_eq!(root.read().await.expect("read").as_deref(), Some(&b"x"[..]));
}

/// Also before there is a fence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_that_is_deleted_while_it_is_written_is_made_anew() {
    let server = Server::start().await;
    let (proxy, raw) = (Proxy::start(server.0.addr()).await.expect("proxy"), Arc::new(server.raw().await));
    let resource = ZkResource::connect(ZkConfig::new([proxy.addr().to_string()]), "/a").await.expect("connect");
    for has_fence in [false, true] {
        let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
        raw.create("/a", b"before", &options).await.expect("the value");
        let (mut answers, hand) = (0, Arc::clone(&raw));
        proxy.rewrite_replies(move |replies| {
            answers += 1;
            // The first answer is about the fence, and the second says that there is a value.
            if answers == 2 {
                block_in_place(|| Handle::current().block_on(hand.delete("/a", None))).expect("the value");
            }
            replies
        });
        let written = resource.write(Fence::new(1), b"after").await.expect("write");
        assert_eq!(written, Admission::Admitted, "there was a fence: {has_fence}");
        proxy.heal();
        assert_eq!(resource.read().await.expect("read").as_deref(), Some(&b"after"[..]));
        raw.delete("/a", None).await.expect("the value");
    }
}

/// The driver waits for the rest of an answer, and takes all that comes after it for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_resource_whose_answers_can_not_be_read_serves_again() {
    let server = Server::start().await;
    let proxy = Proxy::start(server.0.addr()).await.expect("proxy");
    let config = ZkConfig::new([proxy.addr().to_string()]).timeout(Duration::from_millis(500));
    let resource = ZkResource::connect(config, "/a").await.expect("connect");
    spoil_a_length(&proxy);
    eventually("it serves again", async || resource.read().await.is_ok()).await;
    let written = resource.write(Fence::new(1), b"a").await.expect("write");
    assert_eq!(written, Admission::Admitted);
}

#[test]
fn a_resource_outlives_the_runtime_that_it_was_connected_on() {
    let runtime = || Runtime::new().expect("a runtime");
    let (first, second) = (runtime(), runtime());
    let (_server, resource) = first.block_on(async {
        let server = Server::start().await;
        let resource = ZkResource::connect(server.config(), "/a").await.expect("connect");
        (server, resource)
    });
    first.shutdown_background();
    second.block_on(eventually("it serves again", async || resource.read().await.is_ok()));
}

/// The driver tells all requests under way that the session is over, also those that the servers have carried out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_whose_session_ends_before_its_answer_may_have_been_made() {
    const SESSION_EXPIRED: i32 = -112;
    let server = Server::start().await;
    let proxy = Proxy::start(server.0.addr()).await.expect("proxy");
    let resource = ZkResource::connect(ZkConfig::new([proxy.addr().to_string()]), "/a").await.expect("connect");
    let mut read = false;
    proxy.rewrite_replies(move |mut bytes| {
        // The first answer says that there is no fence yet; the error of the second one follows its length and its two numbers.
        if std::mem::replace(&mut read, true) {
            bytes[16..20].copy_from_slice(&SESSION_EXPIRED.to_be_bytes());
        }
        bytes
    });
    let error = resource.claim(Fence::new(1)).await.expect_err("the session is over");
    assert!(error.effect() == Effect::Unknown && error.is_retryable(), "{error:?}");
    proxy.heal();
    // Unlike the node of a claim, what it made does not end with the session.
    assert_eq!(server.raw().await.get_data("/a.highest-fence").await.expect("the node").0, b"1");
    let late = resource.claim(Fence::NONE).await.expect("claim");
    assert_eq!(late, Admission::Refused { highest: Fence::new(1) });
}
