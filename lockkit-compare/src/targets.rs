//! The stores that are measured: those given by URL, or private servers of what is installed.

mod durability;

use std::{fmt, net::SocketAddr, ops::Deref, sync::Arc, time::Duration};

use lockkit::migrate::{Migration, Phase, Start};
use lockkit_testkit::servers::{
    self, Found, MySqlFlavor, MySqlOptions, MySqlServer, Process, RedisFlavor, RedisOptions, RedisServer,
    ZooKeeperFlavor, ZooKeeperServer, hosts,
};

use crate::{
    error::{Error, ErrorKind, Result},
    peers::{Peer, PeerProgram},
    plan::Step,
};

/// As many as the description of Redlock has.
const REDLOCK_NODES: usize = 5;
/// Why nothing else is measured of a peer, and nothing said of what it guarantees.
pub(crate) const OF_PEERS: &str = "another lock library, measured on the same private server: alone, under contention, and from process to process; no more is known of it here";
/// Why only a part is measured of a server that treats the disk the other way.
const OF_DURABILITY: &str = "the same server, with the other answer to whether a write waits for the disk; what that has no say in is left out to save time";
/// The prefix and the table of a migration's locks, and the longest ttl that the compliance cases use.
const MIGRATED: &str = "migrated";
const LONGEST_TTL: Duration = Duration::from_secs(60);

/// A store to measure.
pub struct Target {
    name: String,
    url: String,
    in_process: bool,
    /// What is left out, and why.
    in_part: Option<&'static str>,
    /// The lock library that is measured here, if that is not lockkit.
    peer: Option<PeerProgram>,
    warnings: Vec<String>,
    /// The server, or those of a quorum, if it was started for this run; they end with the target.
    servers: Vec<PrivateServer>,
}

impl Target {
    /// What to call it: short, without secrets, different for each target.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where it is. May have a password in it: not to be shown.
    #[must_use]
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Whether only this process can reach it, as `memory:`.
    #[must_use]
    pub fn is_in_process(&self) -> bool {
        self.in_process
    }

    /// The measures that it takes alone.
    pub(crate) fn steps(&self) -> &'static [Step] {
        match (&self.peer, self.in_part) {
            (Some(_), _) => &Step::OF_PEERS,
            (None, Some(_)) => &Step::IN_PART,
            (None, None) => &Step::ALONE,
        }
    }

    /// The other lock library that it is measured with, if it is.
    pub(crate) fn peer(&self) -> Option<&PeerProgram> {
        self.peer.as_ref()
    }

    /// Its private servers; none of a store that others use.
    pub(crate) fn servers(&self) -> &[PrivateServer] {
        &self.servers
    }

    /// Whether it is a store that others use, and not one that was made for this run.
    pub(crate) fn is_in_use(&self) -> bool {
        !self.in_process && self.servers.is_empty() && self.in_part.is_none()
    }

    /// Why it does not take the others.
    pub(crate) fn in_part(&self) -> Option<&'static str> {
        self.in_part
    }

    /// What connecting showed to put its locks at risk.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may contain a password.
        f.debug_tuple("Target").field(&self.name).finish()
    }
}

/// A server that was started for this run, and ends when the last of its clones is gone.
#[derive(Clone)]
pub(crate) struct PrivateServer {
    server: Arc<dyn Deref<Target = Process> + Send + Sync>,
    keeps: bool,
}

impl PrivateServer {
    /// A server that has its locks on disk.
    pub(crate) fn of(server: impl Deref<Target = Process> + Send + Sync + 'static) -> Self {
        Self { server: Arc::new(server), keeps: true }
    }

    /// A server that has its locks in memory only.
    pub(crate) fn forgetful(server: impl Deref<Target = Process> + Send + Sync + 'static) -> Self {
        Self { keeps: false, ..Self::of(server) }
    }

    /// Its address, as it stands in the URL. It stays the same when it is started again.
    pub(crate) fn addr(&self) -> SocketAddr {
        self.process().addr()
    }

    pub(crate) fn process(&self) -> &Process {
        &self.server
    }

    /// Whether it has its locks again after it was killed.
    pub(crate) fn keeps(&self) -> bool {
        self.keeps
    }
}

impl fmt::Debug for PrivateServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("PrivateServer").field(&self.addr()).finish()
    }
}

/// What there is to measure, and what else there could be.
#[derive(Debug, Default)]
pub struct Targets {
    pub(crate) list: Vec<Target>,
    pub(crate) missing: Vec<String>,
}

impl Targets {
    /// The stores, in the order in which they are measured.
    #[must_use]
    pub fn list(&self) -> &[Target] {
        &self.list
    }

    /// How to get the servers that are not installed, a sentence each.
    #[must_use]
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Adds the store at this URL, after connecting to it.
    ///
    /// # Errors
    /// Those of [`lockkit::open`].
    pub async fn add(&mut self, url: &str) -> Result<&Target> {
        let store = lockkit::open(url).await?;
        let info = store.info();
        let warnings = info.warnings.to_vec();
        Ok(self.push(info.name.to_string(), url.to_owned(), info.scheme == "memory", warnings))
    }

