//! One `Locker` on several runtimes, of which some end.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{RecvTimeoutError, TryRecvError},
    },
    task::{Context, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Error, ErrorKind, KeyState, Liveness, LockKey, LockStore, Locker, LossReason,
    MemoryStore, Outcome, OwnThread, Query, Release, Renewal, Renewed, Result, Waiting,
};
use lockkit_testkit::{Alter, Altered, WithInfo};
use tokio::{
    runtime::{Builder, Runtime},
    time::{sleep, timeout},
};

/// Of a lease that is to lapse.
const TTL: Duration = Duration::from_millis(600);
/// Of one that has to outlast its ttl: a renewal may be late by a second, and another one.
const KEPT: Duration = Duration::from_secs(3);
/// For how long it is looked at: it would have lapsed by then.
const LAPSED: Duration = Duration::from_millis(4500);
/// How long anything awaited may take. Not how long it does take.
const PATIENCE: Duration = Duration::from_secs(10);

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime")
}

/// Such as the tests of an application that share a `Locker`: each has a runtime of its own.
#[test]
fn leases_are_renewed_after_the_first_runtime_ended() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let (first, second, third) = (runtime(), runtime(), runtime());
    let early = first.block_on(locker.lock("a").ttl(KEPT).acquire())?;
    let outlived = second.block_on(locker.lock("b").ttl(KEPT).acquire())?;
    let late = third.block_on(locker.lock("c").ttl(KEPT).acquire())?;
    drop((first, second));
    third.block_on(async {
        sleep(LAPSED).await;
        assert!(early.is_held() && outlived.is_held() && late.is_held());
        assert_eq!(late.release().await?, Outcome::Released);
        Ok(())
    })
}

fn is_pending<T>(waiting: &mut (impl Future<Output = T> + Unpin)) -> bool {
    Pin::new(waiting).poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

/// The locker moves to the runtime of the one who has it, not of the one who gave it.
#[test]
fn a_lease_is_renewed_after_the_runtime_that_handed_it_over_ended() -> Result<()> {
    let store = MemoryStore::new();
    let (locker, key) = (Locker::new(store.clone()), Query::Keys(vec![LockKey::new("a")?]));
    let (lock, first, second) = (locker.lock("a").ttl(KEPT), runtime(), runtime());
    let (mut next, mut last) = (Box::pin(lock.acquire()), Box::pin(lock.acquire()));
    let granted = first.block_on(async {
        let given = lock.acquire().await?;
        assert!(is_pending(&mut next));
        assert_eq!(given.release().await?, Outcome::Released);
        // The lease of one that found another waiting can be handed over.
        assert!(is_pending(&mut last));
        let given = next.await?;
        let granted = store.inspect(&key).await?;
        assert_eq!(given.release().await?, Outcome::Released);
        Ok::<_, Error>(granted)
    })?;
    let kept = second.block_on(last)?;
    assert_eq!(first.block_on(store.inspect(&key))?[0].holders[0].token, granted[0].holders[0].token, "handed over");
    drop(first);
    std::thread::sleep(LAPSED);
    assert!(kept.is_held());
    Ok(())
}

#[test]
fn a_loss_is_told_when_no_runtime_is_left_to_renew() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let (first, second) = (runtime(), runtime());
    let guard = first.block_on(locker.lock("a").ttl(TTL).acquire())?;
    drop(first);
    second.block_on(async {
        let stopped = timeout(PATIENCE, guard.run(std::future::pending::<()>())).await.expect("stopped");
        assert_eq!(stopped.expect_err("the lease ran out").kind(), ErrorKind::Lost);
        assert_eq!(timeout(PATIENCE, guard.lost()).await, Ok(LossReason::Expired));
    });
    Ok(())
}

