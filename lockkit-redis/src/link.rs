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
    future::Future,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Error, ErrorKind, Result};
use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, IntoConnectionInfo, Pipeline, ProtocolVersion, PushInfo,
    PushKind, RedisConnectionInfo, RedisError, RedisResult, ServerErrorKind, Value,
    aio::{MultiplexedConnection, SendError},
    io::tcp::{TcpSettings, socket2::TcpKeepalive},
};
use tokio::{sync::Mutex, time::timeout};

use crate::{
    config::RedisConfig,
    error::{self, Sent},
    scripts::Script,
    wake::Wake,
};

/// How many requests may wait to be written.
const QUEUE: usize = 1024;

/// Makes, watches and replaces the connection.
#[derive(Debug)]
pub(crate) struct Link {
    client: Client,
    timeout: Duration,
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
    epoch: u64,
    broken: Arc<AtomicBool>,
    received: AtomicU64,
    struck: AtomicBool,
}

impl Link {
    /// A link that is not connected yet.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for what the driver refuses.
    pub(crate) fn new(config: &RedisConfig, wake: Arc<Wake>) -> Result<Self> {
        let refused = |e: RedisError| error::map(&e, Sent::No);
        let address = if config.tls {
            let (host, port) = (config.host.clone(), config.port);
            ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(config.host.clone(), config.port)
        };
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
        let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(15)).with_interval(Duration::from_secs(5));
        // Without no-delay, Nagle's algorithm costs 39 to 68 % of the throughput on a real network (redis-rs#2195).
        let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(keepalive);
        let target = address.into_connection_info().map_err(refused)?.set_redis_settings(login).set_tcp_settings(tcp);
        Ok(Self {
            client: Client::open(target).map_err(refused)?,
            timeout: config.timeout,
            wake,
            current: RwLock::default(),
            flight: Mutex::default(),
            failures: AtomicU64::new(0),
        })
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
            None => timeout(self.timeout, self.connect()).await.unwrap_or_else(|_| {
                let message = format!("no connection within {:?}", self.timeout);
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
            Err(e) => {
                let failure = error::map(&e, Sent::No);
                flight.failure = Some(failure.clone());
                self.failures.fetch_add(1, Ordering::Release);
                Err(failure)
            }
        }
    }

    async fn open(&self, epoch: u64) -> RedisResult<Arc<Connection>> {
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
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let inner = Arc::new(self.client.get_multiplexed_async_connection_with_config(&config).await?);
        self.wake.attach(epoch, Arc::downgrade(&inner));
        let connection =
            Arc::new(Connection { inner, epoch, broken, received: AtomicU64::new(0), struck: AtomicBool::new(false) });
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
        match timeout(bound, exchange).await {
            Ok(Ok(reply)) => {
                connection.received.fetch_add(1, Ordering::Relaxed);
                if connection.struck.load(Ordering::Relaxed) {
                    connection.struck.store(false, Ordering::Relaxed);
                }
                Ok(reply)
            }
            Ok(Err(e)) => {
                if e.is_unrecoverable_error() {
                    self.give_up(connection);
                }
                Err(error::map(&e, sent))
            }
            Err(_) => {
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

fn is_unknown_script(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(e) if e.kind() == Some(ServerErrorKind::NoScript))
}
