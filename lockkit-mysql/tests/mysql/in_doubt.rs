//! Futures that are dropped while an answer is still to come, at each place where one can be. What was asked then may
//! never be answered to somebody else.

use std::{
    pin::pin,
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, LockKey, LockStore, LossReason, Mode, Order, Query, Release, Renewal,
    store::{Record, Records as _, Swap},
};
use lockkit_mysql::{MySqlConfig, MySqlStore, fenced};
use lockkit_testkit::faults::{Direction, Proxy, Slip, overtaken_requests, poll_until};
use sqlx::{Connection as _, Executor as _, MySqlConnection};
use tokio::time::{sleep, timeout};

use crate::support::{
    Ctx, TTL, Undriven, attempt, claim, config, end, eventually_within, free, hold, is_held, lock_rows, proxied, raw,
    renew, renewal, request, rival, tests,
};

tests! {
    a_probe_that_is_dropped_leaves_no_answers_behind
    a_probe_of_a_shaken_connection_that_is_dropped_leaves_no_answers_behind
    every_question_can_be_dropped_at_any_moment
    a_renewal_that_passes_over_rows_can_be_dropped_at_any_moment
    an_acquisition_that_is_dropped_within_an_answer_delays_no_release
    a_dropped_claim_leaves_the_transaction_s_connection_in_step
    an_answer_of_no_rows_that_comes_twice_leaves_the_effect_open
    a_change_of_a_record_is_not_taken_for_the_one_before
    the_number_of_a_new_row_is_not_taken_for_that_of_a_question
    a_statement_whose_connection_was_reset_takes_no_lock_for_nobody
    a_lease_that_comes_while_its_claim_is_released_is_no_other_s
    a_statement_that_was_never_heard_of_is_counted
    a_statement_whose_runtime_is_gone_takes_no_lock_for_nobody
    a_transaction_that_stopped_at_an_error_locks_nobody_out
    an_acquisition_left_on_a_runtime_that_nobody_drives_blocks_nobody
}

/// How long the replies are held back before a future is dropped.
const SOON: Duration = Duration::from_millis(60);

/// A store behind a proxy, and what another process and this one hold.
struct Scene {
    proxy: Proxy,
    store: MySqlStore,
    other: MySqlStore,
    mine: Claim,
    theirs: Claim,
}

impl Scene {
    async fn new(ctx: &Ctx) -> Self {
        let (proxy, config) = proxied(ctx.server().await).await;
        let (store, other) = (MySqlStore::connect(config).await.expect("connect"), ctx.store().await);
        let (mine, theirs) = (claim(), claim());
        let used = claim();
        hold(&store, &used).await;
        free(&store, &used).await;
        hold(&store, &mine).await;
        hold(&other, &theirs).await;
        Self { proxy, store, other, mine, theirs }
    }

    /// Drops an acquisition while the replies are held back.
    async fn drop_an_acquisition(&self) {
        self.proxy.hold(Direction::ToClient);
        let asked = timeout(SOON, attempt(&self.store, &claim())).await;
        assert!(asked.is_err(), "the reply was held back: {asked:?}");
        self.proxy.release(Direction::ToClient);
    }

    /// What is wrong with the store's answers.
    async fn wrong_answers(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let new = claim();
        match attempt(&self.store, &new).await {
            Ok(Attempt::Granted(hold)) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("clock");
                if now.abs_diff(Duration::from_micros(hold.fence.get())) > Duration::from_secs(60) {
                    wrong.push(format!("a new lock has the fence {}", hold.fence));
                }
            }
            other => wrong.push(format!("a new lock is not granted: {other:?}")),
        }
        match attempt(&self.store, &rival(&self.theirs)).await {
            Ok(Attempt::Contended(_)) => {}
            other => wrong.push(format!("another process's lock: {other:?}")),
        }
        let renewed = renew(&self.store, &renewal(&self.mine)).await;
        if !is_held(&renewed) {
            wrong.push(format!("the renewal of a held lease: {renewed:?}"));
        }
        match self.store.release(&self.mine).await {
            Ok(Release::Released { .. }) => {}
            other => wrong.push(format!("the release of a held lease: {other:?}")),
        }
        hold(&self.other, &rival(&self.mine)).await;
        wrong
    }
}

