//! The store: five questions, each one round trip.

pub(crate) mod acquire;
pub(crate) mod attempt;
pub(crate) mod check;
pub(crate) mod inspect;
pub(crate) mod order;
pub(crate) mod ordered;
pub(crate) mod records;
pub(crate) mod release;
pub(crate) mod renew;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Alarm, Attempt, Capability, Claim, Fencing, KeyState, Liveness, LockStore, Query, Release, Renewal,
    Renewed, Result, StoreInfo, Waiting,
    store::{Reconnections, Records, operation_bound},
};

use crate::{
    client::nodes::Nodes,
    config::{RedisConfig, Topology},
    store::ordered::Ordered,
    wire::name::Names,
};

/// A lock store on one Redis or Valkey server, on the primary that sentinels name, or on a cluster.
pub struct RedisStore {
    pub(crate) info: StoreInfo,
    pub(crate) names: Names,
    pub(crate) nodes: Nodes,
    pub(crate) timeout: Duration,
    ordered: Ordered,
}

impl RedisStore {
    /// What a store of one server can do, for tests without a server: [`MemoryStore::like`](lockkit_core::MemoryStore::like).
    /// [`info`](LockStore::info) says what a connected store can do.
    pub const CAPABILITY: Capability = can(StoreInfo::LONGEST_TTL);

    /// Connects, and checks that the server can keep locks.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](lockkit_core::ErrorKind::InvalidInput) for a wrong configuration; `Misconfigured` if a
    /// file or variable of it can't be read, or if another kind of server answers;
    /// [`ErrorKind::Unsupported`](lockkit_core::ErrorKind::Unsupported) for a server that is a replica, part of a cluster (if
    /// none was named) or too old; `Denied`, `Unavailable` or `TimedOut` if it can't be asked.
    pub async fn connect(config: RedisConfig) -> Result<Self> {
        let mut store = Self::new(config)?;
        store.info.warnings = store.check().await?.into();
        Ok(store)
    }

    /// Connects to the server that a URL names. See [`RedisConfig::from_url`] for its form.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn from_url(url: &str) -> Result<Self> {
        Self::connect(RedisConfig::from_url(url)?).await
    }

    /// A store that connects when it is first used, and does not check the server: for a quorum, whose members may be
    /// down when it starts.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](lockkit_core::ErrorKind::InvalidInput) for a wrong configuration.
    pub fn new(config: RedisConfig) -> Result<Self> {
        let names = config.check()?;
        let (scheme, fencing) = match config.topology {
            Topology::Single => ("redis", Fencing::Hybrid),
            // A former primary that still serves somebody counts on from where it was.
            Topology::Sentinel { .. } => ("redis+sentinel", Fencing::BestEffort),
            Topology::Cluster { .. } => ("redis+cluster", Fencing::BestEffort),
        };
        let alarm = (!config.is_single()).then(Alarm::new);
        let info = StoreInfo {
            scheme,
            name: config.display_name().into(),
            capability: Capability { fencing, ..can(config.max_ttl) },
            clock: Arc::clone(&config.clock),
            alarm: alarm.clone(),
            reconnections: Reconnections::default(),
            warnings: Arc::default(),
        };
        let timeout = config.timeout;
        let nodes = Nodes::new(config, &names, alarm, info.reconnections.clone());
        Ok(Self { info, names, nodes, timeout, ordered: Ordered::default() })
    }

    /// What the server's settings put at risk, in words; known only after [`connect`](Self::connect).
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.info.warnings
    }

    /// Asks the server whether it can keep locks; what its settings put at risk, in words.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn check(&self) -> Result<Vec<String>> {
        check::check(self).await.map_err(|e| e.at("connect", None, &self.info.name))
    }
}

#[async_trait]
impl LockStore for RedisStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let outcome = acquire::acquire(self, request).await;
        outcome.map_err(|e| e.at("acquire", Some(&request.claim.key), &self.info.name))
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

impl RedisStore {
    /// The [bound](operation_bound) on an operation that asks for a lease of `ttl`.
    pub(crate) fn bound(&self, ttl: Duration) -> Duration {
        operation_bound(self.timeout, ttl)
    }
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore").field("name", &self.info.name).field("names", &self.names).finish_non_exhaustive()
    }
}

/// The capability of a store on one server with this longest ttl.
const fn can(max_ttl: Duration) -> Capability {
    let liveness = Liveness { ttl: Some(StoreInfo::SHORTEST_TTL..=max_ttl), session: None };
    Capability::all_kinds(Waiting::Notify, liveness, Fencing::Hybrid)
}
