//! Readers, permits and strict order: beside those that know nothing of them, and after what goes wrong.

use std::{
    num::NonZeroU32,
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, HolderInfo, LockStore, Locker, LossReason, Mode, Order, Outcome,
    Query, Release, Renewed,
};
use lockkit_mysql::{MySqlConfig, MySqlStore, schema};

use crate::support::{
    Ctx, attempt, claim, config, contended, end, eventually, free, hold, is_held, lock_rows, lost, proxied, raw, renew,
    renewal, request, rival, status, tests,
};

tests! {
    what_a_store_can_do_is_known_without_a_server
    a_waiter_that_is_gone_costs_the_rest_of_its_place
    a_place_that_comes_after_its_release_is_found_by_the_next
    a_place_that_comes_after_its_lease_has_ended_is_found_by_the_next_release
    both_hear_of_each_others_releases
    clients_that_know_nothing_of_readers_are_kept_out
    the_lease_of_a_reader_can_be_broken
    members_of_a_group_that_ended_are_lost
    a_lapsed_permit_is_free_again
    each_grant_has_its_own_fence
    shares_are_renewed_together
    a_repeated_request_shortens_no_lease
    a_holder_has_the_name_that_it_gave
    a_lock_that_is_free_has_no_holder
    a_transaction_that_keeps_the_row_is_an_error
    without_the_second_table_exclusive_locks_work
    a_second_table_of_another_shape_is_not_used
    a_user_who_may_not_make_tables_is_told
    what_is_left_of_claims_is_removed
}

pub(crate) const SOON: Duration = Duration::from_secs(2);
pub(crate) const TWO: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

/// A release overtakes the request for a place, for that is on its way over another connection.
async fn a_place_that_comes_after_its_release_is_found_by_the_next(ctx: Arc<Ctx>) {
    let (server, used, late) = (ctx.private(&[]).await, claim(), claim());
    let [store, way] = [MySqlStore::connect(config(&server)).await, MySqlStore::connect(config(&server)).await];
    let (store, way) = (store.expect("connect"), way.expect("connect"));
    let late = Claim { key: used.key.clone(), ..late };
    let in_order = AcquireRequest { order: Order::Fifo, wait: SOON, ..request(&late) };
    hold(&store, &used).await;
    contended(store.acquire(&in_order).await.expect("acquire"));
    // As if this request had not arrived yet.
    server.admin("DELETE FROM lockkit.resource_lock_claim").await.expect("delete");
    assert_eq!(store.release(&late).await.expect("release"), Release::NotHeld(LossReason::Taken));
    contended(way.acquire(&in_order).await.expect("acquire"));
    let waiters = async || {
        let states = store.inspect(&Query::Keys(vec![used.key.clone()])).await.expect("inspect");
        states[0].waiters
    };
    assert_eq!(waiters().await, Some(1));
    assert_eq!(store.release(&late).await.expect("release"), Release::NotHeld(LossReason::Taken));
    assert_eq!(waiters().await, None, "the place is still there");
}

/// The claim had the lock meanwhile, so that its client takes it for one that is over.
async fn a_place_that_comes_after_its_lease_has_ended_is_found_by_the_next_release(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let [store, way] = [MySqlStore::connect(config(&server)).await, MySqlStore::connect(config(&server)).await];
    let (store, way) = (store.expect("connect"), way.expect("connect"));
    for is_released in [true, false] {
        let late = claim();
        let in_order = AcquireRequest { order: Order::Fifo, wait: SOON, ..request(&late) };
        lockkit_testkit::calls::granted(store.acquire(&in_order).await.expect("acquire"));
        if is_released {
            free(&store, &late).await;
        } else {
            server.admin("UPDATE resource_lock SET token = NULL, expires = NULL").await.expect("broken");
            lost(renew(&store, &renewal(&late)).await);
        }
        let next = rival(&late);
        hold(&store, &next).await;
        // As if this request had been on its way since before the grant.
        contended(way.acquire(&in_order).await.expect("acquire"));
        assert_eq!(store.release(&late).await.expect("release"), Release::NotHeld(LossReason::Taken));
        let states = store.inspect(&Query::Keys(vec![late.key.clone()])).await.expect("inspect");
        assert_eq!(states[0].waiters, None, "the place is still there");
        free(&store, &next).await;
    }
}

