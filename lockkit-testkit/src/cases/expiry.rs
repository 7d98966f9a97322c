//! Leases that end.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    Attempt, ErrorKind, Guard, Locker, LossReason, Outcome, Query, Renewed, ShiftedClock, Status, drift,
};

use super::{
    AGAIN, CaseResult, Ctx, LONG, SHORT, SLACK, assert_taken, cases, fresh, grant, locker, renew, request, seen, take,
};
use crate::BoxError;

cases! { "expiry":
    an_unrenewed_lease_lapses [TTL] "Without renewal the lock is free after the ttl, and never before the guard knows."
    the_lease_of_a_dead_holder_lapses [TTL] "A lease that nobody renews or releases is free after its ttl, and not before (R10)."
    no_ttl_is_rounded_down [TTL] "A lease lasts its whole ttl, also when that is not a whole number of seconds."
    another_clock_takes_nothing [CLOCK] "A client whose clock is wrong by an hour neither takes a held lock nor keeps its own for longer (R10)."
    a_renewed_lease_outlives_its_ttl [TTL] "With renewal a lock is held for as long as its guard lives."
    nothing_remains_after_the_deadline [TTL] "From the deadline on a guard says Lost, and nothing remains of it."
    the_loss_is_announced_in_time [TTL] "A task that waits for the loss is told by the deadline, also one that comes late."
    a_ttl_out_of_bounds_is_refused [TTL] "A ttl that the store can't keep is refused as invalid input."
    a_suspended_process_knows_that_it_lost [CLOCK] "A process that was suspended finds its guard lost at first use."
    max_hold_ends_a_forgotten_guard [NOTHING] "A guard with max_hold ends by then, although it is renewed."
    work_is_stopped_before_the_lease_can_lapse [TTL] "run() drops the work while the lease still lasts."
    a_manual_renewal_extends [TTL] "renew() extends an unrenewed lease by its ttl."
}

async fn an_unrenewed_lease_lapses(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = take_unrenewed(&mine, &name).await?;
    let next = other.lock(&name).ttl(LONG).acquire_within(SHORT * 2 + Duration::from_secs(6)).await?;
    assert!(!guard.is_held(), "the next holder came while the guard still believed");
    assert_eq!(guard.status(), Status::Lost(LossReason::Expired));
    let next = next.ok_or("the lease did not lapse")?;
    assert!(matches!(guard.release().await?, Outcome::NotHeld(LossReason::Expired)));
    assert!(next.is_held());
    assert_taken(&mine, &name).await
}

