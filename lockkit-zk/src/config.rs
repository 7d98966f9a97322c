//! Where the servers are and how to talk to them.

use std::{path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use lockkit_core::{
    Clock, Error, Result, SystemClock,
    url_options::{self, Hidden, Parts, address, duration, percent_decode},
};
use zookeeper_client::Acls;

use crate::wire::name::Names;

/// The options that a URL may carry after `?`.
const OPTIONS: [&str; 7] = ["base", "session", "timeout", "auth", "ca", "cert", "key"];

/// How to reach a ZooKeeper ensemble.
///
/// ```
/// use std::time::Duration;
/// use lockkit_zk::ZkConfig;
///
/// let config: ZkConfig = "zk://zk1:2181,zk2:2181/app?session=10s&auth=digest:shop:secret".parse()?;
/// let same = ZkConfig::new(["zk1:2181", "zk2:2181"])
///     .chroot("/app")
///     .session(Duration::from_secs(10))
///     .digest_auth("shop", "secret");
/// assert_eq!(format!("{config:?}"), format!("{same:?}"));
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), lockkit_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ZkConfig {
    servers: Vec<String>,
    chroot: String,
    base: String,
    pub(crate) session: Duration,
    pub(crate) timeout: Duration,
    pub(crate) auth: Hidden<(String, Vec<u8>)>,
    pub(crate) tls: Hidden<Tls>,
    pub(crate) clock: Arc<dyn Clock>,
}

/// The files for TLS, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    pub(crate) ca: PathBuf,
    pub(crate) identity: Option<(PathBuf, PathBuf)>,
}

impl ZkConfig {
    /// The default port.
    pub const PORT: u16 = 2181;
    /// The default node that has the locks as its children.
    pub const BASE: &str = "/lockkit";
    /// A longer timeout is as good as this one. To all times that are made of it the clock goes.
    const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
    /// The session timeout that is asked for by default. The servers have the last word.
    pub const SESSION: Duration = Duration::from_secs(20);
    /// The default bound on one operation.
    pub const TIMEOUT: Duration = Duration::from_secs(2);

    /// Servers as `host` or `host:port`, with all else at its default.
    #[must_use]
    pub fn new<S: Into<String>>(servers: impl IntoIterator<Item = S>) -> Self {
        Self {
            servers: servers.into_iter().map(Into::into).collect(),
            chroot: String::new(),
            base: Self::BASE.to_owned(),
            session: Self::SESSION,
            timeout: Self::TIMEOUT,
            auth: Hidden(None),
            tls: Hidden(None),
            clock: Arc::new(SystemClock),
        }
    }

