//! Acquire and release, in pairs, on five servers: this store against `rslock`, and what one frozen server does to it.
//!
//! The contestants run in turn within each round, so that whatever else the machine does hits both alike; what counts
//! is the median of the rounds' ratios. The servers are private: `LOCKKIT_REDIS_SERVER`, or `redis-server`.
//! `cargo bench -p lockkit-redlock --bench pair [-- rounds]`

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit::redlock::RedisNodes;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, FenceRequest, HolderInfo, LockKey, LockStore, Locker, Mode, Order, Outcome,
    Release, Token,
};
use lockkit_redis::RedisConfig;
use lockkit_redlock::RedlockStore;
use lockkit_testkit::servers::{RedisFlavor, RedisOptions, RedisServer};

const TTL: Duration = Duration::from_secs(30);
const SLICE: Duration = Duration::from_millis(400);
const NODES: usize = 5;
const TASKS: usize = 64;

type Error = Box<dyn std::error::Error + Send + Sync>;
type Pair = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

fn main() -> Result<(), Error> {
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(15);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let program = std::env::var_os("LOCKKIT_REDIS_SERVER");
        let flavor = program.map_or_else(RedisFlavor::default, |path| RedisFlavor::At(path.into()));
        let mut servers = Vec::new();
        for _ in 0..NODES {
            servers.push(RedisServer::start(RedisOptions::default().flavor(flavor.clone())).await?);
        }
        run(&servers, rounds).await
    })
}

async fn connect(servers: &[RedisServer]) -> Result<RedlockStore, Error> {
    let nodes = servers.iter().map(|server| RedisConfig::new("127.0.0.1", server.port())).collect();
    // The servers started just now; rslock does not wait either.
    Ok(RedisNodes::new(nodes).delayed_restart(false).connect().await?)
}

async fn run(servers: &[RedisServer], rounds: usize) -> Result<(), Error> {
    let store = Arc::new(connect(servers).await?);
    let urls = servers.iter().map(|server| format!("redis://127.0.0.1:{}/", server.port()));
    let rslock = rslock::LockManager::new(urls.collect());
    let (mut one, mut many) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let mut rates = [0.0; 2];
        for step in 0..2 {
            let who = (step + round) % 2;
            rates[who] =
                if who == 0 { one_task(ours(&store, 0)).await? } else { one_task(rslocks(&rslock, 0)).await? };
        }
        one.push(rates);
        for step in 0..2 {
            let who = (step + round) % 2;
            rates[who] = if who == 0 {
                many_tasks(|i| ours(&store, i)).await?
            } else {
                many_tasks(|i| rslocks(&rslock, i)).await?
            };
        }
        many.push(rates);
    }
    println!("pairs per second on {NODES} servers, medians of {rounds} rounds");
    for (name, of) in [("lockkit", 0), ("rslock (no fence)", 1)] {
        let rate = median(one.iter().map(|rates| rates[of]).collect());
        println!("  1 task,   {name:<20} {rate:>9.0}   {:>7.0} us per pair", 1e6 / rate);
        println!("  {TASKS} tasks, {name:<20} {:>9.0}", median(many.iter().map(|rates| rates[of]).collect()));
    }
    println!("ratios, medians of the rounds' own");
    verdict("1 task, to rslock", 1.0, one.iter().map(|rates| rates[0] / rates[1]).collect());
    verdict("64 tasks, to rslock", 2.0, many.iter().map(|rates| rates[0] / rates[1]).collect());
    let stats = store.stats();
    let share = stats.raise_rounds as f64 / stats.grants as f64 * 100.0;
    println!("second rounds for a fence: {} of {} grants ({share:.3} %)", stats.raise_rounds, stats.grants);
    hand_offs(servers).await?;
    frozen(servers).await
}

/// How long it takes from a release to the grant of a waiter in another client.
async fn hand_offs(servers: &[RedisServer]) -> Result<(), Error> {
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
            Ok::<_, lockkit_core::Error>(turns)
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
async fn frozen(servers: &[RedisServer]) -> Result<(), Error> {
    let store = Arc::new(connect(servers).await?);
    println!("acquisition alone");
    for (name, freeze) in [("all servers up", false), ("one server frozen", true)] {
        if freeze {
            servers[0].freeze().await?;
        }
        let mut took = Vec::new();
        for i in 0..2000 {
            let request = request(i % TASKS)?;
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

/// Runs pairs one after the other for a slice of time; pairs per second.
async fn one_task<F: Future<Output = Result<(), Error>>>(mut pair: impl FnMut() -> F) -> Result<f64, Error> {
    let (start, mut pairs) = (Instant::now(), 0_u32);
    while start.elapsed() < SLICE {
        for _ in 0..16 {
            pair().await?;
        }
        pairs += 16;
    }
    Ok(f64::from(pairs) / start.elapsed().as_secs_f64())
}

/// The same in many tasks, each on a key of its own.
async fn many_tasks<P, F>(pair: impl Fn(usize) -> P) -> Result<f64, Error>
where
    P: FnMut() -> F + Send + 'static,
    F: Future<Output = Result<(), Error>> + Send + 'static,
{
    let tasks: Vec<_> = (0..TASKS).map(|i| tokio::spawn(one_task(pair(i)))).collect();
    let mut rate = 0.0;
    for task in tasks {
        rate += task.await??;
    }
    Ok(rate)
}

fn request(i: usize) -> Result<AcquireRequest, Error> {
    Ok(AcquireRequest {
        claim: Claim { key: LockKey::new(format!("bench:{i}"))?, token: Token::random()?, mode: Mode::Exclusive },
        ttl: TTL,
        wait: Duration::ZERO,
        order: Order::Any,
        fence: FenceRequest::default(),
        holder: HolderInfo::new("bench@host:1234"),
    })
}

fn ours(store: &Arc<RedlockStore>, i: usize) -> impl FnMut() -> Pair + use<> {
    let store = Arc::clone(store);
    move || {
        let store = Arc::clone(&store);
        Box::pin(async move {
            let request = request(i)?;
            let granted = matches!(store.acquire(&request).await?, Attempt::Granted(_));
            let released = matches!(store.release(&request.claim).await?, Release::Released { .. });
            if granted && released { Ok(()) } else { Err("not granted".into()) }
        })
    }
}

fn rslocks(manager: &rslock::LockManager, i: usize) -> impl FnMut() -> Pair + use<> {
    let (manager, name) = (manager.clone(), format!("rslock:{i}"));
    move || {
        let (manager, name) = (manager.clone(), name.clone());
        Box::pin(async move {
            let lock = manager.lock(name.as_str(), TTL).await?;
            manager.unlock(&lock).await;
            Ok(())
        })
    }
}

fn verdict(name: &str, target: f64, mut ratios: Vec<f64>) {
    ratios.sort_by(f64::total_cmp);
    let (low, high) = (ratios[ratios.len() / 4], ratios[ratios.len() * 3 / 4]);
    let ratio = median(ratios);
    let outcome = if ratio >= target { "met" } else { "MISSED" };
    println!("  {name:<24} {ratio:>7.3}  (quartiles {low:.3} .. {high:.3}; target {target:.2}: {outcome})");
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
