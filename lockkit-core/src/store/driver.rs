//! What a store makes of what its driver and its server say.

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    task::Poll,
};

use super::LockStore;
use crate::{Error, Renewal, Renewed, Result};

/// One line of at most 200 characters, for what a server says within the message of an error.
#[must_use]
pub fn one_line(text: &str) -> String {
    text.chars().take(200).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// What a driver's `work` comes to; `otherwise` if it panics, as drivers do over some answers that are malformed. What the driver
/// was doing is to be given up then: nothing is known of its state.
///
/// # Cancellation
/// That of `work`.
#[allow(clippy::future_not_send, reason = "it can be sent if the work can")]
pub async fn without_panic<T>(work: impl Future<Output = T>, otherwise: impl Fn() -> T) -> T {
    let mut work = pin!(work);
    poll_fn(|context| {
        let polled = catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context)));
        polled.unwrap_or_else(|_| Poll::Ready(otherwise()))
    })
    .await
}

/// Extends one lease.
pub(crate) async fn renew_one(store: &dyn LockStore, renewal: Renewal) -> Result<Renewed> {
    store.renew(&[renewal]).await.pop().unwrap_or_else(|| Err(Error::unanswered()))
}

/// The answers of some calls, in their order. The calls go on side by side in this task: few of them, for each is asked each time.
///
/// # Cancellation
/// That of each call.
#[allow(clippy::future_not_send, reason = "it can be sent if the calls can")]
pub async fn join_all<T, C: Future<Output = T>>(calls: impl Iterator<Item = C>) -> Vec<T> {
    let mut calls = calls.fuse();
    let mut open: Vec<(usize, Pin<Box<C>>)> = Vec::new();
    let mut answers = Vec::new();
    poll_fn(|cx| {
        open.retain_mut(|(place, call)| {
            let answer = call.as_mut().poll(cx);
            let is_open = answer.is_pending();
            if let Poll::Ready(answer) = answer {
                answers[*place] = Some(answer);
            }
            is_open
        });
        // One after another: most renewals are through at once, and leave their room to the next.
        for call in calls.by_ref() {
            let mut call = Box::pin(call);
            match call.as_mut().poll(cx) {
                Poll::Ready(answer) => answers.push(Some(answer)),
                Poll::Pending => {
                    open.push((answers.len(), call));
                    answers.push(None);
                }
            }
        }
        if open.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    answers.into_iter().flatten().collect()
}
