//! Acquire and release, in pairs: this store against the bare driver, and against `rslock`.
//!
//! All contestants run in turn within each round, so that whatever else the machine does hits all of them alike; what
//! counts is the median of the rounds' ratios. The server is private: `LOCKKIT_REDIS_SERVER`, or `redis-server`.
//! `cargo bench -p lockkit-redis --bench pair [-- rounds]`

use std::{
    future::Future,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, FenceRequest, HolderInfo, LockKey, LockStore, Mode, Order, Release, Renewal,
    Renewed, Token,
};
use lockkit_redis::{RedisConfig, RedisStore};
use lockkit_testkit::servers::{RedisFlavor, RedisOptions, RedisServer};
use redis::{AsyncConnectionConfig, IntoConnectionInfo, aio::MultiplexedConnection};

const SCRIPT: &str = include_str!("../src/wire/scripts/batch.lua");
const TTL: Duration = Duration::from_secs(30);
const SLICE: Duration = Duration::from_millis(400);
const TURNS: usize = 20;
const TASKS: usize = 64;
const RENEWED: usize = 20_000;

type Error = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Error> {
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(15);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(async {
        let program = std::env::var_os("LOCKKIT_REDIS_SERVER");
        let flavor = program.map_or_else(RedisFlavor::default, |path| RedisFlavor::At(path.into()));
        let server = RedisServer::start(RedisOptions::default().flavor(flavor)).await?;
        let process = server.pid().ok_or("it runs")?.to_string();
        run(server.port(), process, rounds).await
    })
}

async fn run(port: u16, server: String, rounds: usize) -> Result<(), Error> {
    let store = Arc::new(RedisStore::connect(RedisConfig::new("127.0.0.1", port)).await?);
    let bare = Bare::connect(port).await?;
    let rslock = rslock::LockManager::new(vec![format!("redis://127.0.0.1:{port}/")]);

    let mut one = Vec::new();
    let mut many = Vec::new();
    let mut costs = [[0.0; 3]; 3];
    for round in 0..rounds {
        let mut rates = [0.0; 2];
        // In short turns: what a single task does in a while depends on where the threads happen to run.
        for turn in 0..2 * TURNS {
            let who = (turn + round) % 2;
            rates[who] += match who {
                0 => one_task(ours(&store, 0), SLICE / TURNS as u32).await?,
                _ => one_task(theirs(&bare, 0), SLICE / TURNS as u32).await?,
            } / TURNS as f64;
        }
        one.push(rates);
        let mut rates = [0.0; 3];
        for step in 0..3 {
            let who = (step + round) % 3;
            let (client, server_cpu, start) = (cpu_seconds("self"), cpu_seconds(&server), Instant::now());
            rates[who] = match who {
                0 => many_tasks(|i| ours(&store, i)).await?,
                1 => many_tasks(|i| theirs(&bare, i)).await?,
                _ => many_tasks(|i| rslocks(&rslock, i)).await?,
            };
            let spent = [cpu_seconds("self") - client, cpu_seconds(&server) - server_cpu];
            costs[who][0] += spent[0];
            costs[who][1] += spent[1];
            costs[who][2] += rates[who] * start.elapsed().as_secs_f64();
        }
        many.push(rates);
    }
    println!("pairs per second, medians of {rounds} rounds");
    let rate = |name: &str, rates: Vec<f64>| println!("  {name:<34} {:>9.0}", median(rates));
    rate("1 task, lockkit", one.iter().map(|r| r[0]).collect());
    rate("1 task, bare driver", one.iter().map(|r| r[1]).collect());
    rate("64 tasks, lockkit", many.iter().map(|r| r[0]).collect());
    rate("64 tasks, bare driver", many.iter().map(|r| r[1]).collect());
    rate("64 tasks, rslock (no fence, no wake)", many.iter().map(|r| r[2]).collect());
    println!("processor time per pair with 64 tasks, in us: client, server");
    for (name, [client, server, pairs]) in ["lockkit", "bare driver", "rslock"].iter().zip(costs) {
        println!("  {name:<34} {:>9.2} {:>9.2}", client / pairs * 1e6, server / pairs * 1e6);
    }
    println!("ratios, medians of the rounds' own");
    verdict("1 task, to the bare driver", 0.95, one.iter().map(|r| r[0] / r[1]).collect());
    verdict("64 tasks, to the bare driver", 0.90, many.iter().map(|r| r[0] / r[1]).collect());
    verdict("64 tasks, to rslock", 1.00, many.iter().map(|r| r[0] / r[2]).collect());
    renewals(&store).await
}

/// Runs pairs one after the other for a slice of time; pairs per second.
async fn one_task<F>(mut pair: impl FnMut() -> F, slice: Duration) -> Result<f64, Error>
where
    F: Future<Output = Result<(), Error>>,
{
    let (start, mut pairs) = (Instant::now(), 0_u32);
    while start.elapsed() < slice {
        for _ in 0..16 {
            pair().await?;
        }
        pairs += 16;
    }
    Ok(f64::from(pairs) / start.elapsed().as_secs_f64())
}

/// The same in 64 tasks, each on a key of its own.
async fn many_tasks<P, F>(pair: impl Fn(usize) -> P) -> Result<f64, Error>
where
    P: FnMut() -> F + Send + 'static,
    F: Future<Output = Result<(), Error>> + Send + 'static,
{
    let tasks: Vec<_> = (0..TASKS).map(|i| tokio::spawn(one_task(pair(i), SLICE))).collect();
    let mut rate = 0.0;
    for task in tasks {
        rate += task.await??;
    }
    Ok(rate)
}

