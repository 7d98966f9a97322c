//! What may be said of a lease that goes from one task of a process to the next: its token stays the same, its holder does not.

use std::{
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use lockkit_core::{
    Capability, Clock, Event, Fence, Fencing, Guard, Lock, Locker, MemoryStore, Observer, Outcome, Result, ShiftedClock,
};

const HOUR: Duration = Duration::from_secs(3600);

type Waiting<'a> = Pin<Box<dyn Future<Output = Result<Guard>> + Send + 'a>>;

/// The first holder, the second, whose lease can be handed on because the third waited when it was asked for, and the third.
async fn second_and_third(lock: &Lock) -> Result<(Guard, Waiting<'_>)> {
    let first = lock.acquire().await?;
    let (mut second, mut third): (Waiting<'_>, Waiting<'_>) = (Box::pin(lock.acquire()), Box::pin(lock.acquire()));
    assert!(poll(&mut second).is_pending());
    assert_eq!(first.release().await?, Outcome::Released);
    assert!(poll(&mut third).is_pending());
    Ok((second.await?, third))
}

fn poll<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Poll<T> {
    Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
}

/// Else whoever was told it would take up the lease of the next holder.
#[tokio::test]
async fn a_token_that_was_told_is_that_of_no_later_holder() -> Result<()> {
    let locker = Locker::new(MemoryStore::new());
    let lock = locker.lock("x");
    let (second, third) = second_and_third(&lock).await?;
    let saved = second.token();
    drop(second);
    let third = third.await?;
    assert!(lock.resume(saved).await?.is_none(), "it took up the lease of another");
    assert_ne!(third.token(), saved);
    assert_eq!(third.release().await?, Outcome::Released);
    Ok(())
}

#[derive(Debug)]
struct HandsOver;

impl Observer for HandsOver {
    fn event(&self, event: &Event<'_>) {
        if let Event::Acquired { handed_over: true, fence, .. } = event {
            assert_eq!(*fence, Fence::NONE);
        }
    }
}

/// A resource would let them pass in a test, and refuse all fences in production.
#[tokio::test]
async fn where_there_are_no_fences_none_comes_by_handing_over() -> Result<()> {
    let like = MemoryStore::new();
    let store = like.clone().like(&Capability { fencing: Fencing::None, ..capability(&like) });
    let locker = Locker::builder(store).observer(HandsOver).build();
    let lock = locker.lock("x");
    let (second, third) = second_and_third(&lock).await?;
    assert_eq!(second.fence(), Fence::NONE);
    drop(second);
    let third = third.await?;
    assert_eq!(third.fence(), Fence::NONE);
    assert_eq!(third.release().await?, Outcome::Released);
    Ok(())
}

fn capability(store: &MemoryStore) -> Capability {
    Locker::new(store.clone()).info().capability.clone()
}

/// Nothing else looks at it meanwhile: the timers of the locker are not driven.
#[tokio::test]
async fn a_try_is_not_kept_out_by_a_lease_that_lapsed_on_its_way() -> Result<()> {
    let clock = Arc::new(ShiftedClock::default());
    let locker = Locker::new(MemoryStore::with_clock(Arc::clone(&clock) as Arc<dyn Clock>));
    let lock = locker.lock("x");
    let (second, _never_polled) = second_and_third(&lock).await?;
    drop(second);
    clock.advance(HOUR);
    let mut trying = pin!(lock.try_acquire());
    let Poll::Ready(answer) = poll(&mut trying) else { panic!("memory answers at once") };
    assert!(answer?.is_some_and(|guard| guard.is_held()));
    Ok(())
}
