//! Futures that are polled so many times and no more.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::Poll,
};

use lockkit_core::{AcquireRequest, Attempt, LockStore, LossReason, Release, Result};

/// Polls a future so many times, each time that it asks to be polled; `before_last` comes before the last time. `None` if it
/// has not ended by then: it can be dropped at this await, or polled on.
pub async fn poll_until<F: Future + ?Sized>(
    mut future: Pin<&mut F>,
    polls: u32,
    before_last: impl Fn(),
) -> Option<F::Output> {
    let mut polled = 0;
    poll_fn(move |cx| {
        polled += 1;
        if polled == polls {
            before_last();
        }
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polled >= polls => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Releases claims that have nothing, and has the lease of each come by another `way` in the middle: a request that its release has
/// overtaken, for each await of that. Says what those releases answered that did not find it.
///
/// # Errors
/// The store's.
///
/// # Panics
/// If a claim is not granted the lock, or a release comes to no end.
pub async fn overtaken_requests(
    store: &impl LockStore,
    way: &impl LockStore,
    mut request: impl FnMut() -> AcquireRequest,
) -> Result<Vec<LossReason>> {
    let mut reasons = Vec::new();
    for polls in 0..100 {
        let request = request();
        let mut releasing = pin!(store.release(&request.claim));
        let early = poll_until(releasing.as_mut(), polls, || {}).await;
        let is_over = early.is_some();
        let answer = match early {
            Some(answer) => answer?,
            None => {
                let attempt = way.acquire(&request).await?;
                assert!(matches!(attempt, Attempt::Granted(_)), "the lock is free: {attempt:?}");
                releasing.await?
            }
        };
        if let Release::NotHeld(reason) = answer {
            reasons.push(reason);
        }
        _ = way.release(&request.claim).await?;
        if is_over {
            return Ok(reasons);
        }
    }
    panic!("a release comes to no end");
}
