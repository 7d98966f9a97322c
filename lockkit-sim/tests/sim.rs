//! The simulated store does what its script says, in no time.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant as RealInstant},
};

use lockkit_core::{Effect, ErrorKind, LockStore, Locker, LossReason, Outcome, Result, Status, Waiting};
use lockkit_sim::{Answer, Call, Fault, Operation, SimStore};
use tokio::time::{Instant, advance, sleep};

const TTL: Duration = Duration::from_secs(30);

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn answers(calls: &[Call], operation: Operation) -> Vec<Option<Answer>> {
    calls.iter().filter(|call| call.operation == operation).map(|call| call.answer).collect()
}

/// How many hold the lock.
async fn holder_count(store: &SimStore) -> Result<usize> {
    Ok(store.state("a").await?.holders.len())
}

#[tokio::test(start_paused = true)]
async fn hours_of_renewals_take_no_time() -> Result<()> {
    let (store, real) = (SimStore::new(), RealInstant::now());
    let guard = Locker::new(store.clone()).lock("a").ttl(TTL).acquire().await?;
    sleep(secs(24 * 3600)).await;
    assert_eq!(guard.status(), Status::Held);
    let renewals = answers(&store.take_calls(), Operation::Renew);
    assert!((7000..11000).contains(&renewals.len()), "{} renewals in a day", renewals.len());
    assert!(renewals.iter().all(|answer| *answer == Some(Answer::Renewed)));
    assert_eq!(guard.release().await?, Outcome::Released);
    assert!(real.elapsed() < secs(60), "a day took {:?}", real.elapsed());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_leaves_the_effect() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    store.inject(Fault::LoseReply.on(Operation::Acquire));
    let start = Instant::now();
    let error = locker.lock("a").ttl(TTL).try_acquire().await.expect_err("no answer");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::Unknown));
    assert_eq!(start.elapsed(), SimStore::BOUND);
    assert_eq!(holder_count(&store).await?, 1, "it was granted");
    locker.shutdown(secs(10)).await?;
    assert_eq!(holder_count(&store).await?, 0, "and released again");
    let seen = store.calls();
    assert_eq!(seen[0].fault, Some(Fault::LoseReply));
    assert_eq!(seen[0].answer, Some(Answer::Failed(ErrorKind::TimedOut, Effect::Unknown)));
    assert_eq!(answers(&seen, Operation::Release), [Some(Answer::Released)]);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_lost_request_has_no_effect() -> Result<()> {
    let store = SimStore::new();
    store.inject(Fault::LoseRequest);
    let error = Locker::new(store.clone()).lock("a").try_acquire().await.expect_err("no answer");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::Unknown));
    assert_eq!(holder_count(&store).await?, 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_late_request_arrives_after_all_and_is_undone() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    store.inject(Fault::DelayRequest(secs(5)).on(Operation::Acquire));
    locker.lock("a").ttl(TTL).try_acquire().await.expect_err("no answer in 2 s");
    assert_eq!(holder_count(&store).await?, 0, "still on its way");
    sleep(Duration::from_millis(3001)).await;
    let calls = answers(&store.calls(), Operation::Release);
    assert!(calls.contains(&Some(Answer::NotHeld(LossReason::Gone))), "released too early: {calls:?}");
    locker.shutdown(TTL).await?;
    assert_eq!(answers(&store.calls(), Operation::Release).last(), Some(&Some(Answer::Released)));
    assert_eq!(holder_count(&store).await?, 0);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_client_keep_their_order() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    store.inject(Fault::DelayRequest(secs(1)).on(Operation::Acquire));
    // The caller goes away while the request is on its way; the release goes behind it.
    let lock = locker.lock("a");
    assert!(tokio::time::timeout(secs(0), lock.acquire()).await.is_err());
    locker.shutdown(secs(5)).await?;
    assert_eq!(answers(&store.calls(), Operation::Release), [Some(Answer::Released)]);
    assert_eq!(store.calls()[0].answer, None, "nobody heard the answer");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_slow_answer_leaves_less_of_the_lease() -> Result<()> {
    let store = SimStore::new();
    store.inject(Fault::DelayReply(secs(1)).on(Operation::Acquire));
    let guard = Locker::new(store.clone()).lock("a").ttl(secs(10)).acquire().await?;
    assert!(guard.remaining() <= secs(9), "{:?}", guard.remaining());
    drop(guard);
    store.inject(Fault::DelayRequest(secs(1)).on(Operation::Acquire));
    let guard = Locker::new(store.another_client()).lock("b").ttl(secs(10)).acquire().await?;
    assert!(guard.remaining() > secs(9), "another client has its own script");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_store_costs_the_lease_and_heals() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let guard = locker.lock("a").ttl(TTL).acquire().await?;
    store.inject(Fault::REFUSED.until_healed());
    sleep(secs(15)).await;
    assert_eq!(guard.status(), Status::Suspect);
    assert_eq!(guard.lost().await, LossReason::Unreachable);
    let error = locker.lock("b").acquire().await.expect_err("out of patience");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    store.heal();
    drop(locker.lock("b").acquire().await?);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_waiter_learns_that_the_store_became_unreachable() -> Result<()> {
    let store = SimStore::new();
    let guard = Locker::new(store.another_client()).lock("a").ttl(TTL).acquire().await?;
    let lock = Locker::builder(store.clone()).patience(secs(1)).build().lock("a");
    let waiting = tokio::spawn(async move { lock.acquire().await });
    sleep(secs(1)).await;
    store.inject(Fault::REFUSED.until_healed());
    let error = waiting.await.expect("no panic").expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_frozen_store_does_everything_when_it_thaws() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let guard = locker.lock("a").ttl(TTL).acquire().await?;
    store.freeze(secs(5));
    let error = locker.lock("b").try_acquire().await.expect_err("frozen");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::Unknown));
    assert!(store.state("b").await?.holders.is_empty());
    sleep(secs(60)).await;
    assert_eq!(guard.status(), Status::Held, "it survived the freeze");
    assert!(store.state("b").await?.fence.is_some(), "the request came through");
    assert!(store.state("b").await?.holders.is_empty(), "and was undone");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn what_is_done_to_a_lease_is_learnt_as_it_would_be() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let lock = locker.lock("a").ttl(TTL);

    let guard = lock.acquire().await?;
    store.expire("a").await?;
    assert!(guard.is_held(), "nobody told it");
    assert_eq!(guard.lost().await, LossReason::Gone);

    let guard = lock.acquire().await?;
    let stranger = store.take_over("a", secs(20)).await?;
    assert!(guard.is_held(), "nobody told it");
    assert!(stranger.fence > guard.fence());
    assert_eq!(guard.release().await?, Outcome::NotHeld(LossReason::Taken));
    assert!(lock.try_acquire().await?.is_none());

    let start = Instant::now();
    let guard = lock.acquire().await?;
    assert!((secs(19)..secs(21)).contains(&start.elapsed()), "{:?}", start.elapsed());
    let start = Instant::now();
    store.revoke("a").await?;
    assert_eq!(guard.lost().await, LossReason::Revoked);
    let guard = lock.acquire().await?;
    let other = Locker::new(store.another_client()).lock("b").acquire().await?;
    store.end_session().await?;
    assert_eq!(guard.lost().await, LossReason::SessionEnded);
    assert!(start.elapsed() < secs(1), "told at once, not after {:?}", start.elapsed());
    assert_eq!(other.release().await?, Outcome::Released, "another client has another session");
    Ok(())
}

