//! A lease that is taken up by its token: another grant takes its place, and what may happen to that question.

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Waker},
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Claim, Clock, Effect, ErrorKind, Fence, HolderInfo, LockStore, Locker, LossReason,
    MemoryStore, Outcome, Release, Result, ShiftedClock, Token,
};
use lockkit_testkit::{Alter, Altered};
use tokio::sync::Semaphore;

const TTL: Duration = Duration::from_secs(10);
const HOUR: Duration = Duration::from_secs(3600);

/// What happens to a grant in the place of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// All goes well.
    None,
    /// The machine sleeps for an hour before the answer is heard.
    Late,
    /// The request does not arrive until the test says so.
    Stuck,
    /// The answer does not come until the test says so, although the effect happened.
    Held,
}

/// The memory store in trouble.
#[derive(Debug)]
struct Troubled {
    inner: MemoryStore,
    clock: Arc<ShiftedClock>,
    fate: Fate,
    /// A permit for each release that is answered, and for the request or answer that is held.
    go: Semaphore,
}

impl Troubled {
    async fn wait(&self) {
        self.go.acquire().await.expect("open").forget();
    }
}

#[async_trait]
impl Alter for Troubled {
    fn inner(&self) -> &dyn LockStore {
        &self.inner
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        let fate = if request.from.is_some() { self.fate } else { Fate::None };
        if fate == Fate::Stuck {
            self.wait().await;
        }
        let answer = self.inner.acquire(request).await;
        match fate {
            Fate::Late => self.clock.advance(HOUR),
            Fate::Held => self.wait().await,
            Fate::None | Fate::Stuck => {}
        }
        answer
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        self.wait().await;
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
        let troubled = Troubled { inner, clock, fate, go: Semaphore::new(0) };
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
    let world = World::new();
    let (token, _) = world.detached().await?;
    let error = world.troubled(Fate::Late).0.lock("x").ttl(TTL).resume(token).await.expect_err("an hour late");
    assert_eq!((error.kind(), error.effect()), (ErrorKind::TimedOut, Effect::Unknown));
    assert!(world.process().lock("x").try_acquire().await?.is_some(), "it lapsed");
    Ok(())
}

/// Dropped before the store has heard of it, it leaves the lease to somebody else.
#[tokio::test]
async fn a_future_that_is_dropped_in_time_takes_nothing() -> Result<()> {
    let world = World::new();
    let (token, first) = world.detached().await?;
    let (stuck, store) = world.troubled(Fate::Stuck);
    {
        let lock = stuck.lock("x").ttl(TTL);
        let mut resuming = pin!(lock.resume(token));
        assert!(resuming.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    store.0.go.add_permits(1);
    stuck.shutdown(TTL).await?;
    let guard = world.process().lock("x").ttl(TTL).resume(token).await?.expect("the lease is there");
    assert!(guard.fence() > first);
    assert_eq!(guard.release().await?, Outcome::Released);
    Ok(())
}

/// Dropped when the store has given it the lease, it gives that back: nobody else could.
#[tokio::test]
async fn a_future_that_is_dropped_too_late_leaves_a_free_lock() -> Result<()> {
    let world = World::new();
    let (token, _) = world.detached().await?;
    let (stuck, store) = world.troubled(Fate::Held);
    {
        let lock = stuck.lock("x").ttl(TTL);
        let mut resuming = pin!(lock.resume(token));
        assert!(resuming.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    }
    assert!(world.process().lock("x").try_acquire().await?.is_none(), "it is held");
    store.0.go.add_permits(1);
    stuck.shutdown(TTL).await?;
    assert!(world.process().lock("x").resume(token).await?.is_none(), "the lease has ended");
    assert!(world.process().lock("x").try_acquire().await?.is_some(), "it is free");
    Ok(())
}

/// Tasks pass a lease on, each with the next fence of its grant, and the store need not hear of them.
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
    let again = world.process().lock("x").ttl(TTL).resume(guard.detach()?).await?.expect("still there");
    assert!(again.fence() > last, "{} follows {last}", again.fence());
    Ok(())
}

/// The release of a guard that was dropped comes when it comes.
#[tokio::test]
async fn a_late_release_of_the_former_holder_ends_nothing() -> Result<()> {
    let world = World::new();
    let (locker, store) = world.troubled(Fate::None);
    let guard = locker.lock("x").ttl(TTL).acquire().await?;
    let token = guard.token();
    drop(guard);
    let next = world.process();
    let taken_up = next.lock("x").ttl(TTL).resume(token).await?.expect("its release has not arrived");
    store.0.go.add_permits(1);
    locker.shutdown(TTL).await?;
    assert!(world.process().lock("x").try_acquire().await?.is_none(), "it is held");
    taken_up.renew().await?;
    assert_eq!(taken_up.release().await?, Outcome::Released);
    Ok(())
}

/// Of two that have the token, and of a holder that still runs, one has the lease.
#[tokio::test]
async fn a_token_serves_once() -> Result<()> {
    let world = World::new();
    let former = world.process();
    let guard = former.lock("x").ttl(TTL).acquire().await?;
    let token = guard.token();
    let (one, two) = (world.process(), world.process());
    let (one, two) = (one.lock("x").ttl(TTL), two.lock("x").ttl(TTL));
    let (one, two) = tokio::join!(one.resume(token), two.resume(token));
    let both: Vec<_> = [one?, two?].into_iter().flatten().collect();
    assert_eq!(both.len(), 1, "{both:?}");
    assert_eq!(guard.renew().await.expect_err("it is another's").kind(), ErrorKind::Lost);
    assert_eq!(guard.lost().await, LossReason::Taken);
    for guard in both {
        assert_eq!(guard.release().await?, Outcome::Released);
    }
    Ok(())
}

#[tokio::test]
async fn nothing_is_taken_up_by_a_locker_that_was_shut_down() -> Result<()> {
    let world = World::new();
    let (token, _) = world.detached().await?;
    let (locker, store) = world.troubled(Fate::Held);
    let lock = locker.lock("x").ttl(TTL);
    let mut resuming = pin!(lock.resume(token));
    assert!(resuming.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let shutdown = locker.shutdown(TTL);
    let ending = async {
        // For the answer, and for the release of what it gives.
        store.0.go.add_permits(2);
        let error = resuming.await.expect_err("it was under way");
        (error.kind(), error.effect())
    };
    let (ended, kind) = tokio::join!(shutdown, ending);
    assert_eq!((ended.is_ok(), kind), (true, (ErrorKind::Closed, Effect::Unknown)));
    assert_eq!(lock.resume(token).await.expect_err("closed").kind(), ErrorKind::Closed);
    assert!(world.process().lock("x").try_acquire().await?.is_some(), "what it gave was given back");
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

/// The time for which it is to be kept would be forgotten.
#[tokio::test]
async fn a_lock_that_is_to_be_kept_is_not_detached() -> Result<()> {
    let locker = World::new().process();
    let guard = locker.lock("x").keep_for(TTL).acquire().await?;
    assert_eq!(guard.detach().expect_err("it is to be kept").kind(), ErrorKind::InvalidInput);
    locker.shutdown(TTL).await?;
    assert_eq!(locker.lock("x").inspect().await?.holders.len(), 1, "as after any other end of the hold");
    Ok(())
}

/// One of many readers can't make room for a writer, nor one that has a permit.
#[tokio::test]
async fn only_an_exclusive_lease_is_taken_up() -> Result<()> {
    let world = World::new();
    let (mine, other) = (world.process(), world.process());
    let permit = mine.semaphore("permits", std::num::NonZeroU32::MIN);
    let guards = [
        mine.rw_lock("x").read().acquire().await?,
        other.rw_lock("x").read().acquire().await?,
        permit.acquire().await?,
    ];
    assert!(other.lock("x").resume(guards[0].token()).await?.is_none());
    assert!(other.lock("permits").resume(guards[2].token()).await?.is_none());
    for guard in guards {
        guard.renew().await?;
        assert_eq!(guard.detach().expect_err("it could not be taken up").kind(), ErrorKind::Unsupported);
    }
    Ok(())
}
