//! Holders of all kinds on one lock at the same time, with cancellations, and with connections that end.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Claim, LockStore, Locker, LossReason, Mode, Order, Outcome, Release, Renewal,
    store::{PLACE, join_all},
};
use lockkit_mysql::MySqlStore;
use lockkit_testkit::{
    crowd::{self, Random, Resource},
    servers::MySqlServer,
};
use sqlx::Executor;
use tokio::{sync::Semaphore, task::JoinSet};

use crate::support::{
    Ctx, TTL, claim, config, contended, end, eventually, eventually_within, hold, is_held, lock_rows, proxied, raw,
    renew, renewal, request, rival, status, tests,
};

tests! {
    all_kinds_of_holders_exclude_each_other
    they_do_when_connections_are_cut
    renewals_of_many_locks_and_all_else_do_not_deadlock
    a_client_that_waits_for_the_table_of_claims_has_no_row_locked
    a_hand_over_costs_the_same_however_many_wait
    those_that_leave_a_queue_at_once_leave_connections_for_renewals
}

/// The names of the locks, next to each other in the tables.
const NAMES: [&str; 3] = ["c", "a", "b"];

/// What the server counted: deadlocks, and waits for rows that took too long.
async fn conflicts(server: &MySqlServer) -> Vec<Vec<Option<String>>> {
    let ask =
        "SELECT name, `count` FROM information_schema.innodb_metrics WHERE name IN ('lock_deadlocks', 'lock_timeouts')";
    server.admin(ask).await.expect("metrics")
}

/// The server's words on the last deadlock.
async fn last_deadlock(server: &MySqlServer) -> String {
    let status =
        server.admin("SHOW ENGINE INNODB STATUS").await.expect("status").remove(0).remove(2).unwrap_or_default();
    let deadlock =
        status.split("LATEST DETECTED DEADLOCK").nth(1).and_then(|rest| rest.split("\nTRANSACTIONS\n").next());
    deadlock.unwrap_or("rows stayed locked").to_owned()
}

async fn crowd(server: &MySqlServer, lockers: Vec<Locker>, lasts: Duration, ttl: Duration) -> [u64; 3] {
    let (resources, until) = (Arc::new(<[Resource; NAMES.len()]>::default()), Instant::now() + lasts);
    let visits = lockers.clone().into_iter().enumerate().map(|(number, locker)| {
        let seed = (u64::from(std::process::id()) << 8) + number as u64 + 1;
        let (resources, mut random) = (Arc::clone(&resources), Random(seed));
        tokio::spawn(async move {
            while Instant::now() < until {
                // Most want the same one.
                let at = usize::try_from(random.below(5)).expect("small").saturating_sub(2);
                crowd::visit(&locker, NAMES[at], &resources[at], &mut random, ttl).await;
            }
        })
    });
    for visit in visits.collect::<Vec<_>>() {
        visit.await.expect("no two hold what excludes each other");
    }
    for locker in &lockers {
        locker.shutdown(ttl.max(2 * PLACE)).await.expect("all is released");
    }
    eventually("nothing is left", async || {
        let claims = server.admin("SELECT COUNT(*) FROM resource_lock_claim").await.expect("claims");
        let held =
            server.admin("SELECT COUNT(*) FROM resource_lock WHERE expires > UTC_TIMESTAMP(6)").await.expect("held");
        [&claims, &held].iter().all(|rows| rows[0][0].as_deref() == Some("0"))
    })
    .await;
    let grants = |kind: usize| resources.iter().map(|resource| resource.grants()[kind]).sum();
    [grants(0), grants(1), grants(2)]
}

async fn all_kinds_of_holders_exclude_each_other(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let mut lockers = Vec::new();
    for _ in 0..4 {
        let locker = Locker::new(MySqlStore::connect(config(&server)).await.expect("connect"));
        lockers.extend([locker.clone(), locker]);
    }
    let before = conflicts(&server).await;
    assert_eq!(before.len(), 2, "{before:?}");
    let grants = crowd(&server, lockers, Duration::from_secs(4), Duration::from_secs(20)).await;
    println!("writers, readers, permits: {grants:?}");
    assert!(grants.iter().all(|grants| *grants > 2), "{grants:?}");
    assert_eq!(conflicts(&server).await, before, "{}", last_deadlock(&server).await);
}

