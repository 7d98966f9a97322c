//! Where the servers are and how to talk to them.

pub(crate) mod from_url;
pub(crate) mod secret;

use std::{path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use lockkit_core::{Clock, Error, Result, StoreInfo, SystemClock, drift, url_options::Hidden};

pub(crate) use self::secret::Login;
use self::secret::Secret;
use crate::wire::{
    address::{self, Address},
    name::Names,
    server::{ServerFacts, Vet},
};

/// How to reach one Redis or Valkey server, the primary that sentinels name, or a cluster.
///
/// ```
/// use std::time::Duration;
/// use lockkit_redis::RedisConfig;
///
/// let config: RedisConfig = "redis://app:secret@127.0.0.1:6379/0?prefix=shop:&timeout=500ms".parse()?;
/// let same = RedisConfig::new("127.0.0.1", 6379)
///     .username("app")
///     .password("secret")
///     .prefix("shop:")
///     .timeout(Duration::from_millis(500));
/// assert_eq!(format!("{config:?}"), format!("{same:?}"));
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), lockkit_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RedisConfig {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) topology: Topology,
    pub(crate) database: u32,
    pub(crate) login: Login,
    pub(crate) tls: bool,
    pub(crate) ca: Hidden<PathBuf>,
    pub(crate) identity: Hidden<(PathBuf, PathBuf)>,
    pub(crate) prefix: String,
    pub(crate) timeout: Duration,
    pub(crate) replicas: u32,
    pub(crate) replica_timeout: Duration,
    pub(crate) max_ttl: Duration,
    pub(crate) failover_pause: bool,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) vet: Option<Vet>,
}

/// Which server is meant.
#[derive(Clone, Debug)]
pub(crate) enum Topology {
    /// The one at `host` and `port`.
    Single,
    /// The primary of this name, as sentinels have it.
    Sentinel { sentinels: Vec<Address>, primary: String, login: Login },
    /// The member that serves the key, as the members of a cluster tell.
    Cluster { seeds: Vec<Address> },
}

impl RedisConfig {
    /// The default port.
    pub const PORT: u16 = 6379;
    /// The default port of a sentinel.
    pub const SENTINEL_PORT: u16 = 26379;
    /// The default bound on one operation.
    pub const TIMEOUT: Duration = Duration::from_secs(2);
    /// The default bound on the replicas' acknowledgement.
    pub const REPLICA_TIMEOUT: Duration = Duration::from_secs(1);
    /// The longest ttl, and the default on a single server.
    pub const LONGEST_TTL: Duration = StoreInfo::LONGEST_TTL;
    /// The default for the longest ttl with sentinels and on a cluster, where a failover costs that much waiting.
    pub const FAILOVER_MAX_TTL: Duration = Duration::from_secs(60);
    /// The default key prefix.
    pub const PREFIX: &str = "lockkit:";

