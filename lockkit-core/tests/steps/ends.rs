//! The start of a migration and its end, and what a command does that stood still meanwhile.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Claim, Clock, Error, ErrorKind, Fence, FenceAbove, LockStore, Locker, MemoryStore, Outcome, Query, Release, Result,
    ShiftedClock, StoreInfo,
    migrate::{Drain, Dual, Fences, Migration, Phase, Side, Start},
};
use lockkit_testkit::{Alter, Altered};
use tokio::runtime::Builder;

use crate::world::{Away, START, World, has_record, poll_times, write};

/// For what is waited for on a clock that nobody advances.
const SHORT: Start = Start { fresh: Duration::from_millis(100), ..START };

#[tokio::test(start_paused = true)]
async fn a_start_can_be_repeated_and_another_can_not_begin() -> Result<()> {
    let world = World::new();
    let error = world.migration.state().await.expect_err("nothing is there");
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    let first = world.migration.start(START).await?;
    assert_eq!((first.phase, first.home, first.epoch), (Phase::Old, Side::Old, 1));
    assert_eq!(world.records().await?, [Some(first.clone()), Some(first.clone())]);
    assert_eq!(world.migration.start(START).await?, first);
    let longer = Start { max_ttl: START.max_ttl * 2, ..START };
    assert_eq!(world.migration.start(longer).await.expect_err("other settings").kind(), ErrorKind::Misconfigured);
    let elsewhere = Migration::new(Arc::new(world.old.clone()), Arc::new(MemoryStore::new()));
    assert_eq!(elsewhere.start(START).await.expect_err("another store").kind(), ErrorKind::Misconfigured);
    let same = Migration::new(Arc::new(world.old.clone()), Arc::new(world.old.clone()));
    assert_eq!(same.start(START).await.expect_err("one store").kind(), ErrorKind::InvalidInput);
    Ok(())
}

/// Of a store that loses the answers to releases, so that whoever wants a lock to be free has to ask again.
#[derive(Debug)]
struct Forgetful {
    inner: MemoryStore,
    is_asked: AtomicBool,
    info: StoreInfo,
}

#[async_trait]
impl Alter for Forgetful {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if !self.is_asked.swap(true, Ordering::SeqCst) {
            return Err(Error::new(ErrorKind::Unavailable, "connection refused").unknown_effect());
        }
        self.inner.release(claim).await
    }
}

/// Where leases end with the session, the locks for the migration's own use are always the same.
#[tokio::test(start_paused = true)]
async fn what_a_migrator_has_asked_for_is_released_in_the_end() -> Result<()> {
    let (old, new) = (MemoryStore::new(), MemoryStore::new());
    let mut info = old.info().clone();
    info.capability.liveness.session = Some(Duration::from_secs(10));
    let old = Forgetful { inner: old, is_asked: AtomicBool::new(false), info };
    let migration = Migration::new(Arc::new(Altered(old)), Arc::new(new));
    assert!(migration.start(START).await.expect_err("the release got lost").is_retryable());
    tokio::time::sleep(Duration::from_secs(2)).await;
    migration.start(START).await?;
    Ok(())
}

/// Polls a call so often, has another migrator finish the migration then, and lets the call go on. Whether it was over by then.
async fn finished_after<T>(polls: usize, world: &World, call: impl Future<Output = Result<T>>) -> Result<bool> {
    let mut call = pin!(call);
    if poll_times(call.as_mut(), polls) {
        return Ok(true);
    }
    world.migration.clone().fences_are_set().finish(|drain| world.clock.advance(drain.left)).await?;
    let ends = world.records().await?;
    assert!(ends.iter().flatten().all(|record| record.is_over));
    drop(call.await);
    assert_eq!(world.records().await?, ends, "after {polls} polls");
    Ok(false)
}