pub(crate) fn shared(of: &Claim, mode: Mode) -> Claim {
    Claim { mode, ..rival(of) }
}

/// A try.
pub(crate) async fn take(store: &MySqlStore, claim: &Claim, ttl: Duration) -> Attempt {
    let mut request = request(claim);
    (request.order, request.ttl) = (Order::Fifo, ttl);
    store.acquire(&request).await.expect("acquire")
}

pub(crate) async fn granted(store: &MySqlStore, claim: &Claim) -> lockkit_core::Hold {
    lockkit_testkit::calls::granted(take(store, claim, crate::support::TTL).await)
}

async fn locker(ctx: &Ctx) -> Locker {
    Locker::new(ctx.store().await)
}

async fn waiting(locker: &Locker, name: &str, count: u32) {
    let lock = locker.lock(name);
    eventually("they wait", async || lock.inspect().await.expect("inspect").waiters == Some(count)).await;
}

/// The next one is served all the same, when its place is over: it lasts for 6 s after it asked last.
async fn a_waiter_that_is_gone_costs_the_rest_of_its_place(ctx: Arc<Ctx>) {
    let (name, holder, next) = (claim().key, locker(&ctx).await, locker(&ctx).await);
    let server = ctx.server().await;
    let (proxy, config) = proxied(server).await;
    let gone = Locker::new(MySqlStore::connect(config).await.expect("connect"));
    let guard = holder.lock(name.as_str()).fifo().acquire().await.expect("acquire");
    let lock = gone.lock(name.as_str()).fifo();
    let dead = tokio::spawn(async move { lock.acquire().await.map(|guard| guard.fence()) });
    waiting(&holder, name.as_str(), 1).await;
    let lock = next.lock(name.as_str()).fifo();
    let served = tokio::spawn(async move { lock.acquire().await });
    waiting(&holder, name.as_str(), 2).await;
    proxy.blackhole();
    let released = Instant::now();
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    let guard = served.await.expect("task").expect("acquire");
    println!("served after {:?}", released.elapsed());
    assert!(released.elapsed() < Duration::from_secs(8), "{:?}", released.elapsed());
    assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    dead.abort();
}

/// Those who queue hear of a release by those who don't, and the reverse, and each other's.
async fn both_hear_of_each_others_releases(ctx: Arc<Ctx>) {
    let (one, other) = (locker(&ctx).await, locker(&ctx).await);
    for (first, second) in [(true, false), (false, true), (true, true)] {
        let name = claim().key;
        let lock = |locker: &Locker, fifo: bool| {
            let lock = locker.lock(name.as_str());
            if fifo { lock.fifo() } else { lock }
        };
        let guard = lock(&one, first).acquire().await.expect("acquire");
        let awaited = lock(&other, second);
        let waiting = tokio::spawn(async move { awaited.acquire().await });
        // Long enough for the poller to have become slow.
        tokio::time::sleep(Duration::from_millis(500)).await;
        let released = Instant::now();
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
        let guard = waiting.await.expect("task").expect("acquire");
        println!("{first} {second}: {:?}", released.elapsed());
        assert!(released.elapsed() < SOON, "{:?}", released.elapsed());
        assert_eq!(guard.release().await.expect("release"), Outcome::Released);
    }
}

