//! Writers that become readers: in one step, with a fence of their own.

use std::time::{Duration, Instant};

use lockkit_core::{
    AcquireRequest, Attempt, ErrorKind, FenceRequest, LockStore, LossReason, Mode, Order, Outcome, Release, Renewed,
    Resume, Token, Waiting,
};

use super::{
    CaseResult, Ctx, LONG, UNTOLD, cases, grant, grant_again, readers::assert_shown, renew, request, request_as,
    wait_for_waiter,
};
use crate::BoxError;

cases! { "modes":
    a_writer_becomes_a_reader_without_a_gap [SHARED] "A writer becomes a reader, and no writer that waits gets in between; where a store can't do that, it refuses."
    readers_follow_a_downgrade [SHARED] "Readers that wait first get in as soon as a writer has become a reader."
    a_writer_that_became_a_reader_has_no_say [SHARED] "The reader's fence lies above all of the writer's, whose token renews, releases and replaces nothing any more."
    a_downgrade_that_comes_too_late_changes_nothing [SHARED] "A downgrade of a writer whose lease is over lets nobody in, and leaves the lease of whoever has the lock."
    the_place_of_a_reader_is_not_taken [SHARED] "A claim takes the place of a writer, not that of a reader, nor a lock that nobody has."
}

/// Whether the store can make writers readers.
fn is_claimed(store: &dyn LockStore) -> bool {
    store.info().capability.downgrades
}

async fn a_writer_becomes_a_reader_without_a_gap(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let writer = mine.rw_lock(&name).write().ttl(LONG).acquire().await?;
    let fence = writer.fence();
    if !mine.info().capability.downgrades {
        let error = writer.downgrade().await.expect_err("a lease of its own can't replace it");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        return Ok(());
    }
    let lock = other.rw_lock(&name).write().ttl(LONG);
    let next = tokio::spawn(async move { lock.acquire_within(LONG).await });
    wait_for_waiter(&mine.lock(&name)).await?;
    let reader = writer.downgrade().await.map_err(|error| format!("another got in between: {error}"))?;
    assert!(reader.fence() > fence, "{:?} is not above the writer's {fence:?}", reader.fence());
    assert_shown(&mine.lock(&name), Mode::Shared, &[reader.token()]).await?;
    assert!(!next.is_finished(), "a writer came in beside a reader");
    reader.renew().await?;
    let fence = reader.fence();
    assert_eq!(reader.release().await?, Outcome::Released);
    let next = next.await??.ok_or("the writer that waits was left behind")?;
    assert!(next.fence() > fence, "{:?} is not above the reader's {fence:?}", next.fence());
    assert_eq!(next.release().await?, Outcome::Released);
    Ok(())
}

async fn readers_follow_a_downgrade(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    if !mine.info().capability.downgrades {
        return Ok(());
    }
    let (rounds, mut waited) = (3, Duration::ZERO);
    for _ in 0..rounds {
        let writer = mine.rw_lock(&name).write().ttl(LONG).acquire().await?;
        let lock = other.rw_lock(&name).read().ttl(LONG);
        let waiting = tokio::spawn(async move { lock.acquire_within(LONG / 2).await });
        wait_for_waiter(&mine.lock(&name)).await?;
        let downgraded = Instant::now();
        let reader = writer.downgrade().await?;
        let beside = waiting.await??;
        waited += downgraded.elapsed();
        let beside = beside.ok_or_else(|| format!("a reader waits beside a reader for {waited:?}"))?;
        assert_shown(&mine.lock(&name), Mode::Shared, &[reader.token(), beside.token()]).await?;
        for guard in [reader, beside] {
            assert_eq!(guard.release().await?, Outcome::Released);
        }
    }
    // Where a release is told, all of them wait no longer than one does that was not told.
    let limit = match other.info().capability.waiting {
        Waiting::Poll => UNTOLD * rounds,
        _ => UNTOLD,
    };
    assert!(waited < limit, "a reader waits beside a reader for {waited:?} in {rounds} rounds");
    Ok(())
}