#[test]
fn a_loss_is_told_after_the_first_runtime_ended() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let (first, second) = (runtime(), runtime());
    drop(first.block_on(locker.lock("a").acquire())?);
    let guard = second.block_on(locker.lock("b").ttl(TTL).no_renewal().acquire())?;
    drop(first);
    let told = second.block_on(async { timeout(PATIENCE, guard.lost()).await });
    assert_eq!(told, Ok(LossReason::Expired));
    Ok(())
}

/// The memory store, which never answers its first renewal if it is told so.
#[derive(Debug)]
struct Odd {
    inner: Altered<WithInfo<MemoryStore>>,
    answers: bool,
    is_asked: AtomicBool,
    is_inspected: AtomicBool,
}

impl Odd {
    fn new(inner: &MemoryStore, waiting: Waiting, answers: bool) -> Arc<Altered<Self>> {
        let inner = Altered::with_info(inner.clone(), |info| info.capability.waiting = waiting);
        let (is_asked, is_inspected) = (AtomicBool::default(), AtomicBool::default());
        Arc::new(Altered(Self { inner, answers, is_asked, is_inspected }))
    }
}

fn wait_for(happened: &AtomicBool) {
    while !happened.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[async_trait]
impl Alter for Odd {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let waits = self.inner.info().capability.waiting != Waiting::Poll;
        let wait = if waits { request.wait } else { Duration::ZERO };
        self.inner.acquire(&AcquireRequest { wait, ..request.clone() }).await
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        if !self.is_asked.swap(true, Ordering::SeqCst) && !self.answers {
            std::future::pending::<()>().await;
        }
        self.inner.renew(renewals).await
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        self.is_inspected.store(true, Ordering::SeqCst);
        self.inner.inspect(query).await
    }
}

#[test]
fn a_renewal_that_ended_with_its_runtime_is_made_again() -> Result<()> {
    let store = Odd::new(&MemoryStore::new(), Waiting::Notify, false);
    let locker = Locker::builder(Arc::clone(&store)).build();
    let (first, second) = (runtime(), runtime());
    drop(first.block_on(locker.lock("a").acquire())?);
    let guard = second.block_on(locker.lock("b").ttl(KEPT).acquire())?;
    wait_for(&store.0.is_asked);
    drop(first);
    second.block_on(async {
        sleep(LAPSED).await;
        assert!(guard.is_held());
    });
    Ok(())
}

#[test]
fn a_release_is_noticed_after_the_runtime_of_the_poller_ended() -> Result<()> {
    let memory = MemoryStore::new();
    let store = Odd::new(&memory, Waiting::Poll, true);
    let locker = Locker::builder(Arc::clone(&store)).build();
    let (first, second) = (runtime(), runtime());
    let guards = second.block_on(async {
        let holder = Locker::new(memory);
        Ok::<_, Error>((holder.lock("a").acquire().await?, holder.lock("b").acquire().await?))
    })?;
    // The poller starts on the first runtime.
    let early = locker.lock("a");
    let ends = first.spawn(async move { drop(early.acquire().await) });
    wait_for(&store.0.is_inspected);
    let late = locker.lock("b");
    let waits = second.spawn(async move { late.acquire().await });
    store.0.is_inspected.store(false, Ordering::SeqCst);
    wait_for(&store.0.is_inspected);
    drop(first);
    assert!(second.block_on(ends).is_err(), "it ended with its runtime");
    second.block_on(async {
        sleep(Duration::from_millis(150)).await;
        drop(guards);
        // The holder's lease would last for 30 s.
        let guard = timeout(PATIENCE, waits).await.expect("it noticed").expect("no panic")?;
        assert!(guard.is_held());
        Ok(())
    })
}

/// It may never have been driven.
#[test]
fn a_release_is_noticed_though_the_poller_never_ran() -> Result<()> {
    for is_gone in [false, true] {
        notices_a_release_without_its_poller(is_gone)?;
    }
    Ok(())
}

