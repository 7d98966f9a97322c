//! Migrators and clients that leave a safeguard out: the workers' history must show it.

use std::{sync::Arc, time::Duration};

use lockkit::{
    LockKey, LockStore,
    migrate::{Phase, PhaseRecord, Side, Start},
    store::{Fence, Record, Swap},
};
use lockkit_testkit::{
    BoxError,
    history::{Report, Rule},
};
use tokio::time::{sleep, timeout};

use crate::{
    arena::{Arena, START, TTL},
    clients::Bad,
    servers::{House, Kind},
    storm::{Caught, Prey},
};

/// How long something may take to come about. Not how long it does take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Writes a change into both stores, as a migrator does that knows no rules.
async fn write(arena: &Arena, stores: &[Arc<dyn LockStore>; 2], goal: Phase) -> Result<(), BoxError> {
    let name = LockKey::new("lockkit/migration")?;
    let record = arena.migration.state().await?.record;
    let next = record.next(goal, Fence::NONE)?;
    for (at, store) in Side::ALL.into_iter().zip(stores) {
        let records = store.records();
        for keeper in &records {
            let seen: Option<Record> = keeper.read(&name).await?;
            let done = keeper.compare_and_set(&name, seen.as_ref(), Some(&next.to_record(at)?)).await?;
            assert_eq!(done, Swap::Done);
        }
    }
    let found: PhaseRecord = arena.migration.state().await?.record;
    assert_eq!(found, next);
    Ok(())
}

/// Both stores, as a migrator has them.
async fn stores(arena: &Arena) -> Result<[Arc<dyn LockStore>; 2], BoxError> {
    Ok([lockkit::open(&arena.stores[0].url()).await?, lockkit::open(&arena.stores[1].url()).await?])
}

/// Whether the judge has found one of these rules broken.
fn noticed(report: &Report, rules: &[Rule], what: &str) -> Result<(), BoxError> {
    if rules.iter().any(|rule| report.count(*rule) > 0) {
        Ok(())
    } else {
        Err(format!("{what} was not noticed").into())
    }
}

/// Catches a holder of this worker.
async fn catch(arena: &Arena, worker: &str) -> Result<Caught, BoxError> {
    let caught = async {
        loop {
            let caught = arena.register.catch(Prey::Writer).await;
            if caught.worker == worker {
                return caught;
            }
        }
    };
    timeout(PATIENCE, caught).await.map_err(|_| format!("{worker} was not caught").into())
}

/// Without the drain a client goes on in the old store while others have begun in the new one.
pub(crate) async fn without_a_drain(house: Arc<House>) -> Result<(), BoxError> {
    let arena = Arena::open(&house, Kind::Redis, Kind::MySql, 4).await?;
    let stores = stores(&arena).await?;
    let mut overlaps = 0;
    for _ in 0..10 {
        // A holder that stays where it is: past its last check.
        let caught = timeout(PATIENCE, arena.register.catch(Prey::Writer)).await?;
        write(&arena, &stores, Phase::Both).await?;
        write(&arena, &stores, Phase::New).await?;
        if timeout(Duration::from_secs(1), arena.register.overtaken(&caught)).await.is_ok() {
            overlaps += 1;
        }
        drop(caught);
        arena.progress(5).await?;
        write(&arena, &stores, Phase::Both).await?;
        arena.step(Phase::Old).await?;
        if overlaps > 0 {
            break;
        }
    }
    let what = format!("a migrator without a drain ({overlaps} were overtaken)");
    noticed(&arena.end().await?, &[Rule::Overlap, Rule::Superseded], &what)
}

/// Without a floor, fences begin where the new store has them.
pub(crate) async fn without_a_floor(house: Arc<House>) -> Result<(), BoxError> {
    let arena = Arena::open(&house, Kind::Redis, Kind::ZooKeeper, 4).await?;
    let stores = stores(&arena).await?;
    // Both at once, so that no lock is taken in both: the new store knows nothing of the old one's fences.
    let drain = arena.migration.state().await?.record.drain();
    write(&arena, &stores, Phase::Both).await?;
    write(&arena, &stores, Phase::New).await?;
    sleep(drain).await;
    arena.progress(20).await?;
    noticed(&arena.end().await?, &[Rule::FenceOrder, Rule::Resource], "a migrator without a floor")
}

