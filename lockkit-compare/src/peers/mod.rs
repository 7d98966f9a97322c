//! Other lock libraries, measured beside the stores on the same private servers.
//!
//! A peer is a program that does the jobs of a [worker](crate::worker): it reads the same orders and gives the same answers, a line of JSON
//! each, and measures by itself. So a contest of processes is the same code whoever fights. `rslock` is in this program; what is written
//! in other languages is kept as its source, and made ready when it is asked for.

mod measure;

use std::{fmt, fs, io, path::PathBuf, process::Stdio, str::FromStr, sync::Arc, time::Duration};

use lockkit_testkit::OtherClient;
use tempfile::TempDir;
use tokio::process::Command;

use crate::{
    error::{Error, ErrorKind, Result},
    worker::RSLOCK_SCHEME,
    workers::WorkerProgram,
};
pub(crate) use measure::{At, Measured};

const CURATOR: &str = include_str!("CuratorPeer.java");
const REDIS_PY: &str = include_str!("redis_py.py");
/// As far as the requirement in the workspace's Cargo.toml tells it, for a crate does not say its own version.
#[cfg(feature = "peers")]
const RSLOCK_VERSION: &str = "0.10";

/// Another lock library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Peer {
    /// The crate `rslock`: Redlock, over one Redis. Only with the feature `peers` of this crate.
    Rslock,
    /// redis-py's `Lock`, on Redis.
    RedisPy,
    /// Apache Curator's `InterProcessMutex`, on ZooKeeper. Its archives are looked for in `$LOCKKIT_CURATOR`, or else in
    /// `/usr/share/java`.
    Curator,
}

impl Peer {
    /// All peers, in the order of their columns.
    pub const ALL: [Self; 3] = [Self::Rslock, Self::RedisPy, Self::Curator];

    /// What it is called where peers are chosen.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Rslock => "rslock",
            Self::Curator => "curator",
            Self::RedisPy => "redis-py",
        }
    }

    /// The names of all peers, in a list for people.
    #[must_use]
    pub fn names() -> String {
        Self::ALL.map(Self::name).join(", ")
    }

    /// What the URL of a store begins with whose server it uses, too.
    pub(crate) fn scheme(self) -> &'static str {
        if self == Self::Curator { "zk://" } else { "redis://" }
    }

    /// How long a waiter rests before it asks again, at most, by the library's own default; nothing of one that is woken.
    fn rest(self) -> Duration {
        match self {
            Self::Rslock => Duration::from_millis(200),
            Self::RedisPy => Duration::from_millis(100),
            Self::Curator => Duration::ZERO,
        }
    }

    /// Makes its program ready to run; or the error says what is missing, and how to get it.
    pub(crate) async fn prepare(self) -> Result<PeerProgram> {
        let missing = |why: String| Error::new(ErrorKind::Unavailable, format!("the peer {self} is missing: {why}"));
        match self {
            #[cfg(feature = "peers")]
            Self::Rslock => Ok(PeerProgram { peer: self, version: RSLOCK_VERSION.to_owned(), other: None }),
            #[cfg(not(feature = "peers"))]
            Self::Rslock => Err(missing("it is built in by the cargo feature peers of lockkit-cli".to_owned())),
            Self::Curator => {
                let (java, class_path) = OtherClient::Curator.interpreter().map_err(missing)?;
                curator(java, &class_path.unwrap_or_default()).await
            }
            Self::RedisPy => redis_py(OtherClient::RedisPy.interpreter().map_err(missing)?.0).await,
        }
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Peer {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|peer| peer.name() == name).ok_or_else(|| {
            // What was given is not repeated: it may be anything.
            Error::new(ErrorKind::InvalidInput, format!("there is no such peer; there are {}", Self::names()))
        })
    }
}

/// A peer that can be measured.
#[derive(Clone, Debug)]
pub(crate) struct PeerProgram {
    peer: Peer,
    version: String,
    /// The program around it and the directory that it is in; none if it is in this program.
    other: Option<(WorkerProgram, Arc<TempDir>)>,
}

impl PeerProgram {
    /// The head of its column.
    pub(crate) fn title(&self) -> String {
        format!("{} {} (peer)", self.peer, self.version)
    }

    /// What it is told of where its server is.
    pub(crate) fn url(&self, server: impl fmt::Display) -> String {
        if self.peer == Peer::Rslock { format!("{RSLOCK_SCHEME}redis://{server}/") } else { server.to_string() }
    }
}

/// Java with Curator and the program around it, which is compiled once: a dozen processes run it.
async fn curator(java: &str, class_path: &str) -> Result<PeerProgram> {
    let (dir, source) = keep("CuratorPeer.java", CURATOR)?;
    let mut compiler = Command::new("javac");
    compiler.args(["-cp", class_path, "-d"]).arg(dir.path()).arg(source);
    said("compile the program around Curator", compiler).await?;
    let class_path = format!("{}:{class_path}", dir.path().display());
    let quiet = "-Dorg.slf4j.simpleLogger.defaultLogLevel=error";
    let arguments = ["-Xmx256m", quiet, "-cp", &class_path, "CuratorPeer"];
    let mut command = Command::new(java);
    command.args(arguments).arg("version");
    let version = said("run Java", command).await?;
    let program = WorkerProgram::of(java, arguments);
    Ok(PeerProgram { peer: Peer::Curator, version, other: Some((program, Arc::new(dir))) })
}

async fn redis_py(python: &str) -> Result<PeerProgram> {
    let (dir, source) = keep("redis_py.py", REDIS_PY)?;
    let mut command = Command::new(python);
    command.args(["-c", "import redis; print(redis.__version__)"]);
    let version = said("run Python", command).await?;
    let program = WorkerProgram::of(python, [source.display().to_string()]);
    Ok(PeerProgram { peer: Peer::RedisPy, version, other: Some((program, Arc::new(dir))) })
}

/// Writes a program's source to a directory of its own.
fn keep(name: &str, source: &str) -> Result<(TempDir, PathBuf)> {
    let write = || -> io::Result<_> {
        let dir = tempfile::Builder::new().prefix("lockkit-peer-").tempdir()?;
        let path = dir.path().join(name);
        fs::write(&path, source)?;
        Ok((dir, path))
    };
    write().map_err(|error| Error::system("write the program around a peer", &error))
}

/// What a command prints that ends in moments.
async fn said(attempt: &str, mut command: Command) -> Result<String> {
    let ended = command.stdin(Stdio::null()).kill_on_drop(true).output().await;
    let ended = ended.map_err(|error| Error::system(attempt, &error))?;
    if ended.status.success() {
        return Ok(String::from_utf8_lossy(&ended.stdout).trim().to_owned());
    }
    let complaint = String::from_utf8_lossy(&ended.stderr);
    let first = complaint.lines().next().unwrap_or("it does not say why");
    Err(Error::new(ErrorKind::Unavailable, format!("could not {attempt}: {first}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_found_by_its_name_and_no_other() {
        for peer in Peer::ALL {
            assert_eq!(peer.to_string().parse(), Ok(peer));
        }
        let error = "Curator".parse::<Peer>().expect_err("no such peer").to_string();
        assert!(Peer::ALL.iter().all(|peer| error.contains(peer.name())), "{error}");
    }

    #[cfg(feature = "peers")]
    #[test]
    fn the_version_of_rslock_is_that_of_the_lock_file() {
        let lock = include_str!("../../../Cargo.lock");
        assert!(lock.contains(&format!("name = \"rslock\"\nversion = \"{RSLOCK_VERSION}.")), "not {RSLOCK_VERSION}");
    }
}
