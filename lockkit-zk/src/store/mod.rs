//! The store: five questions.

pub(crate) mod acquire;
pub(crate) mod attempt;
pub(crate) mod directory;
pub(crate) mod enter;
pub(crate) mod grant;
pub(crate) mod in_place;
pub(crate) mod inspect;
pub(crate) mod keep;
pub(crate) mod records;
pub(crate) mod release;
pub(crate) mod renew;
pub(crate) mod replace;

pub(crate) mod wait;
pub(crate) mod window;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Alarm, Attempt, Capability, Claim, Fencing, KeyState, Liveness, LockStore, Query, Release, Renewal,
    Renewed, Result, Resume, StoreInfo, Waiting,
    store::{Reconnections, Records},
};

use crate::{
    client::{session::Session, sessions::Sessions},
    config::ZkConfig,
};

/// A lock store on a ZooKeeper ensemble.
pub struct ZkStore {
    info: StoreInfo,
    sessions: Sessions,
}

impl ZkStore {
    /// What a store can do, for tests without a server: [`MemoryStore::like`](lockkit_core::MemoryStore::like).
    /// [`info`](LockStore::info) says what a connected store can do.
    pub const CAPABILITY: Capability = can(ZkConfig::SESSION);

    /// Connects.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](lockkit_core::ErrorKind::InvalidInput) for a wrong configuration; `Denied`, `Unavailable` or `TimedOut` if there is no session
    /// to be had.
    pub async fn connect(config: ZkConfig) -> Result<Self> {
        let store = Self::new(config)?;
        store.sessions.session().await.map_err(|e| e.at("connect", None, &store.info.name))?;
        Ok(store)
    }

    /// Connects to the ensemble that a URL names. See [`ZkConfig::from_url`] for its form.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn from_url(url: &str) -> Result<Self> {
        Self::connect(ZkConfig::from_url(url)?).await
    }

    /// A store that connects when it is first used.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](lockkit_core::ErrorKind::InvalidInput) for a wrong configuration.
    pub fn new(config: ZkConfig) -> Result<Self> {
        let (names, alarm) = (config.check()?, Alarm::new());
        let info = StoreInfo {
            scheme: "zk",
            name: config.display_name().into(),
            capability: can(config.session),
            clock: config.clock.clone(),
            alarm: Some(alarm.clone()),
            reconnections: Reconnections::default(),
            warnings: [].into(),
        };
        Ok(Self { info, sessions: Sessions::new(config, names, alarm) })
    }

    fn timeout(&self) -> Duration {
        self.sessions.config.timeout
    }

    async fn session(&self) -> Result<Arc<Session>> {
        self.sessions.session().await
    }

    #[cfg(test)]
    pub(crate) fn sessions(&self) -> &Sessions {
        &self.sessions
    }
}

#[async_trait]
impl LockStore for ZkStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        acquire::acquire(self, request).await.map_err(|e| e.at("acquire", Some(&request.claim.key), &self.info.name))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.info.renewals_at(renewals, renew::renew(self, renewals).await)
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        release::release(self, claim).await.map_err(|e| e.at("release", Some(&claim.key), &self.info.name))
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        inspect::inspect(self, query).await.map_err(|e| e.at("inspect", None, &self.info.name))
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        vec![Box::new(self)]
    }
}

impl fmt::Debug for ZkStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkStore").field("sessions", &self.sessions).finish_non_exhaustive()
    }
}

/// The capability of a store with sessions of this length.
const fn can(session: Duration) -> Capability {
    let liveness = Liveness { ttl: None, session: Some(session) };
    Capability { resume: Resume::WhileSession, ..Capability::all_kinds(Waiting::Queue, liveness, Fencing::Strict) }
}
