//! One member of a quorum: a store, and whether its vote counts.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{AcquireRequest, Attempt, Clock, Error, ErrorKind, LockStore, Moment, Result, store::Background};

use crate::client::backlog::{Backlog, Context, Owed};

/// A store as a member of a quorum.
#[derive(Clone)]
pub struct Node {
    store: Arc<dyn LockStore>,
    durable: bool,
    restart_policy: RestartPolicy,
    warnings: Vec<String>,
    state: Arc<State>,
}

#[derive(Debug, Default)]
struct State {
    /// It failed to answer in time, or at all, and has answered nothing since.
    is_slow: AtomicBool,
    backlog: Arc<Backlog>,
}

/// Decides from when on a node votes: the safeguard known as *delayed restart*.
///
/// A node that lost its data grants what it had granted before its restart. If it takes part in no acquisition until
/// every lease from before must have lapsed, it can't help a second client to a majority. Code that learns of a restart
/// without data keeps the node from voting for the longest ttl; clones share the policy.
#[derive(Clone, Debug, Default)]
pub struct RestartPolicy(Arc<AtomicU64>);

impl RestartPolicy {
    /// A node under it votes at once.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// From now on the node does not vote before this moment.
    pub fn no_vote_before(&self, moment: Moment) {
        self.0.store(moment.as_nanos(), Ordering::Release);
    }

    /// From when on the node votes.
    #[must_use]
    pub fn votes_from(&self) -> Moment {
        Moment::from_nanos(self.0.load(Ordering::Acquire))
    }
}

impl Node {
    /// A node that may lose its data: leases, fence counters, or both.
    #[must_use]
    pub fn new(store: Arc<dyn LockStore>) -> Self {
        Self {
            store,
            durable: false,
            restart_policy: RestartPolicy::new(),
            warnings: Vec::new(),
            state: Arc::default(),
        }
    }

    /// Declares that what the node acknowledged survives its restart. With all nodes durable fences are
    /// [`Strict`](lockkit_core::Fencing::Strict).
    #[must_use]
    pub fn durable(mut self, durable: bool) -> Self {
        self.durable = durable;
        self
    }

    /// Lets `policy` decide from when on the node votes.
    #[must_use]
    pub fn restart_policy(mut self, policy: RestartPolicy) -> Self {
        self.restart_policy = policy;
        self
    }

    /// What connecting to the node showed to put locks at risk, in words. The quorum's own warnings name the node with it.
    #[must_use]
    pub fn warnings(mut self, warnings: Vec<String>) -> Self {
        self.warnings = warnings;
        self
    }

    /// Whether the node was declared durable.
    #[must_use]
    pub fn is_durable(&self) -> bool {
        self.durable
    }

    /// The store that is the node.
    #[must_use]
    pub fn store(&self) -> &Arc<dyn LockStore> {
        &self.store
    }

    pub(crate) fn told(&self) -> &[String] {
        &self.warnings
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.store.info().name
    }

    pub(crate) fn is_slow(&self) -> bool {
        self.state.is_slow.load(Ordering::Relaxed)
    }

    pub(crate) fn note_slow(&self, slow: bool) {
        if self.is_slow() != slow {
            self.state.is_slow.store(slow, Ordering::Relaxed);
        }
    }

    /// From when on it votes, by what its [`RestartPolicy`] was told last.
    pub(crate) fn votes_from(&self) -> Moment {
        self.restart_policy.votes_from()
    }

    /// Asks the node for its vote, unless it has none now.
    pub(crate) async fn acquire(&self, request: &AcquireRequest, clock: &dyn Clock) -> Result<Attempt> {
        let (now, votes_from) = (clock.now(), self.votes_from());
        if now < votes_from {
            return Err(barred(votes_from.since(now)));
        }
        self.store.info().admit_owed(self.state.backlog.length())?;
        self.store.acquire(request).await
    }

    /// Has a release that failed at the node repeated there.
    pub(crate) fn owe(&self, owed: Owed, clock: &Arc<dyn Clock>, background: &Background) {
        self.state.backlog.add(owed, Context { store: &self.store, clock, background });
    }

    /// Goes on with what is to be repeated, if the runtime that did so has ended.
    pub(crate) fn adopt_work(&self, clock: &Arc<dyn Clock>, background: &Background) {
        self.state.backlog.adopt_work(Context { store: &self.store, clock, background });
    }
}

fn barred(left: Duration) -> Error {
    let left = Duration::from_secs(left.as_secs() + 1);
    Error::new(ErrorKind::Unavailable, format!("it restarted and may have lost leases; it votes again in {left:?}"))
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("name", self.name()).field("durable", &self.durable).finish_non_exhaustive()
    }
}