/// One that does what lockkit did before there were claims: it never looks at the second table.
async fn clients_that_know_nothing_of_readers_are_kept_out(ctx: Arc<Ctx>) {
    let (store, old) = (ctx.store().await, MySqlStore::new(ctx.config().await).expect("config"));
    assert!(!old.info().capability.shared);
    for mode in [Mode::Shared, Mode::Permit { limit: TWO }] {
        let mine = claim();
        let reader = shared(&mine, mode);
        granted(&store, &reader).await;
        let held = contended(attempt(&old, &mine).await.expect("acquire"));
        assert!(held.retry_after.is_some_and(|left| left > Duration::from_secs(10)), "{held:?}");
        assert_eq!(old.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Taken));
        assert_eq!(lost(renew(&old, &renewal(&mine)).await), LossReason::Taken);
        assert!(is_held(&renew(&store, &renewal(&reader)).await));
        assert!(matches!(store.release(&reader).await, Ok(Release::Released { .. })));
        let fence = hold(&old, &mine).await.fence;
        contended(take(&store, &reader, SOON).await);
        free(&old, &mine).await;
        assert!(granted(&store, &shared(&mine, mode)).await.fence > fence);
    }
}

async fn the_lease_of_a_reader_can_be_broken(ctx: Arc<Ctx>) {
    let (name, mine, other) = (claim().key, locker(&ctx).await, locker(&ctx).await);
    let (one, two) = (mine.rw_lock(name.as_str()).read().fifo(), other.rw_lock(name.as_str()).read().fifo());
    let (one, two) = (one.acquire().await.expect("acquire"), two.acquire().await.expect("acquire"));
    let state = other.lock(name.as_str()).inspect().await.expect("inspect");
    assert_eq!(state.holders.len(), 2, "{state:?}");
    let holder = state.holders.iter().find(|holder| holder.fence == Some(one.fence())).expect("it is shown");
    assert_eq!(holder.mode, Mode::Shared);
    let released = other.break_lock(name.as_str(), holder.token.expect("token")).await.expect("break");
    assert!(matches!(released, Release::Released { .. }), "{released:?}");
    assert!(matches!(one.release().await.expect("release"), Outcome::NotHeld(_)));
    assert_eq!(two.release().await.expect("release"), Outcome::Released);
}

/// What is left of readers whose lock was freed by hand comes to no new life with the next ones.
async fn members_of_a_group_that_ended_are_lost(ctx: Arc<Ctx>) {
    let (store, mut raw, writer) = (ctx.store().await, ctx.raw().await, claim());
    let mine = shared(&writer, Mode::Shared);
    granted(&store, &mine).await;
    let by_hand = "UPDATE resource_lock SET expires = NULL WHERE resource_name = ?";
    sqlx::query(by_hand).bind(mine.key.as_str().as_bytes()).execute(&mut raw).await.expect("freed");
    assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Gone);
    hold(&store, &writer).await;
    assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Taken);
    free(&store, &writer).await;
    granted(&store, &shared(&mine, Mode::Shared)).await;
    assert_eq!(lost(renew(&store, &renewal(&mine)).await), LossReason::Taken);
    assert_eq!(store.release(&mine).await.expect("release"), Release::NotHeld(LossReason::Taken));
}

/// It is free when its own lease is over, however long others last; and its holder can't extend it then.
async fn a_lapsed_permit_is_free_again(ctx: Arc<Ctx>) {
    let (store, mode) = (ctx.store().await, Mode::Permit { limit: TWO });
    let short = shared(&claim(), mode);
    let (long, late) = (shared(&short, mode), shared(&short, mode));
    granted(&store, &long).await;
    // A quarter of it is the time for an answer.
    let ttl = Duration::from_secs(3);
    assert!(matches!(take(&store, &short, ttl).await, Attempt::Granted(_)));
    let held = contended(take(&store, &late, SOON).await);
    let left = held.retry_after.expect("a time");
    assert!(left <= ttl, "{left:?}");
    tokio::time::sleep(left).await;
    assert_eq!(lost(renew(&store, &renewal(&short)).await), LossReason::Taken);
    granted(&store, &late).await;
    contended(take(&store, &shared(&short, mode), SOON).await);
    let error = store.acquire(&request(&shared(&short, Mode::Permit { limit: NonZeroU32::MIN }))).await;
    let error = error.expect_err("another limit");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::InvalidInput, Effect::None), "{error}");
}