    /// A server, with all else at its default.
    #[must_use]
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
            topology: Topology::Single,
            database: 0,
            login: Login::default(),
            tls: false,
            ca: Hidden(None),
            identity: Hidden(None),
            prefix: Self::PREFIX.to_owned(),
            timeout: Self::TIMEOUT,
            replicas: 0,
            replica_timeout: Self::REPLICA_TIMEOUT,
            max_ttl: Self::LONGEST_TTL,
            failover_pause: true,
            clock: Arc::new(SystemClock),
            vet: None,
        }
    }

    /// The primary called `primary` by these sentinels, with all else at its default.
    #[must_use]
    pub fn sentinel<H: Into<String>>(
        sentinels: impl IntoIterator<Item = (H, u16)>,
        primary: impl Into<String>,
    ) -> Self {
        let sentinels = sentinels.into_iter().map(|(host, port)| (host.into(), port)).collect();
        let topology = Topology::Sentinel { sentinels, primary: primary.into(), login: Login::default() };
        Self { topology, max_ttl: Self::FAILOVER_MAX_TTL, ..Self::new("", 0) }
    }

    /// The cluster that these servers belong to, with all else at its default. One of them suffices, more are safer.
    #[must_use]
    pub fn cluster<H: Into<String>>(seeds: impl IntoIterator<Item = (H, u16)>) -> Self {
        let seeds = seeds.into_iter().map(|(host, port)| (host.into(), port)).collect();
        Self { topology: Topology::Cluster { seeds }, max_ttl: Self::FAILOVER_MAX_TTL, ..Self::new("", 0) }
    }

    /// Reads `redis://[user[:password]@]host[:port][/database][?options]`,
    /// `redis+sentinel://[user[:password]@]host[:port],…/primary[/database][?options]` or
    /// `redis+cluster://[user[:password]@]host[:port],…[?options]`.
    ///
    /// The scheme is `redis` or `valkey`; `rediss` or `valkeys` for TLS, as in `rediss+sentinel`. User and password are
    /// percent-decoded; they are those of the server, not of the sentinels. The options are listed in
    /// `docs/backends/redis.md`.
    ///
    /// # Errors
    /// [`InvalidInput`](lockkit_core::ErrorKind::InvalidInput) says what is wrong. It never repeats the URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self> {
        from_url::read(url)
    }

    /// Which of the server's databases to use; 0 by default.
    #[must_use]
    pub fn database(mut self, database: u32) -> Self {
        self.database = database;
        self
    }

    /// The user to log in as; Redis' `default` user otherwise.
    #[must_use]
    pub fn username(mut self, username: impl Into<String>) -> Self {
        self.login.username.0 = Some(username.into());
        self
    }

    /// The password. It is never shown.
    #[must_use]
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.login.password = Some(Secret::Given(password.into()));
        self
    }

    /// The environment variable that has the password. It is read at each connect.
    #[must_use]
    pub fn password_env(mut self, name: impl Into<String>) -> Self {
        self.login.password = Some(Secret::Env { option: "password_env", name: name.into() });
        self
    }

    /// The file that has the password, on one line. It is read at each connect, so the password may change.
    #[must_use]
    pub fn password_file(mut self, file: impl Into<PathBuf>) -> Self {
        self.login.password = Some(Secret::File { option: "password_file", path: file.into() });
        self
    }

    /// The user to log in as at the sentinels; none by default. Without sentinels it does nothing.
    #[must_use]
    pub fn sentinel_login(mut self, username: Option<&str>, password: impl Into<String>) -> Self {
        if let Topology::Sentinel { login, .. } = &mut self.topology {
            let password = Some(Secret::Given(password.into()));
            *login = Login { username: Hidden(username.map(str::to_owned)), password };
        }
        self
    }

    /// Whether to use TLS, with the sentinels too. It needs the feature `tls` of this crate.
    #[must_use]
    pub fn tls(mut self, tls: bool) -> Self {
        self.tls = tls;
        self
    }

    /// The file with the certificates, in PEM, of the authorities to trust with TLS; the public ones otherwise.
    #[must_use]
    pub fn ca(mut self, file: impl Into<PathBuf>) -> Self {
        self.ca.0 = Some(file.into());
        self
    }

    /// The files, in PEM, with the certificate (and its chain) that proves who this client is, and its key. They are
    /// read at each connect.
    #[must_use]
    pub fn identity(mut self, certificate: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        self.identity.0 = Some((certificate.into(), key.into()));
        self
    }

    /// What every key begins with; `lockkit:` by default. Empty shares the keys with clients that are not lockkit.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The bound on one operation; 2 s by default, 5 minutes at most. A request for a lease never waits longer than a quarter
    /// of its ttl.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How many replicas must have acknowledged each grant and renewal (`WAIT`); none by default.
    ///
    /// A grant that too few acknowledge within [`replica_timeout`](Self::replica_timeout) is released, and is an error.
    #[must_use]
    pub fn replicas(mut self, replicas: u32) -> Self {
        self.replicas = replicas;
        self
    }

    /// How long the replicas may take to acknowledge; 1 s by default, 5 minutes at most. It comes on top of the bound on an operation.
    #[must_use]
    pub fn replica_timeout(mut self, timeout: Duration) -> Self {
        self.replica_timeout = timeout;
        self
    }

    /// The longest ttl of any client of these servers; 5 minutes by default, 1 minute with sentinels and on a cluster.
    ///
    /// All clients must agree on it: for so long after a failover nothing is granted, so that the leases that the former
    /// server granted have lapsed.
    #[must_use]
    pub fn max_ttl(mut self, ttl: Duration) -> Self {
        self.max_ttl = ttl;
        self
    }

    /// Whether a server that took over grants nothing until the leases of its predecessor must have lapsed; on by
    /// default. It concerns sentinels and clusters only.
    ///
    /// Off, a lock whose lease was not replicated can be granted to a second holder right after a failover.
    #[must_use]
    pub fn failover_pause(mut self, on: bool) -> Self {
        self.failover_pause = on;
        self
    }

    /// The clock that leases are measured by, for tests.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// Asks the server about itself on every new connection, and uses the connection only if `vet` has no objection. An
    /// objection is the error of whatever operation wanted the connection.
    #[must_use]
    pub fn vet(mut self, vet: impl Fn(&ServerFacts) -> Result<()> + Send + Sync + 'static) -> Self {
        self.vet = Some(Vet(Arc::new(vet)));
        self
    }

    /// Whether it names exactly one server, which nothing takes the place of.
    #[must_use]
    pub fn is_single(&self) -> bool {
        matches!(self.topology, Topology::Single)
    }

    /// What the store is called in messages: no secrets.
    pub(crate) fn display_name(&self) -> String {
        let list = |all: &[Address]| all.iter().map(address::text).collect::<Vec<_>>().join(",");
        let name = match &self.topology {
            Topology::Single => format!("redis {}", address::text(&(self.host.clone(), self.port))),
            Topology::Sentinel { sentinels, primary, .. } => format!("redis {primary} of {}", list(sentinels)),
            Topology::Cluster { seeds } => format!("redis cluster {}", list(seeds)),
        };
        match self.database {
            0 => name,
            database => format!("{name}/{database}"),
        }
    }

    /// For how long a server that took over grants nothing.
    pub(crate) fn pause(&self) -> Duration {
        if self.failover_pause { self.max_ttl + drift(self.max_ttl) } else { Duration::ZERO }
    }

    /// Checks what the types leave open.
    pub(crate) fn check(&self) -> Result<Names> {
        let is_named = |all: &[Address]| !all.is_empty() && all.iter().all(|(host, _)| !host.is_empty());
        let problem = match &self.topology {
            Topology::Single if self.host.is_empty() => Some("no host"),
            Topology::Sentinel { sentinels, .. } if !is_named(sentinels) => Some("no host of a sentinel"),
            Topology::Sentinel { primary, .. } if primary.is_empty() => {
                Some("the sentinels need the name of the primary: redis+sentinel://host,host,host/name")
            }
            Topology::Sentinel { login, .. } if login.username.is_some() && login.password.is_none() => {
                Some("a user of the sentinels needs a password")
            }
            Topology::Cluster { seeds } if !is_named(seeds) => Some("no host"),
            Topology::Cluster { .. } if self.database != 0 => Some("a cluster has only the database 0"),
            _ if self.timeout.is_zero() => Some("the timeout must not be zero"),
            _ if self.replica_timeout.is_zero() => Some("the timeout of replicas must not be zero"),
            _ if self.timeout.max(self.replica_timeout) > Self::LONGEST_TTL => {
                Some("no timeout can be above 5 minutes, the longest ttl")
            }
            _ if self.login.username.is_some() && self.login.password.is_none() => Some("a user needs a password"),
            _ if self.ca.is_some() && !self.tls => Some("the option ca is of use only with TLS: rediss://"),
            _ if self.identity.is_some() && !self.tls => {
                Some("the options cert and key are of use only with TLS: rediss://")
            }
            _ if self.tls && !cfg!(feature = "tls") => {
                Some("TLS needs the feature \"tls\" of lockkit or lockkit-redis")
            }
            _ if self.max_ttl > Self::LONGEST_TTL => Some("the longest ttl can't be above 5 minutes"),
            _ if self.max_ttl < StoreInfo::SHORTEST_TTL => Some("the longest ttl can't be below 100 ms"),
            _ => None,
        };
        match problem {
            Some(problem) => Err(Error::invalid(problem)),
            None => Names::new(&self.prefix),
        }
    }
}

impl FromStr for RedisConfig {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        Self::from_url(url)
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::ErrorKind;

    use super::*;

    /// They are added to each other, and to the present moment.
    #[test]
    fn timeouts_without_end_are_refused() {
        let config = RedisConfig::sentinel([("h", 1)], "p");
        assert!(config.check().is_ok());
        for config in [config.clone().timeout(Duration::MAX), config.replica_timeout(Duration::MAX)] {
            let error = crate::RedisStore::new(config).expect_err("for ever");
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
    }
}
