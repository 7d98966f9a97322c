//! The driver's traps: found rows, statements that run on, connections left half-way, no bound on anything.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, Guard, LockStore, Locker, LossReason, Mode, Order, Query,
    Release, Renewal, Renewed,
};
use lockkit_mysql::MySqlStore;
use sqlx::Executor as _;

use crate::support::{
    Ctx, attempt, claim, contended, end, free, hold, is_held, lock_rows, lost, renew, renewal, request, rival, tests,
};

tests! {
    found_rows_decide_nothing
    a_cancelled_acquire_runs_on_and_is_released_behind
    a_cancelled_release_does_its_work
    a_statement_without_an_answer_is_given_up_in_time
    an_endless_bound_is_no_overflow
    a_busy_pool_does_not_starve_renewals_and_releases
    a_busy_pool_says_so
    a_locked_row_is_an_error_without_effect
    a_locked_table_is_an_error_without_effect
    a_deadlock_is_an_error_without_effect
    one_locked_row_does_not_cost_the_other_leases
    one_locked_row_does_not_cost_the_other_leases_of_a_short_ttl
    a_row_that_was_passed_over_is_not_taken_for_extended
    a_connection_killed_in_the_middle_leaves_the_effect_open
    idle_connections_that_died_are_replaced
    many_cancelled_attempts_leave_no_connections_behind
}

/// The driver makes the server count found rows, so that an update that changes nothing looks like one that did.
async fn found_rows_decide_nothing(ctx: Arc<Ctx>) {
    let (store, mine) = (ctx.store().await, claim());
    hold(&store, &mine).await;
    let nothing = "UPDATE resource_lock SET token = token WHERE resource_name = ?";
    let name = mine.key.as_str().as_bytes();
    let done = sqlx::query(nothing).bind(name).execute(&mut ctx.raw().await).await.expect("update");
    assert_eq!(done.rows_affected(), 1, "the trap is gone; the driver counts changed rows");
    let other = rival(&mine);
    let contention = contended(attempt(&store, &other).await.expect("acquire"));
    assert_eq!(contention.holder.expect("holder").as_str(), "test: holder");
    assert_eq!(lost(renew(&store, &renewal(&other)).await), LossReason::Taken);
    assert_eq!(store.release(&other).await.expect("release"), Release::NotHeld(LossReason::Taken));
    for _ in 0..3 {
        assert!(is_held(&renew(&store, &renewal(&mine)).await));
    }
    free(&store, &mine).await;
    assert_eq!(store.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Gone));
}

async fn an_endless_bound_is_no_overflow(ctx: Arc<Ctx>) {
    let config = ctx.config().await.timeout(Duration::MAX);
    let (store, mine) = (MySqlStore::connect(config).await.expect("connect"), claim());
    hold(&store, &mine).await;
    let waiting = AcquireRequest { wait: Duration::from_secs(2), ..request(&rival(&mine)) };
    contended(store.acquire(&waiting).await.expect("acquire"));
    free(&store, &mine).await;
    let mut raw = ctx.raw().await;
    lock_rows(&mut raw, &[&mine]).await;
    let given_up = rival(&mine);
    let asked = tokio::time::timeout(Duration::from_millis(100), attempt(&store, &given_up)).await;
    assert!(asked.is_err(), "the row is locked");
    end(&mut raw).await;
    store.release(&given_up).await.expect("its connection was dropped without a panic");
}

/// What a dropped future had sent takes effect all the same. The release must come after it, and undo it.
async fn a_cancelled_acquire_runs_on_and_is_released_behind(ctx: Arc<Ctx>) {
    let (store, mut raw, mine) = (Arc::new(ctx.store().await), ctx.raw().await, claim());
    hold(&store, &mine).await;
    free(&store, &mine).await;
    lock_rows(&mut raw, &[&mine]).await;
    let unwanted = rival(&mine);
    let asked = tokio::time::timeout(Duration::from_millis(100), attempt(&store, &unwanted)).await;
    assert!(asked.is_err(), "the row is locked");
    let undoing = {
        let (store, unwanted) = (Arc::clone(&store), unwanted.clone());
        tokio::spawn(async move { store.release(&unwanted).await })
    };
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!undoing.is_finished(), "the release overtook the acquire");
    end(&mut raw).await;
    let released = undoing.await.expect("no panic").expect("release");
    assert!(matches!(released, Release::Released { .. }), "the acquire ran on, and was to be undone: {released:?}");
    hold(&store, &mine).await;
}

