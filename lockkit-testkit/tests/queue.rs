//! The local queue in front of a store that fails, and futures in it that nobody polls.

use std::{pin::Pin, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Contention, Error, ErrorKind, Guard, LockStore, Locker, Outcome, Result, Status,
};
use lockkit_sim::{Fault, Operation, SimStore};
use lockkit_testkit::{Alter, Altered, Slow, faults::poll_until};
use tokio::time::{Instant, sleep, timeout};

const TTL: Duration = Duration::from_secs(30);

type Acquiring = Pin<Box<dyn Future<Output = Result<Guard>> + Send>>;

fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn acquiring(locker: &Locker) -> Acquiring {
    let lock = locker.lock("a").ttl(TTL);
    Box::pin(async move { lock.acquire().await })
}

/// Polls a future once, as a `select!` does whose other branch is ready.
async fn poll_once(future: &mut Acquiring) {
    assert!(poll_until(future.as_mut(), 1, || {}).await.is_none());
}

/// Lets everything that can happen now happen.
async fn settle() {
    sleep(millis(1)).await;
}

fn renewals(store: &SimStore) -> usize {
    store.calls().iter().filter(|call| call.operation == Operation::Renew).count()
}

/// A lease that went from a first holder of this process to an acquisition that is not polled any more.
async fn handed_to_nobody(locker: &Locker) -> Result<Acquiring> {
    let first = locker.lock("a").ttl(TTL).acquire().await?;
    let (mut second, mut third) = (acquiring(locker), acquiring(locker));
    poll_once(&mut second).await;
    poll_once(&mut third).await;
    sleep(millis(10)).await;
    assert_eq!(first.release().await?, Outcome::Released);
    assert_eq!(second.await?.release().await?, Outcome::Released);
    Ok(third)
}

#[tokio::test(start_paused = true)]
async fn a_lease_handed_to_nobody_lapses() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let unpolled = handed_to_nobody(&locker).await?;
    assert_eq!(store.state("a").await?.holders.len(), 1, "it was handed over");
    let start = Instant::now();
    let other = Locker::new(store.another_client()).lock("a").acquire_within(TTL * 20).await?;
    assert!(other.is_some(), "another process waited for {:?}", start.elapsed());
    assert!(start.elapsed() <= TTL, "{:?}", start.elapsed());
    assert_eq!(renewals(&store), 0, "a lease was renewed that nobody had");
    drop(unpolled);
    Ok(())
}

/// What the store says unasked must not keep such a lease alive either.
#[tokio::test(start_paused = true)]
async fn a_lease_handed_to_nobody_lapses_through_alarms() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let unpolled = handed_to_nobody(&locker).await?;
    let alarm = locker.info().alarm.clone().expect("the simulated store has one");
    let start = Instant::now();
    let other = Locker::new(store.another_client()).lock("a").ttl(TTL);
    let mut other = std::pin::pin!(other.acquire());
    let taken = loop {
        tokio::select! {
            guard = &mut other => break guard?,
            () = sleep(TTL / 3) => alarm.raise_all(),
        }
        assert!(start.elapsed() < TTL * 10, "another process waits and waits");
    };
    assert!(taken.is_held());
    drop(unpolled);
    Ok(())
}

/// The future is polled again after its lease lapsed: it asks anew, and has what it gets renewed.
#[tokio::test(start_paused = true)]
async fn a_lease_taken_too_late_is_asked_for_again() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let unpolled = handed_to_nobody(&locker).await?;
    sleep(TTL * 2).await;
    assert_eq!(store.state("a").await?.holders.len(), 0, "it lapsed");
    let guard = unpolled.await?;
    sleep(TTL * 3).await;
    assert_eq!(guard.status(), Status::Held);
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

/// It may have run out, unnoticed while the machine slept, when somebody behind takes it back, and be dropped after that.
#[tokio::test(start_paused = true)]
async fn a_lease_that_is_taken_back_after_its_end_ends_once() -> Result<()> {
    for offset in (0..1200).step_by(7) {
        let store = SimStore::new();
        let locker = Locker::new(store.clone());
        let unpolled = handed_to_nobody(&locker).await?;
        let waiting = tokio::spawn(acquiring(&locker));
        sleep(millis(offset)).await;
        store.suspend(TTL * 2);
        sleep(millis(1100)).await;
        drop(unpolled);
        drop(timeout(TTL, waiting).await.expect("its turn").expect("no panic")?);
    }
    Ok(())
}

