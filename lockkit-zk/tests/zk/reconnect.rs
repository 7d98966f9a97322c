//! The same session on another connection.

use std::time::{Duration, Instant};

use lockkit_core::{LossReason, Renewed};

use crate::support::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_comes_back_is_found_soon_however_long_it_was_away() {
    let server = Server::start().await;
    let (store, proxy) = server.proxied(Duration::from_secs(20)).await;
    let mine = claim("a");
    hold(&store, &mine).await;
    proxy.refuse(true);
    proxy.cut().await;
    // The driver doubles its pauses: with one address it would sleep from here for longer than it was away.
    tokio::time::sleep(Duration::from_secs(7)).await;
    proxy.heal();
    let back = Instant::now();
    let renewed = insist("renew", async || renew(&store, &mine).await).await;
    assert!(matches!(renewed, Renewed::Held(_)), "{renewed:?}");
    assert!(back.elapsed() < Duration::from_secs(3), "it took {:?}", back.elapsed());
    free(&store, &mine).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_lasts_no_longer_than_the_timeout_that_a_reconnection_gave() {
    const ASKED: Duration = Duration::from_secs(12);
    const GIVEN: Duration = Duration::from_secs(2);
    let server = Server::start().await;
    let (store, proxy) = server.proxied(ASKED).await;
    let lock = locker(&store).lock("a").ttl(ASKED);
    let promised = lock.try_acquire().await.expect("ask").expect("free");
    server.0.kill().await.expect("kill");
    server.0.limit_sessions(GIVEN, GIVEN).expect("configure");
    server.0.restart(lockkit_testkit::servers::Keep::Data).await.expect("restart");
    let reason = tokio::time::timeout(ASKED / 3, promised.lost()).await.expect("nobody keeps that promise");
    assert_eq!(reason, LossReason::Expired);

    let guard = lock.acquire_within(ASKED).await.expect("ask").expect("free");
    assert!(guard.is_held() && guard.remaining() <= GIVEN, "it is believed in for {:?}", guard.remaining());
    let waiting = locker(&server.store().await);
    proxy.blackhole();
    let next = waiting.lock("a").acquire_within(Duration::from_secs(30)).await.expect("ask").expect("granted");
    assert!(
        !guard.is_held(),
        "two holders: the lock was given away {:?} before the end of the lease",
        guard.remaining()
    );
    assert!(next.fence() > guard.fence());
}
