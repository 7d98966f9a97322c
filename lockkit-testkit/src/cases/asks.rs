//! What most cases ask of a store or a locker. A call that failed for want of time says nothing, and is made again.

use std::{
    future::Future,
    pin::pin,
    sync::Arc,
    task::Poll,
    time::{Duration, Instant},
};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Fencing, Guard, Hold, HolderInfo, KeyState, Lock, LockKey, LockStore,
    Locker, Mode, Order, Renewal, Renewed, Token,
};

use super::{AGAIN, CaseResult, SLACK};
use crate::BoxError;

pub(super) fn locker(store: Arc<dyn LockStore>) -> Locker {
    Locker::shared_builder(store).build()
}

/// A request that tries to get `key`.
pub(super) fn request(key: &LockKey, ttl: Duration) -> Result<AcquireRequest, BoxError> {
    let claim = Claim { key: key.clone(), token: Token::random()?, mode: Mode::Exclusive };
    Ok(AcquireRequest::new(claim, ttl, HolderInfo::this_process()))
}

/// The claim to ask with after a refusal: another if the store has burnt the token (rule R2).
pub(super) fn fresh(claim: Claim, refusal: &Contention) -> Result<Claim, BoxError> {
    Ok(if refusal.burnt { Claim { token: Token::random()?, ..claim } } else { claim })
}

/// The same for one of the kinds that stand in line.
pub(super) fn request_as(key: &LockKey, mode: Mode, ttl: Duration) -> Result<AcquireRequest, BoxError> {
    let mut request = request(key, ttl)?;
    (request.claim.mode, request.order) = (mode, Order::Fifo);
    Ok(request)
}

/// Asks for a free lock. When a call failed for want of time, its claim is released, and another one asked for (rule R2).
pub(super) async fn grant(store: &Arc<dyn LockStore>, request: &mut AcquireRequest) -> Result<Hold, BoxError> {
    grant_soon(store, request, false).await
}

/// Asks once more with the same claim, or in the place of another. When a call failed for want of time, the same is asked again: that is one
/// lease (rule R1).
pub(super) async fn grant_again(store: &Arc<dyn LockStore>, request: &AcquireRequest) -> Result<Hold, BoxError> {
    granted(answered(|| store.acquire(request)).await?)
}

/// Asks for a lock that was released just now, and anew as long as it is refused, with another claim if need be. A quorum has released it
/// when a majority of its nodes has: while one of these is slow, a node that has not may still stand in the way.
pub(super) async fn grant_released(store: &Arc<dyn LockStore>, request: &mut AcquireRequest) -> Result<Hold, BoxError> {
    grant_soon(store, request, true).await
}

async fn grant_soon(
    store: &Arc<dyn LockStore>,
    request: &mut AcquireRequest,
    mut was_released: bool,
) -> Result<Hold, BoxError> {
    let asked = Instant::now();
    loop {
        match store.acquire(request).await {
            Ok(Attempt::Contended(refusal)) if was_released && asked.elapsed() < AGAIN => {
                request.claim = fresh(request.claim.clone(), &refusal)?;
            }
            Err(error) if error.is_retryable() && asked.elapsed() < AGAIN => {
                answered(|| store.release(&request.claim)).await?;
                (request.claim.token, was_released) = (Token::random()?, true);
            }
            answer => return granted(answer?),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Asks once and expects a grant.
pub(super) async fn grant_at_once(store: &Arc<dyn LockStore>, request: &AcquireRequest) -> Result<Hold, BoxError> {
    granted(store.acquire(request).await?)
}

fn granted(answer: Attempt) -> Result<Hold, BoxError> {
    match answer {
        Attempt::Granted(hold) => Ok(hold),
        Attempt::Contended(by) => Err(format!("a free lock was refused; held by {:?}", by.holder).into()),
    }
}

/// What a store answers, asked again when a call failed for want of time.
pub(super) async fn answered<T, F: Future<Output = lockkit_core::Result<T>>>(
    mut ask: impl FnMut() -> F,
) -> Result<T, BoxError> {
    let asked = Instant::now();
    loop {
        match ask().await {
            Err(error) if error.is_retryable() && asked.elapsed() < AGAIN => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            answer => return Ok(answer?),
        }
    }
}

/// Renews one lease.
pub(super) async fn renew(
    store: &Arc<dyn LockStore>,
    claim: &Claim,
    ttl: Duration,
    depth: u32,
) -> Result<Renewed, BoxError> {
    let renewal = Renewal { depth, ..Renewal::new(claim.clone(), ttl) };
    let mut answers = store.renew(&[renewal]).await;
    assert_eq!(answers.len(), 1, "one answer for each renewal");
    Ok(answers.remove(0)?)
}

/// Takes a lock that should be free; that a call failed for want of time says nothing of that.
pub(super) async fn take(locker: &Locker, name: &str, ttl: Duration) -> Result<Guard, BoxError> {
    match locker.lock(name).ttl(ttl).try_acquire().await {
        Err(error) if error.is_retryable() => take_in_the_end(locker, name, ttl).await,
        answer => match answer? {
            Some(guard) => Ok(guard),
            None => Err(format!("{name} should be free; it is {:?}", seen(&locker.lock(name)).await?).into()),
        },
    }
}

/// Takes a lock that nobody has, for a short time, where it does not matter whether the first call is in time.
pub(super) async fn take_in_the_end(locker: &Locker, name: &str, ttl: Duration) -> Result<Guard, BoxError> {
    let guard = locker.lock(name).ttl(ttl).acquire_within(AGAIN).await?;
    guard.ok_or_else(|| format!("{name} should be free").into())
}

/// Who holds a lock and how many wait, asked again when a call failed for want of time.
pub(super) async fn seen(lock: &Lock) -> Result<KeyState, BoxError> {
    answered(|| lock.inspect()).await
}

/// Tells that a lock can't be had. An error tells nothing: it is asked for again.
pub(super) async fn assert_taken(locker: &Locker, name: &str) -> CaseResult {
    let lock = locker.lock(name);
    answered(|| lock.try_acquire()).await?.map_or(Ok(()), |_| Err(format!("{name} was granted twice").into()))
}

/// Polls a future for so long and drops it then, wherever it is; at once after the first poll if that is no time at
/// all.
///
/// tokio's timers count in milliseconds, in which most acquisitions are over and done. This one asks at every turn.
pub(crate) async fn abandon_after<F: Future>(patience: Duration, future: F) -> Option<F::Output> {
    let (started, mut future) = (Instant::now(), pin!(future));
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if started.elapsed() >= patience => Poll::Ready(None),
        Poll::Pending => {
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    })
    .await
}

/// Returns when somebody surely waits for the lock at the store: when the store says so, or after a while if it can't.
pub(super) async fn wait_for_waiter(lock: &Lock) -> CaseResult {
    wait_for_waiters(lock, 1).await
}

/// The same for so many of them.
pub(super) async fn wait_for_waiters(lock: &Lock, count: u32) -> CaseResult {
    for _ in 0..1000 {
        match seen(lock).await?.waiters {
            Some(waiters) if waiters < count => tokio::time::sleep(Duration::from_millis(10)).await,
            Some(_) => return Ok(()),
            None => {
                tokio::time::sleep(SLACK).await;
                return Ok(());
            }
        }
    }
    Err("a waiter is not shown".into())
}

/// Whether the fences of a store mean anything.
pub(super) fn fencing_claimed(locker: &Locker) -> bool {
    locker.info().capability.fencing != Fencing::None
}
