//! Acquire and release, in pairs, and renewals: the store of a migration, in each of its phases, beside each of its two stores
//! alone.
//!
//! The servers are private: two of Redis, and then Redis and MariaDB, which writes each commit to the disk, unless `relaxed` leaves
//! that to the operating system.
//! `cargo bench -p lockkit-compare --bench pair_migration -- [rounds] [relaxed]`

use std::{future::Future, pin::Pin, sync::Arc, time::Duration};

use lockkit::{
    Clock, LockStore, ShiftedClock, SystemClock,
    migrate::{Dual, Migration, Phase, Start},
    mysql::{MySqlConfig, MySqlStore},
    redis::{RedisConfig, RedisStore},
};
use lockkit_compare::pairs::{self, BoxError, Contestant, Leases, Ratio, Rounds};
use lockkit_testkit::servers::{MySqlOptions, MySqlServer, RedisOptions, RedisServer};

/// As many as a renewal of many leases has in one call at most.
const RENEWED: usize = 128;

/// The places of the contestants.
const OLD_ALONE: usize = 0;
const OLD: usize = 1;
const BOTH: usize = 2;
const NEW_ALONE: usize = 3;
const NEW: usize = 4;

const NAMES: [&str; 5] = ["old store alone", "phase old", "phase both", "new store alone", "phase new"];

type Renewal = Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send>>;

fn main() -> Result<(), BoxError> {
    let relaxed = std::env::args().any(|argument| argument == "relaxed");
    let options = relaxed.then_some("--innodb-flush-log-at-trx-commit=2");
    pairs::main(15, async |rounds| {
        let redis = [Server::redis().await?, Server::redis().await?];
        println!("redis to redis");
        run(&redis, rounds).await?;
        let redis = Server::redis().await?;
        let mysql = Server::MySql(MySqlServer::start(MySqlOptions::default().args(options)).await?);
        println!("\nredis to mysql{}", if relaxed { ", which does not wait for the disk" } else { "" });
        run(&[redis, mysql], rounds).await
    })
}

enum Server {
    Redis(RedisServer),
    MySql(MySqlServer),
}

impl Server {
    async fn redis() -> Result<Self, BoxError> {
        Ok(Self::Redis(RedisServer::start(RedisOptions::default()).await?))
    }

    fn process(&self) -> Option<u32> {
        match self {
            Self::Redis(server) => server.pid(),
            Self::MySql(server) => server.pid(),
        }
    }

    /// The store below a prefix, or in a table, with this name.
    async fn open(&self, name: &str, clock: &Arc<dyn Clock>) -> Result<Arc<dyn LockStore>, BoxError> {
        let clock = Arc::clone(clock);
        Ok(match self {
            Self::Redis(server) => {
                let config = RedisConfig::from_url(&server.url())?.prefix(format!("{name}:"));
                Arc::new(RedisStore::connect(config.clock(clock)).await?)
            }
            Self::MySql(server) => {
                let config = MySqlConfig::from_url(&server.url())?.table(name).create(true);
                Arc::new(MySqlStore::connect(config.clock(clock)).await?)
            }
        })
    }
}

/// The store of a migration that was led to a phase, between stores that nobody else uses.
async fn migrated([old, new]: &[Server; 2], name: &str, steps: &[Phase]) -> Result<Arc<dyn LockStore>, BoxError> {
    // Nobody acts on the phases before, so that the drain may be cut short.
    let shifted = Arc::new(ShiftedClock::default());
    let clock = Arc::clone(&shifted) as Arc<dyn Clock>;
    let migration = Migration::new(old.open(name, &clock).await?, new.open(name, &clock).await?);
    migration.start(Start::default()).await?;
    for goal in steps {
        migration.step(*goal, |drain| shifted.advance(drain.left)).await?.copied?;
    }
    let clock = Arc::new(SystemClock) as Arc<dyn Clock>;
    let dual = Dual::connect(old.open(name, &clock).await?, new.open(name, &clock).await?).await?;
    let reached = steps.last().copied().unwrap_or(Phase::Old);
    if dual.phase() == reached { Ok(Arc::new(dual)) } else { Err("the migration is in another phase".into()) }
}

