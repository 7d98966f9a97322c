//! A thread of its own for the background work of lockers.

use std::{
    convert::Infallible,
    future::Future,
    io,
    panic::resume_unwind,
    sync::{Arc, mpsc},
    thread::{self, ThreadId},
};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

use crate::{Error, ErrorKind, Result};

/// A thread with a small runtime of its own, on which leases are renewed whatever the application does with its own
/// runtimes: blocks them, or drives them only now and then, as `block_on` for each call does on a current-thread runtime.
///
/// Give it to [`LockerBuilder::own_thread`](crate::LockerBuilder::own_thread). A store that talks to its server through
/// tasks does so on the runtime that it was **connected** on, as those for Redis, Redlock and ZooKeeper do: connect it here
/// with [`run`](Self::run), or its answers depend on the application's runtime all the same.
///
/// Clones are one thread. It ends when the last of them is gone, and the last `Locker` and guard that it was given to; what
/// was connected on it is of no use from then on.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> lockkit_core::Result<()> {
/// use lockkit_core::{Locker, MemoryStore, OwnThread};
///
/// let thread = OwnThread::start()?;
/// let store = thread.run(async { MemoryStore::new() }).await; // or what connects to a server
/// let locker = Locker::builder(store).own_thread(thread).build();
/// # drop(locker.lock("invoice/42").acquire().await?);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct OwnThread(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    runtime: Handle,
    thread: ThreadId,
    /// The thread ends when this is dropped.
    _goes_on: oneshot::Sender<Infallible>,
}

impl OwnThread {
    /// Starts the thread. Its name is `lockkit`.
    ///
    /// # Errors
    /// `Unavailable` when the system refuses a thread or what a runtime needs.
    pub fn start() -> Result<Self> {
        let failed = |e| Error::new(ErrorKind::Unavailable, "no thread could be started for the locker").with_source(e);
        let (goes_on, ended) = oneshot::channel();
        let (tell, told) = mpsc::channel();
        // The runtime is made on the thread. If it were made here and the thread was refused, it would be dropped here, and a runtime
        // that is dropped in a task of another one panics.
        let drive = move || match Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => {
                drop(tell.send(Ok(runtime.handle().clone())));
                drop(runtime.block_on(ended));
            }
            Err(error) => drop(tell.send(Err(error))),
        };
        let thread = thread::Builder::new().name("lockkit".to_owned()).spawn(drive).map_err(failed)?;
        let thread = thread.thread().id();
        let runtime = told.recv().unwrap_or_else(|error| Err(io::Error::other(error))).map_err(failed)?;
        Ok(Self(Arc::new(Inner { runtime, thread, _goes_on: goes_on })))
    }

    /// Does `work`, such as connecting to a store, on this thread.
    ///
    /// # Cancellation
    /// The work goes on.
    ///
    /// # Panics
    /// When `work` does.
    pub async fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        match self.0.runtime.spawn(work).await {
            Ok(output) => output,
            Err(e) => match e.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                // The thread goes on for as long as `self` is there.
                Err(e) => panic!("{e}"),
            },
        }
    }

    /// Whether the caller is on this thread, and would keep all from being done here that it waits for.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.0.thread == thread::current().id()
    }

    /// The thread's runtime.
    #[must_use]
    pub fn handle(&self) -> &Handle {
        &self.0.runtime
    }
}
