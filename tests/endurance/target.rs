//! The servers of each store, and the proxies before them.

use lockkit::mysql::{MySqlConfig, schema};
use lockkit_testkit::{
    BoxError,
    faults::Proxy,
    servers::{
        Keep, MySqlFlavor, MySqlOptions, MySqlServer, Persistence, Process, RedisFlavor, RedisOptions, RedisServer,
        ZooKeeperEnsemble, ZooKeeperFlavor,
    },
};

const REDLOCK_NODES: usize = 5;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Redis,
    Redlock,
    MariaDb,
    MySql,
    ZooKeeper,
}

impl Kind {
    pub(crate) const ALL: [Self; 5] = [Self::Redis, Self::Redlock, Self::MariaDb, Self::MySql, Self::ZooKeeper];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Redlock => "redlock",
            Self::MariaDb => "mariadb",
            Self::MySql => "mysql",
            Self::ZooKeeper => "zookeeper",
        }
    }

    pub(crate) fn may_be_missing(self) -> bool {
        self == Self::MySql
    }

    pub(crate) fn is_missing(self) -> bool {
        match self {
            Self::Redis | Self::Redlock => RedisFlavor::Installed.program().find().is_err(),
            Self::MariaDb => MySqlFlavor::Installed.program().find().is_err(),
            Self::MySql => MySqlFlavor::Newer.program().find().is_err(),
            Self::ZooKeeper => ZooKeeperFlavor::Installed.locate().is_err(),
        }
    }
}

#[derive(Debug)]
enum Servers {
    Redis(Vec<RedisServer>),
    MySql(MySqlServer),
    ZooKeeper(ZooKeeperEnsemble),
}

/// A store that children reach through proxies.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) kind: Kind,
    servers: Servers,
    proxies: Vec<Proxy>,
}

impl Target {
    pub(crate) async fn start(kind: Kind) -> Result<Self, BoxError> {
        let servers = match kind {
            Kind::Redis | Kind::Redlock => {
                let count = if kind == Kind::Redis { 1 } else { REDLOCK_NODES };
                let options = RedisOptions::default().persistence(Persistence::AppendAlways);
                Servers::Redis(RedisServer::start_many(count, options).await?)
            }
            Kind::MariaDb | Kind::MySql => {
                let flavor = if kind == Kind::MySql { MySqlFlavor::Newer } else { MySqlFlavor::Installed };
                let options = MySqlOptions::default().flavor(flavor).init(schema::ddl(MySqlConfig::TABLE)?);
                // It is killed, not the machine: what the system has written is there again.
                Servers::MySql(MySqlServer::start(options.args(["--innodb-flush-log-at-trx-commit=2"])).await?)
            }
            Kind::ZooKeeper => Servers::ZooKeeper(ZooKeeperEnsemble::start(ZooKeeperFlavor::Installed).await?),
        };
        let mut target = Self { kind, servers, proxies: Vec::new() };
        for addr in target.processes().iter().map(|process| process.addr()).collect::<Vec<_>>() {
            target.proxies.push(Proxy::start(addr).await?);
        }
        Ok(target)
    }

    /// The store's URL through the proxies.
    pub(crate) fn url(&self) -> String {
        let hosts: Vec<_> = self.proxies.iter().map(|proxy| proxy.addr().to_string()).collect();
        let hosts = hosts.join(",");
        match &self.servers {
            Servers::Redis(_) if self.kind == Kind::Redis => format!("redis://{hosts}"),
            Servers::Redis(_) => format!("redlock://{hosts}?delayed_restart=no"),
            Servers::MySql(_) => format!("mysql://root@{hosts}/{}", MySqlServer::DATABASE),
            // The longest session that the servers grant: leases last no longer.
            Servers::ZooKeeper(_) => format!("zk://{hosts}?session=40s"),
        }
    }

    fn processes(&self) -> Vec<&Process> {
        match &self.servers {
            Servers::Redis(servers) => servers.iter().map(|server| &**server).collect(),
            Servers::MySql(server) => vec![server],
            Servers::ZooKeeper(ensemble) => ensemble.members().iter().map(|member| &**member).collect(),
        }
    }

    /// Resets all connections.
    pub(crate) async fn cut(&self) {
        for proxy in &self.proxies {
            proxy.cut().await;
        }
    }

    /// Kills a server and starts it again with all that it had: the leader of an ensemble, one node of a quorum.
    pub(crate) async fn fail_over(&self) -> Result<(), BoxError> {
        let place = match &self.servers {
            Servers::ZooKeeper(ensemble) => ensemble.leader().await.ok_or("the ensemble has no leader")?,
            _ => 0,
        };
        let process = self.processes()[place];
        process.kill().await?;
        Ok(process.restart(Keep::Data).await?)
    }
}
