//! Private servers that live as long as the test that started them.
//!
//! Each server runs in a temporary directory of its own, listens on a free port of 127.0.0.1 only, and is gone when
//! its handle is dropped, when the test panics, and even when the test process is killed: a small guardian process
//! sees to it. What all servers have in common (start, kill, freeze, thaw, restart) is in
//! [`Process`]; a file per kind of server adds how that kind is configured and asked.
//!
//! A new kind of server implements `Service` and wraps a [`Process`], as `redis.rs` does.

mod authority;
mod error;
mod find;
mod guardian;
mod mysql;
mod port;
mod process;
mod redis;
mod redis_client;
mod redis_cluster;
mod redis_sentinel;
mod zookeeper;

pub use self::{
    authority::Authority,
    error::{Result, ServerError},
    find::{Found, Program},
    mysql::{MySqlFlavor, MySqlOptions, MySqlServer},
    process::{Keep, Process},
    redis::{Persistence, RedisFlavor, RedisOptions, RedisServer},
    redis_cluster::RedisCluster,
    redis_sentinel::RedisSentinels,
    zookeeper::{ZooKeeperEnsemble, ZooKeeperFlavor, ZooKeeperServer},
};

use std::{
    ffi::OsString,
    fmt, io,
    net::{Ipv4Addr, SocketAddr},
    ops::Deref,
    path::PathBuf,
    pin::Pin,
    time::{Duration, Instant},
};

/// The addresses of servers, as a URL that names them all has them.
#[must_use]
pub fn hosts<S: Deref<Target = Process>>(servers: &[S]) -> String {
    servers.iter().map(|server| server.addr().to_string()).collect::<Vec<_>>().join(",")
}

/// Waits until several servers have come to terms, for half a minute at most.
pub(crate) async fn until(servers: &str, what: &str, is_true: impl AsyncFn() -> bool) -> Result<()> {
    const WITHIN: Duration = Duration::from_secs(30);
    // The standard clock, because tokio's may be paused by the test.
    let deadline = Instant::now() + WITHIN;
    while !is_true().await {
        if Instant::now() > deadline {
            return Err(ServerError::io(servers, io::Error::other(format!("not within {WITHIN:?}: {what}"))));
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Ok(())
}

/// What one kind of server does in its own way; [`Process`] does the rest.
pub(crate) trait Service: fmt::Debug + Send + Sync {
    /// What to call the server in an error.
    fn name(&self) -> &str;

    /// Fills the data directory, which exists and is empty.
    fn prepare(&self, location: &Location) -> io::Result<()>;

    /// The program and its arguments.
    fn command(&self, location: &Location) -> Vec<OsString>;

    /// Asks the server whether it serves by now; the error says what is still missing.
    ///
    /// The answer has to come from the process `pid`. In the moment between choosing a port and listening on it another
    /// server may have taken it, and would be glad to answer in our server's place.
    fn probe<'a>(&'a self, location: &'a Location, pid: u32) -> Probe<'a>;
}

/// The answer to [`Service::probe`], boxed so that a [`Process`] is the same type for every kind of server.
pub(crate) type Probe<'a> = Pin<Box<dyn Future<Output = io::Result<()>> + Send + 'a>>;

/// Where a server lives.
#[derive(Clone, Debug)]
pub(crate) struct Location {
    /// The server's own temporary directory, which holds the two below.
    pub(crate) dir: PathBuf,
    /// What the server keeps across restarts.
    pub(crate) data: PathBuf,
    /// What the server printed, over all its restarts.
    pub(crate) log: PathBuf,
    /// The port on 127.0.0.1, the same across restarts.
    pub(crate) port: u16,
}

impl Location {
    pub(crate) fn new(dir: PathBuf, port: u16) -> Self {
        Self { data: dir.join("data"), log: dir.join("log"), dir, port }
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }
}
