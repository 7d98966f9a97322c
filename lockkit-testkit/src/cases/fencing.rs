//! Fences: numbers that grow with every grant.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lockkit_core::{Fence, FenceClock, FenceRequest, LockKey, Outcome, Query, Renewal, Renewed};

use super::{
    CaseResult, Ctx, LONG, SHORT, cases, grant, grant_again, grant_released, locker, renew, request,
    resource::Resource, take,
};

cases! { "fencing":
    never_decreases [FENCES] "Fences grow over release, expiry and change of client (R9)."
    a_grant_owns_its_span [FENCES] "A grant owns as many fences as were asked for: the next one comes after them all."
    renewal_and_nesting_keep_the_fence [FENCES] "Renewal, reentry and a repeated claim keep the fence (R1, R9)."
    a_floor_is_kept [FENCES] "A grant is strictly above the floor that was asked for, and so are all after it."
    a_new_counter_can_start_at_the_floor [FENCES] "Without the store's clock a new lock grants exactly floor + 1."
    a_renewal_can_raise_the_counter [FENCES] "A floor given with a renewal lifts later grants, not the present fence."
    a_foreign_renewal_raises_nothing [FENCES] "A floor given with a renewal that is refused has no effect."
    the_last_fence_is_shown [FENCES] "Inspection shows the fence of the holder."
    a_stale_holder_is_refused_by_the_resource [FENCES] "A resource that checks fences refuses a holder whose lock went to another."
    they_survive_a_deletion [SERVER_FENCES] "After somebody deleted the lock the store grants higher fences."
    they_survive_a_restart_with_data [SERVER_FENCES] "After a restart with its data the store grants higher fences."
    they_survive_the_loss_of_all_data [SERVER_HYBRID] "After a restart without data the store grants higher fences."
}

