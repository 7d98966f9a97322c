//! Shared locks and permits, where a store has them; an honest refusal where it has not.

use std::num::NonZeroU32;

use lockkit_core::{Attempt, Claim, ErrorKind, Mode, Order, Outcome, Release, Renewal, Renewed};

use super::{
    CaseResult, Ctx, LONG, SHORT, UNTOLD, cases, grant, grant_again, readers::assert_shown, request_as, take,
    wait_for_waiter,
};

cases! { "modes":
    readers_share_and_writers_exclude [SHARED] "Any number of readers hold together; a writer excludes them all."
    permits_are_never_exceeded [PERMITS] "At most so many hold a semaphore as it has permits."
    a_differing_permit_count_is_refused [PERMITS] "Users of a semaphore must agree on its permits."
    those_that_wait_settle_the_permit_count [PERMITS] "That holds also while somebody waits for a permit, and nobody has one."
    the_permit_count_changes_under_an_exclusive_lock [PERMITS] "The holder of the exclusive lock in order has waited for all permits; after it, users agree on another number."
    all_permits_are_shown [PERMITS] "All that hold a permit are shown, and of how many it is."
    the_same_claim_holds_one_permit [PERMITS] "A claim that asks again for the permit that it holds has one, with one fence (R1)."
    a_double_release_adds_no_permit [PERMITS] "A permit that is released twice is given back once."
    a_lapsed_permit_is_available_again [PERMITS_TTL] "The permit of a holder that died can be had after its lease has ended."
    a_plain_lock_excludes_readers [SHARED] "An exclusive lock that stands in no line excludes readers, and is excluded by them."
    a_plain_lock_excludes_permits [PERMITS] "An exclusive lock that stands in no line excludes permits, and is excluded by them."
    readers_and_permits_exclude_each_other [SHARED_PERMITS] "Readers and permits of one name exclude each other."
    what_is_not_claimed_is_refused [NOTHING] "What the capability does not claim is answered with Unsupported (R12)."
}

pub(super) const TWO: NonZeroU32 = NonZeroU32::MIN.saturating_add(1);

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

async fn those_that_wait_settle_the_permit_count(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let lock = other.semaphore(&name, TWO).ttl(LONG);
    let waiter = tokio::spawn(async move { lock.acquire_within(LONG).await });
    wait_for_waiter(&mine.lock(&name)).await?;
    let error = mine.semaphore(&name, TWO.saturating_add(1)).try_acquire().await.expect_err("counts differ");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(guard.release().await?, Outcome::Released);
    assert!(waiter.await??.is_some(), "the waiter was left behind");
    Ok(())
}

async fn the_permit_count_changes_under_an_exclusive_lock(ctx: Ctx) -> CaseResult {
    let (mine, other, name, three) = (ctx.locker().await?, ctx.locker().await?, ctx.name(), TWO.saturating_add(1));
    let one = other.semaphore(&name, TWO).ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    let all = mine.lock(&name).ttl(LONG).fifo();
    let changing = tokio::spawn(async move { all.acquire_within(LONG).await });
    wait_for_waiter(&other.lock(&name)).await?;
    assert!(other.semaphore(&name, TWO).try_acquire().await?.is_none(), "a permit was had before the one that waits");
    assert_eq!(one.release().await?, Outcome::Released);
    let alone = changing.await??.ok_or("all permits are back, but it waits")?;
    assert!(other.semaphore(&name, three).try_acquire().await?.is_none(), "a permit beside an exclusive lock");
    assert_eq!(alone.release().await?, Outcome::Released);
    let changed = other.semaphore(&name, three).ttl(LONG).acquire_within(LONG).await?;
    assert!(changed.is_some(), "another number, and nobody there");
    let error = mine.semaphore(&name, TWO).try_acquire().await.expect_err("counts differ");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    Ok(())
}

async fn all_permits_are_shown(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let one = mine.semaphore(&name, TWO).ttl(LONG).try_acquire().await?.ok_or("free, but refused")?;
    let two = other.semaphore(&name, TWO).ttl(LONG).try_acquire().await?.ok_or("a permit is left, but refused")?;
    assert_shown(&mine.lock(&name), Mode::Permit { limit: TWO }, &[one.token(), two.token()]).await
}

