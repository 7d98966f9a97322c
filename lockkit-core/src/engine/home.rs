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
        let keeper = Keeper { engine: Arc::downgrade(self), is_decided: Arc::default(), has_panicked: false };
        let is_decided = Arc::clone(&keeper.is_decided);
        runtime.spawn(watch(Arc::clone(&self.timers), keeper));
        // A runtime that has ended has dropped the task by now. One that ends from here on has the keeper notice.
        !is_decided.swap(true, Ordering::SeqCst)
    }

    /// The home has ended: the next that needs one looks for another.
    pub(super) fn leave_home(&self) {
        *unpoisoned(&self.home.current) = Current { runtime: None, is_kept: false };
    }
}

/// Is part of the timer task, and so notices when that is dropped with its runtime.
struct Keeper {
    engine: Weak<Engine>,
    /// Whether it is decided what came first: that the runtime of the task was taken for the home, or that the task was dropped, by
    /// another thread perhaps. Each of the two sets it in one step, and the second finds it set.
    is_decided: Arc<AtomicBool>,
    /// The task would panic again if it was started at once, and so without end: on a runtime without timers, say.
    has_panicked: bool,
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if self.is_decided.swap(true, Ordering::SeqCst)
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
