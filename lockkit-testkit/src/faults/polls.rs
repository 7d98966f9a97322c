//! Futures that are polled so many times and no more.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::Poll,
};

/// Polls a future so many times, each time that it asks to be polled; `before_last` comes before the last time. `None` if it
/// has not ended by then: it can be dropped at this await, or polled on.
pub async fn poll_until<F: Future>(mut future: Pin<&mut F>, polls: u32, before_last: impl Fn()) -> Option<F::Output> {
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
