//! Leases that somebody else ends on purpose, and what their holders are told.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Claim, Effect, ErrorKind, Guard, LockStore, Locker, LossReason, Mode, Release, Renewed};
use lockkit_testkit::faults::{Direction, Proxy, poll_until};
use lockkit_zk::ZkStore;
use tokio::{
    runtime::{Builder, Handle, Runtime},
    task::block_in_place,
};
use zookeeper_client::{Acl, Acls, AuthId, Client, CreateMode, Permission};

use crate::support::*;

const SESSION: Duration = Duration::from_secs(20);
/// The first regular renewal is some 6 s away, and so is each from the one before it.
const AT_ONCE: Duration = Duration::from_secs(3);

/// Also to those that ask only when the others were broken, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_of_several_that_were_broken_is_told_so() {
    let server = Server::start().await;
    let (store, other) = (server.store().await, server.store().await);
    let readers = [0; 3].map(|_| claim_as(Mode::Shared, "a"));
    for reader in &readers {
        hold(&store, reader).await;
    }
    for reader in &readers {
        free(&other, reader).await;
    }
    for reader in &readers {
        assert_eq!(lost(renew(&store, reader).await), LossReason::Revoked);
    }
}

/// One after the other has the lock, and none looks before all are broken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_told_though_the_next_one_was_broken_too() {
    let server = Server::start().await;
    let (store, other) = (server.store().await, server.store().await);
    let claims = [Mode::Exclusive, Mode::Exclusive, Mode::Shared, permit(2), Mode::Exclusive].map(|m| claim_as(m, "a"));
    for claim in &claims {
        hold(&store, claim).await;
        free(&other, claim).await;
    }
    let last = claim("a");
    for held in [false, true] {
        if held {
            hold(&other, &last).await;
        }
        for claim in &claims {
            let mode = claim.mode;
            assert_eq!(lost(renew(&store, claim).await), LossReason::Revoked, "{mode} {held}");
            assert_eq!(store.release(claim).await.expect("release"), Release::NotHeld(LossReason::Revoked), "{mode}");
        }
    }
    free(&other, &last).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_that_are_broken_at_once_are_told() {
    const HOLDERS: usize = 12;
    let server = Server::start().await;
    let store = server.store().await;
    let (mut readers, mut breaking) = (Vec::new(), tokio::task::JoinSet::new());
    for _ in 0..HOLDERS {
        let reader = claim_as(Mode::Shared, "a");
        hold(&store, &reader).await;
        readers.push((reader, server.store().await));
    }
    for (reader, other) in readers.clone() {
        breaking.spawn(async move { free(&other, &reader).await });
    }
    breaking.join_all().await;
    for (reader, _) in &readers {
        assert_eq!(lost(renew(&store, reader).await), LossReason::Revoked);
    }
}

/// Whether one of these answers is about a node that belongs to a session.
fn is_about_an_ephemeral_node(mut replies: &[u8]) -> bool {
    /// What stands before the body of an answer, behind its length: the number, the last change and the error.
    const HEAD: usize = 16;
    /// The length of what a server says of a node, and where in it the session is.
    const STAT: usize = 68;
    const OWNER: usize = 44;
    while let Some((length, rest)) = replies.split_first_chunk() {
        let length = usize::try_from(u32::from_be_bytes(*length)).expect("small");
        let Some((answer, rest)) = rest.split_at_checked(length) else { return false };
        if length == HEAD + STAT && answer[HEAD + OWNER..][..8] != [0; 8] {
            return true;
        }
        replies = rest;
    }
    false
}

/// The server still shows the node, and then it goes, and the directory of the lock as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_that_vanishes_under_the_hand_that_breaks_it_is_gone() {
    let server = Server::start().await;
    let (store, raw) = (server.store().await, Arc::new(server.raw().await));
    let (breaker, proxy) = server.proxied(SESSION).await;
    for mode in [Mode::Shared, permit(2), Mode::Exclusive] {
        let mine = claim_as(mode, "a");
        hold(&store, &mine).await;
        let node = format!("/lockkit/a/{}", children(&raw, "a").await.remove(0));
        let (vanished, raw) = (Arc::new(AtomicBool::new(false)), Arc::clone(&raw));
        let done = Arc::clone(&vanished);
        proxy.rewrite_replies(move |replies| {
            if is_about_an_ephemeral_node(&replies) && !done.swap(true, Ordering::SeqCst) {
                block_in_place(|| {
                    Handle::current().block_on(async {
                        raw.delete(&node, None).await.expect("the node");
                        raw.delete("/lockkit/a", None).await.expect("the directory");
                    });
                });
            }
            replies
        });
        let ended = breaker.release(&mine).await.expect("there is nothing left to break");
        assert!(vanished.load(Ordering::SeqCst), "it did not look at the node");
        assert_eq!(ended, Release::NotHeld(LossReason::Gone), "{mode}");
        proxy.heal();
        assert_eq!(lost(renew(&store, &mine).await), LossReason::Gone, "{mode}");
    }
}

