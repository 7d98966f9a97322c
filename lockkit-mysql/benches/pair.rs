//! Acquire and release, in pairs: this store against the same server through the driver alone.
//!
//! All contestants run in turn within each round, so that whatever else the machine does hits all of them alike; what
//! counts is the median of the rounds' ratios. The server is private, and writes each commit to the disk, unless `relaxed`
//! leaves that to the operating system: then the disk's moods are out of the way, and every microsecond of ours shows.
//! `cargo bench -p lockkit-mysql --bench pair -- [rounds] [mysql] [relaxed]`

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, FenceRequest, HolderInfo, LockKey, LockStore, Mode, Order, Query, Release, Renewal,
    Renewed, Token,
};
use lockkit_mysql::{MySqlConfig, MySqlStore, schema};
use lockkit_testkit::servers::{MySqlFlavor, MySqlOptions, MySqlServer};
use sqlx::{Connection as _, MySqlConnection, MySqlPool, mysql::MySqlPoolOptions};
use tokio::sync::Mutex;

const TTL: Duration = Duration::from_secs(30);
const SLICE: Duration = Duration::from_millis(120);
const TASKS: usize = 64;
const RENEWED: usize = 10_000;

/// The least that keeps a lock: a token and an end, by a unique key.
const BARE: &str = "CREATE TABLE bare (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, resource_name VARBINARY(512) NOT NULL \
     UNIQUE, token BINARY(16) NULL, expires DATETIME(6) NULL) ENGINE=InnoDB";
const TAKE: &str = "UPDATE bare SET token = ?, expires = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND \
     WHERE resource_name = ? AND (expires IS NULL OR expires <= UTC_TIMESTAMP(6))";
const GIVE: &str = "UPDATE bare SET token = NULL, expires = NULL WHERE resource_name = ? AND token = ?";

/// What this store sends.
const ACQUIRE: &str = "UPDATE resource_lock SET fence = LAST_INSERT_ID(GREATEST(fence_last + 1, ?, \
     TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))), span = ?, fence_last = fence + span - 1, token = ?, \
     node_info = ?, `count` = 1, expires = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, version = version + 1, \
     update_time = UTC_TIMESTAMP(6) WHERE resource_name = ? AND (expires IS NULL OR expires <= UTC_TIMESTAMP(6))";
const RELEASE: &str = "UPDATE resource_lock SET token = NULL, expires = NULL, `count` = 0, version = version + 1, \
     update_time = UTC_TIMESTAMP(6) WHERE resource_name = ? AND token = ? AND expires > UTC_TIMESTAMP(6)";

type Error = Box<dyn std::error::Error + Send + Sync>;
type Pair = Pin<Box<dyn Future<Output = Result<(), Error>> + Send>>;

fn main() -> Result<(), Error> {
    let rounds = std::env::args().skip(1).find_map(|argument| argument.parse().ok()).unwrap_or(41);
    let said = |word: &str| std::env::args().any(|argument| argument == word);
    let mut options = MySqlOptions::default().init(schema::ddl(MySqlConfig::TABLE)?);
    if said("mysql") {
        options = options.flavor(MySqlFlavor::Newer);
    }
    if said("relaxed") {
        options = options.args(["--innodb-flush-log-at-trx-commit=2"]);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(run(options, rounds))
}

async fn run(options: MySqlOptions, rounds: usize) -> Result<(), Error> {
    let server = MySqlServer::start(options).await?;
    server.admin(BARE).await?;
    let version = server.admin("SELECT VERSION()").await?;
    let store = Arc::new(MySqlStore::from_url(&server.url()).await?);
    let single = Arc::new(Mutex::new(MySqlConnection::connect(&server.url()).await?));
    let pool = MySqlPoolOptions::new()
        .max_connections(MySqlConfig::CONNECTIONS)
        .test_before_acquire(false)
        .connect(&server.url())
        .await?;
    prepare(&pool, &store).await?;

    let (mut one, mut many) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        let mut rates = [0.0; 3];
        for step in 0..3 {
            let who = (step + round) % 3;
            rates[who] = match who {
                0 => one_task(ours(&store, 0)).await?,
                1 => one_task(through(&single, TAKE, GIVE)).await?,
                _ => one_task(through(&single, ACQUIRE, RELEASE)).await?,
            };
        }
        one.push(rates);
        let mut rates = [0.0; 2];
        for step in 0..2 {
            let who = (step + round) % 2;
            rates[who] = match who {
                0 => many_tasks(|i| ours(&store, i)).await?,
                _ => many_tasks(|i| pooled(&pool, i)).await?,
            };
        }
        many.push(rates);
    }
    println!("{:?}: pairs per second, medians of {rounds} rounds", version[0][0]);
    let rate = |name: &str, rates: Vec<f64>| println!("  {name:<42} {:>9.0}", median(rates));
    rate("1 task, lockkit", one.iter().map(|r| r[0]).collect());
    rate("1 task, two bare updates, one connection", one.iter().map(|r| r[1]).collect());
    rate("1 task, same statements, one connection", one.iter().map(|r| r[2]).collect());
    rate("64 tasks, lockkit", many.iter().map(|r| r[0]).collect());
    rate("64 tasks, same statements, driver's pool", many.iter().map(|r| r[1]).collect());
    println!("ratios, medians of the rounds' own");
    verdict("1 task, to two bare updates", 0.95, one.iter().map(|r| r[0] / r[1]).collect());
    verdict("1 task, to the same statements", 0.95, one.iter().map(|r| r[0] / r[2]).collect());
    verdict("64 tasks, to the same statements", 0.90, many.iter().map(|r| r[0] / r[1]).collect());
    renewals(&store).await
}

