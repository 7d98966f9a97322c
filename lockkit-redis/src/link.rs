//! The one connection of a store: made when it is needed, watched, and replaced when it is dead.
//!
//! All requests share it and are answered in order, so that a release always runs behind the acquisition that it undoes
//! (rule R8). There is no retry and no background task: the operation that finds no connection makes one, others that
//! come meanwhile wait for the same attempt, and if it fails they all fail with its error.
//!
//! A connection is given up
//! - when it breaks: the driver says so at once, and the next operation makes a new one;
//! - when it is a black hole. Nothing breaks then, and the driver alone would never give it up
//!   (redis-rs#1032). An operation that times out, without anything having been received since it began, leaves a
//!   strike; any answer wipes it out. A second such operation that began **after** the strike ends the connection.
//!   So the release that follows upon a timed-out acquisition still goes the same way, and a burst of operations that
//!   time out together counts once;
//! - when the server turns out to be a replica (`READONLY`): after a failover the name may lead elsewhere.

use std::{
    collections::HashMap,
    fmt,
    future::Future,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Error, ErrorKind, Result};
use redis::{
    AsyncConnectionConfig, Cmd, Pipeline, ProtocolVersion, PushInfo, PushKind, RedisConnectionInfo, RedisResult,
    ServerErrorKind, Value,
    aio::{MultiplexedConnection, SendError},
};
use tokio::{sync::Mutex, task::AbortHandle, time::timeout};

use crate::{
    config::RedisConfig,
    error::{self, Sent},
    scripts::Script,
    server::ServerFacts,
    stream::{self, UnderWay},
    timer::Timers,
    wake::Wake,
};

/// How many requests may wait to be written.
const QUEUE: usize = 1024;
/// How many bytes may wait to be written before no more requests are taken.
const WRITE_BUFFER: usize = 256 * 1024;

/// Makes, watches and replaces the connection.
pub(crate) struct Link {
    config: RedisConfig,
    login: RedisConnectionInfo,
    wake: Arc<Wake>,
    current: RwLock<Option<Arc<Connection>>>,
    /// Held by the one who is connecting.
    flight: Mutex<Flight>,
    failures: AtomicU64,
}

#[derive(Debug, Default)]
struct Flight {
    epoch: u64,
    failure: Option<Error>,
}

/// A connection that was made, dead or alive.
#[derive(Debug)]
pub(crate) struct Connection {
    inner: Arc<MultiplexedConnection>,
    /// The task that moves the bytes. It ends with the last user of this value, whatever is under way.
    driver: AbortHandle,
    epoch: u64,
    broken: Arc<AtomicBool>,
    under_way: UnderWay,
    timers: Timers,
    received: AtomicU64,
    struck: AtomicBool,
}

impl Link {
    /// A link that is not connected yet.
    pub(crate) fn new(config: RedisConfig, wake: Arc<Wake>) -> Self {
        let mut login = RedisConnectionInfo::default()
            .set_protocol(ProtocolVersion::RESP3)
            .set_db(config.database.into())
            .set_lib_name("lockkit", env!("CARGO_PKG_VERSION"));
        if let Some(username) = &config.username {
            login = login.set_username(username);
        }
        if let Some(password) = &config.password {
            login = login.set_password(password);
        }
        Self { config, login, wake, current: RwLock::default(), flight: Mutex::default(), failures: AtomicU64::new(0) }
    }

    /// Who logs in, if it is not the default user.
    pub(crate) fn username(&self) -> Option<&str> {
        self.config.username.as_deref()
    }

    /// The connection, made now if there is none.
    ///
    /// # Errors
    /// Why there is none. Never with an effect, for nothing was sent.
    ///
    /// # Cancellation
    /// Whoever waits for the same attempt makes one of their own.
    pub(crate) async fn connection(&self) -> Result<Arc<Connection>> {
        match self.current() {
            Some(connection) => Ok(connection),
            None => timeout(self.config.timeout, self.connect()).await.unwrap_or_else(|_| {
                let message = format!("no connection within {:?}", self.config.timeout);
                Err(Error::new(ErrorKind::TimedOut, message))
            }),
        }
    }

