//! One that shares a lock with nobody has the lock's row, as an exclusive lease does, and others may come at any moment.

use std::{
    collections::HashSet,
    num::NonZeroU32,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lockkit_core::{
    Attempt, Claim, Fence, Hold, HolderInfo, KeyState, LockKey, LockStore, Locker, LossReason, Mode, Order, Outcome,
    Query, Release, Renewal,
};
use lockkit_mysql::MySqlStore;
use lockkit_testkit::faults::Direction;
use sqlx::{Executor as _, MySqlConnection, Row as _};
use tokio::time::{sleep, timeout};

use crate::support::{
    Ctx, TTL, attempt, claim, config, contended, end, eventually, free, hold, is_held, lost, proxied, raw, renew,
    renewal, request, rival, status, tests,
};

tests! {
    who_shares_a_lock_with_nobody_takes_one_statement
    one_that_comes_alone_asks_as_often_as_an_exclusive_one
    a_second_one_joins
    who_waits_in_the_queue_goes_before_one_that_comes_alone
    a_renewal_and_a_release_find_out_that_others_came
    a_renewal_that_gives_a_name_keeps_the_mode
    whoever_knows_the_token_can_release_it
    a_collation_that_ignores_the_mark_makes_no_second_holder
    claims_that_are_over_do_not_come_back_with_the_next_group
    a_lost_reply_leaves_nothing_behind
    readers_writers_and_permits_of_one_name_exclude_each_other
}

const TWO: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);
const SHARES: [Mode; 2] = [Mode::Shared, Mode::Permit { limit: TWO }];

fn share(of: &Claim, mode: Mode) -> Claim {
    Claim { mode, ..rival(of) }
}

async fn granted(store: &MySqlStore, claim: &Claim) -> Hold {
    hold(store, claim).await
}

async fn state(store: &MySqlStore, claim: &Claim) -> KeyState {
    store.inspect(&Query::Keys(vec![claim.key.clone()])).await.expect("inspect").remove(0)
}

/// Whether the lock's row is a lease, and how many claims there are.
async fn stored(raw: &mut MySqlConnection, claim: &Claim) -> (bool, i64) {
    let ask = "SELECT COALESCE(token IS NOT NULL AND expires > UTC_TIMESTAMP(6), 0), \
               (SELECT COUNT(*) FROM resource_lock_claim WHERE lock_id = id) FROM resource_lock WHERE resource_name = ?";
    let row = sqlx::query(ask).bind(claim.key.as_str().as_bytes()).fetch_one(raw).await.expect("the row");
    (row.get::<i64, _>(0) != 0, row.get(1))
}

async fn waits_in_order(store: &MySqlStore, claim: &Claim) {
    let mut request = request(claim);
    (request.order, request.wait) = (Order::Fifo, Duration::from_secs(30));
    contended(store.acquire(&request).await.expect("acquire"));
}

async fn who_shares_a_lock_with_nobody_takes_one_statement(ctx: Arc<Ctx>) {
    let (store, mut raw) = (ctx.store().await, ctx.raw().await);
    for mode in SHARES {
        let (mine, mut last) = (share(&claim(), mode), Fence::NONE);
        for _ in 0..3 {
            let mine = rival(&mine);
            let hold = granted(&store, &mine).await;
            assert!(hold.fence > last, "{} after {last}", hold.fence);
            assert_eq!(stored(&mut raw, &mine).await, (true, 0));
            assert!(is_held(&renew(&store, &Renewal { depth: 2, ..renewal(&mine) }).await));
            assert_eq!(stored(&mut raw, &mine).await, (true, 0));
            for query in [Query::Keys(vec![mine.key.clone()]), Query::Prefix(mine.key.as_str().to_owned())] {
                let states = store.inspect(&query).await.expect("inspect");
                let [shown] = &states[0].holders[..] else { panic!("not one has it: {states:?}") };
                assert_eq!((shown.mode, shown.depth, shown.fence), (mode, 2, Some(hold.fence)));
                assert_eq!((shown.info.as_str(), shown.token), ("test: holder", Some(mine.token)));
            }
            free(&store, &mine).await;
            assert_eq!(stored(&mut raw, &mine).await, (false, 0));
            last = hold.fence;
        }
    }
}

