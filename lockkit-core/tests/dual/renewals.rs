//! What is renewed, taken along to another store, and left behind.

use std::{
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, Effect, Error, ErrorKind, LockStore, MemoryStore, Query, Release, Renewal,
    Renewed, Result,
    migrate::{Dual, Phase, Side},
};
use lockkit_testkit::{Alter, Altered};

use crate::world::{HeldUp, START, TTL, World, poll_once, renewal, request};

#[tokio::test]
async fn a_renewal_does_not_stand_if_the_phase_has_gone_on_meanwhile() -> Result<()> {
    let world = World::started().await?;
    let (frozen, old, _, mine) = world.holder().await?;
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
        let released = dual.release(&mine.claim).await?;
        assert!(matches!(released, Release::NotHeld(_)) && !world.is_held_at(other, "x").await?, "{released:?}");
    }
    Ok(())
}

/// The caller is told to release it: an answer that it was refused would be the end of it.
#[tokio::test]
async fn a_lost_lease_that_is_asked_for_again_is_in_doubt() -> Result<()> {
    let world = World::started().await?;
    world.step(Phase::Both).await?;
    let (dual, mine, next) = (world.client().await?, request("x"), request("x"));
    let Attempt::Granted(_) = dual.acquire(&mine).await? else { panic!("the lock is free") };
    assert!(matches!(world.old.release(&mine.claim).await?, Release::Released { .. }));
    for _ in 0..2 {
        let error = dual.acquire(&mine).await.expect_err("it is lost");
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
    }
    assert!(world.is_held_at(&world.new, "x").await?, "its holder may not have heard");
    assert!(matches!(dual.release(&mine.claim).await?, Release::NotHeld(_)));
    let Attempt::Granted(_) = dual.acquire(&next).await? else { panic!("its own lost lease is in its way") };
    Ok(())
}

#[tokio::test]
async fn the_release_of_a_lost_lease_says_so_each_time() -> Result<()> {
    let world = World::started().await?;
    world.step(Phase::Both).await?;
    let (dual, _, new, mine) = world.holder().await?;
    assert!(matches!(world.old.release(&mine.claim).await?, Release::Released { .. }));
    assert!(matches!(dual.renew(&[renewal(&mine.claim)]).await.remove(0)?, Renewed::Lost(_)));
    new.is_cut_off.store(true, Ordering::SeqCst);
    assert_eq!(dual.release(&mine.claim).await.expect_err("the new store is away").effect(), Effect::Unknown);
    new.is_cut_off.store(false, Ordering::SeqCst);
    let answer = dual.release(&mine.claim).await?;
    assert!(matches!(answer, Release::NotHeld(_)), "{answer:?}");
    assert!(!world.is_held_at(&world.new, "x").await?);
    Ok(())
}

/// The old store has lost `x`. A renewal of both leases finds that, and has to wait for the new store, where it takes `y` along.
async fn lost_in_the_old_store() -> Result<(World, Arc<Dual>, HeldUp, Claim, [Renewal; 2])> {
    let world = World::started().await?;
    let (dual, _, new) = world.held_up().await?;
    let (mine, other) = (request("x"), request("y"));
    let Attempt::Granted(_) = dual.acquire(&other).await? else { panic!("the lock is free") };
    world.step(Phase::Both).await?;
    world.clock.advance(START.fresh);
    let Attempt::Granted(_) = dual.acquire(&mine).await? else { panic!("the lock is free") };
    assert!(matches!(world.old.release(&mine.claim).await?, Release::Released { .. }));
    new.acquisitions_only.store(true, Ordering::SeqCst);
    new.is_held_up.send_replace(true);
    let renewals = [&mine, &other].map(|request| renewal(&request.claim));
    Ok((world, dual, new, mine.claim, renewals))
}