async fn the_lease_of_a_dead_holder_lapses(ctx: Ctx) -> CaseResult {
    let (store, other, key) = (ctx.store().await?, ctx.store().await?, ctx.key()?);
    // Without a locker: a living one releases what it loses.
    let dead = grant(&store, &mut request(&key, SHORT)?).await?;
    let mut next = request(&key, LONG)?;
    while let Attempt::Contended(by) = other.acquire(&next).await? {
        next.claim = fresh(next.claim, &by)?;
        let late = store.info().clock.now().since(dead.until);
        assert!(late < Duration::from_secs(2), "still held {late:?} after its end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let early = dead.until.since(store.info().clock.now());
    assert!(early <= drift(SHORT), "granted again {early:?} before its end");
    Ok(())
}

async fn no_ttl_is_rounded_down(ctx: Ctx) -> CaseResult {
    let (mine, other) = (ctx.locker().await?, ctx.locker().await?);
    let mut holds = Vec::new();
    for millis in [1490, 1900, 2990] {
        let (mine, other, name) = (mine.clone(), other.clone(), ctx.name());
        holds.push(tokio::spawn(async move {
            let ttl = Duration::from_millis(millis);
            let guard = mine.lock(&name).ttl(ttl).no_renewal().try_acquire().await?;
            let next = other.lock(&name).ttl(LONG).acquire_within(ttl + Duration::from_secs(6)).await?;
            // Looked at before anything else: it is this instant that counts.
            let believed = guard.as_ref().is_some_and(Guard::is_held);
            assert!(!believed, "the lock was granted again while its holder still believed in its {ttl:?}");
            Ok::<_, lockkit_core::Error>(guard.is_some() && next.is_some())
        }));
    }
    for hold in holds {
        assert!(hold.await??, "a free lock was refused");
    }
    Ok(())
}

async fn another_clock_takes_nothing(ctx: Ctx) -> CaseResult {
    let ahead = Arc::new(ShiftedClock::default());
    ahead.advance(Duration::from_secs(3600));
    let odd = ctx.backend.open_with_clock(ahead).await?.ok_or("takes no clock")?;
    let (sane, held, lapsing) = (ctx.store().await?, ctx.key()?, ctx.key()?);
    let mut mine = request(&held, LONG)?;
    grant(&sane, &mut mine).await?;
    let taken = matches!(odd.acquire(&request(&held, LONG)?).await?, Attempt::Granted(_));
    assert!(!taken, "a client with another clock took a held lock");
    let state = odd.inspect(&Query::Keys(vec![held])).await?;
    assert_eq!(state[0].holders[0].token, Some(mine.claim.token), "it can't see the holder");
    assert!(matches!(renew(&sane, &mine.claim, LONG, 1).await?, Renewed::Held(_)), "the lease was lost");
    // The other way round: what it is granted itself must not last for an hour.
    grant(&odd, &mut request(&lapsing, SHORT)?).await?;
    let free = locker(sane).lock(lapsing.as_str()).acquire_within(SHORT + Duration::from_secs(6)).await?;
    assert!(free.is_some(), "the lease of a client with another clock did not lapse");
    Ok(())
}

async fn a_renewed_lease_outlives_its_ttl(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    // Two of its renewals may be late by a second each.
    let ttl = Duration::from_secs(3);
    let guard = take(&mine, &name, ttl).await?;
    let rival = other.lock(&name);
    tokio::select! {
        // What comes first is told first, also by a process that stood still.
        biased;
        reason = guard.lost() => panic!("lost while it was renewed: {reason}"),
        answer = rival.acquire_within(ttl * 2) => assert!(answer?.is_none(), "granted twice"),
    }
    assert_eq!(guard.status(), Status::Held);
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

async fn nothing_remains_after_the_deadline(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let guard = take_unrenewed(&locker, &name).await?;
    assert_eq!(guard.lost().await, LossReason::Expired);
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert!(!guard.is_held());
    assert_eq!(guard.ensure(Duration::ZERO).expect_err("lost").kind(), ErrorKind::Lost);
    assert_eq!(guard.renew().await.expect_err("lost").kind(), ErrorKind::Lost);
    Ok(())
}

async fn the_loss_is_announced_in_time(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let guard = take_unrenewed(&locker, &name).await?;
    let waited = tokio::time::timeout(guard.remaining() + SLACK, guard.lost()).await;
    assert_eq!(waited.expect("not announced by the deadline"), LossReason::Expired);
    let late = tokio::time::timeout(SLACK, guard.lost()).await;
    assert_eq!(late.expect("a late listener was not told"), LossReason::Expired);
    Ok(())
}

async fn a_ttl_out_of_bounds_is_refused(ctx: Ctx) -> CaseResult {
    let (locker, name) = (ctx.locker().await?, ctx.name());
    for ttl in [Duration::ZERO, Duration::from_millis(1), Duration::MAX] {
        let error = locker.lock(&name).ttl(ttl).try_acquire().await.expect_err("must be refused");
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{ttl:?}");
    }
    assert!(seen(&locker.lock(&name)).await?.holders.is_empty());
    Ok(())
}

async fn a_suspended_process_knows_that_it_lost(ctx: Ctx) -> CaseResult {
    let clock = Arc::new(ShiftedClock::default());
    let store = ctx.backend.open_with_clock(Arc::<ShiftedClock>::clone(&clock)).await?.ok_or("takes no clock")?;
    let (locker, name) = (locker(store), ctx.name());
    let guard = take(&locker, &name, LONG).await?;
    assert!(guard.is_held());
    clock.advance(LONG * 2);
    assert!(!guard.is_held(), "it slept past its lease and did not notice");
    let ran = guard.run(async { panic!("the work went on after the suspension") }).await;
    assert_eq!(ran.expect_err("lost").kind(), ErrorKind::Lost);
    Ok(())
}

async fn max_hold_ends_a_forgotten_guard(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = mine.lock(&name).ttl(LONG).max_hold(SHORT).try_acquire().await?.ok_or("should be free")?;
    let next = other.lock(&name).ttl(LONG).acquire_within(SHORT + Duration::from_secs(6)).await?;
    assert_eq!(guard.status(), Status::Lost(LossReason::MaxHold));
    assert!(next.is_some(), "the lock was not freed at max_hold");
    Ok(())
}

async fn work_is_stopped_before_the_lease_can_lapse(ctx: Ctx) -> CaseResult {
    struct Stopped<'a>(&'a Guard, &'a std::sync::Mutex<Option<Duration>>);
    impl Drop for Stopped<'_> {
        fn drop(&mut self) {
            *self.1.lock().expect("unpoisoned") = Some(self.0.remaining());
        }
    }
    let (locker, name) = (ctx.locker().await?, ctx.name());
    let ttl = Duration::from_secs(2);
    let guard = locker.lock(&name).ttl(ttl).no_renewal().try_acquire().await?.ok_or("should be free")?;
    let left_at_stop = std::sync::Mutex::new(None);
    let work = guard.run(async {
        let _stopped = Stopped(&guard, &left_at_stop);
        std::future::pending::<()>().await;
    });
    // In the same task, between the moment at which the work is due to stop, a twentieth of the ttl before the end, and the end.
    let witness = async {
        tokio::time::sleep(guard.remaining().saturating_sub(ttl / 40)).await;
        guard.remaining()
    };
    let (ran, left_at_witness) = tokio::join!(biased; work, witness);
    assert_eq!(ran.expect_err("the work can't end by itself").kind(), ErrorKind::Lost);
    let left = left_at_stop.lock().expect("unpoisoned").ok_or("the work was not dropped")?;
    // A process that stood still then can't stop anything. One that went on before the end, for the witness, had to.
    assert!(left > Duration::ZERO || left_at_witness.is_zero(), "the work was dropped only after the deadline");
    assert!(left < ttl / 2, "the work was dropped with {left:?} left");
    Ok(())
}

async fn a_manual_renewal_extends(ctx: Ctx) -> CaseResult {
    let (mine, other, name) = (ctx.locker().await?, ctx.locker().await?, ctx.name());
    let guard = mine.lock(&name).ttl(LONG).no_renewal().try_acquire().await?.ok_or("should be free")?;
    // What the store has on record, and what the guard believes.
    let left = async || {
        let state = seen(&other.lock(&name)).await?;
        let shown = state.holders.first().ok_or("nobody is shown to hold it")?.remaining;
        Ok::<_, BoxError>((shown, guard.remaining()))
    };
    for _ in 0..3 {
        assert!(other.lock(&name).acquire_within(Duration::from_millis(300)).await?.is_none(), "granted twice");
        let before = left().await?;
        guard.renew().await?;
        let after = left().await?;
        assert!(after.0 > before.0 || after.0.is_none(), "the store has {after:?} on record after {before:?}");
        assert!(after.1 > before.1, "{after:?} are left after {before:?}");
    }
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

/// Takes a free lock for a short time, without renewal.
async fn take_unrenewed(locker: &Locker, name: &str) -> Result<Guard, BoxError> {
    let guard = locker.lock(name).ttl(SHORT).no_renewal().acquire_within(AGAIN).await?;
    guard.ok_or_else(|| format!("{name} should be free").into())
}
