//! Where the work of a store goes on that no caller waits for.

use std::{
    fmt,
    future::{Future, pending},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::runtime::Handle;

use super::unpoisoned;

/// The runtime of a store's background work: the one that it was made on, else the first that it is used on.
///
/// A caller's own runtime may stand still as soon as the caller has its answer. So a caller's runtime is taken only in place of one that
/// has ended, or that does not begin a task within [a second](Self::BEGINS_WITHIN), or that was [left](Self::leave).
pub struct Background(Mutex<Home>);

struct Home {
    runtime: Option<Handle>,
    /// A task that has not begun, as far as is known, and since when.
    task: Option<(Instant, Begun)>,
}

/// Whether a task has begun: else nobody drives its runtime.
#[derive(Clone, Debug, Default)]
pub struct Begun(Arc<AtomicBool>);

impl Background {
    /// A runtime that does not begin a task within this time is not driven.
    pub const BEGINS_WITHIN: Duration = Duration::from_secs(1);

    /// With the runtime that this is called on, if there is one.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::new(Home { runtime: Handle::try_current().ok(), task: None }))
    }

    /// Leads a task to its end. Without a runtime it is dropped.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let Some((runtime, begun)) = self.home() else { return };
        // Not with the home locked: the task of a runtime that is ending is dropped at once, here and now.
        runtime.spawn(begun.noted_by(task));
    }

    /// The next task is for the runtime of its caller: what this one was given came to nothing.
    pub fn leave(&self) {
        *unpoisoned(&self.0) = Home { runtime: None, task: None };
    }

    fn home(&self) -> Option<(Handle, Begun)> {
        let mut home = unpoisoned(&self.0);
        let here = Handle::try_current().ok();
        // The runtime of the caller is there.
        let is_here = |runtime: &Handle| here.as_ref().is_some_and(|here| here.id() == runtime.id());
        let is_over = home.runtime.as_ref().is_none_or(|runtime| !is_here(runtime) && has_ended(runtime));
        let is_stuck = home.task.as_ref().is_some_and(|(since, _)| since.elapsed() > Self::BEGINS_WITHIN);
        let waits = home.task.take().filter(|(_, begun)| !begun.has_begun());
        if is_over || is_stuck && waits.is_some() {
            home.runtime = here.or(home.runtime.take());
            home.task = Some((Instant::now(), Begun::default()));
        } else {
            home.task = Some(waits.unwrap_or_else(|| (Instant::now(), Begun::default())));
        }
        let begun = home.task.as_ref().map(|(_, begun)| begun.clone())?;
        Some((home.runtime.clone()?, begun))
    }
}

impl Begun {
    /// The task, which notes here that it has begun.
    pub async fn noted_by<T>(self, task: impl Future<Output = T> + Send) -> T {
        self.0.store(true, Ordering::Relaxed);
        task.await
    }

    /// Whether it has.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Whether a runtime has ended. Such a one drops what it is given at once; one that nobody drives does not. A timer that was begun on it
/// panics when it is polled elsewhere.
#[must_use]
pub fn has_ended(runtime: &Handle) -> bool {
    let task = runtime.spawn(pending::<()>());
    let has_ended = task.is_finished();
    task.abort();
    has_ended
}

impl Default for Background {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use tokio::runtime::{Builder, Runtime};

    use super::*;

    fn runtime() -> Runtime {
        Builder::new_current_thread().enable_time().build().expect("a runtime")
    }

    /// Whether a task that is given on this runtime is done by the time that it has driven a while.
    fn is_done_on(runtime: &Runtime, background: &Background) -> bool {
        let (tell, told) = mpsc::channel();
        runtime.block_on(async {
            background.spawn(async move { tell.send(()).expect("it is waited for") });
            tokio::time::sleep(Duration::from_millis(5)).await;
        });
        told.try_recv().is_ok()
    }

    #[test]
    fn work_goes_on_where_it_was_until_that_has_ended() {
        let (first, other) = (runtime(), runtime());
        let background = first.block_on(async { Background::new() });
        assert!(!is_done_on(&other, &background), "the first one is there");
        assert!(is_done_on(&first, &background));
        drop(first);
        assert!(is_done_on(&other, &background));
    }

    #[test]
    fn a_runtime_that_begins_nothing_is_replaced() {
        let (first, other) = (runtime(), runtime());
        let background = first.block_on(async { Background::new() });
        assert!(!is_done_on(&other, &background));
        std::thread::sleep(Background::BEGINS_WITHIN);
        assert!(is_done_on(&other, &background) || is_done_on(&other, &background));
    }

    #[test]
    fn one_that_was_left_is_replaced_at_once() {
        let (first, other) = (runtime(), runtime());
        let background = first.block_on(async { Background::new() });
        background.leave();
        assert!(is_done_on(&other, &background));
        drop(first);
    }
}
