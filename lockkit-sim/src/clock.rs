//! A clock that follows tokio's, and so stands still and leaps with it.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use lockkit_core::{Clock, Moment};
use tokio::time::Instant;

/// Where it starts. Not at zero, so that a moment a little earlier than the start can be told from it.
const START: Duration = Duration::from_secs(3600);

/// Tokio's time, under which a test may pause and advance it, plus what the machine slept.
#[derive(Debug)]
pub(crate) struct VirtualClock {
    origin: Instant,
    slept: AtomicU64,
}

impl VirtualClock {
    pub(crate) fn new() -> Self {
        Self { origin: Instant::now(), slept: AtomicU64::new(0) }
    }

    /// Goes on by `by`, while tokio's timers do not.
    pub(crate) fn sleep(&self, by: Duration) {
        self.slept.update(Ordering::SeqCst, Ordering::SeqCst, |slept| slept.saturating_add(nanos(by)));
    }

    /// The time since the start.
    pub(crate) fn elapsed(&self) -> Duration {
        self.now().since(Moment::from_nanos(0) + START)
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Moment {
        let awake = Instant::now().saturating_duration_since(self.origin);
        Moment::from_nanos(0) + START + awake + Duration::from_nanos(self.slept.load(Ordering::SeqCst))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
