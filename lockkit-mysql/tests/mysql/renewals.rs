//! Renewals: one statement where all leases are still held, and the grants that they tell of.

use std::{num::NonZeroU32, sync::Arc, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, ErrorKind, LockStore, LossReason, Mode, Order, Query, Renewal, Renewed,
};
use lockkit_mysql::MySqlStore;
use lockkit_testkit::{faults::Direction, servers::MySqlServer};

use crate::support::{
    Ctx, TTL, attempt, claim, config, contended, end, eventually, free, hold, is_held, lock_rows, lost, proxied, raw,
    renew, renewal, request, rival, status, tests,
};

tests! {
    a_renewal_reads_only_if_a_lease_is_missing
    a_renewal_of_another_store_s_claim_tells_of_its_grant
    a_renewal_tells_of_the_last_grant_although_its_answer_was_lost
    a_renewal_that_waited_for_a_row_shortens_no_lease
    a_renewal_for_a_shorter_time_shortens_no_lease
    a_repeated_request_that_extended_nothing_is_no_grant
    rows_that_others_lock_cost_no_lease_on_other_terms_its_time
}

/// How many statements the server has run that read, and that update, locks.
async fn statements(server: &MySqlServer) -> (u64, u64) {
    let names = "'Com_select', 'Com_update', 'Com_update_multi'";
    let rows = server.admin(&format!("SHOW GLOBAL STATUS WHERE Variable_name IN ({names})")).await;
    let rows = rows.expect("ask");
    let number = |name: &str| {
        let row = rows.iter().find(|row| row[0].as_deref() == Some(name)).expect("a counter");
        row[1].as_deref().expect("a value").parse::<u64>().expect("a number")
    };
    (number("Com_select"), number("Com_update") + number("Com_update_multi"))
}

async fn a_renewal_reads_only_if_a_lease_is_missing(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let store = MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    let claims: Vec<_> = (0..20).map(|_| claim()).collect();
    let mut holds = Vec::new();
    for claim in &claims {
        holds.push(hold(&store, claim).await);
    }
    let renewals: Vec<_> = claims.iter().map(renewal).collect();
    // There is no time to wait for the row of a lease as short as the second one.
    let short = renewals.iter().map(|long| Renewal { ttl: Duration::from_secs(5), ..long.clone() }).collect::<Vec<_>>();
    let before = statements(&server).await;
    for renewals in [&renewals, &renewals, &short] {
        for (answer, hold) in store.renew(renewals).await.into_iter().zip(&holds) {
            let Renewed::Held(again) = answer.expect("renew") else { panic!("it is held") };
            assert_eq!((&again.claim, again.fence, again.span, again.depth), (&hold.claim, hold.fence, hold.span, 1));
            assert!(again.until > hold.until || renewals[0].ttl < TTL);
        }
    }
    let after = statements(&server).await;
    assert_eq!((after.0 - before.0, after.1 - before.1), (0, 3), "reads and updates");

    let other = MySqlStore::connect(config(&server).keep_rows(true)).await.expect("connect");
    free(&other, &claims[3]).await;
    free(&other, &claims[5]).await;
    hold(&other, &rival(&claims[5])).await;
    let before = statements(&server).await;
    for (number, answer) in store.renew(&renewals).await.into_iter().enumerate() {
        match number {
            3 => assert_eq!(lost(answer), LossReason::Gone),
            5 => assert_eq!(lost(answer), LossReason::Taken),
            _ => assert!(matches!(answer, Ok(Renewed::Held(_))), "{number}: {answer:?}"),
        }
    }
    let after = statements(&server).await;
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1), "reads and updates");
    // One claim twice is one row.
    let twice = store.renew(&[renewal(&claims[0]), renewal(&claims[0])]).await;
    assert!(twice.iter().all(|answer| matches!(answer, Ok(Renewed::Held(_)))), "{twice:?}");
}

async fn a_renewal_of_another_store_s_claim_tells_of_its_grant(ctx: Arc<Ctx>) {
    let (store, other, mine) = (ctx.store().await, ctx.store().await, claim());
    let mut asked = request(&mine);
    asked.fence.span = 7;
    let Attempt::Granted(hold) = store.acquire(&asked).await.expect("acquire") else { panic!("it was free") };
    for _ in 0..2 {
        match renew(&other, &renewal(&mine)).await.expect("renew") {
            Renewed::Held(again) => assert_eq!((again.fence, again.span), (hold.fence, 7)),
            other => panic!("{other:?}"),
        }
    }
}

/// A claim that is asked for again when its lease has run out gets another grant.
async fn a_renewal_tells_of_the_last_grant_although_its_answer_was_lost(ctx: Arc<Ctx>) {
    let (server, mine) = (ctx.server().await, claim());
    let (proxy, config) = proxied(server).await;
    let store = MySqlStore::connect(config.keep_rows(true)).await.expect("connect");
    let first = hold(&store, &mine).await;
    let lapse = "UPDATE resource_lock SET expires = UTC_TIMESTAMP(6) WHERE resource_name = ?";
    let lapsed = sqlx::query(lapse).bind(mine.key.as_str().as_bytes()).execute(&mut ctx.raw().await).await;
    lapsed.expect("lapse");
    proxy.hold(Direction::ToClient);
    let asked = tokio::time::timeout(Duration::from_millis(200), attempt(&store, &mine)).await;
    assert!(asked.is_err(), "the reply was held back: {asked:?}");
    proxy.release(Direction::ToClient);
    match renew(&store, &renewal(&mine)).await.expect("renew") {
        Renewed::Held(again) => assert!(again.fence > first.fence, "{} is of the grant before", again.fence),
        other => panic!("{other:?}"),
    }
}