/// The directory of the lock, in which anybody may do this.
async fn directory(raw: &Client, name: &str, anybody: Permission) {
    let open = CreateMode::Container.with_acls(Acls::anyone_all());
    raw.mkdir("/lockkit", &open).await.expect("the root");
    let acl = [Acl::new(anybody, AuthId::anyone())];
    let options = CreateMode::Container.with_acls(Acls::new(&acl));
    raw.create(&format!("/lockkit/{name}"), b"", &options).await.expect("the directory");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_may_delete_and_not_write_breaks_a_lock_without_a_word() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    directory(&raw, "a", Permission::READ | Permission::CREATE | Permission::DELETE).await;
    for mode in [Mode::Exclusive, Mode::Shared, permit(2)] {
        let mine = claim_as(mode, "a");
        hold(&store, &mine).await;
        let ended = other.release(&mine).await.expect("it may delete the node");
        assert!(matches!(ended, Release::Released { waiters: Some(0) }), "{mode}: {ended:?}");
        assert!(children(&raw, "a").await.is_empty(), "{mode}");
        assert_eq!(lost(renew(&store, &mine).await), LossReason::Gone, "{mode}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_may_not_delete_breaks_no_lock() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    for (mode, may_write) in
        [(Mode::Shared, false), (Mode::Shared, true), (Mode::Exclusive, false), (Mode::Exclusive, true)]
    {
        let name = format!("{mode} {may_write}");
        let more = if may_write { Permission::WRITE } else { Permission::NONE };
        directory(&raw, &name, Permission::READ | Permission::CREATE | more).await;
        let mine = claim_as(mode, &name);
        hold(&store, &mine).await;
        let error = other.release(&mine).await.expect_err("it may not delete the node");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Denied, Effect::None), "{error}");
        assert!(matches!(renew(&store, &mine).await.expect("renew"), Renewed::Held(_)), "{name}");
        let (data, _) = raw.get_data(&format!("/lockkit/{name}")).await.expect("the directory");
        assert!(data.is_empty(), "{name}: it says that the lease was revoked");
    }
}

/// The node is gone either way when the release is repeated; only the word tells who it was.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_release_does_not_hide_that_the_lease_was_revoked() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(SESSION).await;
    let other = server.store().await;
    for (mode, before) in [(Mode::Exclusive, false), (Mode::Exclusive, true), (Mode::Shared, false)] {
        let mine = claim_as(mode, "a");
        hold(&store, &mine).await;
        if before {
            free(&other, &mine).await;
        }
        proxy.hold(if before { Direction::ToClient } else { Direction::ToServer });
        let error = store.release(&mine).await.expect_err("nobody answers");
        assert_eq!(error.effect(), Effect::Unknown, "{error}");
        if !before {
            free(&other, &mine).await;
        }
        proxy.heal();
        let release = insist("release", async || store.release(&mine).await).await;
        assert_eq!(release, Release::NotHeld(LossReason::Revoked), "{mode}, revoked before the release: {before}");
    }
}

/// A lease of the lock `a` that is about to be broken; one that was renewed has a watch on its node.
async fn acquire(locker: &Locker, renewed: bool) -> Guard {
    let guard =
        insist("acquire", async || locker.lock("a").ttl(SESSION).try_acquire().await).await.expect("it is free");
    if renewed {
        insist("renew", async || guard.renew().await).await;
    }
    guard
}

/// The node of a guard, as it is named in requests.
fn node_of(guard: &Guard) -> String {
    format!("_c_{}-", &guard.token().reveal()[..8])
}

async fn heard(guard: &Guard, place: &str) -> LossReason {
    let heard = tokio::time::timeout(AT_ONCE, guard.lost()).await;
    heard.unwrap_or_else(|_| panic!("{place}: the holder does not hear that its lease was broken"))
}

