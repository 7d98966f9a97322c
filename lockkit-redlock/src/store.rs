//! The store: a quorum over any stores.

use std::{
    collections::HashSet,
    fmt,
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Claim, Clock, Contention, Error, ErrorKind, Fencing, Hold, KeyState, Liveness,
    LockStore, Moment, Query, Release, Renewal, Renewed, Result, StoreInfo, Waiting,
};

use crate::{
    attempt::{Ended, Pursuit},
    book::{Begun, Book, Grant},
    config::RedlockConfig,
    fence, inspect,
    node::Node,
    quorum::majority,
    release, renew,
    stats::{Counters, Stats},
    wait::{self, can_wake},
};

/// A lock store over several independent ones: a lock is held by who holds it at a majority of them.
pub struct RedlockStore(Arc<Quorum>);

/// Of a claim that is over, or is being asked for by another call.
const BURNT: &str = "a release of this claim may be under way, or an acquisition: ask with a new token (rule R2)";

/// What the calls of a store share. Background tasks hold it too.
pub(crate) struct Quorum {
    pub(crate) nodes: Vec<Node>,
    pub(crate) majority: usize,
    pub(crate) info: StoreInfo,
    pub(crate) config: RedlockConfig,
    pub(crate) book: Book,
    pub(crate) stats: Counters,
}

/// How a wait at the door ended.
enum Waited {
    Granted(Hold),
    /// When to ask again.
    Refused(Duration),
}

impl RedlockStore {
    /// A quorum over `nodes`, which should be independent of each other: no replicas, no shared machine or disk.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for fewer than three nodes, or one that is there twice; [`ErrorKind::Unsupported`]
    /// for a node that gives no fences.
    pub fn new(nodes: Vec<Node>, config: RedlockConfig) -> Result<Self> {
        Self::with_warnings(nodes, config, Vec::new())
    }

    pub(crate) fn with_warnings(nodes: Vec<Node>, config: RedlockConfig, mut warnings: Vec<String>) -> Result<Self> {
        check_nodes(&nodes)?;
        if nodes.len().is_multiple_of(2) {
            let (even, odd) = (nodes.len(), nodes.len() - 1);
            warnings.push(format!("{even} nodes tolerate no more failures than {odd} would; use an odd number"));
        }
        let info = StoreInfo {
            scheme: "redlock",
            name: Self::name_of(nodes.len()),
            capability: capability(&nodes, &config)?,
            clock: Arc::clone(&config.clock),
            alarm: None,
            warnings: warnings.into(),
        };
        let majority = majority(nodes.len());
        let (book, stats) = (Book::default(), Counters::default());
        Ok(Self(Arc::new(Quorum { nodes, majority, info, config, book, stats })))
    }

    pub(crate) fn name_of(nodes: usize) -> Arc<str> {
        format!("redlock of {nodes} nodes").into()
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
        if let Liveness::Ttl { min, max } = node.store().info().capability.liveness {
            shortest = shortest.max(min);
            longest = longest.min(max);
        }
    }
    if shortest > longest {
        let message = format!("no ttl is long enough for the node timeout: at least {shortest:?}, at most {longest:?}");
        return Err(Error::new(ErrorKind::InvalidInput, message));
    }
    let wake = nodes.iter().any(|node| can_wake(node.store().info().capability.waiting));
    let longest_key = nodes.iter().map(|node| node.store().info().capability.max_key_bytes).min();
    Ok(Capability {
        shared: false,
        permits: false,
        fifo: false,
        waiting: if wake { Waiting::Notify } else { Waiting::Poll },
        liveness: Liveness::Ttl { min: shortest, max: longest },
        fencing: if nodes.iter().all(Node::is_durable) { Fencing::Strict } else { Fencing::BestEffort },
        max_key_bytes: longest_key.unwrap_or_default(),
    })
}

#[async_trait]
impl LockStore for RedlockStore {
    fn info(&self) -> &StoreInfo {
        &self.0.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let outcome = self.0.acquire(request).await;
        outcome.map_err(|e| e.at("acquire", Some(&request.claim.key), &self.0.info.name))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let answers = renew::renew(&self.0, renewals).await.into_iter().zip(renewals);
        answers
            .map(|(answer, renewal)| answer.map_err(|e| e.at("renew", Some(&renewal.claim.key), &self.0.info.name)))
            .collect()
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let outcome = release::release(&self.0, claim).await;
        outcome.map_err(|e| e.at("release", Some(&claim.key), &self.0.info.name))
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        inspect::inspect(&self.0, query).await.map_err(|e| e.at("inspect", None, &self.0.info.name))
    }
}

