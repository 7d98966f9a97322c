//! The store: a quorum over any stores.

pub(crate) mod acquire;
pub(crate) mod attempt;
pub(crate) mod inspect;
pub(crate) mod late;
pub(crate) mod release;
pub(crate) mod renew;
pub(crate) mod wait;

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, KeyState, LockStore, Query, Release, Renewal, Renewed, Result, StoreInfo,
    store::Records,
};

use crate::{
    client::{
        node::Node,
        quorum::{Quorum, name_of},
        stats::Stats,
    },
    config::RedlockConfig,
};

/// A lock store over several independent ones: a client holds a lock if it holds it at a majority of them.
pub struct RedlockStore(Arc<Quorum>);

impl RedlockStore {
    /// A quorum over `nodes`, which should be independent of each other: no replicas, no shared machine or disk.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](lockkit_core::ErrorKind::InvalidInput) for fewer than three nodes, or one that is there twice; [`ErrorKind::Unsupported`](lockkit_core::ErrorKind::Unsupported)
    /// for a node that gives no fences.
    pub fn new(nodes: Vec<Node>, config: RedlockConfig) -> Result<Self> {
        Quorum::new(nodes, config).map(|quorum| Self(Arc::new(quorum)))
    }

    /// The name of a quorum of so many nodes in messages.
    #[must_use]
    pub fn name_of(nodes: usize) -> Arc<str> {
        name_of(nodes)
    }

    /// What the nodes put at risk, in words.
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.0.info.warnings
    }

    /// How acquisitions went so far, among it how many needed a second round for their fence.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.0.stats.read()
    }

    /// The nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.0.nodes
    }
}

#[async_trait]
impl LockStore for RedlockStore {
    fn info(&self) -> &StoreInfo {
        &self.0.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.0.take_over();
        acquire::acquire(&self.0, request)
            .await
            .map_err(|e| e.at("acquire", Some(&request.claim.key), &self.0.info.name))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.0.take_over();
        self.0.info.renewals_at(renewals, renew::renew(&self.0, renewals).await)
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.0.take_over();
        release::release(&self.0, claim).await.map_err(|e| e.at("release", Some(&claim.key), &self.0.info.name))
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        inspect::inspect(&self.0, query).await.map_err(|e| e.at("inspect", None, &self.0.info.name))
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        let of_nodes: Vec<_> = self.0.nodes.iter().map(|node| node.store().records()).collect();
        // The records of the other nodes alone are not those of the quorum.
        if of_nodes.iter().any(Vec::is_empty) { Vec::new() } else { of_nodes.into_iter().flatten().collect() }
    }
}

impl fmt::Debug for RedlockStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedlockStore").field("nodes", &self.0.nodes).finish_non_exhaustive()
    }
}
