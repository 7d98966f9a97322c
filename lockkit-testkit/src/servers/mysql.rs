//! Private MariaDB and MySQL servers.

use super::{Location, Probe, Process, Program, Result, ServerError, Service};
use crate::faults::ServerClock;
use sqlx::{
    AssertSqlSafe, Connection as _, MySqlConnection, Row as _,
    mysql::{MySqlConnectOptions, MySqlRow, MySqlSslMode},
};
use std::{
    env,
    ffi::OsString,
    fs, io,
    ops::Deref,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};
use tokio::time::timeout;

/// The user who may do everything, without a password.
const ADMIN: &str = "root";

/// How long a server may take to let its administrator in, or for one statement. A frozen one would take forever.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// The form of the prepared data directories. To be raised when they are made in another way.
const TEMPLATE: u32 = 1;

/// Which server that speaks the MySQL protocol to start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MySqlFlavor {
    /// The system's own `mariadbd`.
    #[default]
    Installed,
    /// `mysqld`, see [`Program::Newer`].
    Newer,
    /// The server program at this path.
    At(PathBuf),
}

impl MySqlFlavor {
    /// The program to look for.
    #[must_use]
    pub fn program(&self) -> Program {
        match self {
            Self::Installed => Program::Installed { command: "mariadbd", package: "mariadb-server" },
            Self::Newer => Program::Newer { command: "mysqld" },
            Self::At(path) => Program::At(path.clone()),
        }
    }
}

/// How to start a [`MySqlServer`].
///
/// The default is the system's `mariadbd`, as durable as it is by default, with an empty database.
#[derive(Clone, Debug, Default)]
pub struct MySqlOptions {
    flavor: MySqlFlavor,
    init: Vec<String>,
    args: Vec<String>,
    clock: Option<ServerClock>,
}

impl MySqlOptions {
    /// Starts this server.
    #[must_use]
    pub fn flavor(mut self, flavor: MySqlFlavor) -> Self {
        self.flavor = flavor;
        self
    }

    /// Runs a statement, of one line, in the database whenever the server starts, before it takes connections. So what
    /// it makes is there also after a restart without data.
    #[must_use]
    pub fn init(mut self, statement: impl Into<String>) -> Self {
        self.init.push(statement.into());
        self
    }

    /// Runs the server on this wall clock.
    #[must_use]
    pub fn clock(mut self, clock: &ServerClock) -> Self {
        self.clock = Some(clock.clone());
        self
    }

    /// Adds arguments to the command line, such as `["--read-only"]`. They go last, and so win.
    #[must_use]
    pub fn args<A: Into<String>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }
}

/// A private MariaDB or MySQL server with one database, [`DATABASE`](Self::DATABASE).
///
/// All that can be done to any server (kill, freeze, thaw, restart) is in [`Process`], which it dereferences to.
#[derive(Debug)]
pub struct MySqlServer {
    process: Process,
}

impl MySqlServer {
    /// The name of the database.
    pub const DATABASE: &str = "lockkit";

    /// Starts a server and returns when it answers.
    ///
    /// The first start of a version takes seconds, for its data directory is made then, and kept as a template in the
    /// user's cache directory.
    ///
    /// # Errors
    ///
    /// If the program is not installed, or does not come up; the error has the end of its log.
    pub async fn start(options: MySqlOptions) -> Result<Self> {
        let program = options.flavor.program().locate()?;
        let brand = Brand::of(&program)?;
        let process = Process::start(MySql { program, brand, options }).await?;
        Ok(Self { process })
    }

    /// The URL to connect to, as an administrator, without options.
    #[must_use]
    pub fn url(&self) -> String {
        format!("mysql://{ADMIN}@{}/{}", self.addr(), Self::DATABASE)
    }

    /// Runs one statement as an administrator, and returns its rows; NULL is `None`.
    ///
    /// # Errors
    ///
    /// If the server refuses or can't be reached.
    pub async fn admin(&self, statement: &str) -> Result<Vec<Vec<Option<String>>>> {
        let failed = |error| ServerError::io(format_args!("could not run {statement:?}"), error);
        let mut connection = Connection::open(self.location(), Some(Self::DATABASE)).await.map_err(failed)?;
        connection.query(statement).await.map_err(failed)
    }