/// Whoever moves a migration on may stand still for long at any await, and find that it was finished meanwhile.
#[tokio::test(start_paused = true)]
async fn what_was_finished_stays_so() -> Result<()> {
    for home_lost_it in [false, true] {
        for steps in [false, true] {
            for polls in 0.. {
                let world = World::started().await?;
                if home_lost_it {
                    write(&world.old, Side::Old, None).await?;
                }
                let is_over = if steps {
                    let copied = async { world.migration.shadow(true).await?.copied };
                    finished_after(polls, &world, copied).await?
                } else {
                    finished_after(polls, &world, world.migration.settle()).await?
                };
                if is_over {
                    assert!(polls > 4, "it was never in the middle");
                    break;
                }
            }
        }
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn fences_that_were_set_are_no_afterthought() -> Result<()> {
    let world = World::new();
    let above = |number: u64| Start { fence_above: Fence::new(number), ..START };
    let first = world.migration.start(above(1 << 40)).await?;
    for start in [above(1 << 40), above(1 << 30), START] {
        assert_eq!(world.migration.start(start).await?, first);
    }
    let error = world.migration.start(above(1 << 41)).await.expect_err("fences up to that may have been given");
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn holders_are_told_apart_and_keep_the_end_away() -> Result<()> {
    let world = World::started().await?;
    let plain = Locker::new(world.old.clone());
    let dual = Locker::new(Dual::connect(Arc::new(world.old.clone()), Arc::new(world.new.clone())).await?);
    let (theirs, ours) = (plain.lock("a").acquire().await?, dual.lock("b").ttl(START.max_ttl).acquire().await?);
    let seen = world.migration.holders().await?;
    let of = |name: &str| seen.iter().find(|seen| seen.key.as_str() == name).map(|seen| (seen.side, seen.phase));
    assert_eq!((of("a"), of("b")), (Some((Side::Old, None)), Some((Side::Old, Some(Phase::Old)))));
    assert!(seen.iter().all(|seen| !seen.holder.info.as_str().contains('~')));
    let advance = |drain: Drain| world.clock.advance(drain.left);
    assert_eq!(world.migration.finish(advance).await.expect_err("b is held").kind(), ErrorKind::Unavailable);
    for guard in [theirs, ours] {
        assert_eq!(guard.release().await?, lockkit_core::Outcome::Released);
    }
    world.step(Phase::Both).await?;
    assert_eq!(world.migration.finish(advance).await.expect_err("both").kind(), ErrorKind::InvalidInput);
    world.step(Phase::New).await?;
    world.migration.clone().fences_are_set().finish(advance).await?;
    let [old, new] = world.records().await?.map(|record| record.expect("no record is ever removed"));
    assert!(old == new && old.is_over && old.is_told);
    world.migration.finish(advance).await?;
    assert_eq!(world.records().await?, [Some(old), Some(new)], "it was over");
    assert_eq!(world.step(Phase::Both).await.expect_err("over").kind(), ErrorKind::Misconfigured);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_store_is_left_to_itself_once_its_fences_are_above_all_others() -> Result<()> {
    let world = World::started().await?;
    assert_eq!(world.migration.fences().await?, Fences::Higher);
    world.step(Phase::Both).await?;
    assert_eq!(world.migration.fences().await.expect_err("both").kind(), ErrorKind::InvalidInput);
    let floor = world.step(Phase::New).await?.floor;
    let advance = |drain: Drain| world.clock.advance(drain.left);
    let Fences::HigherIn(time) = world.migration.fences().await? else { panic!("the floor is ahead of the clocks") };
    assert!(time > Duration::from_secs(3000) && time < Duration::from_secs(4000), "{time:?}");
    let error = world.migration.finish(advance).await.expect_err("its fences would fall");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    world.migration.clone().fences_are_set().finish(advance).await?;
    let after = Locker::new(FenceAbove::new(floor, world.new.clone())).lock("never used").acquire().await?;
    assert!(after.fence() > floor);
    Ok(())
}

/// What is left of a migration is no obstacle to the next one, and tells it how far epochs and fences have got.
#[tokio::test(start_paused = true)]
async fn the_next_migration_goes_on_from_the_end_of_the_last_one() -> Result<()> {
    let world = World::started().await?;
    let advance = |drain: Drain| world.clock.advance(drain.left);
    for phase in [Phase::Both, Phase::New, Phase::Both, Phase::Old] {
        world.step(phase).await?;
    }
    let late = world.migration.state().await?.record;
    world.migration.clone().fences_are_set().finish(advance).await?;
    let dual = || Dual::connect(Arc::new(world.old.clone()), Arc::new(world.new.clone()));
    assert!(dual().await.expect_err("over").to_string().contains("connect to the old store by itself"));
    let again = world.migration.start(START).await?;
    assert_eq!((again.epoch, again.floor, again.phase), (late.epoch + 3, late.floor, Phase::Old));
    assert!(again.floor > Fence::NONE && !again.is_of(&late));
    assert_eq!(world.records().await?, [Some(again.clone()), Some(again)]);
    // A client of the last one acts on nothing any more.
    assert_eq!(dual().await?.phase(), Phase::Old);
    world.migration.clone().fences_are_set().finish(advance).await?;

    // The old store of one can be the new one of another.
    let third = MemoryStore::with_clock(Arc::clone(&world.clock) as Arc<dyn Clock>);
    let onwards = Migration::new(Arc::new(third.clone()), Arc::new(world.old.clone()));
    assert_eq!(onwards.state().await.expect_err("not started").kind(), ErrorKind::Misconfigured);
    assert_eq!(onwards.finish(advance).await.expect_err("not started").kind(), ErrorKind::Misconfigured);
    let error = Dual::connect(Arc::new(third.clone()), Arc::new(world.old.clone())).await.expect_err("not started");
    assert!(error.to_string().contains("start one"), "{error}");
    let started = onwards.start(START).await?;
    assert_eq!(onwards.step(Phase::Both, advance).await?.record.epoch, started.epoch + 1);
    assert_eq!(world.migration.start(START).await.expect_err("it is in use").kind(), ErrorKind::Misconfigured);
    Ok(())
}

/// A command that stood still since before the migration was finished, and another began, writes nothing.
#[tokio::test(start_paused = true)]
async fn a_command_of_a_migration_that_is_over_writes_nothing() -> Result<()> {
    for starts in [false, true] {
        for polls in 0.. {
            let world = World::new();
            let slow = |inner: &MemoryStore| {
                let (is_cut_off, why) = (Arc::default(), ErrorKind::Denied);
                Arc::new(Altered(Away { inner: inner.clone(), is_cut_off, why }))
            };
            let another = Migration::new(slow(&world.old), slow(&world.new));
            if !starts {
                world.migration.start(START).await?;
                write(&world.old, Side::Old, None).await?;
            }
            let mut call = pin!(async { if starts { another.start(START).await } else { another.settle().await } });
            if poll_times(call.as_mut(), polls) {
                assert!(polls > 4, "it was never in the middle");
                break;
            }
            // Locks that the other asked for by the way are free by then.
            world.clock.advance(Duration::from_secs(60));
            if starts {
                world.migration.start(START).await?;
            }
            world.migration.clone().fences_are_set().finish(|drain| world.clock.advance(drain.left)).await?;
            world.migration.start(START).await?;
            let after = world.records().await?;
            drop(call.await);
            assert_eq!(world.records().await?, after, "after {polls} polls");
        }
    }
    Ok(())
}

/// Its home has its record by then, and the other store was in another migration meanwhile.
#[tokio::test(start_paused = true)]
async fn a_start_that_stood_still_is_not_written_over_a_later_end() -> Result<()> {
    for is_killed in [false, true] {
        let mut was_between = false;
        for polls in 0.. {
            let world = World::new();
            let mut start = Box::pin(world.migration.start(SHORT));
            if poll_times(start.as_mut(), polls) {
                assert!(was_between, "it was never in the middle");
                break;
            }
            if let [Some(_), None] = world.records().await? {
                was_between = true;
                let third = MemoryStore::with_clock(Arc::clone(&world.clock) as Arc<dyn Clock>);
                let onwards = Migration::new(Arc::new(world.new.clone()), Arc::new(third)).fences_are_set();
                onwards.start(SHORT).await?;
                onwards.finish(|drain| world.clock.advance(drain.left)).await?;
                let [_, end] = world.records().await?;
                if is_killed {
                    drop(start);
                } else {
                    let error = start.await.expect_err("the new store was in use");
                    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
                    let [home, other] = world.records().await?;
                    assert!(home.is_some_and(|home| home.is_told), "it was withdrawn");
                    assert_eq!(other, end, "after {polls} polls");
                }
                // It is gone on with from there, or begun anew.
                let end = end.expect("no record is ever removed");
                let started = world.migration.start(SHORT).await?;
                assert!(started.floor >= end.floor && started.epoch > end.epoch);
                world.migration.clone().fences_are_set().finish(|drain| world.clock.advance(drain.left)).await?;
            }
        }
    }
    Ok(())
}

/// Each has its record in its own old store before it finds the other's in the new one.
#[tokio::test(start_paused = true)]
async fn two_starts_in_opposite_directions_are_in_the_way_of_no_later_one() -> Result<()> {
    for is_killed in [false, true] {
        let mut have_met = false;
        for polls in 0.. {
            let world = World::new();
            let [old, new] = [&world.old, &world.new].map(|store| {
                let (is_cut_off, why) = (Arc::default(), ErrorKind::Denied);
                Arc::new(Altered(Away { inner: store.clone(), is_cut_off, why }))
            });
            let back = Migration::new(new, old);
            let (mut one, mut other) = (Box::pin(world.migration.start(SHORT)), Box::pin(back.start(SHORT)));
            if poll_times(other.as_mut(), polls) || has_record(&world.new).await? {
                assert!(have_met, "neither was in the middle");
                break;
            }
            let mut is_over = [false; 2];
            while !is_over[0] && !has_record(&world.old).await? {
                is_over[0] = poll_times(one.as_mut(), 1);
            }
            while !is_over[1] && !has_record(&world.new).await? {
                is_over[1] = poll_times(other.as_mut(), 1);
            }
            if is_over == [false; 2] {
                have_met = true;
                if is_killed {
                    drop(other);
                } else {
                    let error = other.await.expect_err("the other way round");
                    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
                }
                one.await.expect_err("the other way round");
                let begun = [world.migration.start(SHORT).await, back.start(SHORT).await];
                assert_eq!(begun.iter().filter(|begun| begun.is_ok()).count(), 1, "{begun:?}");
            }
        }
    }
    Ok(())
}

/// The other store is away when the home says that the migration is over.
#[tokio::test(start_paused = true)]
async fn no_other_migration_begins_before_both_stores_know_of_the_end() -> Result<()> {
    let mut was_between = false;
    for polls in 0.. {
        let world = World::started().await?;
        let third = MemoryStore::with_clock(Arc::clone(&world.clock) as Arc<dyn Clock>);
        let onwards = Migration::new(Arc::new(world.old.clone()), Arc::new(third)).fences_are_set();
        let finishes = || world.migration.finish(|drain| world.clock.advance(drain.left));
        let is_over = {
            let mut finish = pin!(finishes());
            let mut is_over = false;
            for _ in 0..polls {
                is_over = is_over || poll_times(finish.as_mut(), 1);
                if !is_over {
                    tokio::time::advance(Duration::from_secs(1)).await;
                }
            }
            is_over
        };
        if let [Some(old), Some(new)] = world.records().await?
            && old.is_over
            && !new.is_over
        {
            was_between = true;
            let error = onwards.start(START).await.expect_err("the new store has not been told");
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
            // A client that starts now hears of the end, also while the other store has the record of before.
            let dual = Dual::connect(Arc::new(world.old.clone()), Arc::new(world.new.clone())).await;
            assert!(dual.expect_err("over").to_string().contains("the migration is over"));
        }
        world.clock.advance(Duration::from_secs(60));
        finishes().await?;
        onwards.start(START).await?;
        if is_over {
            assert!(was_between, "it was never in the middle");
            return Ok(());
        }
    }
    Ok(())
}

/// A client reads the record just before the end, and may act on that for long; the next migration has shorter drains.
#[tokio::test(start_paused = true)]
async fn the_next_migration_begins_when_no_client_acts_on_the_last_one_any_more() -> Result<()> {
    let world = World::new();
    world.migration.start(Start { fresh: Duration::from_secs(60), ..START }).await?;
    let dual = || Dual::connect(Arc::new(world.old.clone()), Arc::new(world.new.clone()));
    // Another process, as far as this one is concerned: it reads while this one stands still.
    let process = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let there = || thread::scope(|scope| scope.spawn(|| process.block_on(dual())).join()).expect("no panic");
    let (former, query, mut waits) = (there()?, Query::Keys(Vec::new()), Vec::new());
    let told = |drain: Drain| {
        if drain.left.is_zero() && waits.is_empty() {
            let read = thread::scope(|scope| scope.spawn(|| process.block_on(former.inspect(&query))).join());
            read.expect("no panic").expect("it reads the record");
        }
        if drain.left.is_zero() {
            waits.push(drain.whole);
        }
        world.clock.advance(drain.left);
    };
    world.migration.finish(told).await?;
    assert!(waits[0] > Duration::from_secs(60) && waits[1] > Duration::from_secs(60), "{waits:?}");
    world.migration.start(Start::new(Duration::from_secs(1), Duration::from_millis(100))).await?;
    world.step(Phase::Both).await?;
    world.step(Phase::New).await?;
    let mut guards = Vec::new();
    for client in [former, dual().await?] {
        let asked = Locker::new(client).lock("x").ttl(Duration::from_secs(1)).try_acquire().await;
        guards.extend(asked.ok().flatten());
    }
    assert_eq!(guards.len(), 1, "the client of the next migration alone");
    process.shutdown_background();
    Ok(())
}

/// Of two ends, the one with the later epoch has not seen the other's fences.
#[tokio::test(start_paused = true)]
async fn a_migration_goes_on_from_the_highest_floor_of_those_before() -> Result<()> {
    let clock = Arc::new(ShiftedClock::default());
    let [one, other, third, fourth] = [(); 4].map(|()| MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
    let between = |old: &MemoryStore, new: &MemoryStore| {
        Migration::new(Arc::new(old.clone()), Arc::new(new.clone())).fences_are_set()
    };
    let high = between(&one, &third);
    high.start(Start { fence_above: Fence::new(1 << 52), ..START }).await?;
    high.finish(|drain| clock.advance(drain.left)).await?;
    for _ in 0..2 {
        let low = between(&other, &fourth);
        low.start(START).await?;
        low.finish(|drain| clock.advance(drain.left)).await?;
    }
    let started = between(&one, &other).start(START).await?;
    assert_eq!(started.floor, Fence::new(1 << 52));
    Ok(())
}

/// Each store's fences follow its own clock. A step back at once leaves the floor as it is, and what the clock that is ahead gave in both.
#[tokio::test(start_paused = true)]
async fn a_migration_goes_on_from_what_a_clock_that_is_ahead_gave() -> Result<()> {
    let clock = Arc::new(ShiftedClock::default());
    let [old, new, third] = [(); 3].map(|()| MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
    let now = Locker::new(MemoryStore::new()).lock("what time is it").acquire().await?.fence();
    let ahead = Fence::new(now.get() + 3 * 3600 * 1_000_000);
    let stores: [Arc<dyn LockStore>; 2] = [Arc::new(old.clone()), Arc::new(FenceAbove::new(ahead, new))];
    let [from, to] = stores.clone();
    let there = Migration::new(from, to);
    let advance = |drain: Drain| clock.advance(drain.left);
    there.start(Start { home_is_durable: true, ..START }).await?;
    there.step(Phase::Both, advance).await?.copied?;
    let [from, to] = stores;
    let guard = Locker::new(Dual::connect(from, to).await?).lock("x").ttl(START.max_ttl).acquire().await?;
    assert!(guard.fence() > ahead);
    assert_eq!(guard.release().await?, Outcome::Released);
    let back = there.step(Phase::Old, advance).await?;
    assert!(back.record.floor < ahead, "nothing was taken in the new store alone");
    there.fences_are_set().finish(advance).await?;
    let onwards = Migration::new(Arc::new(old), Arc::new(third));
    assert!(onwards.start(START).await?.floor > ahead);
    Ok(())
}
