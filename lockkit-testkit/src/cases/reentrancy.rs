//! Nested holds of one owner.

use std::time::Duration;

use lockkit_core::{ErrorKind, Outcome, Query};

use super::{CaseResult, Ctx, LONG, SHORT, assert_taken, cases, grant, renew, request, seen, wait_for_waiter};

cases! { "reentrancy":
    an_owner_nests [NOTHING] "The same owner gets the lock again, with the same fence; it is free after the last release."
    guards_end_in_any_order [NOTHING] "Nested guards may be released in any order."
    another_owner_is_refused [NOTHING] "Another owner in the same task is another holder."
    without_an_owner_nesting_waits [NOTHING] "Without an owner a nested acquisition waits like any other."
    the_depth_is_shown [NOTHING] "The count of nested holds is readable in the store."
    a_repeated_depth_counts_once [NOTHING] "A nested hold is written as an absolute number: repeating it changes nothing (R5)."
    what_a_nested_hold_can_not_have_is_refused [NOTHING] "A nested acquisition shares the lease: one that asks for another ttl, renewal or max_hold is refused."
    an_owner_that_reads_reads_again [SHARED] "An owner that reads may read again, also while a writer waits, who gets the lock after the last release. The count is readable in the store."
    an_owner_that_reads_can_not_write [SHARED] "An owner that reads is refused as a writer, for it would wait for itself; one that writes may read."
    nesting_in_a_lost_lock_fails [TTL] "When the outer hold is lost a nested acquisition is an error."
}

async fn an_owner_nests(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let owner = mine.owner();
    let lock = owner.lock(&name).ttl(LONG);
    let guards =
        [lock.acquire().await?, lock.acquire().await?, lock.try_acquire().await?.ok_or("refused to its owner")?];
    assert!(guards.iter().all(|guard| guard.fence() == guards[0].fence()), "a nested hold has another fence");
    for guard in guards {
        assert_taken(&other, &name).await?;
        assert_eq!(guard.release().await?, Outcome::Released);
    }
    assert!(other.lock(&name).try_acquire().await?.is_some(), "not free after the last release");
    Ok(())
}

async fn guards_end_in_any_order(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let owner = mine.owner();
    let lock = owner.lock(&name).ttl(LONG);
    let (outer, inner) = (lock.acquire().await?, lock.acquire().await?);
    drop(outer);
    assert!(inner.is_held());
    assert_taken(&other, &name).await?;
    drop(inner);
    assert!(other.lock(&name).acquire_within(Duration::from_secs(5)).await?.is_some());
    Ok(())
}

async fn another_owner_is_refused(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let (first, second) = (locker.owner(), locker.owner());
    let _guard = first.lock(&name).ttl(LONG).acquire().await?;
    assert!(second.lock(&name).try_acquire().await?.is_none());
    Ok(())
}

async fn without_an_owner_nesting_waits(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let _guard = locker.lock(&name).ttl(LONG).acquire().await?;
    assert!(locker.lock(&name).acquire_within(Duration::from_millis(200)).await?.is_none());
    Ok(())
}

async fn the_depth_is_shown(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let owner = locker.owner();
    let _outer = owner.lock(&name).ttl(LONG).acquire().await?;
    let inner = owner.lock(&name).acquire().await?;
    assert_eq!(seen(&locker.lock(&name)).await?.holders[0].depth, 2);
    assert_eq!(inner.release().await?, Outcome::Released);
    assert_eq!(seen(&locker.lock(&name)).await?.holders[0].depth, 1);
    Ok(())
}

async fn a_repeated_depth_counts_once(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    grant(&store, &mut mine).await?;
    for depth in [2, 2, 12, 12, 1] {
        renew(&store, &mine.claim, LONG, depth).await?;
        let state = store.inspect(&Query::Keys(vec![key.clone()])).await?;
        assert_eq!(state[0].holders[0].depth, depth, "a repeated depth was not written as it is");
    }
    Ok(())
}

async fn what_a_nested_hold_can_not_have_is_refused(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let owner = locker.owner();
    let lock = || owner.lock(&name);
    let outer = lock().ttl(LONG).acquire().await?;
    for other in [lock().no_renewal(), lock().max_hold(LONG), lock().ttl(LONG * 2)] {
        let error = other.try_acquire().await.expect_err("the lease is another");
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
    // What it does not set it takes as it is.
    let inner = lock().acquire().await?;
    assert_eq!(seen(&locker.lock(&name)).await?.holders[0].depth, 2, "refused ones count");
    assert_eq!(inner.release().await?, Outcome::Released);
    assert_eq!(outer.release().await?, Outcome::Released);
    let unrenewed = lock().no_renewal().acquire().await?;
    assert!(lock().acquire().await.is_err(), "a hold that is to be renewed, and would not be");
    assert_eq!(unrenewed.release().await?, Outcome::Released);
    Ok(())
}

async fn an_owner_that_reads_reads_again(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let owner = mine.owner();
    let read = owner.rw_lock(&name).read().ttl(LONG);
    let outer = read.acquire().await?;
    let write = other.rw_lock(&name).write().ttl(LONG);
    let writer = tokio::spawn(async move { write.acquire_within(LONG).await });
    wait_for_waiter(&mine.lock(&name)).await?;
    assert!(mine.rw_lock(&name).read().try_acquire().await?.is_none(), "another reader has passed a writer");
    let inner = read.try_acquire().await?.ok_or("its own writer-to-be keeps an owner out")?;
    assert_eq!(inner.fence(), outer.fence(), "a nested hold has another fence");
    let holders = seen(&mine.lock(&name)).await?.holders;
    assert_eq!((holders.len(), holders[0].depth), (1, 2), "{holders:?}");
    assert_eq!(outer.release().await?, Outcome::Released);
    assert!(inner.is_held() && !writer.is_finished(), "one hold is left");
    assert_eq!(inner.release().await?, Outcome::Released);
    assert!(writer.await??.is_some(), "the writer was left behind");
    Ok(())
}

async fn an_owner_that_reads_can_not_write(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let owner = mine.owner();
    let prices = owner.rw_lock(&name);
    let (read, write) = (prices.read().ttl(LONG), prices.write().ttl(LONG));
    let reader = read.acquire().await?;
    for lock in [write.clone(), owner.lock(&name)] {
        let error = lock.acquire_within(LONG).await.expect_err("it would wait for itself");
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
    assert!(other.rw_lock(&name).read().try_acquire().await?.is_some(), "a refused writer keeps readers out");
    assert_eq!(reader.release().await?, Outcome::Released);
    let writer = write.acquire_within(LONG).await?.ok_or("nobody has it")?;
    let within = read.acquire().await?;
    assert_eq!(within.fence(), writer.fence(), "a nested hold has another fence");
    assert_eq!(writer.release().await?, Outcome::Released);
    assert!(other.rw_lock(&name).read().try_acquire().await?.is_none(), "the writer's lease is gone with a hold left");
    assert_eq!(within.release().await?, Outcome::Released);
    Ok(())
}

async fn nesting_in_a_lost_lock_fails(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let owner = locker.owner();
    let lock = owner.lock(&name).ttl(SHORT).no_renewal();
    let outer = lock.acquire().await?;
    outer.lost().await;
    assert_eq!(lock.acquire().await.expect_err("the outer hold is lost").kind(), ErrorKind::Lost);
    drop(outer);
    assert!(lock.acquire_within(Duration::from_secs(5)).await?.is_some(), "a fresh start must be possible");
    Ok(())
}
