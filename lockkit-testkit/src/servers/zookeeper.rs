//! Private ZooKeeper servers, alone and as an ensemble.

use super::{
    Location, Probe, Process, Program, Result, ServerError, Service, find, hosts, port::Port, process::READY_WITHIN,
};
use crate::faults::Proxy;
use std::{
    ffi::OsString,
    fs,
    io::{self, Write},
    net::{Ipv4Addr, SocketAddr},
    ops::Deref,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

/// The unit of time of the servers: sessions are checked, and followers pinged, on this grid.
const TICK: Duration = Duration::from_millis(500);

/// How often an ensemble is started anew when another process took one of its ports.
const ATTEMPTS: u32 = 3;

/// Which ZooKeeper to start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ZooKeeperFlavor {
    /// The system's own: `/usr/share/java/zookeeper.jar`.
    #[default]
    Installed,
    /// A newer one: `zookeeper.jar` with its libraries beside it, in the directory that [`Program::Newer`] describes or
    /// in the tree of a package unpacked next to it.
    Newer,
    /// This archive, with its libraries beside it.
    At(PathBuf),
}

impl ZooKeeperFlavor {
    /// Looks for the archive.
    ///
    /// # Errors
    ///
    /// If it is not there, or there is no Java to run it; the text says how to get them.
    pub fn locate(&self) -> Result<PathBuf> {
        JAVA.locate()?;
        match self {
            Self::Installed => find::archive(Path::new("/usr/share/java/zookeeper.jar"), "libzookeeper-java"),
            Self::Newer => find::newer_archive("zookeeper.jar"),
            Self::At(path) => find::archive(path, "libzookeeper-java"),
        }
    }
}

const JAVA: Program = Program::Installed { command: "java", package: "default-jre-headless" };

/// A private ZooKeeper server on its own. It writes its transactions to disk, but does not wait for the disk.
///
/// All that can be done to any server (kill, freeze, thaw, restart) is in [`Process`], which it dereferences to.
/// Sessions may last from 1 s to 60 s.
#[derive(Debug)]
pub struct ZooKeeperServer {
    process: Process,
}

impl ZooKeeperServer {
    /// Starts a server and returns when it serves.
    ///
    /// # Errors
    ///
    /// If Java or the archive is not installed, or the server does not come up.
    pub async fn start(flavor: ZooKeeperFlavor) -> Result<Self> {
        Self::start_with(flavor, &[]).await
    }

    /// The same with arguments for the virtual machine, such as `-Dznode.container.checkIntervalMs=100`.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub async fn start_with(flavor: ZooKeeperFlavor, arguments: &[&str]) -> Result<Self> {
        let arguments = arguments.iter().map(OsString::from).collect();
        let service = ZooKeeper { java: JAVA.locate()?, archive: flavor.locate()?, arguments, member: None };
        Ok(Self { process: Process::start(service).await? })
    }

    /// The URL to connect to.
    #[must_use]
    pub fn url(&self) -> String {
        format!("zk://{}", self.addr())
    }

    /// Asks the server one of its four-letter words, such as `srvr`, `cons` or `wchc`.
    ///
    /// # Errors
    ///
    /// If the server can't be reached.
    pub async fn word(&self, word: &str) -> Result<String> {
        ask(self.addr(), word).await.map_err(|error| ServerError::io(word, error))
    }

    /// Sets the bounds of the timeouts of sessions, from the next restart with its data on. Sessions that reconnect are
    /// given another timeout then if theirs does not fit.
    ///
    /// # Errors
    ///
    /// If the configuration can't be written.
    pub fn limit_sessions(&self, shortest: Duration, longest: Duration) -> Result<()> {
        let write = || {
            let config = self.process.location().data.join("zoo.cfg");
            // Of several lines the last one counts.
            let mut file = fs::OpenOptions::new().append(true).open(config)?;
            writeln!(file, "minSessionTimeout={}\nmaxSessionTimeout={}", shortest.as_millis(), longest.as_millis())
        };
        write().map_err(|error| ServerError::io("could not configure ZooKeeper", error))
    }
}

impl Deref for ZooKeeperServer {
    type Target = Process;

    fn deref(&self) -> &Process {
        &self.process
    }
}

/// Three private ZooKeeper servers that form an ensemble.
#[derive(Debug)]
pub struct ZooKeeperEnsemble {
    members: Vec<ZooKeeperServer>,
    /// What stands between the members, if anything does.
    links: Vec<Link>,
    /// What the members talk over.
    _ports: Vec<Port>,
}

/// The way on which one member follows another, should that lead.
#[derive(Debug)]
struct Link {
    from: usize,
    to: usize,
    proxy: Proxy,
}

impl ZooKeeperEnsemble {
    /// Starts three servers and returns when all of them serve.
    ///
    /// # Errors
    ///
    /// If Java or the archive is not installed, or a server does not come up.
    pub async fn start(flavor: ZooKeeperFlavor) -> Result<Self> {
        Self::start_linked(flavor, false).await
    }