async fn a_writer_that_became_a_reader_has_no_say(ctx: Ctx) -> CaseResult {
    let (store, other, key) = (ctx.store().await?, ctx.store().await?, ctx.key()?);
    let mut writer =
        AcquireRequest { fence: FenceRequest { span: 5, ..FenceRequest::default() }, ..request(&key, LONG)? };
    let held = grant(&store, &mut writer).await?;
    let asked = in_place_of(writer.claim.token, &request_as(&key, Mode::Shared, LONG)?);
    if !is_claimed(&*store) {
        let error = store.acquire(&asked).await.expect_err("the store has no such grants");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        return Ok(());
    }
    let reader = grant_again(&other, &asked).await?;
    let last = held.fence.offset(held.span - 1);
    assert!(reader.fence > last, "{} is not above the writer's {last}", reader.fence);
    assert_eq!(grant_again(&other, &asked).await?.fence, reader.fence, "the same claim again has another fence");
    assert!(matches!(renew(&store, &writer.claim, LONG, 1).await?, Renewed::Lost(_)), "the writer was renewed");
    let late = store.release(&writer.claim).await?;
    assert!(matches!(late, Release::NotHeld(LossReason::Taken)), "a late release of the writer: {late:?}");
    let again = in_place_of(writer.claim.token, &request_as(&key, Mode::Shared, LONG)?);
    let answer = store.acquire(&again).await?;
    assert!(matches!(answer, Attempt::Contended(_)), "the writer's place was taken twice: {answer:?}");
    assert!(matches!(store.acquire(&request(&key, LONG)?).await?, Attempt::Contended(_)), "the reader was overlooked");
    assert!(matches!(renew(&other, &asked.claim, LONG, 1).await?, Renewed::Held(_)), "the reader is not held");
    assert!(matches!(other.release(&asked.claim).await?, Release::Released { .. }));
    let next = grant(&store, &mut request(&key, LONG)?).await?;
    assert!(next.fence > reader.fence, "{} is not above the reader's {}", next.fence, reader.fence);
    Ok(())
}

async fn a_downgrade_that_comes_too_late_changes_nothing(ctx: Ctx) -> CaseResult {
    let store = ctx.store().await?;
    if !is_claimed(&*store) {
        return Ok(());
    }
    let pairs = [(Mode::Exclusive, Mode::Exclusive), (Mode::Exclusive, Mode::Shared), (Mode::Shared, Mode::Exclusive)];
    for (held, wanted) in pairs {
        let (other, key) = (ctx.locker().await?, ctx.key()?);
        let mut holder = request_as(&key, held, LONG)?;
        grant(&store, &mut holder).await?;
        let (rw, lock) = (other.rw_lock(key.as_str()), other.lock(key.as_str()));
        let next = if wanted == Mode::Shared { rw.read() } else { rw.write() }.ttl(LONG);
        let waiting = tokio::spawn(async move { next.acquire_within(LONG).await });
        wait_for_waiter(&lock).await?;
        let late = in_place_of(Token::random()?, &request_as(&key, Mode::Shared, LONG)?);
        let answer = store.acquire(&late).await?;
        assert!(matches!(answer, Attempt::Contended(_)), "nobody's place was taken: {answer:?}");
        let renewed = renew(&store, &holder.claim, LONG, 1).await?;
        assert!(matches!(renewed, Renewed::Held(_)), "the holder lost the lock to another's downgrade: {renewed:?}");
        assert_shown(&lock, held, &[holder.claim.token]).await?;
        assert!(!waiting.is_finished(), "another's downgrade let in one that waits");
        assert!(matches!(store.release(&holder.claim).await?, Release::Released { .. }));
        let next = waiting.await??.ok_or("one that waits was left behind")?;
        assert_eq!(next.release().await?, Outcome::Released);
    }
    Ok(())
}

async fn the_place_of_a_reader_is_not_taken(ctx: Ctx) -> CaseResult {
    let (store, key) = (ctx.store().await?, ctx.key()?);
    if !is_claimed(&*store) {
        return Ok(());
    }
    let capability = &store.info().capability;
    let exclusive = |keeps, is_claimed| Some((Mode::Exclusive, keeps)).filter(|_| is_claimed);
    let taken_up = exclusive(false, capability.resume > Resume::None);
    let all = [Some((Mode::Shared, false)), taken_up, exclusive(true, capability.keeps)];
    let is_refused = async |from: Token| {
        for (mode, keeps) in all.into_iter().flatten() {
            let request = AcquireRequest { keeps, ..in_place_of(from, &request_as(&key, mode, LONG)?) };
            let answer = store.acquire(&request).await?;
            if !matches!(answer, Attempt::Contended(_)) {
                return Ok::<_, BoxError>(false);
            }
        }
        Ok(true)
    };
    assert!(is_refused(Token::random()?).await?, "a lock that was never used was taken");
    let mut reader = request_as(&key, Mode::Shared, LONG)?;
    grant(&store, &mut reader).await?;
    assert!(is_refused(reader.claim.token).await?, "the place of a reader was taken");
    assert!(matches!(store.release(&reader.claim).await?, Release::Released { .. }));
    assert!(is_refused(reader.claim.token).await?, "nobody's place was taken");
    let mut writer = request_as(&key, Mode::Exclusive, LONG)?;
    grant(&store, &mut writer).await?;
    assert!(is_refused(reader.claim.token).await?, "another's place was taken");
    let held = renew(&store, &writer.claim, LONG, 1).await?;
    assert!(matches!(held, Renewed::Held(_)), "the writer lost the lock: {held:?}");
    assert!(matches!(store.release(&writer.claim).await?, Release::Released { .. }));
    Ok(())
}

/// The same request, for the place of a lease.
fn in_place_of(from: Token, request: &AcquireRequest) -> AcquireRequest {
    AcquireRequest { from: Some(from), order: Order::Any, ..request.clone() }
}
