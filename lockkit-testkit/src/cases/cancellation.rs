//! Futures that are dropped, guards that outlive their runtime.

use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use lockkit_core::{ErrorKind, Outcome};

use super::{
    CaseResult, Ctx, LONG, SHORT, abandon_after, cases, locker, request, seen, take, take_in_the_end, wait_for_waiter,
};

cases! { "cancellation":
    an_abandoned_acquisition_leaves_nothing [NOTHING] "An acquisition dropped at any moment leaves the lock free (R8)."
    an_acquisition_polled_once_leaves_nothing [NOTHING] "An acquisition dropped after its first poll leaves the lock free (R8)."
    a_forgotten_acquisition_lapses [TTL] "An acquisition dropped at any moment and never released lapses by its ttl."
    an_abandoned_waiter_does_not_stall_others [NOTHING] "A waiter that gave up does not hold up those behind it."
    an_abandoned_waiter_leaves_no_trace [NOTHING] "After a waiter gave up and the lock changed hands, nobody is shown to wait."
    an_abandoned_release_still_releases [NOTHING] "A release whose future is dropped goes on in the background."
    a_guard_may_outlive_its_runtime [TTL] "Dropping a guard after its runtime ended does not panic; the lease lapses."
    a_shutdown_drains [NOTHING] "After a shutdown everything dropped before is free, and new acquisitions are refused."
}

async fn assert_soon_free(ctx: &Ctx, name: &str) -> CaseResult {
    let free = ctx.locker().await?.lock(name).ttl(LONG).acquire_within(Duration::from_secs(5)).await?;
    let guard = free.ok_or_else(|| format!("{name} was still held 5 s later"))?;
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn an_abandoned_acquisition_leaves_nothing(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    for round in 0..200_u64 {
        let lock = locker.lock(&name).ttl(LONG);
        let patience = Duration::from_micros(round * 5);
        drop(abandon_after(patience, lock.acquire()).await);
        if round % 20 == 19 {
            assert_soon_free(&ctx, &name).await?;
        }
    }
    locker.shutdown(Duration::from_secs(5)).await?;
    let other = ctx.locker().await?;
    assert_eq!(take(&other, &name, LONG).await?.release().await?, Outcome::Released);
    Ok(())
}

async fn an_acquisition_polled_once_leaves_nothing(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    for _ in 0..50 {
        let lock = locker.lock(&name).ttl(LONG);
        let mut acquire = pin!(lock.acquire());
        let polled = acquire.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        drop(match polled {
            Poll::Ready(guard) => Some(guard?),
            Poll::Pending => None,
        });
    }
    assert_soon_free(&ctx, &name).await
}

async fn a_forgotten_acquisition_lapses(ctx: Ctx) -> CaseResult {
    let store = ctx.store().await?;
    let mut keys = Vec::new();
    for round in 0..60_u64 {
        let key = ctx.key()?;
        // What is left of a process that crashed: whatever was sent until then, and no release.
        let forgotten = request(&key, SHORT)?;
        drop(abandon_after(Duration::from_micros(round * 5), store.acquire(&forgotten)).await);
        keys.push(key);
    }
    tokio::time::sleep(SHORT).await;
    let locker = ctx.locker().await?;
    for key in &keys {
        let free = locker.lock(key.as_str()).ttl(LONG).acquire_within(Duration::from_secs(6)).await?;
        assert!(free.is_some(), "a lock whose acquisition was cut off never became free");
    }
    Ok(())
}

async fn an_abandoned_waiter_does_not_stall_others(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    for locker in [&mine, &other] {
        for _ in 0..10 {
            let lock = locker.lock(&name).ttl(LONG);
            drop(tokio::time::timeout(Duration::from_millis(20), lock.acquire()).await);
        }
    }
    let lock = other.lock(&name).ttl(LONG);
    let waiter = tokio::spawn(async move { lock.acquire_within(Duration::from_secs(10)).await });
    wait_for_waiter(&mine.lock(&name)).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    drop(waiter.await??.ok_or("the waiter was stalled by those that left")?);
    assert_soon_free(&ctx, &name).await
}

async fn an_abandoned_waiter_leaves_no_trace(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    for _ in 0..10 {
        let lock = other.lock(&name).ttl(LONG);
        drop(tokio::time::timeout(Duration::from_millis(20), lock.acquire()).await);
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    let given_up = Instant::now();
    // A store may go on listening for the lock until it is released the next time.
    while let Some(1..) = seen(&mine.lock(&name)).await?.waiters {
        assert!(given_up.elapsed() < Duration::from_secs(8), "somebody is shown to wait, but nobody does");
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(take(&mine, &name, LONG).await?.release().await?, Outcome::Released);
    }
    Ok(())
}

async fn an_abandoned_release_still_releases(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    for round in 0..50_u64 {
        let guard = locker.lock(&name).ttl(LONG).acquire_within(Duration::from_secs(5)).await?.ok_or("still held")?;
        drop(abandon_after(Duration::from_micros(round * 5), guard.release()).await);
    }
    assert_soon_free(&ctx, &name).await
}

async fn a_guard_may_outlive_its_runtime(ctx: Ctx) -> CaseResult {
    let name = ctx.name();
    let (backend, own_name) = (std::sync::Arc::clone(&ctx.backend), name.clone());
    let guard = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let guard = runtime.block_on(async {
            let locker = locker(backend.open().await.expect("the store is there"));
            take_in_the_end(&locker, &own_name, SHORT).await.expect("it is free")
        });
        drop(runtime);
        guard
    });
    let guard = guard.join().map_err(|_| "the thread panicked")?;
    std::thread::spawn(move || drop(guard)).join().map_err(|_| "dropping the guard panicked")?;
    let free = ctx.locker().await?.lock(&name).ttl(LONG).acquire_within(SHORT + Duration::from_secs(6)).await?;
    assert!(free.is_some(), "the lease did not lapse");
    Ok(())
}

async fn a_shutdown_drains(ctx: Ctx) -> CaseResult {
    let (mine, other) = (ctx.locker().await?, ctx.locker().await?);
    let names: Vec<_> = (0..50).map(|_| ctx.name()).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(take(&mine, name, LONG).await?);
    }
    let kept = guards.pop().ok_or("no guard")?;
    drop(guards);
    mine.shutdown(Duration::from_secs(10)).await?;
    for name in &names[..names.len() - 1] {
        assert_eq!(take(&other, name, LONG).await?.release().await?, Outcome::Released);
    }
    assert!(kept.is_held(), "a shutdown must not take a guard away");
    assert_eq!(mine.lock(ctx.name()).try_acquire().await.expect_err("closed").kind(), ErrorKind::Closed);
    assert_eq!(kept.release().await?, Outcome::Released);
    Ok(())
}
