//! Who competes on what.

use std::{any::Any, path::PathBuf, process::Command};

use lockkit_compare::{
    hot::{BoxError, Contestant},
    redlock,
};
use lockkit_testkit::servers::{
    MySqlFlavor, MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer,
};

/// A kind of server.
#[derive(Clone, Copy)]
pub(crate) enum Field {
    Redis,
    Redlock,
    MySql,
    Zk,
}

/// What has to live as long as the contest.
pub(crate) type Servers = Vec<Box<dyn Any + Send + Sync>>;

impl Field {
    pub(crate) const ALL: [Self; 4] = [Self::Redis, Self::Redlock, Self::MySql, Self::Zk];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Redlock => "redlock",
            Self::MySql => "mysql",
            Self::Zk => "zk",
        }
    }

    /// Starts the servers. Lockkit is the first of the contestants.
    pub(crate) async fn start(self, durable: bool) -> Result<(Servers, Vec<Contestant>), BoxError> {
        match self {
            Self::Redis => {
                let server = RedisServer::start(RedisOptions::default()).await?;
                let ours = this("lockkit", "lockkit", &server.url())?;
                Ok((vec![Box::new(server)], vec![ours]))
            }
            Self::Redlock => {
                let (servers, url) = redlock().await?;
                Ok((vec![Box::new(servers)], vec![this("lockkit", "lockkit", &url)?]))
            }
            Self::MySql => {
                let relaxed = "--innodb-flush-log-at-trx-commit=2";
                let options = MySqlOptions::default().flavor(MySqlFlavor::Installed);
                let server = MySqlServer::start(if durable { options } else { options.args([relaxed]) }).await?;
                let ours = this("lockkit", "lockkit", &format!("{}?create=true", server.url()))?;
                let theirs = this("GET_LOCK (no fence)", "get_lock", &server.url())?;
                Ok((vec![Box::new(server)], vec![ours, theirs]))
            }
            Self::Zk => {
                let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?;
                let mut contestants = vec![this("lockkit", "lockkit", &format!("zk://{}", server.addr()))?];
                let mut servers: Servers = vec![];
                match curator(&server.addr().to_string()) {
                    Ok((directory, curator)) => {
                        servers.push(Box::new(directory));
                        contestants.push(curator);
                    }
                    Err(error) => println!("without Curator: {error}"),
                }
                servers.push(Box::new(server));
                Ok((servers, contestants))
            }
        }
    }
}

fn this(name: &str, client: &str, url: &str) -> Result<Contestant, BoxError> {
    Contestant::this(name, ["worker", client, url])
}

fn curator(servers: &str) -> Result<(tempfile::TempDir, Contestant), BoxError> {
    let jars = std::env::var_os("LOCKKIT_CURATOR").map_or_else(|| PathBuf::from("/usr/share/java"), PathBuf::from);
    if !jars.join("curator-recipes.jar").exists() {
        return Err(format!("there is no curator-recipes.jar in {}", jars.display()).into());
    }
    let directory = tempfile::tempdir()?;
    let classes = format!("{}:{}/*", directory.path().display(), jars.display());
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/hot/CuratorHot.java");
    let compiled = Command::new("javac").args(["-cp", &classes, "-d"]).arg(directory.path()).arg(source).status()?;
    if !compiled.success() {
        return Err("javac failed".into());
    }
    let args = ["-cp", &classes, "CuratorHot", servers, "/lockkit/hot-curator"];
    Ok((directory, Contestant::new("Curator", "java", args)))
}
