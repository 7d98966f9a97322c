//! Where the server is and how to talk to it.

use std::{path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use lockkit_core::{
    Clock, Error, ErrorKind, Result, SystemClock,
    url_options::{self, Hidden, Parts, address, boolean, duration, number, percent_decode},
};
use sqlx::{
    ConnectOptions,
    mysql::{MySqlConnectOptions, MySqlSslMode},
};

use crate::wire::name;

/// The options that a URL may carry after `?`.
const OPTIONS: [&str; 7] = ["ca", "connections", "create", "keep_rows", "table", "timeout", "tls"];

/// How to reach one MySQL or MariaDB server, and which table to keep the locks in.
///
/// ```
/// use std::time::Duration;
/// use lockkit_mysql::MySqlConfig;
///
/// let config: MySqlConfig = "mysql://app:secret@127.0.0.1:3306/shop?table=shop_lock&timeout=500ms".parse()?;
/// let same = MySqlConfig::new("127.0.0.1", 3306, "shop")
///     .username("app")
///     .password("secret")
///     .table("shop_lock")
///     .timeout(Duration::from_millis(500));
/// assert_eq!(format!("{config:?}"), format!("{same:?}"));
/// assert!(!format!("{config:?}").contains("secret"));
/// # Ok::<(), lockkit_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MySqlConfig {
    pub(crate) host: String,
    pub(crate) port: u16,
    pub(crate) database: String,
    /// A password may have been given in its place.
    pub(crate) username: Hidden<String>,
    pub(crate) password: Hidden<String>,
    pub(crate) table: String,
    pub(crate) create: bool,
    pub(crate) keep_rows: bool,
    pub(crate) timeout: Duration,
    pub(crate) connections: u32,
    pub(crate) tls: Tls,
    pub(crate) ca: Hidden<PathBuf>,
    pub(crate) clock: Arc<dyn Clock>,
}

/// Whether to encrypt the connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tls {
    /// No.
    #[default]
    Off,
    /// Yes, but the server's identity is not checked: an attacker who can redirect the connection can read everything.
    Encrypt,
    /// Yes, and the server must present a certificate for its host name from a trusted authority.
    Verify,
}

impl MySqlConfig {
    /// The default port.
    pub const PORT: u16 = 3306;
    /// The default table.
    pub const TABLE: &str = "resource_lock";
    /// The default bound on one operation.
    pub const TIMEOUT: Duration = Duration::from_secs(2);
    /// A longer timeout is as good as this one. To all times that are made of it the clock goes.
    pub(crate) const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
    /// How many connections a store opens at most by default. One in eight, and at least one, is kept for renewals and
    /// releases.
    pub const CONNECTIONS: u32 = 16;

    /// A database on a server, with all else at its default.
    #[must_use]
    pub fn new(host: impl Into<String>, port: u16, database: impl Into<String>) -> Self {
        Self {
            host: host.into(),
            port,
            database: database.into(),
            username: Hidden(None),
            password: Hidden(None),
            table: Self::TABLE.to_owned(),
            create: false,
            keep_rows: false,
            timeout: Self::TIMEOUT,
            connections: Self::CONNECTIONS,
            tls: Tls::Off,
            ca: Hidden(None),
            clock: Arc::new(SystemClock),
        }
    }

