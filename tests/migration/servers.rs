//! Real servers in one phase of a migration, as a store under test.

use std::sync::Arc;

use async_trait::async_trait;
use lockkit::{
    Clock, LockStore,
    migrate::{Dual, Migration, Phase},
    mysql::{MySqlConfig, MySqlStore, schema},
    redis::{RedisConfig, RedisStore},
    zk::{ZkConfig, ZkStore},
};
use lockkit_testkit::{
    Backend, BoxError,
    servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer},
};

use crate::pair::short;

/// A server. None is ever started again, so none has to wait for the disk.
#[derive(Debug)]
pub(crate) enum One {
    Redis(RedisServer),
    MySql(MySqlServer),
    ZooKeeper(ZooKeeperServer),
}

impl One {
    pub(crate) async fn redis() -> Result<Self, BoxError> {
        Ok(Self::Redis(RedisServer::start(RedisOptions::default()).await?))
    }

    pub(crate) async fn mysql() -> Result<Self, BoxError> {
        let options = MySqlOptions::default().init(schema::ddl(MySqlConfig::TABLE)?);
        Ok(Self::MySql(MySqlServer::start(options.args(["--innodb-flush-log-at-trx-commit=2"])).await?))
    }

    pub(crate) async fn zookeeper() -> Result<Self, BoxError> {
        Ok(Self::ZooKeeper(ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?))
    }

    async fn open(&self, clock: Option<Arc<dyn Clock>>) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(match self {
            Self::Redis(server) => {
                let config = RedisConfig::from_url(&server.url())?;
                let config = clock.into_iter().fold(config, RedisConfig::clock);
                Arc::new(RedisStore::connect(config).await?)
            }
            Self::MySql(server) => {
                let config = MySqlConfig::from_url(&server.url())?;
                let config = clock.into_iter().fold(config, MySqlConfig::clock);
                Arc::new(MySqlStore::connect(config).await?)
            }
            Self::ZooKeeper(server) => {
                let config = ZkConfig::new([server.addr().to_string()]);
                let config = clock.into_iter().fold(config, ZkConfig::clock);
                Arc::new(ZkStore::connect(config).await?)
            }
        })
    }
}

/// Two servers, and a migration between them.
#[derive(Debug)]
pub(crate) struct Servers {
    name: String,
    old: One,
    new: One,
}

impl Servers {
    pub(crate) async fn start(
        name: String,
        old: Result<One, BoxError>,
        new: Result<One, BoxError>,
        steps: &[Phase],
    ) -> Result<Self, BoxError> {
        let (old, new) = (old?, new?);
        let migration = Migration::new(old.open(None).await?, new.open(None).await?);
        migration.start(short()).await?;
        for goal in steps {
            migration.step(*goal, |_| {}).await?.copied?;
        }
        Ok(Self { name, old, new })
    }
}

#[async_trait]
impl Backend for Servers {
    fn name(&self) -> &str {
        &self.name
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(Arc::new(Dual::connect(self.old.open(None).await?, self.new.open(None).await?).await?))
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        let old = self.old.open(Some(Arc::clone(&clock))).await?;
        let new = self.new.open(Some(clock)).await?;
        Ok(Some(Arc::new(Dual::connect(old, new).await?)))
    }
}
