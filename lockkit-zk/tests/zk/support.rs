//! A private server per test, and short names for requests.

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Error, Hold, HolderInfo, Lock, LockStore, Locker, LossReason, Mode, Release,
    Renewal, Renewed, Result,
};
pub(crate) use lockkit_testkit::calls::{claim, claim_as, granted, lost};
use lockkit_testkit::{
    calls,
    faults::Proxy,
    servers::{ZooKeeperFlavor, ZooKeeperServer},
};
use lockkit_zk::{ZkConfig, ZkStore};
use tokio::{
    runtime::Handle,
    sync::{Notify, oneshot},
    task::{JoinHandle, block_in_place},
};
use zookeeper_client::Client;

pub(crate) const TTL: Duration = Duration::from_secs(4);

/// A server that dies with this value.
pub(crate) struct Server(pub(crate) ZooKeeperServer);

impl Server {
    pub(crate) async fn start() -> Self {
        Self(ZooKeeperServer::start(ZooKeeperFlavor::Installed).await.expect("ZooKeeper is required"))
    }

    pub(crate) async fn start_with(properties: &[&str]) -> Self {
        let server = ZooKeeperServer::start_with(ZooKeeperFlavor::Installed, properties).await;
        Self(server.expect("ZooKeeper is required"))
    }

    pub(crate) fn config(&self) -> ZkConfig {
        ZkConfig::new([self.0.addr().to_string()])
    }

    pub(crate) async fn store(&self) -> Arc<ZkStore> {
        connect(self.config()).await
    }

    /// A store with a session of this timeout, behind a proxy.
    pub(crate) async fn proxied(&self, session: Duration) -> (Arc<ZkStore>, Proxy) {
        let proxy = Proxy::start(self.0.addr()).await.expect("proxy");
        let config = ZkConfig::new([proxy.addr().to_string()]).session(session).timeout(Duration::from_millis(500));
        (connect(config).await, proxy)
    }

    /// A client that is not lockkit's.
    pub(crate) async fn raw(&self) -> Client {
        Client::connect(&self.0.addr().to_string()).await.expect("raw client")
    }
}

pub(crate) async fn connect(config: ZkConfig) -> Arc<ZkStore> {
    Arc::new(ZkStore::connect(config).await.expect("connect"))
}

pub(crate) fn locker(store: &Arc<ZkStore>) -> Locker {
    let store: Arc<dyn LockStore> = Arc::<ZkStore>::clone(store);
    Locker::shared_builder(store).patience(Duration::from_secs(30)).build()
}

/// The children of a lock, as another client sees them.
pub(crate) async fn children(raw: &Client, name: &str) -> Vec<String> {
    let lock = format!("{}/{name}", ZkConfig::BASE);
    raw.sync(&lock).await.expect("sync");
    match raw.list_children(&lock).await {
        Err(zookeeper_client::Error::NoNode) => Vec::new(),
        children => children.expect("children"),
    }
}

pub(crate) fn permit(limit: u32) -> Mode {
    Mode::Permit { limit: NonZeroU32::new(limit).expect("not zero") }
}

pub(crate) fn request(claim: &Claim, wait: Duration) -> AcquireRequest {
    AcquireRequest { wait, ..AcquireRequest::new(claim.clone(), TTL, HolderInfo::new("test: holder")) }
}

pub(crate) async fn attempt(store: &ZkStore, claim: &Claim) -> Result<Attempt> {
    store.acquire(&request(claim, Duration::ZERO)).await
}

/// Gets a free lock, whether or not the first call is in time: behind a proxy it has half a second.
pub(crate) async fn hold(store: &ZkStore, claim: &Claim) -> Hold {
    let start = Instant::now();
    loop {
        match attempt(store, claim).await {
            Err(e) if is_to_insist(&e, start) => tokio::time::sleep(Duration::from_millis(10)).await,
            answer => return granted(answer.expect("acquire")),
        }
    }
}

/// A request to keep a lock in the place of a lease.
pub(crate) fn keeping(from: &Claim, window: Duration) -> AcquireRequest {
    let asked = claim(from.key.as_str());
    AcquireRequest { ttl: window, from: Some(from.token), keeps: true, ..request(&asked, Duration::ZERO) }
}

/// Takes a lock and has it kept.
pub(crate) async fn keep(store: &ZkStore, name: &str, window: Duration) -> Hold {
    let holder = claim(name);
    hold(store, &holder).await;
    granted(store.acquire(&keeping(&holder, window)).await.expect("keep"))
}

pub(crate) fn is_contended(attempt: &Attempt) -> bool {
    matches!(attempt, Attempt::Contended(_))
}

pub(crate) async fn renew(store: &ZkStore, claim: &Claim) -> Result<Renewed> {
    calls::renew(store, &Renewal::new(claim.clone(), TTL)).await
}