/// When a lease ends, as its row says.
async fn end_of(server: &MySqlServer, claim: &Claim) -> String {
    let ask = format!("SELECT expires FROM lockkit.resource_lock WHERE resource_name = '{}'", claim.key);
    server.admin(&ask).await.expect("ask").remove(0).remove(0).expect("it is held")
}

/// Renewals of one lease overlap: the engine asks again when an answer is late. The one that waits for another lease's row
/// has the older time, and comes to the row after the one that was answered.
async fn a_renewal_that_waited_for_a_row_shortens_no_lease(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let config = config(&server).timeout(Duration::from_secs(4));
    let store = Arc::new(MySqlStore::connect(config).await.expect("connect"));
    let (mut counts, mut raw) = (raw(&server).await, raw(&server).await);
    let mut claims = [claim(), claim()];
    claims.sort_by(|one, other| one.key.cmp(&other.key));
    for claim in &claims {
        hold(&store, claim).await;
    }
    lock_rows(&mut raw, &[&claims[0]]).await;
    let both = {
        let (store, renewals) = (Arc::clone(&store), claims.each_ref().map(renewal));
        tokio::spawn(async move { store.renew(&renewals).await })
    };
    let waits = async || status(&mut counts, "Innodb_row_lock_current_waits").await == 1;
    eventually("it waits for the row", waits).await;
    assert!(is_held(&renew(&store, &renewal(&claims[1])).await));
    let believed = end_of(&server, &claims[1]).await;
    end(&mut raw).await;
    drop(both.await.expect("no panic"));
    let left = end_of(&server, &claims[1]).await;
    assert!(left >= believed, "the lease ends at {left}, and its holder believes in it until {believed}");
}

async fn a_renewal_for_a_shorter_time_shortens_no_lease(ctx: Arc<Ctx>) {
    let store = ctx.store().await;
    for mode in [Mode::Exclusive, Mode::Shared, Mode::Permit { limit: NonZeroU32::MIN }] {
        let mine = Claim { mode, ..claim() };
        let mut asked = request(&mine);
        asked.order = Order::Fifo;
        assert!(matches!(store.acquire(&asked).await, Ok(Attempt::Granted(_))));
        let short = Renewal { ttl: Duration::from_secs(1), ..renewal(&mine) };
        assert!(is_held(&renew(&store, &short).await));
        let other = Claim { mode: Mode::Exclusive, ..rival(&mine) };
        let other = contended(attempt(&store, &other).await.expect("acquire"));
        let left = other.retry_after.expect("a time");
        assert!(left > Duration::from_secs(10), "{mode:?}: {left:?}");
        let state = store.inspect(&Query::Keys(vec![mine.key.clone()])).await.expect("inspect").remove(0);
        let left = state.holders[0].remaining.expect("a time");
        assert!(left > Duration::from_secs(10), "{mode:?}: {left:?}");
    }
}

/// Between the statements of a request that is made again the lease may run out, and be there again: a renewal that began earlier
/// comes late, or the server's clock is set back. Here the statement that extends it finds no lease, as it would then.
async fn a_repeated_request_that_extended_nothing_is_no_grant(ctx: Arc<Ctx>) {
    let (server, mine) = (ctx.server().await, claim());
    let (proxy, config) = proxied(server).await;
    proxy.rewrite_requests(|mut bytes| {
        let find = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).position(|window| window == what);
        let (extends, lasts) = (b"GREATEST(expires, ".as_slice(), b"expires > UTC".as_slice());
        if find(&bytes, extends).is_some()
            && let Some(at) = find(&bytes, lasts)
        {
            bytes[at..at + lasts.len()].copy_from_slice(b"expires < UTC");
        }
        bytes
    });
    let store = MySqlStore::connect(config.keep_rows(true)).await.expect("connect");
    hold(&store, &mine).await;
    let error = attempt(&store, &mine).await.expect_err("nothing was extended");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::Unexpected, Effect::Unknown), "{error}");
    free(&store, &mine).await;
}

/// Each of the locked rows is waited for, for a quarter of the ttl.
async fn rows_that_others_lock_cost_no_lease_on_other_terms_its_time(ctx: Arc<Ctx>) {
    let (server, store) = (ctx.server().await, ctx.store().await);
    let claims: Vec<_> = (0..6).map(|_| claim()).collect();
    let ttls = (2000..).map(Duration::from_millis);
    let renewals: Vec<_> = ttls.zip(&claims).map(|(ttl, claim)| Renewal { ttl, ..renewal(claim) }).collect();
    for Renewal { claim, ttl, .. } in &renewals {
        let asked = AcquireRequest { ttl: *ttl, ..request(claim) };
        assert!(matches!(store.acquire(&asked).await, Ok(Attempt::Granted(_))));
    }
    let mut somebody = raw(server).await;
    lock_rows(&mut somebody, &claims[..5].iter().collect::<Vec<_>>()).await;
    let answers = store.renew(&renewals).await;
    assert!(answers[..5].iter().all(Result::is_err), "{answers:?}");
    assert!(matches!(answers[5], Ok(Renewed::Held(_))), "{answers:?}");
    end(&mut somebody).await;
}