async fn a_probe_that_is_dropped_leaves_no_answers_behind(ctx: Arc<Ctx>) {
    let scene = Scene::new(&ctx).await;
    // A connection of that age is asked whether it is still there before it is used.
    sleep(Duration::from_millis(5300)).await;
    scene.drop_an_acquisition().await;
    assert_eq!(scene.wrong_answers().await, [""; 0]);
}

/// So is each one when another broke.
async fn a_probe_of_a_shaken_connection_that_is_dropped_leaves_no_answers_behind(ctx: Arc<Ctx>) {
    let scene = Scene::new(&ctx).await;
    let (one, two) = (claim(), claim());
    tokio::join!(hold(&scene.store, &one), hold(&scene.store, &two));
    scene.proxy.drop_reply_after("", 1);
    drop(attempt(&scene.store, &claim()).await.expect_err("its reply is lost"));
    scene.drop_an_acquisition().await;
    assert_eq!(scene.wrong_answers().await, [""; 0]);
}

async fn every_question_can_be_dropped_at_any_moment(ctx: Arc<Ctx>) {
    let mut wrong = Vec::new();
    for question in ["acquire", "try again", "release", "renew", "inspect", "list", "gc", "row"] {
        let scene = Scene::new(&ctx).await;
        scene.proxy.delay(Direction::ToClient, Duration::from_millis(1));
        let mut raw = ctx.raw().await;
        for round in 0..24 {
            let ask = async {
                match question {
                    "acquire" => drop(attempt(&scene.store, &claim()).await),
                    "try again" => drop(attempt(&scene.store, &scene.mine).await),
                    "release" => drop(scene.store.release(&rival(&scene.mine)).await),
                    "renew" => drop(renew(&scene.store, &renewal(&rival(&scene.mine))).await),
                    "inspect" => drop(scene.store.inspect(&Query::Keys(vec![claim().key])).await),
                    "list" => drop(scene.store.inspect(&Query::Prefix("nobody/".into())).await),
                    "gc" => drop(scene.store.remove_unused(Duration::from_secs(3600)).await),
                    _ => {
                        let mut transaction = raw.begin().await.expect("begin");
                        drop(scene.store.lock_in_transaction(&mut transaction, claim().key.as_str()).await);
                    }
                }
            };
            drop(timeout(Duration::from_micros(300 * round), ask).await);
        }
        scene.proxy.heal();
        wrong.extend(scene.wrong_answers().await.into_iter().map(|answer| format!("{question}: {answer}")));
    }
    assert_eq!(wrong, [""; 0]);
}

/// It passes over the locked row, reads the rows because one of the leases is gone, and asks for the locked one alone.
async fn a_renewal_that_passes_over_rows_can_be_dropped_at_any_moment(ctx: Arc<Ctx>) {
    for polls in 1..100 {
        let (scene, locked) = (Scene::new(&ctx).await, claim());
        hold(&scene.store, &locked).await;
        let mut raw = ctx.raw().await;
        lock_rows(&mut raw, &[&locked]).await;
        // Of so short a ttl, that there is no time to wait for the row.
        let short = |claim: &Claim| Renewal { ttl: Duration::from_secs(5), ..renewal(claim) };
        let renewals = [short(&scene.mine), short(&locked), short(&claim())];
        let ended = {
            let renewing = pin!(scene.store.renew(&renewals));
            poll_until(renewing, polls, || scene.proxy.hold(Direction::ToClient)).await.is_some()
        };
        scene.proxy.release(Direction::ToClient);
        end(&mut raw).await;
        assert_eq!(scene.wrong_answers().await, [""; 0], "dropped at poll {polls}");
        if ended {
            assert!(polls > 3, "it is three statements at least");
            return;
        }
    }
    panic!("it does not end");
}

