//! The stores, each on private servers of its own.

use std::{any::Any, future::Future, pin::Pin, sync::Arc, time::Duration};

use lockkit::{
    MemoryStore,
    migrate::{Dual, Migration, Phase, Start},
    mysql::{MySqlConfig, schema},
    store::LockStore,
};
use lockkit_testkit::{
    Backend, BoxError,
    broken::{Bug, SimpleBackend},
    servers::{
        MySqlFlavor, MySqlOptions, MySqlServer, RedisFlavor, RedisOptions, RedisServer, ZooKeeperFlavor,
        ZooKeeperServer, hosts,
    },
};

type Opening = Pin<Box<dyn Future<Output = Result<Arc<dyn LockStore>, BoxError>> + Send>>;

/// A store that runs.
#[derive(Clone)]
pub(crate) struct Running {
    open: Arc<dyn Fn() -> Opening + Send + Sync>,
    _servers: Arc<dyn Any + Send + Sync>,
}

impl Running {
    /// Makes a client of it.
    pub(crate) fn open(&self) -> Opening {
        (self.open)()
    }

    fn at(url: String, servers: impl Any + Send + Sync) -> Self {
        let open = move || -> Opening {
            let url = url.clone();
            Box::pin(async move { Ok(lockkit::open(&url).await?) })
        };
        Self { open: Arc::new(open), _servers: Arc::new(servers) }
    }
}

/// A store to be started.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    Memory,
    Redis(fn() -> RedisFlavor),
    Redlock,
    MySql(fn() -> MySqlFlavor),
    ZooKeeper(fn() -> ZooKeeperFlavor),
    /// A migration from one of these to another, in the phase in which each lock is in both.
    Migration(&'static Self, &'static Self),
    /// The simple store over a connection, correct or with a bug.
    Simple(Option<Bug>),
}

impl Kind {
    pub(crate) const ALL: [(&str, Self); 12] = [
        ("memory", Self::Memory),
        ("redis", Self::Redis(|| RedisFlavor::Installed)),
        ("redis-newer", Self::Redis(|| RedisFlavor::Newer)),
        ("valkey", Self::Redis(|| RedisFlavor::Valkey)),
        ("redlock", Self::Redlock),
        ("mariadb", Self::MySql(|| MySqlFlavor::Installed)),
        ("mysql", Self::MySql(|| MySqlFlavor::Newer)),
        ("zookeeper", Self::ZooKeeper(|| ZooKeeperFlavor::Installed)),
        ("zookeeper-newer", Self::ZooKeeper(|| ZooKeeperFlavor::Newer)),
        ("migration-to-redis", Self::Migration(&Self::Memory, &Self::Redis(|| RedisFlavor::Installed))),
        (
            "migration-to-zookeeper",
            Self::Migration(&Self::Redis(|| RedisFlavor::Installed), &Self::ZooKeeper(|| ZooKeeperFlavor::Installed)),
        ),
        ("simple", Self::Simple(None)),
    ];

    /// Whether it may be missing on a machine, and is.
    pub(crate) fn is_missing(self) -> bool {
        match self {
            Self::Redis(flavor) => flavor() != RedisFlavor::Installed && flavor().program().find().is_err(),
            Self::MySql(flavor) => flavor() != MySqlFlavor::Installed && flavor().program().find().is_err(),
            Self::ZooKeeper(flavor) => flavor() != ZooKeeperFlavor::Installed && flavor().locate().is_err(),
            _ => false,
        }
    }

    pub(crate) async fn start(self) -> Result<Running, BoxError> {
        Ok(match self {
            Self::Memory => {
                let store = MemoryStore::new();
                let open = move || -> Opening {
                    let client: Arc<dyn LockStore> = Arc::new(store.clone());
                    Box::pin(async move { Ok(client) })
                };
                Running { open: Arc::new(open), _servers: Arc::new(()) }
            }
            Self::Redis(flavor) => {
                let server = RedisServer::start(RedisOptions::default().flavor(flavor())).await?;
                Running::at(server.url(), server)
            }
            Self::Redlock => {
                let nodes = RedisServer::start_many(3, RedisOptions::default()).await?;
                // The longest node timeout that there is: this machine may be busy.
                let url = format!("redlock://{}?delayed_restart=no&node_timeout=500ms", hosts(&nodes));
                Running::at(url, nodes)
            }
            Self::MySql(flavor) => {
                let options = MySqlOptions::default().flavor(flavor()).init(schema::ddl(MySqlConfig::TABLE)?);
                let options = options.init(schema::claims_ddl(MySqlConfig::TABLE)?);
                let server = MySqlServer::start(options.args(["--innodb-flush-log-at-trx-commit=2"])).await?;
                Running::at(server.url(), server)
            }
            Self::ZooKeeper(flavor) => {
                let server = ZooKeeperServer::start(flavor()).await?;
                Running::at(server.url(), server)
            }
            Self::Migration(old, new) => {
                let (old, new) = (Box::pin(old.start()).await?, Box::pin(new.start()).await?);
                let migration = Migration::new(old.open().await?, new.open().await?);
                migration.start(Start::new(Duration::from_secs(60), Duration::from_secs(1))).await?;
                migration.step(Phase::Both, |_| ()).await?.copied?;
                let open = move || -> Opening {
                    let (old, new) = (old.clone(), new.clone());
                    Box::pin(async move {
                        let client: Arc<dyn LockStore> =
                            Arc::new(Dual::connect(old.open().await?, new.open().await?).await?);
                        Ok(client)
                    })
                };
                Running { open: Arc::new(open), _servers: Arc::new(()) }
            }
            Self::Simple(bug) => {
                let backend = Arc::new(SimpleBackend::start(bug).await?);
                let opened = Arc::clone(&backend);
                let open = move || -> Opening {
                    let backend = Arc::clone(&opened);
                    Box::pin(async move { backend.open().await })
                };
                Running { open: Arc::new(open), _servers: Arc::new(backend) }
            }
        })
    }
}
