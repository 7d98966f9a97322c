//! Types and functions that all callers of the driver share.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    task::Poll,
};

use zookeeper_client as zk;

/// The answer to a request that has been sent.
pub(crate) type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, zk::Error>> + Send + 'a>>;

/// The driver's answer, an error if it can't be read.
///
/// The driver (zookeeper-client 0.11) panics in the task of the caller over some answers of the wrong form, such as an
/// empty path.
pub(crate) async fn understood<T>(answer: impl Future<Output = Result<T, zk::Error>>) -> Result<T, zk::Error> {
    let unreadable = || Err(zk::Error::UnexpectedError("the answer can't be understood".into()));
    without_panic(answer).await.unwrap_or_else(unreadable)
}

/// What the driver's `work` comes to; `None` if it panics.
pub(crate) async fn without_panic<T>(work: impl Future<Output = T>) -> Option<T> {
    let mut work = pin!(work);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))) {
        Ok(polled) => polled.map(Some),
        Err(_) => Poll::Ready(None),
    })
    .await
}