/// The new phase is opened when a part of the drain is over. A holder that stood still all the while has not heard of it, and its lease
/// is still good.
pub(crate) async fn a_drain_cut_short(house: Arc<House>) -> Result<(), BoxError> {
    let ttl = Duration::from_secs(6);
    let start = Start { max_ttl: ttl, ..START };
    let arena = Arena::empty(&house, Kind::Redis, Kind::MySql, ttl, start).await?;
    for number in 1..=4 {
        arena.start(&format!("w{number}"))?;
    }
    arena.progress(20).await?;
    let stores = stores(&arena).await?;
    let mut overlaps = 0;
    for _ in 0..5 {
        let caught = timeout(PATIENCE, arena.register.catch(Prey::Writer)).await?;
        let still = arena.freeze(&caught.worker).await?;
        write(&arena, &stores, Phase::Both).await?;
        // A small part of the drain, in which all others follow.
        sleep(START.fresh).await;
        write(&arena, &stores, Phase::New).await?;
        // Before the lease of the one that stands still is over: it was renewed a third of its time ago, at most.
        overlaps += u32::from(timeout(ttl / 2, arena.register.overtaken(&caught)).await.is_ok());
        arena.thaw(still)?;
        drop(caught);
        arena.progress(5).await?;
        if overlaps > 0 {
            break;
        }
        write(&arena, &stores, Phase::Both).await?;
        arena.step(Phase::Old).await?;
    }
    let what = format!("a drain that was cut short ({overlaps} were overtaken)");
    noticed(&arena.end().await?, &[Rule::Overlap, Rule::Superseded], &what)
}

/// A client that renews in the old store alone loses the new one, and with the phase both the lock.
pub(crate) async fn renewals_of_one_side(house: Arc<House>) -> Result<(), BoxError> {
    let arena = Arena::open(&house, Kind::Redis, Kind::MySql, 3).await?;
    arena.start_bad(Bad::RenewsOneSide, "bad")?;
    arena.step(Phase::Both).await?;
    // It goes on for longer than the lease that the new store gave it.
    let caught = catch(&arena, "bad").await?;
    arena.step(Phase::New).await?;
    timeout(PATIENCE, arena.register.overtaken(&caught)).await.map_err(|_| "nobody else had the lock")?;
    drop(caught);
    arena.progress(5).await?;
    noticed(&arena.end().await?, &[Rule::Overlap], "a client that renews in one store")
}

/// A client that goes on as of the phase that it has read last, though it can't read the record any more, stays in the old store.
pub(crate) async fn a_record_that_is_read_no_more(house: Arc<House>) -> Result<(), BoxError> {
    let arena = Arena::open(&house, Kind::Redis, Kind::MySql, 3).await?;
    arena.start_bad(Bad::FailsOpen, "bad")?;
    // It has read the record.
    drop(catch(&arena, "bad").await?);
    arena.step(Phase::Both).await?;
    arena.step(Phase::New).await?;
    // It holds the lock there, and somebody else has it in the new one.
    let caught = catch(&arena, "bad").await?;
    timeout(PATIENCE, arena.register.overtaken(&caught)).await.map_err(|_| "nobody else had the lock")?;
    drop(caught);
    arena.progress(5).await?;
    noticed(&arena.end().await?, &[Rule::Overlap], "a client that goes on without the record")
}

/// Clients that take the fences of the new store as they are: they begin anew.
pub(crate) async fn fences_that_begin_anew(house: Arc<House>) -> Result<(), BoxError> {
    let arena = Arena::empty(&house, Kind::Redis, Kind::ZooKeeper, TTL, START).await?;
    for number in 1..=3 {
        arena.start_bad(Bad::ForgetsFences, &format!("bad{number}"))?;
    }
    arena.progress(20).await?;
    arena.step(Phase::Both).await?;
    arena.progress(30).await?;
    noticed(&arena.end().await?, &[Rule::FenceOrder], "a client that asks for no higher fence")
}
