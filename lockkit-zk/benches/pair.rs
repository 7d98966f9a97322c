//! Acquire and release, in pairs: this store against the bare driver, which creates a node and deletes it again.
//!
//! Both run in turn within each round, so that whatever else the machine does hits both alike; what counts is the
//! median of the rounds' ratios. The server is private. `cargo bench -p lockkit-zk --bench pair [-- rounds]`

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, FenceRequest, HolderInfo, LockKey, LockStore, Mode, Order, Release, Renewal,
    Renewed, Token,
};
use lockkit_testkit::servers::{ZooKeeperFlavor, ZooKeeperServer};
use lockkit_zk::{ZkConfig, ZkStore};
use zookeeper_client::{Acls, Client, CreateMode, CreateOptions};

const TTL: Duration = Duration::from_secs(30);
const SLICE: Duration = Duration::from_millis(400);
const TASKS: usize = 64;
const RENEWED: usize = 10_000;

type Error = Box<dyn std::error::Error + Send + Sync>;
type Pair = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

fn main() -> Result<(), Error> {
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(15);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    // On a worker, as in a service; the thread of `block_on` is none.
    runtime.block_on(async move { tokio::spawn(run(rounds)).await? })
}

async fn run(rounds: usize) -> Result<(), Error> {
    let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?;
    let address = server.addr().to_string();
    let store = Arc::new(ZkStore::connect(ZkConfig::new([address.clone()])).await?);
    let bare = Client::connector().with_session_timeout(Duration::from_secs(20)).connect(&address).await?;

    // The virtual machine compiles what is hot; and the directories come into being.
    for _ in 0..4 {
        many_tasks(|i| ours(&store, i)).await?;
        many_tasks(|i| theirs(&bare, i)).await?;
    }
    let (mut one, mut many) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let mut rates = [0.0; 2];
        for step in 0..2 {
            let who = (step + round) % 2;
            rates[who] = match who {
                0 => one_task(ours(&store, 0)).await?,
                _ => one_task(theirs(&bare, 0)).await?,
            };
        }
        one.push(rates);
        let mut rates = [0.0; 2];
        for step in 0..2 {
            let who = (step + round) % 2;
            rates[who] = match who {
                0 => many_tasks(|i| ours(&store, i)).await?,
                _ => many_tasks(|i| theirs(&bare, i)).await?,
            };
        }
        many.push(rates);
    }
    println!("pairs per second, medians of {rounds} rounds");
    let rate = |name: &str, rates: Vec<f64>| println!("  {name:<34} {:>9.0}", median(rates));
    rate("1 task, lockkit", one.iter().map(|r| r[0]).collect());
    rate("1 task, bare driver", one.iter().map(|r| r[1]).collect());
    rate("64 tasks, lockkit", many.iter().map(|r| r[0]).collect());
    rate("64 tasks, bare driver", many.iter().map(|r| r[1]).collect());
    println!("ratios, medians of the rounds' own");
    verdict("1 task, to the bare driver", 0.95, one.iter().map(|r| r[0] / r[1]).collect());
    verdict("64 tasks, to the bare driver", 0.90, many.iter().map(|r| r[0] / r[1]).collect());
    renewals(&store, &server).await
}

/// Runs pairs one after the other for a slice of time; pairs per second.
async fn one_task<F: Future<Output = Result<(), Error>>>(mut pair: impl FnMut() -> F) -> Result<f64, Error> {
    let (start, mut pairs) = (Instant::now(), 0_u32);
    while start.elapsed() < SLICE {
        for _ in 0..8 {
            pair().await?;
        }
        pairs += 8;
    }
    Ok(f64::from(pairs) / start.elapsed().as_secs_f64())
}

/// The same in 64 tasks, each on a key of its own.
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

fn request(key: String) -> AcquireRequest {
    AcquireRequest {
        claim: Claim {
            key: LockKey::new(key).expect("name"),
            token: Token::random().expect("random"),
            mode: Mode::Exclusive,
        },
        ttl: TTL,
        wait: Duration::ZERO,
        order: Order::Any,
        fence: FenceRequest::default(),
        holder: HolderInfo::new("bench@host:1234"),
    }
}

