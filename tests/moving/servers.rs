//! The stores of a migration, on real servers behind proxies.

use std::{
    any::Any,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_testkit::{
    BoxError,
    faults::Proxy,
    servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer},
};
use tokio::{
    sync::OnceCell,
    time::{sleep, timeout},
};

use crate::arena::TTL;

/// The session of a ZooKeeper store, and the servers' tick, by which they may end it later.
const SESSION: Duration = Duration::from_secs(2);
const TICK: Duration = Duration::from_millis(500);

/// How long servers may take until they serve locks. Not how long they do take.
const READY_WITHIN: Duration = Duration::from_secs(30);

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

    /// How long a lease of `ttl` may be in the way after its holder was killed.
    pub(crate) fn lapse(self, ttl: Duration) -> Duration {
        if self == Self::ZooKeeper { SESSION + TICK } else { ttl }
    }

    /// The URL of a store at these addresses, one of many on the same servers.
    fn url(self, addresses: &[SocketAddr], number: usize) -> String {
        let list = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        match self {
            Self::Redis => format!("redis://{list}?prefix=store{number}:"),
            Self::Redlock => format!("redlock://{list}?max_ttl=2s&durable=yes&prefix=store{number}:"),
            Self::MySql => format!("mysql://root@{list}/{}?table=locks_{number}", MySqlServer::DATABASE),
            Self::ZooKeeper => format!("zk://{list}?session={}s&base=/store{number}", SESSION.as_secs()),
        }
    }

    /// The same for whoever comes first, and makes what the store needs.
    fn first_url(self, addresses: &[SocketAddr], number: usize) -> String {
        let url = self.url(addresses, number);
        if self == Self::MySql { url + "&create=true" } else { url }
    }

    async fn start(self) -> Result<Vec<Running>, BoxError> {
        let mut running = Vec::new();
        match self {
            Self::Redis | Self::Redlock => {
                let count = if self == Self::Redis { 1 } else { 3 };
                for server in RedisServer::start_many(count, RedisOptions::default()).await? {
                    running.push(Running { addr: server.addr(), _server: Box::new(server) });
                }
            }
            Self::MySql => {
                // None is ever started again, so none has to wait for the disk. The clients of two trials share it.
                let args = ["--innodb-flush-log-at-trx-commit=2", "--max-connections=1000"];
                let server = MySqlServer::start(MySqlOptions::default().args(args)).await?;
                running.push(Running { addr: server.addr(), _server: Box::new(server) });
            }
            Self::ZooKeeper => {
                let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?;
                running.push(Running { addr: server.addr(), _server: Box::new(server) });
            }
        }
        Ok(running)
    }
}

/// A server. It is stopped when this is dropped.
#[derive(Debug)]
struct Running {
    addr: SocketAddr,
    _server: Box<dyn Server>,
}

trait Server: Any + std::fmt::Debug + Send + Sync {}
impl Server for RedisServer {}
impl Server for MySqlServer {}
impl Server for ZooKeeperServer {}

/// The servers of all trials: each is started when it is first needed, and stopped when the last trial is over. No trial harms
/// them, and each store on them has names of its own; most of what a trial took was to start them.
#[derive(Debug, Default)]
pub(crate) struct House {
    running: [OnceCell<Vec<Running>>; Kind::ALL.len()],
    stores: AtomicUsize,
}

impl House {
    /// A new, empty store, with proxies of its own.
    pub(crate) async fn store(self: &Arc<Self>, kind: Kind) -> Result<Store, BoxError> {
        let running = self.running[kind as usize].get_or_try_init(|| self.start(kind)).await?;
        let addresses: Vec<_> = running.iter().map(|server| server.addr).collect();
        let mut proxies = Vec::new();
        for address in &addresses {
            proxies.push(Proxy::start(*address).await?);
        }
        let number = self.number();
        Ok(Store { kind, number, addresses, proxies, _house: Arc::clone(self) })
    }

    /// Starts servers, and waits until they serve locks: the first calls of some take longer than a client waits.
    async fn start(&self, kind: Kind) -> Result<Vec<Running>, BoxError> {
        let running = kind.start().await?;
        let addresses: Vec<_> = running.iter().map(|server| server.addr).collect();
        let url = kind.first_url(&addresses, self.number());
        let served = async {
            loop {
                match served(&url).await {
                    Err(error) if error.is_retryable() => sleep(Duration::from_millis(20)).await,
                    served => return served,
                }
            }
        };
        timeout(READY_WITHIN, served).await.map_err(|_| format!("no {} within {READY_WITHIN:?}", kind.name()))??;
        Ok(running)
    }

    fn number(&self) -> usize {
        self.stores.fetch_add(1, Ordering::Relaxed)
    }
}

/// Has a store serve a lock.
async fn served(url: &str) -> lockkit::Result<()> {
    let locker = lockkit::connect(url).await?;
    drop(locker.lock("first").ttl(TTL).acquire_within(Duration::from_secs(5)).await?);
    drop(locker.shutdown(Duration::from_secs(1)).await);
    Ok(())
}

/// One store, and the proxies through which its clients go.
#[derive(Debug)]
pub(crate) struct Store {
    pub(crate) kind: Kind,
    number: usize,
    addresses: Vec<SocketAddr>,
    proxies: Vec<Proxy>,
    _house: Arc<House>,
}

impl Store {
    /// The URL for those who are cut off when the store is.
    pub(crate) fn proxied_url(&self) -> String {
        let addresses: Vec<_> = self.proxies.iter().map(Proxy::addr).collect();
        self.kind.url(&addresses, self.number)
    }

    /// The URL for those who are not, who come first.
    pub(crate) fn url(&self) -> String {
        self.kind.first_url(&self.addresses, self.number)
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
