//! Redis with sentinels, and Redis clusters, as stores under test.
//!
//! What happens when a server dies differs from a single one: leases end, by design. So the cases that harm a server are
//! left out here; `lockkit-redis/tests/redis/failover.rs` has its own.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use lockkit::{
    Clock, LockStore,
    redis::{RedisConfig, RedisStore},
};
use lockkit_testkit::{
    Backend, BoxError,
    servers::{RedisCluster, RedisFlavor, RedisSentinels},
};

/// Several Redis servers that keep locks together.
#[derive(Debug)]
pub(crate) struct ManyBackend<S> {
    name: &'static str,
    url: String,
    _servers: S,
}

impl ManyBackend<RedisSentinels> {
    pub(crate) async fn sentinels(name: &'static str, flavor: RedisFlavor) -> Result<Self, BoxError> {
        let servers = RedisSentinels::start(flavor).await?;
        Ok(Self { name, url: servers.url(), _servers: servers })
    }
}

impl ManyBackend<RedisCluster> {
    pub(crate) async fn cluster(name: &'static str, flavor: RedisFlavor) -> Result<Self, BoxError> {
        let servers = RedisCluster::start(flavor, false).await?;
        Ok(Self { name, url: servers.url(), _servers: servers })
    }
}

impl<S> ManyBackend<S> {
    fn config(&self) -> lockkit::Result<RedisConfig> {
        // The servers have just started, which is no reason to wait here.
        Ok(RedisConfig::from_url(&self.url)?.failover_pause(false))
    }
}

#[async_trait]
impl<S: fmt::Debug + Send + Sync + 'static> Backend for ManyBackend<S> {
    fn name(&self) -> &str {
        self.name
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(Arc::new(RedisStore::connect(self.config()?).await?))
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        Ok(Some(Arc::new(RedisStore::connect(self.config()?.clock(clock)).await?)))
    }
}