async fn the_same_claim_holds_one_permit(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let [one, two, three] = [(); 3].map(|()| request_as(&key, Mode::Permit { limit: TWO }, LONG));
    let (mut one, two, three) = (one?, two?, three?);
    let (once, twice) = (grant(&store, &mut one).await?, grant_again(&store, &one).await?);
    assert_eq!(once.fence, twice.fence, "the same claim again has another fence");
    let is_granted = |answer: Attempt| matches!(answer, Attempt::Granted(_));
    assert!(is_granted(store.acquire(&two).await?), "a claim that asked again counts twice");
    assert!(!is_granted(store.acquire(&three).await?), "a third holder of two permits");
    assert!(matches!(store.release(&one.claim).await?, Release::Released { .. }));
    let next = request_as(&key, Mode::Permit { limit: TWO }, LONG)?;
    assert!(is_granted(store.acquire(&next).await?), "a returned permit can't be had");
    for held in [two, next] {
        assert!(matches!(store.release(&held.claim).await?, Release::Released { .. }));
    }
    Ok(())
}

async fn a_double_release_adds_no_permit(ctx: Ctx) -> CaseResult {
    let (store, locker, key) = (ctx.store().await?, ctx.locker().await?, ctx.key()?);
    let permits = locker.semaphore(key.as_str(), TWO).ttl(LONG);
    let twice = grant(&store, &mut request_as(&key, Mode::Permit { limit: TWO }, LONG)?).await?.claim;
    let _one = permits.try_acquire().await?.ok_or("a permit is left, but refused")?;
    assert!(matches!(store.release(&twice).await?, Release::Released { .. }));
    let _two = permits.try_acquire().await?.ok_or("a returned permit can't be had")?;
    let again = store.release(&twice).await?;
    assert!(matches!(again, Release::NotHeld(_)), "a permit was given back twice: {again:?}");
    assert!(permits.try_acquire().await?.is_none(), "a third holder of two permits");
    Ok(())
}

async fn a_lapsed_permit_is_available_again(ctx: Ctx) -> CaseResult {
    let (store, locker, key) = (ctx.store().await?, ctx.locker().await?, ctx.key()?);
    let permits = locker.semaphore(key.as_str(), TWO).ttl(LONG);
    let _kept = permits.try_acquire().await?.ok_or("free, but refused")?;
    let dead = grant(&store, &mut request_as(&key, Mode::Permit { limit: TWO }, SHORT)?).await?;
    let next = permits.acquire_within(SHORT + UNTOLD).await?;
    let late = store.info().clock.now().since(dead.until);
    let _next = next.ok_or_else(|| format!("a dead holder's permit can't be had {late:?} after its end"))?;
    assert!(store.info().clock.now() >= dead.until, "a third holder of two permits");
    assert!(permits.try_acquire().await?.is_none(), "a lapsed permit can be had twice");
    Ok(())
}

async fn a_plain_lock_excludes_readers(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let plain = take(&mine, &name, LONG).await?;
    let reader = other.rw_lock(&name).read().ttl(LONG);
    assert!(reader.try_acquire().await?.is_none(), "a reader came in beside a plain lock");
    assert_eq!(plain.release().await?, Outcome::Released);
    let _reader = reader.try_acquire().await?.ok_or("free, but refused")?;
    assert!(mine.lock(&name).try_acquire().await?.is_none(), "a plain lock was granted beside a reader");
    Ok(())
}

async fn a_plain_lock_excludes_permits(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let plain = take(&mine, &name, LONG).await?;
    let permit = other.semaphore(&name, TWO).ttl(LONG);
    assert!(permit.try_acquire().await?.is_none(), "a permit was granted beside a plain lock");
    assert_eq!(plain.release().await?, Outcome::Released);
    let _permit = permit.try_acquire().await?.ok_or("free, but refused")?;
    assert!(mine.lock(&name).try_acquire().await?.is_none(), "a plain lock was granted beside a permit");
    Ok(())
}

async fn readers_and_permits_exclude_each_other(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let (reader, permit) = (mine.rw_lock(&name).read().ttl(LONG), other.semaphore(&name, TWO).ttl(LONG));
    let held = reader.try_acquire().await?.ok_or("free, but refused")?;
    assert!(permit.try_acquire().await?.is_none(), "a permit was granted beside a reader");
    assert_eq!(held.release().await?, Outcome::Released);
    let _held = permit.try_acquire().await?.ok_or("free, but refused")?;
    assert!(reader.try_acquire().await?.is_none(), "a reader came in beside a permit");
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
            let mut good = super::request(&ctx.key()?, LONG)?;
            let held = super::grant(&store, &mut good).await?.claim;
            let renewal = |claim: &Claim| Renewal::new(claim.clone(), LONG);
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
