//! What is repeated at a node, and on which runtime.

use std::{
    collections::HashSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, Error, ErrorKind, Liveness, LockStore, LossReason, MemoryStore, Query,
    Release, Renewal, Renewed, Result, StoreInfo, Token, store::unpoisoned,
};
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_sim::{Fault, Operation, SimStore};
use lockkit_testkit::{Alter, Altered, Slow, faults::poll_until};
use tokio::{
    runtime::{Builder, Runtime},
    sync::watch,
};

use crate::support::{self, attempt, claim, eventually_within, memories, request};

const PATIENCE: Duration = Duration::from_secs(10);

/// A node at which the first release of each claim fails, and no other comes through while it is away.
#[derive(Debug)]
struct Forgetful {
    inner: MemoryStore,
    heard: Mutex<HashSet<Token>>,
    is_away: AtomicBool,
    /// Whether its leases end with the session, and so never here.
    session: Option<StoreInfo>,
}

#[async_trait]
impl Alter for Forgetful {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    fn info(&self) -> &StoreInfo {
        self.session.as_ref().unwrap_or_else(|| self.inner.info())
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        // As a session does, it keeps a lease until it is released.
        let ttl = if self.session.is_some() { Duration::from_secs(300) } else { request.ttl };
        self.inner.acquire(&AcquireRequest { ttl, ..request.clone() }).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if unpoisoned(&self.heard).insert(claim.token) || self.is_away.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "connection reset").unknown_effect());
        }
        self.inner.release(claim).await
    }
}

/// Two nodes and a forgetful one.
fn quorum(session: bool) -> (RedlockStore, Arc<Altered<Forgetful>>) {
    let inner = MemoryStore::new();
    let session = session.then(|| {
        let mut info = inner.info().clone();
        (info.capability.liveness.ttl, info.capability.liveness.session) = (None, Some(Duration::from_secs(60)));
        info
    });
    let forgetful = Forgetful { inner, heard: Mutex::default(), is_away: AtomicBool::new(false), session };
    let forgetful = Arc::new(Altered(forgetful));
    let mut nodes: Vec<_> = memories(2).into_iter().map(|store| Node::new(Arc::new(store))).collect();
    nodes.push(Node::new(Arc::<Altered<Forgetful>>::clone(&forgetful)));
    (RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum"), forgetful)
}

async fn is_held(store: &Altered<Forgetful>, claim: &Claim) -> bool {
    let states = store.inspect(&Query::Keys(vec![claim.key.clone()])).await.expect("memory");
    states.iter().any(|state| !state.holders.is_empty())
}

async fn hold_and_release(store: &RedlockStore, name: &str) -> Claim {
    let claim = claim(name);
    assert!(matches!(attempt(store, &claim).await, Ok(Attempt::Granted(_))), "{name}");
    assert!(matches!(store.release(&claim).await, Ok(Release::Released { .. })), "{name}");
    claim
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Uses the store under other names until the lock is free at the forgetful node.
async fn until_free(store: &RedlockStore, node: &Altered<Forgetful>, claim: &Claim) {
    let start = Instant::now();
    for number in 0.. {
        hold_and_release(store, &format!("other/{number}")).await;
        if !is_held(node, claim).await {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "nobody repeats the release");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// A release that failed at the forgetful node is to be repeated on this runtime.
fn left_on(runtime: &Runtime) -> (RedlockStore, Arc<Altered<Forgetful>>, Claim) {
    runtime.block_on(async {
        let (store, node) = quorum(false);
        let claim = claim_long(&store).await;
        (store, node, claim)
    })
}

#[test]
fn a_runtime_that_nobody_drives_keeps_no_release_from_being_repeated() {
    let first = runtime();
    let (store, node, claim) = left_on(&first);
    runtime().block_on(until_free(&store, &node, &claim));
    drop(first);
}

#[test]
fn what_a_runtime_leaves_that_ends_is_repeated_on_another() {
    let first = runtime();
    let (store, node, claim) = left_on(&first);
    drop(first);
    runtime().block_on(until_free(&store, &node, &claim));
}

/// Held for so long that it does not lapse meanwhile.
async fn claim_long(store: &RedlockStore) -> Claim {
    let claim = claim("a");
    let request = AcquireRequest { ttl: Duration::from_secs(60), ..request(&claim) };
    assert!(matches!(store.acquire(&request).await, Ok(Attempt::Granted(_))));
    assert!(matches!(store.release(&claim).await, Ok(Release::Released { .. })));
    claim
}

/// A node whose answers to acquisitions, and whose releases, come only once it is let go, as long as its timer allows.
#[derive(Debug)]
struct Timed {
    inner: MemoryStore,
    go: watch::Sender<bool>,
    /// How many calls were dropped that waited to be let go.
    dropped: watch::Sender<u32>,
    /// Whether a timer panicked.
    panicked: AtomicBool,
    /// The claim whose next release fails that it lets go.
    fails: Mutex<Option<Token>>,
}

struct Waits<'a>(Option<&'a Timed>);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        if let Some(timed) = self.0 {
            timed.panicked.fetch_or(std::thread::panicking(), Ordering::SeqCst);
            timed.dropped.send_modify(|dropped| *dropped += 1);
        }
    }
}

impl Timed {
    async fn wait(&self) -> Result<()> {
        let mut waits = Waits(Some(self));
        let waited = tokio::time::timeout(PATIENCE, self.go.subscribe().wait_for(|go| *go)).await.is_ok();
        waits.0 = None;
        if waited { Ok(()) } else { Err(Error::new(ErrorKind::TimedOut, "no answer").unknown_effect()) }
    }
}

#[async_trait]
impl Alter for Timed {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let answer = self.inner.acquire(request).await;
        self.wait().await?;
        answer
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.wait().await?;
        if unpoisoned(&self.fails).take_if(|token| *token == claim.token).is_some() {
            return Err(Error::new(ErrorKind::Unavailable, "connection reset").unknown_effect());
        }
        self.inner.release(claim).await
    }
}

