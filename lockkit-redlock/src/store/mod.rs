//! The store: a quorum over any stores.

pub(crate) mod acquire;
pub(crate) mod attempt;
pub(crate) mod inspect;
pub(crate) mod late;
pub(crate) mod release;
pub(crate) mod renew;
pub(crate) mod wait;

use std::{collections::HashSet, fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Claim, Error, ErrorKind, Fencing, Finding, KeyState, Liveness, LockStore,
    Query, Release, Renewal, Renewed, Result, Resume, StoreInfo, Waiting,
    store::{Reconnections, Records},
};

use crate::{
    client::{
        node::Node,
        quorum::{Quorum, can_wake},
        stats::Stats,
    },
    config::RedlockConfig,
    wire::votes::majority,
};

/// A lock store over several independent ones: a client holds a lock if it holds it at a majority of them.
pub struct RedlockStore {
    pub(crate) info: StoreInfo,
    pub(crate) quorum: Arc<Quorum>,
}

impl RedlockStore {
    /// What a quorum of Redis servers can do, for tests without a server ([`MemoryStore::like`](lockkit_core::MemoryStore::like)). [`info`](LockStore::info) says what a
    /// connected store can do.
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
        check_nodes(&nodes)?;
        let of_node =
            |node: &Node| node.told().iter().map(|told| format!("{}: {told}", node.name())).collect::<Vec<_>>();
        let mut warnings: Vec<_> = nodes.iter().flat_map(of_node).collect();
        warnings.extend(even(nodes.len()).map(|finding| finding.in_words()));
        let info = StoreInfo {
            scheme: "redlock",
            name: Self::name_of(nodes.len()),
            capability: capability(&nodes, &config)?,
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
        self.quorum.take_over();
        acquire::acquire(self, request).await.map_err(|e| e.at("acquire", Some(&request.claim.key), &self.info.name))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.quorum.take_over();
        self.info.renewals_at(renewals, renew::renew(self, renewals).await)
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.quorum.take_over();
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

fn check_nodes(nodes: &[Node]) -> Result<()> {
    let refuse = |kind, why: String| Err(Error::new(kind, why));
    if nodes.len() < 3 {
        let why = format!("a quorum needs at least three independent nodes, not {}", nodes.len());
        return refuse(ErrorKind::InvalidInput, why);
    }
    let mut seen = HashSet::new();
    for node in nodes {
        let info = node.store().info();
        if !seen.insert(Arc::as_ptr(node.store()).cast::<()>()) {
            return refuse(ErrorKind::InvalidInput, format!("the node {} is there twice", info.name));
        }
        if info.capability.fencing == Fencing::None {
            return refuse(ErrorKind::Unsupported, format!("the node {} gives no fences", info.name));
        }
    }
    Ok(())
}

/// What the nodes have in common.
fn capability(nodes: &[Node], config: &RedlockConfig) -> Result<Capability> {
    let (mut shortest, mut longest) = (config.min_ttl(), config.max_ttl);
    for node in nodes {
        if let Some(ttl) = &node.store().info().capability.liveness.ttl {
            shortest = shortest.max(*ttl.start());
            longest = longest.min(*ttl.end());
        }
    }
    if shortest > longest {
        let message = format!("no ttl is long enough for the node timeout: at least {shortest:?}, at most {longest:?}");
        return Err(Error::invalid(message));
    }
    let wake = nodes.iter().any(|node| can_wake(node.store().info().capability.waiting));
    let outlasts = nodes.iter().all(|node| node.store().info().capability.resume == Resume::UntilTtl);
    let longest_key = nodes.iter().map(|node| node.store().info().capability.max_key_bytes).min();
    let waiting = if wake { Waiting::Notify } else { Waiting::Poll };
    let liveness = Liveness { ttl: Some(shortest..=longest), session: decisive_session(nodes) };
    let fencing = if nodes.iter().all(Node::is_durable) { Fencing::Strict } else { Fencing::BestEffort };
    Ok(Capability {
        // A grant may rest on a bare majority, and one node of it that forgets is one too many.
        resume: if outlasts { Resume::UntilTtl } else { Resume::None },
        max_key_bytes: longest_key.unwrap_or_default(),
        ..Capability::exclusive(waiting, liveness, fencing)
    })
}

/// After which time without a sign of life enough of a client's sessions have ended that others can have a majority; `None`
/// if they can before the first ends.
fn decisive_session(nodes: &[Node]) -> Option<Duration> {
    let session = |node: &Node| node.store().info().capability.liveness.session;
    let mut sessions: Vec<_> = nodes.iter().filter_map(session).collect();
    sessions.sort_unstable();
    // As long as so many last, too few nodes are left for a majority.
    let decisive = nodes.len() - majority(nodes.len()) + 1;
    sessions.len().checked_sub(decisive).map(|ended| sessions[ended])
}

/// An even number of nodes is a waste.
pub(crate) fn even(nodes: usize) -> Option<Finding> {
    let summary = || format!("{nodes} nodes tolerate no more failures than {} would", nodes - 1);
    nodes.is_multiple_of(2).then(|| Finding::warning("quorum", summary(), "use an odd number"))
}
