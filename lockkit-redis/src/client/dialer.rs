//! Making the connection to a server when it is needed, and the next one when it is dead.
//!
//! The operation that finds no connection has one made, others that come meanwhile wait for the same attempt, and if it
//! fails they all fail with its error ([`SingleFlight`](lockkit_core::store::SingleFlight)).

use std::{
    fmt,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    Alarm, Error, ErrorKind, Fence, Result,
    store::{Reconnections, unpoisoned},
};
use redis::{
    AsyncConnectionConfig, PushInfo, PushKind,
    aio::{MultiplexedConnection, SendError},
};
use tokio::time::{Instant, timeout};

use crate::{
    client::{
        batch::{Batches, QUEUE},
        connect,
        connection::{Connection, SharedConnection},
        epoch::Epoch,
        note::NoteKey,
        sentinel::{OnSwitch, Watches},
        subscriptions::Subscriptions,
    },
    config::{RedisConfig, Topology},
    wire::{
        error::{self, Sent},
        server::{self, ServerFacts},
    },
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
    /// The connection in use.
    shared: Arc<SharedConnection>,
    reconnections: Reconnections,
    /// How many were begun.
    generation: AtomicU64,
    /// The epoch of the latest connection.
    epoch: Mutex<Option<Epoch>>,
    /// Which run of the server was admitted last, if servers are vetted.
    admitted: Arc<Mutex<Admitted>>,
}

/// A run of the server that was admitted, over which connection, and when that broke.
#[derive(Debug, Default)]
struct Admitted {
    run_id: String,
    generation: u64,
    ended: Option<Instant>,
}

impl Dialer {
    /// A dialer that has no connection yet. `note` is where the server's note about its epoch is, and `alarm` is for the
    /// case that it ends, where servers can take over from each other.
    pub(crate) fn new(
        config: RedisConfig,
        note: Option<Arc<NoteKey>>,
        alarm: Option<Alarm>,
        subscriptions: Arc<Subscriptions>,
        reconnections: Reconnections,
    ) -> Arc<Self> {
        let (shared, generation, epoch, admitted) = Default::default();
        Arc::new(Self { config, note, alarm, subscriptions, shared, reconnections, generation, epoch, admitted })
    }

    /// The connection, made now if there is none.
    ///
    /// # Errors
    /// Why there is none. Never with an effect, for nothing was sent.
    ///
    /// # Cancellation
    /// The attempt goes on, for whoever comes next.
    pub(crate) fn connection(self: &Arc<Self>) -> impl Future<Output = Result<Arc<Connection>>> + Send {
        self.connection_within(self.config.timeout)
    }

    /// The same for a caller that waits for it no longer than `bound`.
    ///
    /// # Errors
    /// As [`connection`](Self::connection).
    ///
    /// # Cancellation
    /// As [`connection`](Self::connection).
    pub(crate) async fn connection_within(self: &Arc<Self>, bound: Duration) -> Result<Arc<Connection>> {
        if let Some(connection) = self.current() {
            connection.watches.iter().for_each(Watches::mend);
            return Ok(connection);
        }
        let is_alive = |connection: &Arc<Connection>| connection.stays();
        let dialer = Arc::clone(self);
        // The bound of this call is the one around it. It is rarely waited for: in a box it does not make the futures of all
        // operations larger.
        let made: Pin<Box<dyn Future<Output = Result<Arc<Connection>>> + Send + '_>> =
            Box::pin(self.shared.get(is_alive, self.config.timeout.saturating_mul(2), || dialer.attempt_next()));
        timeout(bound, made).await.unwrap_or_else(|_| Err(not_connected_within(bound)))
    }

    /// The connection, unless it is known to be dead.
    pub(crate) fn current(&self) -> Option<Arc<Connection>> {
        self.shared.present(|connection| connection.stays())
    }

