//! The store's connections.
//!
//! The driver has a pool of its own, which is not used: it asks the server after each use whether the connection is still
//! there, it connects again and again where an error should say why it can't, and no pool of it can tell a dropped future's
//! connection from a good one (decision 15). Here
//!
//! - every wait, for a connection or for an answer, ends at the operation's deadline: the driver has no such bound;
//! - some connections are only for renewals and releases, and others only for named locks;
//! - a [connection](Connection) that was left in doubt is never used again, and counts until the server is done with it.

use std::{fmt, pin::pin, sync::Arc, time::Duration};

use lockkit_core::{Error, Result, Token, store::Reconnections};
use sqlx::mysql::MySqlConnectOptions;
use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout_at},
};

use crate::{
    client::{
        connection::{Bound, Connection},
        identify,
        idle::Idle,
        raw::{RawConnection, Replicas},
    },
    config::MySqlConfig,
    wire::error::{self, Sent},
};

/// A connection that was not probed for longer than this is probed before it is used: servers close idle ones, and one
/// that was the primary may have become a replica.
const UNPROVEN: Duration = Duration::from_secs(5);
/// How often an operation that waits for a connection looks whether the time of one in doubt is over, and one that waits for a slot at
/// a row whether a slot has become free without its hearing of it.
pub(crate) const NEXT_LOOK: Duration = Duration::from_millis(100);

/// Which connections an operation may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionClass {
    /// Those for every operation.
    Common,
    /// Those for every operation, and those that are set aside for renewals and releases.
    Reserved,
    /// Those that keep a named lock, or wait for one.
    NamedLock,
}

/// The connections of a store.
pub(crate) struct Pool {
    options: MySqlConnectOptions,
    replicas: Replicas,
    common: Arc<Semaphore>,
    reserved: Arc<Semaphore>,
    named_lock: Arc<Semaphore>,
    idle: Arc<Idle>,
}

impl Pool {
    pub(crate) fn new(config: &MySqlConfig, replicas: Replicas, reconnections: Reconnections) -> Self {
        let all = usize::try_from(config.connections).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        let (reserved, named_lock) = ((all / 8).max(1), all / 4);
        let semaphore = |connections| Arc::new(Semaphore::new(connections));
        Self {
            options: config.driver_options(),
            replicas,
            common: semaphore(all - reserved - named_lock),
            reserved: semaphore(reserved),
            named_lock: semaphore(named_lock),
            idle: Arc::new(Idle::new(config.timeout, reconnections)),
        }
    }

    /// How many connections are for every operation, as long as none is in use.
    pub(crate) fn common_connections(&self) -> usize {
        self.common.available_permits()
    }

    /// The first connection, before which nothing is known of the server. If something else answers, that is said.
    ///
    /// # Errors
    /// As [`connection`](Self::connection), and [`Misconfigured`](lockkit_core::ErrorKind::Misconfigured) if it is no
    /// MySQL server.
    pub(crate) async fn first_connection(&self, config: &MySqlConfig, bound: Bound) -> Result<Connection> {
        tokio::select! {
            connected = self.connection(ConnectionClass::Common, bound) => connected,
            error = identify::other_server(config) => Err(error),
        }
    }

    /// A connection that can be trusted, or a new one.
    ///
    /// # Errors
    /// When there is none by the deadline; without effect.
    pub(crate) async fn connection(&self, class: ConnectionClass, bound: Bound) -> Result<Connection> {
        let permit = match self.permit(class) {
            Some(permit) => permit,
            None => self.permit_by(class, bound).await?,
        };
        self.trusted(Some(permit), bound).await
    }

    /// Waits for the right to a connection, until the deadline. Meanwhile it looks for rights whose time is over: there may be nobody else who
    /// does.
    async fn permit_by(&self, class: ConnectionClass, bound: Bound) -> Result<OwnedSemaphorePermit> {
        let mut waiting = pin!(self.wait_for_permit(class));
        loop {
            let until = bound.at.min(Instant::now() + NEXT_LOOK);
            if let Ok(permit) = timeout_at(until, waiting.as_mut()).await {
                return permit.ok_or_else(|| error::busy(bound.whole));
            }
            if until >= bound.at {
                return Err(error::busy(bound.whole));
            }
            self.idle.in_flight.give_back();
        }
    }

