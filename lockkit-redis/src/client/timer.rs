//! Timers that are kept for the next operation.
//!
//! Every operation has a bound, and almost none reaches it. To set a timer anew each time, the runtime takes a lock
//! and, if no other is due before, wakes the thread that waits for events: a system call and a switch of threads, some
//! 5 % of the time of an operation. To put off a timer that is set already costs nothing of this. Timers that nobody
//! took again run out where they lie.

use std::{
    future::Future,
    pin::Pin,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    runtime::{Handle, Id},
    time::{Instant, Sleep},
};

/// How many timers are kept.
const MOST: usize = 1024;

/// The timers of one connection.
#[derive(Debug)]
pub(crate) struct Timers {
    /// The runtime that they belong to. If it ends, none of them may be touched.
    runtime: Id,
    kept: Mutex<Vec<Pin<Box<Sleep>>>>,
}

impl Timers {
    /// For operations on the present runtime, above all.
    pub(crate) fn new() -> Self {
        Self { runtime: Handle::current().id(), kept: Mutex::default() }
    }

    /// Waits for a future, or for the time to run out; `None` then. The future stays where it is: to move it would take
    /// room for it in every caller.
    ///
    /// # Cancellation
    /// As that of the future.
    pub(crate) async fn within<T>(
        &self,
        bound: Duration,
        future: Pin<&mut (impl Future<Output = T> + Send)>,
    ) -> Option<T> {
        if Handle::current().id() != self.runtime {
            return tokio::time::timeout(bound, future).await.ok();
        }
        let mut alarm = self.take(bound);
        tokio::select! {
            biased;
            output = future => Some(output),
            () = alarm.sleep() => None,
        }
    }

    fn take(&self, bound: Duration) -> Alarm<'_> {
        // A bound beyond the clock's range is as good as a year.
        let now = Instant::now();
        let end = now.checked_add(bound).unwrap_or_else(|| now + Duration::from_secs(365 * 24 * 3600));
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let sleep = match kept {
            Some(mut sleep) => {
                sleep.as_mut().reset(end);
                sleep
            }
            None => Box::pin(tokio::time::sleep_until(end)),
        };
        Alarm { timers: self, sleep: Some(sleep) }
    }
}

/// A timer that goes back when it is not needed any more.
struct Alarm<'a> {
    timers: &'a Timers,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Alarm<'_> {
    async fn sleep(&mut self) {
        if let Some(sleep) = &mut self.sleep {
            sleep.as_mut().await;
        }
    }
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        let mut kept = self.timers.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < MOST {
            kept.extend(self.sleep.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_timer_serves_again_and_again() {
        let timers = Timers::new();
        let second = Duration::from_secs(1);
        for _ in 0..3 {
            assert_eq!(timers.within(second, pin!(async { 7 })).await, Some(7));
            let start = Instant::now();
            assert_eq!(timers.within(second, pin!(std::future::pending::<()>())).await, None);
            assert_eq!(start.elapsed().as_secs(), 1);
            tokio::time::sleep(5 * second).await;
            assert_eq!(
                timers.within(second, pin!(tokio::time::sleep(second / 2))).await,
                Some(()),
                "shorter than before"
            );
            assert_eq!(timers.within(second / 4, pin!(tokio::time::sleep(second / 2))).await, None);
        }
        assert_eq!(timers.within(Duration::MAX, pin!(async {})).await, Some(()));
        assert_eq!(timers.kept.lock().expect("lock").len(), 1);
    }

    #[test]
    fn another_runtime_uses_its_own() {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_time().build().expect("runtime");
        let first = runtime();
        let timers = first.block_on(async {
            let timers = Timers::new();
            assert_eq!(
                timers.within(Duration::from_secs(1), pin!(tokio::time::sleep(Duration::from_millis(1)))).await,
                Some(())
            );
            timers
        });
        drop(first);
        let outcome = runtime().block_on(timers.within(Duration::from_millis(5), pin!(std::future::pending::<()>())));
        assert_eq!(outcome, None);
    }
}
