//! The queue of those who ask in an order: places, turns, and what the server has to do for them.

use std::{
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, Fence, FenceClock, LockStore, Mode, Order, Query, Release,
    Result,
};
use lockkit_mysql::MySqlStore;
use lockkit_testkit::servers::MySqlServer;
use tokio::time::timeout;

use crate::support::{
    Ctx, TTL, attempt, claim, config, contended, end, eventually, free, hold, lock_rows, proxied, raw, request, rival,
    status, tests,
};

tests! {
    a_short_ttl_leaves_time_for_the_turn
    a_place_is_kept_without_the_row_of_the_lock
    a_claim_that_waits_may_ask_for_a_higher_fence
    a_place_that_lapsed_is_not_taken_up_again
    places_that_lapsed_in_the_middle_are_passed_over
    the_end_of_one_in_the_place_of_another_serves_the_queue
    transactions_that_are_to_follow_each_other_hide_nothing
    those_who_wait_are_counted_once
    a_hand_over_costs_the_server_the_same_however_many_wait
    permits_that_are_held_are_counted_once_in_a_step
    what_somebody_keeps_locked_is_left
    an_acquisition_that_is_not_polled_keeps_no_turn_at_the_row
    the_effect_of_an_error_is_open_while_the_claim_has_a_place
}

/// Asks, and waits in the queue.
async fn ask(store: &MySqlStore, claim: &Claim, ttl: Duration) -> Result<Attempt> {
    let mut request = request(claim);
    (request.order, request.ttl, request.wait) = (Order::Fifo, ttl, Duration::from_secs(30));
    store.acquire(&request).await
}

async fn granted(store: &MySqlStore, claim: &Claim) {
    let asked = ask(store, claim, TTL).await.expect("acquire");
    assert!(matches!(asked, Attempt::Granted(_)), "{asked:?}");
}

async fn waits(store: &MySqlStore, claim: &Claim, ttl: Duration) {
    contended(ask(store, claim, ttl).await.expect("acquire"));
}

fn reader(of: &Claim) -> Claim {
    Claim { mode: Mode::Shared, ..rival(of) }
}

/// A waiter hears of its turn by a look, which it takes every 250 ms at the slowest, and has to ask then. The release may have waited for
/// the row before.
async fn a_short_ttl_leaves_time_for_the_turn(ctx: Arc<Ctx>) {
    // The store that grants a permit may release it by its row alone. Another one always serves the queue.
    let (store, other, short) = (ctx.store().await, ctx.store().await, Duration::from_millis(400));
    let mut somebody = ctx.raw().await;
    for mode in [Mode::Exclusive, Mode::Shared] {
        let second = claim();
        let (first, holder) = (Claim { mode, ..rival(&second) }, rival(&second));
        let holder = Claim { mode: Mode::Permit { limit: NonZeroU32::MIN }, ..holder };
        granted(&store, &holder).await;
        waits(&store, &first, short).await;
        waits(&store, &second, TTL).await;
        lock_rows(&mut somebody, &[&holder]).await;
        tokio::join!(free(&other, &holder), async {
            tokio::time::sleep(short * 2).await;
            end(&mut somebody).await;
        });
        let states = store.inspect(&Query::Keys(vec![holder.key.clone()])).await.expect("inspect");
        let [next] = &states[0].holders[..] else { panic!("not one has it: {states:?}") };
        assert_eq!(next.token, Some(first.token));
        assert!(next.remaining > Some(short), "{mode:?}: {:?}", next.remaining);
        waits(&store, &second, TTL).await;
        let asked = ask(&store, &first, short).await.expect("acquire");
        assert!(matches!(asked, Attempt::Granted(_)), "{mode:?}: {asked:?}");
    }
}

