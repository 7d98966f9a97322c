//! Types and functions that all callers of the driver share.

use std::pin::Pin;

use lockkit_core::store::without_panic;
use zookeeper_client as zk;

/// The answer to a request that has been sent.
pub(crate) type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, zk::Error>> + Send + 'a>>;

/// The driver's answer, an error if it can't be read.
///
/// The driver (zookeeper-client 0.11) panics in the task of the caller over some answers of the wrong form, such as an
/// empty path.
pub(crate) fn understood<T>(
    answer: impl Future<Output = Result<T, zk::Error>>,
) -> impl Future<Output = Result<T, zk::Error>> {
    without_panic(answer, || Err(zk::Error::UnexpectedError("the answer can't be understood".into())))
}
