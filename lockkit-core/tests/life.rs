//! The life of locks as users see it, on the memory store.

mod paused;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use lockkit_core::{
    ErrorKind, Event, Fence, HandOver, Locker, LossReason, MemoryStore, Observed, Observer, Outcome, Result, Status,
};

use crate::paused::paused_store;

#[derive(Clone, Debug, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Observer for Log {
    fn event(&self, event: &Event<'_>) {
        let line = match event {
            Event::Acquired { handed_over, .. } => format!("acquired, handed over: {handed_over}"),
            Event::Contended { .. } => "contended".to_owned(),
            Event::Renewed { margin, .. } => format!("renewed, late: {}", margin.is_zero()),
            Event::Lost { reason, .. } => format!("lost: {reason:?}"),
            Event::Released { .. } => "released".to_owned(),
            _ => "other".to_owned(),
        };
        self.0.lock().expect("unpoisoned").push(line);
    }
}

impl Log {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("unpoisoned"))
    }
}

#[tokio::test]
async fn a_lease_goes_from_task_to_task_with_the_next_fence() -> Result<()> {
    let log = Log::default();
    let locker = Locker::builder(MemoryStore::new()).observer(log.clone()).build();
    // The first holder came when nobody waited, so that its grant has one fence only; the second's has a span.
    let first = locker.lock("x").acquire().await?;
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let lock = locker.lock("x");
        waiting.push(tokio::spawn(async move {
            let guard = lock.acquire().await?;
            let fence = guard.fence();
            tokio::task::yield_now().await;
            assert_eq!(guard.release().await?, Outcome::Released);
            Ok::<Fence, lockkit_core::Error>(fence)
        }));
        tokio::task::yield_now().await;
    }
    let mut fences = vec![first.fence()];
    assert_eq!(first.release().await?, Outcome::Released);
    for task in waiting {
        fences.push(task.await.expect("no panic")?);
    }
    assert!(fences.is_sorted_by(|a, b| a < b), "{fences:?}");
    assert_eq!(fences[3], fences[1].offset(2), "consecutive fences of one grant");
    let acquired: Vec<_> = log.take().into_iter().filter(|line| line.starts_with("acquired")).collect();
    assert_eq!(acquired.iter().filter(|line| line.ends_with("true")).count(), 2, "{acquired:?}");
    Ok(())
}

