//! Redisson keeps a lock as a hash, which is no lock of lockkit's: neither waits for the other.

use std::time::Duration;

use lockkit::{
    Effect, ErrorKind, Outcome,
    migrate::{Migration, Phase},
};
use lockkit_testkit::{
    BoxError,
    servers::{RedisOptions, RedisServer},
};

use crate::setting::{NAME, START, TTL};

/// What `RLock.tryLock` sends (Redisson 3): the hold is a field of the hash, named by the client and its thread.
const TRY_LOCK: &str = "if redis.call('exists', KEYS[1]) == 0 or redis.call('hexists', KEYS[1], ARGV[2]) == 1 then \
    redis.call('hincrby', KEYS[1], ARGV[2], 1); redis.call('pexpire', KEYS[1], ARGV[1]); return nil; end; \
    return redis.call('pttl', KEYS[1])";
/// How a Redisson client calls itself.
const CLIENT: &str = "8743c9c0-0795-4907-87fd-6c719a6b4586:1";
const KEY: &str = "theirs:shared";

async fn try_lock(server: &RedisServer) -> Result<String, BoxError> {
    Ok(server.command(&["EVAL", TRY_LOCK, "1", KEY, "60000", CLIENT]).await?)
}

fn shared_url(server: &RedisServer) -> String {
    format!("redis://{}?prefix=theirs:", server.addr())
}

/// The second of the two gets an error at once, be it lockkit or Redisson, and changes nothing.
pub(crate) async fn a_hash_is_an_error() -> Result<(), BoxError> {
    let server = RedisServer::start(RedisOptions::default()).await?;
    let lock = lockkit::connect(&shared_url(&server)).await?.lock(NAME).ttl(TTL);
    assert_eq!(try_lock(&server).await?, "(nil)");
    for wait in [Duration::ZERO, Duration::from_secs(60)] {
        let error = lock.acquire_within(wait).await.err().ok_or("it is Redisson's")?;
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unexpected, Effect::None), "{error}");
        assert!(error.to_string().contains("hash"), "{error}");
    }
    assert_eq!(server.command(&["HGETALL", KEY]).await?, format!("{CLIENT}\n1"));
    let left: u64 = server.command(&["PTTL", KEY]).await?.parse()?;
    assert!((1..=60_000).contains(&left));
    assert_eq!(server.command(&["DEL", KEY]).await?, "1");

    let guard = lock.acquire().await?;
    let error = try_lock(&server).await.err().ok_or("it is ours")?;
    assert!(error.to_string().contains("WRONGTYPE"), "{error}");
    assert!(guard.is_held());
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_eq!(try_lock(&server).await?, "(nil)");
    Ok(())
}

/// A lock that Redisson holds does not stop a step, for only strings are looked at.
pub(crate) async fn no_step_sees_a_hash() -> Result<(), BoxError> {
    let theirs = RedisServer::start(RedisOptions::default()).await?;
    let ours = RedisServer::start(RedisOptions::default()).await?;
    let (from, to) = (shared_url(&theirs), ours.url());
    let migration = Migration::new(lockkit::open(&from).await?, lockkit::open(&to).await?);
    migration.start(START).await?;
    let locker = lockkit::connect(&format!("migrate:?from={from}&to={to}")).await?;
    assert_eq!(try_lock(&theirs).await?, "(nil)");
    assert!(migration.holders().await?.is_empty());
    migration.step(Phase::Both, |_| ()).await?.copied?;
    let error = locker.lock(NAME).ttl(TTL).try_acquire().await.err().ok_or("it is Redisson's")?;
    assert_eq!(error.kind(), ErrorKind::Unexpected, "{error}");
    assert!(error.to_string().contains("hash"), "{error}");
    Ok(())
}