fn notices_a_release_without_its_poller(is_gone: bool) -> Result<()> {
    let memory = MemoryStore::new();
    let (first, second) = (undriven(), runtime());
    let locker = first.block_on(async { Locker::builder(Odd::new(&memory, Waiting::Poll, true)).build() });
    let guard = second.block_on(Locker::new(memory).lock("a").acquire())?;
    let waits = second.spawn(async move { locker.lock("a").acquire().await });
    // The timer task, and the poller.
    while first.metrics().num_alive_tasks() < 2 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let _undriven = (!is_gone).then_some(first);
    second.block_on(async {
        drop(guard);
        let guard = timeout(PATIENCE, waits).await.expect("it noticed").expect("no panic")?;
        assert!(guard.is_held());
        Ok(())
    })
}

fn undriven() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// Such as an application that has `block_on` around each call.
#[test]
fn a_guard_dropped_on_a_runtime_that_nobody_drives_is_released() -> Result<()> {
    let (driven, undriven) = (runtime(), undriven());
    let locker = driven.block_on(async { Locker::new(MemoryStore::new()) });
    undriven.block_on(async { locker.lock("a").acquire().await.map(drop) })?;
    driven.block_on(async {
        let guard = timeout(PATIENCE, locker.lock("a").acquire()).await.expect("free")?;
        assert!(guard.is_held());
        Ok(())
    })
}

/// A store where nothing but a release ends a lease within the time of a test, such as one whose leases end with a session. Its
/// releases can be made to fail.
#[derive(Debug)]
struct Lasting {
    inner: Altered<WithInfo<MemoryStore>>,
    fails: AtomicBool,
    has_failed: AtomicBool,
}

impl Lasting {
    fn new(inner: &MemoryStore, fails: bool) -> Arc<Altered<Self>> {
        let inner = Altered::with_info(inner.clone(), |info| {
            info.capability.liveness = Liveness { ttl: None, session: Some(Duration::from_secs(60)) };
        });
        Arc::new(Altered(Self { inner, fails: AtomicBool::new(fails), has_failed: AtomicBool::default() }))
    }
}

#[async_trait]
impl Alter for Lasting {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        if self.fails.load(Ordering::SeqCst) {
            self.has_failed.store(true, Ordering::SeqCst);
            return Err(Error::new(ErrorKind::Unavailable, "the server is away").unknown_effect());
        }
        self.inner.release(claim).await
    }
}

/// Another process takes the lock, once it is released.
async fn another_takes_it(memory: &MemoryStore) -> Result<()> {
    let another = Locker::new(memory.clone());
    let guard = timeout(PATIENCE, another.lock("a").acquire()).await.expect("released")?;
    assert!(guard.is_held());
    Ok(())
}

#[test]
fn a_release_that_ended_with_its_runtime_is_made_at_the_next_use() -> Result<()> {
    let memory = MemoryStore::new();
    let (first, second) = (undriven(), runtime());
    let locker = first.block_on(async { Locker::builder(Lasting::new(&memory, false)).build() });
    // Its task is never polled.
    first.block_on(async { locker.lock("a").acquire().await.map(drop) })?;
    drop(first);
    second.block_on(async {
        let guard = timeout(PATIENCE, locker.lock("a").acquire()).await.expect("released")?;
        assert_eq!(guard.release().await?, Outcome::Released);
        another_takes_it(&memory).await
    })
}

/// Nobody uses the locker after that; but it has another lease to look after.
#[test]
fn a_release_that_ended_with_its_runtime_is_made_at_the_next_home() -> Result<()> {
    let memory = MemoryStore::new();
    let (first, second) = (undriven(), runtime());
    let locker = first.block_on(async { Locker::builder(Lasting::new(&memory, false)).build() });
    let kept = second.block_on(locker.lock("b").acquire())?;
    first.block_on(async { locker.lock("a").acquire().await.map(drop) })?;
    drop(first);
    second.block_on(another_takes_it(&memory))?;
    assert!(kept.is_held());
    Ok(())
}