fn ours(store: &Arc<ZkStore>, i: usize) -> impl FnMut() -> Pair + use<> {
    let (store, request) = (Arc::clone(store), request(format!("bench-{i}")));
    move || {
        let (store, mut request) = (Arc::clone(&store), request.clone());
        Box::pin(async move {
            request.claim.token = Token::random()?;
            let granted = matches!(store.acquire(&request).await?, Attempt::Granted(_));
            let released = matches!(store.release(&request.claim).await?, Release::Released { .. });
            if granted && released { Ok(()) } else { Err("not granted".into()) }
        })
    }
}

const NODE: CreateOptions<'static> = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
const PARENT: CreateOptions<'static> = CreateMode::Container.with_acls(Acls::anyone_all());

fn theirs(bare: &Client, i: usize) -> impl FnMut() -> Pair + use<> {
    let (bare, directory) = (bare.clone(), format!("/bare/bench-{i}"));
    move || {
        let (bare, directory) = (bare.clone(), directory.clone());
        Box::pin(async move {
            let prefix = format!("{directory}/_c_00112233-4455-6677-8899-aabbccddeeff-lock-");
            let created = match bare.create(&prefix, b"lockkit:1:1::bench@host:1234", &NODE).await {
                Err(zookeeper_client::Error::NoNode) => {
                    bare.mkdir(&directory, &PARENT).await?;
                    bare.create(&prefix, b"", &NODE).await
                }
                created => created,
            };
            bare.delete(&format!("{prefix}{}", created?.1), None).await?;
            Ok(())
        })
    }
}

/// What it costs to renew many leases of one session.
async fn renewals(store: &Arc<ZkStore>, server: &ZooKeeperServer) -> Result<(), Error> {
    let mut renewals = Vec::with_capacity(RENEWED);
    for start in (0..RENEWED).step_by(TASKS) {
        let tasks = (start..RENEWED.min(start + TASKS)).map(|i| {
            let (store, request) = (Arc::clone(store), request(format!("renewed-{i}")));
            tokio::spawn(async move { store.acquire(&request).await.map(|_| request.claim) })
        });
        for task in tasks.collect::<Vec<_>>() {
            renewals.push(Renewal { claim: task.await??, ttl: TTL, depth: 1, fence_floor: None });
        }
    }
    const TIMES: usize = 10;
    let mut wall = Vec::new();
    let mut before = 0;
    for time in 0..=TIMES {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let start = Instant::now();
        let answers = store.renew(&renewals).await;
        if !answers.iter().all(|answer| matches!(answer, Ok(Renewed::Held(_)))) {
            return Err("a lease was lost".into());
        }
        match time {
            // The first time each node is looked at, and a watch is set.
            0 => {
                println!("renewing {RENEWED} leases in one call");
                println!("  the first time                     {:>9.1} ms", start.elapsed().as_secs_f64() * 1e3);
                before = received(server).await?;
            }
            _ => wall.push(start.elapsed().as_secs_f64()),
        }
    }
    println!("  then                               {:>9.1} ms", median(wall) * 1e3);
    println!("  requests of all clients meanwhile  {:>9}", received(server).await? - before);
    Ok(())
}

/// How many packets the server has received.
async fn received(server: &ZooKeeperServer) -> Result<u64, Error> {
    let answer = server.word("srvr").await?;
    let count = answer.lines().find_map(|line| line.strip_prefix("Received: ")).ok_or("no count")?;
    Ok(count.trim().parse()?)
}

fn verdict(name: &str, target: f64, ratios: Vec<f64>) {
    let mut sorted = ratios;
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted[sorted.len() / 4], sorted[sorted.len() * 3 / 4]);
    let ratio = median(sorted);
    let outcome = if ratio >= target { "met" } else { "MISSED" };
    println!("  {name:<34} {ratio:>9.3}  (quartiles {low:.3} .. {high:.3}; target {target:.2}: {outcome})");
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