/// Whichever client has it broken.
#[tokio::test(start_paused = true)]
async fn a_holder_learns_at_once_that_another_client_had_its_lease_ended() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.another_client());
    let (guard, beside) = (locker.lock("a").ttl(TTL).acquire().await?, locker.lock("b").ttl(TTL).acquire().await?);
    let start = Instant::now();
    store.revoke("a").await?;
    assert_eq!(guard.lost().await, LossReason::Revoked);
    assert!(start.elapsed() < secs(1), "told at once, not after {:?}", start.elapsed());
    assert_eq!(beside.status(), Status::Held);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn no_time_is_too_long() -> Result<()> {
    let store = SimStore::new();
    let lock = Locker::new(store.clone()).lock("a").ttl(TTL);
    store.freeze(Duration::MAX);
    assert_eq!(lock.try_acquire().await.expect_err("frozen").kind(), ErrorKind::TimedOut);
    store.heal();
    store.inject(Fault::DelayRequest(Duration::MAX));
    let late = Locker::new(store.another_client().bound(secs(1))).lock("b").try_acquire().await?;
    assert!(late.is_some(), "another client has its own script");
    assert_eq!(lock.try_acquire().await.expect_err("on its way").kind(), ErrorKind::TimedOut);
    let guard = lock.acquire_within(secs(10)).await?.expect("over a new connection");
    store.suspend(Duration::MAX);
    store.suspend(secs(1));
    assert_eq!(guard.status(), Status::Lost(LossReason::Expired), "the machine slept for ever");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn time_can_leap_in_each_way() -> Result<()> {
    let store = SimStore::new();
    let lock = Locker::new(store.clone()).lock("a").ttl(TTL);
    let guard = lock.acquire().await?;
    advance(secs(31)).await;
    assert_eq!(guard.status(), Status::Lost(LossReason::Expired), "the process stood still");

    let guard = lock.acquire().await?;
    let before = Instant::now();
    store.suspend(secs(31));
    assert_eq!(guard.status(), Status::Lost(LossReason::Expired), "the machine slept");
    assert_eq!(before, Instant::now());
    let other = Locker::new(store.another_client()).lock("a").try_acquire().await?;
    assert!(other.is_some(), "to others the lease has lapsed, too");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn rules_are_used_up_in_their_order() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let fail = |kind| Fault::Fail(kind, Effect::None);
    store.inject(fail(ErrorKind::Denied).on(Operation::Inspect).times(2));
    store.inject(fail(ErrorKind::Deadlock));
    store.inject(fail(ErrorKind::Unexpected));
    let mut kinds = Vec::new();
    for _ in 0..5 {
        kinds.push(locker.lock("a").inspect().await.err().map(|e| e.kind()));
    }
    let [denied, deadlock, odd] = [ErrorKind::Denied, ErrorKind::Deadlock, ErrorKind::Unexpected].map(Some);
    assert_eq!(kinds, [denied, denied, deadlock, odd, None]);
    let error = {
        store.inject(Fault::LoseReply);
        locker.lock("a").inspect().await.expect_err("lost")
    };
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::None), "reading changes nothing");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_polled_store_is_asked_again_and_again() -> Result<()> {
    let store = SimStore::new().polled().bound(secs(1));
    assert_eq!(store.info().capability.waiting, Waiting::Poll);
    let guard = Locker::new(store.another_client()).lock("a").acquire().await?;
    let lock = Locker::new(store.clone()).lock("a");
    let waiting = tokio::spawn(async move { lock.acquire().await });
    sleep(secs(3)).await;
    assert!(answers(&store.calls(), Operation::Inspect).len() > 5);
    drop(guard);
    drop(waiting.await.expect("no panic")?);
    Ok(())
}