#[test]
fn a_release_that_failed_before_its_runtime_ended_is_tried_again() -> Result<()> {
    let memory = MemoryStore::new();
    let (first, second) = (runtime(), runtime());
    let store = Lasting::new(&memory, true);
    let locker = first.block_on(async { Locker::builder(Arc::clone(&store)).build() });
    let kept = second.block_on(locker.lock("b").acquire())?;
    first.block_on(async { locker.lock("a").acquire().await.map(drop) })?;
    wait_for(&store.0.has_failed);
    drop(first);
    store.0.fails.store(false, Ordering::SeqCst);
    second.block_on(another_takes_it(&memory))?;
    assert!(kept.is_held());
    Ok(())
}

#[test]
fn a_guard_dropped_between_two_runtimes_is_released() -> Result<()> {
    let memory = MemoryStore::new();
    let first = runtime();
    let locker = first.block_on(async { Locker::builder(Lasting::new(&memory, false)).build() });
    let guard = first.block_on(locker.lock("a").acquire())?;
    drop(first);
    drop(guard);
    runtime().block_on(async {
        locker.shutdown(PATIENCE).await?;
        another_takes_it(&memory).await
    })
}

/// Nobody polls its release; whoever is next passes it, and the lease lapses.
#[test]
fn a_guard_dropped_at_a_home_that_nobody_drives_blocks_nobody_past_its_lapse() -> Result<()> {
    let (driven, undriven) = (runtime(), undriven());
    let locker = undriven.block_on(async { Locker::new(MemoryStore::new()) });
    undriven.block_on(async { locker.lock("a").ttl(TTL).acquire().await.map(drop) })?;
    driven.block_on(async {
        let guard = timeout(PATIENCE, locker.lock("a").ttl(TTL).acquire()).await.expect("free")?;
        assert!(guard.is_held());
        Ok(())
    })
}

/// Its timer is where nobody looks at it. Those that wait do.
#[test]
fn a_guard_kept_at_a_home_that_nobody_drives_blocks_nobody_past_its_lapse() -> Result<()> {
    let (driven, undriven) = (runtime(), undriven());
    let locker = undriven.block_on(async { Locker::new(MemoryStore::new()) });
    let lock = |name: &str| locker.lock(name).ttl(TTL);
    let kept = undriven.block_on(async { Ok::<_, Error>([lock("a").acquire().await?, lock("b").acquire().await?]) })?;
    driven.block_on(async {
        let guard = timeout(PATIENCE, lock("a").acquire()).await.expect("free")?;
        assert!(guard.is_held());
        assert!(lock("b").try_acquire().await?.is_some(), "nobody holds it at the store");
        assert!(kept.iter().all(|guard| !guard.is_held()));
        Ok(())
    })
}

#[test]
fn waiting_for_a_guard_whose_runtime_ended_has_it_renewed() -> Result<()> {
    let (first, second) = (runtime(), runtime());
    let locker = Locker::new(MemoryStore::new());
    let kept = first.block_on(locker.lock("a").ttl(KEPT).acquire())?;
    drop(first);
    second.block_on(async {
        assert!(timeout(LAPSED, locker.lock("a").ttl(KEPT).acquire()).await.is_err(), "it is held");
        assert!(kept.is_held());
        assert_eq!(kept.release().await?, Outcome::Released);
        Ok(())
    })
}

#[test]
fn a_renewal_by_hand_has_a_guard_renewed_whose_runtime_ended() -> Result<()> {
    let (first, second) = (runtime(), runtime());
    let locker = Locker::new(MemoryStore::new());
    let kept = first.block_on(locker.lock("a").ttl(KEPT).acquire())?;
    drop(first);
    second.block_on(async {
        kept.renew().await?;
        sleep(LAPSED).await;
        assert!(kept.is_held());
        Ok(())
    })
}

