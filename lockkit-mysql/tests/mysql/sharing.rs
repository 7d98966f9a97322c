//! Those that come to others that share a lock, and those that leave them.

use std::{pin::pin, sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, LockStore, Mode, Order, Query, Release};
use lockkit_mysql::MySqlStore;
use lockkit_testkit::faults::{Direction, poll_until};

use crate::{
    kinds::{SOON, TWO, granted, shared, take},
    support::{
        Ctx, claim, config, contended, eventually, free, hold, is_held, proxied, raw, renew, renewal, request, status,
        tests,
    },
};

tests! {
    one_that_comes_to_sharers_or_leaves_them_heeds_the_queue
    a_sharer_that_comes_or_leaves_removes_what_has_lapsed
    one_among_sharers_comes_and_goes_by_few_statements
    to_come_to_sharers_and_to_leave_them_can_be_dropped_at_any_moment
    to_take_note_of_a_grant_can_be_dropped_at_any_moment
}

/// A writer that waits is not passed by readers, and gets the lock when the last of them goes; so with one that waits for a permit.
async fn one_that_comes_to_sharers_or_leaves_them_heeds_the_queue(ctx: Arc<Ctx>) {
    let store = ctx.store().await;
    for mode in [Mode::Shared, Mode::Permit { limit: TWO }] {
        let writer = claim();
        let [one, two, late] = [(); 3].map(|()| shared(&writer, mode));
        granted(&store, &one).await;
        granted(&store, &two).await;
        let waits = AcquireRequest { order: Order::Fifo, wait: SOON, ..request(&writer) };
        contended(store.acquire(&waits).await.expect("acquire"));
        free(&store, &two).await;
        contended(take(&store, &late, SOON).await);
        free(&store, &one).await;
        let states = store.inspect(&Query::Keys(vec![writer.key.clone()])).await.expect("inspect");
        assert_eq!(states[0].waiters, None, "the one that waits was not served");
        lockkit_testkit::calls::granted(store.acquire(&waits).await.expect("acquire"));
        free(&store, &writer).await;
    }
}

/// While there is always somebody who shares the lock, and nobody waits for it, no other step comes along that would.
async fn a_sharer_that_comes_or_leaves_removes_what_has_lapsed(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (store, mut raw) = (MySqlStore::connect(config(&server)).await.expect("connect"), raw(&server).await);
    let mut claims = async |lapsed: &str| {
        let ask = format!("SELECT COUNT(*) FROM resource_lock_claim WHERE {lapsed}");
        sqlx::query_scalar::<_, i64>(sqlx::AssertSqlSafe(ask)).fetch_one(&mut raw).await.expect("count")
    };
    for comes in [true, false] {
        let dead = shared(&claim(), Mode::Shared);
        let [one, two] = [(); 2].map(|()| shared(&dead, Mode::Shared));
        granted(&store, &one).await;
        let ttl = Duration::from_millis(600);
        assert!(matches!(take(&store, &dead, ttl).await, Attempt::Granted(_)));
        if !comes {
            granted(&store, &two).await;
        }
        eventually("it lapses", async || claims("expires <= UTC_TIMESTAMP(6)").await == 1).await;
        if comes {
            granted(&store, &two).await;
            assert_eq!(claims("TRUE").await, 2);
        }
        free(&store, &two).await;
        assert_eq!(claims("TRUE").await, 1);
        free(&store, &one).await;
    }
}

async fn one_among_sharers_comes_and_goes_by_few_statements(ctx: Arc<Ctx>) {
    let server = ctx.private(&[]).await;
    let (store, mut counts) = (MySqlStore::connect(config(&server)).await.expect("connect"), raw(&server).await);
    for mode in [Mode::Shared, Mode::Permit { limit: TWO.saturating_add(1) }] {
        let of = claim();
        let holders = [(); 2].map(|()| shared(&of, mode));
        for holder in &holders {
            granted(&store, holder).await;
        }
        let before = status(&mut counts, "Questions").await;
        for _ in 0..10 {
            let one = shared(&holders[0], mode);
            granted(&store, &one).await;
            free(&store, &one).await;
        }
        let each = (status(&mut counts, "Questions").await - before) / 10;
        println!("{mode:?}: {each} statements to come and go");
        assert!(each < 30, "{each} statements");
        for holder in &holders {
            free(&store, holder).await;
        }
    }
}

/// The replies are held back from then on; the next release finds what came of it.
async fn to_come_to_sharers_and_to_leave_them_can_be_dropped_at_any_moment(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let store = MySqlStore::connect(config).await.expect("connect");
    let of = claim();
    let [one, two] = [(); 2].map(|()| shared(&of, Mode::Shared));
    granted(&store, &one).await;
    granted(&store, &two).await;
    let holders = async || {
        let states = store.inspect(&Query::Keys(vec![of.key.clone()])).await.expect("inspect");
        states[0].holders.len()
    };
    for leaves in [false, true] {
        let mut has_ended = false;
        for polls in 1..100 {
            let next = shared(&of, Mode::Shared);
            if leaves {
                granted(&store, &next).await;
            }
            {
                let asks = async {
                    if leaves {
                        drop(store.release(&next).await);
                    } else {
                        drop(store.acquire(&AcquireRequest { order: Order::Fifo, ..request(&next) }).await);
                    }
                };
                let hold_back = || proxy.hold(Direction::ToClient);
                has_ended = poll_until(pin!(asks), polls, hold_back).await.is_some();
            }
            proxy.release(Direction::ToClient);
            store.release(&next).await.expect("release");
            assert_eq!(holders().await, 2, "dropped at poll {polls}, leaves: {leaves}");
            if has_ended {
                assert!(polls > 1, "it is a round trip at least");
                break;
            }
        }
        assert!(has_ended, "it does not end");
    }
    for holder in [&one, &two] {
        assert!(is_held(&renew(&store, &renewal(holder)).await));
        free(&store, holder).await;
    }
    hold(&store, &of).await;
}

/// The end of another's lease has given it the lock.
async fn to_take_note_of_a_grant_can_be_dropped_at_any_moment(ctx: Arc<Ctx>) {
    let (proxy, config) = proxied(ctx.server().await).await;
    let (store, other) = (MySqlStore::connect(config).await.expect("connect"), ctx.store().await);
    let of = claim();
    for polls in 1..100 {
        let [first, next] = [(); 2].map(|()| shared(&of, Mode::Exclusive));
        granted(&other, &first).await;
        let waits = AcquireRequest { order: Order::Fifo, wait: SOON, ..request(&next) };
        contended(store.acquire(&waits).await.expect("acquire"));
        free(&other, &first).await;
        let asked = {
            let asking = pin!(store.acquire(&waits));
            poll_until(asking, polls, || proxy.hold(Direction::ToClient)).await
        };
        proxy.release(Direction::ToClient);
        if let Some(asked) = asked {
            assert!(matches!(asked, Ok(Attempt::Granted(_))), "{asked:?}");
            assert!(polls > 1, "it is a round trip at least");
            return free(&store, &next).await;
        }
        let released = store.release(&next).await.expect("release");
        assert!(matches!(released, Release::Released { .. }), "dropped at poll {polls}: {released:?}");
        let last = shared(&of, Mode::Exclusive);
        hold(&other, &last).await;
        free(&other, &last).await;
    }
    panic!("it does not end");
}
