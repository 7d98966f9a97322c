//! The store over both stores of a migration: what clients may and may not do while the phase changes.

use std::{
    future::Future,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, Effect, Error, ErrorKind, Fence, FenceRequest, Fencing, HolderInfo,
    KeyState, LockKey, LockStore, Locker, MemoryStore, Mode, Order, Outcome, Query, Release, Renewal, Renewed, Result,
    ShiftedClock, Token,
    migrate::{Dual, Migration, Phase, Side, Start},
    store::{Record, Records, Swap},
};
use lockkit_testkit::{Alter, Altered};
use tokio::sync::{Notify, watch};

const TTL: Duration = Duration::from_secs(2);
const START: Start =
    Start { max_ttl: TTL, fresh: Duration::from_millis(500), home_is_durable: false, fence_above: Fence::NONE };

/// Two stores on one clock, and a migration between them.
struct World {
    clock: Arc<ShiftedClock>,
    old: MemoryStore,
    new: MemoryStore,
    migration: Migration,
}

impl World {
    async fn started() -> Result<Self> {
        Self::started_by(|old| Arc::new(old)).await
    }

    /// With an old store that keeps what it confirmed, so that the way back to it needs no drain.
    async fn with_durable_home() -> Result<Self> {
        Self::started_by(|old| Arc::new(Altered::with_info(old, |info| info.capability.fencing = Fencing::Strict)))
            .await
    }

    async fn started_by(old_store: impl FnOnce(MemoryStore) -> Arc<dyn LockStore>) -> Result<Self> {
        let clock = Arc::new(ShiftedClock::default());
        let [old, new] = [(), ()].map(|()| MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
        let migration = Migration::new(old_store(old.clone()), Arc::new(new.clone()));
        migration.start(START).await?;
        Ok(Self { clock, old, new, migration })
    }

    /// A drain takes as long as it takes, on a clock that all share.
    async fn step(&self, goal: Phase) -> Result<()> {
        let step = self.migration.step(goal, |drain| self.clock.advance(drain.left)).await?;
        assert_eq!(step.record.phase, goal);
        step.copied
    }

    async fn client(&self) -> Result<Arc<Dual>> {
        Ok(Arc::new(Dual::connect(Arc::new(self.old.clone()), Arc::new(self.new.clone())).await?))
    }

    /// A client that can be held up.
    async fn held_up(&self) -> Result<(Arc<Dual>, HeldUp, HeldUp)> {
        let [old, new] = [&self.old, &self.new].map(|store| HeldUp::new(store.clone()));
        let dual = Dual::connect(Arc::new(Altered(old.clone())), Arc::new(Altered(new.clone()))).await?;
        Ok((Arc::new(dual), old, new))
    }

    async fn is_held_at(&self, store: &MemoryStore, name: &str) -> Result<bool> {
        let state = store.inspect(&Query::Keys(vec![LockKey::new(name)?])).await?.remove(0);
        Ok(!state.holders.is_empty())
    }
}

fn request(name: &str) -> AcquireRequest {
    AcquireRequest {
        claim: Claim {
            key: LockKey::new(name).expect("name"),
            token: Token::random().expect("random"),
            mode: Mode::Exclusive,
        },
        ttl: TTL,
        wait: Duration::ZERO,
        order: Order::Any,
        fence: FenceRequest::default(),
        holder: HolderInfo::new("tester"),
        from: None,
    }
}

fn renewal(claim: &Claim) -> Renewal {
    Renewal { claim: claim.clone(), ttl: TTL, depth: 1, fence_floor: None, holder: None }
}

/// A store whose answers stay away while it is held up, and which can be cut off. What it was asked has its effect.
#[derive(Clone, Debug)]
struct HeldUp {
    inner: MemoryStore,
    is_held_up: watch::Sender<bool>,
    is_cut_off: Arc<AtomicBool>,
    /// Whether it is the requests of acquisitions that are held up, and not the answers.
    before: Arc<AtomicBool>,
    /// Whether it is the releases only whose answers are held up.
    releases_only: Arc<AtomicBool>,
    /// Told when an answer is held back.
    came: Arc<Notify>,
}

impl HeldUp {
    fn new(inner: MemoryStore) -> Self {
        Self {
            inner,
            is_held_up: watch::Sender::new(false),
            is_cut_off: Arc::default(),
            before: Arc::default(),
            releases_only: Arc::default(),
            came: Arc::default(),
        }
    }

