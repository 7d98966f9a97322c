//! Making the connection that a [`Link`](crate::client::connection::Link) watches.
//!
//! A task makes it, so that callers who lose patience don't make the next one start over: if connecting takes longer than
//! they come apart, nobody would ever be connected.

use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Alarm, Error, ErrorKind, Fence, FenceClock, Result};
use redis::{
    AsyncConnectionConfig, PushInfo, PushKind,
    aio::{MultiplexedConnection, SendError},
};
use tokio::{sync::watch, task::AbortHandle, time::timeout};

use crate::{
    client::{
        batch::{Batches, QUEUE},
        dial,
        epoch::Reign,
        sentinel::{OnSwitch, Place, Watches},
        stream::UnderWay,
        subscriptions::Wake,
        timer::Timers,
    },
    config::{RedisConfig, Topology, secret},
    wire::{
        error::{self, Sent},
        server,
    },
};

/// How many bytes may wait to be written before no more requests are taken.
const WRITE_BUFFER: usize = 256 * 1024;

/// What the task that makes a connection shares with those who use it.
pub(crate) struct Line {
    pub(crate) config: RedisConfig,
    /// Where the server's note about its reign is, where servers can take over from each other.
    pub(crate) note: Option<Arc<NoteKey>>,
    /// Raised when another server seems to have taken over.
    alarm: Option<Alarm>,
    pub(crate) wake: Arc<Wake>,
    pub(crate) current: RwLock<Option<Arc<Connection>>>,
    flight: Mutex<Flight>,
}

/// The key of a server's note about its reign. In a cluster it changes when its slot leaves the server.
pub(crate) type NoteKey = Mutex<String>;

/// What comes of an attempt to connect.
type Attempt = watch::Receiver<Option<Result<Arc<Connection>>>>;

#[derive(Debug, Default)]
struct Flight {
    epoch: u64,
    /// The one under way.
    attempt: Option<Attempt>,
    /// The reign of the latest connection.
    reign: Option<Reign>,
}

/// A connection that was made, dead or alive.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) inner: Arc<MultiplexedConnection>,
    /// The task that moves the bytes. It ends with the last user of this value, whatever is under way.
    driver: AbortHandle,
    pub(crate) epoch: u64,
    pub(crate) broken: Arc<AtomicBool>,
    pub(crate) batches: Arc<Batches>,
    pub(crate) under_way: UnderWay,
    pub(crate) timers: Timers,
    pub(crate) received: AtomicU64,
    pub(crate) struck: AtomicBool,
    place: Place,
    reign: Option<Reign>,
    /// The server's clock when the connection was made, where no other server can take over; or why it is not known.
    clock: Result<Fence>,
    /// The sentinels, if it was they who named the server.
    watches: Option<Watches>,
}

impl Line {
    /// See [`Link::new`](crate::client::connection::Link::new).
    pub(crate) fn new(config: RedisConfig, note: Option<Arc<NoteKey>>, alarm: Option<Alarm>, wake: Arc<Wake>) -> Self {
        Self { config, note, alarm, wake, current: RwLock::default(), flight: Mutex::default() }
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
        let former = std::mem::replace(&mut flight.reign, connection.reign.clone());
        if former.is_some_and(|former| connection.reign().is_none_or(|reign| reign.mark != former.mark)) {
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
            .set_write_backpressure_boundary(WRITE_BUFFER);
        let config = &self.config;
        let watches = match &config.topology {
            Topology::Sentinel { .. } => Some(Watches::begin(config, on_switch).await?),
            Topology::Single | Topology::Cluster { .. } => None,
        };
        let own = || (config.host.clone(), config.port);
        let place = watches.as_ref().map_or_else(own, |watches| watches.place().clone());
        let login = secret::login(&config.login, config.database)?;
        let under_way = UnderWay::default();
        let (inner, driver) = dial::connect(config, &place, &login, settings, Arc::clone(&under_way)).await?;
        let inner = Arc::new(inner);
        // From here on the driver ends with this value, also if the connection is not used after all.
        let mut connection = Connection {
            inner: Arc::clone(&inner),
            driver,
            epoch,
            broken,
            batches: Arc::new(Batches::new(MultiplexedConnection::clone(&inner))),
            under_way,
            timers: Timers::new(),
            received: AtomicU64::new(0),
            struck: AtomicBool::new(false),
            place,
            reign: None,
            clock: Ok(Fence::NONE),
            watches,
        };
        if let Some(vet) = &config.vet {
            (vet.0)(&server::ask(&inner).await?)?;
        }
        let seen = self.flight().reign.as_ref().map(|reign| reign.note.clone()).unwrap_or_default();
        match self.reign(&inner, &seen).await {
            Some(reign) => connection.reign = Some(reign?),
            None => connection.clock = server::clock(&inner).await?,
        }
        if connection.broken.load(Ordering::Acquire) {
            return Err(error::taken_over(Sent::No));
        }
        let connection = Arc::new(connection);
        self.wake.attach(epoch, Arc::downgrade(&inner));
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&connection));
        Ok(connection)
    }

    /// Asks for the reign of a server, where servers can take over from each other. See [`Reign::of`].
    pub(crate) async fn reign(&self, connection: &MultiplexedConnection, seen: &str) -> Option<Result<Reign>> {
        let key = self.note.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Some(Reign::of(connection, &key, seen, self.config.pause(), &self.config.clock).await)
    }

    pub(crate) fn raise_alarm(&self) {
        self.alarm.iter().for_each(Alarm::raise_all);
    }

    fn flight(&self) -> MutexGuard<'_, Flight> {
        self.flight.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connection {
    /// Whether there is one operation under way at most.
    pub(crate) fn is_alone(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) <= 1
    }

    /// The server's time in charge, where servers can take over from each other.
    pub(crate) fn reign(&self) -> Option<&Reign> {
        self.reign.as_ref()
    }

    /// What a grant on this connection has to be above, whatever the counter says.
    ///
    /// # Errors
    /// If the server's clock is needed, and this user may not ask for it.
    pub(crate) fn floor(&self, clock: FenceClock) -> Result<Fence> {
        match (&self.reign, clock) {
            (Some(reign), _) => Ok(reign.floor),
            (None, FenceClock::Store) => self.clock.clone(),
            (None, FenceClock::Floor) => Ok(Fence::NONE),
        }
    }

    /// Whether the other leads to the same server, in the same reign.
    pub(crate) fn is_same_server(&self, other: &Self) -> bool {
        let id = |connection: &Self| connection.reign.as_ref().map(|reign| reign.id.clone());
        self.place == other.place && id(self) == id(other)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

fn not_connected_within(bound: Duration) -> Error {
    Error::new(ErrorKind::TimedOut, format!("no connection within {bound:?}"))
}
