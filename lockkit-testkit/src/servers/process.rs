//! A server process: what can be done to any server.

use super::{Location, Result, ServerError, Service, guardian::Guardian, port::Port};

use crate::faults::process;
use lockkit_core::store::unpoisoned;
use std::{
    fs,
    io::{self, Read, Seek, SeekFrom},
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};
use tokio::time::{sleep, timeout};

/// How long a server may take to come up. The slowest needs seconds on a busy machine.
pub(super) const READY_WITHIN: Duration = Duration::from_secs(30);

/// How many ports are tried before the fault must lie elsewhere.
const PORTS_TRIED: u32 = 5;

/// What a server finds when it comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All that it had written to its data directory. A server that writes nothing there comes back empty.
    Data,
    /// Nothing: the data directory is emptied.
    Nothing,
}

/// A running server, and all that can be done to any kind of server.
///
/// Dropping it kills the server and removes its directory. Every method takes `&self`, so that what torments the server
/// can share it with what uses it.
#[derive(Debug)]
pub struct Process {
    service: Arc<dyn Service>,
    location: Location,
    ward: Arc<Ward>,
    /// It is given back when the server is gone.
    _port: Port,
    /// Held while it is restarted: two restarts at once would start one server in the half-made directory of the other.
    restarting: tokio::sync::Mutex<()>,
}

/// The guardian with the number of the process that it guards, or 0 while there is none.
#[derive(Debug)]
struct Ward {
    guardian: Mutex<Guardian>,
    pid: AtomicU32,
}

impl Process {
    /// Starts a server on a free port and returns when it is ready.
    pub(crate) async fn start(service: impl Service + 'static) -> Result<Self> {
        let service: Arc<dyn Service> = Arc::new(service);
        let mut tried = 1;
        loop {
            let port = Port::free().map_err(|error| ServerError::io(service.name(), error))?;
            match Self::start_on(service.clone(), port).await {
                Err(error) if error.is_port_taken() && tried < PORTS_TRIED => tried += 1,
                other => return other,
            }
        }
    }

    async fn start_on(service: Arc<dyn Service>, port: Port) -> Result<Self> {
        let failed = |error| ServerError::io(format_args!("could not start {}", service.name()), error);
        let dir = tempfile::Builder::new().prefix("lockkit-").tempdir().map_err(failed)?;
        let location = Location::new(dir.path().to_owned(), port.number());
        let dir = Self::fill(&service, &location, dir).await.map_err(failed)?;
        let guardian = Guardian::new(&location, &service.command(&location)).map_err(failed)?;
        // From here on removing the directory is the guardian's job.
        let _ = dir.keep();
        let ward = Arc::new(Ward { guardian: Mutex::new(guardian), pid: AtomicU32::new(0) });
        let process = Self { service, location, _port: port, ward, restarting: tokio::sync::Mutex::default() };
        process.run().await?;
        Ok(process)
    }

    /// The port on 127.0.0.1. It stays the same across restarts.
    #[must_use]
    pub fn port(&self) -> u16 {
        self.location.port
    }

