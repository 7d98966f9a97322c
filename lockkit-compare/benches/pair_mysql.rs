//! Acquire and release, in pairs: this store against the same server through the driver alone; and what renewals cost.
//!
//! The server is private, and writes each commit to the disk, unless `relaxed` leaves that to the operating system: then the
//! disk does not hide what the store itself costs.
//! `cargo bench -p lockkit-compare --bench pair_mysql -- [rounds] [mysql] [relaxed]`

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit::{
    LockStore,
    mysql::{MySqlConfig, MySqlStore, schema},
    store::Query,
};
use lockkit_compare::pairs::{self, BoxError, Contestant, Leases, Rounds, median_millis};
use lockkit_testkit::servers::{MySqlFlavor, MySqlOptions, MySqlServer};
use sqlx::{Connection as _, MySqlConnection, MySqlPool, mysql::MySqlPoolOptions};
use tokio::sync::Mutex;

const SLICE: Duration = Duration::from_millis(120);
const TASKS: usize = 64;
const RENEWED: usize = 10_000;
/// What the names of all locks start with. The driver uses the rows that the store made, in turns with it.
const NAME: &str = "bench/";

/// The least that keeps a lock: a token and an end, by a unique key.
const BARE: &str = "CREATE TABLE bare (id BIGINT UNSIGNED AUTO_INCREMENT PRIMARY KEY, resource_name VARBINARY(512) NOT NULL \
     UNIQUE, token BINARY(16) NULL, expires DATETIME(6) NULL) ENGINE=InnoDB";
const TAKE: &str = "UPDATE bare SET token = ?, expires = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND \
     WHERE resource_name = ? AND (expires IS NULL OR expires <= UTC_TIMESTAMP(6))";
const GIVE: &str = "UPDATE bare SET token = NULL, expires = NULL WHERE resource_name = ? AND token = ?";

/// What this store sends, without the number by which it knows the answer.
const ACQUIRE: &str = "UPDATE resource_lock SET fence = LAST_INSERT_ID(GREATEST(fence_last + 1, ?, \
     TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))), span = ?, fence_last = fence + span - 1, token = ?, \
     node_info = ?, `count` = 1, expires = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, version = version + 1, \
     update_time = UTC_TIMESTAMP(6) WHERE resource_name = ? AND (expires IS NULL OR expires <= UTC_TIMESTAMP(6))";
const RELEASE: &str = "UPDATE resource_lock SET token = NULL, expires = NULL, `count` = 0, version = version + 1, \
     update_time = UTC_TIMESTAMP(6) WHERE resource_name = ? AND token = ? AND expires > UTC_TIMESTAMP(6)";

type Pair = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

fn main() -> Result<(), BoxError> {
    let said = |word: &str| std::env::args().any(|argument| argument == word);
    let mut options = MySqlOptions::default().init(schema::ddl(MySqlConfig::TABLE)?);
    if said("mysql") {
        options = options.flavor(MySqlFlavor::Newer);
    }
    if said("relaxed") {
        options = options.args(["--innodb-flush-log-at-trx-commit=2"]);
    }
    pairs::main(41, async |rounds| run(options, rounds.slice(SLICE)).await)
}

async fn run(options: MySqlOptions, rounds: Rounds) -> Result<(), BoxError> {
    let server = MySqlServer::start(options).await?;
    server.admin(BARE).await?;
    let version = server.admin("SELECT VERSION()").await?;
    let store: Arc<dyn LockStore> = Arc::new(MySqlStore::from_url(&server.url()).await?);
    let single = Arc::new(Mutex::new(MySqlConnection::connect(&server.url()).await?));
    let pool = MySqlPoolOptions::new()
        .max_connections(MySqlConfig::CONNECTIONS)
        .test_before_acquire(false)
        .connect(&server.url())
        .await?;
    prepare(&pool).await?;
    let ours = Contestant::store(Arc::clone(&store));
    let driver = Arc::clone(&single);
    let bare = Contestant::new("two bare updates, one connection", move |_| through(&driver, TAKE, GIVE));
    let same = Contestant::new("same statements, one connection", move |_| through(&single, ACQUIRE, RELEASE));
    let pool = Contestant::new("same statements, driver's pool", move |number| pooled(&pool, number));
    // The store makes its rows, so that what is measured is the usual case.
    Rounds::new(1).slice(SLICE).many_tasks(&[&ours]).await?;

    let one = rounds.one_task(&[&ours, &bare, &same]).await?;
    let many = rounds.many_tasks(&[&ours, &pool]).await?;
    print!("{:?}\n{one}{many}", version[0][0]);
    println!("ratios, medians of the rounds' own");
    println!("{}\n{}\n{}", one.ratio(1, 0.95), one.ratio(2, 0.95), many.ratio(1, 0.90));
    renewals(store).await
}

/// Makes the rows of the bare table.
async fn prepare(pool: &MySqlPool) -> Result<(), BoxError> {
    for number in 0..TASKS {
        let name = format!("{NAME}{number}");
        sqlx::query("INSERT INTO bare (resource_name) VALUES (?)").bind(name.as_bytes()).execute(pool).await?;
    }
    Ok(())
}

/// A pair of statements on one connection, which is nobody else's.
fn through(
    single: &Arc<Mutex<MySqlConnection>>,
    take: &'static str,
    give: &'static str,
) -> impl FnMut() -> Pair + use<> {
    let single = Arc::clone(single);
    let (name, token) = (NAME.to_owned() + "0", [7_u8; 16]);
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

fn pooled(pool: &MySqlPool, number: usize) -> impl FnMut() -> Pair + use<> {
    let (pool, name, token) = (pool.clone(), format!("{NAME}{number}"), [7_u8; 16]);
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
async fn renewals(store: Arc<dyn LockStore>) -> Result<(), BoxError> {
    let leases = Leases::take(Arc::clone(&store), RENEWED).await?;
    let keys = Query::Keys(leases.keys().take(1000).cloned().collect());
    let (mut wall, mut asked) = (Vec::new(), Vec::new());
    for _ in 0..7 {
        wall.push(leases.renew().await?);
        let start = Instant::now();
        store.inspect(&keys).await?;
        asked.push(start.elapsed());
    }
    println!("renewing {RENEWED} leases in one call         {:>9.1} ms", median_millis(&wall));
    println!("asking for 1000 names at once              {:>9.2} ms", median_millis(&asked));
    Ok(())
}