/// A name that leaves no room for the mark shows what it costs by a transaction.
async fn one_that_comes_alone_asks_as_often_as_an_exclusive_one(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (store, mut raw) = (MySqlStore::connect(config(&server)).await.expect("connect"), raw(&server).await);
    let (any, fifo, long) = (Order::Any, Order::Fifo, HolderInfo::MAX_BYTES);
    let exclusive = [(Mode::Exclusive, any, 1), (Mode::Exclusive, fifo, 1)];
    let [reader, permit] = SHARES.map(|mode| (mode, any, 1));
    let kinds = [exclusive[0], exclusive[1], reader, permit, (Mode::Shared, any, long)];
    let (mut asked, mut took) = ([0; 5], [Duration::ZERO; 5]);
    for round in 0..8 {
        for (at, (mode, order, name)) in kinds.into_iter().enumerate() {
            let mut request = request(&Claim { mode, key: LockKey::new(format!("{at}")).expect("name"), ..claim() });
            request.holder = HolderInfo::new(&"x".repeat(name));
            (request.order, request.wait) = (order, if order == fifo { TTL } else { request.wait });
            let (before, start) = (status(&mut raw, "Questions").await, Instant::now());
            for _ in 0..10 {
                request.claim = rival(&request.claim);
                assert!(matches!(store.acquire(&request).await, Ok(Attempt::Granted(_))));
                free(&store, &request.claim).await;
            }
            // The first time a row is made, and statements are prepared.
            if round > 0 {
                took[at] += start.elapsed();
                asked[at] += status(&mut raw, "Questions").await - before;
            }
        }
    }
    println!("{asked:?} statements, {took:?}");
    // A connection is probed now and then.
    assert!(asked[1..4].iter().all(|asked_alone| asked_alone * 10 <= asked[0] * 12), "{asked:?}");
    assert!(asked[4] > 5 * asked[0], "{asked:?}");
}

/// And is the same to it, and to all others, as if both had come together. So is the same claim again.
async fn a_second_one_joins(ctx: Arc<Ctx>) {
    let (store, other, old) =
        (ctx.store().await, ctx.store().await, MySqlStore::new(ctx.config().await).expect("config"));
    for mode in SHARES {
        let writer = claim();
        let (one, two, three) = (share(&writer, mode), share(&writer, mode), share(&writer, mode));
        let first = granted(&store, &one).await;
        let held = contended(attempt(&old, &writer).await.expect("acquire"));
        assert!(held.retry_after.is_some_and(|left| left > TTL / 2), "{held:?}");
        let held = contended(attempt(&other, &writer).await.expect("acquire"));
        assert_eq!(held.holder.expect("a holder").as_str(), "test: holder");
        contended(
            attempt(&other, &share(&writer, SHARES[usize::from(mode == SHARES[0])])).await.expect("another kind"),
        );
        let second = granted(&other, &two).await;
        assert!(second.fence > first.fence);
        let state = state(&store, &one).await;
        let shown: HashSet<_> = state.holders.iter().map(|holder| (holder.token, holder.mode, holder.fence)).collect();
        let both = [(&one, &first), (&two, &second)].map(|(claim, hold)| (Some(claim.token), mode, Some(hold.fence)));
        assert_eq!(shown, HashSet::from(both));
        assert_eq!(granted(&store, &one).await.fence, first.fence, "the same claim again");
        if mode == SHARES[1] {
            contended(attempt(&other, &three).await.expect("there are two permits"));
            attempt(&other, &share(&writer, Mode::Permit { limit: NonZeroU32::MIN })).await.expect_err("another limit");
        }
        free(&store, &one).await;
        contended(attempt(&other, &writer).await.expect("acquire"));
        free(&other, &two).await;
        assert!(hold(&old, &writer).await.fence > second.fence);
        free(&old, &writer).await;
    }
    // The same claim, before anybody else has come.
    let mine = share(&claim(), Mode::Shared);
    let fence = granted(&store, &mine).await.fence;
    assert_eq!(granted(&other, &mine).await.fence, fence);
    assert_eq!(granted(&store, &mine).await.fence, fence);
    free(&store, &mine).await;
}

