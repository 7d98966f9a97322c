//! Making the connection to a server when it is needed, and the next one when it is dead.
//!
//! The operation that finds no connection has one made, others that come meanwhile wait for the same attempt, and if it
//! fails they all fail with its error. A task makes it, so that callers who lose patience don't make the next one start
//! over: if connecting takes longer than they come apart, nobody would ever be connected.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Alarm, Error, ErrorKind, Fence, Result, store::unpoisoned};
use redis::{
    AsyncConnectionConfig, PushInfo, PushKind,
    aio::{MultiplexedConnection, SendError},
};
use tokio::{sync::watch, time::timeout};

use crate::{
    client::{
        batch::{Batches, QUEUE},
        connect,
        connection::{Connection, InUse},
        epoch::Epoch,
        questions,
        sentinel::{OnSwitch, Watches},
        subscriptions::Subscriptions,
    },
    config::{RedisConfig, Topology},
    wire::error::{self, Sent},
};

/// How many bytes may wait to be written before no more requests are taken.
const WRITE_BUFFER: usize = 256 * 1024;

/// Makes the connection to one server, and keeps it for all who use it.
pub(crate) struct Dialer {
    config: RedisConfig,
    /// Where the server's note about its epoch is, where servers can take over from each other.
    note: Option<Arc<NoteKey>>,
    /// Raised when another server seems to have taken over.
    alarm: Option<Alarm>,
    subscriptions: Arc<Subscriptions>,
    in_use: Arc<InUse>,
    flight: Mutex<Flight>,
}

/// The key of a server's note about its epoch. In a cluster it changes when its slot leaves the server.
pub(crate) type NoteKey = Mutex<String>;

/// The result of an attempt to connect.
type Pending = watch::Receiver<Option<Result<Arc<Connection>>>>;

#[derive(Debug, Default)]
struct Flight {
    generation: u64,
    /// The attempt under way.
    pending: Option<Pending>,
    /// The epoch of the latest connection.
    epoch: Option<Epoch>,
}

impl Dialer {
    /// A dialer that has no connection yet. `note` is where the server's note about its epoch is, and `alarm` is for the
    /// case that it ends, where servers can take over from each other.
    pub(crate) fn new(
        config: RedisConfig,
        note: Option<Arc<NoteKey>>,
        alarm: Option<Alarm>,
        subscriptions: Arc<Subscriptions>,
    ) -> Arc<Self> {
        let (in_use, flight) = Default::default();
        Arc::new(Self { config, note, alarm, subscriptions, in_use, flight })
    }

    /// The connection, made now if there is none.
    ///
    /// # Errors
    /// Why there is none. Never with an effect, for nothing was sent.
    ///
    /// # Cancellation
    /// The attempt goes on, for whoever comes next.
    pub(crate) async fn connection(self: &Arc<Self>) -> Result<Arc<Connection>> {
        let mut attempt = match self.current().map_or_else(|| self.current_or_attempt(), Ok) {
            Ok(connection) => {
                connection.watches.iter().for_each(Watches::mend);
                return Ok(connection);
            }
            Err(attempt) => attempt,
        };
        let bound = self.config.timeout;
        let outcome = match timeout(bound, attempt.wait_for(Option::is_some)).await {
            Ok(outcome) => outcome.ok().and_then(|outcome| outcome.clone()),
            Err(_) => Some(Err(not_connected_within(bound))),
        };
        let abandoned = || Error::new(ErrorKind::Unavailable, "the attempt to connect ended with its runtime");
        outcome.unwrap_or_else(|| Err(abandoned()))
    }

    /// The connection, unless it is known to be dead.
    pub(crate) fn current(&self) -> Option<Arc<Connection>> {
        let current = self.in_use.read().unwrap_or_else(PoisonError::into_inner);
        current.as_ref().filter(|connection| !connection.is_broken()).map(Arc::clone)
    }

    /// Has the server's note written at the key that it has now, for those who connect from now on. Returns at once.
    pub(crate) fn write_note(self: &Arc<Self>) {
        let Some(connection) = self.current() else { return };
        let dialer = Arc::clone(self);
        tokio::spawn(async move {
            let seen = connection.epoch().map(|epoch| epoch.note.clone()).unwrap_or_default();
            let asked = dialer.epoch(&connection.inner, connection.batches.number(), &seen);
            // If it fails, they find no note, and pause if they must.
            _ = timeout(dialer.config.timeout, asked).await;
        });
    }

    /// The user that logs in, if it is not the default user.
    pub(crate) fn username(&self) -> Option<&str> {
        self.config.login.username.as_deref()
    }

    /// Ends the connection, if there is one, because the server is not in charge any more. Wakes those who rely on it.
    pub(crate) fn close(&self) {
        if let Some(connection) = self.current() {
            connection.give_up();
        }
        self.raise_alarm();
    }

    /// Whether another server may take over.
    pub(crate) fn fails_over(&self) -> bool {
        self.note.is_some()
    }

    /// For how long a server that took over grants nothing, where one may.
    pub(crate) fn pause(&self) -> Option<Duration> {
        self.fails_over().then(|| self.config.pause())
    }

