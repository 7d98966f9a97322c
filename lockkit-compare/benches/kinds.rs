//! Locks that are shared or have an order, beside plain exclusive ones of the same store: acquire and release in pairs, and what it
//! takes to hand a lock over while others wait. Private servers; MySQL leaves writing to the disk to the operating system.
//!
//! `cargo bench -p lockkit-compare --bench kinds -- [rounds] [redis] [mysql] [zk]`

use std::{
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit::{
    HandOver, Lock, LockStore, Locker,
    mysql::{MySqlConfig, MySqlStore},
    redis::RedisStore,
    zk::ZkStore,
};
use lockkit_compare::pairs::{self, BoxError, Contestant, Rounds};
use lockkit_testkit::servers::{
    MySqlOptions, MySqlServer, RedisOptions, RedisServer, ZooKeeperFlavor, ZooKeeperServer,
};

/// For how long hand-overs are counted.
const COUNTED: Duration = Duration::from_secs(1);

/// A way to ask for a lock.
type Kind = (&'static str, fn(&Locker, &str) -> Lock);

const PLAIN: Kind = ("exclusive", |locker, name| locker.lock(name));
const WRITE: Kind = ("exclusive, in order", |locker, name| locker.rw_lock(name).write().fifo());
const READ: Kind = ("shared", |locker, name| locker.rw_lock(name).read().fifo());
const PERMIT: Kind = ("permit of 1000", |locker, name| locker.semaphore(name, THOUSAND).fifo());
const THOUSAND: NonZeroU32 = NonZeroU32::MIN.saturating_add(999);

enum Server {
    Redis(RedisServer),
    MySql(MySqlServer),
    ZooKeeper(ZooKeeperServer),
}

impl Server {
    async fn start(name: &str) -> Result<Self, BoxError> {
        Ok(match name {
            "redis" => Self::Redis(RedisServer::start(RedisOptions::default()).await?),
            "mysql" => {
                let options = MySqlOptions::default().args(["--innodb-flush-log-at-trx-commit=2"]);
                Self::MySql(MySqlServer::start(options).await?)
            }
            _ => Self::ZooKeeper(ZooKeeperServer::start(ZooKeeperFlavor::Installed).await?),
        })
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(match self {
            Self::Redis(server) => Arc::new(RedisStore::from_url(&server.url()).await?),
            Self::MySql(server) => {
                Arc::new(MySqlStore::connect(MySqlConfig::from_url(&server.url())?.create(true)).await?)
            }
            Self::ZooKeeper(server) => Arc::new(ZkStore::from_url(&server.url()).await?),
        })
    }
}

fn main() -> Result<(), BoxError> {
    let named: Vec<_> =
        ["redis", "mysql", "zk"].into_iter().filter(|name| std::env::args().any(|arg| arg == *name)).collect();
    pairs::main(9, async |rounds| {
        for name in if named.is_empty() { vec!["redis", "mysql", "zk"] } else { named } {
            let server = Server::start(name).await?;
            let capability = server.open().await?.info().capability.clone();
            println!("{name}");
            if !(capability.shared && capability.permits && capability.fifo) {
                println!("has no locks of these kinds");
                continue;
            }
            in_pairs(&server, rounds).await?;
            hand_overs(&server).await?;
        }
        Ok(())
    })
}

async fn in_pairs(server: &Server, rounds: Rounds) -> Result<(), BoxError> {
    let mut contestants = Vec::new();
    for (name, kind) in [PLAIN, WRITE, READ, PERMIT] {
        let locker = Locker::shared_builder(server.open().await?).build();
        contestants.push(Contestant::new(name, move |number| {
            let lock = kind(&locker, &format!("{name}/{number}"));
            move || {
                let lock = lock.clone();
                async move {
                    let _ = lock.acquire().await?.release().await?;
                    Ok(())
                }
            }
        }));
    }
    let contestants: Vec<_> = contestants.iter().collect();
    Rounds::new(1).slice(Duration::from_millis(100)).many_tasks(&contestants).await?;
    for rates in [rounds.turns(10).one_task(&contestants).await?, rounds.many_tasks(&contestants).await?] {
        print!("{rates}");
        for (place, (name, _)) in [WRITE, READ, PERMIT].iter().enumerate() {
            let name = format!("{name} to plain exclusive");
            println!("{}", rates.ratio_of(&name, 0.83, |rates| rates[place + 1] / rates[0]));
        }
    }
    Ok(())
}

/// Clients that want a lock all the time: two with one task each, then more tasks.
async fn hand_overs(server: &Server) -> Result<(), BoxError> {
    println!("hand-overs between clients, each");
    for (waiters, kinds) in [(1, &[PLAIN, WRITE][..]), (10, &[WRITE]), (100, &[WRITE]), (1000, &[WRITE])] {
        for (name, kind) in kinds {
            let each = (0..3).map(|_| counted(server, *kind, waiters));
            let mut took = Vec::new();
            for one in each {
                took.push(one.await?);
            }
            took.sort();
            println!("  {name}, {waiters} waiting: {:?}", took[1]);
        }
    }
    Ok(())
}

async fn counted(server: &Server, kind: fn(&Locker, &str) -> Lock, waiters: usize) -> Result<Duration, BoxError> {
    let clients = (waiters + 1).min(8);
    let mut lockers = Vec::new();
    for _ in 0..clients {
        lockers.push(Locker::shared_builder(server.open().await?).hand_over(HandOver::OFF).build());
    }
    let grants = Arc::new(AtomicU64::new(0));
    let tasks: Vec<_> = (0..=waiters)
        .map(|number| {
            let (lock, grants) = (kind(&lockers[number % clients], "hot"), Arc::clone(&grants));
            tokio::spawn(async move {
                loop {
                    let guard = lock.acquire().await?;
                    grants.fetch_add(1, Ordering::Relaxed);
                    let _ = guard.release().await?;
                }
                #[expect(unreachable_code, reason = "says what the task fails with")]
                Ok::<_, lockkit::Error>(())
            })
        })
        .collect();
    // All have come once, and are in the queue again.
    while grants.load(Ordering::Relaxed) <= waiters as u64 * 2 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let (before, begun) = (grants.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(COUNTED).await;
    let (after, took) = (grants.load(Ordering::Relaxed), begun.elapsed());
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    for task in tasks {
        if let Ok(ended) = task.await {
            ended?;
        }
    }
    for locker in lockers {
        locker.shutdown(Duration::from_secs(60)).await?;
    }
    Ok(took.div_f64((after - before) as f64))
}