impl Quorum {
    async fn acquire(self: &Arc<Self>, request: &AcquireRequest) -> Result<Attempt> {
        self.info.admit(request)?;
        let begun = self.info.clock.now();
        let mut pursuit = match self.book.begin(request, begun) {
            Begun::Attempt(entry) => Pursuit::new(self, entry),
            Begun::Held => return self.repeat(request).await,
            Begun::Burnt => return Err(Error::new(ErrorKind::InvalidInput, BURNT)),
        };
        let waits = !request.wait.is_zero();
        let refusal = match pursuit.round(request, fence::proposal(request.fence, wall_clock()), waits).await? {
            Ended::Granted(hold) => return Ok(Attempt::Granted(hold)),
            Ended::Refused(refusal) => refusal,
        };
        let left = request.wait.saturating_sub(self.info.clock.now().since(begun));
        let retry_after = if left.is_zero() {
            refusal.contention.retry_after
        } else {
            match self.wait(&mut pursuit, request, &refusal.held_at, left).await? {
                Waited::Granted(hold) => return Ok(Attempt::Granted(hold)),
                Waited::Refused(retry_after) => Some(retry_after),
            }
        };
        pursuit.withdraw();
        Ok(Attempt::Contended(Contention { retry_after, holder: refusal.contention.holder, burnt: true }))
    }

    /// Waits at the door, and asks all when it opens.
    async fn wait(
        self: &Arc<Self>,
        pursuit: &mut Pursuit<'_>,
        request: &AcquireRequest,
        held_at: &[usize],
        left: Duration,
    ) -> Result<Waited> {
        let Some(door) = self.door(&request.claim.key, held_at) else {
            return Ok(Waited::Refused(self.retry_delay().max(Duration::from_millis(10))));
        };
        let at_door = fence::proposal(request.fence, wall_clock());
        let Some(opened) = wait::wait_at(pursuit, self, door, request, at_door, left).await else {
            return Ok(Waited::Refused(Duration::ZERO));
        };
        // The door's number is above all that went before there, and most likely what the others would grant next.
        Ok(match pursuit.round(request, fence::exactly(opened, request.fence.span), true).await? {
            Ended::Granted(hold) => Waited::Granted(hold),
            Ended::Refused(_) => Waited::Refused(self.retry_delay()),
        })
    }

    /// The same claim again (rule R1): the grant goes on with its fence if a majority still has it.
    async fn repeat(self: &Arc<Self>, request: &AcquireRequest) -> Result<Attempt> {
        let grant = self.book.get(&request.claim.token).and_then(|entry| entry.grant());
        let depth = grant.map_or(1, |Grant { depth, .. }| depth);
        let renewal = Renewal { claim: request.claim.clone(), ttl: request.ttl, depth, fence_floor: None };
        match renew::renew(self, &[renewal]).await.pop() {
            Some(Ok(Renewed::Held(hold))) => Ok(Attempt::Granted(hold)),
            Some(Err(error)) => Err(error),
            // It is lost, and being released where it still is.
            Some(Ok(Renewed::Lost(_))) | None => {
                Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), holder: None, burnt: true }))
            }
        }
    }

    /// When a node's lease may lapse, on this store's clock, if that is before `end`: a node that ends leases with its
    /// session may give less than was asked for.
    pub(crate) fn end_of(&self, node: usize, hold: &Hold, end: Moment) -> Moment {
        let info = self.nodes[node].store().info();
        match info.capability.liveness {
            Liveness::Ttl { .. } => end,
            _ => end.min(self.info.clock.now() + hold.until.since(info.clock.now())),
        }
    }
}

/// Only makes it likely that all nodes grant the same number, see [`fence`].
fn wall_clock() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

impl fmt::Debug for RedlockStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedlockStore").field("nodes", &self.0.nodes).finish_non_exhaustive()
    }
}