    async fn back<T>(&self, answer: T) -> T {
        let mut is_held_up = self.is_held_up.subscribe();
        if *is_held_up.borrow_and_update() {
            self.came.notify_one();
            drop(is_held_up.wait_for(|held| !held).await);
        }
        answer
    }

    fn check(&self) -> Result<()> {
        if self.is_cut_off.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "connection refused"));
        }
        Ok(())
    }
}

/// The records of a store that can't be reached.
struct Away;

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
        let answers = self.inner.renew(renewals).await;
        if self.releases_only.load(Ordering::SeqCst) { answers } else { self.back(answers).await }
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.check()?;
        let answer = self.inner.release(claim).await;
        if self.before.load(Ordering::SeqCst) { answer } else { self.back(answer).await }
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.check()?;
        self.inner.inspect(query).await
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        if self.is_cut_off.load(Ordering::SeqCst) { vec![Box::new(Away)] } else { self.inner.records() }
    }
}

/// Such as one that breaks a lock by its token.
#[tokio::test(start_paused = true)]
async fn another_client_is_told_that_it_ended_a_lease() -> Result<()> {
    let world = World::started().await?;
    let (holder, another) = (world.client().await?, world.client().await?);
    let request = request("a");
    assert!(matches!(holder.acquire(&request).await?, Attempt::Granted(_)));
    world.step(Phase::Both).await?;
    world.clock.advance(START.fresh);
    assert!(matches!(another.release(&request.claim).await?, Release::Released { .. }), "the old store had it");
    assert!(matches!(another.release(&request.claim).await?, Release::NotHeld(_)));
    Ok(())
}

#[tokio::test]
async fn a_grant_does_not_stand_if_the_phase_has_gone_on_meanwhile() -> Result<()> {
    let world = World::started().await?;
    let (frozen, old, _) = world.held_up().await?;
    old.is_held_up.send_replace(true);
    let mine = request("x");
    let asking = tokio::spawn({
        let (frozen, mine) = (Arc::clone(&frozen), mine.clone());
        async move { frozen.acquire(&mine).await }
    });
    old.came.notified().await;
    world.step(Phase::Both).await?;
    world.step(Phase::New).await?;
    let other = world.client().await?;
    let Attempt::Granted(_) = other.acquire(&request("x")).await? else { panic!("the lock is free") };
    old.is_held_up.send_replace(false);
    let answer = asking.await.expect("task")?;
    assert!(matches!(answer, Attempt::Contended(_)), "{answer:?}: two hold the lock");
    assert!(!world.is_held_at(&world.old, "x").await?, "what it got in the old store is given back");
    Ok(())
}

#[tokio::test]
async fn a_grant_that_was_asked_for_in_the_phase_before_is_asked_for_anew() -> Result<()> {
    let world = World::started().await?;
    let (frozen, old, _) = world.held_up().await?;
    old.is_held_up.send_replace(true);
    let asking = tokio::spawn(async move { frozen.acquire(&request("x")).await });
    old.came.notified().await;
    world.step(Phase::Both).await?;
    // What it read is too old by now.
    world.clock.advance(START.fresh);
    old.is_held_up.send_replace(false);
    let Attempt::Granted(_) = asking.await.expect("task")? else { panic!("the lock is free") };
    assert!(world.is_held_at(&world.old, "x").await? && world.is_held_at(&world.new, "x").await?);
    Ok(())
}

