//! The stores that `race` and `compare` run on: those given by URL, or private servers of what is installed.

use std::{any::Any, fmt};

use clap::Args;
use lockkit_testkit::servers::{
    self, Found, MySqlFlavor, MySqlOptions, MySqlServer, RedisFlavor, RedisOptions, RedisServer, ZooKeeperFlavor,
    ZooKeeperServer,
};

use crate::{
    exit::{Failure, UNAVAILABLE},
    store,
};

/// As many as the description of Redlock has.
const REDLOCK_NODES: usize = 5;

/// Which stores to run on.
#[derive(Args, Clone)]
pub(crate) struct StoresArgs {
    /// URL of a store, such as redis://host:6379; may be given several times. Default: LOCKKIT_STORE, or else a private
    /// server of every kind that is installed
    #[arg(long = "store", value_name = "URL", env = "LOCKKIT_STORE", hide_env = true, hide_env_values = true)]
    urls: Vec<String>,
}

impl StoresArgs {
    /// Connects to the stores, or starts what is installed.
    pub(crate) async fn targets(&self) -> Result<Targets, Failure> {
        // An empty variable counts as unset.
        let urls: Vec<_> = self.urls.iter().map(String::as_str).filter(|url| !url.is_empty()).collect();
        if urls.is_empty() { Targets::installed().await } else { Targets::given(&urls).await }
    }
}

impl fmt::Debug for StoresArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // URLs may contain passwords.
        f.write_str("StoresArgs(..)")
    }
}

/// A store to run on.
#[derive(Debug)]
pub(crate) struct Target {
    /// What to call it: short, without secrets, different for each target.
    pub(crate) name: String,
    /// Where it is. May have a password in it, so it is never shown.
    pub(crate) url: String,
    /// Whether only this process can reach it, as `memory:`.
    pub(crate) in_process: bool,
    /// The server, if it was started for this run; it ends with the target.
    _server: Option<Box<dyn Any + Send + Sync>>,
}

/// What there is to run on, and what else there could be.
#[derive(Debug, Default)]
pub(crate) struct Targets {
    pub(crate) list: Vec<Target>,
    /// How to get the servers that are not installed, a sentence each.
    pub(crate) missing: Vec<String>,
}

impl Targets {
    /// The stores at these URLs. Fails if one of them can't be reached.
    async fn given(urls: &[&str]) -> Result<Self, Failure> {
        let mut targets = Self::default();
        for url in urls {
            let store = store::open(url).await?;
            let info = store.info();
            targets.add(info.name.to_string(), (*url).to_owned(), info.scheme == "memory", None);
        }
        Ok(targets)
    }

    /// A private server of every kind that is installed. Not being installed is no failure; not coming up is.
    async fn installed() -> Result<Self, Failure> {
        let mut targets = Self::default();
        for flavor in [RedisFlavor::Installed, RedisFlavor::Newer, RedisFlavor::Valkey] {
            let kind = if flavor == RedisFlavor::Valkey { "valkey" } else { "redis" };
            if let Some(name) = targets.is_new(kind, flavor.program().find())? {
                let server = up(RedisServer::start(RedisOptions::default().flavor(flavor)).await)?;
                targets.add(name, server.url(), false, Some(Box::new(server)));
            }
        }
        if RedisFlavor::Installed.program().find().is_ok() {
            targets.add_redlock().await?;
        }
        for flavor in [MySqlFlavor::Installed, MySqlFlavor::Newer] {
            let kind = if flavor == MySqlFlavor::Installed { "mariadb" } else { "mysql" };
            if let Some(name) = targets.is_new(kind, flavor.program().find())? {
                let server = up(MySqlServer::start(MySqlOptions::default().flavor(flavor)).await)?;
                targets.add(name, format!("{}?create=true", server.url()), false, Some(Box::new(server)));
            }
        }
        for flavor in [ZooKeeperFlavor::Installed, ZooKeeperFlavor::Newer] {
            let name = if flavor == ZooKeeperFlavor::Installed { "zookeeper" } else { "zookeeper newer" };
            match ZooKeeperServer::start(flavor).await {
                Ok(server) => targets.add(name.to_owned(), server.url(), false, Some(Box::new(server))),
                Err(error) if error.is_missing() => targets.missing.push(error.to_string()),
                Err(error) => return Err(Failure::new(UNAVAILABLE, error.to_string())),
            }
        }
        Ok(targets)
    }

    /// A quorum of servers. They are new, and nobody can have held a lock there before.
    async fn add_redlock(&mut self) -> Result<(), Failure> {
        let mut servers = Vec::new();
        for _ in 0..REDLOCK_NODES {
            servers.push(up(RedisServer::start(RedisOptions::default()).await)?);
        }
        let hosts: Vec<_> = servers.iter().map(|server| server.addr().to_string()).collect();
        let url = format!("redlock://{}?delayed_restart=no", hosts.join(","));
        self.add(format!("redlock of {REDLOCK_NODES}"), url, false, Some(Box::new(servers)));
        Ok(())
    }

    /// What to call a server of this kind, if it is installed in a version that is not among the targets yet.
    fn is_new(&mut self, kind: &str, found: servers::Result<Found>) -> Result<Option<String>, Failure> {
        match found {
            Ok(found) => {
                let name = format!("{kind} {}", found.version);
                Ok(self.list.iter().all(|target| target.name != name).then_some(name))
            }
            Err(error) if error.is_missing() => {
                self.missing.push(error.to_string());
                Ok(None)
            }
            Err(error) => Err(Failure::new(UNAVAILABLE, error.to_string())),
        }
    }

    /// Puts the store inside this process first.
    pub(crate) fn with_memory(mut self) -> Self {
        if !self.list.iter().any(|target| target.in_process) {
            let memory = Target { name: "memory".into(), url: "memory:".into(), in_process: true, _server: None };
            self.list.insert(0, memory);
        }
        self
    }

    fn add(&mut self, name: String, url: String, in_process: bool, server: Option<Box<dyn Any + Send + Sync>>) {
        // The same store twice is a fair thing to ask for: it shows how much two runs on one store differ.
        let name = distinct(name, |name| self.list.iter().any(|target| target.name == name));
        self.list.push(Target { name, url, in_process, _server: server });
    }
}

fn up<S>(started: servers::Result<S>) -> Result<S, Failure> {
    started.map_err(|error| Failure::new(UNAVAILABLE, error.to_string()))
}

fn distinct(name: String, taken: impl Fn(&str) -> bool) -> String {
    if !taken(&name) {
        return name;
    }
    (2..).map(|number| format!("{name} #{number}")).find(|name| !taken(name)).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_store_twice_gets_two_names() {
        assert_eq!(distinct("redis".into(), |_| false), "redis");
        assert_eq!(distinct("redis".into(), |name| ["redis", "redis #2"].contains(&name)), "redis #3");
    }

    #[tokio::test]
    async fn memory_comes_first_and_once() {
        let targets = Targets::given(&["memory:"]).await.expect("memory").with_memory();
        assert_eq!(targets.list.len(), 1);
        let targets = Targets::default().with_memory();
        assert!(targets.list[0].in_process);
    }

    #[tokio::test]
    async fn a_bad_url_is_bad_input() {
        assert_eq!(Targets::given(&["no url"]).await.expect_err("bad").code(), crate::exit::USAGE);
    }
}