/// Whether it is the first in the queue, or keeps a place behind others. What it has already keeps its fence.
async fn a_claim_that_waits_may_ask_for_a_higher_fence(ctx: Arc<Ctx>) {
    let (store, holder) = (ctx.store().await, claim());
    let floors = [Fence::new(1 << 60), Fence::new(1 << 61)];
    let waiters = [rival(&holder), reader(&holder)];
    let ask_above = async |claim: &Claim, floor| {
        let mut request = request(claim);
        (request.order, request.wait, request.fence.floor) = (Order::Fifo, Duration::from_secs(30), floor);
        store.acquire(&request).await
    };
    granted(&store, &holder).await;
    for (waiter, floor) in waiters.iter().zip(floors) {
        waits(&store, waiter, TTL).await;
        contended(ask_above(waiter, floor).await.expect("acquire"));
    }
    free(&store, &holder).await;
    for (waiter, floor) in waiters.iter().zip(floors) {
        match ask_above(waiter, floor).await.expect("acquire") {
            Attempt::Granted(hold) => assert!(hold.fence > floor, "{} is not above {floor}", hold.fence),
            other => panic!("not granted: {other:?}"),
        }
        let late = ask_above(waiter, floor.offset(1 << 10)).await.expect_err("its fence is given");
        assert_eq!(late.effect(), Effect::Unknown, "{late}");
        free(&store, waiter).await;
    }
    let mut request = request(&rival(&holder));
    (request.order, request.fence.clock) = (Order::Fifo, FenceClock::Floor);
    let error = store.acquire(&request).await.expect_err("the server's clock is in each fence of these");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unsupported, Effect::None), "{error}");
}

/// Who is not the first has nothing to do with the lock but to wait.
async fn a_place_is_kept_without_the_row_of_the_lock(ctx: Arc<Ctx>) {
    let (store, mut raw) = (ctx.store().await, ctx.raw().await);
    let holder = claim();
    let (first, second, third) = (rival(&holder), rival(&holder), reader(&holder));
    granted(&store, &holder).await;
    for waiter in [&first, &second, &third] {
        waits(&store, waiter, TTL).await;
    }
    lock_rows(&mut raw, &[&holder]).await;
    for waiter in [&first, &second, &third] {
        let asked = Instant::now();
        let held = contended(ask(&store, waiter, TTL).await.expect("it keeps its place"));
        assert_eq!(held.holder.expect("a holder").as_str(), "test: holder");
        assert!(held.retry_after.is_some_and(|after| after <= Duration::from_secs(2)), "{:?}", held.retry_after);
        assert!(asked.elapsed() < Duration::from_millis(900), "it waited: {:?}", asked.elapsed());
    }
    end(&mut raw).await;
    free(&store, &holder).await;
    // In their order.
    for waiter in [first, second, third] {
        granted(&store, &waiter).await;
        free(&store, &waiter).await;
    }
}

/// The place of a claim ends.
async fn lapse(ctx: &Ctx, claim: &Claim) {
    let token = claim.token.reveal();
    let age = format!("UPDATE resource_lock_claim SET kept = kept - INTERVAL 1 MINUTE WHERE token = x'{token}'");
    ctx.server().await.admin(&age).await.expect("age");
}

/// Others may be served by then who came later.
async fn a_place_that_lapsed_is_not_taken_up_again(ctx: Arc<Ctx>) {
    let (store, holder) = (ctx.store().await, claim());
    let (first, second, third) = (rival(&holder), rival(&holder), rival(&holder));
    granted(&store, &holder).await;
    for waiter in [&first, &second, &third] {
        waits(&store, waiter, TTL).await;
    }
    lapse(&ctx, &second).await;
    waits(&store, &second, TTL).await;
    free(&store, &holder).await;
    for waiter in [first, third, second] {
        granted(&store, &waiter).await;
        free(&store, &waiter).await;
    }
}

