//! Private Redis servers that replicate, and sentinels that watch over them.

use std::{ffi::OsString, fmt::Write as _, fs, io, path::PathBuf, time::Duration};

use super::{
    Location, Probe, Process, RedisFlavor, RedisOptions, RedisServer, Result, ServerError, Service,
    redis::Tls,
    redis_client::{Connection, Door},
    until,
};

const NAME: &str = "Redis Sentinel";
/// For how long a server must not answer before a sentinel takes it for down.
const DOWN_AFTER: Duration = Duration::from_millis(800);
/// How many sentinels there are. Two of them have to agree.
const SENTINELS: usize = 3;

/// A primary with one replica, and three sentinels that put the replica in its place when it does not answer.
#[derive(Debug)]
pub struct RedisSentinels {
    servers: [RedisServer; 2],
    /// A replica that never takes over.
    bystander: Option<RedisServer>,
    sentinels: Vec<Process>,
    door: Door,
}

impl RedisSentinels {
    /// What the sentinels call the primary.
    pub const PRIMARY: &str = "lockkit";

    /// Starts all of them, and returns when the replica is in sync and every sentinel knows the others.
    ///
    /// # Errors
    ///
    /// If a program is not installed, or a server does not come up.
    pub async fn start(flavor: RedisFlavor) -> Result<Self> {
        Self::start_with(RedisOptions::default().flavor(flavor.clone()), flavor).await
    }

    /// The same with options for the primary and the replica. With TLS the sentinels use it, too.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub async fn start_with(options: RedisOptions, flavor: RedisFlavor) -> Result<Self> {
        Self::start_servers(options, flavor, false).await
    }

    /// The same with a second replica, the [`bystander`](Self::bystander), that is never promoted (`replica-priority 0`).
    ///
    /// A failover ends when all replicas follow the new primary. While this one is frozen, and the sentinels are
    /// [slow](Self::be_slow) to take it for down, that does not come to pass.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub async fn start_with_bystander(flavor: RedisFlavor) -> Result<Self> {
        let options = RedisOptions::default().flavor(flavor.clone());
        Self::start_servers(options, flavor, true).await
    }

    async fn start_servers(options: RedisOptions, flavor: RedisFlavor, has_bystander: bool) -> Result<Self> {
        // Fast enough for a test: the primary starts the first synchronisation at once.
        let tls = options.with_tls().cloned();
        let options = options.args(["--repl-diskless-sync-delay", "0", "--repl-timeout", "5"]);
        let primary = RedisServer::start(options.clone()).await?;
        let follow = options.args(["--replicaof", &format!("127.0.0.1 {}", primary.port())]);
        let replica = RedisServer::start(follow.clone()).await?;
        let bystander = match has_bystander {
            true => Some(RedisServer::start(follow.args(["--replica-priority", "0"])).await?),
            false => None,
        };
        let program = flavor.program().locate()?;
        let sentinel = || Sentinel { program: program.clone(), primary: primary.port(), tls: tls.clone() };
        let mut sentinels = Vec::with_capacity(SENTINELS);
        for _ in 0..SENTINELS {
            sentinels.push(Process::start(sentinel()).await?);
        }
        let started = Self { servers: [primary, replica], bystander, sentinels, door: Tls::door(tls.as_ref()) };
        until(NAME, "the sentinels find each other and the replicas", async || started.is_complete().await).await?;
        Ok(started)
    }

    /// The two servers; the first is the primary at the start.
    #[must_use]
    pub fn servers(&self) -> &[RedisServer; 2] {
        &self.servers
    }

    /// The replica that never takes over, if there is one.
    #[must_use]
    pub fn bystander(&self) -> Option<&RedisServer> {
        self.bystander.as_ref()
    }

    /// The sentinels.
    #[must_use]
    pub fn sentinels(&self) -> &[Process] {
        &self.sentinels
    }

    /// The URL that names all sentinels and the primary. With TLS it takes the authority's file: `?ca=`.
    #[must_use]
    pub fn url(&self) -> String {
        let addresses: Vec<_> = self.sentinels.iter().map(|sentinel| sentinel.addr().to_string()).collect();
        format!("{}+sentinel://{}/{}", self.servers[0].scheme(), addresses.join(","), Self::PRIMARY)
    }

    /// Runs a command on one of the sentinels, as [`RedisServer::command`] does on a server.
    ///
    /// # Errors
    ///
    /// As for [`RedisServer::command`].
    pub async fn command(&self, sentinel: usize, words: &[&str]) -> Result<String> {
        let answer = async {
            let mut connection = Connection::open(self.sentinels[sentinel].location(), self.door, None).await?;
            connection.command(words).await
        };
        answer.await.map_err(|error| ServerError::io(words.join(" "), error))
    }

    /// Waits until a majority of the sentinels says that this server is the primary, and it says so itself.
    ///
    /// # Errors
    ///
    /// If that does not come to pass within half a minute.
    pub async fn until_primary(&self, index: usize) -> Result<()> {
        let port = self.servers[index].port().to_string();
        until(NAME, "the other server takes over", async || {
            let mut agree = 0;
            for sentinel in 0..SENTINELS {
                let words = ["SENTINEL", "GET-MASTER-ADDR-BY-NAME", Self::PRIMARY];
                let says = self.command(sentinel, &words).await.unwrap_or_default();
                agree += usize::from(says.lines().nth(1) == Some(&port));
            }
            let role = self.servers[index].command(&["ROLE"]).await.unwrap_or_default();
            agree > SENTINELS / 2 && role.starts_with("master")
        })
        .await
    }

    /// Has the sentinels wait a minute before they take a server for down, or give up that a replica follows the new primary.
    ///
    /// # Errors
    ///
    /// As for [`command`](Self::command).
    pub async fn be_slow(&self) -> Result<()> {
        for sentinel in 0..SENTINELS {
            for setting in ["down-after-milliseconds", "failover-timeout"] {
                self.command(sentinel, &["SENTINEL", "SET", Self::PRIMARY, setting, "60000"]).await?;
            }
        }
        Ok(())
    }

    async fn is_complete(&self) -> bool {
        let replicas = [&self.servers[1]].into_iter().chain(&self.bystander);
        let count = replicas.clone().count();
        for sentinel in 0..SENTINELS {
            let fields = self.command(sentinel, &["SENTINEL", "MASTER", Self::PRIMARY]).await.unwrap_or_default();
            let lines: Vec<&str> = fields.lines().collect();
            let field = |name| lines.chunks(2).find(|pair| pair[0] == name).and_then(|pair| pair.get(1).copied());
            if field("num-slaves") != Some(&*count.to_string()) || field("num-other-sentinels") != Some("2") {
                return false;
            }
            // One that was not reached yet is no candidate for taking over.
            let told = self.command(sentinel, &["SENTINEL", "REPLICAS", Self::PRIMARY]).await.unwrap_or_default();
            let lines: Vec<&str> = told.lines().collect();
            if lines.windows(2).filter(|pair| *pair == ["master-link-status", "ok"]).count() < count {
                return false;
            }
        }
        for replica in replicas {
            let info = replica.command(&["INFO", "replication"]).await.unwrap_or_default();
            if !info.contains("master_link_status:up") {
                return false;
            }
        }
        true
    }
}

