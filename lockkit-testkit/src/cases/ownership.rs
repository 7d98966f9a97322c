//! Whose lease it is.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, FenceRequest, LockKey, LockStore, LossReason, Query, Release, Renewed, Token,
};

use super::{
    AGAIN, CaseResult, Ctx, LONG, SHORT, SLACK, UNTOLD, answered, cases, fresh, grant, grant_again, grant_released,
    renew, request,
};

use crate::{BoxError, faults::Direction};

cases! { "ownership":
    a_foreign_release_changes_nothing [NOTHING] "A release with another token leaves the holder alone and says so (R7)."
    a_foreign_renewal_changes_nothing [TTL] "A renewal with another token neither extends nor shortens the lease (R7)."
    a_late_release_spares_the_successor [TTL] "A holder that lost the lock can't release or renew the next holder's lease (R7)."
    a_release_that_races_expiry_spares_the_successor [SERVER_TTL] "A release that is under way while the lease lapses leaves the next holder's alone (R7)."
    two_claims_of_one_client_are_two [NOTHING] "Two claims of one client exclude each other as those of two clients do (R2)."
    renewal_never_resurrects [TTL] "Renewing an expired lease fails, and the lock stays free (R5)."
    renewal_never_creates [NOTHING] "Renewing what was never granted fails, and the lock stays free (R5)."
    the_same_claim_is_one_lease [NOTHING] "Asking again with the same claim gives the same grant and fence (R1)."
    repeated_claims_extend_the_lease [TTL] "Asking again with the same claim extends the lease (R1, R4)."
    many_renewals_have_an_answer_each [NOTHING] "A batch of renewals has one answer for each, in order."
    the_place_of_a_lease_is_taken_once [RESUME] "A grant in the place of a lease is made once, with a higher fence, only while that lease has the lock, and nothing of that lease ends it."
}

async fn a_foreign_release_changes_nothing(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    grant(&store, &mut mine).await?;
    let foreign = Claim { token: Token::random()?, ..mine.claim.clone() };
    assert_eq!(store.release(&foreign).await?, Release::NotHeld(LossReason::Taken));
    let state = store.inspect(&Query::Keys(vec![key])).await?;
    assert_eq!(state[0].holders[0].token, Some(mine.claim.token));
    assert!(matches!(store.release(&mine.claim).await?, Release::Released { .. }));
    Ok(())
}

async fn a_foreign_renewal_changes_nothing(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    grant(&store, &mut mine).await?;
    let foreign = Claim { token: Token::random()?, ..mine.claim.clone() };
    for ttl in [SHORT, LONG * 3] {
        let answer = renew(&store, &foreign, ttl, 1).await?;
        assert!(matches!(answer, Renewed::Lost(LossReason::Taken)), "{answer:?}");
    }
    let left = store.inspect(&Query::Keys(vec![key])).await?[0].holders[0].remaining.ok_or("no ttl is shown")?;
    assert!(left <= LONG && left > LONG / 2, "the lease changed to {left:?}");
    Ok(())
}