/// They stay behind one that waits, and neither get in beside it nor keep anybody from anything.
async fn places_that_lapsed_in_the_middle_are_passed_over(ctx: Arc<Ctx>) {
    let (store, holder) = (ctx.store().await, claim());
    let permit =
        |limit| Claim { mode: Mode::Permit { limit: NonZeroU32::new(limit).expect("some") }, ..rival(&holder) };
    let (first, dead, last) = (reader(&holder), [reader(&holder), rival(&holder), permit(2)], reader(&holder));
    granted(&store, &holder).await;
    for waiter in [&first, &dead[0], &dead[1], &dead[2], &last] {
        waits(&store, waiter, TTL).await;
    }
    for waiter in &dead {
        lapse(&ctx, waiter).await;
    }
    let other = permit(3);
    waits(&store, &other, TTL).await;
    let left = store.release(&other).await.expect("release");
    assert!(matches!(left, Release::NotHeld(_)), "{left:?}");
    free(&store, &holder).await;
    let states = store.inspect(&Query::Keys(vec![holder.key.clone()])).await.expect("inspect");
    let mut holders: Vec<_> = states[0].holders.iter().filter_map(|holder| holder.token).collect();
    let mut living = [first.token, last.token];
    [&mut holders[..], &mut living].into_iter().for_each(|tokens| tokens.sort_by_key(|token| *token.as_bytes()));
    assert_eq!((&holders[..], states[0].waiters), (&living[..], None), "{states:?}");
}

/// So ends a lease that was handed over, or a window that was given up.
async fn the_end_of_one_in_the_place_of_another_serves_the_queue(ctx: Arc<Ctx>) {
    let (store, holder) = (ctx.store().await, claim());
    let (after, next) = (rival(&holder), rival(&holder));
    granted(&store, &holder).await;
    waits(&store, &next, TTL).await;
    let mut in_place = request(&after);
    in_place.from = Some(holder.token);
    let taken = store.acquire(&in_place).await.expect("acquire");
    assert!(matches!(taken, Attempt::Granted(_)), "{taken:?}");
    free(&store, &after).await;
    let states = store.inspect(&Query::Keys(vec![holder.key.clone()])).await.expect("inspect");
    assert_eq!(states[0].holders.first().and_then(|holder| holder.token), Some(next.token), "{states:?}");
}

/// With `completion_type` a server is set to begin a transaction after each, in which what follows would stay unseen by others, or
/// to end the session.
async fn transactions_that_are_to_follow_each_other_hide_nothing(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    for setting in ["CHAIN", "RELEASE"] {
        server.admin(&format!("SET GLOBAL completion_type = '{setting}'")).await.expect("setting");
        let connect = async || MySqlStore::connect(config(&server)).await.expect("connect");
        let (store, other, mut raw) = (connect().await, connect().await, raw(&server).await);
        let (plain, mine) = (claim(), claim());
        let (one, two) = (reader(&mine), reader(&mine));
        let checked = async |what: &str| {
            hold(&store, &plain).await;
            contended(attempt(&other, &rival(&plain)).await.expect(what));
            free(&store, &plain).await;
        };
        granted(&store, &one).await;
        checked("after an acquisition").await;
        assert_eq!(store.renew(&[crate::support::renewal(&one)]).await.len(), 1);
        checked("after a renewal").await;
        lock_rows(&mut raw, &[&one]).await;
        ask(&store, &two, TTL).await.expect_err("the row is locked");
        end(&mut raw).await;
        checked("after a transaction that was rolled back").await;
        assert!(matches!(store.release(&one).await, Ok(Release::Released { .. })));
        checked("after a release").await;
    }
}

/// A look at a lock reads what waits and what shares it, and not the one for each of the other.
async fn those_who_wait_are_counted_once(ctx: Arc<Ctx>) {
    const EACH: u32 = 60;
    let server = ctx.private(&[]).await;
    let (store, mut raw) = (MySqlStore::connect(config(&server)).await.expect("connect"), raw(&server).await);
    let first = reader(&claim());
    granted(&store, &first).await;
    for _ in 1..EACH {
        granted(&store, &reader(&first)).await;
    }
    for _ in 0..EACH {
        waits(&store, &Claim { mode: Mode::Exclusive, ..rival(&first) }, TTL).await;
    }
    for query in [Query::Keys(vec![first.key.clone()]), Query::Prefix(first.key.as_str().to_owned())] {
        let before = status(&mut raw, "Handler_read%").await;
        let states = store.inspect(&query).await.expect("inspect");
        let read = status(&mut raw, "Handler_read%").await - before;
        assert_eq!((states[0].holders.len(), states[0].waiters), (60, Some(EACH)));
        println!("{read} rows read");
        assert!(read < 1000, "{read} rows were read for {EACH} readers and {EACH} that wait");
    }
}