async fn a_cancelled_release_does_its_work(ctx: Arc<Ctx>) {
    let (store, mut raw, mine) = (ctx.store().await, ctx.raw().await, claim());
    hold(&store, &mine).await;
    lock_rows(&mut raw, &[&mine]).await;
    let asked = tokio::time::timeout(Duration::from_millis(100), store.release(&mine)).await;
    assert!(asked.is_err(), "the row is locked");
    end(&mut raw).await;
    let again = store.release(&mine).await.expect("release");
    assert_eq!(again, Release::NotHeld(LossReason::Gone), "the first one released it");
}

/// The driver would wait for ever. Afterwards the store works, on another connection.
async fn a_statement_without_an_answer_is_given_up_in_time(ctx: Arc<Ctx>) {
    let config = ctx.config().await.timeout(Duration::from_millis(700));
    let (store, mut raw, mine) = (MySqlStore::connect(config).await.expect("connect"), ctx.raw().await, claim());
    hold(&store, &mine).await;
    lock_rows(&mut raw, &[&mine]).await;
    let asked = Instant::now();
    let error = attempt(&store, &mine).await.expect_err("the row is locked");
    assert!(asked.elapsed() < Duration::from_millis(1500), "it took {:?}", asked.elapsed());
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::Unknown), "{error}");
    let other = claim();
    hold(&store, &other).await;
    end(&mut raw).await;
    free(&store, &other).await;
    hold(&store, &mine).await;
}

async fn a_busy_pool_does_not_starve_renewals_and_releases(ctx: Arc<Ctx>) {
    let store = MySqlStore::connect(ctx.config().await.connections(3)).await.expect("connect");
    let (store, mut raw, busy, mine) = (Arc::new(store), ctx.raw().await, claim(), claim());
    hold(&store, &busy).await;
    hold(&store, &mine).await;
    lock_rows(&mut raw, &[&busy]).await;
    let stuck: Vec<_> = (0..10)
        .map(|_| {
            let (store, busy) = (Arc::clone(&store), rival(&busy));
            tokio::spawn(async move { attempt(&store, &busy).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let asked = Instant::now();
    assert!(is_held(&renew(&store, &renewal(&mine)).await));
    free(&store, &mine).await;
    assert!(asked.elapsed() < Duration::from_millis(400), "it took {:?}", asked.elapsed());
    assert!(stuck.iter().any(|task| !task.is_finished()), "the pool was not busy");
    end(&mut raw).await;
    for task in stuck {
        // Contended, or given up; what matters is that each ends.
        drop(task.await.expect("no panic"));
    }
}

async fn a_busy_pool_says_so(ctx: Arc<Ctx>) {
    let config = ctx.config().await.connections(2).timeout(Duration::from_millis(700));
    let (store, mut raw, busy) = (MySqlStore::connect(config).await.expect("connect"), ctx.raw().await, claim());
    hold(&store, &busy).await;
    lock_rows(&mut raw, &[&busy]).await;
    let (one, two) = tokio::join!(attempt(&store, &busy), async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        // The first gives up before this one does, and its connection is not given back.
        attempt(&store, &claim()).await
    });
    end(&mut raw).await;
    assert_eq!(one.expect_err("the row is locked").effect(), Effect::Unknown);
    let error = two.expect_err("there is no connection");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::None), "{error}");
    assert!(error.message().contains("connection"), "{error}");
}

/// Error 1205: the statement was rolled back, and nothing of it remains.
async fn a_locked_row_is_an_error_without_effect(ctx: Arc<Ctx>) {
    let config = ctx.config().await.timeout(Duration::from_secs(4));
    let (store, mut raw, mine) = (MySqlStore::connect(config).await.expect("connect"), ctx.raw().await, claim());
    hold(&store, &mine).await;
    lock_rows(&mut raw, &[&mine]).await;
    let error = attempt(&store, &rival(&mine)).await.expect_err("the row is locked");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    assert!(error.is_retryable());
    end(&mut raw).await;
    assert!(is_held(&renew(&store, &renewal(&mine)).await));
}

/// A table that is locked as a whole, by hand or for a backup, holds up no statement for longer than a row does.
async fn a_locked_table_is_an_error_without_effect(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let config = crate::support::config(&server).timeout(Duration::from_secs(4));
    let (store, mut raw, mine) =
        (MySqlStore::connect(config).await.expect("connect"), crate::support::raw(&server).await, claim());
    hold(&store, &mine).await;
    for lock in ["LOCK TABLES resource_lock WRITE, resource_lock_claim WRITE", "FLUSH TABLES WITH READ LOCK"] {
        raw.execute(lock).await.expect("lock");
        let shared = Claim { mode: Mode::Shared, ..rival(&mine) };
        let ask = async |what| match what {
            "acquire" => attempt(&store, &rival(&mine)).await.map(drop),
            "acquire in order" => attempt(&store, &shared).await.map(drop),
            "renew" => renew(&store, &renewal(&mine)).await.map(drop),
            _ => store.release(&rival(&mine)).await.map(drop),
        };
        for what in ["acquire", "acquire in order", "renew", "release"] {
            let asked = Instant::now();
            let error = ask(what).await.expect_err("the table is locked");
            assert!(asked.elapsed() < Duration::from_millis(2500), "{lock}, {what}: it took {:?}", asked.elapsed());
            assert_eq!(
                (error.kind(), error.effect()),
                (ErrorKind::Unavailable, Effect::None),
                "{lock}, {what}: {error}"
            );
            assert!(error.is_retryable());
        }
        raw.execute("UNLOCK TABLES").await.expect("unlock");
        assert!(is_held(&renew(&store, &renewal(&mine)).await));
    }
}

/// Error 1213: somebody else's transaction takes the row and its name in the other order, and has more to lose.
async fn a_deadlock_is_an_error_without_effect(ctx: Arc<Ctx>) {
    let config = ctx.config().await.timeout(Duration::from_secs(4));
    let (store, mut raw, mine) = (MySqlStore::connect(config).await.expect("connect"), ctx.raw().await, claim());
    let (store, name) = (Arc::new(store), mine.key.as_str().as_bytes().to_vec());
    hold(&store, &mine).await;
    free(&store, &mine).await;
    let by_name = "SELECT id FROM resource_lock WHERE resource_name = ? FOR UPDATE";
    let (id,): (u64,) = sqlx::query_as(by_name).bind(&name).fetch_one(&mut raw).await.expect("id");
    raw.execute("CREATE TEMPORARY TABLE work (n INT) ENGINE = InnoDB").await.expect("ddl");
    raw.execute("BEGIN").await.expect("begin");
    raw.execute("INSERT INTO work VALUES (1), (2), (3), (4), (5), (6), (7), (8)").await.expect("work");
    sqlx::query("SELECT id FROM resource_lock WHERE id = ? FOR UPDATE").bind(id).execute(&mut raw).await.expect("row");
    let asking = {
        let (store, mine) = (Arc::clone(&store), rival(&mine));
        tokio::spawn(async move { attempt(&store, &mine).await })
    };
    tokio::time::sleep(Duration::from_millis(200)).await;
    sqlx::query(by_name).bind(&name).fetch_one(&mut raw).await.expect("it has more to lose");
    let error = asking.await.expect("no panic").expect_err("a deadlock");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Deadlock, Effect::None), "{error}");
    assert!(error.is_retryable());
    end(&mut raw).await;
    hold(&store, &mine).await;
}

