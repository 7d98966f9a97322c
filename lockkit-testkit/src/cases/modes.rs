//! Shared locks and permits, where a store has them; an honest refusal where it has not.

use std::num::NonZeroU32;

use lockkit_core::{Claim, ErrorKind, Mode, Order, Outcome, Renewal, Renewed};

use super::{CaseResult, Ctx, LONG, cases};

cases! { "modes":
    readers_share_and_writers_exclude [SHARED] "Any number of readers hold together; a writer excludes them all."
    permits_are_never_exceeded [PERMITS] "At most so many hold a semaphore as it has permits."
    a_differing_permit_count_is_refused [PERMITS] "Users of a semaphore must agree on its permits."
    what_is_not_claimed_is_refused [NOTHING] "What the capability does not claim is answered with Unsupported (R12)."
}

const TWO: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

async fn readers_share_and_writers_exclude(ctx: Ctx) -> CaseResult {
    let (first, second, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let one = first.rw_lock(&name).read().ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    let two = second.rw_lock(&name).read().ttl(LONG).try_acquire().await?.ok_or("readers must share")?;
    assert!(first.rw_lock(&name).write().try_acquire().await?.is_none(), "a writer came in beside readers");
    assert_eq!(one.release().await?, Outcome::Released);
    assert!(first.rw_lock(&name).write().try_acquire().await?.is_none(), "a writer came in beside a reader");
    assert_eq!(two.release().await?, Outcome::Released);
    let writer = first.rw_lock(&name).write().ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    assert!(second.rw_lock(&name).read().try_acquire().await?.is_none(), "a reader came in beside a writer");
    drop(writer);
    Ok(())
}

async fn permits_are_never_exceeded(ctx: Ctx) -> CaseResult {
    let (first, second, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let one = first.semaphore(&name, TWO).ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    let two = second.semaphore(&name, TWO).ttl(LONG).try_acquire().await?.ok_or("a permit is left, but refused")?;
    assert_ne!(one.fence(), two.fence());
    assert!(first.semaphore(&name, TWO).try_acquire().await?.is_none(), "a third holder of two permits");
    assert_eq!(one.release().await?, Outcome::Released);
    let three = second.semaphore(&name, TWO).ttl(LONG).try_acquire().await?;
    assert!(three.is_some(), "a returned permit can't be had");
    assert!(first.semaphore(&name, TWO).try_acquire().await?.is_none());
    Ok(())
}

async fn a_differing_permit_count_is_refused(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let _one = locker.semaphore(&name, TWO).ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    let error = locker.semaphore(&name, TWO.saturating_add(1)).try_acquire().await.expect_err("counts differ");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    Ok(())
}

async fn what_is_not_claimed_is_refused(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let capability = &locker.info().capability;
    let asked = [
        (capability.shared, locker.rw_lock(&name).read().ttl(LONG)),
        (capability.permits, locker.semaphore(&name, TWO).ttl(LONG)),
        (capability.fifo, locker.lock(&name).ttl(LONG).fifo()),
    ];
    for (claimed, lock) in asked {
        match lock.try_acquire().await {
            Ok(guard) => {
                assert!(claimed, "granted, but not claimed: {lock:?}");
                assert_eq!(guard.ok_or("free, but refused")?.release().await?, Outcome::Released);
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
                assert!(!claimed, "claimed, but refused: {error}");
            }
        }
    }
    // The store itself must refuse too, not only the core in front of it.
    let store = ctx.store().await?;
    let mut refused = Vec::new();
    if !capability.shared {
        refused.push((Mode::Shared, Order::Any, "the store has no shared locks"));
    }
    if !capability.permits {
        refused.push((Mode::Permit { limit: TWO }, Order::Any, "the store has no permits"));
    }
    if !capability.fifo {
        refused.push((Mode::Exclusive, Order::Fifo, "the store has no order"));
    }
    for (mode, order, what) in refused {
        let mut request = super::request(&ctx.key()?, LONG)?;
        (request.claim.mode, request.order) = (mode, order);
        let error = store.acquire(&request).await.expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{what}");
        if mode != Mode::Exclusive {
            // Nobody can hold such a claim, so a store that looks for it answers that the lease is lost, which sounds as if
            // there had been one.
            let good = super::request(&ctx.key()?, LONG)?;
            let held = super::grant(&store, &good).await?.claim;
            let renewal =
                |claim: &Claim| Renewal { claim: claim.clone(), ttl: LONG, depth: 1, fence_floor: None, holder: None };
            let answers = store.renew(&[renewal(&request.claim), renewal(&held)]).await;
            let [Err(error), Ok(Renewed::Held(_))] = &answers[..] else {
                return Err(format!("{what}, but a renewal with one beside it is answered with {answers:?}").into());
            };
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{what}: renewal");
            let error = store.release(&request.claim).await.expect_err(what);
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{what}: release");
            store.release(&held).await?;
        }
    }
    Ok(())
}
