//! One leader at a time among three hosts, and a follower that sees who leads:
//! `cargo run --example leader --features redis -- redis://127.0.0.1`

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit::{HolderInfo, LockStore, Locker, Result};
use tokio::time::sleep;

/// What a leader does. It is dropped at its next await when the lease may be over, so that no two do it at once.
async fn lead(host: &str, term: u64) -> u64 {
    println!("{host}: leads, term {term}");
    sleep(Duration::from_millis(300)).await;
    println!("{host}: steps down");
    term
}

/// Each host has a locker, and shows its name to the others.
fn host(store: &Arc<dyn LockStore>, name: &str) -> Locker {
    Locker::shared_builder(Arc::clone(store)).holder(HolderInfo::new(name)).build()
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    let store = lockkit::open(&url).await?;
    // A name of its own for each run, so that two runs on one server do not meet.
    let run = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    let name = format!("example/leader/{run}");

    let mut leaders = host(&store, "follower").election(&name).observe(Duration::from_millis(20));
    let follower = tokio::spawn(async move {
        while let Ok(leader) = leaders.next().await {
            match leader {
                Some(leader) => println!("follower: {} leads", leader.info),
                None => println!("follower: nobody leads"),
            }
        }
    });

    let hosts = ["host-1", "host-2", "host-3"].map(|name_of_host| {
        let election = host(&store, name_of_host).election(&name).ttl(Duration::from_secs(5));
        tokio::spawn(async move { election.lead(|term| lead(name_of_host, term.get())).await })
    });
    let mut terms = Vec::new();
    for host in hosts {
        terms.push(host.await.expect("the task does not panic")?);
    }
    terms.sort_unstable();
    terms.dedup();
    assert_eq!(terms.len(), 3, "each term has a number of its own");
    follower.abort();
    Ok(())
}