/// Also where nobody is woken, and nobody keeps the place of a client by waiting at the store.
#[tokio::test(start_paused = true)]
async fn those_that_stand_in_line_are_served_as_they_came() -> Result<()> {
    for store in [SimStore::new(), SimStore::new().polled()] {
        let lock = |store: &SimStore| Locker::new(store.another_client()).rw_lock("a");
        let guard = lock(&store).write().acquire().await?;
        let served = Arc::new(Mutex::new(Vec::new()));
        let mut waiting = Vec::new();
        for number in 0..6_u32 {
            let lock = if number % 2 == 0 { lock(&store).read() } else { lock(&store).write() };
            let served = Arc::clone(&served);
            waiting.push(tokio::spawn(async move {
                let guard = lock.acquire().await?;
                served.lock().unwrap().push(number);
                guard.release().await
            }));
            while store.state("a").await?.waiters != Some(number + 1) {
                sleep(Duration::from_millis(1)).await;
            }
        }
        // Longer than a place is kept for one that does not ask again.
        sleep(secs(20)).await;
        assert_eq!(store.state("a").await?.waiters, Some(6));
        assert_eq!(guard.release().await?, Outcome::Released);
        for waiter in waiting {
            assert_eq!(waiter.await.expect("no panic")?, Outcome::Released);
        }
        assert_eq!(*served.lock().unwrap(), [0, 1, 2, 3, 4, 5]);
    }
    Ok(())
}

/// The stranger takes the holder's place; those that wait go on waiting.
#[tokio::test(start_paused = true)]
async fn a_stranger_passes_those_that_stand_in_line() -> Result<()> {
    let store = SimStore::new();
    let prices = Locker::new(store.clone()).rw_lock("a");
    let guard = prices.write().ttl(TTL).acquire().await?;
    let reader = prices.read();
    let waiting = tokio::spawn(async move { reader.acquire().await });
    while store.state("a").await?.waiters != Some(1) {
        sleep(Duration::from_millis(1)).await;
    }
    let stranger = store.take_over("a", secs(20)).await?;
    assert!(stranger.fence > guard.fence());
    assert_eq!(guard.lost().await, LossReason::Taken);
    assert!(waiting.await.expect("no panic")?.fence() > stranger.fence);
    // Where others than a writer hold the lock, those that wait go first.
    let readers = [prices.read().acquire().await?, prices.read().acquire().await?];
    let writer = prices.write();
    let waiting = tokio::spawn(async move { writer.acquire().await });
    while store.state("a").await?.waiters != Some(1) {
        sleep(Duration::from_millis(1)).await;
    }
    let stranger = store.take_over("a", secs(20)).await?;
    let writer = waiting.await.expect("no panic")?;
    assert!(stranger.fence > writer.fence());
    assert_eq!(writer.lost().await, LossReason::Taken);
    drop(readers);
    Ok(())
}
