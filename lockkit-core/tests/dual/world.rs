//! Two stores on one clock, a migration between them, and stores whose answers can be held up.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, Error, ErrorKind, Fence, Fencing, HolderInfo, KeyState, LockKey, LockStore,
    MemoryStore, Query, Release, Renewal, Renewed, Result, ShiftedClock,
    migrate::{Dual, Migration, Phase, Start},
    store::{Record, Records, Swap},
};
use lockkit_testkit::{Alter, Altered, calls::claim};
use tokio::sync::{Notify, watch};

pub(crate) const TTL: Duration = Duration::from_secs(2);
pub(crate) const START: Start =
    Start { max_ttl: TTL, fresh: Duration::from_millis(500), home_is_durable: false, fence_above: Fence::NONE };

/// Two stores on one clock, and a migration between them.
pub(crate) struct World {
    pub(crate) clock: Arc<ShiftedClock>,
    pub(crate) old: MemoryStore,
    pub(crate) new: MemoryStore,
    pub(crate) migration: Migration,
}

impl World {
    pub(crate) async fn started() -> Result<Self> {
        Self::started_by(|old| Arc::new(old)).await
    }

    /// With an old store that keeps what it confirmed, so that the way back to it needs no drain.
    pub(crate) async fn with_durable_home() -> Result<Self> {
        Self::started_by(|old| Arc::new(Altered::with_info(old, |info| info.capability.fencing = Fencing::Strict)))
            .await
    }

    pub(crate) async fn started_by(old_store: impl FnOnce(MemoryStore) -> Arc<dyn LockStore>) -> Result<Self> {
        let clock = Arc::new(ShiftedClock::default());
        let [old, new] = [(), ()].map(|()| MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
        let migration = Migration::new(old_store(old.clone()), Arc::new(new.clone()));
        migration.start(START).await?;
        Ok(Self { clock, old, new, migration })
    }

    /// A drain takes as long as it takes, on a clock that all share.
    pub(crate) async fn step(&self, goal: Phase) -> Result<()> {
        let step = self.migration.step(goal, |drain| self.clock.advance(drain.left)).await?;
        assert_eq!(step.record.phase, goal);
        step.copied
    }

    /// The same, and this client reads the new phase: its calls get as far as to the stores when they are polled once.
    pub(crate) async fn step_and_read(&self, goal: Phase, client: &Dual) -> Result<()> {
        self.step(goal).await?;
        self.clock.advance(START.fresh);
        client.inspect(&Query::Prefix(String::new())).await.map(drop)
    }

    pub(crate) async fn client(&self) -> Result<Arc<Dual>> {
        Ok(Arc::new(Dual::connect(Arc::new(self.old.clone()), Arc::new(self.new.clone())).await?))
    }

    /// A client that can be held up.
    pub(crate) async fn held_up(&self) -> Result<(Arc<Dual>, HeldUp, HeldUp)> {
        let [old, new] = [&self.old, &self.new].map(|store| HeldUp::new(store.clone()));
        let dual = Dual::connect(Arc::new(Altered(old.clone())), Arc::new(Altered(new.clone()))).await?;
        Ok((Arc::new(dual), old, new))
    }

    /// The same, which holds the lock `x`.
    pub(crate) async fn holder(&self) -> Result<(Arc<Dual>, HeldUp, HeldUp, AcquireRequest)> {
        let (dual, old, new) = self.held_up().await?;
        let mine = request("x");
        let Attempt::Granted(_) = dual.acquire(&mine).await? else { panic!("the lock is free") };
        Ok((dual, old, new, mine))
    }

    pub(crate) async fn is_held_at(&self, store: &MemoryStore, name: &str) -> Result<bool> {
        let state = store.inspect(&Query::Keys(vec![LockKey::new(name)?])).await?.remove(0);
        Ok(!state.holders.is_empty())
    }
}

pub(crate) fn request(name: &str) -> AcquireRequest {
    AcquireRequest::new(claim(name), TTL, HolderInfo::new("tester"))
}

pub(crate) fn renewal(claim: &Claim) -> Renewal {
    Renewal::new(claim.clone(), TTL)
}

/// A store whose answers stay away while it is held up, and which can be cut off. What it was asked has its effect.
#[derive(Clone, Debug)]
pub(crate) struct HeldUp {
    pub(crate) inner: MemoryStore,
    pub(crate) is_held_up: watch::Sender<bool>,
    pub(crate) is_cut_off: Arc<AtomicBool>,
    /// Whether it is the requests of acquisitions and renewals that are held up, and not the answers.
    pub(crate) before: Arc<AtomicBool>,
    /// Whether it is the acquisitions only whose answers are held up.
    pub(crate) acquisitions_only: Arc<AtomicBool>,
    /// Told when an answer is held back.
    pub(crate) came: Arc<Notify>,
}

impl HeldUp {
    pub(crate) fn new(inner: MemoryStore) -> Self {
        Self {
            inner,
            is_held_up: watch::Sender::new(false),
            is_cut_off: Arc::default(),
            before: Arc::default(),
            acquisitions_only: Arc::default(),
            came: Arc::default(),
        }
    }

    pub(crate) async fn back<T>(&self, answer: T) -> T {
        let mut is_held_up = self.is_held_up.subscribe();
        if *is_held_up.borrow_and_update() {
            self.came.notify_one();
            drop(is_held_up.wait_for(|held| !held).await);
        }
        answer
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.is_cut_off.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "connection refused"));
        }
        Ok(())
    }
}

/// The records of a store that can't be reached.
pub(crate) struct Away;

#[async_trait]
impl Records for Away {
    async fn read(&self, _: &LockKey) -> Result<Option<Record>> {
        Err(Error::new(ErrorKind::Unavailable, "connection refused"))
    }

    async fn compare_and_set(&self, _: &LockKey, _: Option<&Record>, _: Option<&Record>) -> Result<Swap> {
        Err(Error::new(ErrorKind::Unavailable, "connection refused"))
    }
}

#[async_trait]
impl Alter for HeldUp {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.check()?;
        if self.before.load(Ordering::SeqCst) {
            self.back(()).await;
            return self.inner.acquire(request).await;
        }
        let answer = self.inner.acquire(request).await;
        self.back(answer).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        if let Err(error) = self.check() {
            return renewals.iter().map(|_| Err(error.clone())).collect();
        }
        if self.before.load(Ordering::SeqCst) {
            self.back(()).await;
            return self.inner.renew(renewals).await;
        }
        let answers = self.inner.renew(renewals).await;
        if self.acquisitions_only.load(Ordering::SeqCst) { answers } else { self.back(answers).await }
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.check()?;
        let answer = self.inner.release(claim).await;
        let is_held_up = !self.before.load(Ordering::SeqCst) && !self.acquisitions_only.load(Ordering::SeqCst);
        if is_held_up { self.back(answer).await } else { answer }
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.check()?;
        self.inner.inspect(query).await
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        if self.is_cut_off.load(Ordering::SeqCst) { vec![Box::new(Away)] } else { self.inner.records() }
    }
}

pub(crate) fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}