async fn run(servers: &[Server; 2], rounds: Rounds) -> Result<(), BoxError> {
    let clock = Arc::new(SystemClock) as Arc<dyn Clock>;
    let stores = [
        servers[0].open("alone_old", &clock).await?,
        migrated(servers, "phase_old", &[]).await?,
        migrated(servers, "phase_both", &[Phase::Both]).await?,
        servers[1].open("alone_new", &clock).await?,
        migrated(servers, "phase_new", &[Phase::Both, Phase::New]).await?,
    ];
    pairs_of(&stores, rounds, servers[0].process().ok_or("it runs")?).await?;
    let mut leases = Vec::new();
    for store in &stores {
        leases.push(Leases::take(Arc::clone(store), RENEWED).await?);
    }
    renewals(&leases, 1, rounds.of("renewals of 1 lease")).await?;
    renewals(&leases, RENEWED, rounds.of("renewals of 128 leases in one call")).await
}

/// The processor time of a server is that of the old one.
async fn pairs_of(stores: &[Arc<dyn LockStore>; 5], rounds: Rounds, old: u32) -> Result<(), BoxError> {
    let named = |place: usize| Contestant::named_store(NAMES[place], Arc::clone(&stores[place]));
    let contestants: [_; 5] = std::array::from_fn(named);
    let contestants = contestants.each_ref();
    // Rows and directories come into being.
    Rounds::new(1).slice(Duration::from_millis(100)).many_tasks(&contestants).await?;
    let one = rounds.turns(10).one_task(&contestants).await?;
    let many = rounds.server(old).many_tasks(&contestants).await?;
    print!("{one}{many}");
    println!("ratios, medians of the rounds' own");
    for rates in [&one, &many] {
        let in_turn = |rates: &[f64]| 1.0 / (1.0 / rates[OLD_ALONE] + 1.0 / rates[NEW_ALONE]);
        show([
            rates.ratio_of("phase old to old alone", 0.90, |rates| rates[OLD] / rates[OLD_ALONE]),
            rates.ratio_of("phase new to new alone", 0.90, |rates| rates[NEW] / rates[NEW_ALONE]),
            rates.ratio_of("phase both to one store, then the other", 0.60, |rates| rates[BOTH] / in_turn(rates)),
        ]);
    }
    Ok(())
}

/// Renewals of so many leases of each store in one call.
async fn renewals(leases: &[Leases], count: usize, rounds: Rounds) -> Result<(), BoxError> {
    let renewing = |(name, leases): (&str, &Leases)| {
        let leases = Arc::new(leases.first(count));
        Contestant::new(name, move |_| {
            let leases = Arc::clone(&leases);
            move || -> Renewal {
                let leases = Arc::clone(&leases);
                Box::pin(async move { leases.renew().await.map(drop) })
            }
        })
    };
    let contestants: Vec<_> = NAMES.into_iter().zip(leases).map(renewing).collect();
    let rates = rounds.turns(10).one_task(&contestants.iter().collect::<Vec<_>>()).await?;
    print!("{rates}");
    println!("ratios, medians of the rounds' own");
    let slower = |rates: &[f64]| rates[OLD_ALONE].min(rates[NEW_ALONE]);
    show([
        rates.ratio_of("phase old to old alone", 0.90, |rates| rates[OLD] / rates[OLD_ALONE]),
        rates.ratio_of("phase new to new alone", 0.90, |rates| rates[NEW] / rates[NEW_ALONE]),
        rates.ratio_of("phase both to the slower store alone", 0.50, |rates| rates[BOTH] / slower(rates)),
    ]);
    Ok(())
}

fn show(ratios: [Ratio; 3]) {
    ratios.iter().for_each(|ratio| println!("{ratio}"));
}
