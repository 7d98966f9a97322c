//! Five nodes behind a fault proxy each, and short names for requests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use lockkit::redlock::RedisNodes;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, Contention, Hold, HolderInfo, LockStore, MemoryStore, Moment, Query,
    Release, Renewal, Renewed, Result, SystemClock,
};
use lockkit_redis::RedisConfig;
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
pub(crate) use lockkit_testkit::calls::{claim, eventually_within, free};
use lockkit_testkit::{
    Alter, calls,
    faults::Proxy,
    servers::{RedisOptions, RedisServer},
};
use tokio::sync::Semaphore;

pub(crate) const TTL: Duration = Duration::from_secs(4);

/// How long a node has to answer. The default for a [`TTL`] is 50 ms, for which a busy machine stands still now and then; this
/// is the default for a long one.
pub(crate) const NODE_TIMEOUT: Duration = Duration::from_millis(500);

/// Servers without persistence, each behind a proxy.
pub(crate) struct Cluster {
    pub(crate) servers: Vec<RedisServer>,
    pub(crate) proxies: Vec<Proxy>,
}

impl Cluster {
    pub(crate) async fn start(nodes: usize) -> Self {
        let servers = RedisServer::start_many(nodes, RedisOptions::default()).await.expect("servers");
        let mut proxies = Vec::new();
        for server in &servers {
            proxies.push(Proxy::start(server.addr()).await.expect("a proxy"));
        }
        Self { servers, proxies }
    }

    /// A client whose traffic runs through the proxies. The servers are new, which is not what most tests are about.
    pub(crate) async fn client(&self) -> RedlockStore {
        self.client_with(RedlockConfig::new().node_timeout(NODE_TIMEOUT)).await
    }

    pub(crate) async fn client_with(&self, config: RedlockConfig) -> RedlockStore {
        self.nodes().delayed_restart(false).config(config).connect().await.expect("connect")
    }

    pub(crate) fn nodes(&self) -> RedisNodes {
        let addresses = self.proxies.iter().map(Proxy::addr);
        RedisNodes::new(addresses.map(|at| RedisConfig::new(at.ip().to_string(), at.port())).collect())
    }

    /// A client that shares nothing with the others, not even the network.
    pub(crate) async fn observer(&self) -> RedlockStore {
        let servers = self.servers.iter().map(|server| server.addr());
        let nodes = RedisNodes::new(servers.map(|at| RedisConfig::new(at.ip().to_string(), at.port())).collect());
        let config = RedlockConfig::new().node_timeout(NODE_TIMEOUT);
        nodes.delayed_restart(false).config(config).connect().await.expect("connect")
    }

    /// At how many nodes the lock is held.
    pub(crate) async fn held_at(&self, name: &str) -> usize {
        let mut held = 0;
        for server in &self.servers {
            held += usize::from(server.command(&["EXISTS", &format!("lockkit:{name}")]).await.expect("EXISTS") == "1");
        }
        held
    }

    /// Waits until the lock is held at this many nodes.
    pub(crate) async fn until_held_at(&self, name: &str, nodes: usize) {
        let what = format!("held at {nodes} nodes");
        // Not so long that leases lapse by themselves.
        eventually_within(TTL * 3 / 4, &what, async || self.held_at(name).await == nodes).await;
    }
}

/// Memory stores, and quorums over them.
pub(crate) fn memories(nodes: usize) -> Vec<MemoryStore> {
    (0..nodes).map(|_| MemoryStore::new()).collect()
}

pub(crate) fn quorum(stores: &[MemoryStore]) -> RedlockStore {
    let nodes = stores.iter().map(|store| Node::new(Arc::new(store.clone()))).collect();
    RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum")
}

pub(crate) fn request(claim: &Claim) -> AcquireRequest {
    AcquireRequest::new(claim.clone(), TTL, HolderInfo::new("test"))
}

pub(crate) async fn attempt(store: &dyn LockStore, claim: &Claim) -> Result<Attempt> {
    store.acquire(&request(claim)).await
}

pub(crate) async fn hold(store: &dyn LockStore, claim: &Claim) -> Hold {
    calls::granted(attempt(store, claim).await.expect("acquire"))
}

