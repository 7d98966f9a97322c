//! The shadow of the phase old, in which the new store is asked and decides nothing; and the clients that sign on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, Error, ErrorKind, HolderInfo, KeyState, LockKey, LockStore, MemoryStore,
    Mode, Query, Release, Renewal, Renewed, Result, ShiftedClock, Token,
    migrate::{Dual, Migration, Phase, Start, Tally},
    store::{Record, Records, Swap},
};
use lockkit_testkit::{Alter, Altered};
use tokio::time::sleep;

const TTL: Duration = Duration::from_secs(2);

/// Two stores on one clock, and a migration between them whose new store is tried out.
struct World {
    clock: Arc<ShiftedClock>,
    old: MemoryStore,
    new: Unsteady,
    migration: Migration,
}

/// A store that may forget leases, refuse to release them, and give no answer to those who ask for them or release them.
#[derive(Clone, Debug)]
struct Unsteady {
    inner: MemoryStore,
    is_silent: Arc<AtomicBool>,
    /// How often it gave no answer.
    silences: Arc<AtomicUsize>,
    forgets: Arc<AtomicBool>,
    refuses: Arc<AtomicBool>,
}

#[async_trait]
impl Alter for Unsteady {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        self.answer().await;
        self.inner.acquire(request).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        if self.forgets.load(Ordering::SeqCst) {
            for renewal in renewals {
                drop(self.inner.release(&renewal.claim).await);
            }
        }
        self.inner.renew(renewals).await
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.answer().await;
        if self.refuses.load(Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Denied, "not allowed"));
        }
        self.inner.release(claim).await
    }
}

impl Unsteady {
    async fn answer(&self) {
        if self.is_silent.load(Ordering::SeqCst) {
            self.silences.fetch_add(1, Ordering::SeqCst);
            std::future::pending::<()>().await;
        }
    }

    async fn holders(&self, name: &str) -> Result<usize> {
        Ok(state(&self.inner, name).await?.holders.len())
    }
}

