//! Private Redis and Valkey servers.

use super::{
    Authority, Location, Probe, Process, Program, Result, ServerError, Service,
    redis_client::{Connection, Door},
};
use crate::faults::ServerClock;
use std::{ffi::OsString, io, ops::Deref, path::PathBuf};

/// Which server that speaks the Redis protocol to start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum RedisFlavor {
    /// The system's own `redis-server`, from `PATH`.
    #[default]
    Installed,
    /// A newer `redis-server`, see [`Program::Newer`].
    Newer,
    /// `valkey-server`, see [`Program::Newer`].
    Valkey,
    /// The server program at this path.
    At(PathBuf),
}

impl RedisFlavor {
    /// The program to look for.
    #[must_use]
    pub fn program(&self) -> Program {
        match self {
            Self::Installed => Program::Installed { command: "redis-server", package: "redis-server" },
            Self::Newer => Program::Newer { command: "redis-server" },
            Self::Valkey => Program::Newer { command: "valkey-server" },
            Self::At(path) => Program::At(path.clone()),
        }
    }
}

/// What a Redis server keeps on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Persistence {
    /// Nothing: it forgets everything when it is restarted.
    #[default]
    None,
    /// Each write, with the operating system before it is answered (`appendfsync no`): a server that was killed has all its
    /// data again, a machine that lost its power may not. It never waits for the disk, and lockkit does not call it durable.
    Append,
    /// Each write, on disk before it is answered (`appendfsync always`).
    AppendAlways,
}

/// How to start a [`RedisServer`].
///
/// The default is the system's `redis-server` without a password, without the debug command, and without persistence.
#[derive(Clone, Debug, Default)]
pub struct RedisOptions {
    flavor: RedisFlavor,
    persistence: Persistence,
    password: Option<String>,
    debug_command: bool,
    args: Vec<String>,
    clock: Option<ServerClock>,
    tls: Option<Tls>,
}

impl RedisOptions {
    /// Starts this server.
    #[must_use]
    pub fn flavor(mut self, flavor: RedisFlavor) -> Self {
        self.flavor = flavor;
        self
    }

    /// Keeps this much on disk.
    #[must_use]
    pub fn persistence(mut self, persistence: Persistence) -> Self {
        self.persistence = persistence;
        self
    }

    /// Demands this password (`requirepass`).
    #[must_use]
    pub fn password(mut self, password: impl Into<String>) -> Self {
        self.password = Some(password.into());
        self
    }

    /// Allows the `DEBUG` command, which Redis 7 and later refuse by default.
    #[must_use]
    pub fn debug_command(mut self) -> Self {
        self.debug_command = true;
        self
    }

    /// Runs the server on this wall clock.
    #[must_use]
    pub fn clock(mut self, clock: &ServerClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Serves over TLS alone, whoever the client is, and replicates so. The authority must have signed `server`, and its
    /// files must last as long as the server does.
    #[must_use]
    pub fn tls(mut self, authority: &Authority) -> Self {
        self.tls = Some(Tls::new(authority, false));
        self
    }

    /// The same, for clients only that have a certificate of the same authority.
    #[must_use]
    pub fn mutual_tls(mut self, authority: &Authority) -> Self {
        self.tls = Some(Tls::new(authority, true));
        self
    }

    /// Adds arguments to the command line, such as `["--maxmemory", "2mb"]`. They go last, and so win.
    #[must_use]
    pub fn args<A: Into<String>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// The server's program.
    pub(super) fn program(&self) -> Program {
        self.flavor.program()
    }

    pub(super) fn with_tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    fn door(&self) -> Door {
        Tls::door(self.tls.as_ref())
    }
}

/// How a server uses TLS.
#[derive(Clone, Debug)]
pub(super) struct Tls {
    certificate: PathBuf,
    key: PathBuf,
    ca: PathBuf,
    asks_clients: bool,
}

impl Tls {
    fn new(authority: &Authority, asks_clients: bool) -> Self {
        let [certificate, key, ca] = ["server.crt", "server.key", "ca.crt"].map(|name| authority.file(name));
        Self { certificate, key, ca, asks_clients }
    }

    /// Where an administrator, who has no certificates, gets in.
    pub(super) fn door(tls: Option<&Self>) -> Door {
        if tls.is_some() { Door::Socket } else { Door::Port }
    }

    /// The settings, of servers and sentinels alike, that leave no other way in without TLS.
    pub(super) fn settings(&self, location: &Location) -> [(&'static str, OsString); 9] {
        let yes_or_no = |yes| if yes { "yes" } else { "no" };
        [
            ("port", "0".into()),
            ("tls-port", location.port.to_string().into()),
            ("unixsocket", Door::socket(location).into()),
            ("tls-cert-file", self.certificate.clone().into()),
            ("tls-key-file", self.key.clone().into()),
            ("tls-ca-cert-file", self.ca.clone().into()),
            ("tls-auth-clients", yes_or_no(self.asks_clients).into()),
            ("tls-replication", "yes".into()),
            ("tls-cluster", "yes".into()),
        ]
    }
}

/// A private Redis server.
///
/// All that can be done to any server (kill, freeze, thaw, restart) is in [`Process`], which it dereferences to.
#[derive(Debug)]
pub struct RedisServer {
    process: Process,
    password: Option<String>,
    door: Door,
}

impl RedisServer {
    /// Starts a server and returns when it answers.
    ///
    /// # Errors
    ///
    /// If the program is not installed, or does not come up; the error has the end of its log.
    pub async fn start(options: RedisOptions) -> Result<Self> {
        let (password, door) = (options.password.clone(), options.door());
        let program = options.program().locate()?;
        let process = Process::start(Redis { program, options }).await?;
        Ok(Self { process, password, door })
    }

