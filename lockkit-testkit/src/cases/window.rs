//! Locks that are kept for a window of time, whoever is done before that.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, ErrorKind, Guard, Lock, LockKey, Locker, LossReason, MultiLock, Outcome, Release, Renewed,
    ShiftedClock, StoreInfo, Token,
};

use super::{
    CaseResult, Ctx, LONG, UNTOLD, abandon_after, assert_taken, cases, fencing_claimed, grant, grant_again, locker,
    renew, request, seen,
};
use crate::BoxError;

cases! { "window":
    a_lock_is_kept_for_its_window [KEEPS] "A lock with keep_for is nobody's from the grant until the window is over, however short the work was; then another gets it."
    what_is_left_of_the_lease_does_not_count [KEEPS] "A window that is shorter than the ttl ends when it is over, and not with the lease."
    dropping_a_guard_keeps_the_lock [KEEPS] "A guard that is dropped keeps the lock as one that is released."
    a_release_that_is_abandoned_keeps_the_lock [KEEPS] "A release that is dropped at any moment keeps the lock all the same."
    a_window_may_be_longer_than_any_lease [KEEPS] "A window may be longer than the longest ttl. The one who keeps it is shown with what is left, and can be made to give way."
    what_is_late_does_not_cut_a_window_short [KEEPS] "A late renewal or release of the holder that is done changes nothing (R5, R7)."
    another_clock_ends_no_window [KEEPS_CLOCK] "A client whose clock is wrong by an hour gets no lock that is kept, and keeps none for longer (R10)."
    of_many_hosts_one_does_the_job [KEEPS] "Of many that start a job at once, each with a client of its own, one does it, and the others are told at once."
    other_tasks_of_the_process_wait_as_well [KEEPS] "A lock that is kept is not handed over to the next task of the process."
    work_that_is_longer_than_the_window_is_released [KEEPS] "A lock that was held for longer than its window is free when it is released."
    a_lock_that_was_broken_is_not_kept [KEEPS] "A holder whose lock was broken meanwhile keeps it from nobody when it is done, and is told that its lease is gone (R7)."
    a_holder_may_give_the_window_up [KEEPS] "release_early() lets others in at once; a window may also be set while the lock is held."
    what_can_not_be_kept_is_refused [NOTHING] "keep_for is refused where it is not claimed, for years, and for one lock of several (R12)."
}

/// Longer than the shortest that is kept, and than what servers are late by.
const WINDOW: Duration = Duration::from_millis(2500);
/// For a task to wait in its process.
const LINE_UP: Duration = Duration::from_millis(20);
/// Longer than any lease, and than the case takes. What a case leaves on a server when it fails is gone after that.
const HOUR: Duration = Duration::from_secs(3600);

/// A lock that is not lost while the case runs.
fn kept(locker: &Locker, name: &str, window: Duration) -> Lock {
    locker.lock(name).ttl(LONG).keep_for(window)
}

async fn take(lock: &Lock) -> Result<Guard, BoxError> {
    Ok(lock.try_acquire().await?.ok_or("it should be free")?)
}

/// Waits for the lock, and tells how long that took.
async fn awaited(locker: &Locker, name: &str, since: Instant) -> Result<(Guard, Duration), BoxError> {
    let next = locker.lock(name).ttl(LONG).acquire_within(LONG * 2).await?.ok_or("the window does not end")?;
    Ok((next, since.elapsed()))
}

async fn a_lock_is_kept_for_its_window(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let before = Instant::now();
    let guard = take(&kept(&mine, &name, WINDOW)).await?;
    let fence = guard.fence();
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_taken(&other, &name).await?;
    assert_taken(&mine, &name).await?;
    let (next, gap) = awaited(&other, &name, before).await?;
    assert!(gap >= WINDOW, "granted again {gap:?} after a grant that was to be kept for {WINDOW:?}");
    assert!(next.fence() > fence || !fencing_claimed(&other), "the fence {} after {fence}", next.fence());
    Ok(())
}

async fn what_is_left_of_the_lease_does_not_count(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    assert_eq!(take(&kept(&mine, &name, WINDOW)).await?.release().await?, Outcome::Released);
    let released = Instant::now();
    let (_next, late) = awaited(&other, &name, released).await?;
    assert!(
        late < WINDOW + UNTOLD + Duration::from_secs(5),
        "granted {late:?} after the release, with a ttl of {LONG:?}"
    );
    Ok(())
}

async fn dropping_a_guard_keeps_the_lock(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&kept(&mine, &name, HOUR)).await?;
    let token = guard.token();
    drop(guard);
    mine.shutdown(LONG).await?;
    let keeper = keeper(&other, &name).await?;
    assert_ne!(keeper, token, "the lease was left to lapse");
    make_way(&other, &name, keeper).await
}

