//! The rules, as this store keeps them, and the layout of its nodes.

use std::{pin::pin, time::Duration};

use lockkit_core::{
    Attempt, Effect, ErrorKind, Fence, FenceRequest, LockKey, LockStore, LossReason, Query, Release, Renewal, Renewed,
    store::{Record, Records, Swap},
};
use lockkit_testkit::faults::{Direction, overtaken_requests, poll_until};
use lockkit_zk::{ZkConfig, ZkStore};
use zookeeper_client::{Acl, Acls, AuthId, CreateMode, Permission};

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_is_curators_queue() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    let mine = claim("orders");
    let hold = hold(&store, &mine).await;
    let nodes = children(&raw, "orders").await;
    let hex = mine.token.reveal();
    let uuid = format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]);
    assert_eq!(nodes, [format!("_c_{uuid}-lock-0000000001")]);
    let (data, stat) = raw.get_data(&format!("/lockkit/orders/{}", nodes[0])).await.expect("the node");
    assert_eq!(String::from_utf8_lossy(&data), "lockkit:1:1::test: holder");
    assert!(stat.ephemeral_owner != 0);
    assert_eq!(hold.fence.get(), u64::try_from(stat.czxid).expect("positive") * 128);
    free(&store, &mine).await;
    assert!(children(&raw, "orders").await.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn directories_come_and_go() {
    let server = Server::start_with(&["-Dznode.container.checkIntervalMs=50"]).await;
    let (store, raw) = (server.store().await, server.raw().await);
    let (mut last, mut vanished) = (Fence::NONE, 0);
    for round in 0..150_u64 {
        let mine = claim("a");
        let held = insist("acquire", async || attempt(&store, &mine).await).await;
        let held = granted(held);
        assert!(held.fence > last);
        last = held.fence;
        free(&store, &mine).await;
        if round % 15 == 0 {
            tokio::time::sleep(Duration::from_millis(150)).await;
            vanished += u32::from(raw.check_stat("/lockkit/a").await.expect("ask").is_none());
        }
    }
    assert!(vanished > 0, "the directory is not a container: it stays");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_try_leaves_nothing_behind() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let mine = claim("a");
    hold(&store, &mine).await;
    for _ in 0..10 {
        let answer = attempt(&other, &claim("a")).await.expect("ask");
        let Attempt::Contended(contention) = answer else { panic!("granted twice") };
        assert_eq!(contention.holder.expect("shown").as_str(), "test: holder");
    }
    assert_eq!(children(&raw, "a").await.len(), 1);
    free(&store, &mine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_nodes_and_ours_respect_each_other() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let prefix = "/lockkit/shared/_c_6d3b9a3e-0000-4000-8000-000000000001-lock-";
    let container = CreateMode::Container.with_acls(Acls::anyone_all());
    raw.mkdir("/lockkit/shared", &container).await.expect("the directory");

    let (_, sequence) = raw.create(prefix, b"192.0.2.1", &options).await.expect("a foreign node");
    let Attempt::Contended(contention) = attempt(&store, &claim("shared")).await.expect("ask") else {
        panic!("the foreign holder was passed over")
    };
    assert_eq!(contention.holder.expect("shown").as_str(), "192.0.2.1");
    let query = Query::Keys(vec![claim("shared").key]);
    let state = store.inspect(&query).await.expect("inspect").remove(0);
    assert_eq!((state.holders[0].token, state.holders[0].fence), (None, None));

    let mine = claim("shared");
    let waiting = request(&mine, TTL);
    let (waited, ()) = tokio::join!(store.acquire(&waiting), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        raw.delete(&format!("{prefix}{sequence}"), None).await.expect("the foreign release");
    });
    granted(waited.expect("acquire"));
    let (_, behind) = raw.create(prefix, b"192.0.2.1", &options).await.expect("a foreign node");
    let nodes = children(&raw, "shared").await;
    let number = |node: &String| node.rsplit("lock-").next().map(str::to_owned);
    assert!(nodes.iter().filter_map(number).min() < Some(behind.to_string()), "ours is not the first");
    assert!(matches!(renew(&store, &mine).await.expect("renew"), Renewed::Held(_)));
    free(&store, &mine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_released_from_elsewhere() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let (mine, waiting) = (claim("a"), claim("a"));
    hold(&store, &mine).await;
    let attempt = store.acquire(&request(&waiting, Duration::from_millis(50))).await.expect("ask");
    assert!(is_contended(&attempt));
    assert_eq!(children(&raw, "a").await.len(), 2, "a waiter keeps its place");
    // What is not the holder's is not held, but its place ends all the same.
    assert_eq!(other.release(&waiting).await.expect("release"), Release::NotHeld(LossReason::Taken));
    assert_eq!(children(&raw, "a").await.len(), 1);
    assert_eq!(other.release(&mine).await.expect("release"), Release::Released { waiters: Some(0) });
    assert!(children(&raw, "a").await.is_empty());
    assert_eq!(lost(renew(&store, &mine).await), LossReason::Revoked);
    assert_eq!(store.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Revoked));
}

/// The request for it was overtaken by the release.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_comes_while_its_claim_is_released_is_no_other_s() {
    let server = Server::start().await;
    let (way, (store, proxy)) = (server.store().await, server.proxied(Duration::from_secs(20)).await);
    // It waits for each answer.
    proxy.delay(Direction::ToClient, Duration::from_millis(2));
    let reasons = overtaken_requests(&store, &way, || request(&claim("a"), Duration::ZERO)).await.expect("answers");
    assert!(reasons.len() > 1 && reasons.iter().all(|reason| *reason == LossReason::Gone), "{reasons:?}");
}