async fn one_locked_row_does_not_cost_the_other_leases(ctx: Arc<Ctx>) {
    let config = ctx.config().await.timeout(Duration::from_secs(4));
    let (store, mut raw) = (MySqlStore::connect(config).await.expect("connect"), ctx.raw().await);
    let claims: Vec<_> = (0..20).map(|_| claim()).collect();
    for claim in &claims {
        hold(&store, claim).await;
    }
    lock_rows(&mut raw, &[&claims[7]]).await;
    let answers = store.renew(&claims.iter().map(renewal).collect::<Vec<_>>()).await;
    end(&mut raw).await;
    for (number, answer) in answers.iter().enumerate() {
        match answer {
            Err(error) if number == 7 => assert_eq!(error.effect(), Effect::None, "{error}"),
            Ok(Renewed::Held(hold)) if number != 7 => assert_eq!(hold.claim, claims[number]),
            other => panic!("number {number}: {other:?}"),
        }
    }
}

/// The server would wait longer for the row than a short lease lasts. There are so many leases that the one whose row is locked is
/// renewed together with others.
async fn one_locked_row_does_not_cost_the_other_leases_of_a_short_ttl(ctx: Arc<Ctx>) {
    let (locker, mut raw) = (Locker::new(ctx.store().await), ctx.raw().await);
    for mode in [Mode::Exclusive, Mode::Shared] {
        let claims: Vec<_> = (0..100).map(|_| claim()).collect();
        let acquisitions = claims.iter().map(|claim| {
            let key = claim.key.as_str();
            let lock = if mode == Mode::Shared { locker.rw_lock(key).read() } else { locker.lock(key) };
            tokio::spawn(async move { lock.ttl(Duration::from_secs(2)).acquire().await.expect("acquire") })
        });
        let mut guards = Vec::new();
        for acquisition in acquisitions.collect::<Vec<_>>() {
            guards.push(acquisition.await.expect("no panic"));
        }
        lock_rows(&mut raw, &[&claims[7]]).await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        let held: Vec<_> = guards.iter().map(Guard::is_held).collect();
        end(&mut raw).await;
        // The row of one was locked for longer than its lease lasts.
        let lost: Vec<_> = (0..held.len()).filter(|number| !held[*number]).collect();
        assert_eq!(lost, [7], "{mode:?}");
    }
}