#[tokio::test]
async fn hand_over_ends_after_its_times() -> Result<()> {
    let log = Log::default();
    let rule = HandOver { times: 3, within: Duration::from_secs(10) };
    let locker = Locker::builder(MemoryStore::new()).hand_over(rule).observer(log.clone()).build();
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let lock = locker.lock("x");
            tokio::spawn(async move {
                for _ in 0..25 {
                    drop(lock.acquire().await?);
                }
                Ok::<_, lockkit_core::Error>(())
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic")?;
    }
    let mut run = 0;
    for line in log.take().iter().filter(|line| line.starts_with("acquired")) {
        run = if line.ends_with("true") { run + 1 } else { 0 };
        assert!(run <= 3, "handed over {run} times in a row");
    }
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn observers_are_told_of_renewal_and_loss() -> Result<()> {
    let log = Log::default();
    let store = paused_store();
    let locker = Locker::builder(Observed::new(store.clone())).observer(log.clone()).build();
    let guard = locker.lock("x").ttl(Duration::from_millis(300)).acquire().await?;
    tokio::time::sleep(Duration::from_millis(250)).await;
    store.forget_all();
    assert_eq!(guard.lost().await, LossReason::Gone);
    assert_eq!(guard.status(), Status::Lost(LossReason::Gone));
    drop(guard);
    let lines = log.take();
    assert_eq!(lines.first().map(String::as_str), Some("acquired, handed over: false"));
    assert!(lines.contains(&"renewed, late: false".to_owned()), "{lines:?}");
    assert_eq!(lines.last().map(String::as_str), Some("lost: Gone"), "{lines:?}");
    assert_eq!(lines.iter().filter(|line| line.starts_with("lost")).count(), 1, "{lines:?}");
    Ok(())
}

#[tokio::test]
async fn a_lost_head_lets_the_next_one_ask() -> Result<()> {
    let store = MemoryStore::new();
    let locker = Locker::new(store.clone());
    let lapsing = locker.lock("x").ttl(Duration::from_millis(200)).no_renewal().acquire().await?;
    // The guard is kept, but its lease ends: those behind it must not wait for the guard.
    let next = locker.lock("x").acquire_within(Duration::from_secs(5)).await?;
    assert!(next.is_some());
    assert!(!lapsing.is_held());
    Ok(())
}

#[tokio::test]
async fn waiters_are_told_of_a_shutdown() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let guard = locker.lock("x").acquire().await?;
    let lock = locker.lock("x");
    let waiting = tokio::spawn(async move { lock.acquire().await.map(drop) });
    tokio::task::yield_now().await;
    locker.shutdown(Duration::from_secs(1)).await?;
    let error = waiting.await.expect("no panic").expect_err("closed");
    assert_eq!(error.kind(), ErrorKind::Closed);
    assert!(guard.is_held());
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn nested_guards_share_one_fate() -> Result<()> {
    let store = paused_store();
    let owner = Locker::new(store.clone()).owner();
    let lock = owner.lock("x").ttl(Duration::from_millis(300));
    let (outer, inner) = (lock.acquire().await?, lock.acquire().await?);
    store.forget_all();
    assert_eq!(inner.lost().await, LossReason::Gone);
    assert!(!outer.is_held());
    assert_eq!(outer.release().await?, Outcome::NotHeld(LossReason::Gone));
    assert_eq!(inner.release().await?, Outcome::NotHeld(LossReason::Gone));
    assert!(lock.try_acquire().await?.is_some());
    Ok(())
}

#[tokio::test]
async fn run_gives_the_output_of_work_that_ends_in_time() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let guard = locker.lock("x").acquire().await?;
    assert_eq!(guard.run(async { 42 }).await?, 42);
    guard.ensure(Duration::from_secs(1))?;
    assert_eq!(guard.ensure(Duration::from_secs(60)).expect_err("too long").kind(), ErrorKind::Lost);
    Ok(())
}

#[tokio::test]
async fn dropping_everything_ends_the_background_task() -> Result<()> {
    let store = MemoryStore::new();
    let locker = Locker::new(store.clone());
    let guard = locker.lock("x").acquire().await?;
    drop(locker);
    assert!(guard.is_held(), "a guard outlives its locker");
    assert_eq!(guard.release().await?, Outcome::Released);
    tokio::time::timeout(Duration::from_secs(5), async {
        while tokio::runtime::Handle::current().metrics().num_alive_tasks() > 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("a task of a locker that is gone goes on");
    Ok(())
}

#[cfg(feature = "metrics")]
#[test]
fn metrics_have_their_documented_names() {
    use lockkit_core::Metrics;
    use metrics_util::debugging::DebuggingRecorder;

    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_all().start_paused(true).build().expect("a runtime");
    metrics::with_local_recorder(&recorder, || {
        runtime.block_on(async {
            let store = paused_store();
            let metrics = Metrics::classified(|key| if key.as_str().starts_with("job/") { "job" } else { "other" });
            let locker = Locker::builder(Observed::new(store.clone())).observer(metrics).build();
            let guard = locker.lock("job/1").ttl(Duration::from_millis(200)).acquire().await.expect("free");
            assert!(locker.lock("job/1").try_acquire().await.expect("asked").is_none());
            tokio::time::sleep(Duration::from_millis(150)).await;
            store.forget_all();
            guard.lost().await;
            drop(locker.lock("job/2").acquire().await.expect("free"));
        });
    });
    let found: Vec<_> = snapshotter.snapshot().into_vec().into_iter().map(|(key, ..)| key.key().to_string()).collect();
    for name in [
        "lockkit_acquire_wait_seconds",
        "lockkit_hold_seconds",
        "lockkit_renew_margin_seconds",
        "lockkit_lost_total",
        "lockkit_store_seconds",
    ] {
        assert!(found.iter().any(|key| key.contains(name)), "{name} is missing in {found:?}");
    }
    assert!(found.iter().any(|key| key.contains("class = job")), "{found:?}");
    assert!(!found.iter().any(|key| key.contains("job/1")), "a lock's name became a label: {found:?}");
}

#[test]
fn an_error_gives_its_cause_as_it_is() {
    use std::error::Error as _;

    let cause = std::io::Error::other("the cable was cut");
    let error = lockkit_core::Error::new(ErrorKind::Unavailable, "no connection").with_source(cause);
    let source = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
    assert_eq!(source.map(ToString::to_string).as_deref(), Some("the cable was cut"));
}

#[tokio::test(start_paused = true)]
async fn run_uses_the_time_up_to_max_hold() -> Result<()> {
    let locker = Locker::new(paused_store());
    let guard = locker.lock("x").max_hold(Duration::from_millis(400)).acquire().await?;
    guard.run(tokio::time::sleep(Duration::from_millis(100))).await?;
    let error = guard.run(std::future::pending::<()>()).await.expect_err("too long");
    assert_eq!(error.message(), LossReason::MaxHold.to_string());
    assert_eq!(guard.status(), Status::Lost(LossReason::MaxHold));
    Ok(())
}

/// Fences go on after a loss of data only as long as the counter stays below the clock.
#[tokio::test]
async fn hand_over_without_limit_keeps_fences_below_the_clock() -> Result<()> {
    let store = MemoryStore::new();
    let rule = HandOver { times: u32::MAX, ..HandOver::default() };
    let locker = Locker::builder(store.clone()).hand_over(rule).build();
    let mut highest = Fence::NONE;
    for _ in 0..3 {
        let first = locker.lock("x").acquire().await?;
        let tasks: Vec<_> = (0..3)
            .map(|_| {
                let lock = locker.lock("x");
                tokio::spawn(async move { lock.acquire().await.map(|guard| guard.fence()) })
            })
            .collect();
        tokio::task::yield_now().await;
        highest = highest.max(first.fence());
        drop(first);
        for task in tasks {
            highest = highest.max(task.await.expect("no panic")?);
        }
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    store.forget_all();
    assert!(locker.lock("x").acquire().await?.fence() > highest);
    Ok(())
}

/// Grants that follow each other as fast as the store answers must not take more fences than they need.
#[tokio::test]
async fn a_crowd_that_is_not_handed_over_to_keeps_fences_below_the_clock() -> Result<()> {
    let store = MemoryStore::new();
    // So many times, but no time for it.
    let rule = HandOver { times: HandOver::MOST, within: Duration::ZERO };
    let locker = Locker::builder(store.clone()).hand_over(rule).build();
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let lock = locker.lock("x");
            tokio::spawn(async move {
                let mut highest = Fence::NONE;
                for _ in 0..500 {
                    highest = lock.acquire().await?.fence();
                }
                Ok::<_, lockkit_core::Error>(highest)
            })
        })
        .collect();
    let mut highest = Fence::NONE;
    for task in tasks {
        highest = highest.max(task.await.expect("no panic")?);
    }
    store.forget_all();
    assert!(locker.lock("x").acquire().await?.fence() > highest);
    Ok(())
}

/// What is left of another's lease is not what it asked for.
#[tokio::test]
async fn a_lease_without_renewal_lasts_for_its_ttl() -> Result<()> {
    const TTL: Duration = Duration::from_secs(2);
    let locker = Locker::builder(MemoryStore::new())
        .hand_over(HandOver { within: Duration::from_secs(60), ..HandOver::default() })
        .build();
    let lock = locker.lock("x").ttl(TTL).no_renewal();
    let first = lock.acquire().await?;
    let waiting: Vec<_> = (0..3)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move {
                let guard = lock.acquire().await?;
                let remaining = guard.remaining();
                tokio::time::sleep(Duration::from_millis(600)).await;
                assert_eq!(guard.release().await?, Outcome::Released);
                Ok::<_, lockkit_core::Error>(remaining)
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    drop(first);
    for task in waiting {
        let remaining = task.await.expect("no panic")?;
        assert!(remaining > TTL * 9 / 10, "{remaining:?} of {TTL:?}");
    }
    Ok(())
}

#[derive(Debug)]
struct Panics(&'static str);

impl Observer for Panics {
    fn event(&self, event: &Event<'_>) {
        assert!(!format!("{event:?}").starts_with(self.0), "an observer panics at {}", self.0);
    }
}

/// A lease that nobody has must not be renewed for ever.
#[tokio::test]
async fn a_panic_of_an_observer_frees_the_lock() -> Result<()> {
    for event in ["Acquired", "Released"] {
        let store = MemoryStore::new();
        let locker = Locker::builder(store.clone()).observer(Panics(event)).build();
        let tasks: Vec<_> = (0..3)
            .map(|_| {
                let lock = locker.lock("x").ttl(Duration::from_millis(300));
                tokio::spawn(async move { lock.acquire().await.map(drop) })
            })
            .collect();
        for task in tasks {
            drop(task.await);
        }
        let other = Locker::new(store).lock("x").acquire_within(Duration::from_secs(3)).await?;
        assert!(other.is_some(), "held by nobody after a panic at {event}");
    }
    Ok(())
}

#[tokio::test]
async fn a_loss_signal_outlives_the_guard() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let ttl = Duration::from_millis(200);
    let released = locker.lock("a").acquire().await?;
    let one = released.loss_signal();
    let two = one.clone();
    assert!(one.is_held());
    let waiting = tokio::spawn(async move { two.lost().await });
    assert_eq!(released.release().await?, Outcome::Released);
    assert_eq!((waiting.await.expect("no panic"), one.lost().await, one.is_held()), (None, None, false));

    let lapsed = locker.lock("b").ttl(ttl).no_renewal().acquire().await?;
    let signal = lapsed.loss_signal();
    assert_eq!(signal.lost().await, Some(LossReason::Expired));
    drop(lapsed);
    assert_eq!(signal.lost().await, Some(LossReason::Expired), "it stays lost");

    let nested = locker.owner();
    let (outer, inner) = (nested.lock("c").acquire().await?, nested.lock("c").acquire().await?);
    let signal = inner.loss_signal();
    drop(inner);
    tokio::task::yield_now().await;
    assert!(signal.is_held(), "of nested holds the last one counts");
    drop(outer);
    assert_eq!(signal.lost().await, None);

    let guard = locker.lock("d").acquire().await?;
    let signal = guard.loss_signal();
    drop((guard, nested, locker));
    assert_eq!(signal.lost().await, None);
    Ok(())
}

#[tokio::test]
async fn work_with_a_lock_ends_with_it() -> Result<()> {
    let store = MemoryStore::new();
    let locker = Locker::new(store.clone());
    let lock = locker.lock("a").ttl(Duration::from_millis(300)).no_renewal();
    let other = locker.lock("a");
    let (fence, refused) = lock.with(|fence| async move { (fence, other.try_acquire().await) }).await?;
    assert!(refused?.is_none(), "it is held meanwhile");
    let next = locker.lock("a").try_acquire().await?.expect("free");
    assert!(next.fence() > fence);
    assert_eq!(next.release().await?, Outcome::Released);

    let dropped = Arc::new(());
    let held = Arc::clone(&dropped);
    let stopped = lock.with(|_| async move {
        std::future::pending::<()>().await;
        drop(held);
    });
    assert_eq!(stopped.await.expect_err("it can't end").kind(), ErrorKind::Lost);
    assert_eq!(Arc::strong_count(&dropped), 1, "the work is gone");

    let broken = lock.with(|_| async move { store.forget_all() }).await;
    assert_eq!(broken.expect_err("another may have had it").kind(), ErrorKind::Lost);
    Ok(())
}
