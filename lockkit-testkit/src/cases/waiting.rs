//! How a waiter learns that it is its turn.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{Lock, Outcome, Waiting};
use tokio::time::sleep;

use super::{
    CaseResult, Ctx, LONG, SHORT, SLACK, UNTOLD, cases, counted::Counted, grant, locker, request, take, wait_for_waiter,
};
use crate::Altered;

cases! { "waiting":
    a_release_wakes_a_waiter [NOTHING] "A waiter of another client gets the lock soon after its release."
    an_expiry_wakes_a_waiter [TTL] "A waiter gets the lock soon after the holder's lease ran out, although nobody says so."
    two_hundred_waiters_all_get_it [NOTHING] "200 waiters of two clients all get the lock."
    waiting_costs_few_calls [NOTHING] "A waiter for a lock that stays held asks the store now and then, not all the time."
    a_holder_is_asked_to_yield [NOTHING] "A holder is shown that a waiter asks for the lock, and not that another one waits without asking, nor that one asked which has it now."
    a_lost_wake_up_is_made_good [SERVER] "A waiter whose connection was cut still gets the lock after its release."
}

async fn a_release_wakes_a_waiter(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let (rounds, mut waited) = (3, Duration::ZERO);
    for _ in 0..rounds {
        let guard = take(&mine, &name, LONG).await?;
        let lock = other.lock(&name).ttl(LONG);
        let waiter = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(8)).await });
        wait_for_waiter(&mine.lock(&name)).await?;
        let released = Instant::now();
        assert_eq!(guard.release().await?, Outcome::Released);
        let woken = waiter.await??;
        waited += released.elapsed();
        let woken = woken.ok_or_else(|| format!("the waiter slept through the release for {waited:?}"))?;
        assert_eq!(woken.release().await?, Outcome::Released);
    }
    // Where a release is told, all of them wait no longer than one does that was not told.
    let limit = match other.info().capability.waiting {
        Waiting::Poll => UNTOLD * rounds,
        _ => UNTOLD,
    };
    assert!(waited < limit, "the waiter slept through the release for {waited:?} in {rounds} rounds");
    Ok(())
}

async fn an_expiry_wakes_a_waiter(ctx: Ctx) -> CaseResult {
    let (store, other, key) = (ctx.store().await?, ctx.locker().await?, ctx.key()?);
    let started = Instant::now();
    // Without a locker: one would release the lease when it is lost, and that would wake the waiter.
    grant(&store, &mut request(&key, SHORT)?).await?;
    let next = other.lock(key.as_str()).acquire_within(Duration::from_secs(8)).await?;
    let waited = started.elapsed();
    assert!(next.is_some() && waited < SHORT + Duration::from_secs(2), "slept through the expiry for {waited:?}");
    Ok(())
}

async fn two_hundred_waiters_all_get_it(ctx: Ctx) -> CaseResult {
    let (first, second, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&first, &name, LONG).await?;
    let mut waiters = Vec::new();
    for number in 0..200 {
        let lock = if number % 2 == 0 { &first } else { &second }.lock(&name).ttl(LONG);
        waiters.push(tokio::spawn(async move {
            match lock.acquire_within(Duration::from_secs(40)).await? {
                Some(guard) => guard.release().await.map(|ended| ended == Outcome::Released),
                None => Ok(false),
            }
        }));
    }
    wait_for_waiter(&first.lock(&name)).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    for waiter in waiters {
        assert!(waiter.await??, "a waiter was left behind");
    }
    Ok(())
}

async fn waiting_costs_few_calls(ctx: Ctx) -> CaseResult {
    let (mine, name) = (ctx.locker().await?, ctx.name());
    let counted = Arc::new(Altered(Counted::new(ctx.store().await?)));
    let other = locker(Arc::<Altered<_>>::clone(&counted));
    let guard = take(&mine, &name, LONG).await?;
    assert!(other.lock(&name).acquire_within(Duration::from_secs(3)).await?.is_none(), "granted twice");
    // Polling slows down to four times a second; a store that can wake its waiters needs less.
    let calls = counted.0.calls();
    assert!(calls <= 40, "the store was asked {calls} times in 3 s, for a lock that nobody released");
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn a_holder_is_asked_to_yield(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let holder = take(&mine, &name, LONG).await?;
    let ask = |lock: Lock| tokio::spawn(async move { lock.acquire_within(LONG).await });
    let silent = ask(mine.lock(&name).ttl(LONG));
    sleep(SLACK).await;
    if holder.yield_requested().await? {
        return Err("the holder was asked, and nobody asks".into());
    }
    let asks = ask(other.lock(&name).ttl(LONG).ask_to_yield());
    let asked = Instant::now();
    while !holder.yield_requested().await? {
        if asked.elapsed() > LONG / 2 {
            return Err("the holder was not asked".into());
        }
        sleep(Duration::from_millis(10)).await;
    }
    silent.abort();
    drop(silent.await);
    assert_eq!(holder.release().await?, Outcome::Released);
    let holder = asks.await??.ok_or("the one that asked was left behind")?;
    if holder.yield_requested().await? {
        return Err("the holder was asked by itself".into());
    }
    assert_eq!(holder.release().await?, Outcome::Released);
    Ok(())
}

async fn a_lost_wake_up_is_made_good(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (proxied, proxy) = server.open_through_proxy().await?;
    let (mine, other, name) = (locker(server.open().await?), locker(proxied), ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let lock = other.lock(&name).ttl(LONG);
    let waiter = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(30)).await });
    wait_for_waiter(&mine.lock(&name)).await?;
    proxy.hold(crate::faults::Direction::ToClient);
    assert_eq!(guard.release().await?, Outcome::Released);
    proxy.cut().await;
    proxy.heal();
    let healed = Instant::now();
    assert!(waiter.await??.is_some(), "the waiter slept through it");
    assert!(healed.elapsed() < Duration::from_secs(8), "it took {:?}", healed.elapsed());
    Ok(())
}