    /// Reads `zk://host[:port][,host[:port]]…[/chroot][?base=/lockkit&session=20s&timeout=2s&auth=digest:user:password]`.
    ///
    /// `zks` is the same over TLS and takes `ca=`, `cert=` and `key=`, each the path of a PEM file. Options are
    /// percent-decoded, the chroot too.
    ///
    /// # Errors
    /// [`InvalidInput`](lockkit_core::ErrorKind::InvalidInput) says what is wrong. It never repeats the URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let parts = Parts::of(url)?;
        let tls = match parts.scheme.as_str() {
            "zk" => false,
            "zks" => true,
            _ => return Err(Error::invalid("the scheme is zk or zks")),
        };
        if parts.login.is_some() {
            return Err(Error::invalid("credentials go into the option auth=digest:user:password"));
        }
        let mut config = Self::new(parts.hosts.split(',').filter(|server| !server.is_empty()));
        if !parts.path.is_empty() {
            config.chroot = format!("/{}", percent_decode(parts.path)?);
        }
        config.tls.0 = tls.then(Tls::default);
        config.read_options(parts.options)?;
        config.check()?;
        Ok(config)
    }

    fn read_options(&mut self, options: &str) -> Result<()> {
        let (mut cert, mut key) = (None, None);
        for (option, value) in url_options::options(options, &OPTIONS)? {
            match (option, &mut self.tls.0) {
                ("base", _) => self.base = value,
                ("session", _) => self.session = duration(option, &value)?,
                ("timeout", _) => self.timeout = duration(option, &value)?.min(Self::LONGEST_TIMEOUT),
                ("auth", _) => {
                    let (scheme, credentials) =
                        value.split_once(':').filter(|(scheme, _)| !scheme.is_empty()).ok_or_else(|| {
                            Error::invalid("auth is written scheme:credentials, such as digest:user:password")
                        })?;
                    self.auth.0 = Some((scheme.to_owned(), credentials.as_bytes().to_vec()));
                }
                ("ca", Some(tls)) => tls.ca = PathBuf::from(value),
                ("cert", Some(_)) => cert = Some(PathBuf::from(value)),
                ("key", Some(_)) => key = Some(PathBuf::from(value)),
                _ => return Err(Error::invalid("ca, cert and key belong to the scheme zks")),
            }
        }
        match (cert, key, &mut self.tls.0) {
            (Some(cert), Some(key), Some(tls)) => tls.identity = Some((cert, key)),
            (None, None, _) => {}
            _ => return Err(Error::invalid("cert and key go together")),
        }
        Ok(())
    }

    /// A path in front of everything, as in ZooKeeper's own connect strings. A store creates it if it does not exist; a
    /// [`ZkResource`](crate::fenced::ZkResource) does not.
    #[must_use]
    pub fn chroot(mut self, chroot: impl Into<String>) -> Self {
        self.chroot = chroot.into();
        self
    }

    /// The node that has the locks as its children; `/lockkit` by default. Curator meets lockkit's lock `x` at
    /// `<base>/x`.
    #[must_use]
    pub fn base(mut self, base: impl Into<String>) -> Self {
        self.base = base.into();
        self
    }

    /// The session timeout to ask for; 20 s by default. It is how long the locks of a client that is gone stay held.
    #[must_use]
    pub fn session(mut self, session: Duration) -> Self {
        self.session = session;
        self
    }

    /// The bound on one operation; 2 s by default. A request for a lease never waits longer than a quarter of its ttl.
    /// One longer than a day is as good as a day.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout.min(Self::LONGEST_TIMEOUT);
        self
    }

    /// Who to log in as, by user and password. The nodes are then made for their creator alone: every client of these
    /// locks has to log in alike. The password is never shown.
    #[must_use]
    pub fn digest_auth(mut self, user: &str, password: &str) -> Self {
        self.auth.0 = Some(("digest".to_owned(), format!("{user}:{password}").into_bytes()));
        self
    }

    /// Uses TLS and trusts what this PEM file trusts. It needs the feature `tls` of this crate.
    #[must_use]
    pub fn tls(mut self, ca: impl Into<PathBuf>) -> Self {
        self.tls.0.get_or_insert_default().ca = ca.into();
        self
    }

    /// The PEM files of the client's own certificate and key, if the servers ask for them. Only with [`tls`](Self::tls).
    ///
    /// The nodes are then made for the subject of the certificate alone: every client of these locks has to have the same
    /// one, or to log in alike [by password](Self::digest_auth) too.
    #[must_use]
    pub fn tls_identity(mut self, cert: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        self.tls.0.get_or_insert_default().identity = Some((cert.into(), key.into()));
        self
    }

    /// The clock that leases are measured by, for tests.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The chroot as paths begin with it: without a slash at its end, so empty if there is none.
    pub(crate) fn prefix(&self) -> &str {
        self.chroot.trim_end_matches('/')
    }

    /// The servers with their ports.
    pub(crate) fn addresses(&self) -> Vec<String> {
        let with_port = |server: &String| match server.rsplit_once(':') {
            Some((_, port)) if port.parse::<u16>().is_ok() => server.clone(),
            _ => format!("{server}:{}", Self::PORT),
        };
        self.servers.iter().map(with_port).collect()
    }

    /// The access control list of new nodes. A client that has logged in, by a password or by a certificate, makes them for its
    /// user alone.
    pub(crate) fn acls(&self) -> Acls<'static> {
        let has_identity = self.auth.is_some() || self.tls.as_ref().is_some_and(|tls| tls.identity.is_some());
        if has_identity { Acls::creator_all() } else { Acls::anyone_all() }
    }

    /// What the store is called in messages: no secrets.
    pub(crate) fn display_name(&self) -> String {
        format!("zookeeper {}{}", self.servers.join(","), self.chroot)
    }

    /// Checks what the types leave open.
    pub(crate) fn check(&self) -> Result<Names> {
        if self.servers.is_empty() {
            return Err(Error::invalid("the URL names no server"));
        }
        for server in &self.servers {
            address(server, Self::PORT)?;
        }
        for (what, path) in [("chroot", &self.chroot), ("base", &self.base)] {
            if !is_path(path) {
                return Err(Error::invalid(format!("the {what} is an absolute path like /a/b")));
            }
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid("the timeout must not be zero"));
        }
        if self.session < Duration::from_millis(100) || self.session > Duration::from_secs(24 * 3600) {
            return Err(Error::invalid("the session timeout lies between 100ms and a day"));
        }
        match &*self.tls {
            Some(_) if !cfg!(feature = "tls") => {
                return Err(Error::invalid("TLS needs the feature \"tls\" of lockkit or lockkit-zk"));
            }
            Some(tls) if tls.ca.as_os_str().is_empty() => {
                return Err(Error::invalid("TLS needs ca=, the PEM file to trust"));
            }
            _ => {}
        }
        Ok(Names::new(&format!("{}{}", self.prefix(), self.base)))
    }
}

