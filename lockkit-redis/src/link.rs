//! The one connection of a store: made when it is needed, watched, and replaced when it is dead.
//!
//! All requests share it and are answered in order, so that a release always runs behind the acquisition that it undoes
//! (rule R8). There is no retry: the operation that finds no connection has a task make one, others that come meanwhile wait
//! for the same attempt, and if it fails they all fail with its error. It is a task so that callers who lose patience don't
//! make the next one start over: if connecting takes longer than callers come apart, nobody would ever be connected.
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
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Alarm, Error, ErrorKind, Result};
use redis::{
    AsyncConnectionConfig, Cmd, Pipeline, PushInfo, PushKind, RedisResult, ServerErrorKind, Value,
    aio::{MultiplexedConnection, SendError},
};
use tokio::{sync::watch, task::AbortHandle, time::timeout};

use crate::{
    config::{RedisConfig, Topology},
    error::{self, Sent},
    reign::Reign,
    scripts::Script,
    secret,
    sentinel::{self, OnSwitch, Place, Watch},
    server,
    stream::{self, UnderWay},
    timer::Timers,
    wake::Wake,
};

/// How many requests may wait to be written.
const QUEUE: usize = 1024;
/// How many bytes may wait to be written before no more requests are taken.
const WRITE_BUFFER: usize = 256 * 1024;

/// Makes, watches and replaces the connection.
pub(crate) struct Link(Arc<Line>);

/// What the task that makes a connection shares with those who use it.
struct Line {
    config: RedisConfig,
    /// The key of the server's note about its reign, where servers can take over from each other.
    note: Option<String>,
    /// Raised when another server seems to have taken over.
    alarm: Option<Alarm>,
    wake: Arc<Wake>,
    current: RwLock<Option<Arc<Connection>>>,
    flight: Mutex<Flight>,
}

/// What comes of an attempt to connect.
type Attempt = watch::Receiver<Option<Result<Arc<Connection>>>>;

#[derive(Debug, Default)]
struct Flight {
    epoch: u64,
    /// The one under way.
    attempt: Option<Attempt>,
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
    _watches: Vec<Watch>,
}

impl Link {
    /// A link that is not connected yet. `note` is the key of the server's note about its reign, and `alarm` is for the
    /// case that it ends, where servers can take over from each other.
    pub(crate) fn new(config: RedisConfig, note: Option<String>, alarm: Option<Alarm>, wake: Arc<Wake>) -> Self {
        let (current, flight) = (RwLock::default(), Mutex::default());
        Self(Arc::new(Line { config, note, alarm, wake, current, flight }))
    }

    /// Who logs in, if it is not the default user.
    pub(crate) fn username(&self) -> Option<&str> {
        self.0.config.login.username.as_deref()
    }

    /// The connection, made now if there is none.
    ///
    /// # Errors
    /// Why there is none. Never with an effect, for nothing was sent.
    ///
    /// # Cancellation
    /// The attempt goes on, for whoever comes next.
    pub(crate) async fn connection(&self) -> Result<Arc<Connection>> {
        let mut attempt = match self.0.current().map_or_else(|| self.0.current_or_attempt(), Ok) {
            Ok(connection) => return Ok(connection),
            Err(attempt) => attempt,
        };
        let bound = self.0.config.timeout;
        let outcome = match timeout(bound, attempt.wait_for(Option::is_some)).await {
            Ok(outcome) => outcome.ok().and_then(|outcome| outcome.clone()),
            Err(_) => Some(Err(not_connected_within(bound))),
        };
        let abandoned = || Error::new(ErrorKind::Unavailable, "the attempt to connect ended with its runtime");
        outcome.unwrap_or_else(|| Err(abandoned()))
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
        let e = e.into();
        if error::is_not_in_charge(&e) {
            self.give_up(connection);
        }
        Err(error::map(&e, sent))
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
        if let Some(connection) = self.0.current() {
            self.give_up(&connection);
        }
        self.0.raise_alarm();
    }

    /// Whether another server may take over.
    pub(crate) fn fails_over(&self) -> bool {
        self.0.note.is_some()
    }

    /// Whether replicas have to acknowledge what is granted.
    pub(crate) fn asks_replicas(&self) -> bool {
        self.0.config.replicas > 0
    }

    /// Where the server is, if it is always the same.
    pub(crate) fn host(&self) -> &str {
        &self.0.config.host
    }

    /// Drops a connection, and wakes those who rely on it.
    fn give_up(&self, connection: &Connection) {
        connection.broken.store(true, Ordering::Release);
        let mut current = self.0.current.write().unwrap_or_else(PoisonError::into_inner);
        let dropped = current.take_if(|current| current.epoch == connection.epoch);
        drop(current);
        drop(dropped);
        self.0.wake.detach(connection.epoch);
    }
}

impl Line {
    fn current(&self) -> Option<Arc<Connection>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().filter(|connection| !connection.broken.load(Ordering::Acquire)).map(Arc::clone)
    }

    /// The connection if there is one by now, else the attempt to make one, which begins now if none is under way.
    fn current_or_attempt(self: &Arc<Self>) -> Result<Arc<Connection>, Attempt> {
        let mut flight = self.flight();
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        // The one under way may have ended with its runtime.
        if let Some(attempt) = flight.attempt.as_ref().filter(|attempt| attempt.has_changed().is_ok()) {
            return Err(attempt.clone());
        }
        flight.epoch += 1;
        let (line, epoch) = (Arc::clone(self), flight.epoch);
        let (outcome, attempt) = watch::channel(None);
        flight.attempt = Some(attempt.clone());
        tokio::spawn(async move {
            let bound = line.config.timeout;
            let made = timeout(bound, line.open(epoch)).await.unwrap_or_else(|_| Err(not_connected_within(bound)));
            line.attempted(made.as_deref().ok());
            outcome.send_replace(Some(made));
        });
        Err(attempt)
    }

    /// Takes note of the end of an attempt.
    fn attempted(&self, made: Option<&Connection>) {
        let mut flight = self.flight();
        flight.attempt = None;
        let Some(connection) = made else { return };
        let reign = connection.reign().map(|reign| reign.mark.clone());
        let former = std::mem::replace(&mut flight.reign, reign);
        if former.is_some() && former != flight.reign {
            self.raise_alarm();
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
            let (end, alarm) = (end.clone(), self.alarm.clone());
            Arc::new(move || {
                end();
                alarm.iter().for_each(Alarm::raise_all);
            })
        };
        let receiver = {
            let wake = Arc::clone(&self.wake);
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
        let (place, watches) = match &config.topology {
            Topology::Sentinel { sentinels, primary, login } => {
                let found = sentinel::find(config, sentinels, primary, login, &on_switch).await?;
                (found.place, found.watches)
            }
            Topology::Single | Topology::Cluster { .. } => ((config.host.clone(), config.port), Vec::new()),
        };
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
            _watches: watches,
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

    fn raise_alarm(&self) {
        self.alarm.iter().for_each(Alarm::raise_all);
    }

    fn flight(&self) -> MutexGuard<'_, Flight> {
        self.flight.lock().unwrap_or_else(PoisonError::into_inner)
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
        let Line { config, current, .. } = &*self.0;
        f.debug_struct("Link").field("config", config).field("current", current).finish_non_exhaustive()
    }
}

fn not_connected_within(bound: Duration) -> Error {
    Error::new(ErrorKind::TimedOut, format!("no connection within {bound:?}"))
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
