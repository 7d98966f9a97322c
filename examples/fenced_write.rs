//! Why a guard has a fence: a holder that stopped past its lease wakes up and writes, and the resource refuses it.

use std::{sync::Mutex, time::Duration};

use lockkit::{Fence, Locker, MemoryStore, Result};

/// A resource that remembers the highest fence it has seen.
#[derive(Debug, Default)]
struct Account {
    state: Mutex<(Fence, i64)>,
}

impl Account {
    /// Writes, unless a newer holder was here.
    fn write(&self, fence: Fence, balance: i64) -> bool {
        let mut state = self.state.lock().expect("unpoisoned");
        if fence < state.0 {
            return false;
        }
        *state = (fence, balance);
        true
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let lock = locker.lock("account/7").ttl(Duration::from_millis(200));
    let account = Account::default();

    // The first holder computes for longer than its lease lasts, and never asks its guard.
    let slow = lock.clone().no_renewal().acquire().await?;
    let slow_fence = slow.fence();
    tokio::time::sleep(Duration::from_millis(300)).await;

    let fast = lock.acquire().await?;
    println!("the new holder's write:  {}", if account.write(fast.fence(), 100) { "accepted" } else { "refused" });
    println!("the old holder's write:  {}", if account.write(slow_fence, -1) { "accepted" } else { "refused" });
    assert_eq!(account.state.lock().expect("unpoisoned").1, 100);
    println!("the old guard, if asked: {:?}", slow.status());
    Ok(())
}
