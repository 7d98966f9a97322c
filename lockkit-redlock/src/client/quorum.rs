//! The nodes of a store and what it knows of them and its claims: what all calls share.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::{
    Capability, Error, ErrorKind, Fencing, Finding, Hold, Liveness, LockKey, LockStore, Moment, Result, StoreInfo,
    Token, Waiting,
    store::{Background, Reconnections, unpoisoned},
};

use crate::{
    client::{backlog::Owed, claims::Claims, node::Node, stats::Counters},
    config::RedlockConfig,
    wire::votes::majority,
};

/// How many notes are kept of where to wait. They are taken at once, but for those of callers that gave up just then.
const MOST_MEETINGS: usize = 1024;

/// What the calls of a store share. Background tasks hold it too.
pub(crate) struct Quorum {
    pub(crate) nodes: Vec<Node>,
    pub(crate) majority: usize,
    pub(crate) info: StoreInfo,
    pub(crate) config: RedlockConfig,
    pub(crate) claims: Claims,
    pub(crate) stats: Counters,
    pub(crate) background: Background,
    /// Where the next call for a lock waits.
    meetings: Mutex<HashMap<LockKey, usize>>,
}

impl Quorum {
    /// A quorum over `nodes`.
    ///
    /// # Errors
    /// As [`RedlockStore::new`](crate::RedlockStore::new).
    pub(crate) fn new(nodes: Vec<Node>, config: RedlockConfig) -> Result<Self> {
        check_nodes(&nodes)?;
        let of_node =
            |node: &Node| node.told().iter().map(|told| format!("{}: {told}", node.name())).collect::<Vec<_>>();
        let mut warnings: Vec<_> = nodes.iter().flat_map(of_node).collect();
        warnings.extend(even(nodes.len()).map(|finding| finding.in_words()));
        let info = StoreInfo {
            scheme: "redlock",
            name: name_of(nodes.len()),
            capability: capability(&nodes, &config)?,
            clock: Arc::clone(&config.clock),
            alarm: None,
            reconnections: Reconnections::of(nodes.iter().map(|node| node.store().info().reconnections.clone())),
            warnings: warnings.into(),
        };
        let majority = majority(nodes.len());
        let (claims, stats) = (Claims::default(), Counters::default());
        let (background, meetings) = (Background::new(), Mutex::default());
        Ok(Self { nodes, majority, info, config, claims, stats, background, meetings })
    }

    /// Goes on with the releases that were to be repeated on a runtime that has ended.
    pub(crate) fn take_over(&self) {
        self.nodes.iter().for_each(|node| node.take_over(&self.info.clock, &self.background));
    }

    /// Has a release that failed at a node repeated there.
    pub(crate) fn owe(&self, node: usize, owed: Owed) {
        self.nodes[node].owe(owed, &self.info.clock, &self.background);
    }

    /// The nodes in the order in which the lock's waiters prefer them.
    fn meeting_order(&self, key: &LockKey) -> impl Iterator<Item = usize> {
        let nodes = self.nodes.len();
        let first = key.as_str().bytes().fold(0_usize, |sum, byte| (sum * 31 + usize::from(byte)) % nodes);
        (first..nodes).chain(0..first).filter(|node| can_wake(self.nodes[*node].store().info().capability.waiting))
    }

    /// The node whose answer decides where to wait.
    pub(crate) fn preferred(&self, key: &LockKey) -> Option<usize> {
        self.meeting_order(key).find(|node| !self.nodes[*node].is_slow())
    }

    /// Where to wait, given the nodes at which the lock is held.
    pub(crate) fn rendezvous(&self, key: &LockKey, held_at: &[usize]) -> Option<usize> {
        self.meeting_order(key).find(|node| held_at.contains(node))
    }

    /// Has the next call for this lock that may wait do so at this node. If another caller takes the note, this one asks all nodes
    /// once more.
    pub(crate) fn note_meeting(&self, key: &LockKey, rendezvous: usize) {
        let mut meetings = unpoisoned(&self.meetings);
        if meetings.len() >= MOST_MEETINGS {
            meetings.clear();
        }
        meetings.insert(key.clone(), rendezvous);
    }

    pub(crate) fn take_meeting(&self, key: &LockKey) -> Option<usize> {
        unpoisoned(&self.meetings).remove(key)
    }

    /// How long to stay away after a lost race: at random, at least as long as it takes to lock a majority and on
    /// average 2.5 times that, so that of several losers one is likely to be done before the next begins.
    pub(crate) fn retry_delay(&self) -> Duration {
        let lock_time = self.stats.lock_time().clamp(Duration::from_micros(200), Duration::from_millis(100));
        let random = Token::random().map_or(128, |token| token.as_bytes()[0]);
        lock_time + lock_time * 3 * u32::from(random) / 255
    }

    /// When a node's lease may lapse, on this store's clock, if that is before `end`: a node that ends leases with its
    /// session may give less than was asked for.
    pub(crate) fn end_of(&self, node: usize, hold: &Hold, end: Moment) -> Moment {
        let info = self.nodes[node].store().info();
        match info.capability.liveness.session {
            None => end,
            Some(_) => end.min(self.info.clock.now() + hold.until.since(info.clock.now())),
        }
    }
}

/// The name of a quorum in messages.
pub(crate) fn name_of(nodes: usize) -> Arc<str> {
    format!("redlock of {nodes} nodes").into()
}

pub(crate) fn can_wake(waiting: Waiting) -> bool {
    matches!(waiting, Waiting::Notify | Waiting::Queue)
}

/// An even number of nodes is a waste.
pub(crate) fn even(nodes: usize) -> Option<Finding> {
    let summary = || format!("{nodes} nodes tolerate no more failures than {} would", nodes - 1);
    nodes.is_multiple_of(2).then(|| Finding::warning("quorum", summary(), "use an odd number"))
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
    let longest_key = nodes.iter().map(|node| node.store().info().capability.max_key_bytes).min();
    Ok(Capability {
        shared: false,
        permits: false,
        fifo: false,
        // A grant may rest on a bare majority, and one node of it that forgets is one too many.
        resume: nodes.iter().all(|node| node.store().info().capability.resume),
        keeps: false,
        downgrades: false,
        waiting: if wake { Waiting::Notify } else { Waiting::Poll },
        liveness: Liveness { ttl: Some(shortest..=longest), session: decisive_session(nodes) },
        fencing: if nodes.iter().all(Node::is_durable) { Fencing::Strict } else { Fencing::BestEffort },
        max_key_bytes: longest_key.unwrap_or_default(),
    })
}