/// How a sentinel is started and asked.
#[derive(Clone, Debug)]
struct Sentinel {
    program: PathBuf,
    primary: u16,
    tls: Option<Tls>,
}

impl Service for Sentinel {
    fn name(&self) -> &str {
        NAME
    }

    fn prepare(&self, location: &Location) -> io::Result<()> {
        let (name, primary, down_after) = (RedisSentinels::PRIMARY, self.primary, DOWN_AFTER.as_millis());
        let mut config = format!(
            "port {}\nbind 127.0.0.1\ndir \"{}\"\nsentinel monitor {name} 127.0.0.1 {primary} 2\n\
             sentinel down-after-milliseconds {name} {down_after}\nsentinel failover-timeout {name} 4000\n",
            location.port,
            location.data.display(),
        );
        for (name, value) in self.tls.iter().flat_map(|tls| tls.settings(location)) {
            _ = writeln!(config, "{name} \"{}\"", value.display());
        }
        fs::write(location.data.join("sentinel.conf"), config)
    }

    fn command(&self, location: &Location) -> Vec<OsString> {
        vec![self.program.clone().into(), location.data.join("sentinel.conf").into(), "--sentinel".into()]
    }

    fn probe<'a>(&'a self, location: &'a Location, pid: u32) -> Probe<'a> {
        Box::pin(async move {
            let info = Connection::open(location, Tls::door(self.tls.as_ref()), None)
                .await?
                .command(&["INFO", "server"])
                .await?;
            if info.lines().any(|line| line == format!("process_id:{pid}")) {
                Ok(())
            } else {
                Err(io::Error::other("another server answers on its port"))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_replica_takes_over() -> Result<()> {
        let all = RedisSentinels::start(RedisFlavor::Installed).await?;
        all.until_primary(0).await?;
        all.servers()[0].kill().await?;
        all.until_primary(1).await
    }
}
