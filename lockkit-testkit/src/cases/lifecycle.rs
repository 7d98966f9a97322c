//! A lock's ordinary life.

use std::time::Duration;

use lockkit_core::{
    ErrorKind, HolderInfo, LockKey, Locker, LossReason, Outcome, Query, Release, Renewal, Renewed, Resume, Token, drift,
};

use super::{CaseResult, Ctx, LONG, assert_taken, cases, grant, request, seen, take, take_in_the_end};
use crate::BoxError;

cases! { "lifecycle":
    a_free_lock_is_granted [NOTHING] "A free lock is granted at once, with what the ttl leaves of validity."
    a_held_lock_is_refused [NOTHING] "A held lock is refused to another client, without any effect on its holder."
    a_released_lock_is_free_at_once [NOTHING] "After a release the lock can be taken at once."
    a_dropped_guard_frees_its_lock [NOTHING] "Dropping a guard frees the lock in the background."
    a_second_release_says_so [NOTHING] "Releasing twice is harmless and answered with NotHeld (R7)."
    names_do_not_interfere [NOTHING] "Locks of different names have nothing to do with each other."
    many_rounds_leave_nothing_behind [NOTHING] "Taking and releasing a lock again and again leaves it free."
    the_holder_is_shown_while_it_holds [NOTHING] "The holder of a lock can be read while it is held, and not after."
    a_queue_is_shown_where_there_is_one [NOTHING] "A lock can be read with its queue, free or held, and all else is as without; a store without order shows none."
    held_locks_are_listed_by_prefix [NOTHING] "All held locks of a prefix are listed by name, and only those."
    a_lease_is_taken_up_by_its_token [NOTHING] "A lease that was let go of is taken up by its token, with a higher fence; where that can't be, both are refused."
    a_renewal_may_change_the_name_that_is_shown [NOTHING] "A renewal with a name makes the store show that one, also after renewals without; nothing else changes."
    a_broken_lock_is_free [NOTHING] "A lock can be broken by the token that inspection shows, and by no other."
}

