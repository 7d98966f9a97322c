//! How a waiter learns that it is its turn.

use std::time::{Duration, Instant};

use lockkit_core::{Outcome as Ended, Waiting};

use super::{Ctx, LONG, Outcome, SHORT, SLACK, cases, locker, take};

cases! { "waiting":
    a_release_wakes_a_waiter [NOTHING] "A waiter of another client gets the lock soon after its release."
    an_expiry_wakes_a_waiter [TTL] "A waiter gets the lock soon after the holder's lease ran out, although nobody says so."
    two_hundred_waiters_all_get_it [NOTHING] "200 waiters of two clients all get the lock."
    a_lost_wake_up_is_made_good [SERVER] "A waiter whose connection was cut still gets the lock after its release."
}

/// Returns when the client behind `lock` is surely waiting: as far as the store can tell, or else after a while.
async fn wait_for_waiter(lock: &lockkit_core::Lock) -> Outcome {
    for _ in 0..50 {
        if lock.inspect().await?.waiters.is_some_and(|waiters| waiters > 0) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

async fn a_release_wakes_a_waiter(ctx: Ctx) -> Outcome {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let lock = other.lock(&name).ttl(LONG);
    let waiter = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(20)).await });
    wait_for_waiter(&mine.lock(&name)).await?;
    let released = Instant::now();
    assert_eq!(guard.release().await?, Ended::Released);
    assert!(waiter.await??.is_some());
    let limit = match other.info().capability.waiting {
        Waiting::Poll => Duration::from_secs(2),
        _ => SLACK,
    };
    assert!(released.elapsed() < limit, "it took {:?}", released.elapsed());
    Ok(())
}

async fn an_expiry_wakes_a_waiter(ctx: Ctx) -> Outcome {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let started = Instant::now();
    let guard = mine.lock(&name).ttl(SHORT).no_renewal().try_acquire().await?.ok_or("should be free")?;
    assert!(other.lock(&name).acquire_within(Duration::from_secs(20)).await?.is_some());
    assert!(started.elapsed() < SHORT + Duration::from_secs(2), "it took {:?}", started.elapsed());
    assert!(!guard.is_held());
    Ok(())
}

async fn two_hundred_waiters_all_get_it(ctx: Ctx) -> Outcome {
    let (first, second, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&first, &name, LONG).await?;
    let mut waiters = Vec::new();
    for number in 0..200 {
        let lock = if number % 2 == 0 { &first } else { &second }.lock(&name).ttl(LONG);
        waiters.push(tokio::spawn(async move {
            match lock.acquire_within(Duration::from_secs(40)).await? {
                Some(guard) => guard.release().await.map(|ended| ended == Ended::Released),
                None => Ok(false),
            }
        }));
    }
    tokio::task::yield_now().await;
    assert_eq!(guard.release().await?, Ended::Released);
    for waiter in waiters {
        assert!(waiter.await??, "a waiter was left behind");
    }
    Ok(())
}

async fn a_lost_wake_up_is_made_good(ctx: Ctx) -> Outcome {
    let server = ctx.server().await?;
    let (proxied, proxy) = server.open_through_proxy().await?;
    let (mine, other, name) = (locker(server.open().await?), locker(proxied), ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let lock = other.lock(&name).ttl(LONG);
    let waiter = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(30)).await });
    wait_for_waiter(&mine.lock(&name)).await?;
    proxy.hold(crate::faults::Direction::ToClient);
    assert_eq!(guard.release().await?, Ended::Released);
    proxy.cut().await;
    proxy.heal();
    let healed = Instant::now();
    assert!(waiter.await??.is_some(), "the waiter slept through it");
    assert!(healed.elapsed() < Duration::from_secs(8), "it took {:?}", healed.elapsed());
    Ok(())
}