    /// Cuts the connections of all clients, in the middle of whatever they do.
    ///
    /// # Errors
    ///
    /// If the server refuses or can't be reached.
    pub async fn cut_clients(&self) -> Result<()> {
        let failed = |error| ServerError::io("could not cut the clients", error);
        let mut connection = Connection::open(self.location(), None).await.map_err(failed)?;
        let own = connection.query("SELECT CONNECTION_ID()").await.map_err(failed)?.remove(0).remove(0);
        // Not from the table of processes, which MySQL refuses to read when a statement has binary arguments.
        for mut process in connection.query("SHOW PROCESSLIST").await.map_err(failed)? {
            let (id, host) = (process.remove(0), process.remove(1).unwrap_or_default());
            if let Some(client) = id.filter(|_| host.contains(':')).filter(|id| Some(id) != own.as_ref()) {
                // One that has just gone by itself is no reason to fail.
                drop(connection.query(&format!("KILL {client}")).await);
            }
        }
        Ok(())
    }
}

impl Deref for MySqlServer {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

/// What one statement gave: rows of text, `None` for NULL.
type Rows = Vec<Vec<Option<String>>>;

/// An administrator's connection. It sends no statement of its own, so that a test may count them.
struct Connection(MySqlConnection);

impl Connection {
    async fn open(location: &Location, database: Option<&str>) -> io::Result<Self> {
        let options = MySqlConnectOptions::new().host("127.0.0.1").port(location.port).username(ADMIN);
        let options = options.ssl_mode(MySqlSslMode::Disabled).timezone(None).set_names(false);
        let options = options.pipes_as_concat(false).no_engine_substitution(false);
        let options = database.into_iter().fold(options, MySqlConnectOptions::database);
        answered(MySqlConnection::connect_with(&options)).await.map(Self)
    }