impl FromStr for ZkConfig {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        Self::from_url(url)
    }
}

/// Whether a path is one that ZooKeeper takes, or empty.
fn is_path(path: &str) -> bool {
    let node = |node: &str| !matches!(node, "" | "." | "..") && !node.contains(char::is_control);
    matches!(path, "" | "/") || path.strip_prefix('/').is_some_and(|nodes| nodes.split('/').all(node))
}

#[cfg(test)]
mod tests {
    use lockkit_core::ErrorKind;

    use super::*;

    #[test]
    fn a_url_says_it_all() {
        let url = "zk://zk1,zk2:2182,[::1]:2183/app%2Fx/y?base=/&session=5s&timeout=250ms&auth=digest:me:p%26:w";
        let config = ZkConfig::from_url(url).expect("url");
        assert_eq!(config.addresses(), ["zk1:2181", "zk2:2182", "[::1]:2183"]);
        assert_eq!(config.check().expect("fine").root(), "/app/x/y");
        assert_eq!((config.session, config.timeout), (Duration::from_secs(5), Duration::from_millis(250)));
        assert_eq!(config.auth.0, Some(("digest".to_owned(), b"me:p&:w".to_vec())));
        assert_eq!(config.display_name(), "zookeeper zk1,zk2:2182,[::1]:2183/app/x/y");
        let config = ZkConfig::from_url("zk://h").expect("url");
        assert_eq!((config.session, config.timeout), (Duration::from_secs(20), Duration::from_secs(2)));
        assert_eq!(config.check().expect("fine").root(), "/lockkit");
        assert_eq!(ZkConfig::from_url("zk://[::1]").expect("url").addresses(), ["[::1]:2181"]);
    }

    #[test]
    fn a_wrong_url_is_explained_without_its_password() {
        for (url, hint) in [
            ("h:2181", "zk://"),
            ("http://h", "scheme"),
            ("zk:///app", "no server"),
            ("zk://me:hunter2@h", "auth=digest"),
            ("zk://h:99999?auth=digest:me:hunter2", "port"),
            ("zk://h h?auth=digest:me:hunter2", "host:port"),
            ("zk://h?auth=hunter2", "digest:user:password"),
            ("zk://h?auth=digest:me:hunter2&retry=1", "base, session, timeout"),
            ("zk://h?auth=digest:me:hunter2&base=a", "absolute path"),
            ("zk://h?auth=digest:me:hunter2&base=/a//b", "absolute path"),
            ("zk://h/a/../b?auth=digest:me:hunter2", "absolute path"),
            ("zk://h?auth=digest:me:hunter2&base=/a&base=/b", "twice"),
            ("zk://h?auth=digest:me:hunter2&session=0s", "250ms"),
            ("zk://h?auth=digest:me:hunter2&session=9999999m", "a day"),
            ("zk://h?auth=digest:me:hunter2&timeout=2", "250ms"),
            ("zk://h?auth=digest:me:hunter2&ca=/x", "zks"),
            ("zk://h/%zz?auth=digest:me:hunter2", "percent"),
        ] {
            let error = ZkConfig::from_url(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
            assert!(error.message().contains(hint), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn tls_is_a_feature() {
        let outcome = ZkConfig::from_url("zks://h?ca=/ca.pem&cert=/c.pem&key=/k.pem");
        if cfg!(feature = "tls") {
            let tls = outcome.expect("url").tls.0.expect("tls");
            assert_eq!(tls.identity, Some(("/c.pem".into(), "/k.pem".into())));
            assert!(ZkConfig::from_url("zks://h").expect_err("no ca").message().contains("ca="));
        } else {
            assert!(outcome.expect_err("no feature").message().contains("feature \"tls\""));
        }
    }
}