/// Makes all rows, so that what is measured is the usual case.
async fn prepare(pool: &MySqlPool, store: &Arc<MySqlStore>) -> Result<(), Error> {
    for i in 0..TASKS {
        let name = name(i);
        sqlx::query("INSERT INTO bare (resource_name) VALUES (?)").bind(name.as_bytes()).execute(pool).await?;
        ours(store, i)().await?;
    }
    Ok(())
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

fn name(i: usize) -> String {
    format!("bench/{i}")
}

fn request(i: usize) -> Result<AcquireRequest, Error> {
    Ok(AcquireRequest {
        claim: Claim { key: LockKey::new(name(i))?, token: Token::random()?, mode: Mode::Exclusive },
        ttl: TTL,
        wait: Duration::ZERO,
        order: Order::Any,
        fence: FenceRequest::default(),
        holder: HolderInfo::new("bench@host:1234"),
    })
}

fn ours(store: &Arc<MySqlStore>, i: usize) -> impl FnMut() -> Pair + use<> {
    let store: Arc<dyn LockStore> = Arc::clone(store) as _;
    let request = Arc::new(request(i).expect("request"));
    move || {
        let (store, request) = (Arc::clone(&store), Arc::clone(&request));
        Box::pin(async move {
            let granted = matches!(store.acquire(&request).await?, Attempt::Granted(_));
            let released = matches!(store.release(&request.claim).await?, Release::Released { .. });
            if granted && released { Ok(()) } else { Err("not granted".into()) }
        })
    }
}

/// A pair of statements on one connection, which is nobody else's.
fn through(
    single: &Arc<Mutex<MySqlConnection>>,
    take: &'static str,
    give: &'static str,
) -> impl FnMut() -> Pair + use<> {
    let single = Arc::clone(single);
    let (name, token) = (name(0), [7_u8; 16]);
    move || {
        let (single, name) = (Arc::clone(&single), name.clone());
        Box::pin(async move {
            let mut connection = single.lock().await;
            let taken = bind(take, &name, &token).execute(&mut *connection).await?;
            let give = sqlx::query(give).bind(name.as_bytes()).bind(token.as_slice());
            let given = give.execute(&mut *connection).await?;
            if taken.rows_affected() == 1 && given.rows_affected() == 1 { Ok(()) } else { Err("not granted".into()) }
        })
    }
}

fn pooled(pool: &MySqlPool, i: usize) -> impl FnMut() -> Pair + use<> {
    let (pool, name, token) = (pool.clone(), name(i), [7_u8; 16]);
    move || {
        let (pool, name) = (pool.clone(), name.clone());
        Box::pin(async move {
            let taken = bind(ACQUIRE, &name, &token).execute(&pool).await?;
            let given = sqlx::query(RELEASE).bind(name.as_bytes()).bind(token.as_slice()).execute(&pool).await?;
            if taken.rows_affected() == 1 && given.rows_affected() == 1 { Ok(()) } else { Err("not granted".into()) }
        })
    }
}

fn bind<'q>(
    statement: &'static str,
    name: &'q str,
    token: &'q [u8; 16],
) -> sqlx::query::Query<'q, sqlx::MySql, sqlx::mysql::MySqlArguments> {
    let micros = 30_000_000_i64;
    if statement == TAKE {
        return sqlx::query(statement).bind(token.as_slice()).bind(micros).bind(name.as_bytes());
    }
    let query = sqlx::query(statement).bind(1_u64).bind(1_u32).bind(token.as_slice());
    query.bind("bench@host:1234").bind(micros).bind(name.as_bytes())
}

/// What it takes to renew many leases, and to ask for many names at once.
async fn renewals(store: &Arc<MySqlStore>) -> Result<(), Error> {
    let mut renewals = Vec::with_capacity(RENEWED);
    let mut tasks = Vec::new();
    for part in 0..16 {
        let store = Arc::clone(store);
        tasks.push(tokio::spawn(async move {
            let mut claims = Vec::new();
            for i in 0..RENEWED / 16 {
                let request = request(1000 + part * RENEWED + i)?;
                store.acquire(&request).await?;
                claims.push(request.claim);
            }
            Ok::<_, Error>(claims)
        }));
    }
    for task in tasks {
        let claims = task.await??;
        renewals.extend(claims.into_iter().map(|claim| Renewal { claim, ttl: TTL, depth: 1, fence_floor: None }));
    }
    let (mut wall, mut asked) = (Vec::new(), Vec::new());
    let keys = Query::Keys(renewals.iter().take(1000).map(|renewal| renewal.claim.key.clone()).collect());
    for _ in 0..7 {
        let start = Instant::now();
        let answers = store.renew(&renewals).await;
        wall.push(start.elapsed().as_secs_f64());
        if !answers.iter().all(|answer| matches!(answer, Ok(Renewed::Held(_)))) {
            return Err("a lease was lost".into());
        }
        let start = Instant::now();
        store.inspect(&keys).await?;
        asked.push(start.elapsed().as_secs_f64());
    }
    println!("renewing {} leases in one call           {:>9.1} ms", renewals.len(), median(wall) * 1e3);
    println!("asking for 1000 names at once              {:>9.2} ms", median(asked) * 1e3);
    Ok(())
}

fn verdict(name: &str, target: f64, ratios: Vec<f64>) {
    let mut sorted = ratios;
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted[sorted.len() / 4], sorted[sorted.len() * 3 / 4]);
    let ratio = median(sorted);
    let outcome = if ratio >= target { "met" } else { "MISSED" };
    println!("  {name:<42} {ratio:>9.3}  (quartiles {low:.3} .. {high:.3}; target {target:.2}: {outcome})");
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
