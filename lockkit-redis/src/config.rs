//! Where the server is and how to talk to it.

use std::{fmt, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use lockkit_core::{
    Clock, Error, ErrorKind, Result, SystemClock,
    url_options::{self, duration, percent_decode},
};
use url::{Host, Url};

use crate::{
    name::Names,
    server::{ServerFacts, Vet},
};

/// The options that a URL may carry after `?`.
const OPTIONS: &str = "prefix, timeout, ca";

/// How to reach one Redis or Valkey server.
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
#[derive(Clone)]
pub struct RedisConfig {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) database: u32,
    pub(crate) username: Option<String>,
    pub(crate) password: Option<String>,
    pub(crate) tls: bool,
    pub(crate) ca: Option<PathBuf>,
    pub(crate) prefix: String,
    pub(crate) timeout: Duration,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) vet: Option<Vet>,
}

impl RedisConfig {
    /// The default port.
    pub const PORT: u16 = 6379;
    /// The default bound on one operation.
    pub const TIMEOUT: Duration = Duration::from_secs(2);
    /// The default key prefix.
    pub const PREFIX: &str = "lockkit:";

    /// A server, with all else at its default.
    #[must_use]
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self {
            host: host.into(),
            port,
            database: 0,
            username: None,
            password: None,
            tls: false,
            ca: None,
            prefix: Self::PREFIX.to_owned(),
            timeout: Self::TIMEOUT,
            clock: Arc::new(SystemClock),
            vet: None,
        }
    }

    /// Reads `redis://[user[:password]@]host[:port][/database][?prefix=lockkit:&timeout=2s&ca=file]`.
    ///
    /// The scheme is `redis` or `valkey`; `rediss` or `valkeys` for TLS. User and password are percent-decoded.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] says what is wrong. It never repeats the URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let url = Url::parse(url).map_err(|e| invalid(format!("not a URL: {e}")))?;
        let tls = match url.scheme() {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" => true,
            other => return Err(invalid(format!("the scheme is redis, rediss, valkey or valkeys, not {other:?}"))),
        };
        let host = match url.host() {
            Some(Host::Domain(name)) if !name.is_empty() => percent_decode(name)?,
            Some(Host::Ipv4(address)) => address.to_string(),
            Some(Host::Ipv6(address)) => address.to_string(),
            _ => return Err(invalid("the URL names no host")),
        };
        let mut config = Self::new(host, url.port().unwrap_or(Self::PORT)).tls(tls);
        config.username = Some(percent_decode(url.username())?).filter(|name| !name.is_empty());
        config.password = url.password().map(percent_decode).transpose()?;
        config.database = match url.path().trim_start_matches('/') {
            "" => 0,
            number => number.parse().map_err(|_| invalid("the path of the URL is the number of a database"))?,
        };
        config.read_options(&url)?;
        config.check()?;
        Ok(config)
    }

    fn read_options(&mut self, url: &Url) -> Result<()> {
        for (option, value) in url_options::unique(url.query_pairs())? {
            match &*option {
                "prefix" => self.prefix = value.into_owned(),
                "timeout" => self.timeout = duration(&value)?,
                "ca" => self.ca = Some(PathBuf::from(&*value)),
                _ => return Err(url_options::unknown(&option, OPTIONS)),
            }
        }
        Ok(())
    }

    /// Which of the server's databases to use; 0 by default.
    #[must_use]
    pub fn database(mut self, database: u32) -> Self {
        self.database = database;
        self
    }

    /// Who to log in as; Redis' `default` user otherwise.
    #[must_use]
    pub fn username(mut self, username: impl Into<String>) -> Self {
        self.username = Some(username.into());
        self
    }

    /// The password. It is never shown.
    #[must_use]
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Whether to use TLS. It needs the feature `tls` of this crate.
    #[must_use]
    pub fn tls(mut self, tls: bool) -> Self {
        self.tls = tls;
        self
    }

    /// The file with the certificates, in PEM, of the authorities to trust with TLS; the public ones otherwise.
    #[must_use]
    pub fn ca(mut self, file: impl Into<PathBuf>) -> Self {
        self.ca = Some(file.into());
        self
    }

    /// What every key begins with; `lockkit:` by default. Empty shares the keys with clients that are not lockkit.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// The bound on one operation; 2 s by default. A request for a lease never waits longer than a quarter of its ttl.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
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

    /// What the store is called in messages: no secrets.
    pub(crate) fn display_name(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        match self.database {
            0 => format!("redis {host}:{}", self.port),
            database => format!("redis {host}:{}/{database}", self.port),
        }
    }

    /// Checks what the types leave open.
    pub(crate) fn check(&self) -> Result<Names> {
        if self.host.is_empty() {
            return Err(invalid("no host"));
        }
        if self.timeout.is_zero() {
            return Err(invalid("the timeout must not be zero"));
        }
        if self.username.is_some() && self.password.is_none() {
            return Err(invalid("a user needs a password"));
        }
        if self.ca.is_some() && !self.tls {
            return Err(invalid("an authority is of use only with TLS: rediss://"));
        }
        if self.tls && !cfg!(feature = "tls") {
            return Err(invalid("TLS needs the feature \"tls\" of lockkit or lockkit-redis"));
        }
        Names::new(&self.prefix)
    }
}