/// Some are extended, one is locked and one is gone: so the number of rows that were extended does not tell which.
async fn a_row_that_was_passed_over_is_not_taken_for_extended(ctx: Arc<Ctx>) {
    let (store, mut raw) = (ctx.store().await, ctx.raw().await);
    for mode in [Mode::Exclusive, Mode::Shared] {
        let claims: Vec<_> = (0..20).map(|_| Claim { mode, ..claim() }).collect();
        for claim in &claims {
            let request = AcquireRequest { ttl: Duration::from_secs(4), order: Order::Fifo, ..request(claim) };
            assert!(matches!(store.acquire(&request).await, Ok(Attempt::Granted(_))));
        }
        free(&store, &claims[3]).await;
        lock_rows(&mut raw, &[&claims[7], &claims[8]]).await;
        let renewals = claims.iter().map(|claim| Renewal { ttl: Duration::from_secs(7), ..renewal(claim) });
        let asked = Instant::now();
        let answers = store.renew(&renewals.collect::<Vec<_>>()).await;
        let elapsed = asked.elapsed();
        assert!(elapsed < Duration::from_secs(7) / 4, "{mode:?}: it took {elapsed:?}");
        let keys = claims.iter().map(|claim| claim.key.clone()).collect();
        let states = store.inspect(&Query::Keys(keys)).await.expect("inspect");
        // What was given up takes effect after this.
        end(&mut raw).await;
        for (number, (answer, state)) in answers.into_iter().zip(states).enumerate() {
            let left = state.holders.first().and_then(|holder| holder.remaining).unwrap_or_default();
            match (number, answer) {
                (3, answer) => assert_eq!(lost(answer), LossReason::Gone),
                (7 | 8, Err(error)) => {
                    assert!(error.is_retryable() && left < Duration::from_secs(4), "{error}, {left:?}");
                }
                (7 | 8, Ok(answer)) => panic!("{mode:?}: number {number}: {answer:?}, with {left:?} left"),
                (_, answer) => {
                    assert!(is_held(&answer), "{mode:?}: number {number}: {answer:?}");
                    assert!(left > Duration::from_secs(4), "{mode:?}: number {number}: {left:?}");
                }
            }
        }
    }
}

async fn a_connection_killed_in_the_middle_leaves_the_effect_open(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(crate::support::config(&server)).await.expect("connect");
    let (store, mut raw, mine) = (Arc::new(store), crate::support::raw(&server).await, claim());
    hold(&store, &mine).await;
    free(&store, &mine).await;
    lock_rows(&mut raw, &[&mine]).await;
    let asking = {
        let (store, mine) = (Arc::clone(&store), rival(&mine));
        tokio::spawn(async move { attempt(&store, &mine).await })
    };
    // The one that waits for the row alone: were the one that has it killed first, the lock would be granted.
    let waiting = loop {
        let all = server.admin("SHOW FULL PROCESSLIST").await.expect("ask");
        let is_update = |row: &&Vec<Option<String>>| row[7].as_ref().is_some_and(|text| text.starts_with("UPDATE"));
        if let Some(row) = all.iter().find(is_update) {
            break row[0].clone().expect("an id");
        }
    };
    server.admin(&format!("KILL {waiting}")).await.expect("kill");
    let error = asking.await.expect("no panic").expect_err("its connection was killed");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown), "{error}");
    let next = claim();
    hold(&store, &next).await;
    free(&store, &next).await;
}

async fn idle_connections_that_died_are_replaced(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(crate::support::config(&server)).await.expect("connect");
    let claims: Vec<_> = (0..8).map(|_| claim()).collect();
    let tasks: Vec<_> = claims.iter().map(|claim| attempt(&store, claim)).collect();
    for task in tasks {
        task.await.expect("acquire");
    }
    server.cut_clients().await.expect("cut");
    // The first may fail, and warns the others.
    drop(attempt(&store, &claim()).await);
    for claim in &claims {
        free(&store, claim).await;
    }
}

async fn many_cancelled_attempts_leave_no_connections_behind(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let config = crate::support::config(&server).connections(4);
    let (store, mine) = (MySqlStore::connect(config).await.expect("connect"), claim());
    for round in 0..300_u64 {
        drop(tokio::time::timeout(Duration::from_micros(round * 4), attempt(&store, &rival(&mine))).await);
    }
    tokio::time::sleep(Duration::from_millis(300)).await;
    let clients = server.admin("SHOW PROCESSLIST").await.expect("ask");
    let clients = clients.iter().filter(|row| row[2].as_ref().is_some_and(|host| host.contains(':'))).count();
    assert!(clients <= 5, "{clients} connections for a store that may have 4");
}