/// The same for a release. One that is sent twice finds nothing the second time.
pub(crate) async fn free(store: &ZkStore, claim: &Claim) {
    let (start, mut failed) = (Instant::now(), false);
    loop {
        match store.release(claim).await {
            Ok(Release::Released { .. }) => return,
            Ok(Release::NotHeld(LossReason::Gone)) if failed => return,
            Err(e) if is_to_insist(&e, start) => failed = true,
            other => panic!("not released: {other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Whether to ask again after an error, as the core does.
fn is_to_insist(error: &Error, since: Instant) -> bool {
    error.is_retryable() && since.elapsed() < Duration::from_secs(20)
}

/// A claim that waits in the queue.
pub(crate) struct Waiter {
    pub(crate) claim: Claim,
    task: JoinHandle<Result<Attempt>>,
}

impl Waiter {
    /// Lets a claim queue; returns when its node is there, so that the order is known.
    pub(crate) async fn queue(store: &Arc<ZkStore>, raw: &Client, claim: Claim) -> Self {
        let (before, store, wanted) = (children(raw, claim.key.as_str()).await.len(), Arc::clone(store), claim.clone());
        let task = tokio::spawn(async move { store.acquire(&request(&wanted, Duration::from_secs(20))).await });
        eventually("it queues", async || children(raw, claim.key.as_str()).await.len() > before).await;
        Self { claim, task }
    }

    /// It waits still. What it might do wrongly it would have done in the time.
    pub(crate) async fn waits(&self) {
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(!self.task.is_finished(), "{:?} does not wait", self.claim.mode);
    }

    /// It is granted now, and not when its time is up.
    pub(crate) async fn granted(self) -> Hold {
        let answer = tokio::time::timeout(Duration::from_secs(10), self.task).await;
        let answer = answer.unwrap_or_else(|_| panic!("nothing woke {:?}", self.claim.mode));
        granted(answer.expect("no panic").expect("acquire"))
    }
}

/// Asks again and again, as the core does, until there is an answer.
pub(crate) async fn insist<T>(what: &str, mut ask: impl AsyncFnMut() -> Result<T>) -> T {
    let start = Instant::now();
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(e) => assert!(is_to_insist(&e, start), "{what}: {e}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until something becomes true.
pub(crate) async fn eventually(what: &str, is_true: impl AsyncFnMut() -> bool) {
    calls::eventually_within(Duration::from_secs(15), what, is_true).await;
}

/// A resource that notices when two use it at once, or when an older holder comes after a newer one.
#[derive(Debug, Default)]
pub(crate) struct Resource {
    highest: AtomicU64,
    inside: AtomicU64,
    pub(crate) uses: AtomicU64,
}

impl Resource {
    /// Uses the resource for a moment.
    pub(crate) async fn work(&self, fence: u64) {
        let before = self.highest.fetch_max(fence, Ordering::SeqCst);
        assert!(before < fence, "fence {fence} came after {before}");
        assert_eq!(self.inside.fetch_add(1, Ordering::SeqCst), 0, "two at once");
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.inside.fetch_sub(1, Ordering::SeqCst);
        self.uses.fetch_add(1, Ordering::SeqCst);
    }
}

/// Works under a lock again and again, for as long as that is wanted.
pub(crate) async fn work(lock: Lock, resource: Arc<Resource>, is_wanted: Arc<AtomicBool>) {
    while is_wanted.load(Ordering::SeqCst) {
        let Ok(guard) = lock.acquire().await.inspect_err(|e| assert!(e.is_retryable(), "{e}")) else { continue };
        if guard.is_held() {
            resource.work(guard.fence().get()).await;
        }
        drop(guard.release().await);
    }
}

/// Holds back the first reply with this text, and tells when it has come, until it is told to go on.
pub(crate) fn pause_at(proxy: &Proxy, text: String) -> (Arc<Notify>, oneshot::Sender<()>) {
    let (told, (go_on, goes_on)) = (Arc::new(Notify::new()), oneshot::channel::<()>());
    let (tell, mut goes_on) = (Arc::clone(&told), Some(goes_on));
    proxy.rewrite_replies(move |replies| {
        if replies.windows(text.len()).any(|part| part == text.as_bytes())
            && let Some(goes_on) = goes_on.take()
        {
            tell.notify_one();
            block_in_place(|| Handle::current().block_on(goes_on)).expect("it goes on");
        }
        replies
    });
    (told, go_on)
}

/// What the names of the nodes of a claim begin with.
pub(crate) fn node_of(claim: &Claim) -> String {
    format!("_c_{}-", &claim.token.reveal()[..8])
}

/// Spoils the length of the next answer: the driver waits for the rest of it, and takes all that comes after it for that.
pub(crate) fn spoil_a_length(proxy: &Proxy) {
    let mut spoilt = false;
    proxy.rewrite_replies(move |mut bytes| {
        if !std::mem::replace(&mut spoilt, true) {
            // The first byte of its length.
            bytes[0] = 1;
        }
        bytes
    });
}
