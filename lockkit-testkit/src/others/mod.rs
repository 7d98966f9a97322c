//! The same locks in the hands of clients that are not lockkit: Apache Curator's `InterProcessMutex` and `LeaderSelector` (Java), and
//! kazoo's `Lock` and `Election` (Python) on ZooKeeper, redis-py's `Lock` (Python) on Redis.
//!
//! Each runs as a process of its own, a small program around the real client, which is told what to do line by line.

use std::{
    net::SocketAddr,
    path::Path,
    process::{Command, Stdio},
    time::Duration,
};

use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout},
    time::timeout,
};

use crate::BoxError;

/// Where the programs around the clients are.
const PROGRAMS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src/others");

/// How long an answer may take. Not how long it does take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A client of some store's locks that is not lockkit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OtherClient {
    /// Apache Curator's `InterProcessMutex` and `LeaderSelector`, on ZooKeeper. Its archives are looked for in `$LOCKKIT_CURATOR`, or else in
    /// `/usr/share/java`.
    Curator,
    /// kazoo's `Lock` and `Election`, on ZooKeeper, which are told to heed the nodes of Curator and lockkit.
    Kazoo,
    /// redis-py's `Lock`, on Redis.
    RedisPy,
}

impl OtherClient {
    /// Looks for what it needs.
    ///
    /// # Errors
    /// If something is not installed; the text says how to get it.
    pub fn find(self) -> Result<(), String> {
        self.command().map(drop)
    }

    /// What runs programs around it: a Python that has it; or Java, and what it needs on the class path.
    ///
    /// # Errors
    /// If something is not installed; the text says how to get it.
    pub fn interpreter(self) -> Result<(&'static str, Option<String>), String> {
        match self {
            Self::Curator => Ok(("java", Some(curator()?))),
            Self::Kazoo => Ok((python("kazoo.client", "python3-kazoo")?, None)),
            Self::RedisPy => Ok((python("redis", "python3-redis")?, None)),
        }
    }

    /// The program around it, without arguments.
    fn command(self) -> Result<Command, String> {
        let (interpreter, class_path) = self.interpreter()?;
        let mut command = Command::new(interpreter);
        if let Some(class_path) = class_path {
            command.args(["-Xmx64m", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error", "-cp", &class_path]);
        }
        command.arg(format!("{PROGRAMS}/{}", self.program()));
        Ok(command)
    }

    fn program(self) -> &'static str {
        match self {
            Self::Curator => "CuratorLock.java",
            Self::Kazoo => "kazoo_lock.py",
            Self::RedisPy => "redis_lock.py",
        }
    }
}

/// A process that uses one lock by another client; it is killed when this is dropped.
#[derive(Debug)]
pub struct Other {
    process: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Other {
    /// Starts it, with a connection to this server. `bound` is the timeout of its session, on Redis the time to live of its
    /// lock, which it does not renew. `lock` is what the client calls the lock: a path, on Redis a key.
    ///
    /// # Errors
    /// If the client is not installed, or does not get ready.
    pub async fn start(client: OtherClient, server: SocketAddr, bound: Duration, lock: &str) -> Result<Self, BoxError> {
        let mut command = client.command()?;
        command.args([&server.to_string(), &bound.as_millis().to_string(), lock]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = tokio::process::Command::from(command).kill_on_drop(true).spawn()?;
        let orders = process.stdin.take().ok_or("no input")?;
        let answers = BufReader::new(process.stdout.take().ok_or("no output")?).lines();
        let mut other = Self { process, orders, answers };
        match other.answer().await?.as_str() {
            "ready" => Ok(other),
            answer => Err(format!("{client:?} is not ready, but says {answer:?}").into()),
        }
    }

    /// Tells it what to do, without waiting for the answer:
    ///
    /// | order | answer |
    /// |---|---|
    /// | `acquire MILLISECONDS` | `acquired`, or `refused` if somebody else had the lock for all of that time |
    /// | `release` | `released` |
    /// | `lead MILLISECONDS` | `leads`, or `refused` if somebody else led for all of that time; on ZooKeeper |
    /// | `resign` | `resigned` |
    /// | `count TIMES FILE` | `counted`, after it has so often taken the lock, added one to the number in the file, without any other protection, and released the lock |
    ///
    /// # Errors
    /// If the process is gone.
    pub async fn order(&mut self, order: &str) -> Result<(), BoxError> {
        Ok(self.orders.write_all(format!("{order}\n").as_bytes()).await?)
    }

    /// Its next answer.
    ///
    /// # Errors
    /// If the process is gone, as it is when its client fails, or says nothing for a minute.
    ///
    /// # Cancellation
    /// Nothing is lost: the answer is the next one.
    pub async fn answer(&mut self) -> Result<String, BoxError> {
        let answer = timeout(PATIENCE, self.answers.next_line());
        let answer = answer.await.map_err(|_| format!("the other client says nothing for {PATIENCE:?}"))??;
        Ok(answer.ok_or("the other client has ended, its complaint stands above")?)
    }

    /// Tells it what to do, and returns its answer.
    ///
    /// # Errors
    /// As [`order`](Self::order) and [`answer`](Self::answer).
    pub async fn ask(&mut self, order: &str) -> Result<String, BoxError> {
        self.order(order).await?;
        self.answer().await
    }

    /// Kills it, and returns when it is gone.
    ///
    /// # Errors
    /// If the system refuses.
    pub async fn kill(&mut self) -> Result<(), BoxError> {
        Ok(self.process.kill().await?)
    }
}

/// What Java needs for Curator on its class path, or what is missing.
fn curator() -> Result<String, String> {
    let own = std::env::var("LOCKKIT_CURATOR").unwrap_or_else(|_| "/usr/share/java".to_owned());
    let archives = ["curator-recipes", "curator-framework", "curator-client"].map(|name| format!("{own}/{name}.jar"));
    if let Some(missing) = archives.iter().find(|archive| !Path::new(archive).is_file()) {
        return Err(format!("no {missing}: apt-get install libcurator-recipes-java"));
    }
    // Programs are given as their source, which takes more than what runs Java.
    if !succeeds(Command::new("javac").arg("-version")) {
        return Err("no javac: apt-get install default-jdk-headless".to_owned());
    }
    let others =
        ["guava", "slf4j-api", "slf4j-simple", "zookeeper", "zookeeper-jute", "jackson-core", "jackson-databind"];
    let others = others.map(|name| format!("/usr/share/java/{name}.jar"));
    Ok(archives.into_iter().chain(others).collect::<Vec<_>>().join(":"))
}

/// A Python that has this module: the first on the path, or the system's own, for which Debian packages it.
fn python(module: &str, package: &str) -> Result<&'static str, String> {
    let has_it = |python: &&str| succeeds(Command::new(python).args(["-c", &format!("import {module}")]));
    let python = ["python3", "/usr/bin/python3"].into_iter().find(has_it);
    python.ok_or_else(|| format!("no {module} in Python: apt-get install {package}"))
}

fn succeeds(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}
