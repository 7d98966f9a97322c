//! Many leases, after the connection was lost and after the process stood still: how long until all are renewed, and how
//! many are lost.
//!
//! `cargo bench --all-features --bench renewals -- [leases] [memory] [redis] [redlock] [mysql] [zk]`
//!
//! A **reconnection** is one on Redis and Redlock; on ZooKeeper it is what it comes to, an alarm for all leases, and elsewhere
//! nothing happens but the next renewals. A **pause** is that of the one thread on which
//! everything runs, for 12 s of a ttl of 30. Servers are private, and write to the disk when they please.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit::{Event, Guard, Locker, Observer, Status};
use lockkit_testkit::servers::{
    MySqlFlavor, MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer, hosts,
};
use tokio::time::sleep;

type Error = Box<dyn std::error::Error + Send + Sync>;

const TTL: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_secs(12);
const STORES: [&str; 5] = ["memory", "redis", "redlock", "mysql", "zk"];
/// How many locks are asked for at a time.
const AT_A_TIME: usize = 16;
const REDLOCK_NODES: usize = 5;

fn main() -> Result<(), Error> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let leases = arguments.iter().find_map(|argument| argument.parse().ok()).unwrap_or(100_000);
    let is_named = |name: &&str| arguments.iter().any(|argument| argument == name);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    for store in STORES {
        if is_named(&store) || !STORES.iter().any(&is_named) {
            let (servers, url) = runtime.block_on(start(store))?;
            // One thread, so that a pause of it is one of everything.
            let one = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            one.block_on(measure(store, &url, &servers.redis, leases))?;
        }
    }
    Ok(())
}

/// What has to live as long as the measurement.
#[derive(Default)]
struct Servers {
    redis: Vec<RedisServer>,
    _other: Option<Box<dyn Any>>,
}

async fn start(store: &str) -> Result<(Servers, String), Error> {
    Ok(match store {
        "redis" => {
            let redis = RedisServer::start_many(1, RedisOptions::default()).await?;
            let url = redis[0].url();
            (Servers { redis, _other: None }, url)
        }
        "redlock" => {
            let redis = RedisServer::start_many(REDLOCK_NODES, RedisOptions::default()).await?;
            let url = format!("redlock://{}?delayed_restart=no", hosts(&redis));
            (Servers { redis, _other: None }, url)
        }
        "mysql" => {
            let options = MySqlOptions::default().flavor(MySqlFlavor::Installed);
            let server = MySqlServer::start(options.args(["--innodb-flush-log-at-trx-commit=2"])).await?;
            let url = format!("{}?create=true", server.url());
            (Servers { _other: Some(Box::new(server)), ..Servers::default() }, url)
        }
        "zk" => {
            let server = ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?;
            // The longest session that the server grants: leases last no longer.
            let url = format!("zk://{}?session=40s", server.addr());
            (Servers { _other: Some(Box::new(server)), ..Servers::default() }, url)
        }
        _ => (Servers::default(), "memory:".to_owned()),
    })
}

/// What was renewed, and with what margin.
#[derive(Clone, Debug)]
struct Seen(Arc<Renewals>);

#[derive(Debug)]
struct Renewals {
    /// By the number of the lease.
    renewed: Vec<AtomicBool>,
    /// The least that was left of a lease when its renewal was answered, in milliseconds.
    margin: AtomicU64,
}

