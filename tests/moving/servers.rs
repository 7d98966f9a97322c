//! The stores of a migration, as real servers behind proxies.

use std::{any::Any, net::SocketAddr};

use lockkit::mysql::{MySqlConfig, schema};
use lockkit_testkit::{
    BoxError,
    faults::Proxy,
    servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer},
};

/// A kind of store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Redis,
    Redlock,
    MySql,
    ZooKeeper,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::Redis, Self::Redlock, Self::MySql, Self::ZooKeeper];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Redlock => "redlock",
            Self::MySql => "mysql",
            Self::ZooKeeper => "zookeeper",
        }
    }

    /// The URL of a store at these addresses, the first or the second on the same servers.
    fn url(self, addresses: &[SocketAddr], place: usize) -> String {
        let list = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        match self {
            Self::Redis => format!("redis://{list}?prefix=store{place}:"),
            Self::Redlock => format!("redlock://{list}?max_ttl=2s&durable=yes&prefix=store{place}:"),
            Self::MySql => format!("mysql://root@{list}/{}?table={}", MySqlServer::DATABASE, table(place)),
            Self::ZooKeeper => format!("zk://{list}?session=2s&base=/store{place}"),
        }
    }
}

fn table(place: usize) -> &'static str {
    [MySqlConfig::TABLE, "resource_lock_next"][place]
}

/// The servers of one store, each with a proxy that its clients go through. None is ever started again, so none has to wait
/// for the disk.
#[derive(Debug)]
pub(crate) struct Servers {
    kind: Kind,
    place: usize,
    addresses: Vec<SocketAddr>,
    proxies: Vec<Proxy>,
    /// Stopped when they are dropped.
    _running: Vec<Box<dyn Running>>,
}

trait Running: Any + std::fmt::Debug + Send + Sync {}
impl Running for RedisServer {}
impl Running for MySqlServer {}
impl Running for ZooKeeperServer {}

impl Servers {
    pub(crate) async fn start(kind: Kind, place: usize) -> Result<Self, BoxError> {
        let mut running: Vec<(SocketAddr, Box<dyn Running>)> = Vec::new();
        match kind {
            Kind::Redis | Kind::Redlock => {
                for _ in 0..if kind == Kind::Redis { 1 } else { 3 } {
                    let server = RedisServer::start(RedisOptions::default()).await?;
                    running.push((server.addr(), Box::new(server)));
                }
            }
            Kind::MySql => {
                let (first, second) = (schema::ddl(table(0))?, schema::ddl(table(1))?);
                let options = MySqlOptions::default().init(format!("{first};\n{second}"));
                let server = MySqlServer::start(options.args(["--innodb-flush-log-at-trx-commit=2"])).await?;
                running.push((server.addr(), Box::new(server)));
            }
            Kind::ZooKeeper => {
                let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?;
                running.push((server.addr(), Box::new(server)));
            }
        }
        let (addresses, running): (Vec<_>, Vec<_>) = running.into_iter().unzip();
        let mut proxies = Vec::new();
        for address in &addresses {
            proxies.push(Proxy::start(*address).await?);
        }
        Ok(Self { kind, place, addresses, proxies, _running: running })
    }

    /// Another store on the same servers, with proxies of its own.
    pub(crate) async fn beside(&self) -> Result<Self, BoxError> {
        let mut proxies = Vec::new();
        for address in &self.addresses {
            proxies.push(Proxy::start(*address).await?);
        }
        Ok(Self { place: 1, addresses: self.addresses.clone(), proxies, _running: Vec::new(), ..*self })
    }

    /// The URL for those who are cut off when the store is.
    pub(crate) fn proxied_url(&self) -> String {
        let addresses: Vec<_> = self.proxies.iter().map(Proxy::addr).collect();
        self.kind.url(&addresses, self.place)
    }

    pub(crate) fn url(&self) -> String {
        self.kind.url(&self.addresses, self.place)
    }

    /// Cuts all connections, and lets nobody make new ones.
    pub(crate) fn cut_off(&self) {
        for proxy in &self.proxies {
            proxy.refuse(true);
            proxy.blackhole();
        }
    }

    pub(crate) fn heal(&self) {
        self.proxies.iter().for_each(Proxy::heal);
    }
}