/// To look whether there is one waits for nobody.
async fn who_waits_in_the_queue_goes_before_one_that_comes_alone(ctx: Arc<Ctx>) {
    let (store, mut raw, holder) = (ctx.store().await, ctx.raw().await, claim());
    let (writer, reader) = (rival(&holder), share(&holder, Mode::Shared));
    hold(&store, &holder).await;
    waits_in_order(&store, &writer).await;
    // A plain release serves nobody.
    sqlx::query("UPDATE resource_lock SET token = NULL, expires = NULL WHERE resource_name = ?")
        .bind(holder.key.as_str().as_bytes())
        .execute(&mut raw)
        .await
        .expect("released");
    contended(attempt(&store, &reader).await.expect("acquire"));
    let shown = state(&store, &holder).await.holders;
    assert_eq!(shown.iter().map(|holder| holder.token).collect::<Vec<_>>(), [Some(writer.token)]);
    waits_in_order(&store, &rival(&holder)).await;
    let over = "UPDATE resource_lock_claim JOIN resource_lock ON id = lock_id SET kept = UTC_TIMESTAMP(6) \
                WHERE resource_name = ?";
    sqlx::query(over).bind(holder.key.as_str().as_bytes()).execute(&mut raw).await.expect("its place is over");
    sqlx::query("UPDATE resource_lock SET token = NULL, expires = NULL WHERE resource_name = ?")
        .bind(holder.key.as_str().as_bytes())
        .execute(&mut raw)
        .await
        .expect("released");
    let id = "SELECT id FROM resource_lock WHERE resource_name = ?";
    let id = sqlx::query(id)
        .bind(holder.key.as_str().as_bytes())
        .fetch_one(&mut raw)
        .await
        .expect("the row")
        .get::<u64, _>(0);
    raw.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").await.expect("isolation");
    raw.execute("BEGIN").await.expect("begin");
    let lock = "SELECT token FROM resource_lock_claim WHERE lock_id = ? FOR UPDATE";
    let locked = sqlx::query(lock).bind(id).fetch_all(&mut raw).await.expect("locked");
    assert_eq!(locked.len(), 1);
    granted(&store, &reader).await;
    end(&mut raw).await;
    assert_eq!(stored(&mut raw, &reader).await, (true, 1));
    free(&store, &reader).await;
}

/// On their way they may be, while another one comes: they are about the row, and the lease is in a claim then.
async fn a_renewal_and_a_release_find_out_that_others_came(ctx: Arc<Ctx>) {
    let (store, other, mut raw) = (ctx.store().await, ctx.store().await, ctx.raw().await);
    for mode in SHARES {
        let (lonely, exclusive) = (share(&claim(), mode), claim());
        let (one, two) = (share(&claim(), mode), claim());
        for claim in [&lonely, &exclusive, &one] {
            granted(&store, claim).await;
        }
        let two = Claim { key: one.key.clone(), mode, ..two };
        granted(&other, &two).await;
        assert_eq!(stored(&mut raw, &one).await, (false, 2));
        for round in 0..2 {
            let all: Vec<_> = [&lonely, &one, &exclusive].map(renewal).into();
            let answers = store.renew(&all).await;
            assert!(answers.iter().all(is_held), "{round}: {answers:?}");
        }
        let left = state(&store, &one).await.holders.iter().filter_map(|holder| holder.remaining).min();
        assert!(left.is_some_and(|left| left > TTL / 2), "{left:?}");
        free(&store, &one).await;
        assert_eq!(lost(renew(&store, &renewal(&one)).await), LossReason::Taken);
        free(&other, &two).await;
        // Without a renewal in between; and another way round: the first goes, the second stays.
        granted(&store, &one).await;
        granted(&other, &share(&two, mode)).await;
        free(&store, &one).await;
        assert_eq!(store.release(&one).await.expect("release"), Release::NotHeld(LossReason::Taken));
        for claim in [&lonely, &exclusive] {
            free(&store, claim).await;
        }
        assert_eq!(lost(renew(&store, &renewal(&lonely)).await), LossReason::Gone);
    }
}

async fn a_renewal_that_gives_a_name_keeps_the_mode(ctx: Arc<Ctx>) {
    let store = ctx.store().await;
    for mode in SHARES {
        let mine = share(&claim(), mode);
        granted(&store, &mine).await;
        let named = Renewal { holder: Some(HolderInfo::new("another name")), ..renewal(&mine) };
        assert!(is_held(&renew(&store, &named).await));
        let state = state(&store, &mine).await;
        assert_eq!((state.holders[0].info.as_str(), state.holders[0].mode), ("another name", mode));
        assert!(is_held(&renew(&store, &renewal(&mine)).await));
        granted(&store, &share(&mine, mode)).await;
        free(&store, &mine).await;
    }
}