/// Connections end all the time, in the middle of transactions.
async fn they_do_when_connections_are_cut(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (mut lockers, mut proxies) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let (proxy, config) = proxied(&server).await;
        let config = config.timeout(Duration::from_millis(500));
        lockers.push(Locker::new(MySqlStore::connect(config).await.expect("connect")));
        proxies.push(proxy);
    }
    let done = Arc::new(AtomicBool::new(false));
    let cuts = tokio::spawn({
        let done = Arc::clone(&done);
        async move {
            let mut random = Random(4711);
            while !done.load(SeqCst) {
                tokio::time::sleep(Duration::from_millis(random.below(300))).await;
                proxies[usize::try_from(random.below(4)).expect("small")].cut().await;
            }
            proxies
        }
    });
    let lockers = [lockers.clone(), lockers].concat();
    let grants = crowd(&server, lockers, Duration::from_secs(4), Duration::from_secs(3)).await;
    done.store(true, SeqCst);
    drop(cuts.await.expect("cuts"));
    println!("writers, readers, permits: {grants:?}");
    assert!(grants.iter().sum::<u64>() > 5, "{grants:?}");
}

/// Some renew readers of several locks in one transaction, while others come and go at those locks, some of which let their leases
/// and places lapse.
async fn renewals_of_many_locks_and_all_else_do_not_deadlock(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let before = conflicts(&server).await;
    let (until, mut tasks) = (Instant::now() + Duration::from_secs(4), Vec::new());
    let reader = |name: &str| lockkit_testkit::calls::claim_as(Mode::Shared, name);
    let asks = |claim: &Claim, ttl, wait| AcquireRequest { order: Order::Fifo, ttl, wait, ..request(claim) };
    for number in 0..6 {
        let store = MySqlStore::connect(config(&server)).await.expect("connect");
        let mut random = Random(u64::from(std::process::id()) << 8 | (number + 1));
        tasks.push(tokio::spawn(async move {
            let mine = NAMES.map(reader);
            let renewals = mine.each_ref().map(renewal);
            while number < 3 && Instant::now() < until {
                for claim in &mine {
                    store.acquire(&asks(claim, TTL, Duration::ZERO)).await.expect("acquire");
                }
                for _ in 0..10 {
                    store.renew(&renewals).await.into_iter().for_each(|renewed| drop(renewed.expect("renew")));
                }
            }
            while Instant::now() < until {
                let name = NAMES[usize::try_from(random.below(3)).expect("small")];
                let (claim, writes) = (reader(name), random.below(4) == 0);
                let claim = if writes { Claim { mode: Mode::Exclusive, ..claim } } else { claim };
                let (ttl, wait) =
                    (Duration::from_millis(100 + random.below(300)), Duration::from_secs(random.below(2)));
                // It finds no time for its transaction within a quarter of a short ttl, now and then.
                for _ in 0..=random.below(2) {
                    drop(store.acquire(&asks(&claim, ttl, wait)).await);
                }
                if random.below(3) > 0 {
                    drop(store.release(&claim).await);
                }
            }
        }));
    }
    for task in tasks {
        task.await.expect("all are answered");
    }
    assert_eq!(conflicts(&server).await, before, "{}", last_deadlock(&server).await);
}

/// One transaction, which ends a lease and begins the next. All that come at once come to wait; and what keeps their places, or takes note of
/// the lease, is no transaction: the server counts none.
async fn a_hand_over_costs_the_same_however_many_wait(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let mut status_of = raw(&server).await;
    let mut commits = async || usize::try_from(status(&mut status_of, "Com_commit").await).expect("small");
    let mut lockers = Vec::new();
    for _ in 0..4 {
        let store = MySqlStore::connect(config(&server)).await.expect("connect");
        lockers.push(Locker::builder(store).patience(Duration::from_secs(30)).build());
    }
    for waiters in [10, 100] {
        let (name, served) = (format!("before {waiters}"), Arc::new(Semaphore::new(0)));
        let guard = lockers[0].lock(&name).fifo().acquire().await.expect("acquire");
        let mut tasks = JoinSet::new();
        let came = Instant::now();
        for number in 0..waiters {
            let (lock, served) = (lockers[number % 4].lock(&name).fifo(), Arc::clone(&served));
            tasks.spawn(async move {
                let guard = lock.acquire().await.expect("acquire");
                assert_eq!(guard.release().await.expect("release"), Outcome::Released);
                served.add_permits(1);
            });
        }
        let (lock, wanted) = (lockers[0].lock(&name), u32::try_from(waiters).expect("small"));
        let all_wait = async || lock.inspect().await.expect("inspect").waiters == Some(wanted);
        eventually_within(Duration::from_secs(30), "they wait", all_wait).await;
        let (before, begun, counted) = (commits().await, Instant::now(), wanted.min(100));
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
        served.acquire_many(counted).await.expect("served").forget();
        let (each, took) = ((commits().await - before) as f64 / f64::from(counted), begun.elapsed() / counted);
        println!("{waiters} waiters: {:?} to come; {each} transactions and {took:?} for a hand-over", begun - came);
        assert!((0.9..2.0).contains(&each), "{each} transactions for a hand-over before {waiters}");
        tasks.shutdown().await;
    }
}