async fn a_late_release_spares_the_successor(ctx: Ctx) -> CaseResult {
    let (store, other, key) = (ctx.store().await?, ctx.store().await?, ctx.key()?);
    let mut late = request(&key, SHORT)?;
    grant(&store, &mut late).await?;
    let mut next = request(&key, LONG)?;
    next.wait = SHORT + Duration::from_secs(6);
    while let Attempt::Contended(by) = other.acquire(&next).await? {
        next.claim = fresh(next.claim, &by)?;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(store.release(&late.claim).await?, Release::NotHeld(LossReason::Taken));
    assert!(matches!(renew(&store, &late.claim, LONG, 1).await?, Renewed::Lost(LossReason::Taken)));
    let state = store.inspect(&Query::Keys(vec![key])).await?;
    assert_eq!(state[0].holders[0].token, Some(next.claim.token));
    Ok(())
}

async fn a_release_that_races_expiry_spares_the_successor(ctx: Ctx) -> CaseResult {
    let server = ctx.server().await?;
    let (slow, proxy) = server.open_through_proxy().await?;
    let (other, key) = (server.open().await?, ctx.key()?);
    let mut late = request(&key, SHORT)?;
    grant(&slow, &mut late).await?;
    // A store that needs several steps has the lapse of its lease between them; one that needs one step is through.
    proxy.delay(Direction::ToClient, SHORT + SLACK);
    let releasing = tokio::spawn(async move { slow.release(&late.claim).await });
    let (mut next, asked) = (request(&key, LONG)?, Instant::now());
    while let Attempt::Contended(by) = other.acquire(&next).await? {
        next.claim = fresh(next.claim, &by)?;
        assert!(asked.elapsed() < SHORT + Duration::from_secs(6), "neither release nor lapse made the lock free");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    // Whatever came of it, even an error if the store takes so long for none: it is over.
    drop(releasing.await?);
    let state = other.inspect(&Query::Keys(vec![key])).await?;
    let holder = state[0].holders.first().and_then(|holder| holder.token);
    assert_eq!(holder, Some(next.claim.token), "the successor's lease was deleted");
    Ok(())
}

async fn two_claims_of_one_client_are_two(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let (mut first, second) = (request(&key, LONG)?, request(&key, LONG)?);
    grant(&store, &mut first).await?;
    let both = matches!(store.acquire(&second).await?, Attempt::Granted(_));
    assert!(!both, "both claims of one client were granted");
    assert!(matches!(renew(&store, &second.claim, LONG, 1).await?, Renewed::Lost(LossReason::Taken)));
    assert_eq!(store.release(&second.claim).await?, Release::NotHeld(LossReason::Taken));
    let state = store.inspect(&Query::Keys(vec![key])).await?;
    assert_eq!(state[0].holders[0].token, Some(first.claim.token));
    assert!(matches!(store.release(&first.claim).await?, Release::Released { .. }));
    Ok(())
}

async fn renewal_never_resurrects(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, SHORT)?;
    grant(&store, &mut mine).await?;
    let (granted, mut asked) = (Instant::now(), Duration::ZERO);
    // The member of a quorum that granted it last, after a majority had, keeps it longest.
    while !is_free(&store, &key).await? {
        assert!(asked < SHORT + UNTOLD, "the lease did not lapse");
        tokio::time::sleep(Duration::from_millis(20)).await;
        asked = granted.elapsed();
    }
    let answer = renew(&store, &mine.claim, LONG, 1).await?;
    assert!(matches!(answer, Renewed::Lost(LossReason::Gone)), "{answer:?}");
    assert!(is_free(&store, &key).await?, "it was resurrected");
    grant(&store, &mut request(&key, LONG)?).await?;
    Ok(())
}

async fn is_free(store: &Arc<dyn LockStore>, key: &LockKey) -> Result<bool, BoxError> {
    let state = store.inspect(&Query::Keys(vec![key.clone()])).await?;
    Ok(state.first().ok_or("no answer for the key")?.holders.is_empty())
}

async fn renewal_never_creates(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let answer = renew(&store, &request(&key, LONG)?.claim, LONG, 1).await?;
    assert!(matches!(answer, Renewed::Lost(_)), "{answer:?}");
    assert!(is_free(&store, &key).await?);
    Ok(())
}

async fn the_same_claim_is_one_lease(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    let first = grant(&store, &mut mine).await?;
    let again = grant_again(&store, &mine).await?;
    assert_eq!((first.fence, first.span), (again.fence, again.span));
    let state = store.inspect(&Query::Keys(vec![key])).await?;
    assert_eq!((state[0].holders.len(), state[0].holders[0].depth), (1, 1), "a repeated request counted twice");
    assert!(matches!(store.release(&mine.claim).await?, Release::Released { .. }));
    assert!(matches!(store.release(&mine.claim).await?, Release::NotHeld(_)), "one release must be enough");
    Ok(())
}

async fn repeated_claims_extend_the_lease(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    let mut mine = request(&key, LONG)?;
    let first = grant(&store, &mut mine).await?;
    mine.ttl = LONG * 2;
    let again = grant_again(&store, &mine).await?;
    assert!(again.until >= first.until + LONG, "the lease must run from the latest request");
    let left = store.inspect(&Query::Keys(vec![key])).await?[0].holders[0].remaining.ok_or("no ttl is shown")?;
    assert!(left > LONG, "the store has only {left:?} on record");
    Ok(())
}

async fn many_renewals_have_an_answer_each(ctx: Ctx) -> CaseResult {
    let store = ctx.store().await?;
    let mut renewals = Vec::new();
    for number in 0..300 {
        let mine = if number % 3 == 0 { request(&ctx.key()?, LONG)? } else { grant_one_of_many(&ctx, &store).await? };
        renewals.push(lockkit_core::Renewal { depth: 1 + number, ..lockkit_core::Renewal::new(mine.claim, LONG * 2) });
    }
    let answers = store.renew(&renewals).await;
    assert_eq!(answers.len(), renewals.len(), "one answer for each renewal");
    for (number, (answer, renewal)) in answers.into_iter().zip(&renewals).enumerate() {
        match answer? {
            Renewed::Held(hold) => {
                assert_ne!(number % 3, 0, "number {number} was never granted");
                assert_eq!((&hold.claim, hold.depth), (&renewal.claim, renewal.depth));
            }
            Renewed::Lost(_) => assert_eq!(number % 3, 0, "number {number} is held"),
        }
    }
    Ok(())
}

/// Takes a lock of its own, and another one when a call failed for want of time: a quorum may refuse that claim from then on (rule R2).
async fn grant_one_of_many(ctx: &Ctx, store: &Arc<dyn LockStore>) -> Result<AcquireRequest, BoxError> {
    let asked = Instant::now();
    loop {
        let mine = request(&ctx.key()?, LONG)?;
        match store.acquire(&mine).await {
            Err(late) if late.is_retryable() && asked.elapsed() < AGAIN => {
                answered(|| store.release(&mine.claim)).await?;
            }
            answer => {
                assert!(matches!(answer?, Attempt::Granted(_)), "a free lock was refused");
                return Ok(mine);
            }
        }
    }
}

async fn the_place_of_a_lease_is_taken_once(ctx: Ctx) -> CaseResult {
    let (store, other, key) = (ctx.store().await?, ctx.store().await?, ctx.key()?);
    let (mut first, unknown) = (request(&key, LONG)?, Token::random()?);
    let asked = |from: Token| Ok::<_, BoxError>(AcquireRequest { from: Some(from), ..request(&key, LONG)? });
    let is_refused = async |from: Token| {
        let (request, other) = (asked(from)?, &other);
        let ask = || {
            // With another claim each time: one that was not answered may be burnt (rule R2).
            let claim = Token::random().map(|token| Claim { token, ..request.claim.clone() });
            let request = claim.map(|claim| AcquireRequest { claim, ..request.clone() });
            async move { other.acquire(&request?).await }
        };
        Ok::<_, BoxError>(matches!(answered(ask).await?, Attempt::Contended(_)))
    };
    assert!(is_refused(unknown).await?, "nobody's place was taken");
    let mut last = grant(&store, &mut first).await?;
    let mut from = first.claim.clone();
    assert!(is_refused(unknown).await?, "another's place was taken");
    for round in 0..4 {
        let next = AcquireRequest { fence: FenceRequest { span: 3, ..FenceRequest::default() }, ..asked(from.token)? };
        let hold = grant_again(&other, &next).await?;
        assert!(hold.fence >= last.fence.offset(last.span), "{} in the place of {}", hold.fence, last.fence);
        assert_eq!((hold.span, hold.depth), (3, 1));
        let again = grant_again(&other, &next).await?;
        assert_eq!((again.fence, again.span), (hold.fence, hold.span), "the same claim again");
        assert!(is_refused(from.token).await?, "its place was taken twice");
        assert!(matches!(renew(&store, &from, LONG, 1).await?, Renewed::Lost(_)), "round {round}");
        let release = answered(|| store.release(&from)).await?;
        assert_eq!(release, Release::NotHeld(LossReason::Taken), "round {round}");
        let query = Query::Keys(vec![key.clone()]);
        let state = answered(|| store.inspect(&query)).await?.remove(0);
        assert_eq!(state.holders.first().and_then(|holder| holder.token), Some(next.claim.token), "round {round}");
        (last, from) = (hold, next.claim);
    }
    assert!(matches!(other.release(&from).await?, Release::Released { .. }));
    assert!(is_refused(from.token).await?, "nobody's place was taken");
    let next = grant_released(&store, &mut request(&key, LONG)?).await?;
    assert!(next.fence >= last.fence.offset(last.span), "{} after {}", next.fence, last.fence);
    Ok(())
}
