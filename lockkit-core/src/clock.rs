//! Time, as leases need it: never set back, and counting while the machine sleeps.

use std::{
    fmt, ops,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A point in time on a [`Clock`], in nanoseconds since that clock's origin.
///
/// Moments of different clocks can't be compared; a store and the [`Locker`](crate::Locker) around it share one
/// (see [`StoreInfo::clock`](crate::StoreInfo::clock)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// The moment that lies `nanos` nanoseconds after the clock's origin.
    #[must_use]
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the clock's origin.
    #[must_use]
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// How much time lies between `earlier` and this moment; zero if `earlier` is in fact later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl ops::Add<Duration> for Moment {
    type Output = Self;

    fn add(self, rhs: Duration) -> Self {
        Self(self.0.saturating_add(nanos(rhs)))
    }
}

impl ops::Sub<Duration> for Moment {
    type Output = Self;

    fn sub(self, rhs: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(rhs)))
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// A monotonic clock that goes on while the machine is suspended.
///
/// Every deadline of lockkit is taken from one of these. [`SystemClock`] is the right one outside tests.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The present moment. Never earlier than any moment returned before.
    fn now(&self) -> Moment;
}

impl<C: Clock + ?Sized> Clock for Arc<C> {
    fn now(&self) -> Moment {
        (**self).now()
    }
}

/// The machine's own clock: `CLOCK_BOOTTIME` on Linux.
///
/// `std::time::Instant` is `CLOCK_MONOTONIC` there and stands still during suspend, so that a laptop or a virtual
/// machine would wake up believing in leases that lapsed hours ago
/// ([rust-lang/rust#87906](https://github.com/rust-lang/rust/issues/87906)). On other systems it is `Instant`, with
/// that weakness.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[cfg(target_os = "linux")]
    fn now(&self) -> Moment {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
        let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
        Moment(seconds * 1_000_000_000 + nanos)
    }

    #[cfg(not(target_os = "linux"))]
    fn now(&self) -> Moment {
        static ORIGIN: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
        Moment(nanos(ORIGIN.get_or_init(std::time::Instant::now).elapsed()))
    }
}

/// A clock that a test moves by hand on top of the system's, to stand for a suspended or frozen machine.
///
/// ```
/// use std::time::Duration;
/// use lockkit_core::{Clock, ShiftedClock};
///
/// let clock = ShiftedClock::default();
/// let before = clock.now();
/// clock.advance(Duration::from_secs(3600)); // the lid was closed for an hour
/// assert!(clock.now().since(before) >= Duration::from_secs(3600));
/// ```
#[derive(Debug, Default)]
pub struct ShiftedClock(AtomicU64);

impl ShiftedClock {
    /// Moves the clock forward by `by`.
    pub fn advance(&self, by: Duration) {
        self.0.update(Ordering::SeqCst, Ordering::SeqCst, |shift| shift.saturating_add(nanos(by)));
    }
}

impl Clock for ShiftedClock {
    fn now(&self) -> Moment {
        SystemClock.now() + Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }
}

/// The wall clock, in microseconds since 1970.
pub(crate) fn wall_clock() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_never_wraps() {
        let start = Moment::from_nanos(5);
        assert_eq!(start - Duration::from_secs(1), Moment::from_nanos(0));
        assert_eq!(start.since(Moment::from_nanos(9)), Duration::ZERO);
        assert_eq!((start + Duration::MAX).as_nanos(), u64::MAX);
        let clock = ShiftedClock::default();
        for by in [Duration::MAX, Duration::from_secs(1)] {
            clock.advance(by);
            assert_eq!(clock.now().as_nanos(), u64::MAX);
        }
    }

    #[test]
    fn the_system_clock_counts_on() {
        let first = SystemClock.now();
        assert!(SystemClock.now() >= first);
        assert!(first.as_nanos() > 0);
    }
}
