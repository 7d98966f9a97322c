//! A node that is a MySQL server, whose row for the lock somebody else's transaction has locked (error 1205).

use std::{sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Claim, Effect, ErrorKind, Hold, LockStore, Release, Result};
use lockkit_mysql::{MySqlConfig, MySqlStore};
use lockkit_redis::RedisStore;
use lockkit_redlock::{Node, NodeErrors, RedlockConfig, RedlockStore};
use lockkit_testkit::{
    calls::granted,
    servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer},
};

use crate::support::{claim, free, request};

/// As long as two rounds of an acquisition with so long a node timeout need.
const TTL: Duration = Duration::from_secs(8);

async fn attempt(store: &dyn LockStore, claim: &Claim) -> Result<Attempt> {
    store.acquire(&AcquireRequest { ttl: TTL, ..request(claim) }).await
}

async fn hold(store: &dyn LockStore, claim: &Claim) -> Hold {
    granted(attempt(store, claim).await.expect("acquire"))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_is_the_loss_of_one_node() {
    let redis = RedisServer::start_many(2, RedisOptions::default()).await.expect("servers");
    let table = MySqlOptions::default().init(lockkit_mysql::schema::ddl(MySqlConfig::TABLE).expect("ddl"));
    // It is never started again, so it need not wait for the disk.
    let table = table.args(["--innodb-flush-log-at-trx-commit=2"]);
    let mysql = Arc::new(MySqlServer::start(table).await.expect("a server"));
    let at_mysql = Arc::new(MySqlStore::from_url(&mysql.url()).await.expect("connect"));
    let mut nodes = vec![Node::new(Arc::clone(&at_mysql) as Arc<dyn LockStore>)];
    for server in &redis {
        nodes.push(Node::new(Arc::new(RedisStore::from_url(&server.url()).await.expect("connect"))));
    }
    // Long enough for the server to say why: it waits for a second.
    let config = RedlockConfig::new().node_timeout(Duration::from_millis(1500)).max_ttl(Duration::from_secs(60));
    let store = RedlockStore::new(nodes.into_iter().map(|node| node.durable(true)).collect(), config).expect("quorum");

    // Else there would be no row to lock.
    free(&*at_mysql, &hold(&*at_mysql, &claim("a")).await.claim).await;
    let first = hold(&store, &claim("a")).await;
    free(&store, &first.claim).await;
    let locked = {
        let mysql = Arc::clone(&mysql);
        let lock = "UPDATE resource_lock SET update_time = IF(SLEEP(6), NULL, update_time) WHERE resource_name = 'a'";
        tokio::spawn(async move { mysql.admin(lock).await })
    };
    tokio::time::sleep(Duration::from_millis(300)).await;
    let mine = claim("a");
    assert!(hold(&store, &mine).await.fence > first.fence, "two nodes are a majority");
    assert!(matches!(store.release(&mine).await.expect("release"), Release::Released { .. }));

    redis[0].kill().await.expect("kill");
    let error = attempt(&store, &claim("a")).await.expect_err("one of three is no majority");
    let errors = NodeErrors::of(&error).expect("each node's error");
    let told = errors.iter().find(|told| told.node.contains("mysql")).expect("MySQL's own");
    assert_eq!((told.error.kind(), told.error.effect()), (ErrorKind::Unavailable, Effect::None), "{}", told.error);
    assert!(!locked.is_finished(), "the row was free");
    locked.await.expect("task").expect("unlocked");
    // That of the failed attempt at the other node is given back in the background.
    while !matches!(attempt(&store, &claim("a")).await, Ok(Attempt::Granted(_))) {}
}