/// The driver prepares a statement in an exchange of which it keeps no account: it can't go on in the middle of that.
async fn an_acquisition_that_is_dropped_within_an_answer_delays_no_release(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let (other, used) = (ctx.store().await, claim());
    hold(&other, &used).await;
    free(&other, &used).await;
    for order in [Order::Any, Order::Fifo] {
        dropped_within_each_answer(&proxy, &config, &other, &used, order).await;
    }
}

/// A request in no order is a statement that is prepared. A request in an order is a text, with a longer answer.
async fn dropped_within_each_answer(
    proxy: &Proxy,
    config: &MySqlConfig,
    other: &MySqlStore,
    used: &Claim,
    order: Order,
) {
    let (mut was_run, step) = (false, if order == Order::Any { 9 } else { 41 });
    for bytes in (0..).step_by(step) {
        // Its connection has not prepared the statement yet.
        let (store, mine) = (MySqlStore::connect(config.clone()).await.expect("connect"), rival(used));
        proxy.hold_replies_after(bytes);
        let asked = AcquireRequest { order, ..request(&mine) };
        let mut asking = Box::pin(store.acquire(&asked));
        let asked = tokio::select! {
            asked = &mut asking => Some(asked.expect("acquire")),
            () = proxy.held() => None,
        };
        if let Some(asked) = asked {
            assert!(was_run && matches!(asked, Attempt::Granted(_)), "after {bytes} bytes there is {asked:?}");
            proxy.heal();
            drop(asking);
            return free(&store, &mine).await;
        }
        assert!(timeout(SOON, &mut asking).await.is_err(), "a part of the reply was held back");
        drop(asking);
        proxy.release(Direction::ToClient);
        let released = store.release(&mine).await;
        let released = released.unwrap_or_else(|error| panic!("dropped after {bytes} bytes: {error}"));
        // The first packet of 16 bytes says that it is prepared.
        let is_run = matches!(released, Release::Released { .. });
        assert!(bytes > 16 || !is_run || order == Order::Fifo, "it was run for a caller that had left");
        was_run |= is_run;
        hold(other, &mine).await;
        free(other, &mine).await;
    }
}

async fn a_dropped_claim_leaves_the_transaction_s_connection_in_step(ctx: Arc<Ctx>) {
    let server = ctx.server().await;
    sqlx::query(fenced::DDL).execute(&mut raw(server).await).await.expect("table");
    let (proxy, config) = proxied(server).await;
    let url = server.url().replace(&server.addr().to_string(), &proxy.addr().to_string());
    let fence = hold(&MySqlStore::connect(config).await.expect("connect"), &claim()).await.fence;
    let mut wrong = Vec::new();
    for question in ["claim", "lock"] {
        let mut data = MySqlConnection::connect(&url).await.expect("connect");
        let (mut transaction, name) = (data.begin().await.expect("begin"), claim().key);
        proxy.hold(Direction::ToClient);
        let asked = match question {
            "claim" => timeout(SOON, fenced::claim(&mut transaction, name.as_str(), fence)).await.map(drop),
            _ => timeout(SOON, lockkit_mysql::lock_in_transaction(&mut transaction, name.as_str())).await.map(drop),
        };
        assert!(asked.is_err(), "the reply was held back");
        proxy.release(Direction::ToClient);
        drop(transaction);
        let next =
            timeout(Duration::from_secs(5), sqlx::query_scalar::<_, i64>("SELECT 42").fetch_one(&mut data)).await;
        if !matches!(next, Ok(Ok(42))) {
            wrong.push(format!("{question}: {next:?}"));
        }
    }
    assert_eq!(wrong, [""; 0]);
}