    /// A private server of every kind that is installed, and a quorum of five. A kind that is not installed is
    /// [missing](Self::missing).
    ///
    /// # Errors
    /// [`Unavailable`](crate::ErrorKind::Unavailable) if an installed server does not come up.
    ///
    /// # Cancellation
    /// What was started ends.
    pub async fn installed() -> Result<Self> {
        let mut targets = Self::default();
        for flavor in [RedisFlavor::Installed, RedisFlavor::Newer, RedisFlavor::Valkey] {
            let kind = if flavor == RedisFlavor::Valkey { "valkey" } else { "redis" };
            if let Some(name) = targets.is_new(kind, flavor.program().find())? {
                let server = RedisServer::start(RedisOptions::default().flavor(flavor)).await?;
                targets.start(name, server.url(), vec![PrivateServer::forgetful(server)]);
            }
        }
        if RedisFlavor::Installed.program().find().is_ok() {
            targets.add_redlock().await?;
        }
        for flavor in [MySqlFlavor::Installed, MySqlFlavor::Newer] {
            let kind = if flavor == MySqlFlavor::Installed { "mariadb" } else { "mysql" };
            if let Some(name) = targets.is_new(kind, flavor.program().find())? {
                let server = MySqlServer::start(MySqlOptions::default().flavor(flavor)).await?;
                targets.start(name, format!("{}?create=true", server.url()), vec![PrivateServer::of(server)]);
            }
        }
        for flavor in [ZooKeeperFlavor::Installed, ZooKeeperFlavor::Newer] {
            match ZooKeeperServer::start(flavor).await {
                Ok(server) => targets.start(name_of(&server).await?, server.url(), vec![PrivateServer::of(server)]),
                Err(error) if error.is_missing() => targets.missing.push(error.to_string()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(targets)
    }

    /// Puts the store inside this process first, to measure the others by.
    #[must_use]
    pub fn with_memory(mut self) -> Self {
        if !self.list.iter().any(|target| target.in_process) {
            self.push("memory".to_owned(), "memory:".to_owned(), true, Vec::new());
            self.list.rotate_right(1);
        }
        self
    }

    /// Adds the store of a [migration](lockkit::migrate) from a private server of Redis to one of MySQL or MariaDB, if there are both:
    /// in the phase in which each lock is held in either store. It has a prefix and a table of its own there.
    ///
    /// # Errors
    /// Those of [`Migration::start`] and [`Migration::step`].
    ///
    /// # Cancellation
    /// The migration may be started.
    pub async fn with_migration(mut self) -> Result<Self> {
        let private =
            |scheme: &str| self.list.iter().find(|target| !target.servers.is_empty() && target.url.starts_with(scheme));
        let (Some(old), Some(new)) = (private("redis://"), private("mysql://")) else { return Ok(self) };
        let kind = |target: &Target| target.name.split(' ').next().unwrap_or_default().to_owned();
        let name = format!("{} to {}", kind(old), kind(new));
        let (from, to) = (with_option(&old.url, "prefix"), with_option(&new.url, "table"));
        let [old, new] = lockkit::stores_of_migration(&from, &to).await?;
        let migration = Migration::new(old, new);
        migration.start(Start { max_ttl: LONGEST_TTL, ..Start::default() }).await?;
        migration.step(Phase::Both, |_| {}).await?.copied?;
        self.push(name, format!("migrate:?from={from}&to={to}"), false, Vec::new());
        if let Some(target) = self.list.last_mut() {
            target.in_part = Some(
                "a migration between these two in the phase both, where a lock is held in each; left out to save time",
            );
        }
        Ok(self)
    }

    /// Adds these other lock libraries, each on the private server that a store here has, after all stores.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable) if a peer is missing, or the server that it needs.
    ///
    /// # Cancellation
    /// What was started ends.
    pub async fn with_peers(mut self, peers: impl IntoIterator<Item = Peer>) -> Result<Self> {
        for peer in peers {
            self.add_peer(peer).await?;
        }
        Ok(self)
    }

    /// Adds all other lock libraries that are installed; those that are not are [missing](Self::missing).
    pub async fn with_installed_peers(mut self) -> Self {
        for peer in Peer::ALL {
            if let Err(error) = self.add_peer(peer).await {
                self.missing.push(error.to_string());
            }
        }
        self
    }

    async fn add_peer(&mut self, peer: Peer) -> Result<()> {
        let ours = |target: &&Target| target.url.starts_with(peer.scheme()) && target.peer.is_none();
        let servers = self.list.iter().find(ours).map(|target| target.servers.clone()).unwrap_or_default();
        let Some(server) = servers.first().map(PrivateServer::addr) else {
            let message = format!("the peer {peer} is missing: there is no private server for it ({}…)", peer.scheme());
            return Err(Error::new(ErrorKind::Unavailable, message));
        };
        let program = peer.prepare().await?;
        self.start(program.title(), program.url(server), servers);
        if let Some(target) = self.list.last_mut() {
            target.in_part = Some(OF_PEERS);
            target.peer = Some(program);
        }
        Ok(())
    }

    async fn add_redlock(&mut self) -> Result<()> {
        let (servers, url) = redlock().await?;
        let servers = servers.into_iter().map(PrivateServer::forgetful).collect();
        self.start(format!("redlock of {REDLOCK_NODES}"), url, servers);
        Ok(())
    }

    /// What to call a server of this kind, if it is installed in a version that is not among the targets yet.
    fn is_new(&mut self, kind: &str, found: servers::Result<Found>) -> Result<Option<String>> {
        match found {
            Ok(found) => {
                let name = format!("{kind} {}", found.version);
                Ok(self.list.iter().all(|target| target.name != name).then_some(name))
            }
            Err(error) if error.is_missing() => {
                self.missing.push(error.to_string());
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Adds a store that is made of these private servers.
    pub(crate) fn start(&mut self, name: String, url: String, servers: Vec<PrivateServer>) {
        self.push(name, url, false, Vec::new());
        if let Some(target) = self.list.last_mut() {
            target.servers = servers;
        }
    }

    fn push(&mut self, name: String, url: String, in_process: bool, warnings: Vec<String>) -> &Target {
        // The same store twice is a fair thing to ask for: it shows how much two runs on one store differ.
        let name = distinct(name, |name| self.list.iter().any(|target| target.name == name));
        let servers = Vec::new();
        self.list.push(Target { name, url, in_process, in_part: None, peer: None, warnings, servers });
        &self.list[self.list.len() - 1]
    }
}

/// What to call a ZooKeeper: it says its version as `Zookeeper version: 3.8.0-…`.
async fn name_of(server: &ZooKeeperServer) -> Result<String> {
    let said = server.word("srvr").await?;
    let version = said.split_once("version: ").and_then(|(_, rest)| rest.split(['-', ',']).next());
    Ok(format!("zookeeper {}", version.unwrap_or("of an unknown version")))
}

/// Private servers for a quorum, and its URL. The servers are new, and nobody can have held a lock there before.
///
/// # Errors
/// [`Unavailable`](crate::ErrorKind::Unavailable) if a server does not come up.
pub async fn redlock() -> Result<(Vec<RedisServer>, String)> {
    let servers = RedisServer::start_many(REDLOCK_NODES, RedisOptions::default()).await?;
    let url = format!("redlock://{}?delayed_restart=no", hosts(&servers));
    Ok((servers, url))
}

/// The URL of a store of its own on the same server.
fn with_option(url: &str, option: &str) -> String {
    format!("{url}{}{option}={MIGRATED}", if url.contains('?') { '&' } else { '?' })
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
    use crate::error::ErrorKind;

    #[test]
    fn the_same_store_twice_gets_two_names() {
        assert_eq!(distinct("redis".into(), |_| false), "redis");
        assert_eq!(distinct("redis".into(), |name| ["redis", "redis #2"].contains(&name)), "redis #3");
    }

    #[tokio::test]
    async fn memory_comes_first_and_once() {
        let mut targets = Targets::default();
        targets.add("memory:").await.expect("memory");
        assert_eq!(targets.with_memory().list.len(), 1);
        let targets = Targets::default().with_memory();
        assert!(targets.list[0].in_process);
    }

    #[tokio::test]
    async fn a_migration_is_added_where_there_are_two_private_servers() {
        let redis = RedisServer::start(RedisOptions::default()).await.expect("redis");
        let mysql = MySqlServer::start(MySqlOptions::default()).await.expect("mysql");
        let urls = [redis.url(), format!("{}?create=true", mysql.url())];
        let mut targets = Targets::default();
        targets.add(&urls[0]).await.expect("redis");
        targets.add(&urls[1]).await.expect("mysql");
        let given = targets.with_migration().await.expect("none");
        assert_eq!(given.list.len(), 2, "stores in use are left alone: {given:?}");

        let (mut targets, [redis_url, mysql_url]) = (Targets::default(), urls);
        targets.start("redis 7".to_owned(), redis_url, vec![PrivateServer::forgetful(redis)]);
        targets.start("mariadb 10".to_owned(), mysql_url, vec![PrivateServer::of(mysql)]);
        let targets = targets.with_migration().await.expect("started");
        let [.., target] = targets.list() else { panic!("{targets:?}") };
        assert_eq!((target.name(), target.steps()), ("redis to mariadb", &Step::IN_PART[..]));
        let guard = lockkit::connect(target.url()).await.expect("store").lock("x").acquire().await.expect("granted");
        let seen = guard.release().await.expect("released");
        assert_eq!(seen, lockkit::Outcome::Released);
    }

    #[tokio::test]
    async fn a_bad_url_is_bad_input() {
        let failure = Targets::default().add("no url").await.expect_err("bad");
        assert_eq!(failure.kind(), ErrorKind::InvalidInput);
    }
}