/// So many wait behind a claim, by one statement and for an hour: as many requests might take longer than a place lasts.
async fn wait_behind(server: &MySqlServer, last: &Claim, waiters: usize) {
    let token = last.token.reveal();
    let fill = format!(
        "INSERT INTO resource_lock_claim (lock_id, token, place, mode, permits, fence, span, `count`, ttl, expires, kept, node_info) \
         WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < {waiters}) \
         SELECT lock_id, UNHEX(LPAD(HEX(i), 32, '0')), place + i, mode, permits, fence, span, `count`, ttl, \
         expires + INTERVAL 1 HOUR, kept + INTERVAL 1 HOUR, node_info FROM resource_lock_claim, n WHERE token = UNHEX('{token}')"
    );
    server.admin(&fill).await.expect("they wait");
}

/// A permit is taken and given back beside as many others as are held already. They are counted once in a step, in an index.
async fn permits_that_are_held_are_counted_once_in_a_step(ctx: Arc<Ctx>) {
    const TIMES: u64 = 20;
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    let mut raw = raw(&server).await;
    let mut costs = Vec::new();
    for held in [10, 1000] {
        let limit = NonZeroU32::new(5000).expect("not zero");
        let permit = |of: &Claim| Claim { mode: Mode::Permit { limit }, ..rival(of) };
        let first = Claim { mode: Mode::Permit { limit }, ..claim() };
        let second = permit(&first);
        granted(&store, &first).await;
        granted(&store, &second).await;
        let fill = format!(
            "INSERT INTO resource_lock_claim (lock_id, token, place, mode, permits, fence, span, `count`, ttl, expires, kept, node_info) \
             WITH RECURSIVE n AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM n WHERE i < {}) \
             SELECT lock_id, UNHEX(LPAD(HEX(i), 32, '0')), 0, mode, permits, fence, span, `count`, ttl, \
             expires + INTERVAL 1 HOUR, kept, node_info FROM resource_lock_claim, n WHERE token = UNHEX('{}')",
            held - 2,
            second.token.reveal()
        );
        server.admin(&fill).await.expect("they are held");
        let (before, begun) = (status(&mut raw, "Handler_read%").await, Instant::now());
        for _ in 0..TIMES {
            let mine = permit(&first);
            granted(&store, &mine).await;
            free(&store, &mine).await;
        }
        let each = (status(&mut raw, "Handler_read%").await - before) / TIMES;
        println!(
            "{held} permits are held: {each} rows and {:?} for each",
            begun.elapsed() / u32::try_from(TIMES).expect("few")
        );
        costs.push(each);
    }
    assert!(costs[1] < costs[0] + 1200, "{costs:?}");
}

/// The end of a lease, a look, and the request of the next one, which has the lock by then; and the same with one that asks again and
/// stays behind.
async fn a_hand_over_costs_the_server_the_same_however_many_wait(ctx: Arc<Ctx>) {
    const TIMES: usize = 4;
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    let mut raw = raw(&server).await;
    let mut costs: Vec<[u64; 2]> = Vec::new();
    for waiters in [10, 100, 1000] {
        let mut holder = claim();
        granted(&store, &holder).await;
        let front: Vec<_> = (0..=TIMES).map(|_| rival(&holder)).collect();
        for waiter in &front {
            waits(&store, waiter, TTL).await;
        }
        wait_behind(&server, &front[TIMES], waiters - front.len()).await;
        let mut counts = async || [status(&mut raw, "Com_commit").await, status(&mut raw, "Handler_read%").await];
        let before = counts().await;
        for next in &front[..TIMES] {
            free(&store, &holder).await;
            granted(&store, next).await;
            waits(&store, &front[TIMES], TTL).await;
            holder = next.clone();
        }
        let after = counts().await;
        costs.push([0, 1].map(|count| after[count] - before[count]));
        println!(
            "{waiters} waiting: {} transactions and {} rows for {TIMES}",
            costs.last().expect("one")[0],
            costs.last().expect("one")[1]
        );
    }
    let [[few, rows], ..] = costs[..] else { panic!("nothing was counted") };
    assert!(costs.iter().all(|[each, read]| *each == few && *read < rows + 20), "{costs:?}");
}