    fn current(&self) -> Option<Arc<Connection>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().filter(|connection| !connection.broken.load(Ordering::Acquire)).map(Arc::clone)
    }

    async fn connect(&self) -> Result<Arc<Connection>> {
        let failures = self.failures.load(Ordering::Acquire);
        let mut flight = self.flight.lock().await;
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        if self.failures.load(Ordering::Acquire) != failures
            && let Some(failure) = &flight.failure
        {
            return Err(failure.clone());
        }
        flight.epoch += 1;
        match self.open(flight.epoch).await {
            Ok(connection) => Ok(connection),
            Err(failure) => {
                flight.failure = Some(failure.clone());
                self.failures.fetch_add(1, Ordering::Release);
                Err(failure)
            }
        }
    }

    async fn open(&self, epoch: u64) -> Result<Arc<Connection>> {
        let broken = Arc::new(AtomicBool::new(false));
        let receiver = {
            let (wake, broken) = (Arc::clone(&self.wake), Arc::clone(&broken));
            move |push: PushInfo| {
                if push.kind == PushKind::Disconnection {
                    broken.store(true, Ordering::Release);
                    wake.detach(epoch);
                } else {
                    wake.push(epoch, &push);
                }
                Ok::<_, SendError>(())
            }
        };
        // The bounds are ours: one on connecting as a whole, and one on each operation.
        let config = AsyncConnectionConfig::new()
            .set_push_sender(receiver)
            .set_pipeline_buffer_size(QUEUE)
            .set_write_backpressure_boundary(WRITE_BUFFER)
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let under_way = UnderWay::default();
        let stream = stream::open(&self.config, Arc::clone(&under_way)).await.map_err(error::map_open)?;
        let (inner, driver) = MultiplexedConnection::new_with_config(&self.login, stream, config)
            .await
            .map_err(|e| error::map(&e, Sent::No))?;
        let inner = Arc::new(inner);
        let connection = Arc::new(Connection {
            inner: Arc::clone(&inner),
            driver: tokio::spawn(driver).abort_handle(),
            epoch,
            broken,
            under_way,
            timers: Timers::new(),
            received: AtomicU64::new(0),
            struck: AtomicBool::new(false),
        });
        if let Some(vet) = &self.config.vet {
            (vet.0)(&facts(&inner).await?)?;
        }
        self.wake.attach(epoch, Arc::downgrade(&inner));
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Runs a script. `request` names it by its hash; if the server does not know it, it was definitely not run, and is
    /// sent again with its code.
    pub(crate) async fn run(
        &self,
        connection: &Connection,
        script: &Script,
        request: &Cmd,
        bound: Duration,
        sent: Sent,
    ) -> Result<Value> {
        let exchange = async {
            let mut driver = MultiplexedConnection::clone(&connection.inner);
            let reply = driver.send_packed_command(request).await?;
            if is_unknown_script(&reply) {
                return driver.send_packed_command(&script.by_code(request)).await;
            }
            Ok(reply)
        };
        let reply = self.bounded(connection, bound, sent, exchange).await?;
        self.accept(connection, reply, sent)
    }

    /// Sends several requests at once; one answer each, in order, among them errors ([`accept`](Self::accept) them).
    ///
    /// With a script, requests that the server does not know by hash are sent again with its code.
    pub(crate) async fn run_all(
        &self,
        connection: &Connection,
        script: Option<&Script>,
        requests: &Pipeline,
        bound: Duration,
        sent: Sent,
    ) -> Result<Vec<Value>> {
        let exchange = async {
            let mut driver = MultiplexedConnection::clone(&connection.inner);
            let mut replies = driver.send_packed_commands(requests, 0, requests.len()).await?;
            for (reply, request) in replies.iter_mut().zip(requests.cmd_iter()) {
                if let (Some(script), true) = (script, is_unknown_script(reply)) {
                    *reply = driver.send_packed_command(&script.by_code(request)).await?;
                }
            }
            Ok(replies)
        };
        self.bounded(connection, bound, sent, exchange).await
    }

    /// Takes a single answer: what is an error there becomes one here.
    pub(crate) fn accept(&self, connection: &Connection, reply: Value, sent: Sent) -> Result<Value> {
        let Value::ServerError(e) = reply else { return Ok(reply) };
        if e.kind() == Some(ServerErrorKind::ReadOnly) {
            self.give_up(connection);
        }
        Err(error::map(&e.into(), sent))
    }

    /// Waits for an exchange, and judges the connection by how it ends.
    async fn bounded<T>(
        &self,
        connection: &Connection,
        bound: Duration,
        sent: Sent,
        exchange: impl Future<Output = RedisResult<T>>,
    ) -> Result<T> {
        let received = connection.received.load(Ordering::Relaxed);
        let struck = connection.struck.load(Ordering::Relaxed);
        let operation = Operation::begin(&connection.under_way);
        let outcome = connection.timers.within(bound, exchange).await;
        drop(operation);
        match outcome {
            Some(Ok(reply)) => {
                connection.received.fetch_add(1, Ordering::Relaxed);
                if connection.struck.load(Ordering::Relaxed) {
                    connection.struck.store(false, Ordering::Relaxed);
                }
                Ok(reply)
            }
            Some(Err(e)) => {
                if e.is_unrecoverable_error() {
                    self.give_up(connection);
                }
                Err(error::map(&e, sent))
            }
            None => {
                if connection.received.load(Ordering::Relaxed) == received {
                    if struck && connection.struck.load(Ordering::Relaxed) {
                        self.give_up(connection);
                    }
                    connection.struck.store(true, Ordering::Relaxed);
                }
                Err(error::timed_out(bound, sent))
            }
        }
    }

    /// Drops a connection, and wakes those who rely on it.
    fn give_up(&self, connection: &Connection) {
        connection.broken.store(true, Ordering::Release);
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let dropped = current.take_if(|current| current.epoch == connection.epoch);
        drop(current);
        drop(dropped);
        self.wake.detach(connection.epoch);
    }
}

/// Counts as under way until it is dropped.
struct Operation<'a>(&'a UnderWay);

impl<'a> Operation<'a> {
    fn begin(under_way: &'a UnderWay) -> Self {
        under_way.fetch_add(1, Ordering::Relaxed);
        Self(under_way)
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link").field("config", &self.config).field("current", &self.current).finish_non_exhaustive()
    }
}

/// What the server says of itself. What this user may not ask for is not known.
async fn facts(connection: &MultiplexedConnection) -> Result<ServerFacts> {
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("INFO").cmd("CONFIG").arg("GET").arg("appendfsync");
    let replies = MultiplexedConnection::clone(connection).send_packed_commands(&requests, 0, requests.len()).await;
    let mut replies = replies.map_err(|e| error::map(&e, Sent::No))?.into_iter();
    let info = replies.next().and_then(|reply| redis::from_redis_value::<String>(reply).ok()).unwrap_or_default();
    let fsync = replies.next().and_then(|reply| redis::from_redis_value::<HashMap<String, String>>(reply).ok());
    Ok(ServerFacts::read(&info, fsync.as_ref().and_then(|settings| settings.get("appendfsync")).map(String::as_str)))
}

fn is_unknown_script(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(e) if e.kind() == Some(ServerErrorKind::NoScript))
}
