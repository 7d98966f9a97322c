//! Redis and Valkey servers as stores under test.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit::{
    Clock, LockStore,
    redis::{RedisConfig, RedisStore},
};
use lockkit_testkit::{
    Backend, BoxError, Server,
    faults::{Framing, Proxy},
    servers::{Persistence, Process, RedisFlavor, RedisOptions, RedisServer},
};

/// One kind of Redis server. Most cases share one instance; those that harm theirs get one of their own.
#[derive(Debug)]
pub(crate) struct RedisBackend {
    name: &'static str,
    flavor: RedisFlavor,
    shared: RedisServer,
}

impl RedisBackend {
    pub(crate) async fn start(name: &'static str, flavor: RedisFlavor) -> Result<Self, BoxError> {
        let shared = RedisServer::start(RedisOptions::default().flavor(flavor.clone())).await?;
        Ok(Self { name, flavor, shared })
    }
}

#[async_trait]
impl Backend for RedisBackend {
    fn name(&self) -> &str {
        self.name
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        open(self.shared.addr()).await
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        let config = RedisConfig::from_url(&self.shared.url())?.clock(clock);
        Ok(Some(Arc::new(RedisStore::connect(config).await?)))
    }

    async fn private_server(&self) -> Result<Option<Box<dyn Server>>, BoxError> {
        // It is killed, and must have its data again. That takes no disk: one that is busy for half a second must not look
        // like a fault of the store.
        let options = RedisOptions::default().flavor(self.flavor.clone()).persistence(Persistence::Append);
        Ok(Some(Box::new(Private(RedisServer::start(options).await?))))
    }
}

async fn open(addr: SocketAddr) -> Result<Arc<dyn LockStore>, BoxError> {
    Ok(Arc::new(RedisStore::from_url(&format!("redis://{addr}")).await?))
}

#[derive(Debug)]
struct Private(RedisServer);

#[async_trait]
impl Server for Private {
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        open(self.0.addr()).await
    }

    async fn open_through_proxy(&self) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        self.open_impatient(RedisConfig::TIMEOUT).await
    }

    async fn open_impatient(&self, timeout: Duration) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        let proxy = Proxy::start(self.0.addr()).await?.framing(Framing::Redis);
        let config = RedisConfig::new(proxy.addr().ip().to_string(), proxy.addr().port()).timeout(timeout);
        Ok((Arc::new(RedisStore::connect(config).await?), proxy))
    }

    async fn processes(&self) -> Result<Vec<&Process>, BoxError> {
        Ok(vec![&*self.0])
    }

    async fn delete(&self, name: &str) -> Result<(), BoxError> {
        match self.0.command(&["DEL", &format!("lockkit:{name}")]).await?.as_str() {
            "1" => Ok(()),
            other => Err(format!("DEL answered {other}").into()),
        }
    }

    async fn forget_caches(&self) -> Result<(), BoxError> {
        self.0.command(&["SCRIPT", "FLUSH"]).await?;
        Ok(())
    }

    async fn cut_clients(&self) -> Result<(), BoxError> {
        self.0.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await?;
        self.0.command(&["CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes"]).await?;
        Ok(())
    }
}
