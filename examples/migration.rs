//! A lock is held while its service moves from one store to another: `cargo run --example migration`.
//!
//! The stores are in memory here, so that it runs anywhere. With servers, a service has the URL `migrate:?from=URL&to=URL`,
//! and the steps are taken by `lockkit migrate`: see `docs/migration.md`.

use std::{sync::Arc, time::Duration};

use lockkit::{
    FenceAbove, LockStore, Locker, MemoryStore, Outcome, Result,
    migrate::{Dual, Migration, Phase, Start},
};

const TTL: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Result<()> {
    let old: Arc<dyn LockStore> = Arc::new(MemoryStore::new());
    let new: Arc<dyn LockStore> = Arc::new(MemoryStore::new());
    let migration = Migration::new(Arc::clone(&old), Arc::clone(&new));
    migration.start(Start::new(TTL, Duration::from_millis(200))).await?;

    // Two processes of the service. From here on, none of them is deployed again until the migration is over.
    let service = || Dual::connect(Arc::clone(&old), Arc::clone(&new));
    let (one, other) = (Locker::new(service().await?), Locker::new(service().await?));

    let guard = one.lock("nightly-report").ttl(TTL).acquire().await?;
    println!("{:<22}one process holds the lock, with fence {}", phase(&migration).await?, guard.fence());
    for goal in [Phase::Both, Phase::New] {
        migration.step(goal, |_| ()).await?.copied?;
        taken_along(&migration, goal).await?;
        println!("{:<22}it still holds the lock, with fence {}", phase(&migration).await?, guard.fence());
        let refused = other.lock("nightly-report").ttl(TTL).try_acquire().await?;
        println!("{:<22}the other is {}", "", if refused.is_none() { "refused" } else { "let in" });
        assert!(refused.is_none() && guard.is_held());
    }

    let before = guard.fence();
    assert_eq!(guard.release().await?, Outcome::Released);
    let next = other.lock("nightly-report").ttl(TTL).acquire().await?;
    println!("{:<22}the other has it now, with fence {}", "", next.fence());
    assert!(next.fence() > before);
    assert_eq!(next.release().await?, Outcome::Released);

    // By now every process would use the new store alone. For an hour its own fences are lower than there have been: until then they
    // are asked to be higher.
    let floor = migration.state().await?.record.floor;
    migration.fences_are_set().finish(|_| ()).await?;
    let plain = Locker::new(FenceAbove::new(floor, new));
    let last = plain.lock("nightly-report").ttl(TTL).acquire().await?;
    println!("{:<22}a client of the new store has it, with fence {}", "the end:", last.fence());
    assert!(last.fence() > before);
    assert_eq!(last.release().await?, Outcome::Released);
    Ok(())
}

async fn phase(migration: &Migration) -> Result<String> {
    Ok(format!("the phase is {}:", migration.state().await?.record.phase))
}

/// Waits until every lock has been taken along into a phase: that is at its next renewal, a third of its ttl later.
async fn taken_along(migration: &Migration, goal: Phase) -> Result<()> {
    while migration.holders().await?.iter().any(|seen| seen.phase != Some(goal)) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    Ok(())
}
