//! Answers, wake-ups and time itself that come late: what the engine makes of them.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, ErrorKind, LockStore, Locker, LossReason, MemoryStore, Outcome, Result, StoreInfo, drift,
};
use lockkit_sim::{Answer, Call, Fault, Operation, SimStore};
use lockkit_testkit::{Alter, Altered};
use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, sleep, timeout},
};

const TTL: Duration = Duration::from_secs(30);

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// The lease would end before anybody could use it.
#[tokio::test(start_paused = true)]
async fn a_grant_of_which_little_is_left_is_none() -> Result<()> {
    let (store, ttl) = (SimStore::new(), Duration::from_secs(2));
    store.inject(Fault::DelayReply(ttl * 9 / 10).on(Operation::Acquire));
    let guard = Locker::new(store.clone()).lock("a").ttl(ttl).acquire().await?;
    assert!(guard.remaining() >= ttl / 4, "{:?} of {ttl:?}", guard.remaining());
    Ok(())
}

/// The thread of the first that asks stands still between the store's answer and the look at it.
#[derive(Debug)]
struct StandsStill {
    inner: MemoryStore,
    first: Mutex<Option<(oneshot::Sender<()>, mpsc::Receiver<()>)>>,
}

#[async_trait]
impl Alter for StandsStill {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let answer = self.inner.acquire(request).await;
        let first = self.first.lock().expect("unpoisoned").take();
        if let Some((stands, goes_on)) = first {
            stands.send(()).expect("it is waited for");
            goes_on.recv().expect("it goes on");
        }
        answer
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_grant_is_none_if_another_went_past_before_it_was_looked_at() -> Result<()> {
    let ((stands, stood), (go_on, goes_on)) = (oneshot::channel(), mpsc::channel());
    let first = Mutex::new(Some((stands, goes_on)));
    let lock = Locker::new(Altered(StandsStill { inner: MemoryStore::new(), first })).lock("a").ttl(TTL);
    let asking = lock.clone();
    let first = tokio::spawn(async move { asking.acquire().await });
    stood.await.expect("it asks");
    let guard = lock.acquire().await?;
    go_on.send(()).expect("it stands still");
    let fence = guard.fence();
    drop(guard);
    assert!(first.await.expect("no panic")?.fence() > fence, "it has what was released meanwhile");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn belief_ends_before_the_lease_can() -> Result<()> {
    let guard = Locker::new(SimStore::new()).lock("a").ttl(TTL).acquire().await?;
    let longest = TTL - drift(TTL);
    assert_eq!(guard.remaining(), longest);
    sleep(TTL / 4).await;
    guard.renew().await?;
    assert!(guard.remaining() <= longest && guard.remaining() > TTL * 9 / 10, "{:?}", guard.remaining());
    Ok(())
}

/// Where leases have a session, too, a grant of which little is left is worth having. Its next renewal is as long as any.
#[tokio::test(start_paused = true)]
async fn belief_ends_as_much_before_the_lease_when_little_was_left_of_its_grant() -> Result<()> {
    let ttl = millis(1500);
    let store = SimStore::over(|clock| {
        let session = |info: &mut StoreInfo| info.capability.liveness.session = Some(ttl);
        Arc::new(Altered::with_info(MemoryStore::with_clock(clock), session))
    });
    store.inject(Fault::DelayReply(ttl - millis(300)).on(Operation::Acquire));
    let guard = Locker::new(store).lock("a").ttl(ttl).acquire().await?;
    assert!(guard.remaining() <= millis(300) - drift(ttl), "{:?}", guard.remaining());
    guard.renew().await?;
    assert!(guard.remaining() <= ttl - drift(ttl) && guard.remaining() > ttl / 2, "{:?}", guard.remaining());
    Ok(())
}

/// The sleep of the timer stands still while the machine does; whoever listens is told soon after all the same.
#[tokio::test(start_paused = true)]
async fn a_suspended_machine_learns_of_its_losses_soon() -> Result<()> {
    let store = SimStore::new();
    let guard = Locker::new(store.clone()).lock("a").ttl(TTL).acquire().await?;
    let lost = guard.lost();
    tokio::pin!(lost);
    assert!(timeout(millis(10), &mut lost).await.is_err());
    store.suspend(TTL * 2);
    let start = Instant::now();
    assert_eq!(lost.await, LossReason::Expired);
    assert!(start.elapsed() <= Duration::from_secs(1), "{:?} after the machine woke up", start.elapsed());
    Ok(())
}

/// Though nobody asks for it, or waits to be told.
#[tokio::test(start_paused = true)]
async fn what_was_lost_while_the_machine_was_suspended_is_released_soon() -> Result<()> {
    let store = SimStore::new();
    let _guard = Locker::new(store.clone()).lock("a").ttl(TTL).acquire().await?;
    sleep(millis(10)).await;
    store.suspend(TTL * 2);
    let releases = || store.take_calls().iter().filter(|call| call.operation == Operation::Release).count();
    assert_eq!(releases(), 0);
    sleep(millis(1_100)).await;
    assert!(releases() > 0, "a second after the machine woke up");
    Ok(())
}

/// The work is woken first after a pause of the machine, before any timer.
#[tokio::test(start_paused = true)]
async fn work_is_not_polled_once_more_after_a_pause() -> Result<()> {
    let (store, wake, has_gone_on) = (SimStore::new(), Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
    let guard = Locker::new(store.clone()).lock("a").ttl(TTL).acquire().await?;
    let working = tokio::spawn({
        let (wake, has_gone_on) = (Arc::clone(&wake), Arc::clone(&has_gone_on));
        async move {
            let work = async {
                wake.notified().await;
                has_gone_on.store(true, Ordering::SeqCst);
            };
            guard.run(work).await
        }
    });
    sleep(millis(10)).await;
    store.suspend(TTL * 2);
    wake.notify_one();
    let error = working.await.expect("no panic").expect_err("the lease is lost");
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(!has_gone_on.load(Ordering::SeqCst), "the work went on");
    Ok(())
}

/// Nothing wakes the work, and nobody else looks at the lease.
#[tokio::test(start_paused = true)]
async fn work_is_stopped_before_its_lease_can_end() -> Result<()> {
    let store = SimStore::new();
    let guard = Locker::new(store.clone()).lock("a").ttl(TTL).acquire().await?;
    store.inject(Fault::REFUSED.on(Operation::Renew).until_healed());
    let stopped = timeout(TTL - millis(400), guard.run(std::future::pending::<()>())).await;
    assert_eq!(stopped.expect("it goes on").expect_err("the lease was not renewed").kind(), ErrorKind::Lost);
    Ok(())
}

/// A renewal that is not answered does not hold up those after it.
#[tokio::test(start_paused = true)]
async fn a_renewal_without_an_answer_is_repeated_in_time() -> Result<()> {
    let store = SimStore::new().bound(TTL * 100);
    let guard = Locker::new(store.clone()).lock("a").ttl(TTL).acquire().await?;
    store.inject(Fault::LoseRequest.on(Operation::Renew));
    sleep(TTL * 2).await;
    assert!(guard.is_held());
    Ok(())
}

/// Each renewal takes longer than the engine waits for it, and comes through in time for the lease.
#[tokio::test(start_paused = true)]
async fn a_renewal_that_is_answered_late_counts() -> Result<()> {
    let store = SimStore::new().bound(TTL);
    let guard = Locker::new(store.clone()).lock("a").ttl(TTL).acquire().await?;
    store.inject(Fault::DelayReply(TTL / 5).on(Operation::Renew).until_healed());
    sleep(TTL * 4).await;
    assert!(guard.is_held());
    Ok(())
}

/// After a release that failed, the next one goes another way, and is faster than the request that it is to undo.
#[tokio::test(start_paused = true)]
async fn a_release_that_overtakes_is_repeated() -> Result<()> {
    let store = SimStore::new();
    let lock = Locker::new(store.clone()).lock("a").ttl(TTL);
    store.inject(Fault::DelayRequest(SimStore::BOUND * 3).on(Operation::Acquire));
    store.inject(Fault::LoseRequest.on(Operation::Release));
    assert!(timeout(millis(1), lock.try_acquire()).await.is_err(), "it was given up");
    sleep(SimStore::BOUND * 6).await;
    assert_eq!(store.state("a").await?.holders.len(), 0, "a lease of nobody");
    let acquired =
        store.calls().iter().any(|call| call.operation == Operation::Release && call.answer == Some(Answer::Released));
    assert!(acquired, "the request came through");
    Ok(())
}

/// Whoever has a place in the store's queue asks with one token again and again, and each of these requests may be granted.
#[tokio::test(start_paused = true)]
async fn a_request_that_comes_after_the_release_leaves_nothing() -> Result<()> {
    for is_dropped in [false, true] {
        let store = SimStore::new();
        let lock = Locker::new(store.clone()).lock("a").ttl(TTL).fifo();
        store.inject(Fault::DelayRequest(SimStore::BOUND * 3).on(Operation::Acquire));
        let guard = lock.acquire().await?;
        if is_dropped {
            drop(guard);
        } else {
            assert_eq!(guard.release().await?, Outcome::Released);
        }
        sleep(SimStore::BOUND * 6).await;
        let released = |call: &&Call| call.operation == Operation::Release && call.answer == Some(Answer::Released);
        assert_eq!(store.calls().iter().filter(released).count(), 2, "each grant is released");
        assert_eq!(store.state("a").await?.holders.len(), 0, "a lease of nobody");
    }
    Ok(())
}

/// The lease was there, and nothing can bring it back: that it is not there any more settles its release.
#[tokio::test(start_paused = true)]
async fn a_release_whose_answer_was_lost_is_settled_by_the_next() -> Result<()> {
    for is_dropped in [false, true] {
        let store = SimStore::new();
        let locker = Locker::new(store.clone());
        let guard = locker.lock("a").ttl(TTL).acquire().await?;
        store.inject(Fault::LoseReply.on(Operation::Release));
        if is_dropped {
            assert!(timeout(millis(1), guard.release()).await.is_err(), "it was dropped on its way");
        } else {
            assert_eq!(guard.release().await.expect_err("it was not heard").kind(), ErrorKind::TimedOut);
        }
        locker.shutdown(Duration::from_secs(1)).await?;
    }
    Ok(())
}

/// A store that can't say whether the lock is free can still be asked for it.
#[tokio::test(start_paused = true)]
async fn whoever_waits_asks_for_itself_when_polling_fails() -> Result<()> {
    let store = SimStore::new().polled();
    let held = Locker::new(store.another_client()).lock("a").ttl(TTL).acquire().await?;
    store.inject(Fault::REFUSED.on(Operation::Inspect).until_healed());
    let lock = Locker::new(store.clone()).lock("a").ttl(TTL);
    let waiting = tokio::spawn(async move { lock.acquire().await });
    sleep(millis(100)).await;
    drop(held);
    let start = Instant::now();
    let guard = waiting.await.expect("no panic")?;
    assert!(start.elapsed() < Duration::from_secs(1), "it was free for {:?}", start.elapsed());
    drop(guard);
    Ok(())
}

/// What the head of the local queue hears while its own earlier claim may be in the way says nothing to those behind it,
/// either.
#[tokio::test(start_paused = true)]
async fn nobody_says_contended_because_of_a_claim_in_doubt() -> Result<()> {
    let store = SimStore::new().polled();
    let locker = Locker::new(store.clone());
    let lock = locker.lock("a").ttl(TTL);
    store.inject(Fault::LoseReply.on(Operation::Acquire));
    store.inject(Fault::REFUSED.on(Operation::Release).until_healed());
    let head = tokio::spawn({
        let lock = lock.clone();
        async move { lock.acquire().await }
    });
    sleep(millis(1)).await;
    let error = lock.acquire_within(Duration::from_secs(5)).await.expect_err("nobody else ever asked");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    store.heal();
    drop(head.await.expect("no panic")?);
    Ok(())
}