    async fn query(&mut self, statement: &str) -> io::Result<Rows> {
        let rows = answered(sqlx::raw_sql(AssertSqlSafe(statement)).fetch_all(&mut self.0)).await?;
        rows.iter().map(row).collect::<sqlx::Result<_>>().map_err(io::Error::other)
    }
}

fn row(row: &MySqlRow) -> sqlx::Result<Vec<Option<String>>> {
    let text = |bytes: Option<&[u8]>| bytes.map(|bytes| String::from_utf8_lossy(bytes).into_owned());
    (0..row.len()).map(|column| row.try_get_unchecked(column).map(text)).collect()
}

async fn answered<T>(answer: impl Future<Output = sqlx::Result<T>>) -> io::Result<T> {
    timeout(ANSWER_WITHIN, answer).await?.map_err(io::Error::other)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Brand {
    MariaDb,
    MySql,
}

impl Brand {
    fn of(program: &Path) -> Result<Self> {
        let asked = Command::new(program).arg("--version").output();
        let asked =
            asked.map_err(|error| ServerError::io(format_args!("could not run {}", program.display()), error))?;
        let is_maria = String::from_utf8_lossy(&asked.stdout).contains("MariaDB");
        Ok(if is_maria { Self::MariaDb } else { Self::MySql })
    }
}

/// How a MariaDB or MySQL server is started and asked.
#[derive(Clone, Debug)]
struct MySql {
    program: PathBuf,
    brand: Brand,
    options: MySqlOptions,
}

impl Service for MySql {
    fn name(&self) -> &str {
        match self.brand {
            Brand::MariaDb => "MariaDB",
            Brand::MySql => "MySQL",
        }
    }

    fn prepare(&self, location: &Location) -> io::Result<()> {
        copy_tree(&self.template()?, &location.data)?;
        let mut init = format!("CREATE DATABASE IF NOT EXISTS {0};\nUSE {0};\n", MySqlServer::DATABASE);
        self.options.init.iter().for_each(|statement| init.push_str(&format!("{statement};\n")));
        fs::write(init_file(location), init)
    }

    fn command(&self, location: &Location) -> Vec<OsString> {
        let mut command = self.options.clock.as_ref().map(ServerClock::prefix).unwrap_or_default();
        command.extend([self.program.clone().into(), "--no-defaults".into()]);
        command.extend(as_root().map(Into::into));
        let port = format!("--port={}", location.port);
        command.extend([port.as_str(), "--bind-address=127.0.0.1", "--skip-log-bin"].map(Into::into));
        command.extend(["--innodb-buffer-pool-size=64M", "--max-connections=1000"].map(Into::into));
        command.extend([
            option("--datadir=", &location.data),
            option("--socket=", &location.dir.join("socket")),
            option("--pid-file=", &pid_file(location)),
            option("--init-file=", &init_file(location)),
            // MariaDB removes what looks like its temporary tables there when it starts: also those of other servers.
            option("--tmpdir=", &location.dir),
        ]);
        if self.brand == Brand::MySql {
            command.extend(["--mysqlx=OFF", "--performance-schema=OFF", "--secure-file-priv=NULL"].map(Into::into));
        }
        command.extend(self.options.args.iter().map(Into::into));
        command
    }

    fn probe<'a>(&'a self, location: &'a Location, pid: u32) -> Probe<'a> {
        Box::pin(async move {
            // The server writes its number when it has got the port, so that nobody else answers there.
            let written = fs::read_to_string(pid_file(location))?;
            if written.trim() != pid.to_string() {
                return Err(io::Error::other("it has not got its port yet"));
            }
            let mut connection = Connection::open(location, None).await?;
            connection.query("SELECT 1").await.map(drop)
        })
    }
}

impl MySql {
    /// An initialised data directory to be copied. It takes seconds to make, so it is kept in the user's cache.
    fn template(&self) -> io::Result<PathBuf> {
        let found = Program::At(self.program.clone()).find().map_err(io::Error::other)?;
        let templates = cache_dir().join("lockkit-servers").join("data");
        let template = templates.join(format!("{}-{}-{TEMPLATE}", self.name(), found.version));
        if template.is_dir() {
            return Ok(template);
        }
        fs::create_dir_all(&templates)?;
        let fresh = tempfile::Builder::new().prefix(".new-").tempdir_in(&templates)?;
        self.initialise(fresh.path())?;
        // Whoever else made the same one meanwhile did no worse.
        match fs::rename(fresh.path(), &template) {
            Err(error) if !template.is_dir() => Err(error),
            _ => Ok(template),
        }
    }

    fn initialise(&self, data: &Path) -> io::Result<()> {
        let mut command = match self.brand {
            Brand::MariaDb => {
                let installer = Program::Installed { command: "mariadb-install-db", package: "mariadb-server" };
                let mut command = Command::new(installer.locate().map_err(io::Error::other)?);
                command.args(["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]);
                command.args(["--skip-name-resolve", "--innodb-log-file-size=16M"]);
                command
            }
            Brand::MySql => {
                let mut command = Command::new(&self.program);
                command.args(["--no-defaults", "--initialize-insecure"]);
                command
            }
        };
        let output = command.args(as_root()).arg(option("--datadir=", data)).stdin(Stdio::null()).output()?;
        if output.status.success() {
            return Ok(());
        }
        let said = [output.stdout, output.stderr].concat();
        Err(io::Error::other(format!("no data directory could be made:\n{}", String::from_utf8_lossy(&said))))
    }
}

/// The servers refuse to run as root unless they are told to.
fn as_root() -> Option<&'static str> {
    rustix::process::geteuid().is_root().then_some("--user=root")
}

fn pid_file(location: &Location) -> PathBuf {
    location.dir.join("pid")
}

fn init_file(location: &Location) -> PathBuf {
    location.dir.join("init.sql")
}

fn option(name: &str, path: &Path) -> OsString {
    let mut option = OsString::from(name);
    option.push(path);
    option
}

fn cache_dir() -> PathBuf {
    let var = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache"))).unwrap_or_else(env::temp_dir)
}

/// Copies what is in one directory into another that exists.
fn copy_tree(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            fs::create_dir(&target)?;
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::servers::Keep;

    #[tokio::test]
    async fn a_server_keeps_its_data_or_nothing() -> Result<()> {
        let options = MySqlOptions::default().init("CREATE TABLE IF NOT EXISTS t (n INT)");
        let server = MySqlServer::start(options).await?;
        server.admin("INSERT INTO t VALUES (7), (NULL)").await?;
        server.restart(Keep::Data).await?;
        let rows = server.admin("SELECT n FROM t ORDER BY n").await?;
        assert_eq!(rows, [[None], [Some("7".to_owned())]]);
        server.restart(Keep::Nothing).await?;
        assert!(server.admin("SELECT n FROM t").await?.is_empty());
        let refused = server.admin("SELECT nothing").await.expect_err("no such column");
        assert!(refused.to_string().contains("1054"), "{refused}");
        Ok(())
    }

    #[tokio::test]
    async fn all_clients_are_cut() -> Result<()> {
        let server = MySqlServer::start(MySqlOptions::default()).await?;
        let mut client = Connection::open(server.location(), None).await.expect("connect");
        client.query("SELECT 1").await.expect("it is there");
        server.cut_clients().await?;
        assert!(client.query("SELECT 1").await.is_err());
        Ok(())
    }
}