/// Neither a lock's row that somebody keeps locked nor a claim's is waited for.
async fn what_somebody_keeps_locked_is_left(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    // Its own removal, in the background, could come between the ageing of the claims and their being kept locked.
    let config = config(&server).keep_rows(true);
    let (store, mut raw) = (MySqlStore::connect(config).await.expect("connect"), raw(&server).await);
    let (lapsed, kept) = (reader(&claim()), reader(&claim()));
    for claim in [&lapsed, &kept] {
        granted(&store, claim).await;
        // One that is alone and asks again has a claim from then on.
        granted(&store, claim).await;
    }
    server.admin("UPDATE resource_lock_claim SET expires = expires - INTERVAL 1 DAY").await.expect("age");
    lock_rows(&mut raw, &[&lapsed, &kept]).await;
    let rows =
        server.admin(&format!("SELECT id FROM resource_lock WHERE resource_name = '{}'", kept.key)).await.expect("id");
    let lock = "SELECT lock_id FROM resource_lock_claim WHERE lock_id = ? AND token = ? FOR UPDATE";
    let lock = sqlx::query(lock).bind(rows[0][0].as_deref()).bind(kept.token.as_bytes().as_slice());
    lock.fetch_one(&mut raw).await.expect("the row is there");
    let begun = Instant::now();
    store.remove_unused(Duration::from_secs(3600)).await.expect("removed");
    assert!(begun.elapsed() < Duration::from_millis(900), "it waited: {:?}", begun.elapsed());
    let left = server.admin("SELECT HEX(token) FROM resource_lock_claim").await.expect("claims");
    assert_eq!(left.len(), 1, "{left:?}");
    end(&mut raw).await;
    store.remove_unused(Duration::from_secs(3600)).await.expect("removed");
    assert!(server.admin("SELECT 1 FROM resource_lock_claim").await.expect("claims").is_empty());
}

/// The end of the holder's lease grants it the lock, although its own request did not get as far as the server.
async fn the_effect_of_an_error_is_open_while_the_claim_has_a_place(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let (store, other) = (MySqlStore::connect(config).await.expect("connect"), ctx.store().await);
    let holder = claim();
    let (exclusive, shared) = (rival(&holder), reader(&holder));
    granted(&other, &holder).await;
    for waiter in [&exclusive, &shared] {
        waits(&store, waiter, TTL).await;
    }
    proxy.refuse(true);
    proxy.cut().await;
    for waiter in [&exclusive, &shared] {
        let error = ask(&store, waiter, TTL).await.expect_err("the server is out of reach");
        assert_eq!(error.effect(), Effect::Unknown, "{error}");
    }
    let error = ask(&store, &reader(&holder), TTL).await.expect_err("the server is out of reach");
    assert_eq!(error.effect(), Effect::None, "it has no place: {error}");
    free(&other, &holder).await;
    let states = other.inspect(&Query::Keys(vec![holder.key.clone()])).await.expect("inspect");
    assert_eq!(states[0].holders.first().and_then(|holder| holder.token), Some(exclusive.token), "{states:?}");
}

/// One of two connections for acquiring may be at the row for claims without a place. The other claim is answered when that turn is over.
async fn an_acquisition_that_is_not_polled_keeps_no_turn_at_the_row(ctx: Arc<Ctx>) {
    let (server, left) = (ctx.server().await, claim());
    let store = MySqlStore::connect(config(server).connections(4).timeout(Duration::from_millis(500))).await;
    let store = store.expect("connect");
    granted(&store, &left).await;
    free(&store, &left).await;
    let mut somebody = raw(server).await;
    lock_rows(&mut somebody, &[&left]).await;
    let in_order = |claim: &Claim| AcquireRequest { order: Order::Fifo, ..request(claim) };
    let (asked, other) = (in_order(&left), in_order(&rival(&left)));
    let mut asking = std::pin::pin!(store.acquire(&asked));
    assert!(timeout(Duration::from_millis(100), asking.as_mut()).await.is_err(), "it waits for the row");
    end(&mut somebody).await;
    eventually("another is answered", async || store.acquire(&other).await.is_ok()).await;
}