/// Another process does not know that it is alone; who breaks a lease does not know its mode.
async fn whoever_knows_the_token_can_release_it(ctx: Arc<Ctx>) {
    let (store, other) = (ctx.store().await, ctx.store().await);
    let breaker = Locker::new(ctx.store().await);
    for mode in SHARES {
        let mine = share(&claim(), mode);
        granted(&store, &mine).await;
        assert!(is_held(&renew(&other, &renewal(&mine)).await));
        free(&other, &mine).await;
        assert_eq!(store.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Gone));
        let mine = rival(&mine);
        granted(&store, &mine).await;
        let broken = breaker.break_lock(mine.key.as_str(), mine.token).await.expect("break");
        assert!(matches!(broken, Release::Released { .. }), "{broken:?}");
        assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Gone);
        // A name that leaves no room for the mark.
        let mut long = request(&rival(&mine));
        long.holder = HolderInfo::new(&"x".repeat(HolderInfo::MAX_BYTES));
        assert!(matches!(store.acquire(&long).await, Ok(Attempt::Granted(_))));
        assert_eq!(state(&store, &mine).await.holders[0].info, long.holder);
        free(&store, &long.claim).await;
    }
}

/// For it a holder without a name is the same as one with the mark in front.
async fn a_collation_that_ignores_the_mark_makes_no_second_holder(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let ignores = "ALTER TABLE resource_lock MODIFY node_info VARCHAR(256) CHARACTER SET utf8mb4 COLLATE \
                   utf8mb4_unicode_ci NOT NULL DEFAULT ''";
    server.admin(ignores).await.expect("another collation");
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    let writer = claim();
    for name in ["", "0000000000me", "#readers"] {
        let mut unnamed = request(&writer);
        unnamed.holder = HolderInfo::new(name);
        assert!(matches!(store.acquire(&unnamed).await, Ok(Attempt::Granted(_))));
        contended(attempt(&store, &share(&writer, Mode::Shared)).await.expect("acquire"));
        free(&store, &writer).await;
    }
    let (one, two) = (share(&writer, Mode::Shared), share(&writer, Mode::Shared));
    granted(&store, &one).await;
    granted(&store, &two).await;
    free(&store, &one).await;
    contended(attempt(&store, &writer).await.expect("acquire"));
}

/// What dead readers left, and a place that was not kept: by the claim that is alone now, or by others.
async fn claims_that_are_over_do_not_come_back_with_the_next_group(ctx: Arc<Ctx>) {
    let (store, mut raw) = (ctx.store().await, ctx.raw().await);
    let mode = Mode::Shared;
    let holder = claim();
    let (dead, gone, mine) = (share(&holder, mode), share(&holder, mode), share(&holder, mode));
    for claim in [&dead, &gone] {
        granted(&store, claim).await;
    }
    let over = "UPDATE resource_lock SET expires = UTC_TIMESTAMP(6) WHERE resource_name = ?";
    sqlx::query(over).bind(holder.key.as_str().as_bytes()).execute(&mut raw).await.expect("over");
    let (one, two) = (share(&holder, mode), share(&holder, mode));
    granted(&store, &one).await;
    granted(&store, &two).await;
    let shown: HashSet<_> = state(&store, &one).await.holders.iter().filter_map(|holder| holder.token).collect();
    assert_eq!(shown, HashSet::from([one.token, two.token]));
    assert_eq!(lost(renew(&store, &renewal(&dead)).await), LossReason::Taken);
    for claim in [&one, &two] {
        free(&store, claim).await;
    }
    hold(&store, &holder).await;
    waits_in_order(&store, &mine).await;
    let lapse = "UPDATE resource_lock_claim SET kept = UTC_TIMESTAMP(6) WHERE token = ?";
    sqlx::query(lapse).bind(mine.token.as_bytes().as_slice()).execute(&mut raw).await.expect("lapse");
    free(&store, &holder).await;
    // It has a place that is over, and a share that goes on by its own time.
    let fence = granted(&store, &mine).await.fence;
    let next = share(&holder, mode);
    granted(&store, &next).await;
    let state = state(&store, &mine).await;
    let tokens: HashSet<_> = state.holders.iter().filter_map(|holder| holder.token).collect();
    assert_eq!(tokens, HashSet::from([mine.token, next.token]));
    assert!(state.holders.iter().any(|holder| holder.fence == Some(fence)));
    assert_eq!(store.release(&gone).await.expect("release"), Release::NotHeld(LossReason::Taken));
    free(&store, &mine).await;
    free(&store, &next).await;
}