/// The store takes the break for the wish of the holder, who is to hear of it although whoever asked for it hears nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_break_by_way_of_its_own_store_is_heard_though_its_reply_is_lost() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(SESSION).await;
    let (mine, breaker) = (locker(&store), locker(&store));
    for renewed in [false, true] {
        let guard = acquire(&mine, renewed).await;
        proxy.drop_reply_after(node_of(&guard), 1);
        breaker.break_lock("a", guard.token()).await.expect_err("its reply was lost");
        assert_eq!(heard(&guard, &format!("renewed before: {renewed}")).await, LossReason::Gone);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_break_by_way_of_its_own_store_is_heard_though_nobody_awaits_it() {
    let server = Server::start().await;
    let store = connect(server.config().session(SESSION)).await;
    let (mine, breaker) = (locker(&store), locker(&store));
    for (renewed, polls) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
        let guard = acquire(&mine, renewed).await;
        {
            let mut breaking = std::pin::pin!(breaker.break_lock("a", guard.token()));
            _ = poll_until(breaking.as_mut(), polls, || {}).await;
        }
        let place = format!("renewed before: {renewed}, dropped after {polls} polls");
        assert_eq!(heard(&guard, &place).await, LossReason::Gone, "{place}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_break_is_heard_after_one_that_came_to_nothing() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(SESSION).await;
    let (mine, other) = (locker(&store), locker(&server.store().await));
    let guard = acquire(&mine, true).await;
    proxy.hold(Direction::ToServer);
    mine.break_lock("a", guard.token()).await.expect_err("it does not arrive");
    lose_what_is_held_back(&proxy).await;
    insist("renew", async || guard.renew().await).await;
    assert!(guard.is_held(), "it was not broken");
    assert!(matches!(other.break_lock("a", guard.token()).await, Ok(Release::Released { .. })), "it is held");
    assert_eq!(heard(&guard, "broken at the second attempt").await, LossReason::Revoked);
}

async fn lose_what_is_held_back(proxy: &Proxy) {
    proxy.refuse(true);
    proxy.cut().await;
    proxy.heal();
    proxy.refuse(false);
}

/// The runtime of a caller: nothing happens on it but in its calls.
fn callers_runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("runtime")
}

/// What the store does for a lease from one renewal to the next must not depend on where it was renewed. Here that is on a
/// runtime which ends after it, or else is not driven any more.
fn a_break_is_heard_after_a_renewal_elsewhere(ends: bool) {
    let home = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("runtime");
    let server = home.block_on(Server::start());
    let (store, other) = home.block_on(async { (server.store().await, server.store().await) });
    for mode in [Mode::Exclusive, Mode::Shared, permit(2)] {
        let mine = claim_as(mode, "a");
        home.block_on(hold(&store, &mine));
        let calls = callers_runtime();
        let renewed = calls.block_on(renew(&store, &mine)).expect("renew");
        assert!(matches!(renewed, Renewed::Held(_)), "{mode}");
        let kept = (!ends).then_some(calls);
        home.block_on(is_told_of_a_break(&store, &other, &mine));
        drop(kept);
    }
    // It ends its processes on a runtime.
    home.block_on(async { drop(server) });
}

/// The lease is broken, and another has the lock. The next renewals say so.
async fn is_told_of_a_break(store: &ZkStore, other: &ZkStore, mine: &Claim) {
    let next = claim_as(Mode::Exclusive, mine.key.as_str());
    free(other, mine).await;
    hold(other, &next).await;
    let mut reason = None;
    eventually(&format!("the holder is told, {}", mine.mode), async || {
        if let Renewed::Lost(lost) = renew(store, mine).await.expect("renew") {
            reason = Some(lost);
        }
        reason.is_some()
    })
    .await;
    assert_eq!(reason, Some(LossReason::Revoked), "{}", mine.mode);
    free(other, &next).await;
}

#[test]
fn a_break_is_heard_though_the_runtime_of_the_last_renewal_has_ended() {
    a_break_is_heard_after_a_renewal_elsewhere(true);
}

#[test]
fn a_break_is_heard_though_the_runtime_of_the_last_renewal_is_not_driven() {
    a_break_is_heard_after_a_renewal_elsewhere(false);
}

/// The watch tells of one change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_break_is_heard_after_something_was_written_into_the_node() {
    let server = Server::start().await;
    let (store, other, raw) = (server.store().await, server.store().await, server.raw().await);
    for mode in [Mode::Exclusive, Mode::Shared, permit(2)] {
        let mine = claim_as(mode, "a");
        hold(&store, &mine).await;
        assert!(matches!(renew(&store, &mine).await.expect("renew"), Renewed::Held(_)), "{mode}");
        let node = format!("/lockkit/a/{}", children(&raw, "a").await.remove(0));
        let (data, _) = raw.get_data(&node).await.expect("the node");
        raw.set_data(&node, &data, None).await.expect("the node");
        is_told_of_a_break(&store, &other, &mine).await;
    }
}
