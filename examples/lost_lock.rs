//! An application that may lose its lock, and tests of that with a simulated store: hours of it take milliseconds.
//!
//! `cargo run --example lost_lock` runs the tests one after the other, and ends with an error if one of them fails. In a project
//! of your own each of them is a `#[tokio::test(start_paused = true)]`, with the package `lockkit-sim` among the dev-dependencies.

use std::time::Duration;

use lockkit::{
    ErrorKind, Fence, Locker, Outcome, Result,
    fenced::{FencedResource, MemoryResource},
};
use lockkit_sim::{Fault, Operation, SimStore};
use tokio::time::{advance, sleep};

const LOCK: &str = "import";
const PAGES: u8 = 5;

/// The application: it imports pages under a lock. If the lock is lost, the work stops; then the application asks for the lock again,
/// and goes on behind the last page that was imported. Returns how often the lock was lost.
async fn import(locker: &Locker, imported: &MemoryResource) -> Result<u32> {
    let mut losses = 0;
    loop {
        let guard = match locker.lock(LOCK).ttl(Duration::from_secs(30)).acquire().await {
            Ok(guard) => guard,
            // The store can't be asked now.
            Err(error) if error.is_retryable() => {
                sleep(Duration::from_secs(1)).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        // The guard stops the work in time, or the resource refuses its fence: both are errors of the kind `Lost`.
        match guard.run(import_as_holder(guard.fence(), imported)).await.flatten() {
            Ok(()) => match guard.release().await? {
                Outcome::Released => return Ok(losses),
                // The resource admitted each page, so that all is done; but the lease was over before the release.
                Outcome::NotHeld(_) => return Ok(losses + 1),
            },
            Err(error) if error.kind() == ErrorKind::Lost => losses += 1,
            Err(error) => return Err(error),
        }
    }
}

async fn import_as_holder(fence: Fence, imported: &MemoryResource) -> Result<()> {
    // A claim comes first, so that no former holder can change the count after it was read.
    imported.claim(fence).await?.ok()?;
    for page in count(imported).await?..PAGES {
        sleep(Duration::from_secs(60)).await; // the long part
        imported.write(fence, &[page + 1]).await?.ok()?;
    }
    Ok(())
}

async fn count(imported: &MemoryResource) -> Result<u8> {
    Ok(imported.read().await?.map_or(0, |bytes| bytes[0]))
}

/// Runs the application beside a fault, and returns how often the lock was lost.
async fn import_while(fault: impl AsyncFnOnce(&SimStore) -> Result<()>) -> Result<u32> {
    let (store, imported) = (SimStore::new(), MemoryResource::new());
    let locker = Locker::new(store.clone());
    let (losses, fault) = tokio::join!(import(&locker, &imported), fault(&store));
    fault?;
    // After every fault all pages are there in the end, and the lock is free.
    assert_eq!(count(&imported).await?, PAGES);
    assert!(locker.lock(LOCK).try_acquire().await?.is_some(), "the lock is free");
    losses
}

async fn all_goes_well() -> Result<()> {
    assert_eq!(import_while(async |_| Ok(())).await?, 0);
    Ok(())
}

async fn another_takes_the_lock() -> Result<()> {
    let losses = import_while(async |store| {
        sleep(Duration::from_secs(90)).await;
        store.take_over(LOCK, Duration::from_secs(30)).await.map(drop)
    });
    assert_eq!(losses.await?, 1);
    Ok(())
}

async fn the_store_is_away_for_longer_than_a_lease() -> Result<()> {
    let losses = import_while(async |store| {
        sleep(Duration::from_secs(90)).await;
        store.inject(Fault::REFUSED.until_healed());
        sleep(Duration::from_secs(60)).await;
        store.heal();
        Ok(())
    });
    assert_eq!(losses.await?, 1);
    Ok(())
}

async fn the_process_stands_still() -> Result<()> {
    let losses = import_while(async |_| {
        sleep(Duration::from_secs(90)).await;
        advance(Duration::from_secs(120)).await;
        Ok(())
    });
    assert_eq!(losses.await?, 1);
    Ok(())
}

async fn a_reply_that_gets_lost_does_no_harm() -> Result<()> {
    let losses = import_while(async |store| {
        store.inject(Fault::LoseReply.on(Operation::Renew).times(3));
        Ok(())
    });
    assert_eq!(losses.await?, 0);
    Ok(())
}

#[tokio::main(flavor = "current_thread", start_paused = true)]
async fn main() -> Result<()> {
    all_goes_well().await?;
    another_takes_the_lock().await?;
    the_store_is_away_for_longer_than_a_lease().await?;
    the_process_stands_still().await?;
    a_reply_that_gets_lost_does_no_harm().await?;
    println!("after each fault all pages were imported");
    Ok(())
}
