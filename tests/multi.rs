//! Locks of two real stores, all or none.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use lockkit::{MultiLock, Outcome, connect};
use lockkit_testkit::servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer};

const CLIENTS: usize = 4;
const ROUNDS: u32 = 15;

/// Each client knows the stores by connections of its own, and names the locks in another order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locks_of_two_stores_are_had_together_and_in_no_circle() {
    let redis = RedisServer::start(RedisOptions::default()).await.expect("Redis is required");
    let mysql = MySqlServer::start(MySqlOptions::default()).await.expect("MariaDB is required");
    let urls = [redis.url(), format!("{}?create=true", mysql.url())];
    // The table is made once, by one client.
    drop(connect(&urls[1]).await.expect("connect"));
    let (inside, done) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let mut clients = Vec::new();
    for client in 0..CLIENTS {
        let (left, right) = (connect(&urls[0]).await.expect("connect"), connect(&urls[1]).await.expect("connect"));
        let mut locks = vec![left.lock("a"), right.lock("a"), left.lock("b"), right.lock("b")];
        locks.rotate_left(client);
        if client % 2 == 1 {
            locks.reverse();
        }
        let (inside, done) = (Arc::clone(&inside), Arc::clone(&done));
        clients.push(tokio::spawn(async move {
            let multi = MultiLock::new(locks);
            for _ in 0..ROUNDS {
                let guard = multi.acquire().await?;
                assert_eq!(guard.guards().len(), 4);
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two are in");
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                assert_eq!(guard.release().await?, Outcome::Released);
                done.fetch_add(1, Ordering::SeqCst);
            }
            // One store being in the way is enough.
            let held = left.lock("b").acquire().await?;
            assert!(multi.try_acquire().await?.is_none());
            assert_eq!(held.release().await?, Outcome::Released);
            Ok::<_, lockkit::Error>(())
        }));
    }
    for client in clients {
        tokio::time::timeout(Duration::from_secs(60), client)
            .await
            .expect("a circle")
            .expect("no panic")
            .expect("fine");
    }
    assert_eq!(done.load(Ordering::SeqCst), u32::try_from(CLIENTS).expect("few") * ROUNDS);
}