    /// The same with proxies between the members, so that one can be [silenced](Self::silence). They live on this
    /// runtime: a test that blocks it silences all.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub async fn start_with_proxies(flavor: ZooKeeperFlavor) -> Result<Self> {
        Self::start_linked(flavor, true).await
    }

    async fn start_linked(flavor: ZooKeeperFlavor, linked: bool) -> Result<Self> {
        let (java, archive) = (JAVA.locate()?, flavor.locate()?);
        let mut attempt = 1;
        loop {
            // For each of three members one for its followers and one for elections.
            let claimed: io::Result<Vec<_>> = (0..6).map(|_| Port::free()).collect();
            let claimed = claimed.map_err(|error| ServerError::io("ZooKeeper", error))?;
            let ports: Vec<_> = claimed.chunks_exact(2).map(|pair| (pair[0].number(), pair[1].number())).collect();
            let links = if linked { links(&ports).await } else { Ok(Vec::new()) };
            let links = links.map_err(|error| ServerError::io("ZooKeeper", error))?;
            let member = |number| ZooKeeper {
                java: java.clone(),
                archive: archive.clone(),
                arguments: Vec::new(),
                member: Some(Member { number, ports: ports_seen_by(number - 1, &ports, &links) }),
            };
            // None of them serves before a majority is there, so they start side by side.
            let started =
                tokio::try_join!(Process::start(member(1)), Process::start(member(2)), Process::start(member(3)));
            match started {
                Ok((first, second, third)) => {
                    let members = [first, second, third].map(|process| ZooKeeperServer { process }).into();
                    return Ok(Self { members, links, _ports: claimed });
                }
                Err(_) if attempt < ATTEMPTS => attempt += 1,
                Err(error) => return Err(error),
            }
        }
    }

    /// The servers.
    #[must_use]
    pub fn members(&self) -> &[ZooKeeperServer] {
        &self.members
    }

    /// The URL that names all servers.
    #[must_use]
    pub fn url(&self) -> String {
        format!("zk://{}", hosts(&self.members))
    }

    /// Lets nothing through any more between a member, by its place in [`members`](Self::members), and the leader, or
    /// if it leads, between it and its followers. Nobody is told: connections stay open, and clients reach it as before.
    ///
    /// It lasts until they have noticed (`syncLimit`: ten ticks, 5 s), for members then look for a leader on other ways:
    /// in an election each tells the others its true address. Only with [`start_with_proxies`](Self::start_with_proxies).
    pub fn silence(&self, place: usize) {
        let touched = self.links.iter().filter(|link| link.from == place || link.to == place);
        touched.for_each(|link| link.proxy.blackhole());
    }

    /// Undoes every [`silence`](Self::silence). What was held back is delivered.
    pub fn unsilence(&self) {
        self.links.iter().for_each(|link| link.proxy.heal());
    }

    /// Waits until a member leads, and returns its place in [`members`](Self::members). An election takes the members
    /// seconds on a busy machine, so they get the time that a server has to come up.
    ///
    /// # Errors
    ///
    /// If none leads by then.
    pub async fn elected(&self) -> Result<usize> {
        // The standard clock, because tokio's may be paused by the test.
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            if let Some(leader) = self.leader().await {
                return Ok(leader);
            }
            if Instant::now() > deadline {
                let why = format!("no member of the ensemble leads after {READY_WITHIN:?}");
                return Err(ServerError::io("ZooKeeper", io::Error::other(why)));
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The member that leads at present, by its place in [`members`](Self::members); none during an election.
    pub async fn leader(&self) -> Option<usize> {
        for (place, member) in self.members.iter().enumerate() {
            if member.word("srvr").await.is_ok_and(|answer| answer.contains("Mode: leader")) {
                return Some(place);
            }
        }
        None
    }
}

/// How a ZooKeeper server is started and asked.
#[derive(Clone, Debug)]
struct ZooKeeper {
    java: PathBuf,
    archive: PathBuf,
    arguments: Vec<OsString>,
    member: Option<Member>,
}

/// One of an ensemble.
#[derive(Clone, Debug)]
struct Member {
    /// From 1.
    number: usize,
    /// For each member the port to the leader and the port for elections, as this one sees them.
    ports: Vec<(u16, u16)>,
}

impl Service for ZooKeeper {
    fn name(&self) -> &str {
        "ZooKeeper"
    }

    fn prepare(&self, location: &Location) -> io::Result<()> {
        let mut config = format!(
            "tickTime={}\ndataDir={}\nclientPort={}\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n\
             4lw.commands.whitelist=*\nmaxClientCnxns=0\nminSessionTimeout=1000\nmaxSessionTimeout=60000\n",
            TICK.as_millis(),
            location.data.display(),
            location.port,
        );
        if let Some(Member { number, ports }) = &self.member {
            config.push_str("initLimit=20\nsyncLimit=10\n");
            for (place, (quorum, election)) in ports.iter().enumerate() {
                config.push_str(&format!("server.{}=127.0.0.1:{quorum}:{election}\n", place + 1));
            }
            fs::write(location.data.join("myid"), number.to_string())?;
        }
        fs::write(location.data.join("zoo.cfg"), config)
    }

    fn command(&self, location: &Location) -> Vec<OsString> {
        let mut command: Vec<OsString> = vec![self.java.clone().into()];
        // The machine's memory and processors are shared with the tests: a small heap, and no more compiling than pays.
        command.extend(["-Xmx128m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"].map(Into::into));
        // A test's server need not survive a power failure, and waiting for the disk would drown what is measured.
        command.extend(["-Dzookeeper.forceSync=no", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn"].map(Into::into));
        command.extend(self.arguments.iter().cloned());
        command.extend(["-cp".into(), class_path(&self.archive)]);
        command.push("org.apache.zookeeper.server.quorum.QuorumPeerMain".into());
        command.push(location.data.join("zoo.cfg").into());
        command
    }

    fn probe<'a>(&'a self, location: &'a Location, _pid: u32) -> Probe<'a> {
        Box::pin(async move {
            let state = ask(location.addr(), "srvr").await?;
            if !state.contains("Mode: ") {
                return Err(io::Error::other(state.trim().to_owned()));
            }
            // It does not tell its process number, but the name of its directory is as good.
            let settings = ask(location.addr(), "conf").await?;
            if settings.contains(&*location.data.to_string_lossy()) {
                Ok(())
            } else {
                Err(io::Error::other("another server answers on its port"))
            }
        })
    }
}

/// The archive behind the libraries that lie beside it.
///
/// Debian's archives name their libraries by absolute path, and what an archive names is searched before what follows
/// it on the class path. So the libraries of a version that was unpacked elsewhere go first.
fn class_path(archive: &Path) -> OsString {
    const LIBRARIES: &[&str] = &[
        "zookeeper-jute",
        "slf4j-api",
        "slf4j-simple",
        "snappy-java",
        "metrics-core",
        "netty-buffer",
        "netty-codec",
        "netty-common",
        "netty-handler",
        "netty-resolver",
        "netty-transport",
        "netty-transport-native-unix-common",
        "netty-transport-native-epoll",
        "commons-cli",
        "commons-io",
    ];
    let beside = archive.parent().unwrap_or(Path::new(""));
    let mut path = OsString::new();
    for library in LIBRARIES.iter().map(|name| beside.join(format!("{name}.jar"))).filter(|path| path.is_file()) {
        path.push(library);
        path.push(":");
    }
    path.push(archive);
    path
}

/// Sends a four-letter word and reads the answer.
async fn ask(address: SocketAddr, word: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    stream.write_all(word.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    Ok(answer)
}

/// Proxies for each member before the ports on which each other would lead.
async fn links(ports: &[(u16, u16)]) -> io::Result<Vec<Link>> {
    let mut links = Vec::new();
    for from in 0..ports.len() {
        for (to, &(quorum, _)) in ports.iter().enumerate().filter(|(to, _)| *to != from) {
            links.push(Link { from, to, proxy: Proxy::start((Ipv4Addr::LOCALHOST, quorum).into()).await? });
        }
    }
    Ok(links)
}

/// The ports that a member is told of: its own, and the proxies before those of the others.
fn ports_seen_by(from: usize, ports: &[(u16, u16)], links: &[Link]) -> Vec<(u16, u16)> {
    let seen = |(to, &(quorum, election)): (usize, &(u16, u16))| {
        let link = links.iter().find(|link| link.from == from && link.to == to);
        (link.map_or(quorum, |link| link.proxy.addr().port()), election)
    };
    ports.iter().enumerate().map(seen).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::servers::Keep;

    #[tokio::test]
    async fn a_server_serves_and_comes_back() -> Result<()> {
        let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?;
        assert!(server.word("srvr").await?.contains("Mode: standalone"));
        server.restart(Keep::Data).await?;
        assert!(server.word("srvr").await?.contains("Mode: standalone"));
        Ok(())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_leader_that_is_silenced_steps_down() -> Result<()> {
        let ensemble = ZooKeeperEnsemble::start_with_proxies(ZooKeeperFlavor::Installed).await?;
        let old = ensemble.leader().await.expect("a leader");
        ensemble.silence(old);
        for _ in 0..400 {
            if !ensemble.members()[old].word("srvr").await?.contains("Mode: leader") {
                ensemble.unsilence();
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("it still leads, without followers");
    }

    #[tokio::test]
    async fn an_ensemble_has_one_leader() -> Result<()> {
        let ensemble = ZooKeeperEnsemble::start(ZooKeeperFlavor::Installed).await?;
        let leader = ensemble.leader().await.expect("a leader");
        ensemble.members()[leader].kill().await?;
        assert_ne!(ensemble.elected().await?, leader, "the dead one leads");
        Ok(())
    }
}