/// Patience of nothing is that: each acquisition asks once, whatever became of those before it.
#[tokio::test(start_paused = true)]
async fn without_patience_each_asks_once() -> Result<()> {
    let store = SimStore::new();
    store.inject(Fault::REFUSED.on(Operation::Acquire));
    let locker = Locker::builder(store.clone()).patience(Duration::ZERO).build();
    let lock = locker.owner().lock("a");
    assert_eq!(lock.acquire().await.expect_err("refused").kind(), ErrorKind::Unavailable);
    drop(lock.acquire().await?);
    Ok(())
}

/// A lease that is taken late, but in time, is renewed from then on, and its `max_hold` counts from then on.
#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_once_it_was_taken() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let first = locker.lock("a").ttl(TTL).acquire().await?;
    let lock = locker.lock("a").ttl(TTL).max_hold(TTL * 4);
    let (mut second, mut third): (_, Acquiring) = (acquiring(&locker), Box::pin(async move { lock.acquire().await }));
    poll_once(&mut second).await;
    poll_once(&mut third).await;
    sleep(millis(10)).await;
    drop(first);
    drop(second.await?);
    settle().await;
    sleep(TTL / 2).await;
    assert_eq!(renewals(&store), 0);
    let guard = third.await?;
    sleep(TTL * 4 - millis(1)).await;
    assert_eq!(guard.status(), Status::Held);
    assert!(renewals(&store) > 4);
    Ok(())
}

/// Whoever is up and is not polled lets those behind pass, whatever it was up for.
#[tokio::test(start_paused = true)]
async fn who_is_up_and_is_not_polled_is_overtaken() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let guard = locker.lock("a").ttl(TTL).acquire().await?;
    let mut unpolled = [acquiring(&locker), acquiring(&locker), acquiring(&locker)];
    for future in &mut unpolled {
        poll_once(future).await;
    }
    let waiting = tokio::spawn(acquiring(&locker));
    settle().await;
    drop(guard);
    let start = Instant::now();
    let guard = timeout(TTL * 10, waiting).await.expect("who is polled waits for who is not").expect("no panic")?;
    assert!(start.elapsed() < TTL, "it took {:?} to overtake", start.elapsed());
    // Those that were passed by come to their turn when they are polled again.
    drop(guard);
    for future in unpolled {
        drop(timeout(TTL, future).await.expect("its turn")?);
    }
    Ok(())
}

/// The one who asks the store is not polled, and gets what it asked for: nobody renews that, and those behind it ask, too.
#[tokio::test(start_paused = true)]
async fn who_asks_and_is_not_polled_is_overtaken() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    store.inject(Fault::DelayReply(millis(5)).on(Operation::Acquire));
    let mut unpolled = acquiring(&locker);
    poll_once(&mut unpolled).await;
    let waiting = tokio::spawn(acquiring(&locker));
    settle().await;
    let start = Instant::now();
    let guard = timeout(TTL * 10, waiting).await.expect("who is polled waits for who is not").expect("no panic")?;
    assert!(start.elapsed() <= millis(5000), "a lease that nobody had was in the way for {:?}", start.elapsed());
    assert_eq!(renewals(&store), 0);
    let fence = guard.fence();
    drop(guard);
    assert!(timeout(TTL, unpolled).await.expect("its turn")?.fence() > fence);
    Ok(())
}

/// As often as that happens: it is polled again, asks anew, and is not polled any more.
#[tokio::test(start_paused = true)]
async fn who_asks_and_is_not_polled_is_overtaken_each_time() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    store.inject(Fault::DelayReply(millis(5)).on(Operation::Acquire).until_healed());
    let mut unpolled = acquiring(&locker);
    for _ in 0..3 {
        poll_once(&mut unpolled).await;
        let start = Instant::now();
        let guard = timeout(TTL * 10, acquiring(&locker)).await.expect("who is polled waits for who is not")?;
        assert!(start.elapsed() <= millis(5000), "a lease that nobody had was in the way for {:?}", start.elapsed());
        drop(guard);
        settle().await;
    }
    drop(timeout(TTL, unpolled).await.expect("its turn")?);
    Ok(())
}

