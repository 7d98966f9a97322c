//! What a store makes of what its driver and its server say.

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    task::Poll,
};

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