async fn a_release_that_is_abandoned_keeps_the_lock(ctx: Ctx) -> CaseResult {
    let (mine, other) = (ctx.locker().await?, ctx.locker().await?);
    let mut ended = Vec::new();
    for round in 0..50_u64 {
        let name = ctx.name();
        let guard = take(&kept(&mine, &name, HOUR)).await?;
        let token = guard.token();
        drop(abandon_after(Duration::from_micros(round * 20), guard.release()).await);
        ended.push((name, token));
    }
    mine.shutdown(LONG).await?;
    for (name, token) in ended {
        let keeper = keeper(&other, &name).await?;
        assert_ne!(keeper, token, "the lease was left to lapse");
        make_way(&other, &name, keeper).await?;
    }
    Ok(())
}

/// Ends a window.
async fn make_way(locker: &Locker, name: &str, keeper: Token) -> CaseResult {
    let answer = locker.break_lock(name, keeper).await?;
    assert!(matches!(answer, Release::Released { .. }), "{answer:?}");
    Ok(())
}

/// The token of the lease that keeps a lock.
async fn keeper(locker: &Locker, name: &str) -> Result<Token, BoxError> {
    let state = locker.lock(name).inspect().await?;
    let [keeper] = &state.holders[..] else { return Err(format!("one keeps the lock: {:?}", state.holders).into()) };
    Ok(keeper.token.ok_or("it is a lockkit client")?)
}

async fn a_window_may_be_longer_than_any_lease(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    assert_eq!(take(&kept(&mine, &name, HOUR)).await?.release().await?, Outcome::Released);
    assert_taken(&other, &name).await?;
    let state = other.lock(&name).inspect().await?;
    let [keeper] = &state.holders[..] else { return Err(format!("one keeps the lock: {:?}", state.holders).into()) };
    let left = keeper.remaining.ok_or("a window ends by time")?;
    assert!(left <= HOUR && left > HOUR - Duration::from_secs(600), "{left:?} are left of {HOUR:?}");
    assert!(keeper.info.as_str().ends_with(" (done)"), "{:?}", keeper.info);
    make_way(&other, &name, keeper.token.ok_or("it is a lockkit client")?).await?;
    drop(take(&other.lock(&name)).await?);
    Ok(())
}

async fn what_is_late_does_not_cut_a_window_short(ctx: Ctx) -> CaseResult {
    let (store, other, key) = (ctx.store().await?, ctx.locker().await?, ctx.key()?);
    let mut first = request(&key, LONG)?;
    grant(&store, &mut first).await?;
    let asked = request(&key, LONG)?;
    let keeps = AcquireRequest { from: Some(first.claim.token), keeps: true, ttl: HOUR, ..asked };
    grant_again(&store, &keeps).await?;
    // The same again: its answer was lost.
    grant_again(&store, &keeps).await?;
    assert!(matches!(renew(&store, &first.claim, LONG, 1).await?, Renewed::Lost(_)), "it was renewed");
    assert!(matches!(store.release(&first.claim).await?, Release::NotHeld(_)), "it was released");
    let again = AcquireRequest { ttl: LONG, ..request(&key, LONG)? };
    assert!(matches!(store.acquire(&again).await?, Attempt::Contended(_)), "granted twice");
    let state = other.lock(key.as_str()).inspect().await?;
    let left = state.holders.first().and_then(|keeper| keeper.remaining).unwrap_or_default();
    assert!(left > HOUR / 2, "{left:?} are left of {HOUR:?}");
    store.release(&keeps.claim).await?;
    Ok(())
}

async fn another_clock_ends_no_window(ctx: Ctx) -> CaseResult {
    let ahead = Arc::new(ShiftedClock::default());
    ahead.advance(HOUR);
    let odd = locker(ctx.backend.open_with_clock(ahead).await?.ok_or("takes no clock")?);
    let (sane, job, other_job) = (ctx.locker().await?, ctx.name(), ctx.name());
    let before = Instant::now();
    assert_eq!(take(&kept(&sane, &job, WINDOW)).await?.release().await?, Outcome::Released);
    assert_eq!(take(&kept(&odd, &other_job, WINDOW)).await?.release().await?, Outcome::Released);
    assert_taken(&odd, &job).await?;
    assert_taken(&sane, &other_job).await?;
    for (client, job) in [(&odd, &job), (&sane, &other_job)] {
        let (next, waited) = awaited(client, job, before).await?;
        assert!(waited >= WINDOW, "another did the job again after {waited:?}");
        assert_eq!(next.release().await?, Outcome::Released);
    }
    Ok(())
}

