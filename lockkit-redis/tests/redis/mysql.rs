//! A Redis URL that leads to a MySQL server.

use std::time::{Duration, Instant};

use lockkit_core::{Effect, ErrorKind};
use lockkit_redis::RedisStore;
use lockkit_testkit::servers::{MySqlOptions, MySqlServer};

#[tokio::test]
async fn a_mysql_server_is_told_from_redis() {
    let server = MySqlServer::start(MySqlOptions::default()).await.expect("a server");
    for options in ["", "?prefix=x:"] {
        let started = Instant::now();
        let url = format!("redis://:hunter2@{}/{options}", server.addr());
        let error = RedisStore::from_url(&url).await.expect_err("no Redis");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Misconfigured, Effect::None), "{error}");
        assert!(error.message().contains("MySQL or MariaDB"), "{error}");
        assert_eq!(error.to_string().lines().count(), 1);
        assert!(!error.to_string().contains("hunter2"), "{error}");
        assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    }
}