/// That is not the panic of the timer task: the home is to move on at once, for nobody may come to use the locker.
#[test]
fn leases_are_renewed_after_a_panic_ended_the_first_runtime() -> Result<()> {
    let (locker, second) = (Locker::new(MemoryStore::new()), runtime());
    let (taken, go_on) = std::sync::mpsc::channel();
    let (ready, is_home) = std::sync::mpsc::channel();
    let first = std::thread::spawn({
        let locker = locker.clone();
        move || {
            let first = runtime();
            first.block_on(async { locker.lock("a").acquire().await.map(drop) }).expect("free");
            ready.send(()).expect("awaited");
            go_on.recv().expect("told");
            panic!("which ends the runtime {first:?}");
        }
    });
    is_home.recv().expect("the first runtime is home");
    let guard = second.block_on(locker.lock("b").ttl(KEPT).acquire())?;
    taken.send(()).expect("awaited");
    assert!(first.join().is_err());
    std::thread::sleep(LAPSED);
    assert!(guard.is_held());
    Ok(())
}

/// Such as one without timers: the timer task panics there, and would do so again.
#[test]
fn a_runtime_on_which_the_timer_task_panics_is_not_asked_again_and_again() -> Result<()> {
    const TURNS: usize = 100;
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name() == Some("without-timers") {
            PANICS.fetch_add(1, Ordering::SeqCst);
        } else {
            before(info);
        }
    }));
    let thread = std::thread::Builder::new().name("without-timers".into()).spawn(|| {
        Builder::new_current_thread().build().expect("a runtime").block_on(async {
            let guard = Locker::new(MemoryStore::new()).lock("a").acquire().await?;
            for _ in 0..TURNS {
                tokio::task::yield_now().await;
            }
            assert!(guard.is_held());
            Ok(())
        })
    });
    let ended = thread.expect("a thread").join().expect("no panic but of the timer task");
    let panics = PANICS.load(Ordering::SeqCst);
    assert!((1..10).contains(&panics), "{panics} panics in {TURNS} turns");
    ended
}

#[test]
fn leases_of_a_runtime_that_nobody_drives_are_renewed_at_home() -> Result<()> {
    let (driven, undriven) = (runtime(), undriven());
    let given =
        undriven.block_on(async { Locker::builder(MemoryStore::new()).runtime(driven.handle().clone()).build() });
    let built = driven.block_on(async { Locker::new(MemoryStore::new()) });
    let take = |locker: Locker| {
        let guard = undriven.block_on(locker.lock("a").ttl(KEPT).acquire())?;
        Ok::<_, Error>((locker, guard))
    };
    let taken = [take(given)?, take(built)?];
    std::thread::sleep(LAPSED);
    for (locker, guard) in taken {
        assert!(guard.is_held());
        drop(guard);
        // Its lease would last for longer, if nobody released it.
        let guard = undriven.block_on(async { timeout(KEPT / 2, locker.lock("a").acquire()).await });
        assert!(guard.expect("released without a runtime at hand")?.is_held());
    }
    Ok(())
}

#[test]
fn a_thread_of_its_own_renews_while_the_application_blocks() -> Result<()> {
    let thread = OwnThread::start()?;
    let (told, ended) = std::sync::mpsc::channel::<()>();
    thread.handle().spawn(async move {
        std::future::pending::<()>().await;
        drop(told);
    });
    let undriven = undriven();
    let guard = undriven.block_on(async {
        let store = thread.run(async { MemoryStore::new() }).await;
        let locker = Locker::builder(store).own_thread(thread).build();
        let guard = locker.lock("a").ttl(KEPT).acquire().await?;
        std::thread::sleep(LAPSED);
        assert!(guard.is_held());
        Ok::<_, Error>(guard)
    })?;
    drop(undriven);
    std::thread::sleep(LAPSED);
    assert!(guard.is_held());
    assert_eq!(ended.try_recv(), Err(TryRecvError::Empty));
    drop(guard);
    // With the last handle, the thread ends.
    assert_eq!(ended.recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
    Ok(())
}