async fn a_free_lock_is_granted(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let guard = take(&locker, &name, LONG).await?;
    let left = guard.remaining();
    assert!(left <= LONG - drift(LONG), "{left:?} is more than the ttl allows");
    assert!(left > LONG / 2 || left > Duration::from_secs(1), "only {left:?} is left");
    assert!(guard.is_held());
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn a_held_lock_is_refused(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let before = seen(&mine.lock(&name)).await?;
    assert_taken(&other, &name).await?;
    let after = seen(&mine.lock(&name)).await?;
    assert_eq!(before.holders[0].token, after.holders[0].token, "the holder changed");
    assert_eq!(after.holders.len(), 1);
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn a_released_lock_is_free_at_once(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    for _ in 0..20 {
        assert_eq!(take(&mine, &name, LONG).await?.release().await?, Outcome::Released);
        assert_eq!(take(&other, &name, LONG).await?.release().await?, Outcome::Released);
    }
    Ok(())
}

async fn a_dropped_guard_frees_its_lock(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    drop(take(&mine, &name, LONG).await?);
    let guard = other.lock(&name).acquire_within(Duration::from_secs(5)).await?;
    assert!(guard.is_some(), "not free within 5 s of the drop");
    Ok(())
}

async fn a_second_release_says_so(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut request = request(&key, LONG)?;
    grant(&store, &mut request).await?;
    assert!(matches!(store.release(&request.claim).await?, Release::Released { .. }));
    assert_eq!(store.release(&request.claim).await?, Release::NotHeld(LossReason::Gone));
    Ok(())
}

async fn names_do_not_interfere(ctx: Ctx) -> CaseResult {
    let (locker, rival) = (ctx.locker().await?, ctx.locker().await?);
    let (first, second) = (ctx.name(), ctx.name());
    let guard = take(&locker, &first, LONG).await?;
    let other = take(&locker, &second, LONG).await?;
    assert_eq!(other.release().await?, Outcome::Released);
    assert_taken(&rival, &first).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn many_rounds_leave_nothing_behind(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let mut last = lockkit_core::Fence::NONE;
    for _ in 0..300 {
        // A quorum has released a lock when a majority has: a try may be refused by a straggler beside a slow node.
        let guard = take_in_the_end(&locker, &name, LONG).await?;
        let fence = guard.fence();
        assert!(fence > last || fence == lockkit_core::Fence::NONE, "fence {fence} came after {last}");
        last = fence;
        assert_eq!(guard.release().await?, Outcome::Released);
    }
    assert!(seen(&locker.lock(&name)).await?.holders.is_empty());
    Ok(())
}

async fn the_holder_is_shown_while_it_holds(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.store().await?, ctx.locker().await?, ctx.name());
    let info = lockkit_core::HolderInfo::new("billing: nightly run ü");
    let mine = lockkit_core::Locker::shared_builder(mine).holder(info.clone()).build();
    let guard = take(&mine, &name, LONG).await?;
    let state = seen(&other.lock(&name)).await?;
    let holder = &state.holders[0];
    assert_eq!((&holder.info, holder.token, holder.depth), (&info, Some(guard.token()), 1));
    if guard.fence() != lockkit_core::Fence::NONE {
        assert_eq!(holder.fence, Some(guard.fence()));
    }
    if let Some(remaining) = holder.remaining {
        assert!(remaining <= LONG && remaining > LONG / 2, "{remaining:?}");
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    assert!(seen(&other.lock(&name)).await?.holders.is_empty(), "a former holder is shown");
    Ok(())
}

async fn a_queue_is_shown_where_there_is_one(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let shown = async |holders: &[Token]| {
        let states = other.inspect(&Query::Queue(LockKey::new(name.as_str())?)).await?;
        assert_eq!(states.iter().map(|state| state.key.as_str()).collect::<Vec<_>>(), [name.as_str()]);
        let state = &states[0];
        match other.info().capability.fifo {
            true => assert!(state.queue.as_ref().is_some_and(Vec::is_empty), "its queue is not shown: {state:?}"),
            false => assert!(state.queue.is_none(), "there is no order, and so no queue: {state:?}"),
        }
        let tokens: Vec<_> = state.holders.iter().filter_map(|holder| holder.token).collect();
        assert_eq!(tokens, holders, "{state:?}");
        assert!(seen(&other.lock(&name)).await?.queue.is_none(), "nobody asked for the queue");
        Ok::<_, BoxError>(())
    };
    shown(&[]).await?;
    let guard = take(&mine, &name, LONG).await?;
    shown(&[guard.token()]).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    shown(&[]).await
}

async fn held_locks_are_listed_by_prefix(ctx: Ctx) -> CaseResult {
    let locker = ctx.locker().await?;
    let prefix = ctx.name();
    let names = ["/b*[x]", "/a", "/c"].map(|end| format!("{prefix}{end}"));
    let guards = [
        take(&locker, &names[0], LONG).await?,
        take(&locker, &names[1], LONG).await?,
        take(&locker, &ctx.name(), LONG).await?,
    ];
    assert_eq!(take(&locker, &names[2], LONG).await?.release().await?, Outcome::Released);
    let listed = |states: Vec<lockkit_core::KeyState>| {
        states.iter().map(|state| state.key.as_str().to_owned()).collect::<Vec<_>>()
    };
    let found = listed(locker.inspect(&Query::Prefix(prefix.clone())).await?);
    assert_eq!(found, [names[1].clone(), names[0].clone()], "held names with the prefix, sorted");
    let wild = listed(locker.inspect(&Query::Prefix(format!("{prefix}/b*["))).await?);
    assert_eq!(wild, [names[0].clone()], "a prefix is taken literally");
    drop(guards);
    Ok(())
}

async fn a_lease_is_taken_up_by_its_token(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let lock = mine.lock(&name).ttl(LONG);
    let guard = lock.acquire().await?;
    // From one task to the next, so that a fence was given out of which the store knows nothing.
    let (guard, ended) = tokio::join!(lock.acquire(), guard.release());
    assert_eq!(ended?, Outcome::Released);
    let guard = guard?;
    let (first, token) = (guard.fence(), guard.token());
    if mine.info().capability.resume == Resume::None {
        let refused = guard.detach().expect_err("it is claimed not to");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        let refused = other.lock(&name).resume(token).await.expect_err("it is claimed not to");
        assert_eq!(refused.kind(), ErrorKind::Unsupported);
        return Ok(());
    }
    assert_eq!(guard.detach()?, token);
    assert_taken(&other, &name).await?;
    assert!(other.lock(&name).resume(Token::random()?).await?.is_none(), "taken up by another token");
    let next = Locker::shared_builder(ctx.store().await?).holder(HolderInfo::new("the next")).build();
    let again = next.lock(&name).ttl(LONG).resume(token).await?.ok_or("the lease is still there")?;
    assert!(again.fence() > first, "{:?} after {first:?}", again.fence());
    assert_eq!(seen(&mine.lock(&name)).await?.holders[0].info.as_str(), "the next");
    assert!(other.lock(&name).resume(token).await?.is_none(), "taken up twice");
    assert_taken(&mine, &name).await?;
    again.renew().await?;
    let second = again.fence();
    assert_eq!(again.release().await?, Outcome::Released);
    assert!(mine.lock(&name).resume(token).await?.is_none(), "taken up after its release");
    let next = take(&mine, &name, LONG).await?;
    assert!(next.fence() > second, "{:?} after {second:?}", next.fence());
    assert!(other.lock(&name).resume(token).await?.is_none(), "taken up while another holds the lock");
    assert_eq!(next.release().await?, Outcome::Released);
    Ok(())
}

async fn a_renewal_may_change_the_name_that_is_shown(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut asked = request(&key, LONG)?;
    let hold = grant(&store, &mut asked).await?;
    for (holder, depth, shown) in [
        (Some("the next: 1@2"), 1, "the next: 1@2"),
        (None, 1, "the next: 1@2"),
        (None, 2, "the next: 1@2"),
        (Some("a third"), 3, "a third"),
    ] {
        let holder = holder.map(HolderInfo::new);
        let renewal = Renewal { depth, holder, ..Renewal::new(asked.claim.clone(), LONG) };
        match store.renew(&[renewal]).await.pop().ok_or("no answer")?? {
            Renewed::Held(renewed) => assert_eq!((renewed.fence, renewed.depth), (hold.fence, depth)),
            Renewed::Lost(reason) => return Err(format!("lost: {reason}").into()),
        }
        let state = store.inspect(&Query::Keys(vec![key.clone()])).await?.pop().ok_or("no answer")?;
        let holder = state.holders.first().ok_or("nobody holds it")?;
        assert_eq!((holder.info.as_str(), holder.depth, holder.token), (shown, depth, Some(asked.claim.token)));
        assert_eq!(holder.fence, Some(hold.fence));
    }
    assert!(matches!(store.release(&asked.claim).await?, Release::Released { .. }));
    Ok(())
}

async fn a_broken_lock_is_free(ctx: Ctx) -> CaseResult {
    let (mine, admin, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&mine, &name, LONG).await?;
    let wrong = lockkit_core::Token::random()?;
    assert_eq!(admin.break_lock(&name, wrong).await?, Release::NotHeld(LossReason::Taken));
    let shown = seen(&admin.lock(&name)).await?.holders[0].token.ok_or("no token is shown")?;
    assert!(matches!(admin.break_lock(&name, shown).await?, Release::Released { .. }));
    let next = take(&admin, &name, LONG).await?;
    assert!(matches!(guard.release().await?, Outcome::NotHeld(_)), "the broken guard's release must say so");
    assert!(next.is_held());
    assert_taken(&mine, &name).await?;
    Ok(())
}