async fn each_grant_has_its_own_fence(ctx: Arc<Ctx>) {
    let (store, writer, mut last) = (ctx.store().await, claim(), lockkit_core::Fence::NONE);
    for mode in [Mode::Shared, Mode::Permit { limit: TWO }] {
        let (one, two) = (shared(&writer, mode), shared(&writer, mode));
        for claim in [&one, &two] {
            let hold = granted(&store, claim).await;
            assert!(hold.fence > last, "{} after {last}", hold.fence);
            // The same claim again is the same grant.
            assert_eq!(granted(&store, claim).await.fence, hold.fence);
            last = hold.fence;
        }
        for claim in [one, two] {
            assert!(matches!(store.release(&claim).await, Ok(Release::Released { .. })));
        }
        let fence = hold(&store, &writer).await.fence;
        assert!(fence > last, "{fence} after {last}");
        last = fence;
        free(&store, &writer).await;
    }
}

async fn shares_are_renewed_together(ctx: Arc<Ctx>) {
    let (store, mut claims) = (ctx.store().await, Vec::new());
    for _ in 0..3 {
        let first = claim();
        claims.extend((0..30).map(|_| shared(&first, Mode::Shared)));
    }
    for claim in &claims {
        granted(&store, claim).await;
    }
    let gone = claims.len() / 2;
    assert!(matches!(store.release(&claims[gone]).await, Ok(Release::Released { .. })));
    let renewals: Vec<_> = claims.iter().map(renewal).collect();
    for (at, answer) in store.renew(&renewals).await.into_iter().enumerate() {
        match answer.expect("renew") {
            Renewed::Held(hold) => assert!(at != gone && hold.claim == claims[at]),
            Renewed::Lost(reason) => assert_eq!((at, reason), (gone, LossReason::Taken)),
        }
    }
    let states =
        store.inspect(&Query::Keys(vec![claims[0].key.clone(), claims[gone].key.clone()])).await.expect("inspect");
    assert_eq!(states.iter().map(|state| state.holders.len()).collect::<Vec<_>>(), [30, 29]);
    let states = store.inspect(&Query::Prefix(claims[0].key.as_str().to_owned())).await.expect("inspect");
    assert_eq!(states.iter().map(|state| state.holders.len()).collect::<Vec<_>>(), [30]);
}

/// For one kind of claims and for the other: a lease that was given for long may be asked for again for a short time.
async fn a_repeated_request_shortens_no_lease(ctx: Arc<Ctx>) {
    let store = ctx.store().await;
    for mode in [Mode::Exclusive, Mode::Shared] {
        let mine = shared(&claim(), mode);
        let fence = granted(&store, &mine).await.fence;
        match take(&store, &mine, Duration::from_secs(8)).await {
            Attempt::Granted(hold) => assert_eq!(hold.fence, fence),
            other => panic!("not granted: {other:?}"),
        }
        let states = store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect");
        let left = states[0].holders[0].remaining.expect("a time");
        assert!(left > Duration::from_secs(10), "{mode:?}: {left:?}");
        let held = contended(take(&store, &shared(&mine, Mode::Permit { limit: TWO }), SOON).await);
        assert!(held.retry_after.is_some_and(|left| left > Duration::from_secs(10)), "{mode:?}: {held:?}");
    }
}

/// Also one that looks like what stands for readers.
async fn a_holder_has_the_name_that_it_gave(ctx: Arc<Ctx>) {
    let store = ctx.store().await;
    for (mode, order) in [(Mode::Exclusive, Order::Any), (Mode::Exclusive, Order::Fifo), (Mode::Shared, Order::Fifo)] {
        let mine = shared(&claim(), mode);
        let mut request = request(&mine);
        (request.order, request.holder) = (order, HolderInfo::new("##readers"));
        assert!(matches!(store.acquire(&request).await, Ok(Attempt::Granted(_))));
        let permit = shared(&mine, Mode::Permit { limit: TWO });
        let held = contended(take(&store, &permit, SOON).await);
        assert_eq!(held.holder.expect("a holder").as_str(), "##readers", "{mode:?} {order:?}");
    }
}

