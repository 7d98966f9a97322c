//! Making sure that replicas have what was granted (`WAIT`).
//!
//! `WAIT` blocks its connection until the replicas have acknowledged what that connection wrote last, so it has a
//! connection of its own, which writes something first: replication is in order, so whoever has that has all that was
//! written before, by whomever. One `WAIT` serves all who came before it was sent.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Error, ErrorKind, Result};
use redis::{Pipeline, Value};

use crate::{
    client::{connection::Connection, dialer::Dialer, note::NoteKey, rounds::Rounds},
    config::RedisConfig,
    wire::{
        error::{self, Sent},
        name,
    },
};

/// For how long the key stays that is written: longer than any lease, so that it is there when one is renewed.
const LIFE_MS: u32 = 3_600_000;

/// The replicas of one server.
#[derive(Debug)]
pub(crate) struct Replicas {
    asking: Arc<ReplicaWait>,
    /// One `WAIT` each.
    rounds: Rounds<Result<Acknowledged>>,
}

/// How many replicas acknowledged, and over which connection it was asked.
type Acknowledged = (u32, Arc<Connection>);

/// How replicas are asked.
#[derive(Debug)]
struct ReplicaWait {
    wanted: u32,
    within: Duration,
    timeout: Duration,
    dialer: Arc<Dialer>,
    /// Where the server's note is: what is written lies in the same slot of a cluster.
    note: Arc<NoteKey>,
}

impl Replicas {
    /// As many replicas as the configuration says have to acknowledge. The dialer is for nothing else.
    pub(crate) fn new(config: &RedisConfig, dialer: Arc<Dialer>, note: Arc<NoteKey>) -> Self {
        let RedisConfig { replicas: wanted, replica_timeout: within, timeout, .. } = *config;
        Self { asking: Arc::new(ReplicaWait { wanted, within, timeout, dialer, note }), rounds: Rounds::new() }
    }

    /// Waits until enough replicas have what was answered on this connection until now.
    ///
    /// # Errors
    /// `Unavailable` if too few acknowledged in time, or if the server is not the same any more; that of the question.
    pub(crate) async fn confirm(&self, of: &Connection) -> Result<()> {
        let bound = self.asking.within + self.asking.timeout;
        let wait = || {
            let asking = Arc::clone(&self.asking);
            async move { asking.wait().await }
        };
        // The round before may have to end first, and this one need a connection: it goes on, for whoever comes next.
        let (count, asked) = self.rounds.join(bound, wait).await??;
        if !asked.is_same_server(of) {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "another server took over before the replicas acknowledged",
            ));
        }
        let ReplicaWait { wanted, within, .. } = *self.asking;
        if count < wanted {
            let message = format!("{count} of {wanted} replicas acknowledged within {within:?}");
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        Ok(())
    }
}

impl ReplicaWait {
    async fn wait(&self) -> Result<Acknowledged> {
        let connection = self.dialer.connection().await?;
        let count = self.note.ask(|note| self.wait_on(&connection, name::mark_of_note(&note))).await?;
        Ok((count, connection))
    }

    async fn wait_on(&self, connection: &Connection, key: String) -> Result<u32> {
        let mut requests = Pipeline::with_capacity(3);
        requests.cmd("SET").arg(&key).arg("").arg("PX").arg(LIFE_MS);
        // A server that is full refuses the first, but not to extend what is there. Either is a write.
        requests.cmd("PEXPIRE").arg(&key).arg(LIFE_MS);
        // Zero would mean forever.
        let within = u64::try_from(self.within.as_millis()).unwrap_or(u64::MAX).max(1);
        requests.cmd("WAIT").arg(self.wanted).arg(within);
        let bound = self.within + self.timeout;
        let replies = connection.run_all(&requests, bound, Sent::ReadOnly).await?;
        let [made, extended, reply] = <[Value; 3]>::try_from(replies).map_err(|_| error::odd_reply(Sent::ReadOnly))?;
        if connection.accept(extended, Sent::ReadOnly)? != Value::Int(1) {
            connection.accept(made, Sent::ReadOnly)?;
        }
        match connection.accept(reply, Sent::ReadOnly)? {
            Value::Int(count) => Ok(u32::try_from(count).unwrap_or(0)),
            _ => Err(error::odd_reply(Sent::ReadOnly)),
        }
    }
}