    /// Reads `mysql://[user[:password]@]host[:port]/database[?option=value&…]`.
    ///
    /// The scheme is `mysql` or `mariadb`. User, password and database are percent-decoded. The options are those of the
    /// methods of the same names: `table=resource_lock`, `timeout=2s`, `connections=16`, `create=true`, `keep_rows=true`,
    /// `tls=off|encrypt|verify`, `ca=/path/to/authority.pem`.
    ///
    /// # Errors
    /// [`InvalidInput`](lockkit_core::ErrorKind::InvalidInput) says what is wrong; `Misconfigured` that the file of
    /// `ca` can't be read. Nothing of the URL is repeated that could be a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let parts = Parts::of(url)?;
        if !matches!(parts.scheme.as_str(), "mysql" | "mariadb") {
            return Err(Error::invalid("the scheme is mysql or mariadb"));
        }
        let (host, port) = address(parts.hosts, Self::PORT)?;
        let mut config = Self::new(host, port, percent_decode(parts.path.trim_start_matches('/'))?);
        (config.username.0, config.password.0) = parts.user_and_password()?;
        config.read_options(parts.options)?;
        config.check()?;
        Ok(config)
    }

    fn read_options(&mut self, text: &str) -> Result<()> {
        for (option, value) in url_options::options(text, &OPTIONS)? {
            match option {
                "table" => self.table = value,
                "timeout" => self.timeout = duration(option, &value)?,
                "connections" => self.connections = number(option, &value)?,
                "create" => self.create = boolean(option, &value)?,
                "keep_rows" => self.keep_rows = boolean(option, &value)?,
                "tls" => self.tls = tls(&value)?,
                _ => self.ca.0 = Some(PathBuf::from(value)),
            }
        }
        Ok(())
    }

    /// The user to log in as; `root` by default.
    #[must_use]
    pub fn username(mut self, username: impl Into<String>) -> Self {
        self.username.0 = Some(username.into());
        self
    }

    /// The password. It is never shown.
    #[must_use]
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password.0 = Some(password.into());
        self
    }

    /// The table of the locks; `resource_lock` by default. Stores that use the same table see the same locks.
    #[must_use]
    pub fn table(mut self, table: impl Into<String>) -> Self {
        self.table = table.into();
        self
    }

    /// Whether connecting makes the table if it is missing; by default that is an error. It never changes a table that
    /// is there.
    #[must_use]
    pub fn create(mut self, create: bool) -> Self {
        self.create = create;
        self
    }

    /// Whether the row of a lock stays for ever. By default a row that leases have used goes when none has used it for a
    /// week. Rows go a few at a time, in the background, as the store makes rows for other names. That needs the right to
    /// `DELETE`: without it they stay as well.
    #[must_use]
    pub fn keep_rows(mut self, keep: bool) -> Self {
        self.keep_rows = keep;
        self
    }

    /// The bound on one operation; 2 s by default, and a day at most. A request for a lease never waits longer than a quarter of its ttl.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How many connections to open at most; at least 2, and 16 by default. They are opened when they are needed.
    #[must_use]
    pub fn connections(mut self, connections: u32) -> Self {
        self.connections = connections;
        self
    }

    /// Whether to encrypt the connections; not by default. It needs the feature `tls` of this crate.
    ///
    /// Without it a password is still not sent in the clear: the servers take part of a hash, or encrypt it by a key of
    /// their own.
    #[must_use]
    pub fn tls(mut self, tls: Tls) -> Self {
        self.tls = tls;
        self
    }

    /// A PEM file with the certificates of trusted authorities, for [`Tls::Verify`]; the public web authorities by default.
    #[must_use]
    pub fn ca(mut self, file: impl Into<PathBuf>) -> Self {
        self.ca.0 = Some(file.into());
        self
    }

    /// The clock that leases are measured by, for tests.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The store's name in messages, without secrets.
    pub(crate) fn display_name(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        format!("mysql {host}:{}/{}", self.port, self.database)
    }

    /// The driver's options. The driver sets nothing on a new connection: the pool sets everything in one round trip.
    pub(crate) fn driver_options(&self) -> MySqlConnectOptions {
        let mode = match self.tls {
            Tls::Off => MySqlSslMode::Disabled,
            Tls::Encrypt => MySqlSslMode::Required,
            Tls::Verify => MySqlSslMode::VerifyIdentity,
        };
        let mut options = MySqlConnectOptions::new()
            .host(&self.host)
            .port(self.port)
            .database(&self.database)
            .username(self.username.as_deref().unwrap_or("root"))
            .ssl_mode(mode)
            .pipes_as_concat(false)
            .no_engine_substitution(false)
            .timezone(None)
            .set_names(false)
            .disable_statement_logging();
        if let Some(password) = &*self.password {
            options = options.password(password);
        }
        if let Some(ca) = &*self.ca {
            options = options.ssl_ca(ca);
        }
        options
    }

    /// Checks what the types leave open, and gives the table's name as statements spell it.
    pub(crate) fn check(&self) -> Result<String> {
        if self.host.is_empty() {
            return Err(Error::invalid("no host"));
        }
        if self.database.is_empty() {
            return Err(Error::invalid("no database; it is the path of the URL"));
        }
        if self.timeout.is_zero() {
            return Err(Error::invalid("the timeout must not be zero"));
        }
        if let Some(file) = &*self.ca {
            // The driver reads the file when it connects, and its error would not name it.
            let unreadable = |e| {
                Error::new(ErrorKind::Misconfigured, format!("the file that ca names can't be read: {e}"))
                    .with_source(e)
            };
            drop(std::fs::File::open(file).map_err(unreadable)?);
        }
        if self.connections < 2 {
            return Err(Error::invalid("`connections` must be at least 2: one is kept for renewals and releases"));
        }
        if self.tls != Tls::Off && !cfg!(feature = "tls") {
            return Err(Error::invalid("TLS needs the feature \"tls\" of lockkit or lockkit-mysql"));
        }
        name::quoted_table(&self.table)
    }
}

