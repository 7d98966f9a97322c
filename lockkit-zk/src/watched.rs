//! Waiting for a watch, and for other news of the driver.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    task::{Context, Poll, Waker},
};

use zookeeper_client::{OneshotWatcher, WatchedEvent};

/// What a watch tells; `None` if nobody serves it any more.
///
/// The driver's task ends with the runtime on which the session was opened, and whoever then waits for a watch on
/// another one runs into an `unwrap` (zookeeper-client 0.11, `OneshotReceiver::recv`). A lost session is no reason for a
/// caller to panic.
pub(crate) async fn changed(watcher: OneshotWatcher) -> Option<WatchedEvent> {
    let mut event = Box::pin(watcher.changed());
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| event.as_mut().poll(cx))) {
        Ok(event) => event.map(Some),
        Err(_) => Poll::Ready(None),
    })
    .await
}

/// Whether there is news already. It waits for none.
pub(crate) fn is_ready<T>(news: impl Future<Output = T>) -> bool {
    pin!(news).poll(&mut Context::from_waker(Waker::noop())).is_ready()
}
