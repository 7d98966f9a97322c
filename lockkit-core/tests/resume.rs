//! A lease that is taken up by its token, and what may happen at each of the three answers that this takes.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Claim, Clock, Effect, ErrorKind, Fence, HolderInfo, KeyState, LockStore, Locker, MemoryStore, Outcome, Query,
    Release, Renewal, Renewed, Result, ShiftedClock, Token,
};
use lockkit_testkit::{Alter, Altered};
use tokio::sync::Semaphore;

const TTL: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_secs(3600);

/// What happens to one of the answers, counted from 1: to a renewal, to an inspection, to another renewal.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// All answers come at once.
    None,
    /// The machine sleeps for an hour before this answer is heard.
    Late(usize),
    /// It does not come until the test says so, although the effect happened.
    Held(usize),
}

/// The memory store in trouble.
#[derive(Debug)]
struct Troubled {
    inner: MemoryStore,
    clock: Arc<ShiftedClock>,
    fate: Fate,
    answers: AtomicUsize,
    /// A permit for each release that is answered, and for the answer that is held.
    go: Semaphore,
}

impl Troubled {
    async fn heard(&self) {
        let answer = self.answers.fetch_add(1, Ordering::SeqCst) + 1;
        match self.fate {
            Fate::Late(late) if late == answer => self.clock.advance(HOUR),
            Fate::Held(held) if held == answer => self.go.acquire().await.expect("open").forget(),
            _ => {}
        }
    }
}

#[async_trait]
impl Alter for Troubled {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        let answers = self.inner.renew(renewals).await;
        self.heard().await;
        answers
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        let answer = self.inner.inspect(query).await;
        self.heard().await;
        answer
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.go.acquire().await.expect("open").forget();
        self.inner.release(claim).await
    }
}

/// One store, seen by several processes.
struct World {
    inner: MemoryStore,
    clock: Arc<ShiftedClock>,
}

impl World {
    fn new() -> Self {
        let clock = Arc::new(ShiftedClock::default());
        Self { inner: MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>), clock }
    }

    fn process(&self) -> Locker {
        Locker::new(self.inner.clone())
    }

    fn troubled(&self, fate: Fate) -> (Locker, Arc<Altered<Troubled>>) {
        let (inner, clock) = (self.inner.clone(), Arc::clone(&self.clock));
        let troubled = Troubled { inner, clock, fate, answers: AtomicUsize::new(0), go: Semaphore::new(0) };
        let store = Arc::new(Altered(troubled));
        (Locker::new(Arc::clone(&store)), store)
    }

    /// A lease that a process let go of, and its fence.
    async fn detached(&self) -> Result<(Token, Fence)> {
        let guard = self.process().lock("x").ttl(TTL).acquire().await?;
        let fence = guard.fence();
        Ok((guard.detach()?, fence))
    }
}

#[tokio::test]
async fn what_was_heard_too_late_is_not_taken_up() -> Result<()> {
    for late in 1..=3 {
        let world = World::new();
        let (token, _) = world.detached().await?;
        match world.troubled(Fate::Late(late)).0.lock("x").ttl(TTL).resume(token).await {
            // The lease lapsed before the last renewal, which said so.
            Ok(None) => assert!(late < 3, "the last answer came an hour late"),
            Ok(Some(guard)) => panic!("answer {late}: {guard:?}"),
            Err(error) => assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::Unknown)),
        }
        assert!(world.process().lock("x").try_acquire().await?.is_some(), "answer {late}: it lapsed");
    }
    Ok(())
}

/// Dropped where an answer does not come, it leaves a lease that lapses, and that can be taken up by somebody else.
#[tokio::test]
async fn a_future_that_is_dropped_leaves_a_lease_that_can_be_taken_up() -> Result<()> {
    for held in 1..=3 {
        let world = World::new();
        let (token, first) = world.detached().await?;
        let (stuck, _) = world.troubled(Fate::Held(held));
        {
            let lock = stuck.lock("x").ttl(TTL);
            let mut resuming = pin!(lock.resume(token));
            assert!(resuming.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending(), "answer {held}");
        }
        assert!(world.process().lock("x").try_acquire().await?.is_none(), "answer {held}: it is held");
        let other = world.process();
        let guard = other.lock("x").ttl(TTL).resume(token).await?.expect("the lease is there");
        assert!(guard.fence() > first, "answer {held}");
        assert_eq!(guard.release().await?, Outcome::Released);
    }
    Ok(())
}