    /// Starts so many servers, one after the other, such as the nodes of a quorum.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub async fn start_many(count: usize, options: RedisOptions) -> Result<Vec<Self>> {
        let mut servers = Vec::with_capacity(count);
        while servers.len() < count {
            servers.push(Self::start(options.clone()).await?);
        }
        Ok(servers)
    }

    /// The URL to connect to, with the password if there is one. With TLS it takes the authority's file: `?ca=`.
    #[must_use]
    pub fn url(&self) -> String {
        let login = self.password.as_deref().map(|password| format!(":{}@", percent_encoded(password)));
        format!("{}://{}{}", self.scheme(), login.unwrap_or_default(), self.addr())
    }

    /// What its URL begins with, and those of its sentinels and its cluster.
    pub(super) fn scheme(&self) -> &'static str {
        match self.door {
            Door::Port => "redis",
            Door::Socket => "rediss",
        }
    }

    /// Runs a command, such as `["SET", "key", "value"]`, on a connection of its own.
    ///
    /// The reply is rendered as text: `(nil)` for nothing, an array as one line per element.
    ///
    /// # Errors
    ///
    /// If the server can't be reached, does not answer within some seconds, or answers with an error, which is then
    /// part of the text.
    pub async fn command(&self, words: &[&str]) -> Result<String> {
        let answer = async {
            let mut connection = Connection::open(self.location(), self.door, self.password.as_deref()).await?;
            connection.command(words).await
        };
        answer.await.map_err(|error| ServerError::io(words.first().unwrap_or(&"an empty command"), error))
    }
}

impl Deref for RedisServer {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

/// How a Redis server is started and asked.
#[derive(Clone, Debug)]
struct Redis {
    program: PathBuf,
    options: RedisOptions,
}

impl Service for Redis {
    fn name(&self) -> &str {
        "Redis"
    }

    fn prepare(&self, _: &Location) -> io::Result<()> {
        Ok(())
    }

    fn command(&self, location: &Location) -> Vec<OsString> {
        let options = &self.options;
        let mut command = options.clock.as_ref().map(ServerClock::prefix).unwrap_or_default();
        command.push(self.program.clone().into());
        let port = location.port.to_string();
        command.extend(["--bind", "127.0.0.1", "--port", &port, "--daemonize", "no", "--save", ""].map(Into::into));
        for (name, value) in options.tls.iter().flat_map(|tls| tls.settings(location)) {
            command.extend([format!("--{name}").into(), value]);
        }
        command.extend(["--dir".into(), location.data.clone().into()]);
        match options.persistence {
            Persistence::None => command.extend(["--appendonly", "no"].map(Into::into)),
            Persistence::Append => command.extend(["--appendonly", "yes", "--appendfsync", "no"].map(Into::into)),
            Persistence::AppendAlways => {
                command.extend(["--appendonly", "yes", "--appendfsync", "always"].map(Into::into));
            }
        }
        if let Some(password) = &options.password {
            command.extend(["--requirepass", password].map(Into::into));
        }
        if options.debug_command {
            command.extend(["--enable-debug-command", "local"].map(Into::into));
        }
        command.extend(options.args.iter().map(Into::into));
        command
    }

    fn probe<'a>(&'a self, location: &'a Location, pid: u32) -> Probe<'a> {
        let process_id = async {
            let mut connection =
                Connection::open(location, self.options.door(), self.options.password.as_deref()).await?;
            // A server that is still loading its data refuses PING but not INFO, so it takes both.
            connection.command(&["PING"]).await?;
            connection.command(&["INFO", "server"]).await
        };
        Box::pin(async move {
            match process_id.await {
                Ok(info) if info.lines().any(|line| line == format!("process_id:{pid}")) => Ok(()),
                Ok(_) => Err(io::Error::other("another server answers on its port")),
                // Users and passwords that came with `args` are for the test to know. The server is up.
                Err(error) if is_access_denied(&error.to_string()) => Ok(()),
                Err(error) => Err(error),
            }
        })
    }
}

fn is_access_denied(reply: &str) -> bool {
    ["NOAUTH", "NOPERM", "WRONGPASS"].iter().any(|code| reply.starts_with(code))
}

/// Spells a password so that it can stand in a URL.
fn percent_encoded(text: &str) -> String {
    text.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn another_server_on_the_port_is_not_taken_for_ours() -> Result<()> {
        let server = RedisServer::start(RedisOptions::default()).await?;
        let service = Redis { program: PathBuf::new(), options: RedisOptions::default() };
        let location = Location::new(PathBuf::new(), server.port());
        let pid = server.pid().expect("it runs");
        assert!(service.probe(&location, pid).await.is_ok());
        let error = service.probe(&location, pid + 1).await.expect_err("another server");
        assert_eq!(error.to_string(), "another server answers on its port");
        Ok(())
    }

    #[tokio::test]
    async fn nobody_gets_in_without_tls_but_the_administrator() -> Result<()> {
        let authority = Authority::new()?;
        authority.sign("server")?;
        let server = RedisServer::start(RedisOptions::default().tls(&authority)).await?;
        assert_eq!(server.command(&["PING"]).await?, "PONG");
        assert!(server.url().starts_with("rediss://"), "{}", server.url());
        let mut plain = Connection::open(server.location(), Door::Port, None).await.expect("a port");
        assert!(plain.command(&["PING"]).await.is_err());
        Ok(())
    }

    #[test]
    fn a_password_survives_its_url() {
        assert_eq!(percent_encoded("s3cret-~"), "s3cret-~");
        assert_eq!(percent_encoded("p@ss/ü"), "p%40ss%2F%C3%BC");
    }
}
