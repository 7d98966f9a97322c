//! The stores that are tormented, as real servers.

use std::{net::SocketAddr, time::Duration};

use lockkit::{
    mysql::{MySqlConfig, schema},
    redis::RedisStore,
};
use lockkit_testkit::{
    BoxError,
    faults::ServerClock,
    servers::{
        MySqlFlavor, MySqlOptions, MySqlServer, Persistence, Process, RedisFlavor, RedisOptions, RedisServer,
        ZooKeeperEnsemble, ZooKeeperFlavor, ZooKeeperServer,
    },
};

use crate::sabotage::Sabotage;

/// A kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    Redis,
    RedisNewer,
    Valkey,
    Redlock,
    MariaDb,
    MySql,
    ZooKeeper,
    ZooKeeperNewer,
    Ensemble,
}

impl Kind {
    pub(crate) const ALL: [Self; 9] = [
        Self::Redis,
        Self::RedisNewer,
        Self::Valkey,
        Self::Redlock,
        Self::MariaDb,
        Self::MySql,
        Self::ZooKeeper,
        Self::ZooKeeperNewer,
        Self::Ensemble,
    ];

    /// Its name in front of the trials.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::RedisNewer => "redis-newer",
            Self::Valkey => "valkey",
            Self::Redlock => "redlock",
            Self::MariaDb => "mariadb",
            Self::MySql => "mysql",
            Self::ZooKeeper => "zookeeper",
            Self::ZooKeeperNewer => "zookeeper-newer",
            Self::Ensemble => "ensemble",
        }
    }

    /// Its name for readers.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Redis => "Redis, one server",
            Self::RedisNewer => "Redis 8",
            Self::Valkey => "Valkey 9",
            Self::Redlock => "Redlock, five servers",
            Self::MariaDb => "MariaDB",
            Self::MySql => "MySQL",
            Self::ZooKeeper => "ZooKeeper, one server",
            Self::ZooKeeperNewer => "ZooKeeper 3.9, one server",
            Self::Ensemble => "ZooKeeper, three servers",
        }
    }

    /// Why it can't be started here, if it can't.
    pub(crate) fn missing(self) -> Option<String> {
        let found = match self {
            Self::Redis | Self::Redlock => RedisFlavor::Installed.program().find().map(drop),
            Self::RedisNewer => RedisFlavor::Newer.program().find().map(drop),
            Self::Valkey => RedisFlavor::Valkey.program().find().map(drop),
            Self::MariaDb => MySqlFlavor::Installed.program().find().map(drop),
            Self::MySql => MySqlFlavor::Newer.program().find().map(drop),
            Self::ZooKeeper | Self::Ensemble => ZooKeeperFlavor::Installed.locate().map(drop),
            Self::ZooKeeperNewer => ZooKeeperFlavor::Newer.locate().map(drop),
        };
        found.err().map(|error| error.to_string())
    }

    /// Whether it is a version of a server of which another version has all faults.
    pub(crate) fn is_another_version(self) -> bool {
        matches!(self, Self::RedisNewer | Self::Valkey | Self::ZooKeeperNewer)
    }

    /// Whether a machine without it fails the tests.
    pub(crate) fn is_required(self) -> bool {
        !matches!(self, Self::RedisNewer | Self::Valkey | Self::MySql | Self::ZooKeeperNewer)
    }

    pub(crate) fn is_zookeeper(self) -> bool {
        matches!(self, Self::ZooKeeper | Self::ZooKeeperNewer | Self::Ensemble)
    }

    /// Whether it has readers, permits and strict order.
    pub(crate) fn has_every_mode(self) -> bool {
        self != Self::Redlock
    }

    pub(crate) fn is_sql(self) -> bool {
        matches!(self, Self::MariaDb | Self::MySql)
    }

    /// How long a lease lasts when its holder is gone.
    pub(crate) fn ttl(self) -> Duration {
        Duration::from_millis(if self.is_zookeeper() { 2000 } else { 1000 })
    }
}

/// How to start a store's servers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Setup {
    /// The wall clock to run on, if it is to be moved.
    pub(crate) clock: Option<ServerClock>,
    /// Whether the servers keep nothing on disk, and say so.
    pub(crate) forgetful: bool,
    /// What is wrong with the store itself, to test the tests.
    pub(crate) sabotage: Option<Sabotage>,
}

