//! What is granted, and when that stands.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    AcquireRequest, Attempt, Clock, Error, ErrorKind, Fence, FenceRequest, HolderInfo, LockKey, LockStore, Locker,
    MemoryStore, Outcome, Query, Release, Renewal, Renewed, Result,
    migrate::{Phase, PhaseRecord, Side},
    store::Swap,
};

use crate::world::{START, TTL, World, renewal, request};

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

/// The old store's lease is extended when its fence is raised, after the new one took its time.
#[tokio::test]
async fn a_lease_that_was_extended_on_the_way_is_of_use_for_as_long() -> Result<()> {
    let world = World::started().await?;
    world.step(Phase::Both).await?;
    let (dual, _, new) = world.held_up().await?;
    new.before.store(true, Ordering::SeqCst);
    new.is_held_up.send_replace(true);
    let asked = request("x");
    let (answer, ()) = tokio::join!(dual.acquire(&asked), async {
        new.came.notified().await;
        world.clock.advance(TTL * 4 / 5);
        new.is_held_up.send_replace(false);
    });
    let Attempt::Granted(hold) = answer? else { panic!("the lock is free") };
    assert!(hold.until.since(world.clock.now()) > TTL / 2, "both stores have it for a ttl");
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
    let (dual, old, new, mine) = world.holder().await?;
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

/// The store that is heard next has not been told.
#[tokio::test]
async fn a_client_that_heard_of_the_end_stays_with_that() -> Result<()> {
    let world = World::started().await?;
    let (dual, old, new) = world.held_up().await?;
    let (name, records) = (LockKey::new("lockkit/migration")?, world.old.records());
    let known = records[0].read(&name).await?.expect("it was started");
    let end = PhaseRecord::from_record(&known, Side::Old)?.ended()?.to_record(Side::Old)?;
    assert_eq!(records[0].compare_and_set(&name, Some(&known), Some(&end)).await?, Swap::Done);
    for (away, back) in [(&new, &old), (&old, &new)] {
        away.is_cut_off.store(true, Ordering::SeqCst);
        back.is_cut_off.store(false, Ordering::SeqCst);
        world.clock.advance(START.fresh);
        let error = dual.acquire(&request("x")).await.expect_err("the migration is over");
        assert!(error.to_string().contains("the migration is over"), "{error}");
    }
    Ok(())
}

/// Where leases end with a session, the core repeats a release until it is answered.
#[tokio::test]
async fn a_release_is_answered_when_the_migration_is_over() -> Result<()> {
    let world = World::started().await?;
    let (dual, _, _, mine) = world.holder().await?;
    world.clock.advance(2 * TTL);
    world.migration.finish(|drain| world.clock.advance(drain.left)).await?;
    for _ in 0..2 {
        let answer = dual.release(&mine.claim).await?;
        assert!(matches!(answer, Release::NotHeld(_)), "{answer:?}");
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