/// It goes on with what it saw of the grant before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_that_is_not_polled_undoes_nothing_of_one_that_came_after_it() {
    let server = Server::start().await;
    let store = server.store().await;
    let mine = claim("a");
    let held = hold(&store, &mine).await;
    let renewal = Renewal::new(mine.clone(), TTL);
    let raised = Renewal { fence_floor: Some(held.fence.offset(1_000_000)), ..renewal.clone() };
    let nested = Renewal { depth: 2, ..renewal.clone() };
    let [renewal, raised, nested] = [[renewal], [raised], [nested]];
    let mut slow = pin!(store.renew(&renewal));
    assert!(poll_until(slow.as_mut(), 1, || {}).await.is_none(), "it asks for the node");
    let renew = async |renewal| store.renew(renewal).await.remove(0).expect("renew");
    for renewed in [renew(&raised).await, slow.await.remove(0).expect("renew"), renew(&nested).await] {
        assert!(matches!(&renewed, Renewed::Held(hold) if hold.fence == held.fence), "{renewed:?}");
    }
    let states = store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect");
    assert_eq!(states[0].holders[0].fence, Some(held.fence), "its node says no more which fence it has");
    free(&store, &mine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_floor_stays_with_the_lock() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    let floor = Fence::new(2_000_000_000_000_000);
    let mine = claim("a");
    let mut asked = request(&mine, Duration::ZERO);
    asked.fence = FenceRequest { floor, span: 1000, ..FenceRequest::default() };
    let first = granted(store.acquire(&asked).await.expect("acquire"));
    assert!(first.fence > floor && first.span == 1000);
    assert!(children(&raw, "a").await.contains(&"~fence".to_owned()));
    let shown = |state: Vec<lockkit_core::KeyState>| state[0].holders[0].fence;
    let query = Query::Keys(vec![mine.key.clone()]);
    assert_eq!(shown(other.inspect(&query).await.expect("inspect")), Some(first.fence));
    free(&store, &mine).await;
    assert!(other.inspect(&query).await.expect("inspect")[0].holders.is_empty());

    let next = claim("a");
    let second = hold(&other, &next).await;
    assert!(second.fence >= first.fence.offset(1000));
    assert_eq!(shown(store.inspect(&query).await.expect("inspect")), Some(second.fence));
    let raised = Fence::new(second.fence.get() + 5_000_000);
    let renewal = Renewal { fence_floor: Some(raised), ..Renewal::new(next.clone(), TTL) };
    match other.renew(&[renewal]).await.remove(0).expect("renew") {
        Renewed::Held(hold) => assert_eq!(hold.fence, second.fence),
        Renewed::Lost(reason) => panic!("{reason}"),
    }
    assert_eq!(shown(store.inspect(&query).await.expect("inspect")), Some(second.fence), "the holder keeps its fence");
    // A waiter that saw nothing but the holder go must not overlook what the holder wrote.
    let waiter = claim("a");
    let waiting = request(&waiter, TTL);
    let (third, ()) = tokio::join!(store.acquire(&waiting), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        free(&other, &next).await;
    });
    assert!(granted(third.expect("acquire")).fence > raised);
    free(&store, &waiter).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_holder_before_may_raise_the_fence_while_one_waits() {
    let server = Server::start().await;
    let (store, other) = (server.store().await, server.store().await);
    for _ in 0..20 {
        let (holder, waiter) = (claim("a"), claim("a"));
        let held = hold(&store, &holder).await;
        let raised = Fence::new(held.fence.get() + 1_000_000);
        let waiting = request(&waiter, TTL);
        let (next, ()) = tokio::join!(other.acquire(&waiting), async {
            tokio::time::sleep(Duration::from_millis(5)).await;
            let renewal = Renewal { fence_floor: Some(raised), ..Renewal::new(holder.clone(), TTL) };
            assert!(matches!(store.renew(&[renewal]).await.remove(0).expect("renew"), Renewed::Held(_)));
            free(&store, &holder).await;
        });
        assert!(granted(next.expect("acquire")).fence > raised);
        free(&other, &waiter).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_made_for_who_is_logged_in_are_for_no_one_else() {
    let server = Server::start().await;
    let mine = connect(server.config().digest_auth("shop", "secret")).await;
    let same = connect(server.config().digest_auth("shop", "secret")).await;
    let (stranger, held) = (server.store().await, claim("a"));
    hold(&mine, &held).await;
    assert!(is_contended(&attempt(&same, &claim("a")).await.expect("ask")));
    let error = attempt(&stranger, &claim("a")).await.expect_err("denied");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(!error.is_retryable());
    free(&mine, &held).await;
}

/// The servers let the client make a node, and then don't let it see whether that is the first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_behind_the_creation_leaves_no_node() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    raw.mkdir("/lockkit", &CreateMode::Container.with_acls(Acls::anyone_all())).await.expect("the root");
    let blind = [Acl::new(Permission::CREATE | Permission::DELETE, AuthId::anyone())];
    raw.create("/lockkit/a", b"", &CreateMode::Container.with_acls(Acls::new(&blind))).await.expect("the directory");
    let mine = claim("a");
    let error = attempt(&store, &mine).await.expect_err("it may not look");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::Unknown), "{error}");
    let nodes = async || raw.check_stat("/lockkit/a").await.expect("ask").expect("the directory").num_children;
    assert_eq!(nodes().await, 1);
    locker(&store).lock("a").try_acquire().await.expect_err("it may not look");
    eventually("the core releases its claim", async || nodes().await == 1).await;
    drop(store.release(&mine).await);
    assert_eq!(nodes().await, 0, "a node that nobody knows of holds the lock");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chroot_that_does_not_exist_is_made() {
    let server = Server::start().await;
    let url = format!("{}/app/a%20b?base=/locks", server.0.url());
    let (store, raw) = (ZkStore::from_url(&url).await.expect("connect"), server.raw().await);
    let mine = claim("x/y");
    hold(&store, &mine).await;
    assert_eq!(raw.list_children("/app/a b/locks/x%2Fy").await.expect("children").len(), 1);
    free(&store, &mine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ttl_that_the_session_can_not_keep_is_refused() {
    let server = Server::start().await;
    let store = connect(server.config().session(Duration::from_secs(5))).await;
    for ttl in [Duration::ZERO, Duration::from_millis(99)] {
        let mut asked = request(&claim("a"), Duration::ZERO);
        asked.ttl = ttl;
        assert_eq!(store.acquire(&asked).await.expect_err("refused").kind(), ErrorKind::InvalidInput, "{ttl:?}");
    }
    let mut asked = request(&claim("b"), Duration::ZERO);
    asked.ttl = Duration::MAX;
    let hold = granted(store.acquire(&asked).await.expect("acquire"));
    assert!(hold.until.since(store.info().clock.now()) <= Duration::from_secs(5), "a lease can't outlast its session");
    let mut asked = request(&claim("a"), Duration::ZERO);
    asked.ttl = Duration::from_millis(500);
    let hold = granted(store.acquire(&asked).await.expect("acquire"));
    assert!(hold.until.since(store.info().clock.now()) <= Duration::from_millis(500));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_server_is_an_error_in_time() {
    let error = ZkStore::connect(ZkConfig::new(["127.0.0.1:1"])).await.expect_err("nobody there");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(error.to_string().lines().count(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_is_a_node_that_leaves_nothing_behind() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, server.raw().await);
    let (name, path) = (LockKey::new("a/b").expect("name"), "/lockkit/%record-a%2Fb");
    let texts = ["first", "second"].map(|text| Record::new(text).expect("text"));
    assert_eq!(store.read(&name).await.expect("read"), None);
    assert!(raw.check_stat("/lockkit").await.expect("ask").is_none(), "reading leaves nothing behind");
    let mut children = Vec::new();
    for text in &texts {
        assert_eq!(store.compare_and_set(&name, None, Some(text)).await.expect("set"), Swap::Done);
        let (data, stat) = raw.get_data(path).await.expect("the node");
        let child = raw.list_children(path).await.expect("the child").remove(0);
        assert_eq!(data, format!("{child} {}", text.as_str()).into_bytes());
        assert_eq!((stat.version, stat.ephemeral_owner), (0, 0), "nothing but the child tells one from the other");
        children.push(child);
        if text == &texts[0] {
            assert_eq!(store.compare_and_set(&name, Some(text), None).await.expect("set"), Swap::Done);
            assert!(raw.check_stat(path).await.expect("ask").is_none(), "it was removed");
        }
    }
    assert_ne!(children[0], children[1]);
    for foreign in ["no record", "", "text", "0123456789abcdef", "0123456789abcdef "] {
        raw.set_data(path, foreign.as_bytes(), None).await.expect("write");
        assert_eq!(store.read(&name).await.expect_err(foreign).kind(), ErrorKind::Unexpected);
    }
}

/// It stands for no bound at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_endless_timeout_is_one() {
    let server = Server::start().await;
    let config = server.config().timeout(Duration::MAX);
    let (store, mine) = (connect(config.clone()).await, claim("a"));
    hold(&store, &mine).await;
    let renewed = renew(&store, &mine).await.expect("renew");
    assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}");
    free(&store, &mine).await;
    lockkit_zk::diagnose(&config).await.expect("diagnose");
}
