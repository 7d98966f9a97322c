//! The home of a `Locker`: the one runtime that all its background work runs on.

use std::sync::{
    Arc, Mutex, Weak,
    atomic::{AtomicBool, Ordering},
};

use tokio::runtime::Handle;

use super::{
    Engine,
    renew::{Timers, serve_timers},
};
use crate::{
    OwnThread,
    store::{unpoisoned, without_panic},
};

/// The runtime of a `Locker`: the one that it was given, else the one that it was built on, else the first one that it is
/// used on. When it ends, another one on which a lease was taken takes its place, or the next one that is used.
#[derive(Debug)]
pub(crate) struct Home {
    current: Mutex<Current>,
    /// Goes on for as long as the `Locker` does.
    _thread: Option<OwnThread>,
}

#[derive(Debug)]
struct Current {
    runtime: Option<Handle>,
    /// Whether the timer task runs there. As long as it does, so does the runtime.
    is_kept: bool,
}

impl Home {
    pub(crate) fn new(runtime: Option<Handle>, thread: Option<OwnThread>) -> Self {
        let runtime = thread.as_ref().map(|thread| thread.handle().clone()).or(runtime);
        let runtime = runtime.or_else(|| Handle::try_current().ok());
        Self { current: Mutex::new(Current { runtime, is_kept: false }), _thread: thread }
    }
}

impl Engine {
    /// Runs a task at home. Without a home it is dropped.
    pub(super) fn at_home(self: &Arc<Self>, task: impl Future<Output = ()> + Send + 'static) {
        if let Some(runtime) = self.home() {
            runtime.spawn(task);
        }
    }

    /// The home, with the timer task running there; `None` if no runtime is known that has not ended.
    pub(super) fn home(self: &Arc<Self>) -> Option<Handle> {
        let mut current = unpoisoned(&self.home.current);
        if !current.is_kept {
            let known = current.runtime.take().into_iter().chain(Handle::try_current().ok());
            current.runtime = known.chain(self.timers.runtimes()).find(|runtime| self.keep(runtime));
            current.is_kept = current.runtime.is_some();
        }
        current.runtime.clone()
    }

    /// Starts the timer task; `false` if the runtime has ended.
    fn keep(self: &Arc<Self>, runtime: &Handle) -> bool {
        let keeper = Keeper::new(self);
        let state = Arc::clone(&keeper.state);
        runtime.spawn(watch(Arc::clone(&self.timers), keeper));
        // A runtime that has ended has dropped the task by now. One that ends from here on has the keeper notice.
        state.take()
    }

    /// The home has ended: the next that needs one looks for another.
    pub(super) fn leave_home(&self) {
        *unpoisoned(&self.home.current) = Current { runtime: None, is_kept: false };
    }
}

/// Is part of the timer task, and so notices when that is dropped with its runtime.
struct Keeper {
    engine: Weak<Engine>,
    state: Arc<TakenOrDropped>,
    /// The task would panic again if it was started at once, and so without end: on a runtime without timers, say.
    has_panicked: bool,
}

/// Decides what comes first: that the runtime of a timer task is taken for the home, or that the task is dropped, by another thread
/// perhaps. Each of the two is one step, which says whether it was the second.
#[derive(Debug, Default)]
struct TakenOrDropped(AtomicBool);

impl TakenOrDropped {
    /// Whether the task is there. If it is, its end will be told to the engine.
    fn take(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }

    /// Whether the runtime of the task was the home.
    fn drop_task(&self) -> bool {
        self.0.swap(true, Ordering::SeqCst)
    }
}

impl Keeper {
    fn new(engine: &Arc<Engine>) -> Self {
        Self { engine: Arc::downgrade(engine), state: Arc::default(), has_panicked: false }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.state.drop_task()
            && let Some(engine) = self.engine.upgrade()
        {
            engine.leave_home();
            if !self.has_panicked {
                drop(engine.home());
            }
        }
    }
}

/// The timer task.
async fn watch(timers: Arc<Timers>, mut keeper: Keeper) {
    let serving = async {
        serve_timers(&timers, &keeper.engine).await;
        false
    };
    keeper.has_panicked = without_panic(serving, || true).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_task_is_noticed_once() {
        let (taken, dropped) = (TakenOrDropped::default(), TakenOrDropped::default());
        assert!(taken.take() && taken.drop_task(), "the home has ended");
        assert!(!dropped.drop_task() && !dropped.take(), "it was no home yet, and is none");
    }
}