/// That nothing was changed is an answer without a number. Should it come twice, the next statement seems to have changed
/// nothing, and what is read then tells that this was not its answer.
async fn an_answer_of_no_rows_that_comes_twice_leaves_the_effect_open(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (proxy, config) = proxied(&server).await;
    let store = MySqlStore::connect(config.keep_rows(true)).await.expect("connect");
    let (unused, mine, theirs, period) = (claim(), claim(), claim(), Duration::from_secs(3600));
    hold(&store, &unused).await;
    free(&store, &unused).await;
    let mut somebody = raw(&server).await;
    let age = "UPDATE resource_lock SET update_time = update_time - INTERVAL 1 DAY";
    sqlx::query(age).execute(&mut somebody).await.expect("age");
    hold(&store, &mine).await;
    hold(&store, &theirs).await;
    lock_rows(&mut somebody, &[&unused]).await;
    for taken in [true, false] {
        // A statement that was asked before on its connection takes one answer.
        drop(attempt(&store, &rival(&theirs)).await);
        drop(store.release(&rival(&theirs)).await);
        assert_eq!(store.remove_unused(period).await.expect("the row is locked"), 0);
        // Of claims there are none, which takes two answers; then rows are read, and removed.
        proxy.slip(Slip::Twice, 4);
        assert_eq!(store.remove_unused(period).await.expect("the row is locked"), 0);
        assert!(proxy.slipped(), "the answer of the removal comes again");
        let error = if taken {
            store.release(&mine).await.expect_err("the answer was another's")
        } else {
            attempt(&store, &rival(&mine)).await.expect_err("the answer was another's")
        };
        assert_eq!(error.effect(), Effect::Unknown, "the statement ran: {error}");
    }
    end(&mut somebody).await;
}

/// A change that is answered by the change before, which was made.
async fn a_change_of_a_record_is_not_taken_for_the_one_before(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let (store, other) = (MySqlStore::connect(config).await.expect("connect"), ctx.store().await);
    let [one, two] = ["one", "two"].map(|text| Record::new(text).expect("text"));
    let [name, taken] = [claim().key, claim().key];
    assert_eq!(other.compare_and_set(&taken, None, Some(&two)).await.expect("set"), Swap::Done);
    // From now on the statement takes one answer.
    assert_eq!(store.compare_and_set(&name, None, Some(&one)).await.expect("set"), Swap::Done);
    proxy.slip(Slip::Twice, 1);
    assert_eq!(store.compare_and_set(&name, Some(&one), Some(&two)).await.expect("set"), Swap::Done);
    assert!(proxy.slipped(), "the answer comes again");
    let error = store.compare_and_set(&taken, Some(&one), None).await.expect_err("the answer was another's");
    assert_eq!(error.effect(), Effect::Unknown, "the statement ran: {error}");
    assert_eq!(other.read(&taken).await.expect("read"), Some(two));
}

/// The answer that a row was made has the row's number where other answers have that of their question. Rows and questions are
/// numbered one by one, so that on a new table both may be the same.
async fn the_number_of_a_new_row_is_not_taken_for_that_of_a_question(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (mut somebody, other) = (raw(&server).await, MySqlStore::connect(config(&server)).await.expect("connect"));
    let [used, name] = ["used", "name"].map(|name| LockKey::new(name).expect("name"));
    let text = Record::new("text").expect("text");
    for row in 1..=32 {
        // The record is looked for, with two answers; then its row is made, with the third. What comes twice is there before
        // the change has arrived.
        for answer in 1..=3 {
            let (proxy, config) = proxied(&server).await;
            let store = MySqlStore::connect(config).await.expect("connect");
            assert_eq!(store.compare_and_set(&used, None, Some(&text)).await.expect("set"), Swap::Done);
            sqlx::query("DELETE FROM resource_lock").execute(&mut somebody).await.expect("no rows");
            let next = sqlx::AssertSqlSafe(format!("ALTER TABLE resource_lock AUTO_INCREMENT = {row}"));
            sqlx::raw_sql(next).execute(&mut somebody).await.expect("the number of the next row");
            proxy.delay(Direction::ToServer, Duration::from_millis(5));
            proxy.slip(Slip::Twice, answer);
            let swap = store.compare_and_set(&name, None, Some(&text)).await;
            assert!(proxy.slipped(), "answer {answer} comes twice: {swap:?}");
            if let Ok(swap) = swap {
                let seen = other.read(&name).await.expect("read");
                assert_eq!((swap, seen.as_ref()), (Swap::Done, Some(&text)), "row {row}, answer {answer}");
            }
            sqlx::query("DELETE FROM resource_lock").execute(&mut somebody).await.expect("no rows");
        }
    }
}