    /// Whether replicas have to acknowledge what is granted.
    pub(crate) fn asks_replicas(&self) -> bool {
        self.config.replicas > 0
    }

    /// Where the server is, if it is always the same.
    pub(crate) fn host(&self) -> &str {
        &self.config.host
    }

    /// The connection if there is one by now, else the attempt to make one, which begins now if none is under way.
    fn current_or_attempt(self: &Arc<Self>) -> Result<Arc<Connection>, Pending> {
        let mut flight = unpoisoned(&self.flight);
        if let Some(connection) = self.current() {
            return Ok(connection);
        }
        // The one under way may have ended with its runtime.
        if let Some(attempt) = flight.pending.as_ref().filter(|attempt| attempt.has_changed().is_ok()) {
            return Err(attempt.clone());
        }
        flight.generation += 1;
        let (dialer, generation) = (Arc::clone(self), flight.generation);
        let (outcome, attempt) = watch::channel(None);
        flight.pending = Some(attempt.clone());
        tokio::spawn(async move {
            let bound = dialer.config.timeout;
            let made =
                timeout(bound, dialer.open(generation)).await.unwrap_or_else(|_| Err(not_connected_within(bound)));
            dialer.attempted(made.as_deref().ok());
            outcome.send_replace(Some(made));
        });
        Err(attempt)
    }

    /// Takes note of the end of an attempt.
    fn attempted(&self, made: Option<&Connection>) {
        let mut flight = unpoisoned(&self.flight);
        flight.pending = None;
        let Some(connection) = made else { return };
        let former = std::mem::replace(&mut flight.epoch, connection.epoch.clone());
        if former.is_some_and(|former| connection.epoch().is_none_or(|epoch| epoch.mark != former.mark)) {
            self.raise_alarm();
        }
    }

    async fn open(&self, generation: u64) -> Result<Arc<Connection>> {
        let broken = Arc::new(AtomicBool::new(false));
        let end = {
            let (subscriptions, broken) = (Arc::clone(&self.subscriptions), Arc::clone(&broken));
            move || {
                broken.store(true, Ordering::Release);
                subscriptions.detach(generation);
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
            let (subscriptions, end) = (Arc::clone(&self.subscriptions), Arc::clone(&on_switch));
            move |push: PushInfo| {
                if push.kind == PushKind::Disconnection {
                    end();
                } else {
                    subscriptions.push(generation, &push);
                }
                Ok::<_, SendError>(())
            }
        };
        // The bounds are ours: one on connecting as a whole, and one on each operation.
        let settings = AsyncConnectionConfig::new()
            .set_push_sender(receiver)
            .set_pipeline_buffer_size(QUEUE)
            .set_write_backpressure_boundary(WRITE_BUFFER);
        let config = &self.config;
        let watches = match &config.topology {
            Topology::Sentinel { .. } => Some(Watches::begin(config, on_switch).await?),
            Topology::Single | Topology::Cluster { .. } => None,
        };
        let own = || (config.host.clone(), config.port);
        let address = watches.as_ref().map_or_else(own, |watches| watches.address().clone());
        let login = config.login.read(config.database)?;
        let (inner, driver) = connect::connect(config, &address, &login, settings).await?;
        let inner = Arc::new(inner);
        // From here on the driver ends with this value, also if the connection is not used after all.
        let mut connection = Connection {
            inner: Arc::clone(&inner),
            driver,
            generation,
            broken,
            batches: Arc::new(Batches::new(MultiplexedConnection::clone(&inner))),
            under_way: AtomicUsize::new(0),
            received: AtomicU64::new(0),
            struck: AtomicBool::new(false),
            address,
            epoch: None,
            clock: Ok(Fence::NONE),
            watches,
            subscriptions: Arc::clone(&self.subscriptions),
            in_use: Arc::downgrade(&self.in_use),
        };
        if let Some(vet) = &config.vet {
            (vet.0)(&questions::facts(&inner, connection.batches.number()).await?)?;
        }
        let seen = unpoisoned(&self.flight).epoch.as_ref().map(|epoch| epoch.note.clone()).unwrap_or_default();
        match self.epoch(&inner, connection.batches.number(), &seen).await {
            Some(epoch) => connection.epoch = Some(epoch?),
            None => connection.clock = questions::clock(&inner, connection.batches.number()).await?,
        }
        if connection.is_broken() {
            return Err(error::taken_over(Sent::No));
        }
        let connection = Arc::new(connection);
        self.subscriptions.attach(generation, Arc::downgrade(&inner));
        *self.in_use.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Asks for the epoch of a server, where servers can take over from each other. See [`Epoch::of`].
    async fn epoch(&self, connection: &MultiplexedConnection, number: u64, seen: &str) -> Option<Result<Epoch>> {
        let key = self.note.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Some(Epoch::of(connection, number, [&key, seen], self.config.pause(), &self.config.clock).await)
    }

    fn raise_alarm(&self) {
        self.alarm.iter().for_each(Alarm::raise_all);
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, in_use, .. } = self;
        f.debug_struct("Dialer").field("config", config).field("in_use", in_use).finish_non_exhaustive()
    }
}

fn not_connected_within(bound: Duration) -> Error {
    Error::new(ErrorKind::TimedOut, format!("no connection within {bound:?}"))
}
