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
//! - when the server turns out to be a replica (`READONLY`), or not to be the one that it was, or when a sentinel says
//!   that another took over: the next operation finds out where the name leads now.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Alarm, Error, ErrorKind, Result};
use redis::{
    AsyncConnectionConfig, Cmd, Pipeline, PushInfo, PushKind, RedisResult, ServerErrorKind, Value,
    aio::{MultiplexedConnection, SendError},
};
use tokio::{
    sync::Mutex,
    task::AbortHandle,
    time::{Instant, sleep_until, timeout},
};

use crate::{
    config::{RedisConfig, Topology},
    error::{self, Sent},
    reign::Reign,
    scripts::Script,
    secret,
    sentinel::{OnSwitch, Place, Watches},
    server,
    stream::{self, UnderWay},
    timer::Timers,
    wake::Wake,
};

/// How many requests may wait to be written.
const QUEUE: usize = 1024;
/// How many bytes may wait to be written before no more requests are taken.
const WRITE_BUFFER: usize = 256 * 1024;
/// How soon after an attempt to connect that was given up the next one begins.
const PACE: Duration = Duration::from_millis(50);

/// Makes, watches and replaces the connection.
pub(crate) struct Link {
    config: RedisConfig,
    /// The key of the server's note about its reign, where servers can take over from each other.
    note: Option<String>,
    /// Raised when another server seems to have taken over.
    alarm: Option<Alarm>,
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
    /// When the attempt under way began, or the one that was given up.
    begun: Option<Instant>,
    /// The reign of the latest connection.
    reign: Option<String>,
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
    place: Place,
    reign: Option<Reign>,
    /// The sentinels, if it was they who named the server.
    watches: Option<Watches>,
}

impl Link {
    /// A link that is not connected yet. `note` is the key of the server's note about its reign, and `alarm` is for the
    /// case that it ends, where servers can take over from each other.
    pub(crate) fn new(config: RedisConfig, note: Option<String>, alarm: Option<Alarm>, wake: Arc<Wake>) -> Self {
        let (current, flight, failures) = (RwLock::default(), Mutex::default(), AtomicU64::new(0));
        Self { config, note, alarm, wake, current, flight, failures }
    }

    /// Who logs in, if it is not the default user.
    pub(crate) fn username(&self) -> Option<&str> {
        self.config.login.username.as_deref()
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
            Some(connection) => {
                connection.watches.iter().for_each(Watches::mend);
                Ok(connection)
            }
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
        // Many may wait, each with little patience left: a server that does not answer is not to get a connection from
        // every one of them.
        if let Some(begun) = flight.begun {
            sleep_until(begun + PACE).await;
        }
        flight.begun = Some(Instant::now());
        flight.epoch += 1;
        let opened = self.open(flight.epoch).await;
        flight.begun = None;
        match opened {
            Ok(connection) => {
                let reign = connection.reign().map(|reign| reign.mark.clone());
                let former = std::mem::replace(&mut flight.reign, reign);
                if former.is_some() && former != flight.reign {
                    self.raise_alarm();
                }
                Ok(connection)
            }
            Err(failure) => {
                flight.failure = Some(failure.clone());
                self.failures.fetch_add(1, Ordering::Release);
                Err(failure)
            }
        }
    }