/// The server does not notice that the client has gone. The statement goes on waiting for the table, as long as statements do, and a
/// release that came later may be let in before it: about one in six is. So there is no release before that time is over.
async fn a_statement_whose_connection_was_reset_takes_no_lock_for_nobody(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (proxy, config) = proxied(&server).await;
    let store = MySqlStore::connect(config).await.expect("connect");
    let (other, mut somebody) =
        (MySqlStore::connect(self::config(&server)).await.expect("connect"), raw(&server).await);
    let (one, two) = (claim(), claim());
    for claim in [&one, &two] {
        // It makes the row.
        hold(&store, claim).await;
        free(&store, claim).await;
    }
    let given_up = [rival(&one), Claim { mode: Mode::Shared, ..rival(&two) }];
    somebody.execute("LOCK TABLES resource_lock WRITE").await.expect("lock");
    let [one, two] = given_up.each_ref().map(|claim| timeout(10 * SOON, attempt(&store, claim)));
    let asked = tokio::join!(one, two);
    assert!(asked.0.is_err() && asked.1.is_err(), "the table is locked: {asked:?}");
    proxy.cut().await;
    let reset = Instant::now();
    somebody.execute("UNLOCK TABLES").await.expect("unlock");
    let release = async |claim| {
        while store.release(claim).await.is_err() {}
        reset.elapsed()
    };
    let [one, two] = given_up.each_ref().map(release);
    let took = tokio::join!(one, two);
    assert!(took.0.min(took.1) > Duration::from_secs(1), "the statements may be still waiting after {took:?}");
    assert!(took.0.max(took.1) < TTL / 2, "the releases took {took:?}");
    for claim in &given_up {
        hold(&other, &Claim { mode: Mode::Exclusive, ..rival(claim) }).await;
    }
}

/// The request for it was overtaken by the release.
async fn a_lease_that_comes_while_its_claim_is_released_is_no_other_s(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let (store, way) = (MySqlStore::connect(config).await.expect("connect"), ctx.store().await);
    // It waits for each answer.
    proxy.delay(Direction::ToClient, Duration::from_millis(2));
    let used = claim();
    hold(&way, &used).await;
    free(&way, &used).await;
    let reasons = overtaken_requests(&store, &way, || request(&rival(&used))).await.expect("answers");
    assert!(reasons.len() > 1 && reasons.iter().all(|reason| *reason == LossReason::Gone), "{reasons:?}");
}

/// The answer that a claim has nothing is not final then. It is where the server was heard to be done with what was given up.
async fn a_statement_that_was_never_heard_of_is_counted(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (proxy, config) = proxied(&server).await;
    let store = MySqlStore::connect(config).await.expect("connect");
    let (used, mut somebody) = (claim(), raw(&server).await);
    hold(&store, &used).await;
    free(&store, &used).await;
    for (is_cut, counted) in [(false, 0), (true, 1)] {
        let given_up = rival(&used);
        somebody.execute("LOCK TABLES resource_lock WRITE").await.expect("lock");
        let asked = timeout(10 * SOON, attempt(&store, &given_up)).await;
        assert!(asked.is_err(), "the table is locked: {asked:?}");
        if is_cut {
            proxy.cut().await;
        }
        somebody.execute("UNLOCK TABLES").await.expect("unlock");
        while store.release(&given_up).await.is_err() {}
        assert_eq!(store.info().reconnections.count(), counted, "{is_cut}");
    }
}

