//! Every case of the compliance suite against quorums, as named trials: over memory stores, over five real servers, also
//! with some of them down, frozen or slow, and over a mixture of all kinds.
//!
//! A kind of store that is required and can't be found is a failure. `LOCKKIT_REQUIRE` names the required ones,
//! separated by commas; by default those whose servers Debian packages.

use std::{
    net::{SocketAddr, TcpListener},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use lockkit::redlock::RedisNodes;
use lockkit_core::{Clock, LockStore, MemoryStore};
use lockkit_mysql::{MySqlConfig, MySqlStore};
use lockkit_redis::{RedisConfig, RedisStore};
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_testkit::{
    Backend, BoxError, Server, Suite,
    faults::{Direction, Framing, Proxy},
    servers::{
        MySqlOptions, MySqlServer, Persistence, Process, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer,
    },
};
use lockkit_zk::ZkStore;

const REQUIRED: &str =
    "redlock-memory,redlock-redis,redlock-one-down,redlock-two-away,redlock-two-slow,redlock-three-slow,redlock-mixed";

/// A quorum over memory stores; every client is a quorum of its own over the same stores.
#[derive(Debug)]
struct MemoryQuorum {
    nodes: Vec<MemoryStore>,
}

impl MemoryQuorum {
    fn open(&self, config: RedlockConfig) -> Result<Arc<dyn LockStore>, BoxError> {
        let nodes = self.nodes.iter().map(|node| Node::new(Arc::new(node.clone()))).collect();
        Ok(Arc::new(RedlockStore::new(nodes, config)?))
    }
}

#[async_trait]
impl Backend for MemoryQuorum {
    fn name(&self) -> &str {
        "redlock-memory"
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        self.open(config())
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        self.open(config().clock(clock)).map(Some)
    }
}

/// Real servers that keep their data when they are killed, but wait for no disk: one that is busy for half a second must not
/// look like a fault of the store.
async fn servers(count: usize) -> Result<Vec<RedisServer>, BoxError> {
    Ok(RedisServer::start_many(count, RedisOptions::default().persistence(Persistence::Append)).await?)
}

/// The longest node timeout that the shortest ttl of the suite allows: this machine may be busy.
fn config() -> RedlockConfig {
    RedlockConfig::new().node_timeout(Duration::from_millis(150))
}

fn node(at: SocketAddr) -> RedisConfig {
    RedisConfig::new(at.ip().to_string(), at.port())
}

/// Declared durable, which they are for all that happens to them here: fences are strict, and nobody has to wait after a
/// restart.
fn nodes(servers: &[RedisServer]) -> RedisNodes {
    RedisNodes::new(servers.iter().map(|server| node(server.addr())).collect()).config(config()).durable(true)
}

/// A quorum over five servers.
#[derive(Debug)]
struct RedisQuorum {
    shared: Vec<RedisServer>,
}

#[async_trait]
impl Backend for RedisQuorum {
    fn name(&self) -> &str {
        "redlock-redis"
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(Arc::new(nodes(&self.shared).connect().await?))
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        let nodes = nodes(&self.shared);
        Ok(Some(Arc::new(nodes.config(config().clock(clock)).connect().await?)))
    }

    async fn private_server(&self) -> Result<Option<Box<dyn Server>>, BoxError> {
        let nowhere = TcpListener::bind("127.0.0.1:0")?;
        Ok(Some(Box::new(Private { servers: servers(3).await?, nowhere })))
    }
}

/// What is wrong with a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Nothing,
    Down,
    Frozen,
    /// Every message to it and from it takes so long.
    Slow(Duration),
}

/// A quorum over servers that are in trouble all the time. It has no private one: what harms all servers does so whether or
/// not some were in trouble before.
#[derive(Debug)]
struct TroubledQuorum {
    name: &'static str,
    servers: Vec<(RedisServer, Trouble, Option<Proxy>)>,
}

impl TroubledQuorum {
    async fn start(name: &'static str, troubles: [Trouble; 5]) -> Result<Self, BoxError> {
        let mut in_trouble = Vec::new();
        for trouble in troubles {
            // None is ever started again, so what they have is as good as on disk.
            let server = RedisServer::start(RedisOptions::default()).await?;
            let mut proxy = None;
            match trouble {
                Trouble::Nothing => {}
                Trouble::Down => server.kill().await?,
                Trouble::Frozen => server.freeze().await?,
                Trouble::Slow(delay) => {
                    let through = proxy.insert(Proxy::start(server.addr()).await?);
                    through.delay(Direction::ToServer, delay);
                    through.delay(Direction::ToClient, delay);
                }
            }
            in_trouble.push((server, trouble, proxy));
        }
        Ok(Self { name, servers: in_trouble })
    }

    async fn connect(&self, config: RedlockConfig) -> Result<Arc<dyn LockStore>, BoxError> {
        let nodes = self.servers.iter().map(|(server, trouble, proxy)| {
            let node = node(proxy.as_ref().map_or(server.addr(), Proxy::addr));
            match trouble {
                // Who connects waits for it so long.
                Trouble::Frozen => node.timeout(Duration::from_millis(200)),
                _ => node,
            }
        });
        let nodes = RedisNodes::new(nodes.collect());
        Ok(Arc::new(nodes.config(config).durable(true).connect().await?))
    }
}