#[tokio::test]
async fn a_renewal_does_not_stand_if_the_phase_has_gone_on_meanwhile() -> Result<()> {
    let world = World::started().await?;
    let (frozen, old, _) = world.held_up().await?;
    let mine = request("x");
    let Attempt::Granted(_) = frozen.acquire(&mine).await? else { panic!("the lock is free") };
    old.is_held_up.send_replace(true);
    let renewing = tokio::spawn({
        let (frozen, claim) = (Arc::clone(&frozen), mine.claim.clone());
        async move { frozen.renew(&[renewal(&claim)]).await.remove(0) }
    });
    old.came.notified().await;
    world.step(Phase::Both).await?;
    world.step(Phase::New).await?;
    old.is_held_up.send_replace(false);
    let answer = renewing.await.expect("task");
    assert!(!matches!(answer, Ok(Renewed::Held(_))), "{answer:?}: another may hold it in the new store");
    // Nor does another try: it is held in the old store alone, which counts no more.
    assert!(!matches!(frozen.renew(&[renewal(&mine.claim)]).await.remove(0), Ok(Renewed::Held(_))));
    Ok(())
}

#[tokio::test]
async fn a_lease_is_believed_in_for_no_longer_than_the_drain_counts_on() -> Result<()> {
    let world = World::started().await?;
    let (slow, old, _) = world.held_up().await?;
    for ttl in [TTL + Duration::from_millis(1), TTL * 2] {
        let error = slow.acquire(&AcquireRequest { ttl, ..request("x") }).await.expect_err("beyond the longest ttl");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
    // A renewal for longer than that, as a store with sessions may give one.
    let mine = request("x");
    let Attempt::Granted(_) = slow.acquire(&mine).await? else { panic!("the lock is free") };
    let long = Renewal { ttl: TTL * 10, ..renewal(&mine.claim) };
    let Ok(Renewed::Held(hold)) = slow.renew(&[long]).await.remove(0) else { panic!("it is held") };
    assert!(hold.until <= world.clock.now() + TTL);
    drop(old);
    Ok(())
}

#[tokio::test]
async fn what_is_held_goes_along_and_leaves_nothing_behind() -> Result<()> {
    let world = World::started().await?;
    let dual = world.client().await?;
    let mine = request("x");
    let Attempt::Granted(granted) = dual.acquire(&mine).await? else { panic!("the lock is free") };
    let renew = async || match dual.renew(&[renewal(&mine.claim)]).await.remove(0)? {
        Renewed::Held(hold) => Ok(hold),
        Renewed::Lost(reason) => panic!("{reason}"),
    };
    for (goal, in_old, in_new) in
        [(Phase::Both, true, true), (Phase::New, false, true), (Phase::Both, true, true), (Phase::Old, true, false)]
    {
        // The drain ends every lease that is not renewed: so it is renewed in each half of it.
        let whole = world.migration.state().await?.record.drain();
        let mut drains = std::pin::pin!(world.migration.step(goal, |_| ()));
        loop {
            tokio::select! {
                step = &mut drains => break step?.copied?,
                () = tokio::time::sleep(whole / 8) => drop(renew().await?),
            }
        }
        tokio::time::sleep(START.fresh).await;
        let hold = renew().await?;
        assert_eq!((hold.fence, &hold.claim), (granted.fence, &mine.claim), "{goal}");
        assert_eq!(world.is_held_at(&world.old, "x").await?, in_old, "old store, {goal}");
        assert_eq!(world.is_held_at(&world.new, "x").await?, in_new, "new store, {goal}");
    }
    assert!(matches!(dual.release(&mine.claim).await?, Release::Released { .. }));
    assert!(!world.is_held_at(&world.old, "x").await? && !world.is_held_at(&world.new, "x").await?);
    Ok(())
}

#[tokio::test]
async fn a_lock_that_the_new_store_refuses_is_given_back_to_the_old_one() -> Result<()> {
    let world = World::started().await?;
    world.step(Phase::Both).await?;
    let stranger = request("x");
    let Attempt::Granted(_) = world.new.acquire(&stranger).await? else { panic!("the lock is free") };
    let dual = world.client().await?;
    let Attempt::Contended(contention) = dual.acquire(&request("x")).await? else { panic!("held by another") };
    assert_eq!(contention.holder, Some(stranger.holder));
    assert!(contention.burnt && contention.retry_after.is_some_and(|after| !after.is_zero()));
    assert!(!world.is_held_at(&world.old, "x").await?, "it waits for nothing while it holds the old store's");
    Ok(())
}

#[tokio::test]
async fn a_lease_that_one_store_lost_is_lost() -> Result<()> {
    let world = World::started().await?;
    world.step(Phase::Both).await?;
    let dual = world.client().await?;
    for (losing, other) in [(&world.old, &world.new), (&world.new, &world.old)] {
        let mine = request("x");
        let Attempt::Granted(_) = dual.acquire(&mine).await? else { panic!("the lock is free") };
        assert!(matches!(losing.release(&mine.claim).await?, Release::Released { .. }));
        for _ in 0..2 {
            assert!(matches!(dual.renew(&[renewal(&mine.claim)]).await.remove(0)?, Renewed::Lost(_)));
            assert!(world.is_held_at(other, "x").await?, "it keeps others out until the holder has heard");
        }
        // Whatever is asked next gives it back, first of all to this client itself.
        let next = request("x");
        let Attempt::Granted(_) = dual.acquire(&next).await? else { panic!("its own lost lease is in its way") };
        assert!(matches!(dual.release(&next.claim).await?, Release::Released { .. }));
    }
    Ok(())
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// The call that finds a lease lost may be dropped: then its holder has not heard of it.
#[tokio::test]
async fn what_is_left_of_a_lost_lease_stays_until_a_renewal_has_said_so() -> Result<()> {
    let world = World::started().await?;
    world.step(Phase::Both).await?;
    let (dual, _, new) = world.held_up().await?;
    let (mine, other) = (request("x"), request("y"));
    for request in [&mine, &other] {
        let Attempt::Granted(_) = dual.acquire(request).await? else { panic!("the lock is free") };
        assert!(matches!(world.old.release(&request.claim).await?, Release::Released { .. }));
    }
    assert!(matches!(dual.renew(&[renewal(&other.claim)]).await.remove(0)?, Renewed::Lost(_)));
    // What is left of the other one is cleared up by the call that is dropped.
    new.releases_only.store(true, Ordering::SeqCst);
    new.is_held_up.send_replace(true);
    let renewals = [renewal(&mine.claim)];
    assert!(poll_once(pin!(dual.renew(&renewals)).as_mut()).is_pending());
    assert!(!world.is_held_at(&world.new, "y").await?);
    new.is_held_up.send_replace(false);
    let any = [renewal(&request("z").claim)];
    drop(dual.renew(&any).await);
    assert!(world.is_held_at(&world.new, "x").await?, "its holder believes in it");
    assert!(matches!(dual.renew(&renewals).await.remove(0)?, Renewed::Lost(_)));
    drop(dual.renew(&any).await);
    assert!(!world.is_held_at(&world.new, "x").await?, "its holder has heard");
    Ok(())
}

/// Renewals of one claim, as nested acquisitions make them: those that began before it was taken along do not take it along again.
#[tokio::test]
async fn a_renewal_that_comes_late_leaves_alone_what_another_took_along() -> Result<()> {
    let world = World::started().await?;
    let (dual, old, new) = world.held_up().await?;
    let mine = request("x");
    let Attempt::Granted(_) = dual.acquire(&mine).await? else { panic!("the lock is free") };
    world.step(Phase::Both).await?;
    world.clock.advance(START.fresh);
    let renewals = [renewal(&mine.claim)];
    let [mut first, mut second, mut third] = [(); 3].map(|()| Box::pin(dual.renew(&renewals)));
    old.is_held_up.send_replace(true);
    for renews in [&mut first, &mut second, &mut third] {
        assert!(poll_once(renews.as_mut()).is_pending());
    }
    old.is_held_up.send_replace(false);
    let Renewed::Held(_) = first.await.remove(0)? else { panic!("it is held") };
    assert!(world.is_held_at(&world.new, "x").await?, "it was taken along");
    new.is_held_up.send_replace(true);
    assert!(poll_once(second.as_mut()).is_ready(), "it asks the new store for nothing");
    drop(second);
    new.is_held_up.send_replace(false);
    drop(third.await);
    assert!(world.is_held_at(&world.new, "x").await?, "it is held in both");
    Ok(())
}

#[tokio::test]
async fn a_release_that_overtakes_taking_along_leaves_nothing_behind() -> Result<()> {
    let world = World::started().await?;
    let (dual, _, new) = world.held_up().await?;
    let mine = request("x");
    let Attempt::Granted(_) = dual.acquire(&mine).await? else { panic!("the lock is free") };
    world.step(Phase::Both).await?;
    world.clock.advance(START.fresh);
    new.before.store(true, Ordering::SeqCst);
    new.is_held_up.send_replace(true);
    let renewing = tokio::spawn({
        let (dual, claim) = (Arc::clone(&dual), mine.claim.clone());
        async move { dual.renew(&[renewal(&claim)]).await.remove(0) }
    });
    new.came.notified().await;
    assert!(matches!(dual.release(&mine.claim).await?, Release::Released { .. }));
    assert!(!world.is_held_at(&world.old, "x").await?);
    new.is_held_up.send_replace(false);
    assert!(!matches!(renewing.await.expect("task"), Ok(Renewed::Held(_))));
    assert!(!world.is_held_at(&world.new, "x").await?, "what came after the release is released, too");
    Ok(())
}

/// The phase went back while a renewal asked for the lock in the new store.
#[tokio::test]
async fn a_lock_that_is_left_behind_while_it_is_asked_for_is_released_again() -> Result<()> {
    let world = World::with_durable_home().await?;
    let (dual, _, new) = world.held_up().await?;
    let mine = request("x");
    let Attempt::Granted(_) = dual.acquire(&mine).await? else { panic!("the lock is free") };
    world.step(Phase::Both).await?;
    world.clock.advance(START.fresh);
    new.before.store(true, Ordering::SeqCst);
    new.is_held_up.send_replace(true);
    let renewals = [renewal(&mine.claim)];
    let mut late = Box::pin(dual.renew(&renewals));
    assert!(poll_once(late.as_mut()).is_pending());
    world.step(Phase::Old).await?;
    world.clock.advance(START.fresh);
    let Renewed::Held(_) = dual.renew(&renewals).await.remove(0)? else { panic!("it is held") };
    new.is_held_up.send_replace(false);
    drop(late.await);
    let Renewed::Held(_) = dual.renew(&renewals).await.remove(0)? else { panic!("it is held") };
    assert!(!world.is_held_at(&world.new, "x").await?, "what came after the release is released, too");
    assert!(world.is_held_at(&world.old, "x").await?);
    Ok(())
}

#[tokio::test]
async fn a_store_that_is_not_needed_any_more_delays_no_release() -> Result<()> {
    let world = World::with_durable_home().await?;
    world.step(Phase::Both).await?;
    let (dual, _, new) = world.held_up().await?;
    let mine = request("x");
    let Attempt::Granted(_) = dual.acquire(&mine).await? else { panic!("the lock is free") };
    new.is_held_up.send_replace(true);
    world.step(Phase::Old).await?;
    world.clock.advance(START.fresh);
    let Ok(Renewed::Held(_)) = dual.renew(&[renewal(&mine.claim)]).await.remove(0) else { panic!("it is held") };
    let released = tokio::time::timeout(Duration::from_secs(1), dual.release(&mine.claim)).await;
    assert!(matches!(released.expect("the old store alone has it"), Ok(Release::Released { .. })));
    assert!(!world.is_held_at(&world.old, "x").await?);
    Ok(())
}

#[tokio::test]
async fn each_holder_is_shown_by_its_own_name_and_the_phase() -> Result<()> {
    let world = World::started().await?;
    let client = world.client().await?;
    let marked = async |name: &str, holder: &str| {
        let asked = AcquireRequest { holder: HolderInfo::new(holder), ..request(name) };
        let Attempt::Granted(_) = client.acquire(&asked).await? else { panic!("the lock is free") };
        let state = world.old.inspect(&Query::Keys(vec![LockKey::new(name)?])).await?.remove(0);
        let (plain, mark) = state.holders[0].info.as_str().rsplit_once(" ~").expect("a mark");
        assert_eq!(plain, holder);
        Ok::<_, Error>(mark.rsplit_once(':').expect("a phase").1.to_owned())
    };
    for (name, holder) in [("a", "one"), ("b", "other"), ("c", "one")] {
        assert_eq!(marked(name, holder).await?, "old");
    }
    world.step(Phase::Both).await?;
    world.clock.advance(START.fresh);
    for (name, holder) in [("d", "other"), ("e", "one")] {
        assert_eq!(marked(name, holder).await?, "both");
    }
    Ok(())
}

#[tokio::test]
async fn fences_rise_through_every_phase() -> Result<()> {
    let world = World::with_durable_home().await?;
    let mut last = Fence::NONE;
    // One store's counter may be far ahead of the other's, within the hour that a floor leaves.
    let ahead = async |store: &MemoryStore, by: u64| {
        let first = request("x");
        let Attempt::Granted(hold) = store.acquire(&first).await? else { panic!("free") };
        store.release(&first.claim).await?;
        let floor = Fence::new(hold.fence.get() + by);
        let second = AcquireRequest { fence: FenceRequest { floor, ..FenceRequest::default() }, ..request("x") };
        let Attempt::Granted(_) = store.acquire(&second).await? else { panic!("free") };
        store.release(&second.claim).await.map(drop)
    };
    let mut grant = async |label: &str| {
        // Each by a client that has just come, so that nothing rests on what one remembers.
        let (dual, mine) = (world.client().await?, request("x"));
        let Attempt::Granted(hold) = dual.acquire(&mine).await? else { panic!("the lock is free") };
        assert!(hold.fence > last, "{label}: {} came after {last}", hold.fence);
        last = hold.fence;
        dual.release(&mine.claim).await.map(drop)
    };
    grant("old").await?;
    ahead(&world.old, 1_000_000_000).await?;
    grant("old, ahead").await?;
    world.step(Phase::Both).await?;
    grant("both, the old store ahead").await?;
    ahead(&world.new, 2_000_000_000).await?;
    grant("both, the new store ahead").await?;
    world.step(Phase::Old).await?;
    grant("back to old at once").await?;
    ahead(&world.old, 500_000_000).await?;
    grant("old, ahead again").await?;
    world.step(Phase::Both).await?;
    world.step(Phase::New).await?;
    grant("new").await?;
    ahead(&world.new, 1_000_000_000).await?;
    grant("new, ahead").await?;
    world.step(Phase::Both).await?;
    world.step(Phase::Old).await?;
    grant("old again").await?;
    Ok(())
}

#[tokio::test]
async fn without_the_record_nothing_is_granted_and_what_is_held_runs_out() -> Result<()> {
    let world = World::started().await?;
    let (dual, old, new) = world.held_up().await?;
    let mine = request("x");
    let Attempt::Granted(_) = dual.acquire(&mine).await? else { panic!("the lock is free") };
    new.is_cut_off.store(true, Ordering::SeqCst);
    world.clock.advance(START.fresh);
    assert!(
        matches!(dual.renew(&[renewal(&mine.claim)]).await.remove(0)?, Renewed::Held(_)),
        "the old store has it, too"
    );
    for store in [&world.old, &world.new] {
        let name = LockKey::new("lockkit/migration")?;
        let records = store.records();
        let record = records[0].read(&name).await?;
        records[0].compare_and_set(&name, record.as_ref(), None).await?;
    }
    // What was read is good for a while.
    assert!(matches!(dual.renew(&[renewal(&mine.claim)]).await.remove(0)?, Renewed::Held(_)));
    world.clock.advance(START.fresh);
    let error = dual.renew(&[renewal(&mine.claim)]).await.remove(0).expect_err("no record");
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    assert!(dual.acquire(&request("y")).await.is_err() && dual.inspect(&Query::Prefix(String::new())).await.is_err());
    assert!(matches!(dual.release(&mine.claim).await?, Release::Released { .. }), "a release needs no phase");
    assert!(!world.is_held_at(&world.old, "y").await?);
    drop(old);
    Ok(())
}

/// Clients that take locks, each from a store of its own over the same two, while the phase goes forward, back, and forward again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_two_hold_a_lock_while_the_phase_changes() -> Result<()> {
    const NAMES: [&str; 2] = ["a", "b"];
    let world = World::started().await?;
    let resources: Arc<[(AtomicBool, AtomicU64); 2]> = Arc::default();
    let (is_over, grants) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut workers = Vec::new();
    for worker in 0..6 {
        let locker = Locker::shared_builder(world.client().await?).build();
        let (resources, is_over, grants) = (Arc::clone(&resources), Arc::clone(&is_over), Arc::clone(&grants));
        workers.push(tokio::spawn(async move {
            let mut turn = worker;
            while !is_over.load(Ordering::SeqCst) {
                turn += 1;
                let lock = locker.lock(NAMES[turn % 2]).ttl(TTL);
                let Some(guard) = lock.acquire_within(Duration::from_secs(5)).await? else { continue };
                let (busy, last) = &resources[turn % 2];
                assert!(!busy.swap(true, Ordering::SeqCst), "two hold {}", guard.key());
                let before = last.swap(guard.fence().get(), Ordering::SeqCst);
                assert!(guard.fence().get() > before, "{} came after {before}", guard.fence());
                // Now and then for so long that it has to be taken along.
                let hold = if turn % 16 == 0 { TTL + TTL / 2 } else { Duration::from_millis(2) };
                let kept = guard.run(tokio::time::sleep(hold)).await;
                busy.store(false, Ordering::SeqCst);
                kept?;
                assert_eq!(guard.release().await?, Outcome::Released);
                grants.fetch_add(1, Ordering::SeqCst);
            }
            Result::Ok(())
        }));
    }
    for goal in [Phase::Both, Phase::New, Phase::Both, Phase::Old, Phase::Both, Phase::Old, Phase::Both, Phase::New] {
        let before = grants.load(Ordering::SeqCst);
        world.migration.step(goal, |_| ()).await?.copied?;
        while grants.load(Ordering::SeqCst) < before + 20 {
            assert!(workers.iter().all(|worker| !worker.is_finished()));
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    is_over.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.await.expect("worker")?;
    }
    Ok(())
}

#[tokio::test]
async fn a_guard_in_both_stores_is_released_in_both() -> Result<()> {
    let world = World::started().await?;
    world.step(Phase::Both).await?;
    let locker = Locker::shared_builder(world.client().await?).build();
    let guard = locker.lock("x").ttl(TTL).acquire().await?;
    let shown = locker.inspect(&Query::Keys(vec![LockKey::new("x")?])).await?.remove(0);
    assert_eq!(shown.holders.len(), 1, "{shown:?}");
    assert_eq!(shown.holders[0].info, HolderInfo::this_process());
    assert_eq!(shown.holders[0].fence, Some(guard.fence()));
    assert_eq!(guard.release().await?, Outcome::Released);
    assert!(!world.is_held_at(&world.old, "x").await? && !world.is_held_at(&world.new, "x").await?);
    Ok(())
}

/// A store that answers for none of the leases that it is asked to renew, once `is_silent`.
#[derive(Debug)]
struct Silent {
    store: MemoryStore,
    is_silent: Arc<AtomicBool>,
}

#[async_trait]
impl Alter for Silent {
    fn inner(&self) -> &dyn LockStore {
        &self.store
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        if self.is_silent.load(Ordering::SeqCst) { Vec::new() } else { self.store.renew(renewals).await }
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_says_nothing_of_a_lease_is_not_said_to_have_it() -> Result<()> {
    let world = World::started().await?;
    world.step(Phase::Both).await?;
    for silent in Side::ALL {
        let is_silent = Arc::new(AtomicBool::new(false));
        let store = |side, store: &MemoryStore| -> Arc<dyn LockStore> {
            let altered = Silent { store: store.clone(), is_silent: is_silent.clone() };
            if side == silent { Arc::new(Altered(altered)) } else { Arc::new(store.clone()) }
        };
        let dual = Dual::connect(store(Side::Old, &world.old), store(Side::New, &world.new)).await?;
        let asked = request(&format!("silent/{silent}"));
        assert!(matches!(dual.acquire(&asked).await?, Attempt::Granted(_)));
        is_silent.store(true, Ordering::SeqCst);
        let renewed = dual.renew(&[renewal(&asked.claim)]).await.remove(0);
        assert_eq!(renewed.expect_err("one of two says nothing").effect(), Effect::Unknown);
    }
    Ok(())
}