    /// The same for work in the background that was [given](Connection::give_up) the right to one.
    ///
    /// # Errors
    /// As [`connection`](Self::connection).
    pub(crate) async fn background_connection(&self, bound: Bound) -> Result<Connection> {
        self.trusted(None, bound).await
    }

    /// The same without waiting for others: none if all are in use, or if the server can't be reached.
    pub(crate) async fn spare_connection(&self, class: ConnectionClass, bound: Bound) -> Option<Connection> {
        self.trusted(Some(self.permit(class)?), bound).await.ok()
    }

    /// The connection of a permit, if it is to keep that.
    ///
    /// # Errors
    /// When the server can't be reached by the deadline; without effect.
    async fn trusted(&self, permit: Option<OwnedSemaphorePermit>, bound: Bound) -> Result<Connection> {
        let connection = |raw, breaks, permit| Connection::new(raw, breaks, bound, permit, Arc::clone(&self.idle));
        let mut breaks = self.idle.breaks();
        while let Some((mut raw, broken)) = self.idle.pop(Handle::current().id(), self.free()) {
            if broken == breaks && raw.is_proven(UNPROVEN) || self.is_sound(&mut raw, bound).await {
                return Ok(connection(raw, breaks, permit));
            }
            self.idle.broke();
            breaks = self.idle.breaks();
        }
        let open = timeout_at(bound.at, RawConnection::open(&self.options, self.replicas)).await;
        match open.map_err(|_| Error::no_answer(bound.whole, Sent::No))?? {
            Ok(raw) => Ok(connection(raw, breaks, permit)),
            Err(unfit) => {
                // So it is for the connections that there are.
                self.idle.broke();
                Err(unfit)
            }
        }
    }

    /// For how many connections nobody has the right.
    fn free(&self) -> usize {
        [&self.common, &self.reserved, &self.named_lock].map(|rights| rights.available_permits()).iter().sum()
    }

    /// Probes an idle connection. A dead one must not cost the whole time.
    async fn is_sound(&self, raw: &mut RawConnection, bound: Bound) -> bool {
        let now = Instant::now();
        let until = now + bound.at.saturating_duration_since(now) / 3;
        raw.prove(until, self.replicas).await.is_ok()
    }

    /// Waits until the server has answered every statement that was sent for the claim and given up.
    ///
    /// # Errors
    /// When it has not by the deadline. What was given up may still come to have an effect.
    pub(crate) async fn settled(&self, token: &Token, bound: Bound) -> Result<()> {
        let settled = timeout_at(bound.at, self.idle.in_flight.settled(token)).await;
        settled.map_err(|_| Error::no_answer(bound.whole, Sent::Yes))
    }

    /// The right to a connection, if not all are in use.
    fn permit(&self, class: ConnectionClass) -> Option<OwnedSemaphorePermit> {
        let (first, second) = self.semaphores(class);
        let permit = |semaphore: &Arc<Semaphore>| Arc::clone(semaphore).try_acquire_owned().ok();
        let any = || permit(first).or_else(|| permit(second?));
        any().or_else(|| {
            self.idle.in_flight.give_back();
            any()
        })
    }

    /// `None` never comes: the semaphores are not closed.
    async fn wait_for_permit(&self, class: ConnectionClass) -> Option<OwnedSemaphorePermit> {
        let (first, second) = self.semaphores(class);
        let permit = |semaphore: &Arc<Semaphore>| Arc::clone(semaphore).acquire_owned();
        let Some(second) = second else { return permit(first).await.ok() };
        tokio::select! {
            biased;
            permit = permit(second) => permit.ok(),
            permit = permit(first) => permit.ok(),
        }
    }

    /// What an operation may take a permit from.
    fn semaphores(&self, class: ConnectionClass) -> (&Arc<Semaphore>, Option<&Arc<Semaphore>>) {
        match class {
            ConnectionClass::Common => (&self.common, None),
            ConnectionClass::Reserved => (&self.common, Some(&self.reserved)),
            ConnectionClass::NamedLock => (&self.named_lock, None),
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool").field("idle", &self.idle.len()).finish_non_exhaustive()
    }
}