impl World {
    async fn shadowed() -> Result<Self> {
        let clock = Arc::new(ShiftedClock::default());
        let [old, inner] = [(), ()].map(|()| MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
        let new = Unsteady {
            inner,
            is_silent: Arc::default(),
            silences: Arc::default(),
            forgets: Arc::default(),
            refuses: Arc::default(),
        };
        let migration = Migration::new(Arc::new(old.clone()), Arc::new(new.inner.clone()));
        migration.start(Start::new(TTL, Duration::from_millis(500))).await?;
        let step = migration.shadow(true).await?;
        assert_eq!(step.record.phase_name(), "shadow");
        Ok(Self { clock, old, new, migration })
    }

    /// Waits until that holds: a minute and a half at most, of which none is spent waiting.
    async fn until(&self, what: &str, mut holds: impl AsyncFnMut() -> Result<bool>) -> Result<()> {
        for _ in 0..9000 {
            if holds().await? {
                return Ok(());
            }
            let step = Duration::from_millis(10);
            sleep(step).await;
            self.clock.advance(step);
        }
        panic!("it never came to be that {what}");
    }

    async fn client(&self) -> Result<Arc<Dual>> {
        let new = Arc::new(Altered(self.new.clone()));
        Ok(Arc::new(Dual::connect(Arc::new(self.old.clone()), new).await?))
    }
}

async fn state(store: &MemoryStore, name: &str) -> Result<KeyState> {
    Ok(store.inspect(&Query::Keys(vec![LockKey::new(name)?])).await?.remove(0))
}

fn request(name: &str) -> Result<AcquireRequest> {
    let claim = Claim { key: LockKey::new(name)?, token: Token::random()?, mode: Mode::Exclusive };
    Ok(AcquireRequest::new(claim, TTL, HolderInfo::new("tester")))
}

async fn acquire(dual: &Dual, name: &str) -> Result<Claim> {
    let request = request(name)?;
    let Attempt::Granted(_) = dual.acquire(&request).await? else { panic!("the lock is free") };
    Ok(request.claim)
}

async fn renew(dual: &Dual, claim: &Claim) -> Result<()> {
    let renewal = Renewal::new(claim.clone(), TTL);
    let Renewed::Held(_) = dual.renew(&[renewal]).await.remove(0)? else { panic!("it is held") };
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn the_new_store_is_asked_and_given_back() -> Result<()> {
    let world = World::shadowed().await?;
    let dual = world.client().await?;
    let claim = acquire(&dual, "x").await?;
    world.until("the new store has it", async || Ok(world.new.holders("x").await? == 1)).await?;
    renew(&dual, &claim).await?;
    dual.release(&claim).await?;
    assert!(state(&world.old, "x").await?.holders.is_empty());
    world.until("the new store is free", async || Ok(world.new.holders("x").await? == 0)).await?;
    assert_eq!(dual.tally().granted, 1);
    assert!(!dual.tally().disagrees());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn what_the_new_store_answers_is_counted_and_decides_nothing() -> Result<()> {
    let world = World::shadowed().await?;
    let dual = world.client().await?;
    let Attempt::Granted(_) = world.new.inner.acquire(&request("taken")?).await? else { panic!("the lock is free") };
    let taken = acquire(&dual, "taken").await?;
    world.until("the refusal is counted", async || Ok(dual.tally().refused == 1)).await?;
    renew(&dual, &taken).await?;

    let forgotten = acquire(&dual, "forgotten").await?;
    world.until("the new store has it", async || Ok(world.new.holders("forgotten").await? == 1)).await?;
    world.new.forgets.store(true, Ordering::SeqCst);
    renew(&dual, &forgotten).await?;
    world.until("the loss is counted", async || Ok(dual.tally().lost == 1)).await?;
    renew(&dual, &forgotten).await?;
    for claim in [&taken, &forgotten] {
        assert!(matches!(dual.release(claim).await?, Release::Released { .. }));
    }
    assert!(dual.tally().disagrees());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_new_store_that_is_silent_delays_nothing() -> Result<()> {
    let world = World::shadowed().await?;
    let dual = world.client().await?;
    world.new.is_silent.store(true, Ordering::SeqCst);
    let before = tokio::time::Instant::now();
    for _ in 0..3 {
        let claim = acquire(&dual, "x").await?;
        renew(&dual, &claim).await?;
        dual.release(&claim).await?;
    }
    assert_eq!(before.elapsed(), Duration::ZERO);
    world.until("it was asked each time", async || Ok(world.new.silences.load(Ordering::SeqCst) == 3)).await?;
    Ok(())
}

/// A lock is often taken on a runtime that ends before the lock is released.
#[test]
fn what_follows_a_lease_outlives_the_runtime_that_took_it() -> Result<()> {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
    let (home, other) = (runtime(), runtime());
    let (world, dual) = home.block_on(async {
        let world = World::shadowed().await?;
        let dual = world.client().await?;
        Result::Ok((world, dual))
    })?;
    let claim = other.block_on(acquire(&dual, "x"))?;
    drop(other);
    home.block_on(async {
        world.until("the new store has it", async || Ok(world.new.holders("x").await? == 1)).await?;
        dual.release(&claim).await?;
        world.until("the new store is free", async || Ok(world.new.holders("x").await? == 0)).await
    })
}

/// Another client of the migration may be about to give the lock back.
#[tokio::test(start_paused = true)]
async fn only_strangers_count_as_refusals() -> Result<()> {
    let world = World::shadowed().await?;
    let (slow, dual) = (world.client().await?, world.client().await?);
    let claim = acquire(&slow, "x").await?;
    world.until("the new store has it", async || Ok(world.new.holders("x").await? == 1)).await?;
    world.old.release(&claim).await?;
    let mine = acquire(&dual, "x").await?;
    sleep(TTL).await;
    assert_eq!(dual.tally(), Tally::default());
    dual.release(&mine).await?;
    Ok(())
}

/// A renewal may be under way while the lease is released: nobody says any more that what follows it is over.
#[tokio::test(start_paused = true)]
async fn what_follows_a_lease_ends_if_nobody_renews_it() -> Result<()> {
    let world = World::shadowed().await?;
    let dual = world.client().await?;
    drop(acquire(&dual, "x").await?);
    world.until("the new store has it", async || Ok(dual.tally().granted == 1)).await?;
    // The clock of the store stands still, so that time does not end it there.
    sleep(3 * TTL).await;
    assert_eq!(world.new.holders("x").await?, 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn what_follows_a_lease_that_is_lost_is_given_back() -> Result<()> {
    let world = World::shadowed().await?;
    let dual = world.client().await?;
    let claim = acquire(&dual, "x").await?;
    world.until("the new store has it", async || Ok(dual.tally().granted == 1)).await?;
    world.old.release(&claim).await?;
    let renewal = Renewal::new(claim, TTL);
    let Renewed::Lost(_) = dual.renew(&[renewal]).await.remove(0)? else { panic!("nobody has it") };
    // Long before nobody would have renewed it for too long.
    for _ in 0..100 {
        if world.new.holders("x").await? == 0 {
            return Ok(());
        }
        sleep(TTL / 100).await;
    }
    panic!("it is not given back");
}

/// As where an administrator takes the right to delete from a user of ZooKeeper, and gives it back.
#[tokio::test(start_paused = true)]
async fn where_sessions_end_leases_a_refused_release_is_tried_until_it_is_answered() -> Result<()> {
    let (world, session) = (World::shadowed().await?, Duration::from_secs(1));
    let new = Altered::with_info(Altered(world.new.clone()), |info| info.capability.liveness.session = Some(session));
    let dual = Arc::new(Dual::connect(Arc::new(world.old.clone()), Arc::new(new)).await?);
    let claim = acquire(&dual, "x").await?;
    world.until("the new store has it", async || Ok(world.new.holders("x").await? == 1)).await?;
    world.new.refuses.store(true, Ordering::SeqCst);
    dual.release(&claim).await?;
    sleep(4 * (TTL + session)).await;
    assert_eq!(world.new.holders("x").await?, 1, "the store's own clock has stood still");
    world.new.refuses.store(false, Ordering::SeqCst);
    for _ in 0..100 {
        if world.new.holders("x").await? == 0 {
            return Ok(());
        }
        sleep(Duration::from_millis(500)).await;
    }
    panic!("it is not given back");
}

#[tokio::test(start_paused = true)]
async fn what_follows_a_lease_gives_way_to_the_lease_itself() -> Result<()> {
    let world = World::shadowed().await?;
    let dual = world.client().await?;
    let claim = acquire(&dual, "x").await?;
    world.until("the new store has it", async || Ok(world.new.holders("x").await? == 1)).await?;
    let step = world.migration.step(Phase::Both, |_| ()).await?;
    assert_eq!((step.record.phase, step.record.is_shadowed), (Phase::Both, false));
    world
        .until("the client has read the phase", async || {
            renew(&dual, &claim).await?;
            Ok(dual.phase() == Phase::Both)
        })
        .await?;
    let holders = state(&world.new.inner, "x").await?.holders;
    assert_eq!(holders.iter().map(|holder| holder.token).collect::<Vec<_>>(), [Some(claim.token)]);
    dual.release(&claim).await?;
    assert_eq!(world.new.holders("x").await?, 0);
    Ok(())
}

/// A store whose records give no answer once, and come late after that.
#[derive(Debug)]
struct AwayAtFirst {
    inner: MemoryStore,
    is_away: AtomicBool,
    late: Duration,
}

#[async_trait]
impl Alter for AwayAtFirst {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        vec![Box::new(RecordsOf(self))]
    }
}

struct RecordsOf<'a>(&'a AwayAtFirst);

#[async_trait]
impl Records for RecordsOf<'_> {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        if self.0.is_away.swap(false, Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "connection refused"));
        }
        sleep(self.0.late).await;
        self.0.inner.records()[0].read(name).await
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        self.0.inner.records()[0].compare_and_set(name, seen, new).await
    }
}

/// A client of a migration whose new store is away when the client connects.
async fn connected_without(world: &World, inner: MemoryStore, late: Duration) -> Result<Dual> {
    let new = AwayAtFirst { inner, is_away: AtomicBool::new(true), late };
    Dual::connect(Arc::new(world.old.clone()), Arc::new(Altered(new))).await
}

/// Its URL may lead to the locks of another service, which would be kept out.
#[tokio::test(start_paused = true)]
async fn a_store_that_has_not_shown_the_record_is_asked_for_no_lease() -> Result<()> {
    let world = World::shadowed().await?;
    let other = MemoryStore::with_clock(Arc::clone(&world.clock) as Arc<dyn Clock>);
    let dual = connected_without(&world, other.clone(), Duration::ZERO).await?;
    for name in ["x", "y", "z"] {
        let claim = acquire(&dual, name).await?;
        // The next reading of the record asks the other store as well.
        world.clock.advance(Duration::from_millis(600));
        sleep(Duration::from_millis(600)).await;
        renew(&dual, &claim).await?;
    }
    assert!(other.inspect(&Query::Prefix(String::new())).await?.is_empty());
    assert_eq!(dual.tally(), Tally { failed: 6, ..Tally::default() });
    Ok(())
}

/// Nobody waits for its answer: the old store's comes first each time.
#[tokio::test(start_paused = true)]
async fn a_store_that_shows_the_record_later_than_the_old_one_is_asked_from_then_on() -> Result<()> {
    let world = World::shadowed().await?;
    let dual = connected_without(&world, world.new.inner.clone(), Duration::from_millis(10)).await?;
    let before = acquire(&dual, "before").await?;
    assert_eq!(dual.tally(), Tally { failed: 1, ..Tally::default() });
    // The next reading of the record asks both.
    world.clock.advance(Duration::from_millis(600));
    renew(&dual, &before).await?;
    sleep(Duration::from_millis(20)).await;
    drop(acquire(&dual, "after").await?);
    world.until("the new store has it", async || Ok(dual.tally().granted > 0)).await
}

#[tokio::test(start_paused = true)]
async fn the_shadow_is_of_the_phase_old_alone_and_can_be_ended() -> Result<()> {
    let world = World::shadowed().await?;
    let epoch = world.migration.state().await?.record.epoch;
    assert_eq!(world.migration.shadow(true).await?.record.epoch, epoch, "it is so already");
    let dual = world.client().await?;
    let claim = acquire(&dual, "x").await?;
    world.until("the new store has it", async || Ok(world.new.holders("x").await? == 1)).await?;
    assert_eq!(world.migration.step(Phase::Old, |_| ()).await?.record.phase_name(), "old");
    world
        .until("a renewal has given it back", async || {
            renew(&dual, &claim).await?;
            Ok(world.new.holders("x").await? == 0)
        })
        .await?;
    dual.release(&claim).await?;
    world.migration.step(Phase::Both, |_| ()).await?.copied?;
    assert_eq!(world.migration.shadow(true).await.expect_err("both").kind(), ErrorKind::InvalidInput);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn clients_that_sign_on_are_shown_for_as_long_as_they_live() -> Result<()> {
    let world = World::shadowed().await?;
    let (billing, mail) = (world.client().await?, world.client().await?);
    billing.sign_on(HolderInfo::new("billing@web-3:4711 of the east"));
    mail.sign_on(HolderInfo::new("mail@web-4:12"));
    drop(acquire(&billing, "x").await?);
    let names = async || -> Result<Vec<_>> {
        Ok(world.migration.clients().await?.into_iter().map(|client| client.name.as_str().to_owned()).collect())
    };
    world
        .until("both are shown", async || Ok(names().await? == ["billing@web-3:4711 of the east", "mail@web-4:12"]))
        .await?;
    let clients = async || world.migration.clients().await;
    world.until("what it was answered is shown", async || Ok(clients().await?[0].tally.granted == 1)).await?;
    assert_eq!(clients().await?[1].tally, Tally::default());
    // One that has nothing to do follows the phase as well.
    world.migration.step(Phase::Both, |_| ()).await?.copied?;
    world
        .until("both have read the phase", async || {
            Ok(clients().await?.iter().all(|client| client.phase == Phase::Both))
        })
        .await?;
    assert!(mail.inspect(&Query::Prefix(String::new())).await?.iter().all(|lock| lock.key.as_str() == "x"));
    drop(mail);
    world.until("one has signed off", async || Ok(names().await? == ["billing@web-3:4711 of the east"])).await?;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_client_signs_on_once_the_home_is_back() -> Result<()> {
    let world = World::shadowed().await?;
    #[derive(Debug)]
    struct Refusing(MemoryStore, Arc<AtomicBool>);
    #[async_trait]
    impl Alter for Refusing {
        fn inner(&self) -> &dyn LockStore {
            &self.0
        }

        async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
            if self.1.load(Ordering::SeqCst) {
                return Err(Error::new(ErrorKind::Unavailable, "connection refused"));
            }
            self.0.acquire(request).await
        }
    }
    let is_away = Arc::new(AtomicBool::new(true));
    let old = Arc::new(Altered(Refusing(world.old.clone(), Arc::clone(&is_away))));
    let dual = Arc::new(Dual::connect(old, Arc::new(world.new.inner.clone())).await?);
    dual.sign_on(HolderInfo::new("billing"));
    sleep(Duration::from_secs(30)).await;
    assert!(world.migration.clients().await?.is_empty());
    is_away.store(false, Ordering::SeqCst);
    world.until("it has signed on", async || Ok(world.migration.clients().await?.len() == 1)).await
}