/// Two nodes, a slow one, and a quorum of them on a runtime that drives itself.
fn with_a_slow_node() -> (Runtime, Vec<MemoryStore>, Arc<Altered<Timed>>, RedlockStore) {
    let home = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let timed = Arc::new(Altered(Timed {
        inner: MemoryStore::new(),
        go: watch::Sender::new(false),
        dropped: watch::Sender::new(0),
        panicked: AtomicBool::new(false),
        fails: Mutex::default(),
    }));
    let others = memories(2);
    let mut nodes: Vec<_> = others.iter().map(|store| Node::new(Arc::new(store.clone()))).collect();
    nodes.push(Node::new(Arc::<Altered<Timed>>::clone(&timed)));
    let store = home.block_on(async { RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum") });
    (home, others, timed, store)
}

/// Ends the runtime of a caller when what it left is under way on the other one. A call that is polled there in the very moment of that end can't
/// know of it.
fn end(caller: Runtime, home: &Runtime) {
    // It has one worker, which takes up tasks in their order.
    home.block_on(home.spawn(async {})).expect("no panic");
    drop(caller);
}

/// Lets the slow node go as soon as it was noticed that the runtime of the call to it has ended.
async fn until_free_at(node: &Timed, claim: &Claim) {
    let start = Instant::now();
    drop(tokio::time::timeout(PATIENCE, node.dropped.subscribe().wait_for(|dropped| *dropped > 0)).await);
    node.go.send_replace(true);
    while !node.inner.inspect(&Query::Keys(vec![claim.key.clone()])).await.expect("memory")[0].holders.is_empty() {
        assert!(start.elapsed() < PATIENCE, "nobody undoes what was granted there");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!node.panicked.load(Ordering::SeqCst), "a timer was polled whose runtime has ended");
}

/// The call to the slow node was begun there, with its timer.
#[test]
fn a_refused_try_leaves_nothing_though_its_runtime_ends() {
    let (home, others, timed, store) = with_a_slow_node();
    let (other, own) = (claim("a"), claim("a"));
    let caller = runtime();
    caller.block_on(async {
        for store in &others {
            assert!(matches!(attempt(store, &other).await, Ok(Attempt::Granted(_))));
        }
        let long = AcquireRequest { ttl: Duration::from_secs(60), ..request(&own) };
        assert!(matches!(store.acquire(&long).await, Ok(Attempt::Contended(_))));
    });
    end(caller, &home);
    home.block_on(until_free_at(&timed.0, &own));
}

#[test]
fn a_release_comes_to_a_slow_node_though_its_runtime_ends() {
    let (home, _, timed, store) = with_a_slow_node();
    timed.0.go.send_replace(true);
    let caller = runtime();
    let claim = caller.block_on(async {
        let claim = claim("a");
        let request = AcquireRequest { ttl: Duration::from_secs(60), ..request(&claim) };
        assert!(matches!(store.acquire(&request).await, Ok(Attempt::Granted(_))));
        timed.0.go.send_replace(false);
        assert!(matches!(store.release(&claim).await, Ok(Release::Released { .. })));
        claim
    });
    end(caller, &home);
    home.block_on(until_free_at(&timed.0, &claim));
}

/// The runtime ends that was to hear of a slow node's answer, which is an error.
#[test]
fn a_release_is_repeated_though_the_runtime_of_the_store_ends() {
    let (home, _, timed, store) = with_a_slow_node();
    timed.0.go.send_replace(true);
    let caller = runtime();
    let claim = caller.block_on(async {
        let claim = claim("a");
        let request = AcquireRequest { ttl: Duration::from_secs(60), ..request(&claim) };
        assert!(matches!(store.acquire(&request).await, Ok(Attempt::Granted(_))));
        timed.0.go.send_replace(false);
        assert!(matches!(store.release(&claim).await, Ok(Release::Released { .. })));
        claim
    });
    drop(home);
    *unpoisoned(&timed.0.fails) = Some(claim.token);
    timed.0.go.send_replace(true);
    caller.block_on(async {
        let start = Instant::now();
        for number in 0.. {
            hold_and_release(&store, &format!("other/{number}")).await;
            let states = timed.0.inner.inspect(&Query::Keys(vec![claim.key.clone()])).await.expect("memory");
            if states[0].holders.is_empty() {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "nobody repeats the release");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
}

/// A node had not answered when the lease was granted, and the runtime ends that was to hear it: what it was asked for may arrive behind
/// the release.
#[test]
fn a_release_is_not_final_at_a_node_that_nobody_hears_out() {
    let (home, _, timed, store) = with_a_slow_node();
    let node = &timed.0;
    let own = AcquireRequest { ttl: Duration::from_secs(60), ..request(&claim("a")) };
    let caller = runtime();
    assert!(matches!(caller.block_on(store.acquire(&own)), Ok(Attempt::Granted(_))));
    end(caller, &home);
    home.block_on(async {
        drop(tokio::time::timeout(PATIENCE, node.dropped.subscribe().wait_for(|dropped| *dropped > 0)).await);
        assert!(
            matches!(node.inner.release(&own.claim).await, Ok(Release::Released { .. })),
            "as if it were on its way"
        );
        node.go.send_replace(true);
        assert!(matches!(store.release(&own.claim).await, Ok(Release::Released { .. })));
        assert!(matches!(node.inner.acquire(&own).await, Ok(Attempt::Granted(_))), "it arrives");
        until_free_at(node, &own.claim).await;
    });
}

/// An acquisition that fails leaves what it was granted to its caller, and what is granted later to nobody.
#[test]
fn a_try_that_was_dropped_leaves_nothing_though_its_runtime_ends() {
    let (home, others, timed, store) = with_a_slow_node();
    let own = claim("a");
    let caller = runtime();
    caller.block_on(async {
        assert!(matches!(attempt(&others[0], &claim("a")).await, Ok(Attempt::Granted(_))));
        let long = AcquireRequest { ttl: Duration::from_secs(60), ..request(&own) };
        let mut acquires = std::pin::pin!(store.acquire(&long));
        assert!(poll_until(acquires.as_mut(), 2, || ()).await.is_none(), "it waits for the slow node");
    });
    end(caller, &home);
    home.block_on(until_free_at(&timed.0, &own));
}

/// The undoing of a refused try leaves with the answer.
#[test]
fn a_refused_try_on_a_runtime_that_nobody_drives_holds_nothing() {
    let stores = memories(3);
    let first = runtime();
    let (other, own) = (claim("a"), claim("a"));
    runtime().block_on(async {
        for store in &stores[..2] {
            assert!(matches!(attempt(store, &other).await, Ok(Attempt::Granted(_))));
        }
    });
    first.block_on(async {
        let quorum = support::quorum(&stores);
        assert!(matches!(attempt(&quorum, &own).await, Ok(Attempt::Contended(_))));
    });
    runtime().block_on(async {
        let states = stores[2].inspect(&Query::Keys(vec![own.key.clone()])).await.expect("memory");
        assert!(states[0].holders.is_empty(), "{states:?}");
    });
}

/// Where leases end with the session, a release that failed does not come to be needless.
#[tokio::test]
async fn a_release_is_repeated_beyond_the_ttl_where_nothing_lapses() {
    let (store, node) = quorum(true);
    node.0.is_away.store(true, Ordering::SeqCst);
    let claim = claim("a");
    let request = AcquireRequest { ttl: Duration::from_millis(500), ..request(&claim) };
    assert!(matches!(store.acquire(&request).await, Ok(Attempt::Granted(_))));
    assert!(matches!(store.release(&claim).await, Ok(Release::Released { .. })));
    tokio::time::sleep(Duration::from_millis(1500)).await;
    node.0.is_away.store(false, Ordering::SeqCst);
    eventually_within(PATIENCE, "it is released", async || !is_held(&node, &claim).await).await;
}

/// A node whose leases end with the session keeps what is not released there. So none of the releases that it has not answered is given up,
/// however many they are.
#[tokio::test]
async fn no_release_is_given_up_where_nothing_lapses() {
    let (store, node) = quorum(true);
    node.0.is_away.store(true, Ordering::SeqCst);
    for number in 0..10_010 {
        hold_and_release(&store, &format!("many/{number}")).await;
    }
    node.0.is_away.store(false, Ordering::SeqCst);
    let many = Query::Prefix("many/".to_owned());
    eventually_within(PATIENCE, "all are free", async || node.inspect(&many).await.expect("memory").is_empty()).await;
    let claim = hold_and_release(&store, "asked again").await;
    assert!(unpoisoned(&node.0.heard).contains(&claim.token));
}

/// Three simulated nodes, in time that leaps, and a claim that is released while the last of them does not let go of it.
async fn released_but_at(faulty: SimStore, fault: Fault) -> (RedlockStore, SimStore, Claim) {
    let clock = Arc::clone(&faulty.info().clock);
    let stores = [SimStore::new(), SimStore::new(), faulty.clone()];
    let nodes = stores.map(|store| Node::new(Arc::new(store))).into();
    let store = RedlockStore::new(nodes, RedlockConfig::new().clock(clock)).expect("a quorum");
    let claim = claim("a");
    let request = AcquireRequest { ttl: Duration::from_secs(240), ..request(&claim) };
    assert!(matches!(store.acquire(&request).await, Ok(Attempt::Granted(_))));
    tokio::time::sleep(Duration::from_secs(1)).await;
    faulty.inject(fault.on(Operation::Release).until_healed());
    assert!(matches!(store.release(&claim).await, Ok(Release::Released { .. })));
    (store, faulty, claim)
}

async fn is_free_at(node: &SimStore, claim: &Claim) -> bool {
    node.inspect(&Query::Keys(vec![claim.key.clone()])).await.expect("inspect")[0].holders.is_empty()
}

/// However often it was tried in vain.
#[tokio::test(start_paused = true)]
async fn a_node_that_comes_back_is_told_within_seconds() {
    let reset = Fault::Fail(ErrorKind::Unavailable, Effect::Unknown);
    let (_store, node, claim) = released_but_at(SimStore::new(), reset).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    node.heal();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(is_free_at(&node, &claim).await, "it is tried ever less often");
}

/// An administrator takes the right to release away by mistake, and gives it back.
#[tokio::test(start_paused = true)]
async fn what_a_node_refuses_is_tried_again_where_nothing_lapses() {
    let sessions = SimStore::over(|clock| {
        let session = |info: &mut StoreInfo| {
            info.capability.liveness = Liveness { ttl: None, session: Some(Duration::from_secs(600)) }
        };
        Arc::new(Altered::with_info(MemoryStore::with_clock(clock), session))
    });
    let (_store, node, claim) = released_but_at(sessions, Fault::Fail(ErrorKind::Denied, Effect::None)).await;
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(!is_free_at(&node, &claim).await, "it could not be released");
    node.heal();
    tokio::time::sleep(Duration::from_secs(65)).await;
    assert!(is_free_at(&node, &claim).await, "it was given up");
}

/// Answers that are heard late say nothing of a lease that others have renewed since.
#[tokio::test]
async fn a_renewal_that_is_heard_late_ends_no_lease_that_was_renewed_meanwhile() {
    let nodes = memories(3).into_iter().map(|store| Node::new(Arc::new(Altered(Slow(store))))).collect();
    let store = RedlockStore::new(nodes, RedlockConfig::new()).expect("a quorum");
    let claim = claim("a");
    let ttl = Duration::from_millis(600);
    let short = AcquireRequest { ttl, ..request(&claim) };
    assert!(matches!(store.acquire(&short).await, Ok(Attempt::Granted(_))));
    let renewals = [Renewal::new(claim.clone(), ttl)];
    let mut late = std::pin::pin!(store.renew(&renewals));
    assert!(poll_until(late.as_mut(), 2, || ()).await.is_none(), "it waits for the answers");
    let start = Instant::now();
    while start.elapsed() < ttl * 2 {
        assert!(matches!(store.renew(&renewals).await[..], [Ok(Renewed::Held(_))]));
        tokio::time::sleep(ttl / 4).await;
    }
    let answers = late.await;
    assert!(!matches!(answers[..], [Ok(Renewed::Lost(LossReason::Expired))]), "{answers:?}");
    assert!(matches!(store.renew(&renewals).await[..], [Ok(Renewed::Held(_))]));
}