/// The same as soon as what failed attempts left behind is released, which goes on in the background.
pub(crate) async fn hold_soon(store: &dyn LockStore, claim: &Claim) -> Hold {
    let start = Instant::now();
    loop {
        match attempt(store, claim).await.expect("acquire") {
            Attempt::Granted(hold) => return hold,
            Attempt::Contended(other) => assert!(start.elapsed() < TTL / 2, "never granted: {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

pub(crate) async fn contended(store: &dyn LockStore, claim: &Claim) -> Contention {
    calls::contended(attempt(store, claim).await.expect("acquire"))
}

/// The lock is held: the next call that may wait for it does so at the rendezvous.
pub(crate) async fn refused_to_wait(store: &dyn LockStore, claim: &Claim) {
    let waiting = AcquireRequest { wait: TTL, ..request(claim) };
    match store.acquire(&waiting).await.expect("acquire") {
        Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), burnt: true, .. }) => {}
        other => panic!("not refused, to ask again at once: {other:?}"),
    }
}

/// Waits for the lock, and asks with a new token each time, as the core does.
pub(crate) async fn hold_in_time(store: &dyn LockStore, name: &str) -> Claim {
    let start = Instant::now();
    loop {
        let waiting = AcquireRequest { wait: TTL, ..request(&claim(name)) };
        match store.acquire(&waiting).await.expect("acquire") {
            Attempt::Granted(_) => return waiting.claim,
            Attempt::Contended(other) => {
                assert!(start.elapsed() < TTL && other.burnt, "never granted: {other:?}");
                tokio::time::sleep(other.retry_after.expect("a time")).await;
            }
        }
    }
}

pub(crate) async fn renew(store: &dyn LockStore, claim: &Claim) -> Result<Renewed> {
    calls::renew(store, &Renewal::new(claim.clone(), TTL)).await
}

pub(crate) async fn is_held(store: &dyn LockStore, claim: &Claim) -> bool {
    matches!(renew(store, claim).await.expect("renew"), Renewed::Held(_))
}

/// Waits until the lock is held at this node.
pub(crate) async fn until_held_at(node: &MemoryStore, claim: &Claim) {
    let holders = async || node.inspect(&Query::Keys(vec![claim.key.clone()])).await.expect("inspect")[0].holders.len();
    while holders().await == 0 {
        tokio::task::yield_now().await;
    }
}

/// A client's clock that can be put ahead, as after a long pause of the process.
#[derive(Debug, Default)]
pub(crate) struct Ahead(AtomicU64);

impl Ahead {
    pub(crate) fn by(&self, time: Duration) {
        self.0.fetch_add(u64::try_from(time.as_nanos()).expect("short"), Ordering::SeqCst);
    }
}

impl Clock for Ahead {
    fn now(&self) -> Moment {
        SystemClock.now() + Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }
}

/// A node that answers a renewal, and gets a release, when there is a permit for it; and that counts acquisitions.
#[derive(Clone, Debug)]
pub(crate) struct Late {
    inner: MemoryStore,
    pub(crate) renewals: Arc<Semaphore>,
    pub(crate) releases: Arc<Semaphore>,
    asked: Arc<AtomicUsize>,
}

impl Late {
    /// With all permits.
    pub(crate) fn new(inner: &MemoryStore) -> Self {
        let all = || Arc::new(Semaphore::new(Semaphore::MAX_PERMITS));
        Self { inner: inner.clone(), renewals: all(), releases: all(), asked: Arc::default() }
    }

    /// How often it was asked for a lease.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Alter for Late {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        self.inner.acquire(request).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let answers = self.inner.renew(renewals).await;
        self.renewals.acquire().await.expect("open").forget();
        answers
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.releases.acquire().await.expect("open").forget();
        self.inner.release(claim).await
    }
}

/// A node that does not answer when it is asked for a lease.
#[derive(Debug)]
pub(crate) struct Silent(pub(crate) MemoryStore);

#[async_trait]
impl Alter for Silent {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn acquire(&self, _: &AcquireRequest) -> Result<Attempt> {
        std::future::pending().await
    }
}