/// The call that finds a lease lost may be dropped, or its caller may stand still with the answer: its holder has not heard of it.
#[tokio::test]
async fn what_is_left_of_a_lost_lease_stays_until_its_release() -> Result<()> {
    let (world, dual, new, mine, renewals) = lost_in_the_old_store().await?;
    assert!(poll_once(pin!(dual.renew(&renewals)).as_mut()).is_pending());
    assert!(world.is_held_at(&world.new, "y").await?, "it was taken along");
    new.is_held_up.send_replace(false);
    let next = request("z");
    let Attempt::Granted(_) = dual.acquire(&next).await? else { panic!("the lock is free") };
    assert!(world.is_held_at(&world.new, "x").await?, "its holder believes in it");
    assert!(matches!(dual.renew(&renewals).await.remove(0)?, Renewed::Lost(_)));
    drop(dual.renew(&[renewal(&next.claim)]).await);
    assert!(world.is_held_at(&world.new, "x").await?, "the answer may not have come to its holder");
    assert!(matches!(dual.release(&mine).await?, Release::NotHeld(_)));
    assert!(!world.is_held_at(&world.new, "x").await?, "its holder has heard");
    Ok(())
}

/// It was being taken along there, and would keep everybody out until its ttl is over.
#[tokio::test]
async fn a_release_that_a_store_of_the_phase_did_not_hear_is_in_doubt() -> Result<()> {
    let world = World::started().await?;
    let (dual, _, new, mine) = world.holder().await?;
    world.step_and_read(Phase::Both, &dual).await?;
    new.acquisitions_only.store(true, Ordering::SeqCst);
    new.is_held_up.send_replace(true);
    assert!(poll_once(pin!(dual.renew(&[renewal(&mine.claim)])).as_mut()).is_pending());
    assert!(world.is_held_at(&world.new, "x").await?, "it was taken along");
    new.is_cut_off.store(true, Ordering::SeqCst);
    assert_eq!(dual.release(&mine.claim).await.expect_err("the new store is away").effect(), Effect::Unknown);
    new.is_cut_off.store(false, Ordering::SeqCst);
    dual.release(&mine.claim).await?;
    assert!(!world.is_held_at(&world.new, "x").await?, "the core repeats it");
    Ok(())
}

/// A holder does not hear that its lease is lost before the renewal that found it has seen to others, and may release it meanwhile.
#[tokio::test]
async fn a_lost_lease_is_not_released_as_if_it_was_held() -> Result<()> {
    let (_world, dual, _new, mine, renewals) = lost_in_the_old_store().await?;
    let mut renewing = Box::pin(dual.renew(&renewals));
    assert!(poll_once(renewing.as_mut()).is_pending());
    let released = dual.release(&mine).await?;
    assert!(matches!(released, Release::NotHeld(_)), "{released:?}: the old store had it no more");
    Ok(())
}

