//! Acquire and release, in pairs: this store against the bare driver, and against `rslock`; and what renewals cost.
//!
//! The server is private: `LOCKKIT_REDIS_SERVER`, or `redis-server`.
//! `cargo bench -p lockkit-compare --bench pair_redis [-- rounds]`

mod support;

use std::sync::Arc;

use lockkit::{
    LockStore,
    redis::{RedisConfig, RedisStore},
};
use lockkit_compare::pairs::{self, BoxError, Contestant, Leases, Rounds, median_millis, processor_seconds};
use lockkit_testkit::servers::RedisServer;
use redis::{AsyncConnectionConfig, IntoConnectionInfo, aio::MultiplexedConnection};

use crate::support::Pair;

/// What this store sends, without the numbers by which it knows the answers.
const SCRIPT: &str = include_str!("../../lockkit-redis/src/wire/scripts/batch.lua");
const RENEWED: usize = 20_000;
const RENEWALS: usize = 10;

fn main() -> Result<(), BoxError> {
    pairs::main(15, async |rounds| run(&support::server().await?, rounds).await)
}

async fn run(server: &RedisServer, rounds: Rounds) -> Result<(), BoxError> {
    let port = server.port();
    let store: Arc<dyn LockStore> = Arc::new(RedisStore::connect(RedisConfig::new("127.0.0.1", port)).await?);
    let bare = Bare::connect(port).await?;
    let ours = Contestant::store(Arc::clone(&store));
    let bare = Contestant::new("bare driver", move |number| theirs(&bare, number));
    let rslock = support::rslock("rslock (no fence, no wake)", [server]);

    let one = rounds.turns(20).one_task(&[&ours, &bare]).await?;
    let server = server.pid().ok_or("it runs")?;
    let many = rounds.server(server).many_tasks(&[&ours, &bare, &rslock]).await?;
    print!("{one}{many}");
    println!("ratios, medians of the rounds' own");
    println!("{}\n{}\n{}", one.ratio(1, 0.95), many.ratio(1, 0.90), many.ratio(2, 1.00));
    renewals(store).await
}

#[derive(Clone)]
struct Bare {
    connection: MultiplexedConnection,
    script: Arc<str>,
}

impl Bare {
    async fn connect(port: u16) -> Result<Self, BoxError> {
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

fn theirs(bare: &Bare, number: usize) -> impl FnMut() -> Pair + use<> {
    let lock: Arc<str> = format!("lockkit:bare/{number}").into();
    let counter: Arc<str> = format!("{{{lock}}}:fence").into();
    let token: Arc<str> = format!("{number:032x}:").into();
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

/// What it costs to renew many leases: time on the wall, and of this process's processors.
async fn renewals(store: Arc<dyn LockStore>) -> Result<(), BoxError> {
    let leases = Leases::take(store, RENEWED).await?;
    let (mut wall, cpu) = (Vec::new(), processor_seconds(std::process::id()));
    for _ in 0..RENEWALS {
        wall.push(leases.renew().await?);
    }
    let each = (processor_seconds(std::process::id()) - cpu) / (RENEWALS * RENEWED) as f64;
    println!("renewing {RENEWED} leases in one call");
    println!("  wall time                          {:>9.1} ms", median_millis(&wall));
    println!("  processor time per lease           {:>9.2} us", each * 1e6);
    println!("  100 000 leases every 10 s          {:>9.1} % of a processor", each * 1e6);
    Ok(())
}