async fn of_many_hosts_one_does_the_job(ctx: Ctx) -> CaseResult {
    const HOSTS: usize = 24;
    let (name, mut hosts) = (ctx.name(), Vec::new());
    for _ in 0..HOSTS {
        hosts.push(ctx.locker().await?);
    }
    // All at once, then each again when one has done the job.
    let jobs: Vec<_> = hosts.iter().map(|host| kept(host, &name, HOUR)).collect();
    let mut done = 0;
    for started in jobs
        .iter()
        .map(|job| {
            tokio::spawn({
                let job = job.clone();
                async move { job.try_acquire().await }
            })
        })
        .collect::<Vec<_>>()
    {
        if let Some(guard) = started.await?? {
            done += 1;
            assert_eq!(guard.release().await?, Outcome::Released);
        }
    }
    assert_eq!(done, 1, "{done} of {HOSTS} hosts did the job");
    for job in &jobs {
        assert!(job.try_acquire().await?.is_none(), "one did the job again in its window");
    }
    let holders = seen(&hosts[0].lock(&name)).await?.holders;
    let token = holders[0].token.ok_or("it is shown")?;
    let _ = hosts[0].break_lock(&name, token).await?;
    Ok(())
}

async fn other_tasks_of_the_process_wait_as_well(ctx: Ctx) -> CaseResult {
    let (mine, name) = (ctx.locker().await?, ctx.name());
    let first = take(&mine.lock(&name).ttl(LONG)).await?;
    let acquiring = |lock: Lock| tokio::spawn(async move { lock.acquire().await.map(|guard| (guard, Instant::now())) });
    // They line up behind each other, and the holder has the lock for so long that the next may hand it on.
    let second = acquiring(kept(&mine, &name, WINDOW));
    tokio::time::sleep(LINE_UP).await;
    let third = acquiring(mine.lock(&name).ttl(LONG));
    tokio::time::sleep(LINE_UP).await;
    let before = Instant::now();
    assert_eq!(first.release().await?, Outcome::Released);
    assert_eq!(second.await??.0.release().await?, Outcome::Released);
    let gap = third.await??.1.duration_since(before);
    assert!(gap >= WINDOW, "handed over {gap:?} after a grant that was to be kept for {WINDOW:?}");
    Ok(())
}

async fn work_that_is_longer_than_the_window_is_released(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&kept(&mine, &name, Duration::from_nanos(1))).await?;
    assert_eq!(guard.release().await?, Outcome::Released);
    drop(take(&other.lock(&name)).await?);
    Ok(())
}

async fn a_lock_that_was_broken_is_not_kept(ctx: Ctx) -> CaseResult {
    let (store, other, name) = (ctx.store().await?, ctx.locker().await?, ctx.name());
    let mine = Locker::shared_builder(Arc::clone(&store)).build();
    let guard = take(&kept(&mine, &name, HOUR)).await?;
    make_way(&other, &name, guard.token()).await?;
    let asked = request(&LockKey::new(name.as_str())?, LONG)?;
    let keeps = AcquireRequest { from: Some(guard.token()), keeps: true, ..asked };
    match store.acquire(&keeps).await? {
        Attempt::Contended(refused) => assert!(refused.holder.is_none(), "nobody has the lock: {refused:?}"),
        Attempt::Granted(hold) => return Err(format!("a lease that is gone was taken over: {hold:?}").into()),
    }
    let ended = guard.release().await?;
    // Some stores know who ended it.
    let is_told = matches!(ended, Outcome::NotHeld(LossReason::Gone | LossReason::Revoked));
    assert!(is_told, "another ended its lease: {ended:?}");
    drop(take(&other.lock(&name)).await?);
    Ok(())
}

async fn a_holder_may_give_the_window_up(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take(&kept(&mine, &name, HOUR)).await?;
    assert_eq!(guard.release_early().await?, Outcome::Released);
    let guard = take(&other.lock(&name).ttl(LONG)).await?;
    guard.keep_for(HOUR)?;
    assert_eq!(guard.release().await?, Outcome::Released);
    assert_taken(&mine, &name).await?;
    let keeper = keeper(&mine, &name).await?;
    make_way(&mine, &name, keeper).await
}

async fn what_can_not_be_kept_is_refused(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let capability = locker.info().capability.clone();
    let refused = |answer: lockkit_core::Result<Option<Guard>>| answer.err().map(|error| error.kind());
    let plain = refused(locker.lock(&name).keep_for(WINDOW).try_acquire().await);
    if !capability.keeps {
        assert_eq!(plain, Some(ErrorKind::Unsupported), "it is not claimed");
        return Ok(());
    }
    assert_eq!(plain, None);
    if capability.shared {
        let reader = locker.rw_lock(&name).read().keep_for(WINDOW).try_acquire().await;
        assert_eq!(refused(reader), Some(ErrorKind::Unsupported));
    }
    let too_long = StoreInfo::LONGEST_KEPT + Duration::from_secs(1);
    let years = locker.lock(ctx.name()).keep_for(too_long).try_acquire().await;
    assert_eq!(refused(years), Some(ErrorKind::InvalidInput));
    let several = MultiLock::new([locker.lock(ctx.name()), locker.lock(ctx.name()).keep_for(WINDOW)]);
    let several = several.try_acquire().await.err().map(|error| error.kind());
    assert_eq!(several, Some(ErrorKind::InvalidInput));
    Ok(())
}