/// It is dropped where there is no runtime, or its own ends: nobody hears when the server is done with it.
async fn a_statement_whose_runtime_is_gone_takes_no_lock_for_nobody(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = Arc::new(MySqlStore::connect(config(&server)).await.expect("connect"));
    let mut somebody = raw(&server).await;
    let (one, two) = (claim(), claim());
    for claim in [&one, &two] {
        // It makes the row.
        hold(&store, claim).await;
        free(&store, claim).await;
    }
    let given_up = [rival(&one), Claim { mode: Mode::Shared, ..rival(&two) }];
    let asking = given_up.each_ref().map(|claim| {
        let (store, claim) = (Arc::clone(&store), claim.clone());
        Box::pin(async move { attempt(&store, &claim).await })
    });
    somebody.execute("LOCK TABLES resource_lock WRITE").await.expect("lock");
    let [asked, other] = asking.map(async |mut asking| {
        let mut runtime = Undriven::new();
        #[expect(clippy::async_yields_async, reason = "it is to be dropped elsewhere")]
        let asked = async move {
            let asked = timeout(10 * SOON, asking.as_mut()).await;
            assert!(asked.is_err(), "the table is locked: {asked:?}");
            asking
        };
        (runtime.run(asked).await, runtime)
    });
    let ((asked, runtime), (other, others)) = tokio::join!(asked, other);
    thread::spawn(move || drop(asked)).join().expect("no panic without a runtime");
    let mut others = others;
    others.run(async move { drop(other) }).await;
    drop((runtime, others));
    let gone = Instant::now();
    let unlock = async {
        somebody.execute("UNLOCK TABLES").await.expect("unlock");
    };
    let release = async |claim| {
        while store.release(claim).await.is_err() {}
        gone.elapsed()
    };
    let [one, two] = given_up.each_ref().map(release);
    let (one, two, ()) = tokio::join!(one, two, unlock);
    assert!(one.min(two) > Duration::from_secs(1), "the statements may be still waiting after {one:?}, {two:?}");
    assert!(one.max(two) < TTL / 2, "the releases took {one:?}, {two:?}");
    let other = MySqlStore::connect(config(&server)).await.expect("connect");
    for claim in &given_up {
        hold(&other, &Claim { mode: Mode::Exclusive, ..rival(claim) }).await;
    }
}

/// Grants the lock to somebody, as soon as the server lets anybody have it.
async fn granted(store: &MySqlStore, claim: &Claim) {
    let is_granted = async || matches!(attempt(store, claim).await, Ok(Attempt::Granted(_)));
    eventually_within(Duration::from_secs(8), "the row is free", is_granted).await;
}

/// The client stands still while it is told that a statement of its transaction failed.
async fn a_transaction_that_stopped_at_an_error_locks_nobody_out(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    let other = MySqlStore::connect(config(&server)).await.expect("connect");
    let mine = claim();
    for store in [&store, &other] {
        hold(store, &mine).await;
        free(store, &mine).await;
    }
    let mut somebody = raw(&server).await;
    somebody.execute("LOCK TABLES resource_lock_claim WRITE").await.expect("lock");
    let in_order = AcquireRequest { order: Order::Fifo, ..request(&rival(&mine)) };
    let mut asking = pin!(store.acquire(&in_order));
    assert!(timeout(SOON * 5, asking.as_mut()).await.is_err(), "it waits for the table");
    // The server gives up after a second. Nobody hears of that.
    sleep(Duration::from_millis(1500)).await;
    somebody.execute("UNLOCK TABLES").await.expect("unlock");
    granted(&other, &rival(&mine)).await;
}

/// What is left of it closes the connection there, and is never polled.
async fn an_acquisition_left_on_a_runtime_that_nobody_drives_blocks_nobody(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let (proxy, store) = (Arc::new(proxy), MySqlStore::connect(config.connections(2)).await.expect("connect"));
    let store = Arc::new(store);
    let left = claim();
    hold(&store, &left).await;
    free(&store, &left).await;
    let (mut undriven, left) = (Undriven::new(), rival(&left));
    let asked = {
        let (store, left, proxy) = (Arc::clone(&store), left.clone(), Arc::clone(&proxy));
        async move {
            hold(&store, &claim()).await;
            proxy.hold(Direction::ToClient);
            timeout(SOON, attempt(&store, &left)).await
        }
    };
    let asked = undriven.run(asked).await;
    assert!(asked.is_err(), "the reply was held back: {asked:?}");
    proxy.release(Direction::ToClient);
    eventually_within(Duration::from_secs(8), "its release ends", async || store.release(&left).await.is_ok()).await;
    granted(&ctx.store().await, &rival(&left)).await;
    hold(&store, &claim()).await;
    drop(undriven);
}