impl FromStr for MySqlConfig {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        Self::from_url(url)
    }
}

fn tls(text: &str) -> Result<Tls> {
    match text {
        "off" => Ok(Tls::Off),
        "encrypt" => Ok(Tls::Encrypt),
        "verify" => Ok(Tls::Verify),
        _ => Err(Error::invalid("tls is off, encrypt or verify")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_says_it_all() {
        let url = "mariadb://a%40b:p%2Fw%25%3A@[::1]:7000/my%20db?table=t1&timeout=250ms&connections=4&create=true&keep_rows=yes";
        let config = MySqlConfig::from_url(url).expect("url");
        assert_eq!((config.host.as_str(), config.port, config.database.as_str()), ("::1", 7000, "my db"));
        assert_eq!((config.username.as_deref(), config.password.as_deref()), (Some("a@b"), Some("p/w%:")));
        assert_eq!((config.table.as_str(), config.timeout), ("t1", Duration::from_millis(250)));
        assert_eq!((config.connections, config.create, config.keep_rows), (4, true, true));
        assert_eq!(config.display_name(), "mysql [::1]:7000/my db");
        let config = MySqlConfig::from_url("mysql://h/d").expect("url");
        assert_eq!((config.host.as_str(), config.port, config.tls), ("h", 3306, Tls::Off));
        assert_eq!((config.username.0, config.password.0), (None, None));
        assert_eq!((config.create, config.keep_rows), (false, false));
        assert_eq!(config.table, "resource_lock");
    }

    #[test]
    fn a_wrong_url_is_explained_without_its_password() {
        for (url, hint) in [
            ("http://h/d", "scheme"),
            ("mysql:///d", "no host"),
            ("mysql://u:hunter2@h", "no database"),
            ("mysql://u:hunter2@h:99999/d", "port"),
            ("mysql://u:hunter2@h/d?retry=1", "ca, connections, create, keep_rows, table, timeout, tls"),
            ("mysql://u:hunter2@h/d?table=a&table=b", "twice"),
            ("mysql://u:hunter2@h/d?table=a`b", "ASCII"),
            ("mysql://u:hunter2@h/d?timeout=0s", "250ms"),
            ("mysql://u:hunter2@h/d?timeout=2", "250ms"),
            ("mysql://u:hunter2@h/d?connections=1", "at least 2"),
            ("mysql://u:hunter2@h/d?create=1", "true or false"),
            ("mysql://u:hunter2@h/d?tls=on", "verify"),
            ("mysql://u:hunter2%zz@h/d", "percent"),
        ] {
            let error = MySqlConfig::from_url(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
            assert!(error.message().contains(hint), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{url}");
        }
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn tls_is_not_silently_left_out() {
        let error = MySqlConfig::from_url("mysql://h/d?tls=verify").expect_err("no TLS in this build");
        assert!(error.message().contains("feature"), "{error}");
    }
}