/// They are more than there are connections, and all need one row, which somebody keeps locked.
async fn those_that_leave_a_queue_at_once_leave_connections_for_renewals(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (held, used) = (claim(), claim());
    // Each has the time that it takes to be one of many.
    let store = MySqlStore::connect(config(&server).timeout(Duration::from_secs(20))).await.expect("connect");
    hold(&store, &held).await;
    hold(&store, &used).await;
    let waiters: Vec<_> = (0..32).map(|_| rival(&used)).collect();
    for waiter in &waiters {
        let in_order = AcquireRequest { order: Order::Fifo, wait: TTL, ..request(waiter) };
        contended(store.acquire(&in_order).await.expect("acquire"));
    }
    let (mut somebody, mut looks) = (raw(&server).await, raw(&server).await);
    lock_rows(&mut somebody, &[&used]).await;
    let leaving = join_all(waiters.iter().map(|waiter| store.release(waiter)));
    let renewing = async {
        // A count, as the rows of `innodb_trx` are those of before until nobody has asked for them for 100 ms.
        let waits = async || status(&mut looks, "Innodb_row_lock_current_waits").await > 0;
        eventually("they wait for the row", waits).await;
        // Less time than the server gives those that wait for the row.
        let soon = Renewal { ttl: Duration::from_secs(2), ..renewal(&held) };
        let renewed = renew(&store, &soon).await;
        end(&mut somebody).await;
        assert!(is_held(&renewed), "{renewed:?}");
    };
    let (left, ()) = tokio::join!(leaving, renewing);
    for (waiter, answer) in waiters.iter().zip(left) {
        // The row may have been locked for too long.
        let answer = if answer.is_err() { store.release(waiter).await } else { answer };
        assert_eq!(answer.expect("release"), Release::NotHeld(LossReason::Taken));
    }
}

/// Clients that ask in order, or share the lock, need that table, and a holder needs the row of the lock.
async fn a_client_that_waits_for_the_table_of_claims_has_no_row_locked(ctx: Arc<Ctx>) {
    let server = ctx.private(&["--performance-schema=ON"]).await;
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    let [held, shared] = [claim(), Claim { mode: Mode::Shared, ..claim() }];
    let (mut somebody, mut looks) = (raw(&server).await, raw(&server).await);
    for claim in [&held, &shared] {
        hold(&store, claim).await;
    }
    // As a reader it is in the table of claims.
    hold(&store, &rival(&shared)).await;
    somebody.execute("LOCK TABLES resource_lock_claim WRITE").await.expect("lock");
    // MySQL does not show its list of processes while there is a statement with binary arguments in it.
    let waits = "SELECT 1 FROM performance_schema.threads WHERE processlist_state = 'Waiting for table metadata lock'";
    for what in ["acquire", "release", "renew"] {
        let of = if what == "acquire" { &held } else { &shared };
        let asked = async {
            match what {
                "acquire" => {
                    let in_order = AcquireRequest { order: Order::Fifo, ..request(&rival(&held)) };
                    store.acquire(&in_order).await.map(drop)
                }
                "release" => store.release(&shared).await.map(drop),
                _ => renew(&store, &renewal(&shared)).await.map(drop),
            }
        };
        let row_is_free = async {
            eventually("it waits for the table", async || looks.fetch_optional(waits).await.expect("ask").is_some())
                .await;
            let lock = "SELECT id FROM resource_lock WHERE resource_name = ? FOR UPDATE NOWAIT";
            let row = sqlx::query(lock).bind(of.key.as_str().as_bytes()).fetch_one(&mut looks).await;
            row.map(drop).unwrap_or_else(|error| panic!("{what} has the row locked: {error}"));
        };
        let (answer, ()) = tokio::join!(asked, row_is_free);
        assert!(answer.expect_err(what).is_retryable(), "{what}");
    }
    somebody.execute("UNLOCK TABLES").await.expect("unlock");
    assert!(is_held(&renew(&store, &renewal(&held)).await));
}
