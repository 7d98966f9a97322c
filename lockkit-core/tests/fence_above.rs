//! Fences above a number, for a lock that came from elsewhere.

use lockkit_core::{ErrorKind, Fence, Locker, MemoryStore, Outcome, Result};

/// What the store in memory is far from reaching by itself.
const BEFORE: Fence = Fence::new(1 << 60);

#[tokio::test]
async fn a_lock_has_fences_above_what_it_asks_for() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let plain = locker.lock("x").acquire().await?;
    assert!(plain.fence() < BEFORE);
    assert_eq!(plain.release().await?, Outcome::Released);
    let lock = locker.lock("x").fence_above(BEFORE);
    let first = lock.acquire().await?;
    let highest = first.fence();
    assert!(highest > BEFORE);
    assert_eq!(first.release().await?, Outcome::Released);
    assert!(lock.try_acquire().await?.expect("it is free").fence() > highest);
    // The counter of the lock stays there.
    assert!(locker.lock("x").acquire().await?.fence() > highest);
    Ok(())
}

#[tokio::test]
async fn a_nested_acquisition_is_refused_what_the_lease_has_not() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let owner = locker.owner();
    let outer = owner.lock("x").acquire().await?;
    let error = owner.lock("x").fence_above(BEFORE).acquire().await.expect_err("its fence is lower");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let lower = Fence::new(outer.fence().get() - 1);
    let inner = owner.lock("x").fence_above(lower).acquire().await?;
    assert_eq!(inner.fence(), outer.fence());
    Ok(())
}

#[tokio::test]
async fn a_lease_is_taken_up_with_a_fence_above_it() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let token = locker.lock("x").acquire().await?.detach()?;
    let taken = locker.lock("x").fence_above(BEFORE).resume(token).await?.expect("it is held");
    assert!(taken.fence() > BEFORE);
    Ok(())
}