/// Its claim was released meanwhile. What it would ask for by that now would stay for as long as it is not polled.
#[tokio::test(start_paused = true)]
async fn who_was_overtaken_does_not_go_on_with_what_it_had_begun() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(Altered(Slow(store.clone())));
    let mut unpolled = acquiring(&locker);
    poll_once(&mut unpolled).await;
    drop(timeout(TTL, acquiring(&locker)).await.expect("who is polled waits for who is not")?);
    settle().await;
    poll_once(&mut unpolled).await;
    assert_eq!(store.state("a").await?.holders.len(), 0, "a lease of nobody");
    drop(timeout(TTL, unpolled).await.expect("its turn")?);
    Ok(())
}

/// The first of those behind has the head woken, and gives it a moment. One that came later waits for as long again.
#[tokio::test(start_paused = true)]
async fn those_behind_who_is_not_polled_pass_in_their_order() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let other = Locker::new(store.another_client()).lock("a").ttl(TTL).acquire().await?;
    let mut unpolled = acquiring(&locker);
    poll_once(&mut unpolled).await;
    let mut waiting = Vec::new();
    for _ in 0..3 {
        sleep(millis(100)).await;
        waiting.push(tokio::spawn(acquiring(&locker)));
    }
    sleep(millis(10_000)).await;
    assert_eq!(other.release().await?, Outcome::Released);
    for task in waiting {
        drop(timeout(millis(5000), task).await.expect("another one passed it").expect("no panic")?);
        settle().await;
    }
    drop(unpolled);
    Ok(())
}

/// Waiting for long is no reason to be overtaken, and holding for long neither.
#[tokio::test(start_paused = true)]
async fn who_waits_or_holds_for_long_is_not_overtaken() -> Result<()> {
    let store = SimStore::new();
    let locker = Locker::new(store.clone());
    let other = Locker::new(store.another_client()).lock("a").acquire().await?;
    let mut waiting = Vec::new();
    for _ in 0..5 {
        waiting.push(tokio::spawn(acquiring(&locker)));
        settle().await;
    }
    sleep(TTL * 20).await;
    let asked = store.calls().iter().filter(|call| call.operation == Operation::Acquire).count();
    assert!(asked <= 25, "one asks for all, {asked} times in 20 ttls");
    drop(other);
    let mut guards = Vec::new();
    for task in waiting {
        assert!(guards.is_empty());
        guards.push(timeout(TTL, task).await.expect("in order").expect("no panic")?);
        sleep(TTL * 4).await;
        assert_eq!(store.state("a").await?.holders.len(), 1);
        guards.clear();
    }
    Ok(())
}

/// The ways in which a store can be out of reach: at once, and after its own bound on a call.
fn break_store(store: &SimStore, how: Fault) {
    store.inject(how.on(Operation::Acquire).until_healed());
}

#[tokio::test(start_paused = true)]
async fn nobody_says_contended_because_of_a_store_that_fails() -> Result<()> {
    for how in [Fault::REFUSED, Fault::LoseRequest] {
        let store = SimStore::new();
        break_store(&store, how);
        let locker = Locker::new(store.clone());
        let head = tokio::spawn(acquiring(&locker));
        sleep(millis(50)).await;
        let lock = locker.lock("a");
        let expected = if how == Fault::REFUSED { ErrorKind::Unavailable } else { ErrorKind::TimedOut };
        for wait in [millis(0), millis(300), millis(2500)] {
            let start = Instant::now();
            let answer = lock.acquire_within(wait).await;
            let kind = answer.as_ref().map(Option::is_some).map_err(Error::kind);
            assert_eq!(kind, Err(expected), "after {wait:?}, {how:?}");
            assert!(start.elapsed() <= wait + SimStore::BOUND, "{:?} for {wait:?}", start.elapsed());
        }
        head.abort();
    }
    Ok(())
}