    /// Has the server's note written at the key that it has now, for those who connect from now on. Returns at once.
    pub(crate) fn write_note(self: &Arc<Self>) {
        let Some(connection) = self.current() else { return };
        let dialer = Arc::clone(self);
        tokio::spawn(async move {
            let seen = connection.epoch().map(|epoch| epoch.note.clone()).unwrap_or_default();
            let asked = dialer.epoch(&connection, &seen);
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

    /// How many replicas have to acknowledge what is granted.
    pub(crate) fn replicas(&self) -> u32 {
        self.config.replicas
    }

    /// Where the server is, if it is always the same.
    pub(crate) fn host(&self) -> &str {
        &self.config.host
    }

    /// The next attempt. It has its number from now on, whenever it begins.
    fn attempt_next(self: Arc<Self>) -> impl Future<Output = Result<Arc<Connection>>> {
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        self.attempt(generation)
    }

    /// Connects, and takes note of who is in charge now.
    async fn attempt(self: Arc<Self>, generation: u64) -> Result<Arc<Connection>> {
        let bound = self.config.timeout;
        let made = timeout(bound, self.open(generation)).await.unwrap_or_else(|_| Err(not_connected_within(bound)))?;
        let former = std::mem::replace(&mut *unpoisoned(&self.epoch), made.epoch.clone());
        if former.is_some_and(|former| made.epoch().is_none_or(|epoch| epoch.mark != former.mark)) {
            self.raise_alarm();
        }
        Ok(made)
    }

    async fn open(&self, generation: u64) -> Result<Arc<Connection>> {
        let config = &self.config;
        let broken = Arc::new(AtomicBool::new(false));
        let (settings, on_switch) = self.settings(generation, &broken);
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
            reconnections: self.reconnections.clone(),
            address,
            epoch: None,
            clock: Ok(Fence::NONE),
            watches,
            subscriptions: Arc::clone(&self.subscriptions),
            shared: Arc::downgrade(&self.shared),
        };
        self.vet(&mut connection).await?;
        if connection.is_broken() {
            return Err(error::taken_over(Sent::No));
        }
        self.subscriptions.attach(generation, Arc::downgrade(&connection.batches));
        Ok(Arc::new(connection))
    }

    /// What the driver is told for a connection; and what is to happen when another server takes over.
    fn settings(&self, generation: u64, broken: &Arc<AtomicBool>) -> (AsyncConnectionConfig, OnSwitch) {
        let on_switch: OnSwitch = {
            let (subscriptions, broken) = (Arc::clone(&self.subscriptions), Arc::clone(broken));
            let alarm = self.alarm.clone();
            Arc::new(move || {
                broken.store(true, Ordering::Release);
                subscriptions.detach(generation);
                alarm.iter().for_each(Alarm::raise_all);
            })
        };
        let receiver = {
            // A server that dies is a server that another may take the place of.
            let (subscriptions, end) = (Arc::clone(&self.subscriptions), Arc::clone(&on_switch));
            let admitted = Arc::clone(&self.admitted);
            move |push: PushInfo| {
                if push.kind == PushKind::Disconnection {
                    unpoisoned(&admitted).end(generation);
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
        (settings, on_switch)
    }

    /// Asks a server what has to be known of it before it is used.
    async fn vet(&self, connection: &mut Connection) -> Result<()> {
        let bound = self.config.timeout;
        if let Some(vet) = &self.config.vet {
            let replies = connection.run_all(&server::questions(), bound, Sent::No).await?;
            let facts = unpoisoned(&self.admitted).doubt(ServerFacts::read_replies(replies)?);
            (vet.0)(&facts)?;
            *unpoisoned(&self.admitted) =
                Admitted { run_id: facts.run_id, generation: connection.generation, ended: None };
        }
        let seen = unpoisoned(&self.epoch).as_ref().map(|epoch| epoch.note.clone()).unwrap_or_default();
        match self.epoch(connection, &seen).await {
            Some(epoch) => connection.epoch = Some(epoch?),
            None => {
                connection.clock = server::clock(connection.run_one(redis::cmd("TIME"), bound, Sent::No).await?)?;
            }
        }
        Ok(())
    }

    /// Asks for the epoch of a server, where servers can take over from each other. See [`Epoch::question`].
    async fn epoch(&self, connection: &Connection, seen: &str) -> Option<Result<Epoch>> {
        let ask = |key: String| async move {
            let question = Epoch::question(&key, seen, self.config.pause());
            let reply = connection.run_one(question, self.config.timeout, Sent::No).await?;
            Epoch::answer(reply, self.config.clock.now())
        };
        Some(self.note.as_ref()?.ask(ask).await)
    }

    fn raise_alarm(&self) {
        self.alarm.iter().for_each(Alarm::raise_all);
    }
}

impl Admitted {
    fn end(&mut self, generation: u64) {
        if self.generation == generation {
            self.ended.get_or_insert_with(Instant::now);
        }
    }

    /// A server tells its uptime by its wall clock, which may have been set forward since it started. A run that follows upon
    /// another is no older than the end of the connection to that; and if nobody saw that end, it begins to be old now.
    fn doubt(&mut self, mut facts: ServerFacts) -> ServerFacts {
        if !self.run_id.is_empty() && facts.run_id != self.run_id {
            let ended = *self.ended.get_or_insert_with(Instant::now);
            facts.uptime = facts.uptime.min(ended.elapsed());
        }
        facts
    }
}

impl fmt::Debug for Dialer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, shared, .. } = self;
        f.debug_struct("Dialer").field("config", config).field("shared", shared).finish_non_exhaustive()
    }
}

fn not_connected_within(bound: Duration) -> Error {
    Error::new(ErrorKind::TimedOut, format!("no connection within {bound:?}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_run_that_follows_upon_another_grows_old_from_its_end_on() {
        let hours = |hours: u64| Duration::from_secs(hours * 3600);
        let facts = |run_id: &str| ServerFacts { run_id: run_id.into(), uptime: hours(9), ..ServerFacts::default() };
        let first = Admitted::default().doubt(facts("a"));
        assert_eq!(first.uptime, hours(9), "none is known before");
        for is_seen in [true, false] {
            let mut admitted = Admitted { run_id: "a".into(), generation: 7, ended: None };
            assert_eq!(admitted.doubt(facts("a")).uptime, hours(9));
            admitted.end(6);
            if is_seen {
                admitted.end(7);
            }
            tokio::time::advance(hours(1)).await;
            let seen = if is_seen { hours(1) } else { Duration::ZERO };
            assert_eq!(admitted.doubt(facts("b")).uptime, seen);
            tokio::time::advance(hours(1)).await;
            assert_eq!(admitted.doubt(facts("b")).uptime, seen + hours(1), "refused before, and asked again");
            tokio::time::advance(hours(9)).await;
            assert_eq!(admitted.doubt(facts("b")).uptime, hours(9));
        }
    }
}
