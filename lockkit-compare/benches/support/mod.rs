//! What the benches on Redis servers share.

use std::{future::Future, pin::Pin};

use lockkit_compare::pairs::{BoxError, Contestant, TTL};
use lockkit_testkit::servers::{RedisFlavor, RedisOptions, RedisServer};

pub(crate) type Pair = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

/// A private server: `LOCKKIT_REDIS_SERVER`, or `redis-server`.
pub(crate) async fn server() -> Result<RedisServer, BoxError> {
    let program = std::env::var_os("LOCKKIT_REDIS_SERVER");
    let flavor = program.map_or_else(RedisFlavor::default, |path| RedisFlavor::At(path.into()));
    Ok(RedisServer::start(RedisOptions::default().flavor(flavor)).await?)
}

/// `rslock` on these servers.
pub(crate) fn rslock<'a>(name: &str, servers: impl IntoIterator<Item = &'a RedisServer>) -> Contestant {
    let urls = servers.into_iter().map(|server| format!("redis://127.0.0.1:{}/", server.port()));
    let manager = rslock::LockManager::new(urls.collect());
    Contestant::new(name, move |number| {
        let (manager, name) = (manager.clone(), format!("rslock:{number}"));
        move || -> Pair {
            let (manager, name) = (manager.clone(), name.clone());
            Box::pin(async move {
                let lock = manager.lock(name.as_str(), TTL).await?;
                manager.unlock(&lock).await;
                Ok(())
            })
        }
    })
}
