//! Making sure that replicas have what was granted (`WAIT`).
//!
//! `WAIT` blocks its connection until the replicas have acknowledged what that connection wrote last, so it has a
//! connection of its own, which writes something first: replication is in order, so whoever has that has all that was
//! written before, by whomever. One `WAIT` serves all who came before it was sent.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Error, ErrorKind, Result};
use redis::{Pipeline, Value};
use tokio::sync::Mutex;

use crate::{
    config::RedisConfig,
    error::{self, Sent},
    link::{Connection, Link},
};

/// For how long the key stays that is written.
const LIFE_MS: u32 = 60_000;

/// The replicas of one server.
#[derive(Debug)]
pub(crate) struct Replicas {
    wanted: u32,
    within: Duration,
    timeout: Duration,
    link: Link,
    /// What is written.
    key: String,
    /// How many rounds were begun.
    begun: AtomicU64,
    last: Mutex<Round>,
}

/// One `WAIT`.
#[derive(Debug, Default)]
struct Round {
    number: u64,
    outcome: Option<Result<(u32, Arc<Connection>)>>,
}

impl Replicas {
    /// As many replicas as the configuration says have to acknowledge. The link and the key are for nothing else.
    pub(crate) fn new(config: &RedisConfig, link: Link, key: String) -> Self {
        let RedisConfig { replicas: wanted, replica_timeout: within, timeout, .. } = *config;
        Self { wanted, within, timeout, link, key, begun: AtomicU64::new(0), last: Mutex::default() }
    }

    /// Waits until enough replicas have what was answered on this connection until now.
    ///
    /// # Errors
    /// `Unavailable` if too few acknowledged in time, or if the server is not the same any more.
    pub(crate) async fn confirm(&self, of: &Connection) -> Result<()> {
        let (count, asked) = self.round().await?;
        if !asked.is_same_server(of) {
            return Err(Error::new(ErrorKind::Unavailable, "another server took over before replicas had it"));
        }
        if count < self.wanted {
            let (wanted, within) = (self.wanted, self.within);
            let message = format!("{count} of {wanted} replicas have it after {within:?}");
            return Err(Error::new(ErrorKind::Unavailable, message));
        }
        Ok(())
    }

    /// A round that begins from now on, run by whoever comes first.
    async fn round(&self) -> Result<(u32, Arc<Connection>)> {
        let mine = self.begun.load(Ordering::SeqCst) + 1;
        let mut last = self.last.lock().await;
        if last.number >= mine
            && let Some(outcome) = &last.outcome
        {
            return outcome.clone();
        }
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let outcome = self.wait().await;
        *last = Round { number, outcome: Some(outcome.clone()) };
        outcome
    }

    async fn wait(&self) -> Result<(u32, Arc<Connection>)> {
        let connection = self.link.connection().await?;
        let mut requests = Pipeline::with_capacity(2);
        requests.cmd("SET").arg(&self.key).arg("").arg("PX").arg(LIFE_MS);
        // Zero would mean forever.
        let within = u64::try_from(self.within.as_millis()).unwrap_or(u64::MAX).max(1);
        requests.cmd("WAIT").arg(self.wanted).arg(within);
        let bound = self.within + self.timeout;
        let replies = self.link.run_all(&connection, None, &requests, bound, Sent::ReadOnly).await?;
        let [written, reply] = <[Value; 2]>::try_from(replies).map_err(|_| error::odd_reply(Sent::ReadOnly))?;
        self.link.accept(&connection, written, Sent::ReadOnly)?;
        match self.link.accept(&connection, reply, Sent::ReadOnly)? {
            Value::Int(count) => Ok((u32::try_from(count).unwrap_or(0), connection)),
            _ => Err(error::odd_reply(Sent::ReadOnly)),
        }
    }
}