impl FromStr for RedisConfig {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        Self::from_url(url)
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("host", &self.host)
            .field("port", &self.port)
            .field("database", &self.database)
            .field("username", &self.username)
            .field("password", &self.password.as_ref().map(|_| ".."))
            .field("tls", &self.tls)
            .field("ca", &self.ca)
            .field("prefix", &self.prefix)
            .field("timeout", &self.timeout)
            .field("clock", &self.clock)
            .field("vet", &self.vet)
            .finish()
    }
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_says_it_all() {
        let config =
            RedisConfig::from_url("valkey://a%40b:p%2Fw%25%3A@[::1]:7000/3?prefix=&timeout=250ms").expect("url");
        assert_eq!((config.host.as_str(), config.port, config.database), ("::1", 7000, 3));
        assert_eq!((config.username.as_deref(), config.password.as_deref()), (Some("a@b"), Some("p/w%:")));
        assert_eq!((config.prefix.as_str(), config.timeout), ("", Duration::from_millis(250)));
        assert_eq!(config.display_name(), "redis [::1]:7000/3");
        let config = RedisConfig::from_url("redis://:pw@h").expect("url");
        assert_eq!((config.host.as_str(), config.port, config.database, config.tls), ("h", 6379, 0, false));
        assert_eq!((config.username, config.password.as_deref()), (None, Some("pw")));
        assert_eq!(config.prefix, "lockkit:");
    }

    #[test]
    fn a_wrong_url_is_explained_without_its_password() {
        for (url, hint) in [
            ("http://h", "scheme"),
            ("redis:///0", "no host"),
            ("redis://u:hunter2@h:99999", "not a URL"),
            ("redis://u:hunter2@h/x", "database"),
            ("redis://u:hunter2@h/0?retry=1", "prefix, timeout, ca"),
            ("redis://u:hunter2@h/0?ca=x", "rediss"),
            ("redis://u:hunter2@h?prefix=a&prefix=b", "twice"),
            ("redis://u:hunter2@h?prefix={a}", "braces"),
            ("redis://u:hunter2@h?timeout=0s", "250ms"),
            ("redis://u:hunter2@h?timeout=2", "250ms"),
            ("redis://u:hunter2@h?timeout=99999999999999999999s", "250ms"),
            ("redis://u:hunter2%zz@h", "percent"),
            ("redis://u@h", "password"),
        ] {
            let error = RedisConfig::from_url(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
            assert!(error.message().contains(hint), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn tls_is_a_feature() {
        let outcome = RedisConfig::from_url("rediss://h");
        if cfg!(feature = "tls") {
            assert!(outcome.expect("url").tls);
        } else {
            assert!(outcome.expect_err("no feature").message().contains("feature \"tls\""));
        }
    }
}