    /// The address that the server listens on.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.location.addr()
    }

    /// Where the server lives.
    pub(crate) fn location(&self) -> &Location {
        &self.location
    }

    /// The server's process number; none after [`kill`](Self::kill).
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        Some(self.ward.pid.load(Ordering::SeqCst)).filter(|&pid| pid != 0)
    }

    /// Whether the server's process exists. A frozen one does.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.pid().is_some_and(process::is_alive)
    }

    /// What the server has printed so far.
    ///
    /// # Errors
    ///
    /// If the log can't be read.
    pub fn log(&self) -> Result<String> {
        self.log_from(0).map_err(|error| self.failed("read the log of", error))
    }

    /// Kills the server as `kill -9` does, and returns when it is gone. Nothing happens to one that does not run.
    ///
    /// # Errors
    ///
    /// If the guardian process was killed.
    pub async fn kill(&self) -> Result<()> {
        self.ward.clone().ask(Ward::stop).await.map_err(|error| self.failed("kill", error))
    }

    /// Stops the server in its tracks, and returns when none of its threads runs any more.
    ///
    /// Its connections stay open and new ones are still accepted by the kernel, but nobody answers.
    ///
    /// # Errors
    ///
    /// If the server does not run.
    pub async fn freeze(&self) -> Result<()> {
        let frozen = match self.pid() {
            Some(pid) => process::freeze(pid).await,
            None => Err(not_running()),
        };
        frozen.map_err(|error| self.failed("freeze", error))
    }

    /// Lets a frozen server go on where it was.
    ///
    /// # Errors
    ///
    /// If the server does not run.
    pub fn thaw(&self) -> Result<()> {
        self.pid().ok_or_else(not_running).and_then(process::thaw).map_err(|error| self.failed("thaw", error))
    }

    /// Kills the server if it still runs, starts it again on the same port, and returns when it is ready. Of two at once
    /// the second waits for the first.
    ///
    /// # Errors
    ///
    /// If the server does not come up.
    pub async fn restart(&self, keep: Keep) -> Result<()> {
        let _restarting = self.restarting.lock().await;
        self.kill().await?;
        if keep == Keep::Nothing {
            let emptied = match fs::remove_dir_all(&self.location.data) {
                Ok(()) => Self::fill(&self.service, &self.location, self.ward.clone()).await.map(drop),
                Err(error) => Err(error),
            };
            emptied.map_err(|error| self.failed("empty the data directory of", error))?;
        }
        self.run().await
    }

    /// Makes the data directory and puts into it what the server needs, on a thread that may block: some take seconds.
    ///
    /// It goes on if this future is dropped. Whatever removes the directory when it is dropped is lent to it as `remover`, so that nothing
    /// is put into a directory that is being removed, which would then stay.
    async fn fill<T: Send + 'static>(service: &Arc<dyn Service>, location: &Location, remover: T) -> io::Result<T> {
        let (service, location) = (service.clone(), location.clone());
        let fill = move || {
            let filled = fs::create_dir(&location.data).and_then(|()| service.prepare(&location));
            filled.map(|()| remover)
        };
        tokio::task::spawn_blocking(fill).await.map_err(io::Error::other)?
    }

    /// Starts the server's process and waits until it is ready.
    async fn run(&self) -> Result<()> {
        let log_start = fs::metadata(&self.location.log).map_or(0, |meta| meta.len());
        let pid = self.ward.clone().ask(Ward::start).await.map_err(|error| self.failed("start", error))?;
        let not_ready = |why: &str| {
            let log = self.log_from(log_start).unwrap_or_default();
            ServerError::not_ready(self.service.name(), why, &log)
        };
        // The standard clock, because tokio's may be paused by the test, while the server takes its time all the same.
        let deadline = Instant::now() + READY_WITHIN;
        loop {
            let still_missing = match timeout(Duration::from_secs(1), self.service.probe(&self.location, pid)).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "it does not answer".to_owned(),
            };
            if !process::is_alive(pid) {
                return Err(not_ready("ended before it was ready"));
            }
            if Instant::now() > deadline {
                return Err(not_ready(&format!("was not ready after {READY_WITHIN:?} ({still_missing})")));
            }
            sleep(Duration::from_millis(3)).await;
        }
    }

    fn log_from(&self, start: u64) -> io::Result<String> {
        let mut file = fs::File::open(&self.location.log)?;
        file.seek(SeekFrom::Start(start))?;
        let mut log = Vec::new();
        file.read_to_end(&mut log)?;
        Ok(String::from_utf8_lossy(&log).into_owned())
    }

    fn failed(&self, what: &str, error: io::Error) -> ServerError {
        ServerError::io(format_args!("could not {what} {}", self.service.name()), error)
    }
}

impl Ward {
    fn start(&self) -> io::Result<u32> {
        let pid = self.guardian().start()?;
        self.pid.store(pid, Ordering::SeqCst);
        Ok(pid)
    }

    fn stop(&self) -> io::Result<()> {
        // Forgotten first: once the server is gone, its number may belong to a process that is none of our business.
        self.pid.store(0, Ordering::SeqCst);
        self.guardian().stop()
    }

    /// Talks to the guardian on a thread that may block.
    ///
    /// Should the caller lose interest half-way, the dialogue is still led to its end, and the next one starts afresh.
    async fn ask<T: Send + 'static>(
        self: Arc<Self>,
        dialogue: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        tokio::task::spawn_blocking(move || dialogue(&self)).await.map_err(io::Error::other)?
    }

    fn guardian(&self) -> std::sync::MutexGuard<'_, Guardian> {
        unpoisoned(&self.guardian)
    }
}

fn not_running() -> io::Error {
    io::Error::new(io::ErrorKind::NotConnected, "it is not running")
}