/// Renewals of one claim, as nested acquisitions make them: those that began before it was taken along do not take it along again.
#[tokio::test]
async fn a_renewal_that_comes_late_leaves_alone_what_another_took_along() -> Result<()> {
    let world = World::started().await?;
    let (dual, old, new, mine) = world.holder().await?;
    world.step_and_read(Phase::Both, &dual).await?;
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
    let (dual, _, new, mine) = world.holder().await?;
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
    let (dual, _, new, mine) = world.holder().await?;
    world.step_and_read(Phase::Both, &dual).await?;
    new.before.store(true, Ordering::SeqCst);
    new.is_held_up.send_replace(true);
    let renewals = [renewal(&mine.claim)];
    let mut late = Box::pin(dual.renew(&renewals));
    assert!(poll_once(late.as_mut()).is_pending());
    assert!(poll_once(pin!(new.came.notified())).is_ready(), "the new store is asked");
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

/// The phase goes back, so that a renewal leaves the new store, and then to both again. From here on releases come through to that store,
/// and requests do not.
async fn back_and_forth(world: &World, dual: &impl LockStore, new: &HeldUp, renewals: &[Renewal]) -> Result<()> {
    new.before.store(true, Ordering::SeqCst);
    world.step(Phase::Old).await?;
    world.clock.advance(START.fresh);
    let Renewed::Held(_) = dual.renew(renewals).await.remove(0)? else { panic!("it is held") };
    assert!(!world.is_held_at(&world.new, "x").await?, "it was left behind");
    world.step(Phase::Both).await?;
    world.clock.advance(START.fresh);
    Ok(())
}

/// The phase went back, and to both again, while the new store's grant was on its way: it was released there meanwhile.
#[tokio::test]
async fn a_grant_that_is_heard_after_its_release_is_asked_for_again() -> Result<()> {
    let world = World::with_durable_home().await?;
    let (dual, _, new, mine) = world.holder().await?;
    world.step_and_read(Phase::Both, &dual).await?;
    new.is_held_up.send_replace(true);
    let renewals = [renewal(&mine.claim)];
    let mut late = Box::pin(dual.renew(&renewals));
    assert!(poll_once(late.as_mut()).is_pending());
    assert!(world.is_held_at(&world.new, "x").await?, "it was granted");
    back_and_forth(&world, &dual, &new, &renewals).await?;
    new.is_held_up.send_replace(false);
    // The one after it releases what may be left.
    for answer in [late.await.remove(0), dual.renew(&renewals).await.remove(0)] {
        assert!(matches!(&answer, Err(error) if error.is_retryable()), "{answer:?}");
    }
    let Renewed::Held(_) = dual.renew(&renewals).await.remove(0)? else { panic!("it is held") };
    assert!(world.is_held_at(&world.new, "x").await?, "it was taken along");
    Ok(())
}

/// The phase went back, and to both again, before a renewal comes to the new store.
#[tokio::test]
async fn a_late_answer_about_a_former_token_loses_nothing() -> Result<()> {
    let world = World::with_durable_home().await?;
    world.step(Phase::Both).await?;
    let (dual, _, new, mine) = world.holder().await?;
    new.before.store(true, Ordering::SeqCst);
    new.is_held_up.send_replace(true);
    let renewals = [renewal(&mine.claim)];
    let mut late = Box::pin(dual.renew(&renewals));
    assert!(poll_once(late.as_mut()).is_pending());
    assert!(poll_once(pin!(new.came.notified())).is_ready(), "the new store is asked");
    new.is_held_up.send_replace(false);
    for goal in [Phase::Old, Phase::Both] {
        world.step(goal).await?;
        world.clock.advance(START.fresh);
        let Renewed::Held(_) = dual.renew(&renewals).await.remove(0)? else { panic!("it is held") };
    }
    let answer = late.await.remove(0);
    assert!(!matches!(answer, Ok(Renewed::Lost(_))), "{answer:?}");
    let Renewed::Held(_) = dual.renew(&renewals).await.remove(0)? else { panic!("it is held") };
    Ok(())
}

/// The phase went back, and to both again, while a renewal waited for its answers: by now the new store does not have the lease.
#[tokio::test]
async fn a_renewal_does_not_stand_if_the_lease_was_left_behind_meanwhile() -> Result<()> {
    let world = World::with_durable_home().await?;
    world.step(Phase::Both).await?;
    let (dual, _, new, mine) = world.holder().await?;
    new.is_held_up.send_replace(true);
    let renewals = [renewal(&mine.claim)];
    let mut late = Box::pin(dual.renew(&renewals));
    assert!(poll_once(late.as_mut()).is_pending());
    assert!(poll_once(pin!(new.came.notified())).is_ready(), "the new store is asked");
    back_and_forth(&world, &dual, &new, &renewals).await?;
    new.is_held_up.send_replace(false);
    let answer = late.await.remove(0);
    assert!(matches!(&answer, Err(error) if error.is_retryable()), "{answer:?}");
    let Renewed::Held(_) = dual.renew(&renewals).await.remove(0)? else { panic!("it is held") };
    assert!(world.is_held_at(&world.new, "x").await?, "it was taken along");
    Ok(())
}

/// By then another one asks the new store for the lock again.
#[tokio::test]
async fn a_renewal_does_not_stand_while_another_one_takes_the_lease_along() -> Result<()> {
    let world = World::with_durable_home().await?;
    world.step(Phase::Both).await?;
    let (dual, _, new, mine) = world.holder().await?;
    new.is_held_up.send_replace(true);
    let renewals = [renewal(&mine.claim)];
    let (mut late, mut next) = (Box::pin(dual.renew(&renewals)), Box::pin(dual.renew(&renewals)));
    assert!(poll_once(late.as_mut()).is_pending());
    assert!(poll_once(pin!(new.came.notified())).is_ready(), "the new store is asked");
    back_and_forth(&world, &dual, &new, &renewals).await?;
    dual.inspect(&Query::Prefix(String::new())).await?;
    assert!(poll_once(next.as_mut()).is_pending());
    assert!(poll_once(pin!(new.came.notified())).is_ready(), "the new store is asked again");
    new.is_held_up.send_replace(false);
    let answer = late.await.remove(0);
    assert!(matches!(&answer, Err(error) if error.is_retryable()), "{answer:?}");
    let Renewed::Held(_) = next.await.remove(0)? else { panic!("it is held") };
    assert!(world.is_held_at(&world.new, "x").await?, "it was taken along");
    Ok(())
}

/// A store to which the first request for a lock comes after its release.
#[derive(Debug)]
struct Overtaken {
    store: MemoryStore,
    was_asked: AtomicBool,
    late: Mutex<Option<AcquireRequest>>,
}

#[async_trait]
impl Alter for Overtaken {
    fn inner(&self) -> &dyn LockStore {
        &self.store
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        if self.was_asked.swap(true, Ordering::SeqCst) {
            return self.store.acquire(request).await;
        }
        *self.late.lock().expect("lock") = Some(request.clone());
        Err(Error::new(ErrorKind::Unavailable, "connection reset").unknown_effect())
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        let answer = self.store.release(claim).await;
        let late = self.late.lock().expect("lock").take();
        if let Some(request) = late {
            self.store.acquire(&request).await?;
        }
        answer
    }
}

#[tokio::test]
async fn a_lock_that_goes_along_is_not_in_its_own_way() -> Result<()> {
    let world = World::started().await?;
    let new = Overtaken { store: world.new.clone(), was_asked: AtomicBool::new(false), late: Mutex::default() };
    let dual = Dual::connect(Arc::new(world.old.clone()), Arc::new(Altered(new))).await?;
    let mine = request("x");
    let Attempt::Granted(granted) = dual.acquire(&mine).await? else { panic!("the lock is free") };
    world.step(Phase::Both).await?;
    world.clock.advance(START.fresh);
    let mut until = granted.until;
    for _ in 0..8 {
        world.clock.advance(TTL / 8);
        if let Ok(Renewed::Held(hold)) = dual.renew(&[renewal(&mine.claim)]).await.remove(0) {
            until = hold.until;
        }
        assert!(world.clock.now() < until, "nobody else wants it");
    }
    Ok(())
}

#[tokio::test]
async fn a_store_that_is_not_needed_any_more_delays_no_release() -> Result<()> {
    let world = World::with_durable_home().await?;
    world.step(Phase::Both).await?;
    let (dual, _, new, mine) = world.holder().await?;
    new.is_held_up.send_replace(true);
    world.step(Phase::Old).await?;
    world.clock.advance(START.fresh);
    let Ok(Renewed::Held(_)) = dual.renew(&[renewal(&mine.claim)]).await.remove(0) else { panic!("it is held") };
    let released = tokio::time::timeout(Duration::from_secs(1), dual.release(&mine.claim)).await;
    assert!(matches!(released.expect("the old store alone has it"), Ok(Release::Released { .. })));
    assert!(!world.is_held_at(&world.old, "x").await?);
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