fn claim(i: usize) -> Result<Claim, Error> {
    Ok(Claim { key: LockKey::new(format!("bench:{i}"))?, token: Token::random()?, mode: Mode::Exclusive })
}

fn ours(store: &Arc<RedisStore>, i: usize) -> impl FnMut() -> Pair + use<> {
    let store: Arc<dyn LockStore> = Arc::clone(store) as _;
    let request = Arc::new(AcquireRequest {
        claim: claim(i).expect("claim"),
        ttl: TTL,
        wait: Duration::ZERO,
        order: Order::Any,
        fence: FenceRequest::default(),
        holder: HolderInfo::new("bench@host:1234"),
    });
    move || {
        let (store, request) = (Arc::clone(&store), Arc::clone(&request));
        Box::pin(async move {
            let granted = matches!(store.acquire(&request).await?, Attempt::Granted(_));
            let released = matches!(store.release(&request.claim).await?, Release::Released { .. });
            if granted && released { Ok(()) } else { Err("not granted".into()) }
        })
    }
}

type Pair = std::pin::Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

#[derive(Clone)]
struct Bare {
    connection: MultiplexedConnection,
    script: Arc<str>,
}

impl Bare {
    async fn connect(port: u16) -> Result<Self, Error> {
        let tcp = redis::io::tcp::TcpSettings::default().set_nodelay(true);
        let info = format!("redis://127.0.0.1:{port}/?protocol=resp3").into_connection_info()?.set_tcp_settings(tcp);
        let config = AsyncConnectionConfig::new()
            .set_pipeline_buffer_size(1024)
            .set_response_timeout(None)
            .set_push_sender(|_| Ok::<_, redis::aio::SendError>(()));
        let client = redis::Client::open(info)?;
        let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
        let script: String = redis::cmd("SCRIPT").arg("LOAD").arg(SCRIPT).query_async(&mut connection).await?;
        Ok(Self { connection, script: script.into() })
    }
}

fn theirs(bare: &Bare, i: usize) -> impl FnMut() -> Pair + use<> {
    let claim = claim(i).expect("claim");
    let lock: Arc<str> = format!("lockkit:{}", claim.key).into();
    let counter: Arc<str> = format!("{{{lock}}}:fence").into();
    let token: Arc<str> = format!("{}:", claim.token.reveal()).into();
    let head: Arc<str> = format!("{token}1:").into();
    let bare = bare.clone();
    move || {
        let (lock, counter, token, head) = (lock.clone(), counter.clone(), token.clone(), head.clone());
        let mut connection = bare.connection.clone();
        let script = bare.script.clone();
        Box::pin(async move {
            let mut request = redis::cmd("EVALSHA");
            request.arg(&*script).arg(2).arg(&*lock).arg(&*counter);
            request.arg(&*head).arg(":1:bench@host:1234").arg(30_000).arg(1).arg(1).arg("next");
            let [fence]: [i64; 1] = request.query_async(&mut connection).await?;
            let mut request = redis::cmd("EVALSHA");
            request.arg(&*script).arg(1).arg(&*lock).arg(&*token);
            let [receivers]: [i64; 1] = request.query_async(&mut connection).await?;
            if fence > 0 && receivers >= 0 { Ok(()) } else { Err("not granted".into()) }
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

/// What it costs to renew many leases: time on the wall, and of this process's processors.
async fn renewals(store: &Arc<RedisStore>) -> Result<(), Error> {
    let mut renewals = Vec::with_capacity(RENEWED);
    for i in 0..RENEWED {
        let claim = claim(100 + i)?;
        let request = AcquireRequest {
            claim: claim.clone(),
            ttl: TTL,
            wait: Duration::ZERO,
            order: Order::Any,
            fence: FenceRequest::default(),
            holder: HolderInfo::new("bench@host:1234"),
        };
        store.acquire(&request).await?;
        renewals.push(Renewal { claim, ttl: TTL, depth: 1, fence_floor: None });
    }
    let mut wall = Vec::new();
    let cpu = cpu_seconds("self");
    const TIMES: usize = 10;
    for _ in 0..TIMES {
        let start = Instant::now();
        let answers = store.renew(&renewals).await;
        wall.push(start.elapsed().as_secs_f64());
        if !answers.iter().all(|answer| matches!(answer, Ok(Renewed::Held(_)))) {
            return Err("a lease was lost".into());
        }
    }
    let each = (cpu_seconds("self") - cpu) / (TIMES * RENEWED) as f64;
    println!("renewing {RENEWED} leases in one call");
    println!("  wall time                          {:>9.1} ms", median(wall) * 1e3);
    println!("  processor time per lease           {:>9.2} us", each * 1e6);
    println!("  100 000 leases every 10 s          {:>9.1} % of a processor", each * 1e6);
    Ok(())
}

/// The processor time of a process, from `/proc` (in ticks of 10 ms).
fn cpu_seconds(process: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields: Vec<f64> =
        stat.rsplit(')').next().unwrap_or("").split_whitespace().filter_map(|field| field.parse().ok()).collect();
    // Behind the name, and without the state, which is no number, utime and stime are the 11th and 12th.
    fields.get(10..12).map_or(0.0, |ticks| ticks.iter().sum::<f64>() / 100.0)
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
