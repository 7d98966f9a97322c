//! Where the work goes on that no caller waits for.

use std::{
    fmt,
    future::Future,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::store::{has_ended, unpoisoned};
use tokio::runtime::Handle;

/// A runtime that has not begun a task by then is not driven.
const BEGINS_WITHIN: Duration = Duration::from_secs(1);

/// The runtime of a store's background work: the one that it was made on, else the first that it is used on. One that has ended, or
/// does not begin what it was given, is replaced by that of the next caller, for a caller's own may stand still as soon as it
/// has its answer.
#[derive(Default)]
pub(crate) struct Background(Mutex<Home>);

#[derive(Default)]
struct Home {
    runtime: Option<Handle>,
    /// Since when a task waits to be begun, and whether it was.
    task: Option<(Instant, Arc<AtomicBool>)>,
}

impl Background {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Home { runtime: Handle::try_current().ok(), task: None }))
    }

    /// Leads something to its end. Without a runtime it is forgotten, and the leases that it was for lapse.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let Some((runtime, has_begun)) = self.home() else { return };
        // Not with the home locked: the task of a runtime that is ending is dropped at once, here and now.
        runtime.spawn(async move {
            has_begun.store(true, Ordering::Relaxed);
            task.await;
        });
    }

    fn home(&self) -> Option<(Handle, Arc<AtomicBool>)> {
        let mut home = unpoisoned(&self.0);
        let here = Handle::try_current().ok();
        // The runtime of the caller is there.
        let is_here = |runtime: &Handle| here.as_ref().is_some_and(|here| here.id() == runtime.id());
        let is_over = home.runtime.as_ref().is_none_or(|runtime| !is_here(runtime) && has_ended(runtime));
        if is_over || home.is_stuck() {
            home.runtime = here.or(home.runtime.take());
            home.task = None;
        }
        let runtime = home.runtime.clone()?;
        let (_, has_begun) = match home.task.take().filter(|(_, has_begun)| !has_begun.load(Ordering::Relaxed)) {
            Some(waiting) => home.task.insert(waiting),
            None => home.task.insert((Instant::now(), Arc::default())),
        };
        Some((runtime, Arc::clone(has_begun)))
    }
}

impl Home {
    fn is_stuck(&self) -> bool {
        let waits = |(since, has_begun): &(Instant, Arc<AtomicBool>)| {
            !has_begun.load(Ordering::Relaxed) && since.elapsed() > BEGINS_WITHIN
        };
        self.task.as_ref().is_some_and(waits)
    }
}

impl fmt::Debug for Background {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Background").finish_non_exhaustive()
    }
}
