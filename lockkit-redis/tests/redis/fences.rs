//! Fences when the data comes back older than it was.

use std::time::Duration;

use lockkit_core::{AcquireRequest, Fence, FenceRequest, LockStore, Locker, Order};
use lockkit_redis::RedisStore;
use lockkit_testkit::servers::{Keep, RedisOptions, RedisSentinels, RedisServer};

use crate::support::*;

/// The fence of the last of some grants.
async fn used(store: &RedisStore, times: u32) -> Fence {
    let mut last = Fence::NONE;
    for _ in 0..times {
        let mine = claim("a");
        let fence = hold(store, &mine).await.fence;
        assert!(fence > last);
        last = fence;
        free(store, &mine).await;
    }
    last
}

/// What was written after the snapshot is gone, and the counter goes on from where it was then.
#[tokio::test]
async fn no_fence_comes_twice_after_a_restart_from_a_snapshot() {
    let server = RedisServer::start(RedisOptions::default().flavor(flavor())).await.expect("a server");
    let store = RedisStore::from_url(&server.url()).await.expect("connect");
    used(&store, 3).await;
    server.command(&["SAVE"]).await.expect("SAVE");
    let last = used(&store, 4).await;
    server.restart(Keep::Data).await.expect("restart");
    // The store has to notice that its connection is gone.
    let mine = claim("a");
    eventually("a grant", async || attempt(&store, &mine).await.is_ok()).await;
    let next = hold(&store, &mine).await.fence;
    assert!(next > last, "{next} follows {last}");
    assert!(store.release(&mine).await.is_ok());
    let other = RedisStore::from_url(&server.url()).await.expect("connect");
    assert!(used(&other, 3).await > next);
}

/// A floor, or a clock that was set back, puts a counter hours ahead of the clock, and a lock that is handed over all the time may keep it
/// there: it lasts until the clock has passed it, wherever it is by then.
#[tokio::test]
async fn a_counter_that_is_ahead_of_the_clock_outlasts_its_own_fences() {
    const HOUR: u64 = 3_600_000_000;
    let server = RedisServer::start(RedisOptions::default().flavor(flavor())).await.expect("a server");
    let store = RedisStore::from_url(&server.url()).await.expect("connect");
    for (name, order) in [("a", Order::Any), ("b", Order::Fifo)] {
        let counter = format!("{{lockkit:{name}}}:fence");
        let number = async |command: &[&str]| -> u64 {
            server.command(command).await.expect("an answer").parse().expect("a number")
        };
        let take = async |floor: u64| {
            let mine = claim(name);
            let asked = AcquireRequest { order, ..request(&mine, Duration::ZERO) };
            let asked = AcquireRequest { fence: FenceRequest { floor: Fence::new(floor), ..asked.fence }, ..asked };
            granted(store.acquire(&asked).await.expect("acquire"));
            free(&store, &mine).await;
        };
        take(0).await;
        let start = number(&["GET", &counter]).await;
        take(start + 10 * HOUR).await;
        // What many grants would add in those hours, up to the last one before the next thousand seconds.
        let moved = (start + 16 * HOUR).next_multiple_of(1_000_000_000) - 1;
        let more = moved - number(&["GET", &counter]).await;
        number(&["INCRBY", &counter, &more.to_string()]).await;
        take(0).await;
        let (ahead, lasts) = (moved - start, number(&["PTTL", &counter]).await * 1000);
        assert!(lasts > ahead + HOUR - HOUR / 60, "{name}: {lasts} µs are left of a counter that is {ahead} µs ahead");
    }
}

/// Behind the back of a connection that lives on.
#[tokio::test]
async fn no_fence_comes_twice_after_the_data_was_deleted() {
    let server = RedisServer::start(RedisOptions::default().flavor(flavor())).await.expect("a server");
    let store = RedisStore::from_url(&server.url()).await.expect("connect");
    let last = used(&store, 3).await;
    server.command(&["FLUSHALL"]).await.expect("FLUSHALL");
    let next = used(&store, 3).await;
    assert!(next > last, "{next} follows {last}");
}

/// The counter of a lock that is held for hours lapses, and may be evicted. The fences that tasks passed on, and that of another
/// resumption, must not come again.
#[tokio::test]
async fn a_lease_is_taken_up_above_all_fences_of_its_former_holders() {
    let server = RedisServer::start(RedisOptions::default().flavor(flavor())).await.expect("a server");
    let locker = Locker::new(RedisStore::from_url(&server.url()).await.expect("connect"));
    let lock = locker.lock("a").ttl(TTL);
    let mut guard = lock.acquire().await.expect("a grant");
    for _ in 0..5 {
        let fence = guard.fence();
        let (next, released) = tokio::join!(lock.acquire(), guard.release());
        (guard, _) = (next.expect("handed over"), released.expect("released"));
        assert_eq!(guard.fence(), fence.offset(1), "from one task to the next");
    }
    let mut last = guard.fence();
    for _ in 0..2 {
        let token = guard.detach().expect("held");
        server.command(&["DEL", "{lockkit:a}:fence"]).await.expect("DEL");
        guard = lock.resume(token).await.expect("the store").expect("its lease is there");
        assert!(guard.fence() > last, "{} follows {last}", guard.fence());
        last = guard.fence();
    }
}

/// A replica takes over behind the address that it has in the clients' configuration.
#[tokio::test]
async fn no_fence_comes_twice_after_a_replica_that_lags_takes_over() {
    let all = RedisSentinels::start(flavor()).await.expect("servers");
    for sentinel in all.sentinels() {
        sentinel.kill().await.expect("kill");
    }
    let [former, successor] = all.servers();
    let store = RedisStore::from_url(&former.url()).await.expect("connect");
    let known = used(&store, 3).await.to_string();
    eventually("replication", async || successor.command(&["GET", "{lockkit:a}:fence"]).await.expect("GET") == known)
        .await;
    successor.command(&["REPLICAOF", "NO", "ONE"]).await.expect("promote");
    let last = used(&store, 4).await;
    former.kill().await.expect("kill");
    let other = RedisStore::from_url(&successor.url()).await.expect("connect");
    let next = used(&other, 1).await;
    assert!(next > last, "{next} follows {last}");
}