/// One that is to take the place of a lease that is over learns that nobody has the lock, and not who had it last.
async fn a_lock_that_is_free_has_no_holder(ctx: Arc<Ctx>) {
    let (store, mut raw) = (ctx.store().await, ctx.raw().await);
    for mode in [Mode::Exclusive, Mode::Shared] {
        let (mine, other) = (claim(), claim());
        let mut in_place = request(&Claim { mode, ..rival(&mine) });
        in_place.from = Some(mine.token);
        hold(&store, &mine).await;
        free(&store, &mine).await;
        assert!(contended(store.acquire(&in_place).await.expect("ask")).holder.is_none(), "{mode:?}: released");
        hold(&store, &mine).await;
        let lapse = "UPDATE resource_lock SET expires = UTC_TIMESTAMP(6) WHERE resource_name = ?";
        sqlx::query(lapse).bind(mine.key.as_str().as_bytes()).execute(&mut raw).await.expect("lapse");
        assert!(contended(store.acquire(&in_place).await.expect("ask")).holder.is_none(), "{mode:?}: lapsed");
        hold(&store, &Claim { key: mine.key.clone(), ..other }).await;
        let held = contended(store.acquire(&in_place).await.expect("ask"));
        assert_eq!(held.holder.expect("a holder").as_str(), "test: holder", "{mode:?}");
    }
}

/// What was begun is rolled back. The next attempt is as good as the first, on the connection that there is.
/// Rows are kept, for their removal takes a connection of its own.
async fn a_transaction_that_keeps_the_row_is_an_error(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    let mut raw = raw(&server).await;
    let mine = shared(&claim(), Mode::Shared);
    granted(&store, &mine).await;
    let connected = status(&mut raw, "Connections").await;
    lock_rows(&mut raw, &[&mine]).await;
    let mut again = request(&shared(&mine, Mode::Shared));
    again.order = Order::Fifo;
    let error = store.acquire(&again).await.expect_err("the row is locked");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::None), "{error}");
    let error = renew(&store, &renewal(&mine)).await.expect_err("the row is locked");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    end(&mut raw).await;
    granted(&store, &again.claim).await;
    assert!(is_held(&renew(&store, &renewal(&mine)).await));
    assert_eq!(status(&mut raw, "Connections").await, connected, "a new connection was made");
}

/// What a store warns of that has exclusive locks alone. Of the test's server it warns, too.
fn of_claims(store: &MySqlStore) -> Vec<&String> {
    store.warnings().iter().filter(|warning| warning.contains("no shared locks")).collect()
}

