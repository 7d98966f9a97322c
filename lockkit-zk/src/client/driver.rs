//! Types and functions that all callers of the driver share.

use std::{
    future::Future,
    pin::Pin,
    sync::{Mutex, MutexGuard, PoisonError},
};

use zookeeper_client as zk;

/// The answer to a request that has been sent.
pub(crate) type Answer<'a, T> = Pin<Box<dyn Future<Output = Result<T, zk::Error>> + Send + 'a>>;

/// Takes a mutex, also after a panic of the task that had it: each change under it is made in one step.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
