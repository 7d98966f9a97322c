//! Acquire and release, in pairs, on five servers: this store against `rslock`, and what one frozen server does to it.
//!
//! The servers are private: `LOCKKIT_REDIS_SERVER`, or `redis-server`.
//! `cargo bench -p lockkit-compare --bench pair_redlock [-- rounds]`

mod support;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit::{
    LockKey, LockStore, Locker, Outcome,
    redis::RedisConfig,
    redlock::{RedisNodes, RedlockStore},
    store::{Attempt, Release},
};
use lockkit_compare::pairs::{self, BoxError, Contestant, Rounds, TTL, request};
use lockkit_testkit::servers::RedisServer;

const NODES: usize = 5;

fn main() -> Result<(), BoxError> {
    pairs::main(15, async |rounds| {
        let mut servers = Vec::new();
        for _ in 0..NODES {
            servers.push(support::server().await?);
        }
        run(&servers, rounds).await
    })
}

async fn connect(servers: &[RedisServer]) -> Result<RedlockStore, BoxError> {
    let nodes = servers.iter().map(|server| RedisConfig::new("127.0.0.1", server.port())).collect();
    // The servers started just now; rslock does not wait either.
    Ok(RedisNodes::new(nodes).delayed_restart(false).connect().await?)
}

async fn run(servers: &[RedisServer], rounds: Rounds) -> Result<(), BoxError> {
    let store = Arc::new(connect(servers).await?);
    let ours = Contestant::store(Arc::clone(&store) as Arc<dyn LockStore>);
    let rslock = support::rslock("rslock (no fence)", servers);
    let one = rounds.one_task(&[&ours, &rslock]).await?;
    let many = rounds.many_tasks(&[&ours, &rslock]).await?;
    print!("{NODES} servers\n{one}{many}");
    println!("ratios, medians of the rounds' own");
    println!("{}\n{}", one.ratio(1, 1.0), many.ratio(1, 2.0));
    let stats = store.stats();
    let share = stats.raise_rounds as f64 / stats.grants as f64 * 100.0;
    println!("second rounds for a fence: {} of {} grants ({share:.3} %)", stats.raise_rounds, stats.grants);
    hand_offs(servers).await?;
    frozen(servers).await
}

/// How long it takes from a release to the grant of a waiter in another client.
async fn hand_offs(servers: &[RedisServer]) -> Result<(), BoxError> {
    let (here, there) = (Locker::new(connect(servers).await?), Locker::new(connect(servers).await?));
    let mut took = Vec::new();
    for _ in 0..300 {
        let guard = here.lock("hand-off").acquire().await?;
        let lock = there.lock("hand-off");
        let waiter = tokio::spawn(async move { lock.acquire().await.map(|guard| (guard, Instant::now())) });
        tokio::time::sleep(Duration::from_millis(3)).await;
        let released = Instant::now();
        let freed = guard.release().await?;
        let (guard, granted) = waiter.await??;
        took.push(granted.duration_since(released).as_secs_f64());
        if (freed, guard.release().await?) != (Outcome::Released, Outcome::Released) {
            return Err("a lease was lost".into());
        }
    }
    println!("hand-off to a waiting client, from the release to the grant");
    report(&mut took);
    let mut clients = Vec::new();
    let until = Instant::now() + Duration::from_secs(2);
    for _ in 0..4 {
        let lock = Locker::new(connect(servers).await?).lock("hot");
        clients.push(tokio::spawn(async move {
            let mut turns = 0_u32;
            while Instant::now() < until {
                turns += u32::from(lock.acquire().await?.release().await? == Outcome::Released);
            }
            Ok::<_, lockkit::Error>(turns)
        }));
    }
    let mut turns = Vec::new();
    for client in clients {
        turns.push(client.await??);
    }
    println!("hot lock over 4 clients: {} grants per second, shares {turns:?}", turns.iter().sum::<u32>() / 2);
    Ok(())
}

/// Acquisitions with all servers, and with one that stands still.
async fn frozen(servers: &[RedisServer]) -> Result<(), BoxError> {
    let store = Arc::new(connect(servers).await?);
    println!("acquisition alone");
    for (name, freeze) in [("all servers up", false), ("one server frozen", true)] {
        if freeze {
            servers[0].freeze().await?;
        }
        let mut took = Vec::new();
        for number in 0..2000 {
            let request = request(LockKey::new(format!("bench/{}", number % 64))?)?;
            let start = Instant::now();
            let granted = matches!(store.acquire(&request).await?, Attempt::Granted(_));
            took.push(start.elapsed().as_secs_f64());
            if !granted || !matches!(store.release(&request.claim).await?, Release::Released { .. }) {
                return Err("not granted".into());
            }
        }
        println!(" {name}");
        let p99 = report(&mut took);
        if freeze {
            // The default node timeout for this ttl, and a fifth.
            let target = TTL / 200 * 6 / 5;
            let outcome = if p99 <= target.as_secs_f64() { "met" } else { "MISSED" };
            println!("  target for p99 {target:?}: {outcome}");
        }
    }
    Ok(servers[0].thaw()?)
}

/// Prints the times, and returns the one that 99 % are below.
fn report(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    let at = |share: f64| seconds[((seconds.len() - 1) as f64 * share) as usize] * 1e6;
    println!("  p50 {:>7.0} us   p99 {:>7.0} us   max {:>7.0} us", at(0.5), at(0.99), at(1.0));
    at(0.99) / 1e6
}