/// Tasks pass a lease on, each with the next fence of its grant, and the store need not remember them.
#[tokio::test]
async fn the_fences_that_tasks_passed_on_do_not_come_again() -> Result<()> {
    let world = World::new();
    let locker = world.process();
    let lock = locker.lock("x").ttl(TTL);
    let guard = lock.acquire().await?;
    // All three are there when the first of them asks, so that its grant owns fences for the others.
    let pass_on = async || lock.acquire().await?.release().await;
    let (one, two, guard, zero) = tokio::join!(pass_on(), pass_on(), lock.acquire(), guard.release());
    assert_eq!([zero?, one?, two?], [Outcome::Released; 3]);
    let guard = guard?;
    let last = guard.fence();
    let forgetful = Locker::new(Altered(Forgetful(world.inner.clone())));
    let again = forgetful.lock("x").ttl(TTL).resume(guard.detach()?).await?.expect("still there");
    assert!(again.fence() > last, "{} follows {last}", again.fence());
    Ok(())
}

/// Its counters are gone.
#[derive(Debug)]
struct Forgetful(MemoryStore);

#[async_trait]
impl Alter for Forgetful {
    fn inner(&self) -> &dyn LockStore {
        &self.0
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        let states = self.0.inspect(query).await?;
        Ok(states.into_iter().map(|state| KeyState { fence: None, ..state }).collect())
    }
}

/// The release of a guard that was dropped comes when it comes, and would end what was taken up.
#[tokio::test]
async fn a_lease_that_is_about_to_be_released_is_not_taken_up() -> Result<()> {
    let world = World::new();
    let (locker, store) = world.troubled(Fate::None);
    let lock = locker.lock("x").ttl(TTL);
    let guard = lock.acquire().await?;
    let token = guard.token();
    drop(guard);
    assert!(lock.resume(token).await?.is_none(), "its release has no answer yet");
    store.0.go.add_permits(1);
    assert_eq!(lock.acquire().await?.detach()?, lock.inspect().await?.holders[0].token.expect("a token"));
    // What was detached was not released: it can be taken up here, too.
    let token = lock.inspect().await?.holders[0].token.expect("a token");
    let guard = lock.resume(token).await?.expect("let go of");
    store.0.go.add_permits(1);
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

#[tokio::test]
async fn nothing_is_taken_up_by_a_locker_that_was_shut_down() -> Result<()> {
    let world = World::new();
    let (token, _) = world.detached().await?;
    let (locker, store) = world.troubled(Fate::Held(3));
    let lock = locker.lock("x").ttl(TTL);
    let mut resuming = pin!(lock.resume(token));
    assert!(resuming.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    locker.shutdown(TTL).await?;
    store.0.go.add_permits(1);
    assert_eq!(resuming.await.expect_err("it was under way").kind(), ErrorKind::Closed);
    assert_eq!(lock.resume(token).await.expect_err("closed").kind(), ErrorKind::Closed);
    assert!(world.process().lock("x").resume(token).await?.is_some(), "it is there for others");
    Ok(())
}

/// Others see at once who has it, and nothing of the former holder can end it.
#[tokio::test]
async fn a_detached_guard_has_no_part_in_its_lease_any_more() -> Result<()> {
    let world = World::new();
    let former = world.process();
    let guard = former.lock("x").ttl(TTL).acquire().await?;
    let signal = guard.loss_signal();
    let waiting = former.lock("x").ttl(TTL);
    let mut waiting = pin!(waiting.acquire());
    assert!(waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let token = guard.detach()?;
    assert!(!signal.is_held(), "nobody here holds it");
    former.shutdown(TTL).await?;
    assert_eq!(waiting.await.expect_err("closed").kind(), ErrorKind::Closed);
    let next = Locker::builder(world.inner.clone()).holder(HolderInfo::new("the next")).build();
    let guard = next.lock("x").ttl(TTL).resume(token).await?.expect("still there");
    assert_eq!(next.lock("x").inspect().await?.holders[0].info.as_str(), "the next");
    assert!(guard.is_held());
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

/// Guards that still count are no reason to leave the lease to nobody.
#[tokio::test]
async fn a_nested_hold_is_not_detached() -> Result<()> {
    let locker = World::new().process();
    let owner = locker.owner();
    let (outer, inner) = (owner.lock("x").acquire().await?, owner.lock("x").acquire().await?);
    assert_eq!(inner.detach().expect_err("the outer one holds it").kind(), ErrorKind::InvalidInput);
    assert!(outer.is_held());
    let token = outer.detach()?;
    let again = owner.lock("x").resume(token).await?.expect("still there");
    let nested = owner.lock("x").acquire().await?;
    assert_eq!(nested.fence(), again.fence(), "the owner's acquisitions nest in what was taken up");
    Ok(())
}
