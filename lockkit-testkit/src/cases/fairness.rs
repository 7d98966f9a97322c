//! Who goes first, where a store says that it keeps an order.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{LockKey, LockStore, Outcome, store::PLACE};

use super::{CaseResult, Ctx, LONG, SHORT, cases, grant, line::Waiters, locker, request, take, wait_for_waiters};
use crate::BoxError;

/// How much later than its place may last a dead waiter is skipped at the latest: a store looks for the dead now and then.
const SKIPPED: Duration = Duration::from_secs(6);

cases! { "fairness":
    waiters_are_served_as_they_came [FIFO] "Waiters of different clients get the lock in the order in which they came."
    a_dead_waiter_is_skipped [SERVER_FIFO] "The place of a waiter that died ends after 6 s or with its session, and the next one is served."
    a_try_does_not_overtake [FIFO] "A try while the lock changes hands does not get it before a client that waits for it."
}

async fn waiters_are_served_as_they_came(ctx: Ctx) -> CaseResult {
    let (mine, name) = (ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let mut line = Waiters::before(mine.lock(&name));
    for who in ["1", "2", "3", "4", "5"] {
        line.join(who, ctx.locker().await?.lock(&name).fifo()).await?;
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_eq!(line.finish().await?, ["1", "2", "3", "4", "5"], "they were served in another order than they came");
    Ok(())
}

async fn a_dead_waiter_is_skipped(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (mine, next, name) = (locker(server.open().await?), locker(server.open().await?), ctx.name());
    let (dying, proxy) = server.open_through_proxy().await?;
    let guard = take(&mine, &name, LONG).await?;
    let lasts = longest_lease(&dying, &ctx.key()?).await?;
    let (first, second) = (locker(dying).lock(&name).ttl(lasts).fifo(), next.lock(&name).ttl(LONG).fifo());
    let dead = tokio::spawn(async move { first.acquire().await.map(|_| ()) });
    wait_for_waiters(&mine.lock(&name), 1).await?;
    let waiter = tokio::spawn(async move { second.acquire().await });
    wait_for_waiters(&mine.lock(&name), 2).await?;
    // Nothing of it gets through any more, neither a word nor the end of its connection: so dies a machine.
    proxy.blackhole();
    let died = Instant::now();
    dead.abort();
    assert_eq!(guard.release().await?, Outcome::Released);
    let left = (lasts.max(PLACE) + SKIPPED).saturating_sub(died.elapsed());
    let served = tokio::time::timeout(left, waiter).await;
    let guard =
        served.map_err(|_| format!("{:?} later the next one still waits behind the dead", died.elapsed()))???;
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

/// How long the lease of a client that is gone may stay, and its place where that ends no sooner: a short ttl, or as long as
/// its session.
async fn longest_lease(store: &Arc<dyn LockStore>, key: &LockKey) -> Result<Duration, BoxError> {
    if store.info().capability.liveness.session.is_none() {
        return Ok(SHORT);
    }
    let mut request = request(key, Duration::from_secs(3600))?;
    let asked = store.info().clock.now();
    let hold = grant(store, &mut request).await?;
    store.release(&request.claim).await?;
    Ok(hold.until.since(asked))
}

async fn a_try_does_not_overtake(ctx: Ctx) -> CaseResult {
    let (mine, first, late, name) = (ctx.locker().await?, ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let served = Arc::new(AtomicBool::new(false));
    let (lock, is_served) = (first.lock(&name).ttl(LONG).fifo(), Arc::clone(&served));
    let waiter = tokio::spawn(async move {
        let guard = lock.acquire_within(LONG).await?;
        is_served.store(true, Ordering::SeqCst);
        match guard {
            Some(guard) => guard.release().await.map(|ended| ended == Outcome::Released),
            None => Ok(false),
        }
    });
    wait_for_waiters(&mine.lock(&name), 1).await?;
    let releasing = tokio::spawn(guard.release());
    let (lock, asked) = (late.lock(&name).ttl(LONG).fifo(), Instant::now());
    let guard = loop {
        if let Some(guard) = lock.try_acquire().await? {
            break guard;
        }
        assert!(asked.elapsed() < Duration::from_secs(10), "the lock was never free");
    };
    assert!(served.load(Ordering::SeqCst), "a try overtook the waiter");
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_eq!(releasing.await??, Outcome::Released);
    assert!(waiter.await??, "the waiter was left behind");
    Ok(())
}