/// At each step: nobody has heard that it was granted, renewed or released.
async fn a_lost_reply_leaves_nothing_behind(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let (store, other) = (MySqlStore::connect(config).await.expect("connect"), ctx.store().await);
    for mode in SHARES {
        for step in ["acquire", "renew", "release"] {
            for others_come in [false, true] {
                let (mine, theirs) = (share(&claim(), mode), claim());
                let theirs = Claim { key: mine.key.clone(), mode, ..theirs };
                // It makes the row.
                granted(&other, &theirs).await;
                free(&other, &theirs).await;
                if step != "acquire" {
                    granted(&store, &mine).await;
                }
                granted_elsewhere(&store).await;
                proxy.hold(Direction::ToClient);
                let ask = async {
                    match step {
                        "acquire" => attempt(&store, &mine).await.map(drop),
                        "renew" => renew(&store, &renewal(&mine)).await.map(drop),
                        _ => store.release(&mine).await.map(drop),
                    }
                };
                drop(timeout(Duration::from_millis(150), ask).await);
                let theirs = rival(&theirs);
                if others_come {
                    granted(&other, &theirs).await;
                }
                proxy.release(Direction::ToClient);
                if step == "renew" {
                    eventually("it is held", async || is_held(&renew(&store, &renewal(&mine)).await)).await;
                }
                eventually("it is released", async || store.release(&mine).await.is_ok()).await;
                if others_come {
                    assert!(is_held(&renew(&other, &renewal(&theirs)).await), "{mode:?} {step}");
                    contended(
                        attempt(&other, &Claim { mode: Mode::Exclusive, ..rival(&mine) }).await.expect("acquire"),
                    );
                    free(&other, &theirs).await;
                }
                hold(&other, &Claim { mode: Mode::Exclusive, ..rival(&mine) }).await;
            }
        }
    }
}

/// It has a connection that is known to be good.
async fn granted_elsewhere(store: &MySqlStore) {
    let elsewhere = claim();
    eventually("the store works", async || attempt(store, &elsewhere).await.is_ok()).await;
    drop(store.release(&elsewhere).await);
}

/// Who has a lock at a time, and the last fence that was given.
#[derive(Debug, Default)]
struct Inside {
    exclusive: usize,
    shared: usize,
    permits: usize,
    last: Option<Fence>,
}

async fn readers_writers_and_permits_of_one_name_exclude_each_other(ctx: Arc<Ctx>) {
    let (inside, name) = (Arc::new(Mutex::new(Inside::default())), claim().key);
    let mut workers = Vec::new();
    for worker in 0..6_u32 {
        let (locker, inside, name) = (Locker::new(ctx.store().await), Arc::clone(&inside), name.clone());
        workers.push(tokio::spawn(async move {
            for round in 0..12 {
                let (kind, name) = ((worker + round) % 4, name.as_str());
                let lock = match kind {
                    0 => locker.lock(name),
                    1 => locker.rw_lock(name).write().fifo(),
                    2 => locker.rw_lock(name).read().fifo(),
                    _ => locker.semaphore(name, TWO).fifo(),
                };
                let lock = lock.ttl(TTL);
                let before = inside.lock().expect("not poisoned").last;
                let guard = lock.acquire().await.expect("acquire");
                assert!(Some(guard.fence()) > before, "{} after {before:?}", guard.fence());
                enter(&inside, kind, guard.fence());
                sleep(Duration::from_millis(u64::from(round % 3))).await;
                leave(&inside, kind);
                assert_eq!(guard.release().await.expect("release"), Outcome::Released);
            }
        }));
    }
    for worker in workers {
        worker.await.expect("all goes well");
    }
}

fn enter(inside: &Mutex<Inside>, kind: u32, fence: Fence) {
    let mut inside = inside.lock().expect("not poisoned");
    match kind {
        0 | 1 => inside.exclusive += 1,
        2 => inside.shared += 1,
        _ => inside.permits += 1,
    }
    inside.last = inside.last.max(Some(fence));
    let kinds = [inside.exclusive, inside.shared, inside.permits].into_iter().filter(|count| *count > 0).count();
    assert!(kinds == 1 && inside.exclusive <= 1 && inside.permits <= 2, "{inside:?}");
}

fn leave(inside: &Mutex<Inside>, kind: u32) {
    let mut inside = inside.lock().expect("not poisoned");
    match kind {
        0 | 1 => inside.exclusive -= 1,
        2 => inside.shared -= 1,
        _ => inside.permits -= 1,
    }
}