impl Observer for Seen {
    fn event(&self, event: &Event<'_>) {
        if let Event::Renewed { key, margin } = event
            && let Some(lease) = key.as_str().split('/').nth(1).and_then(|number| number.parse::<usize>().ok())
        {
            self.0.renewed[lease].store(true, Ordering::Relaxed);
            self.0.margin.fetch_min(u64::try_from(margin.as_millis()).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }
}

impl Seen {
    fn new(leases: usize) -> Self {
        let renewed = (0..leases).map(|_| AtomicBool::default()).collect();
        Self(Arc::new(Renewals { renewed, margin: AtomicU64::new(u64::MAX) }))
    }

    fn reset(&self) {
        self.0.margin.store(u64::MAX, Ordering::Relaxed);
        self.0.renewed.iter().for_each(|renewed| renewed.store(false, Ordering::Relaxed));
    }

    fn is_renewed(&self, guard: &Guard) -> bool {
        let number = guard.key().as_str().split('/').nth(1).and_then(|number| number.parse::<usize>().ok());
        number.is_some_and(|number| self.0.renewed[number].load(Ordering::Relaxed))
    }
}

async fn measure(store: &str, url: &str, redis: &[RedisServer], leases: usize) -> Result<(), Error> {
    let seen = Seen::new(leases);
    let locker = Locker::shared_builder(lockkit::open(url).await?).observer(seen.clone()).build();
    let start = Instant::now();
    let guards = acquire(&locker, leases).await?;
    println!("{store}: {leases} leases of {TTL:?}, taken in {:.1} s", start.elapsed().as_secs_f64());
    sleep(TTL / 2).await;
    seen.reset();
    report("calm", &guards, &seen, Instant::now()).await;
    // Before, for the first renewals may be answered while connections are still being cut.
    seen.reset();
    let lost = Instant::now();
    for server in redis {
        for connections in ["normal", "pubsub"] {
            server.command(&["CLIENT", "KILL", "TYPE", connections, "SKIPME", "yes"]).await?;
        }
    }
    if let (Some(alarm), []) = (&locker.info().alarm, redis) {
        alarm.raise_all();
    }
    report("reconnection", &guards, &seen, lost).await;
    sleep(TTL / 2).await;
    seen.reset();
    std::thread::sleep(PAUSE);
    report("pause", &guards, &seen, Instant::now()).await;
    Ok(())
}

async fn acquire(locker: &Locker, leases: usize) -> Result<Vec<Guard>, Error> {
    let mut tasks = Vec::new();
    for first in 0..AT_A_TIME {
        let locker = locker.clone();
        tasks.push(tokio::spawn(async move {
            let mut guards = Vec::new();
            for number in (first..leases).step_by(AT_A_TIME) {
                guards.push(locker.lock(format!("renewed/{number}")).ttl(TTL).acquire().await?);
            }
            Ok::<_, lockkit::Error>(guards)
        }));
    }
    let mut guards = Vec::with_capacity(leases);
    for task in tasks {
        guards.extend(task.await??);
    }
    Ok(guards)
}

/// Waits until all leases were renewed since `start`, or lost.
async fn report(after: &str, guards: &[Guard], seen: &Seen, start: Instant) {
    let cpu = cpu_seconds();
    loop {
        sleep(Duration::from_millis(100)).await;
        let open = guards.iter().filter(|guard| guard.is_held() && !seen.is_renewed(guard)).count();
        if open == 0 {
            break;
        }
    }
    let mut reasons = guards.iter().filter_map(|guard| match guard.status() {
        Status::Lost(reason) => Some(reason),
        Status::Held | Status::Suspect => None,
    });
    let lost = reasons.clone().count();
    println!(
        "  {after:<14} {lost:>7} lost   all others renewed after {:>6.2} s   least margin {:>6.2} s   processor {:>5.2} s",
        start.elapsed().as_secs_f64(),
        seen.0.margin.load(Ordering::Relaxed) as f64 / 1e3,
        cpu_seconds() - cpu,
    );
    if let Some(reason) = reasons.next_back() {
        println!("  {:<14} the last one: {reason}", "");
    }
}

/// The processor time of this process, from `/proc` (in ticks of 10 ms).
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<f64> =
        stat.rsplit(')').next().unwrap_or("").split_whitespace().filter_map(|field| field.parse().ok()).collect();
    fields.get(10..12).map_or(0.0, |ticks| ticks.iter().sum::<f64>() / 100.0)
}
