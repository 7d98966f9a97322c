//! The same session on another connection.

use std::time::{Duration, Instant};

use lockkit_core::Renewed;

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
