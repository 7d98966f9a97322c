//! Ten thousand acquisitions of each store leave nothing behind: no file descriptor, no task, and nothing on the server.
//!
//! A program of its own, and one store after the other, for the descriptors that are counted are those of the whole process.

use std::{process::ExitCode, sync::Arc};

use libtest_mimic::{Arguments, Failed, Trial};
use lockkit::{
    LockStore, MemoryStore,
    mysql::{MySqlConfig, schema},
    redis::{RedisConfig, RedisStore},
};
use lockkit_testkit::{
    AsyncOpen, BoxError, cycles_leave_nothing,
    servers::{
        MySqlFlavor, MySqlOptions, MySqlServer, RedisCluster, RedisFlavor, RedisOptions, RedisSentinels, RedisServer,
        ZooKeeperFlavor, ZooKeeperServer, hosts,
    },
};
use tokio::runtime::Runtime;

/// A few seconds of each store: the servers do not wait for a disk.
const CYCLES: u32 = 10_000;

/// Starts a store's servers, and looks for leaks.
type Run = fn() -> Result<(), BoxError>;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials: [(&str, Run); 8] = [
        ("memory", memory),
        ("redis", redis),
        ("redis-sentinel", sentinel),
        ("redis-cluster", cluster),
        ("redlock", redlock),
        ("mariadb", || mysql(MySqlFlavor::Installed)),
        ("mysql", || mysql(MySqlFlavor::Newer)),
        ("zk", zookeeper),
    ];
    let newer = MySqlFlavor::Newer.program().find().is_ok();
    let trial = |(name, run): (&str, Run)| {
        let trial = Trial::test(name, move || run().map_err(Failed::from));
        trial.with_ignored_flag(name == "mysql" && !newer)
    };
    libtest_mimic::run(&arguments, trials.into_iter().map(trial).collect()).exit_code()
}

fn memory() -> Result<(), BoxError> {
    let store = MemoryStore::new();
    let open = move || {
        let client: Arc<dyn LockStore> = Arc::new(store.clone());
        async move { Ok(client) }
    };
    check(open, || async { Ok(0) })
}

fn redis() -> Result<(), BoxError> {
    let servers = Runtime::new()?;
    let server = servers.block_on(RedisServer::start(RedisOptions::default()))?;
    check(at(server.url()), || keys(std::slice::from_ref(&server)))
}

fn sentinel() -> Result<(), BoxError> {
    let servers = Runtime::new()?;
    let many = servers.block_on(RedisSentinels::start(RedisFlavor::Installed))?;
    check(just_started(many.url()), || keys(many.servers()))
}

fn cluster() -> Result<(), BoxError> {
    let servers = Runtime::new()?;
    let many = servers.block_on(RedisCluster::start(RedisFlavor::Installed, false))?;
    check(just_started(many.url()), || keys(many.members()))
}

fn redlock() -> Result<(), BoxError> {
    let servers = Runtime::new()?;
    let nodes = servers.block_on(RedisServer::start_many(3, RedisOptions::default()))?;
    // The longest node timeout that there is: this machine may be busy.
    let url = format!("redlock://{}?delayed_restart=no&node_timeout=500ms", hosts(&nodes));
    check(at(url), || keys(&nodes))
}

fn mysql(flavor: MySqlFlavor) -> Result<(), BoxError> {
    let servers = Runtime::new()?;
    let options = MySqlOptions::default().flavor(flavor).init(schema::ddl(MySqlConfig::TABLE)?);
    let options = options.args(["--innodb-flush-log-at-trx-commit=2"]);
    let server = servers.block_on(MySqlServer::start(options))?;
    let count = format!("SELECT COUNT(*) FROM {}", MySqlConfig::TABLE);
    check(at(server.url()), || async {
        let rows = server.admin(&count).await?;
        Ok(rows.first().and_then(|row| row.first()?.as_deref()).ok_or("no count")?.parse()?)
    })
}

/// Nodes that outlive their session, and watches. A place that is left in a queue shows as a lock that is still held.
fn zookeeper() -> Result<(), BoxError> {
    let servers = Runtime::new()?;
    // Empty directories are kept meanwhile: one that goes and comes again looks like one more.
    let never = ["-Dznode.container.checkIntervalMs=86400000"];
    let server = servers.block_on(ZooKeeperServer::start_with(ZooKeeperFlavor::Installed, &never))?;
    check(at(server.url()), || async {
        let said = server.word("mntr").await?;
        let number = |of: &str| -> Result<u64, BoxError> {
            let line = said.lines().find_map(|line| line.strip_prefix(of)).ok_or_else(|| format!("no {of}: {said}"))?;
            Ok(line.trim().parse()?)
        };
        Ok(number("zk_znode_count\t")? - number("zk_ephemerals_count\t")? + number("zk_watch_count\t")?)
    })
}

fn check<R>(open: impl AsyncOpen, stored: impl Fn() -> R + Send + Sync) -> Result<(), BoxError>
where
    R: Future<Output = Result<u64, BoxError>> + Send,
{
    Runtime::new()?.block_on(cycles_leave_nothing(open, stored, CYCLES))
}

fn at(url: String) -> impl AsyncOpen {
    move || {
        let url = url.clone();
        async move { Ok(lockkit::open(&url).await?) }
    }
}

/// The servers have just started, which is no reason to wait here.
fn just_started(url: String) -> impl AsyncOpen {
    move || {
        let url = url.clone();
        async move {
            let config = RedisConfig::from_url(&url)?.failover_pause(false);
            Ok(Arc::new(RedisStore::connect(config).await?) as Arc<dyn LockStore>)
        }
    }
}

async fn keys(servers: &[RedisServer]) -> Result<u64, BoxError> {
    let mut keys = 0;
    for server in servers {
        let said = server.command(&["DBSIZE"]).await?;
        keys += said.trim().parse::<u64>().map_err(|_| format!("no number: {said}"))?;
    }
    Ok(keys)
}