#[async_trait]
impl Backend for TroubledQuorum {
    fn name(&self) -> &str {
        self.name
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        self.connect(config()).await
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        self.connect(config().clock(clock)).await.map(Some)
    }
}

/// Three servers. Whatever is done to the server under test is done to all of them.
#[derive(Debug)]
struct Private {
    servers: Vec<RedisServer>,
    /// A server that never answers.
    nowhere: TcpListener,
}

#[async_trait]
impl Server for Private {
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(Arc::new(nodes(&self.servers).connect().await?))
    }

    async fn open_through_proxy(&self) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        self.open_impatient(RedisConfig::TIMEOUT).await
    }

    /// There is one proxy, so this client is given a quorum in which it decides: its third server never answers.
    async fn open_impatient(&self, timeout: Duration) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        let proxy = Proxy::start(self.servers[1].addr()).await?.framing(Framing::Redis);
        let nowhere = node(self.nowhere.local_addr()?).timeout(Duration::from_millis(300));
        let nodes = RedisNodes::new(vec![node(self.servers[0].addr()), node(proxy.addr()).timeout(timeout), nowhere]);
        Ok((Arc::new(nodes.config(config()).durable(true).connect().await?), proxy))
    }

    async fn processes(&self) -> Result<Vec<&Process>, BoxError> {
        Ok(self.servers.iter().map(|server| &**server).collect())
    }

    async fn delete(&self, name: &str) -> Result<(), BoxError> {
        for server in &self.servers {
            server.command(&["DEL", &format!("lockkit:{name}")]).await?;
        }
        Ok(())
    }

    async fn forget_caches(&self) -> Result<(), BoxError> {
        for server in &self.servers {
            server.command(&["SCRIPT", "FLUSH"]).await?;
        }
        Ok(())
    }

    async fn cut_clients(&self) -> Result<(), BoxError> {
        for server in &self.servers {
            server.command(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await?;
            server.command(&["CLIENT", "KILL", "TYPE", "pubsub", "SKIPME", "yes"]).await?;
        }
        Ok(())
    }
}

/// One server of each kind: what they have in common is only the contract.
#[derive(Debug)]
struct MixedQuorum {
    redis: RedisServer,
    mysql: MySqlServer,
    zookeeper: ZooKeeperServer,
}

impl MixedQuorum {
    async fn start() -> Result<Self, BoxError> {
        // None is ever started again, so none has to wait for the disk.
        let table = MySqlOptions::default().init(lockkit_mysql::schema::ddl(MySqlConfig::TABLE)?);
        Ok(Self {
            redis: RedisServer::start(RedisOptions::default()).await?,
            mysql: MySqlServer::start(table.args(["--innodb-flush-log-at-trx-commit=2"])).await?,
            zookeeper: ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?,
        })
    }
}

#[async_trait]
impl Backend for MixedQuorum {
    fn name(&self) -> &str {
        "redlock-mixed"
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        let stores: [Arc<dyn LockStore>; 3] = [
            Arc::new(RedisStore::from_url(&self.redis.url()).await?),
            Arc::new(MySqlStore::from_url(&self.mysql.url()).await?),
            // A member whose session ends before the ttl cuts every lease that it is needed for.
            Arc::new(ZkStore::from_url(&format!("{}?session=60s", self.zookeeper.url())).await?),
        ];
        let nodes = stores.map(|store| Node::new(store).durable(true)).into();
        Ok(Arc::new(RedlockStore::new(nodes, config())?))
    }

    async fn open_with_clock(&self, _: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        Ok(None)
    }
}

/// One, two and three of five. With three down or frozen nothing is granted, which is another test.
fn troubles() -> [(&'static str, [Trouble; 5]); 4] {
    let (fine, slow) = (Trouble::Nothing, Trouble::Slow(Duration::from_millis(10)));
    [
        ("redlock-one-down", [fine, Trouble::Down, fine, fine, fine]),
        ("redlock-two-away", [fine, Trouble::Down, fine, Trouble::Frozen, fine]),
        ("redlock-two-slow", [fine, slow, fine, slow, fine]),
        ("redlock-three-slow", [slow, slow, fine, slow, fine]),
    ]
}

fn main() -> ExitCode {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let start = |count| runtime.block_on(servers(count));
    let memory = MemoryQuorum { nodes: (0..3).map(|_| MemoryStore::new()).collect() };
    let mut suite = Suite::of_slow_stores(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/expected"), REQUIRED);
    suite.add("redlock-memory", Ok(memory));
    suite.add("redlock-redis", start(5).map(|shared| RedisQuorum { shared }));
    for (name, troubles) in troubles() {
        suite.add(name, runtime.block_on(TroubledQuorum::start(name, troubles)));
    }
    suite.add("redlock-mixed", runtime.block_on(MixedQuorum::start()));
    suite.run()
}