    async fn open(&self, epoch: u64) -> Result<Arc<Connection>> {
        let broken = Arc::new(AtomicBool::new(false));
        let end = {
            let (wake, broken) = (Arc::clone(&self.wake), Arc::clone(&broken));
            move || {
                broken.store(true, Ordering::Release);
                wake.detach(epoch);
            }
        };
        let on_switch: OnSwitch = {
            let alarm = self.alarm.clone();
            Arc::new(move || {
                end();
                alarm.iter().for_each(Alarm::raise_all);
            })
        };
        let receiver = {
            // A server that dies is a server that another may take the place of.
            let (wake, end) = (Arc::clone(&self.wake), Arc::clone(&on_switch));
            move |push: PushInfo| {
                if push.kind == PushKind::Disconnection {
                    end();
                } else {
                    wake.push(epoch, &push);
                }
                Ok::<_, SendError>(())
            }
        };
        // The bounds are ours: one on connecting as a whole, and one on each operation.
        let settings = AsyncConnectionConfig::new()
            .set_push_sender(receiver)
            .set_pipeline_buffer_size(QUEUE)
            .set_write_backpressure_boundary(WRITE_BUFFER)
            .set_connection_timeout(None)
            .set_response_timeout(None);
        let config = &self.config;
        let watches = match &config.topology {
            Topology::Sentinel { .. } => Some(Watches::begin(config, on_switch).await?),
            Topology::Single | Topology::Cluster { .. } => None,
        };
        let own = || (config.host.clone(), config.port);
        let place = watches.as_ref().map_or_else(own, |watches| watches.place().clone());
        let login = secret::login(&config.login, config.database)?;
        let under_way = UnderWay::default();
        let stream = stream::open(config, &place.0, place.1, Arc::clone(&under_way)).await.map_err(error::map_open)?;
        let (inner, driver) =
            MultiplexedConnection::new_with_config(&login, stream, settings).await.map_err(|e| error::map_login(&e))?;
        let inner = Arc::new(inner);
        // From here on the driver ends with this value, also if the connection is not used after all.
        let mut connection = Connection {
            inner: Arc::clone(&inner),
            driver: tokio::spawn(driver).abort_handle(),
            epoch,
            broken,
            under_way,
            timers: Timers::new(),
            received: AtomicU64::new(0),
            struck: AtomicBool::new(false),
            place,
            reign: None,
            watches,
        };
        if let Some(vet) = &config.vet {
            (vet.0)(&server::ask(&inner).await?)?;
        }
        if let Some(note) = &self.note {
            connection.reign = Some(Reign::of(&inner, note, config.pause(), &config.clock).await?);
        }
        if connection.broken.load(Ordering::Acquire) {
            return Err(error::taken_over(Sent::No));
        }
        let connection = Arc::new(connection);
        self.wake.attach(epoch, Arc::downgrade(&inner));
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Runs a script. `request` names it by its hash; if the server does not know it, it was definitely not run, and is
    /// sent again with its code. `asking` for a slot of a cluster that is on its way to this server.
    pub(crate) async fn run(
        &self,
        connection: &Connection,
        script: &Script,
        request: &Cmd,
        asking: bool,
        bound: Duration,
        sent: Sent,
    ) -> Result<Value> {
        let exchange = async {
            let mut driver = MultiplexedConnection::clone(&connection.inner);
            let reply = send(&mut driver, request, asking).await?;
            if is_unknown_script(&reply) {
                return send(&mut driver, &script.by_code(request), asking).await;
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
        if e.kind() == Some(ServerErrorKind::ReadOnly) || e.code() == error::TAKEN_OVER {
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
            // What a server says counts for nothing once it is known that another took over.
            Some(Ok(_)) if connection.reign.is_some() && connection.broken.load(Ordering::Acquire) => {
                Err(error::taken_over(sent))
            }
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

    /// Ends the connection, if there is one, because the server is not in charge any more. Wakes those who rely on it.
    pub(crate) fn close(&self) {
        if let Some(connection) = self.current() {
            self.give_up(&connection);
        }
        self.raise_alarm();
    }

    fn raise_alarm(&self) {
        self.alarm.iter().for_each(Alarm::raise_all);
    }

    /// Whether another server may take over.
    pub(crate) fn fails_over(&self) -> bool {
        self.note.is_some()
    }

    /// Whether replicas have to acknowledge what is granted.
    pub(crate) fn asks_replicas(&self) -> bool {
        self.config.replicas > 0
    }

    /// Where the server is, if it is always the same.
    pub(crate) fn host(&self) -> &str {
        &self.config.host
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

impl Connection {
    /// The server's time in charge, where servers can take over from each other.
    pub(crate) fn reign(&self) -> Option<&Reign> {
        self.reign.as_ref()
    }

    /// Whether the other leads to the same server, in the same reign.
    pub(crate) fn is_same_server(&self, other: &Self) -> bool {
        let id = |connection: &Self| connection.reign.as_ref().map(|reign| reign.id.clone());
        self.place == other.place && id(self) == id(other)
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

/// Sends a request; those who say `ASKING` do so right before it.
async fn send(driver: &mut MultiplexedConnection, request: &Cmd, asking: bool) -> RedisResult<Value> {
    if !asking {
        return driver.send_packed_command(request).await;
    }
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("ASKING").add_command(request.clone());
    let replies = driver.send_packed_commands(&requests, 0, requests.len()).await?;
    Ok(replies.into_iter().nth(1).unwrap_or_default())
}

fn is_unknown_script(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(e) if e.kind() == Some(ServerErrorKind::NoScript))
}