async fn never_decreases(ctx: Ctx) -> CaseResult {
    let (first, second, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let store = ctx.store().await?;
    let mut last = Fence::NONE;
    for round in 0..40 {
        let locker = if round % 3 == 0 { &first } else { &second };
        let guard = take(locker, &name, LONG).await?;
        assert!(guard.fence() > last, "{} came after {last}", guard.fence());
        last = guard.fence();
        if round % 10 == 9 && locker.info().capability.liveness.session.is_none() {
            assert_eq!(guard.release().await?, Outcome::Released);
            // Without a locker: one would release the lease as soon as it is lost, and here it is to lapse.
            let lapsing = grant(&store, &mut request(&LockKey::new(name.as_str())?, SHORT)?).await?;
            assert!(lapsing.fence > last, "{} came after {last}", lapsing.fence);
            last = lapsing.fence;
            let next = first.lock(&name).ttl(LONG).acquire_within(Duration::from_secs(8)).await?;
            let next = next.ok_or("the lease did not lapse")?;
            assert!(next.fence() > last, "{} came after {last}, by expiry", next.fence());
            last = next.fence();
            assert_eq!(next.release().await?, Outcome::Released);
        } else {
            assert_eq!(guard.release().await?, Outcome::Released);
        }
    }
    Ok(())
}

async fn a_grant_owns_its_span(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut next_free = Fence::NONE;
    for span in [1, 65, 1, 1000, 3] {
        let mut asked = request(&key, LONG)?;
        asked.fence = FenceRequest { span, ..FenceRequest::default() };
        let hold = grant_released(&store, &mut asked).await?;
        assert!(hold.fence >= next_free, "{} belongs to the grant before", hold.fence);
        assert_eq!(hold.span, span);
        next_free = hold.fence.offset(span);
        store.release(&hold.claim).await?;
    }
    Ok(())
}

async fn renewal_and_nesting_keep_the_fence(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    let first = grant(&store, &mut mine).await?;
    for depth in [1, 2, 1] {
        match renew(&store, &mine.claim, LONG, depth).await? {
            Renewed::Held(hold) => assert_eq!((hold.fence, hold.span, hold.depth), (first.fence, first.span, depth)),
            Renewed::Lost(reason) => return Err(format!("lost: {reason}").into()),
        }
    }
    assert_eq!(grant_again(&store, &mine).await?.fence, first.fence);
    Ok(())
}

async fn a_floor_is_kept(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    let first = grant(&store, &mut mine).await?;
    store.release(&mine.claim).await?;
    let floor = first.fence.offset(4_000_000_000);
    mine = request(&key, LONG)?;
    mine.fence.floor = floor;
    let lifted = grant_released(&store, &mut mine).await?;
    assert!(lifted.fence > floor, "{} is not above the floor {floor}", lifted.fence);
    store.release(&lifted.claim).await?;
    let after = grant_released(&store, &mut request(&key, LONG)?).await?;
    assert!(after.fence > lifted.fence);
    Ok(())
}

async fn a_new_counter_can_start_at_the_floor(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    // Ahead of the clocks of all stores, but not by so much that a store keeps the counter for years.
    let ahead = SystemTime::now().duration_since(UNIX_EPOCH)? + Duration::from_secs(60);
    // And ahead of a floor that the store may have for all its locks.
    let mut another = request(&ctx.key()?, LONG)?;
    let reached = grant(&store, &mut another).await?.fence;
    store.release(&another.claim).await?;
    let floor = Fence::new(u64::try_from(ahead.as_micros())?).max(reached.offset(60_000_000));
    for step in 0..3 {
        let mut mine = request(&key, LONG)?;
        mine.fence = FenceRequest { floor: floor.offset(step * 10), span: 1, clock: FenceClock::Floor };
        let hold = grant_released(&store, &mut mine).await?;
        assert_eq!(hold.fence, floor.offset(step * 10 + 1));
        store.release(&hold.claim).await?;
    }
    Ok(())
}

async fn a_renewal_can_raise_the_counter(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    let hold = grant(&store, &mut mine).await?;
    let floor = hold.fence.offset(1_000_000_000);
    let renewal = Renewal { fence_floor: Some(floor), ..Renewal::new(mine.claim.clone(), LONG) };
    match store.renew(&[renewal]).await.remove(0)? {
        Renewed::Held(renewed) => assert_eq!(renewed.fence, hold.fence),
        Renewed::Lost(reason) => return Err(format!("lost: {reason}").into()),
    }
    assert_eq!(grant_again(&store, &mine).await?.fence, hold.fence, "a repeated claim must keep its fence");
    store.release(&mine.claim).await?;
    assert!(grant_released(&store, &mut request(&key, LONG)?).await?.fence > floor);
    Ok(())
}

async fn a_foreign_renewal_raises_nothing(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    let hold = grant(&store, &mut mine).await?;
    let floor = hold.fence.offset(2_000_000_000);
    let foreign = request(&key, LONG)?.claim;
    let renewal = Renewal { fence_floor: Some(floor), ..Renewal::new(foreign, LONG) };
    assert!(matches!(store.renew(&[renewal]).await.remove(0)?, Renewed::Lost(_)));
    store.release(&mine.claim).await?;
    let next = grant_released(&store, &mut request(&key, LONG)?).await?;
    assert!(next.fence > hold.fence && next.fence < floor, "{} after {}", next.fence, hold.fence);
    Ok(())
}

async fn the_last_fence_is_shown(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let hold = grant(&store, &mut request(&key, LONG)?).await?;
    let state = store.inspect(&Query::Keys(vec![key])).await?.remove(0);
    assert_eq!(state.holders[0].fence, Some(hold.fence));
    assert!(state.fence.is_none_or(|last| last >= hold.fence));
    Ok(())
}

async fn a_stale_holder_is_refused_by_the_resource(ctx: Ctx) -> CaseResult {
    let (first, second, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let resource = Resource::default();
    let stale = take(&first, &name, LONG).await?;
    assert!(resource.admit(stale.fence()));
    // The lock is taken from a holder that does not notice: what a freeze or a partition looks like from outside.
    second.break_lock(&name, stale.token()).await?;
    let fresh = take(&second, &name, LONG).await?;
    assert!(resource.admit(fresh.fence()));
    assert!(!resource.admit(stale.fence()), "the stale holder's write came through");
    assert!(resource.admit(fresh.fence()));
    Ok(())
}

async fn they_survive_a_deletion(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (mine, name) = (locker(server.open().await?), ctx.name());
    let mut last = Fence::NONE;
    for _ in 0..4 {
        let guard = mine.lock(&name).ttl(LONG).acquire_within(Duration::from_secs(10)).await?.ok_or("not free")?;
        assert!(guard.fence() > last, "{} came after {last}, by deletion", guard.fence());
        last = guard.fence();
        server.delete(&name).await?;
        assert!(matches!(guard.release().await?, Outcome::NotHeld(_)), "a deleted lock was released");
    }
    Ok(())
}

async fn across_restart(ctx: &Ctx, keep_data: bool) -> CaseResult {
    let server = ctx.server().await?;
    let (mine, name) = (locker(server.open().await?), ctx.name());
    let mut last = Fence::NONE;
    for _ in 0..3 {
        let guard = mine.lock(&name).ttl(SHORT).acquire_within(Duration::from_secs(10)).await?.ok_or("not free")?;
        assert!(guard.fence() > last, "{} came after {last}", guard.fence());
        last = guard.fence();
        assert_eq!(guard.release().await?, Outcome::Released);
        server.kill().await?;
        server.restart(keep_data).await?;
    }
    Ok(())
}

async fn they_survive_a_restart_with_data(ctx: Ctx) -> CaseResult {
    across_restart(&ctx, true).await
}

async fn they_survive_the_loss_of_all_data(ctx: Ctx) -> CaseResult {
    across_restart(&ctx, false).await
}