/// The same before the store has answered or failed at all.
#[tokio::test(start_paused = true)]
async fn nobody_says_contended_before_the_store_answered() -> Result<()> {
    let store = SimStore::new();
    store.inject(Fault::DelayReply(millis(1500)).on(Operation::Acquire).until_healed());
    let locker = Locker::new(store.clone());
    let head = tokio::spawn(acquiring(&locker));
    settle().await;
    // The lease is granted at the store, and nobody here knows.
    let error = locker.lock("a").acquire_within(millis(100)).await.expect_err("no answer came");
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    let guard = head.await.expect("no panic")?;
    assert!(locker.lock("a").acquire_within(millis(100)).await?.is_none(), "this process has it");
    drop(guard);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_held_is_contended_behind_others_too() -> Result<()> {
    for polled in [false, true] {
        let store = if polled { SimStore::new().polled() } else { SimStore::new() };
        let other = Locker::new(store.another_client()).lock("a").acquire().await?;
        let locker = Locker::new(store.clone());
        let head = tokio::spawn(acquiring(&locker));
        sleep(TTL * 3).await;
        let lock = locker.lock("a");
        assert!(lock.try_acquire().await?.is_none());
        let start = Instant::now();
        assert!(lock.acquire_within(millis(300)).await?.is_none());
        assert_eq!(start.elapsed().as_millis() / 10, 30, "{:?}", start.elapsed());
        drop(other);
        drop(head.await.expect("no panic")?);
    }
    Ok(())
}

/// A crowd whose time is up at once asks the store a few times, not each for itself.
#[tokio::test(start_paused = true)]
async fn a_crowd_shares_the_answers_of_the_store() -> Result<()> {
    let store = SimStore::new();
    let other = Locker::new(store.another_client()).lock("a").acquire().await?;
    let locker = Locker::new(store.clone());
    let head = tokio::spawn(acquiring(&locker));
    sleep(millis(10)).await;
    let before = store.calls().len();
    let crowd: Vec<_> = (0..1000)
        .map(|number| {
            let lock = locker.lock("a");
            tokio::spawn(async move { lock.acquire_within(millis(300 + number % 20)).await })
        })
        .collect();
    for task in crowd {
        assert!(task.await.expect("no panic")?.is_none());
    }
    let asked = store.calls().len() - before;
    assert!(asked < 200, "{asked} calls for 1000 waiters");
    head.abort();
    drop(other);
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn patience_ends_for_all_at_once() -> Result<()> {
    // Where no answer comes, the first error takes as long as the store's bound, and so does the one that ends it.
    for (how, within) in [(Fault::REFUSED, millis(320)), (Fault::LoseRequest, SimStore::BOUND * 2 + millis(500))] {
        let store = SimStore::new();
        break_store(&store, how);
        let locker = Locker::builder(store.clone()).patience(millis(300)).build();
        let start = Instant::now();
        let mut tasks = Vec::new();
        for _ in 0..10 {
            tasks.push(tokio::spawn(acquiring(&locker)));
            settle().await;
        }
        for task in tasks {
            let error = timeout(millis(60_000), task).await.expect("patience").expect("no panic").expect_err("down");
            assert_ne!(error.kind(), ErrorKind::Closed);
            assert!(start.elapsed() >= millis(300), "{:?}", start.elapsed());
        }
        assert!(start.elapsed() <= within, "the last of ten failed after {:?} ({how:?})", start.elapsed());
    }
    Ok(())
}

/// Whoever came late has its own patience, but no more than that.
#[tokio::test(start_paused = true)]
async fn who_came_late_is_patient_for_as_long() -> Result<()> {
    let store = SimStore::new();
    break_store(&store, Fault::REFUSED);
    let locker = Locker::builder(store.clone()).patience(millis(2000)).build();
    let early = tokio::spawn(acquiring(&locker));
    sleep(millis(1500)).await;
    let start = Instant::now();
    let late = tokio::spawn(acquiring(&locker));
    let error = late.await.expect("no panic").expect_err("down");
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(early.is_finished());
    let waited = start.elapsed();
    assert!(waited >= millis(2000) && waited < millis(2020), "{waited:?}");
    Ok(())
}

/// A store that comes back within the patience of those who wait serves them all.
#[tokio::test(start_paused = true)]
async fn a_store_that_comes_back_serves_all_who_wait() -> Result<()> {
    let store = SimStore::new();
    break_store(&store, Fault::REFUSED);
    let locker = Locker::builder(store.clone()).patience(millis(3000)).build();
    let tasks: Vec<_> = (0..10).map(|_| tokio::spawn(acquiring(&locker))).collect();
    sleep(millis(2000)).await;
    store.heal();
    for task in tasks {
        drop(timeout(TTL, task).await.expect("served").expect("no panic")?);
    }
    Ok(())
}

/// A store that waits for a lock says nothing meanwhile, and was well: an error long after another one is of another outage.
#[tokio::test(start_paused = true)]
async fn patience_begins_anew_after_a_wait_in_peace() -> Result<()> {
    let store = SimStore::new();
    let other = Locker::new(store.another_client()).lock("a").acquire().await?;
    let locker = Locker::new(store.clone());
    store.inject(Fault::REFUSED.on(Operation::Acquire));
    let mut tasks = vec![tokio::spawn(acquiring(&locker))];
    settle().await;
    tasks.push(tokio::spawn(acquiring(&locker)));
    sleep(millis(20_000)).await;
    break_store(&store, Fault::REFUSED);
    sleep(millis(50)).await;
    store.heal();
    assert!(tasks.iter().all(|task| !task.is_finished()), "patience is over after 50 ms");
    assert_eq!(other.release().await?, Outcome::Released);
    for task in tasks {
        drop(timeout(TTL, task).await.expect("its turn").expect("no panic")?);
    }
    Ok(())
}

/// The tasks of one owner, too, of which one asks and the others wait for it.
#[tokio::test(start_paused = true)]
async fn who_waits_for_its_own_owner_does_not_say_contended() -> Result<()> {
    let store = SimStore::new();
    break_store(&store, Fault::REFUSED);
    let locker = Locker::builder(store.clone()).patience(millis(900)).build();
    let owner = locker.owner();
    let start = Instant::now();
    let mut waiting = Vec::new();
    for _ in 0..10 {
        let lock = owner.lock("a");
        waiting.push(tokio::spawn(async move { lock.acquire().await }));
        settle().await;
    }
    for wait in [millis(0), millis(300)] {
        let error = owner.lock("a").acquire_within(wait).await.expect_err("the store is away");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "after {wait:?}");
    }
    for task in waiting {
        let error = task.await.expect("no panic").expect_err("the store is away");
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
    assert!(start.elapsed() < millis(1000), "the last of ten failed after {:?}", start.elapsed());

    // And what another process holds is contended for all of them.
    store.heal();
    let other = Locker::new(store.another_client()).lock("a").acquire().await?;
    let lock = owner.lock("a");
    let first = tokio::spawn(async move { lock.acquire().await });
    sleep(TTL * 3).await;
    assert!(owner.lock("a").try_acquire().await?.is_none());
    assert!(owner.lock("a").acquire_within(millis(300)).await?.is_none());
    drop(other);
    drop(first.await.expect("no panic")?);
    Ok(())
}

/// A store that refuses at once, and knows that the lock will not be free for long.
#[derive(Debug)]
struct Patient(SimStore);

#[async_trait]
impl Alter for Patient {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let wait = request.wait.min(Duration::from_millis(1));
        Ok(match self.0.acquire(&AcquireRequest { wait, ..request.clone() }).await? {
            Attempt::Contended(contention) => {
                Attempt::Contended(Contention { retry_after: Some(TTL * 4), ..contention })
            }
            granted @ Attempt::Granted(_) => granted,
        })
    }
}

/// A place is kept for a while only, whatever the store says of the end of the lease.
#[tokio::test(start_paused = true)]
async fn who_has_a_place_at_the_store_asks_again_before_that_ends() -> Result<()> {
    for store in [SimStore::new(), SimStore::new().polled()] {
        let other = Locker::new(store.another_client()).lock("a").fifo().acquire().await?;
        let lock = Locker::new(Altered(Patient(store.clone()))).lock("a").fifo();
        let waiting = tokio::spawn(async move { lock.acquire().await });
        sleep(TTL).await;
        assert_eq!(store.state("a").await?.waiters, Some(1), "it has lost its place");
        assert_eq!(other.release().await?, Outcome::Released);
        drop(timeout(millis(5000), waiting).await.expect("its turn").expect("no panic")?);
    }
    Ok(())
}