async fn is_exclusive_only(store: &MySqlStore) {
    let capability = &store.info().capability;
    assert!(!capability.shared && !capability.permits && !capability.fifo);
    assert_eq!(of_claims(store).len(), 1, "{:?}", store.warnings());
    let mine = claim();
    hold(store, &mine).await;
    assert!(is_held(&renew(store, &renewal(&mine)).await));
    assert!(store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect")[0].waiters.is_none());
    assert_eq!(store.inspect(&Query::Prefix(mine.key.as_str().to_owned())).await.expect("inspect").len(), 1);
    free(store, &mine).await;
    store.remove_unused(Duration::from_secs(3600)).await.expect("nothing to remove");
    let mut ordered = request(&mine);
    ordered.order = Order::Fifo;
    assert_eq!(store.acquire(&ordered).await.expect_err("no order").kind(), ErrorKind::Unsupported);
}

/// As an installation is that was made before there were claims, and one of a table whose name leaves no room.
async fn without_the_second_table_exclusive_locks_work(ctx: Arc<Ctx>) {
    let (config, server) = (ctx.config().await, ctx.server().await);
    for table in ["old_installation", &"x".repeat(64)] {
        server.admin(&schema::ddl(table).expect("ddl")).await.expect("table");
        let config = config.clone().table(table);
        is_exclusive_only(&MySqlStore::connect(config.clone()).await.expect("connect")).await;
    }
    let store = MySqlStore::connect(config.table("old_installation").create(true)).await.expect("connect");
    assert!(store.info().capability.fifo && of_claims(&store).is_empty(), "{:?}", store.warnings());
}

/// One without an index that the statements name, or with another one of that name, and one that lacks a column.
async fn a_second_table_of_another_shape_is_not_used(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    for (change, what) in [
        ("DROP KEY turns", "it has no key turns (lock_id,place,expires)"),
        ("ADD KEY turns (lock_id, expires)", "it has no key turns (lock_id,place,expires)"),
        (
            "DROP KEY turns, ADD KEY turns (lock_id, place, expires), DROP PRIMARY KEY",
            "it has no key PRIMARY (lock_id,token)",
        ),
        ("ADD PRIMARY KEY (lock_id, token), DROP COLUMN kept", "kept is missing"),
    ] {
        server.admin(&format!("ALTER TABLE resource_lock_claim {change}")).await.expect("another shape");
        let store = MySqlStore::connect(config(&server)).await.expect("connect");
        is_exclusive_only(&store).await;
        assert!(of_claims(&store)[0].contains(what), "{change}: {:?}", store.warnings());
    }
}

async fn a_user_who_may_not_make_tables_is_told(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let admin = async |statement: &str| server.admin(statement).await.expect("admin");
    admin("CREATE USER app@'%' IDENTIFIED BY 'pw'").await;
    admin("GRANT SELECT, INSERT, UPDATE, DELETE ON lockkit.resource_lock TO app@'%'").await;
    let config: MySqlConfig = config(&server).username("app").password("pw").create(true);
    // It is there, but hidden.
    is_exclusive_only(&MySqlStore::connect(config.clone()).await.expect("connect")).await;
    admin("GRANT SELECT, INSERT, UPDATE ON lockkit.resource_lock_claim TO app@'%'").await;
    is_exclusive_only(&MySqlStore::connect(config.clone()).await.expect("connect")).await;
    admin("GRANT DELETE ON lockkit.resource_lock_claim TO app@'%'").await;
    let store = MySqlStore::connect(config).await.expect("connect");
    granted(&store, &shared(&claim(), Mode::Shared)).await;
    admin("DROP TABLE resource_lock_claim").await;
    is_exclusive_only(&MySqlStore::connect(crate::support::config(&server)).await.expect("connect")).await;
}

/// Of those that died, and of a lock whose row is gone.
async fn what_is_left_of_claims_is_removed(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server)).await.expect("connect");
    let (kept, lapsed, orphan) = (claim(), claim(), claim());
    for claim in [&kept, &lapsed, &orphan] {
        let share = shared(claim, Mode::Shared);
        granted(&store, &share).await;
        // One that is alone and asks again has a claim from then on.
        granted(&store, &share).await;
    }
    let id = |claim: &Claim| format!("(SELECT id FROM resource_lock WHERE resource_name = '{}')", claim.key);
    let age = |claim: &Claim| {
        format!("UPDATE resource_lock_claim SET expires = expires - INTERVAL 1 DAY WHERE lock_id = {}", id(claim))
    };
    for claim in [&lapsed, &orphan] {
        server.admin(&age(claim)).await.expect("age");
    }
    let gone = format!("DELETE FROM resource_lock WHERE resource_name = '{}'", orphan.key);
    server.admin(&gone).await.expect("gone");
    store.remove_unused(Duration::from_secs(3600)).await.expect("removed");
    let left = server.admin("SELECT COUNT(*) FROM resource_lock_claim").await.expect("count");
    assert_eq!(left[0][0].as_deref(), Some("1"));
    let states = store.inspect(&Query::Keys(vec![kept.key.clone()])).await.expect("inspect");
    assert_eq!(states[0].holders.len(), 1);
}

async fn what_a_store_can_do_is_known_without_a_server(ctx: Arc<Ctx>) {
    assert_eq!(ctx.store().await.info().capability, MySqlStore::CAPABILITY);
}