/// A store's servers.
#[derive(Debug)]
pub(crate) enum Target {
    Redis(RedisServer),
    /// Five nodes, and whether each keeps all that it answered.
    Redlock(Vec<RedisServer>, bool),
    MySql(MySqlServer),
    ZooKeeper(ZooKeeperServer),
    Ensemble(ZooKeeperEnsemble),
}

impl Target {
    pub(crate) async fn start(kind: Kind, setup: &Setup) -> Result<Self, BoxError> {
        Ok(match kind {
            Kind::Redis => Self::Redis(redis(RedisFlavor::Installed, setup, setup.clock.as_ref()).await?),
            Kind::RedisNewer => Self::Redis(redis(RedisFlavor::Newer, setup, setup.clock.as_ref()).await?),
            Kind::Valkey => Self::Redis(redis(RedisFlavor::Valkey, setup, setup.clock.as_ref()).await?),
            Kind::Redlock => {
                let mut nodes = Vec::new();
                // Only the first node is on the clock that is moved.
                for index in 0..5 {
                    let clock = setup.clock.as_ref().filter(|_| index == 0);
                    nodes.push(redis(RedisFlavor::Installed, setup, clock).await?);
                }
                Self::Redlock(nodes, !setup.forgetful)
            }
            Kind::MariaDb => Self::MySql(mysql(MySqlFlavor::Installed, setup).await?),
            Kind::MySql => Self::MySql(mysql(MySqlFlavor::Newer, setup).await?),
            Kind::ZooKeeper => Self::ZooKeeper(ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?),
            Kind::ZooKeeperNewer => Self::ZooKeeper(ZooKeeperServer::start(ZooKeeperFlavor::Newer).await?),
            Kind::Ensemble => Self::Ensemble(ZooKeeperEnsemble::start_with_proxies(ZooKeeperFlavor::Installed).await?),
        })
    }

    /// The servers' processes.
    pub(crate) fn processes(&self) -> Vec<&Process> {
        match self {
            Self::Redis(server) => vec![server],
            Self::Redlock(nodes, _) => nodes.iter().map(|node| &**node).collect(),
            Self::MySql(server) => vec![server],
            Self::ZooKeeper(server) => vec![server],
            Self::Ensemble(ensemble) => ensemble.members().iter().map(|member| &**member).collect(),
        }
    }

    /// The store's URL, with these addresses for its servers.
    pub(crate) fn url(&self, addresses: &[SocketAddr]) -> String {
        let list = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        match self {
            Self::Redis(_) => format!("redis://{list}"),
            Self::Redlock(_, durable) => {
                format!("redlock://{list}?max_ttl=2s&durable={}", if *durable { "yes" } else { "no" })
            }
            Self::MySql(_) => format!("mysql://root@{list}/{}", MySqlServer::DATABASE),
            Self::ZooKeeper(_) | Self::Ensemble(_) => format!("zk://{list}?session=2s"),
        }
    }

    /// The Redis servers among them.
    pub(crate) fn redis(&self) -> &[RedisServer] {
        match self {
            Self::Redis(server) => std::slice::from_ref(server),
            Self::Redlock(nodes, _) => nodes,
            _ => &[],
        }
    }
}

async fn redis(flavor: RedisFlavor, setup: &Setup, clock: Option<&ServerClock>) -> Result<RedisServer, BoxError> {
    let persistence = if setup.forgetful { Persistence::None } else { Persistence::AppendAlways };
    let mut options = RedisOptions::default().flavor(flavor).persistence(persistence);
    if let Some(clock) = clock {
        options = options.clock(clock);
    }
    let server = RedisServer::start(options).await?;
    // A server that a store refuses should fail here, and not as a storm of errors.
    drop(RedisStore::from_url(&server.url()).await?);
    Ok(server)
}

async fn mysql(flavor: MySqlFlavor, setup: &Setup) -> Result<MySqlServer, BoxError> {
    // The tables are there also after the loss of all data. A killed server loses nothing that it gave to the operating
    // system, so there is no need to wait for the disk.
    let options = MySqlOptions::default().flavor(flavor).init(schema::ddl(MySqlConfig::TABLE)?);
    let options = options.init(schema::claims_ddl(MySqlConfig::TABLE)?);
    let mut options = options.args(["--innodb-flush-log-at-trx-commit=2"]);
    if let Some(clock) = &setup.clock {
        options = options.clock(clock);
    }
    Ok(MySqlServer::start(options).await?)
}
