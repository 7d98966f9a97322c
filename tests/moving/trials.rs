//! The trials.

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use libtest_mimic::{Failed, Trial};
use lockkit::migrate::Phase;
use lockkit_testkit::BoxError;
use tokio::time::sleep;

use crate::{
    arena::{Arena, judge, killed_at_every_moment},
    bad, runtime,
    servers::{House, Kind},
};

type Outcome = Pin<Box<dyn Future<Output = Result<(), BoxError>>>>;

pub(crate) fn all() -> Vec<Trial> {
    let trial = |name: String, run: Box<dyn Fn() -> Outcome + Send>| {
        Trial::test(name, move || runtime()?.block_on(run()).map_err(|error| Failed::from(error.to_string())))
    };
    let house = Arc::new(House::default());
    let mut trials = Vec::new();
    let mut add = |name: &str, run: fn(Arc<House>) -> Outcome| {
        let house = Arc::clone(&house);
        trials.push(trial(name.to_owned(), Box::new(move || run(Arc::clone(&house)))));
    };
    // The longest first, so that none is left alone at the end.
    add("trouble::stores_that_are_cut_off", |house| Box::pin(stores_that_are_cut_off(house)));
    add("trouble::killed_migrators", |house| Box::pin(killed_migrators(house)));
    add("trouble::frozen_and_killed_workers", |house| Box::pin(frozen_and_killed_workers(house)));
    add("judge::without_a_drain", |house| Box::pin(bad::without_a_drain(house)));
    add("judge::without_a_floor", |house| Box::pin(bad::without_a_floor(house)));
    add("judge::a_drain_cut_short", |house| Box::pin(bad::a_drain_cut_short(house)));
    add("judge::renewals_of_one_side", |house| Box::pin(bad::renewals_of_one_side(house)));
    add("judge::a_record_that_is_read_no_more", |house| Box::pin(bad::a_record_that_is_read_no_more(house)));
    add("judge::fences_that_begin_anew", |house| Box::pin(bad::fences_that_begin_anew(house)));
    for old in Kind::ALL {
        for new in Kind::ALL {
            let (name, house) = (format!("pair::{}_to_{}", old.name(), new.name()), Arc::clone(&house));
            trials.push(trial(name, Box::new(move || Box::pin(forward_and_back(Arc::clone(&house), old, new)))));
        }
    }
    trials
}

/// How many processes use the locks: a crowd on the pair that is moved most often.
fn workers(old: Kind, new: Kind) -> usize {
    if (old, new) == (Kind::Redis, Kind::MySql) { 8 } else { 3 }
}

/// Through every phase, forward, back, and forward again, while workers use locks.
async fn forward_and_back(house: Arc<House>, old: Kind, new: Kind) -> Result<(), BoxError> {
    if (old, new) == (Kind::Redlock, Kind::Redlock) {
        let refused = Arena::open(&house, old, new, 1).await.err().ok_or("neither of two quorums can be the home")?;
        return if refused.to_string().contains("quorum") { Ok(()) } else { Err(refused) };
    }
    let arena = Arena::open(&house, old, new, workers(old, new)).await?;
    arena.shadow().await.map_err(|error| format!("in the shadow: {error}"))?;
    for goal in [Phase::Both, Phase::New, Phase::Both, Phase::Old, Phase::Both, Phase::New] {
        arena.step(goal).await?;
        arena.progress(15).await.map_err(|error| format!("in the phase {goal}: {error}"))?;
        if goal == Phase::Old {
            arena.migration.shadow(true).await?.copied?;
            arena.progress(15).await.map_err(|error| format!("in the shadow, once more: {error}"))?;
        }
    }
    judge(&arena.end().await?)
}

/// The process that moves the migration on is killed again and again, in every step.
async fn killed_migrators(house: Arc<House>) -> Result<(), BoxError> {
    let arena = Arena::open(&house, Kind::Redis, Kind::MySql, 4).await?;
    let mut killed = 0;
    for goal in [Phase::Both, Phase::New, Phase::Both, Phase::Old] {
        killed += killed_at_every_moment(&arena, goal).await?;
        arena.progress(15).await?;
    }
    if killed < 8 {
        return Err(format!("only {killed} migrators were killed: the test is broken").into());
    }
    judge(&arena.end().await?)
}

/// A worker stands still while the phase changes, one is killed, and one begins in the middle.
async fn frozen_and_killed_workers(house: Arc<House>) -> Result<(), BoxError> {
    let arena = Arena::open(&house, Kind::ZooKeeper, Kind::Redis, 5).await?;
    for (goal, frozen, killed) in
        [(Phase::Both, "w1", "w2"), (Phase::New, "w3", "w4"), (Phase::Both, "w5", "w2b"), (Phase::Old, "w1", "w4b")]
    {
        let still = arena.freeze(frozen).await?;
        let (step, replaced) = tokio::join!(arena.step(goal), async {
            sleep(Duration::from_millis(300)).await;
            arena.kill(killed).await?;
            arena.start(&format!("{killed}b"))
        });
        step?;
        replaced?;
        arena.progress(15).await?;
        // It wakes up with what it read of the phase before.
        arena.thaw(still)?;
        arena.progress(15).await?;
    }
    judge(&arena.end().await?)
}

/// Each store is cut off from the workers in each phase, the phase old with its shadow. Where the phase does not need it, the workers go on all the while.
async fn stores_that_are_cut_off(house: Arc<House>) -> Result<(), BoxError> {
    let arena = Arena::open(&house, Kind::MySql, Kind::Redis, 4).await?;
    for phase in [Phase::Old, Phase::Both, Phase::New, Phase::Both] {
        if phase == Phase::Old {
            arena.shadow().await?;
        } else {
            arena.step(phase).await?;
        }
        if phase == Phase::New {
            // Until nobody is in the phase before any more, and needs the old store.
            sleep(arena.migration.state().await?.record.drain()).await;
        }
        for (place, needed) in [(0, phase != Phase::New), (1, phase != Phase::Old)] {
            let trouble = needed.then(|| arena.trouble("store", "cut off"));
            arena.stores[place].cut_off();
            if needed {
                // Until all leases have run out.
                sleep(Duration::from_secs(2)).await;
            } else {
                let went_on = arena.progress(30).await;
                went_on.map_err(|error| format!("store {place} is not needed in the phase {phase}: {error}"))?;
            }
            arena.stores[place].heal();
            arena.progress(15).await.map_err(|error| format!("store {place} is back in the phase {phase}: {error}"))?;
            // They had to connect anew.
            trouble.into_iter().for_each(|trouble| arena.over(trouble));
        }
    }
    judge(&arena.end().await?)
}
