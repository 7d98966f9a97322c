//! Migrators that leave a safeguard out: the workers' history must show it.

use std::time::Duration;

use lockkit::{
    LockKey, LockStore,
    migrate::{Phase, PhaseRecord, Side},
    store::{Fence, Record, Swap},
};
use lockkit_testkit::{BoxError, history::Rule};
use tokio::time::{sleep, timeout};

use crate::{arena::Arena, servers::Kind};

/// Writes a change into both stores, as a migrator does that knows no rules.
async fn write(arena: &Arena, old: &dyn LockStore, new: &dyn LockStore, goal: Phase) -> Result<(), BoxError> {
    let name = LockKey::new("lockkit/migration")?;
    let record = arena.migration.state().await?.record;
    let next = record.next(goal, Fence::NONE)?;
    for (at, store) in [(Side::Old, old), (Side::New, new)] {
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

/// Without the drain a client goes on in the old store while others have begun in the new one.
pub(crate) async fn without_a_drain() -> Result<(), BoxError> {
    let arena = Arena::open(Kind::Redis, Kind::MySql, 4).await?;
    let [old, new] = [lockkit::open(&arena.stores[0].url()).await?, lockkit::open(&arena.stores[1].url()).await?];
    let mut overlaps = 0;
    for _ in 0..10 {
        // A holder that stays where it is: past its last check.
        let caught = timeout(Duration::from_secs(30), arena.register.catch()).await?;
        write(&arena, &*old, &*new, Phase::Both).await?;
        write(&arena, &*old, &*new, Phase::New).await?;
        if timeout(Duration::from_secs(1), arena.register.overtaken(&caught)).await.is_ok() {
            overlaps += 1;
        }
        drop(caught);
        arena.progress(5).await?;
        write(&arena, &*old, &*new, Phase::Both).await?;
        arena.step(Phase::Old).await?;
        if overlaps > 0 {
            break;
        }
    }
    let report = arena.end().await?;
    match report.count(Rule::Overlap) + report.count(Rule::Superseded) {
        0 => Err(format!("a migrator without a drain was not noticed ({overlaps} were overtaken)").into()),
        _ => Ok(()),
    }
}

/// Without a floor, fences begin where the new store has them.
pub(crate) async fn without_a_floor() -> Result<(), BoxError> {
    let arena = Arena::open(Kind::Redis, Kind::ZooKeeper, 4).await?;
    let [old, new] = [lockkit::open(&arena.stores[0].url()).await?, lockkit::open(&arena.stores[1].url()).await?];
    arena.step(Phase::Both).await?;
    arena.step(Phase::Old).await?;
    // Both at once, so that no lock is taken in both: the new store knows nothing of the old one's fences.
    let drain = arena.migration.state().await?.record.drain();
    write(&arena, &*old, &*new, Phase::Both).await?;
    write(&arena, &*old, &*new, Phase::New).await?;
    sleep(drain).await;
    arena.progress(20).await?;
    let report = arena.end().await?;
    match report.count(Rule::FenceOrder) + report.count(Rule::Resource) {
        0 => Err("a migrator without a floor was not noticed".into()),
        _ => Ok(()),
    }
}
