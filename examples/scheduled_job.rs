//! A job that five hosts start at the same moment, and one of them runs: once in a window of time, also when it takes a millisecond.
//! `cargo run --example scheduled_job --features redis -- redis://127.0.0.1`

use std::{
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lockkit::{Locker, Outcome, Result};
use tokio::time::sleep;

/// The time from one start of the job to the next is longer than this, by more than it varies.
const WINDOW: Duration = Duration::from_millis(1500);

/// What each host does when its timer goes off. Returns whether it was the one that ran the job.
async fn timer_goes_off(host: usize, locker: Locker, name: String) -> Result<bool> {
    let Some(guard) = locker.lock(name).ttl(Duration::from_secs(10)).keep_for(WINDOW).try_acquire().await? else {
        println!("  host {host}: somebody else does it, or has done it");
        return Ok(false);
    };
    guard.run(async { println!("  host {host}: runs the job") }).await?;
    // The lock stays taken until the window is over, on the store's clock.
    if let Outcome::NotHeld(reason) = guard.release().await? {
        println!("  host {host}: another may run it, too: {reason}");
    }
    Ok(true)
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    let store = lockkit::open(&url).await?;
    // A name of its own for each run, so that two runs on one server do not meet.
    let run = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());

    for time in ["first", "second"] {
        println!("the {time} time:");
        let begun = Instant::now();
        let hosts = [1, 2, 3, 4, 5].map(|host| {
            let locker = Locker::shared_builder(Arc::clone(&store)).build();
            tokio::spawn(timer_goes_off(host, locker, format!("example/job/{run}")))
        });
        let mut runs = 0;
        for host in hosts {
            runs += u32::from(host.await.expect("the task does not panic")?);
        }
        assert_eq!(runs, 1, "one host runs the job");
        // The window began when the lock was acquired, and may end late by what the last request took.
        sleep(WINDOW + begun.elapsed() + Duration::from_millis(200)).await;
    }
    Ok(())
}
