//! An application with clients of its own beside lockkit: it takes locks, and finds them in its own view of the servers.

use std::error::Error;

use lockkit::{Guard, Outcome};
use lockkit_testkit::servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer};
use serde::Serialize;

#[derive(Serialize)]
struct Seen {
    redis: u32,
    mysql: i64,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (redis, mysql) =
        (RedisServer::start(RedisOptions::default()).await?, MySqlServer::start(MySqlOptions::default()).await?);
    free(take("memory:").await?).await?;

    let url = redis.url();
    let guard = take(&url).await?;
    let mut own = redis::Client::open(url)?.get_multiplexed_async_connection().await?;
    let redis = redis::cmd("EXISTS").arg("lockkit:outside").query_async(&mut own).await?;
    free(guard).await?;

    let guard = take(&format!("{}?create=true", mysql.url())).await?;
    let own = sqlx::MySqlPool::connect(&mysql.url()).await?;
    let mysql =
        sqlx::query_scalar("SELECT COUNT(*) FROM resource_lock WHERE token IS NOT NULL").fetch_one(&own).await?;
    free(guard).await?;

    let seen = Seen { redis, mysql };
    assert_eq!((seen.redis, seen.mysql), (1, 1), "each lock is there while it is held");
    println!("locks seen by the application's own clients: {} and {}", seen.redis, seen.mysql);
    Ok(())
}

async fn free(guard: Guard) -> lockkit::Result<()> {
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn take(url: &str) -> lockkit::Result<Guard> {
    lockkit::connect(url).await?.lock("outside").acquire().await
}
