//! Two private servers, of which one is harmed, in the phase in which each lock is in both, or in the shadow of the one before.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit::{
    Clock, LockStore,
    migrate::{Dual, Migration, Phase, Side},
    redis::{RedisConfig, RedisStore},
};
use lockkit_testkit::{
    Backend, BoxError, Server,
    faults::{Framing, Proxy},
    servers::{Persistence, Process, RedisOptions, RedisServer},
};

use crate::pair::short;

/// Pairs of Redis servers; the one of this side is harmed, and its clients come through a proxy.
#[derive(Debug)]
pub(crate) struct Harmed {
    name: &'static str,
    side: Side,
    phase: Phase,
    shared: Private,
}

#[derive(Debug)]
struct Private {
    side: Side,
    servers: [RedisServer; 2],
}

impl Harmed {
    /// In the phase both, or in the shadow of the phase old.
    pub(crate) async fn start(name: &'static str, side: Side, phase: Phase) -> Result<Self, BoxError> {
        Ok(Self { name, side, phase, shared: Private::start(side, phase).await? })
    }
}

impl Private {
    async fn start(side: Side, phase: Phase) -> Result<Self, BoxError> {
        let server = || RedisServer::start(RedisOptions::default().persistence(Persistence::Append));
        let servers = [server().await?, server().await?];
        let old = RedisStore::from_url(&servers[0].url()).await?;
        let new = RedisStore::from_url(&servers[1].url()).await?;
        let migration = Migration::new(Arc::new(old), Arc::new(new));
        migration.start(short()).await?;
        let step =
            if phase == Phase::Old { migration.shadow(true).await? } else { migration.step(phase, |_| {}).await? };
        step.copied?;
        Ok(Self { side, servers })
    }

    fn harmed(&self) -> &RedisServer {
        &self.servers[self.side.index()]
    }

    async fn client(&self, change: impl Fn(Side, RedisConfig) -> RedisConfig) -> Result<Arc<dyn LockStore>, BoxError> {
        let mut stores = Vec::new();
        for side in Side::ALL {
            let config = RedisConfig::from_url(&self.servers[side.index()].url())?;
            stores.push(Arc::new(RedisStore::connect(change(side, config)).await?));
        }
        let [old, new] = [Arc::clone(&stores[0]), Arc::clone(&stores[1])];
        Ok(Arc::new(Dual::connect(old, new).await?))
    }
}

#[async_trait]
impl Backend for Harmed {
    fn name(&self) -> &str {
        self.name
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        self.shared.open().await
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        self.shared.client(|_, config| config.clock(Arc::clone(&clock))).await.map(Some)
    }

    async fn private_server(&self) -> Result<Option<Box<dyn Server>>, BoxError> {
        Ok(Some(Box::new(Private::start(self.side, self.phase).await?)))
    }
}

#[async_trait]
impl Server for Private {
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        self.client(|_, config| config).await
    }

    async fn open_through_proxy(&self) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        self.open_impatient(RedisConfig::TIMEOUT).await
    }

    async fn open_impatient(&self, timeout: Duration) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        let proxy = Proxy::start(self.harmed().addr()).await?.framing(Framing::Redis);
        let at = proxy.addr();
        let store = self.client(|side, config| {
            let config = if side == self.side { RedisConfig::new(at.ip().to_string(), at.port()) } else { config };
            config.timeout(timeout)
        });
        Ok((store.await?, proxy))
    }

    async fn processes(&self) -> Result<Vec<&Process>, BoxError> {
        Ok(vec![&**self.harmed()])
    }

    async fn delete(&self, name: &str) -> Result<(), BoxError> {
        match self.harmed().command(&["DEL", &format!("lockkit:{name}")]).await?.as_str() {
            "1" => Ok(()),
            other => Err(format!("DEL answered {other}").into()),
        }
    }

    async fn forget_caches(&self) -> Result<(), BoxError> {
        self.harmed().command(&["SCRIPT", "FLUSH"]).await?;
        Ok(())
    }

    async fn cut_clients(&self) -> Result<(), BoxError> {
        self.harmed().command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await?;
        self.harmed().command(&["CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes"]).await?;
        Ok(())
    }
}
