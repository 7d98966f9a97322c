//! The steps from phase to phase: what may be done when, and by whom.

use std::{
    future::Future,
    pin::pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, Waker},
    time::Duration,
};

use lockkit_core::{
    Clock, ErrorKind, Fence, Locker, MemoryStore, Result,
    migrate::{Dual, Migration, Phase, Side, Start},
};

use crate::world::{START, World, read, write};

#[tokio::test(start_paused = true)]
async fn clients_of_other_stores_are_refused() -> Result<()> {
    let world = World::new();
    let connect = async |old: &MemoryStore, new: &MemoryStore| {
        Dual::connect(Arc::new(old.clone()), Arc::new(new.clone())).await.map(drop)
    };
    let refused = |outcome: Result<()>| assert_eq!(outcome.expect_err("refused").kind(), ErrorKind::Misconfigured);
    refused(connect(&world.old, &world.new).await);
    world.migration.start(START).await?;
    connect(&world.old, &world.new).await?;
    refused(connect(&world.new, &world.old).await);
    refused(connect(&world.old, &MemoryStore::new()).await);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn only_a_step_back_goes_without_a_drain() -> Result<()> {
    let world = World::started().await?;
    let drained = async |goal: Phase| {
        let mut whole = Duration::ZERO;
        let told = |drain: lockkit_core::migrate::Drain| {
            whole = drain.whole;
            world.clock.advance(drain.left);
        };
        let before = world.clock.now();
        let step = world.migration.step(goal, told).await?;
        assert!(world.clock.now().since(before) >= whole);
        Result::Ok((whole, step.record))
    };
    let leap = world.migration.step(Phase::New, |_| ()).await.expect_err("a leap");
    assert_eq!(leap.kind(), ErrorKind::InvalidInput);
    assert_eq!(drained(Phase::Both).await?.0, Duration::ZERO);
    // The home is a store that may lose what it confirmed: so even the step back waits (rule M16).
    let (whole, old) = drained(Phase::Old).await?;
    assert_eq!(whole, old.drain());
    assert!(old.floor > Fence::NONE, "the new store may have been used alone, and the home have lost that");
    assert_eq!(drained(Phase::Both).await?.0, Duration::ZERO);
    let (whole, new) = drained(Phase::New).await?;
    assert_eq!(whole, new.drain());
    assert!(new.floor > Fence::NONE && new.epoch == 5);
    assert_eq!(drained(Phase::New).await?, (Duration::ZERO, new), "nothing is done twice");
    Ok(())
}

/// The migrator is killed at each moment at which it waits for something, in every step; another goes on.
#[tokio::test(start_paused = true)]
async fn whoever_goes_on_after_a_killed_migrator_finds_a_sound_state() -> Result<()> {
    for goals in [
        &[Phase::Both][..],
        &[Phase::Both, Phase::Old],
        &[Phase::Both, Phase::New],
        &[Phase::Both, Phase::New, Phase::Both],
    ] {
        let (last, before) = goals.split_last().expect("a step");
        for killed_at in 0.. {
            let world = World::started().await?;
            for goal in before {
                world.step(*goal).await?;
            }
            let from = world.migration.state().await?.record;
            let is_done = {
                let advance = |drain: lockkit_core::migrate::Drain| world.clock.advance(drain.left);
                let mut step = pin!(world.migration.step(*last, advance));
                let mut is_done = false;
                for _ in 0..=killed_at {
                    let polled = step.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                    is_done = is_done || matches!(polled, Poll::Ready(_));
                    if is_done {
                        break;
                    }
                    tokio::time::advance(Duration::from_secs(1)).await;
                }
                is_done
            };
            let [old, new] = world.records().await?.map(|record| record.expect("no record is ever removed"));
            assert!(old.epoch >= new.epoch, "the home is first");
            for found in [&old, &new] {
                assert!(found.epoch >= from.epoch && [from.phase, *last].contains(&found.phase));
            }
            assert!(old.epoch <= from.epoch + 1 && !(old.phase == Phase::New && new.phase == Phase::Old));
            let after = world.step(*last).await?;
            // A change that was not copied is written anew.
            let renewed = u64::from(old.epoch != new.epoch && old.phase == *last);
            assert_eq!((after.phase, after.epoch), (*last, from.epoch + 1 + renewed), "killed at {killed_at}");
            assert_eq!(world.records().await?, [Some(after.clone()), Some(after)]);
            if is_done {
                break;
            }
        }
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn two_who_move_it_on_exclude_each_other() -> Result<()> {
    let world = World::started().await?;
    let back = world.step(Phase::Both).await?.next(Phase::Old, Fence::NONE)?;
    let advance = world.migration.step(Phase::New, |drain| {
        // The other goes back meanwhile.
        for (at, store) in [(Side::Old, &world.old), (Side::New, &world.new)] {
            let written = pin!(write(store, at, Some(&back))).poll(&mut Context::from_waker(Waker::noop()));
            assert!(matches!(written, Poll::Ready(Ok(()))));
        }
        world.clock.advance(drain.left);
    });
    let error = advance.await.expect_err("it is in the phase old by now");
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert_eq!(world.migration.state().await?.record.phase, Phase::Old);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_stops_all_but_the_state() -> Result<()> {
    let world = World::started().await?;
    world.is_cut_off.store(true, Ordering::SeqCst);
    let state = world.migration.state().await?;
    assert!(matches!(state.has, [Ok(true), Err(_)]));
    assert!(world.migration.step(Phase::Both, |_| ()).await.is_err());
    assert_eq!(world.migration.state().await?.record.phase, Phase::Old);
    world.is_cut_off.store(false, Ordering::SeqCst);
    world.step(Phase::Both).await?;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_step_between_other_stores_is_refused() -> Result<()> {
    let world = World::started().await?;
    let between = |old: &MemoryStore, new: &MemoryStore| Migration::new(Arc::new(old.clone()), Arc::new(new.clone()));
    let elsewhere = MemoryStore::with_clock(Arc::clone(&world.clock) as Arc<dyn Clock>);
    for wrong in [between(&world.old, &elsewhere), between(&elsewhere, &world.new), between(&world.new, &world.old)] {
        let error = wrong.step(Phase::Both, |_| ()).await.expect_err("not the stores that it was started with");
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert_eq!(world.migration.state().await?.record.phase, Phase::Old);
        assert_eq!(read(&elsewhere, Side::Old).await?, None);
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn others_who_hold_locks_stop_a_step_unless_told_otherwise() -> Result<()> {
    let world = World::started().await?;
    let theirs = Locker::new(world.old.clone()).lock("a").acquire().await?;
    let error = world.migration.step(Phase::Both, |_| ()).await.expect_err("a plain client holds a");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    let step = world.migration.clone().despite_others().step(Phase::Both, |_| ()).await?;
    assert_eq!(step.record.phase, Phase::Both);
    // One that comes in the middle of the drain is seen after it.
    assert_eq!(theirs.release().await?, lockkit_core::Outcome::Released);
    let late = Locker::new(world.old.clone());
    let mut guard = None;
    let error = world.migration.step(Phase::New, |drain| {
        if guard.is_none() {
            let lock = late.lock("late").no_renewal();
            let got = pin!(lock.try_acquire()).poll(&mut Context::from_waker(Waker::noop()));
            guard = if let Poll::Ready(Ok(got)) = got { got } else { None };
        }
        world.clock.advance(drain.left);
    });
    assert_eq!(error.await.expect_err("a plain client came").kind(), ErrorKind::Misconfigured);
    assert!(guard.is_some());
    assert_eq!(world.migration.state().await?.record.phase, Phase::Both);
    Ok(())
}

/// Nobody is at work, and yet clients of the migration would not see it in the phase new.
#[tokio::test(start_paused = true)]
async fn a_lock_that_is_kept_for_a_time_stops_a_step_and_is_told_from_one_that_is_held() -> Result<()> {
    let world = World::started().await?;
    let plain = Locker::new(world.old.clone());
    let (window, kept) = (Duration::from_secs(60), "1 of them kept for a time after the work (keep_for)");
    let guard = plain.lock("a").keep_for(window).acquire().await?;
    assert_eq!(guard.release().await?, lockkit_core::Outcome::Released);
    let refusal = async || world.migration.step(Phase::Both, |_| ()).await.expect_err("a is kept");
    let error = refusal().await;
    assert!(error.kind() == ErrorKind::Misconfigured && error.to_string().contains(kept), "{error}");
    world.clock.advance(window);
    let held = plain.lock("b").acquire().await?;
    let error = refusal().await;
    assert!(error.to_string().contains("\"b\"") && !error.to_string().contains("kept"), "{error}");
    assert_eq!(held.release().await?, lockkit_core::Outcome::Released);
    world.step(Phase::Both).await?;
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn with_a_durable_home_the_way_back_needs_the_home_alone() -> Result<()> {
    let world = World::new();
    world.migration.start(Start { home_is_durable: true, ..START }).await?;
    world.step(Phase::Both).await?;
    world.is_cut_off.store(true, Ordering::SeqCst);
    let step = world.migration.step(Phase::Old, |_| panic!("no drain")).await?;
    assert_eq!(step.record.phase, Phase::Old);
    assert!(step.copied.is_err());
    world.is_cut_off.store(false, Ordering::SeqCst);
    // Repeated, it tells the other store.
    let told = world.step(Phase::Old).await?;
    assert_eq!(world.records().await?, [Some(told.clone()), Some(told)]);
    Ok(())
}
