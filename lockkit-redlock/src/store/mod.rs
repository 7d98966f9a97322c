//! The store: a quorum over any stores.

pub(crate) mod acquire;
pub(crate) mod attempt;
pub(crate) mod check;
pub(crate) mod inspect;
pub(crate) mod late;
pub(crate) mod release;
pub(crate) mod renew;
pub(crate) mod wait;

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Claim, Fencing, KeyState, Liveness, LockStore, Query, Release, Renewal,
    Renewed, Result, Resume, StoreInfo, Waiting,
    store::{Reconnections, Records},
};

use crate::{
    client::{node::Node, quorum::Quorum, stats::Stats},
    config::RedlockConfig,
};

/// A lock store over several independent ones: a client holds a lock if it holds it at a majority of them.
pub struct RedlockStore {
    pub(crate) info: StoreInfo,
    pub(crate) quorum: Arc<Quorum>,
}

impl RedlockStore {
    /// What a quorum of Redis servers can do, for tests without a server: [`MemoryStore::like`](lockkit_core::MemoryStore::like).
    /// [`info`](LockStore::info) says what a connected store can do.
    pub const CAPABILITY: Capability = Capability {
        resume: Resume::UntilTtl,
        ..Capability::exclusive(
            Waiting::Notify,
            Liveness { ttl: Some(RedlockConfig::SHORTEST_TTL..=RedlockConfig::MAX_TTL), session: None },
            Fencing::BestEffort,
        )
    };

    /// A quorum over `nodes`, which should be independent of each other: no replicas, no shared machine or disk.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](lockkit_core::ErrorKind::InvalidInput) for fewer than three nodes, or one that is there twice; [`ErrorKind::Unsupported`](lockkit_core::ErrorKind::Unsupported)
    /// for a node that gives no fences.
    pub fn new(nodes: Vec<Node>, config: RedlockConfig) -> Result<Self> {
        check::check(&nodes)?;
        let of_node =
            |node: &Node| node.told().iter().map(|told| format!("{}: {told}", node.name())).collect::<Vec<_>>();
        let mut warnings: Vec<_> = nodes.iter().flat_map(of_node).collect();
        warnings.extend(check::even(nodes.len()).map(|finding| finding.in_words()));
        let info = StoreInfo {
            scheme: "redlock",
            name: Self::name_of(nodes.len()),
            capability: check::capability(&nodes, &config)?,
            clock: Arc::clone(&config.clock),
            alarm: None,
            reconnections: Reconnections::of(nodes.iter().map(|node| node.store().info().reconnections.clone())),
            warnings: warnings.into(),
        };
        Ok(Self { info, quorum: Arc::new(Quorum::new(nodes, config)) })
    }

    /// The name of a quorum of so many nodes in messages.
    #[must_use]
    pub fn name_of(nodes: usize) -> Arc<str> {
        format!("redlock of {nodes} nodes").into()
    }

    /// What the nodes put at risk, in words.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.info.warnings
    }

    /// How acquisitions went so far, among it how many needed a second round for their fence.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.quorum.stats.read()
    }

    /// The nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.quorum.nodes
    }
}

#[async_trait]
impl LockStore for RedlockStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.quorum.adopt_work();
        acquire::acquire(self, request).await.map_err(|e| e.at("acquire", Some(&request.claim.key), &self.info.name))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.quorum.adopt_work();
        self.info.renewals_at(renewals, renew::renew(self, renewals).await)
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.quorum.adopt_work();
        release::release(self, claim).await.map_err(|e| e.at("release", Some(&claim.key), &self.info.name))
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        inspect::inspect(self, query).await.map_err(|e| e.at("inspect", None, &self.info.name))
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        let of_nodes: Vec<_> = self.quorum.nodes.iter().map(|node| node.store().records()).collect();
        // The records of the other nodes alone are not those of the quorum.
        if of_nodes.iter().any(Vec::is_empty) { Vec::new() } else { of_nodes.into_iter().flatten().collect() }
    }
}

impl fmt::Debug for RedlockStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedlockStore").field("nodes", &self.quorum.nodes).finish_non_exhaustive()
    }
}
