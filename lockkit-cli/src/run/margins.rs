//! When CMD is told to end, and when it is made to.

use std::time::Duration;

/// How long CMD has after TERM when the lease is lost already: somebody else may be at work.
pub(super) const AFTER_LOSS: Duration = Duration::from_millis(100);

/// What must be left of the lease for each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Margins {
    /// At this or less, CMD gets TERM.
    pub(super) term: Duration,
    /// At this or less, CMD gets KILL, from this process and from the watchdog.
    pub(super) kill: Duration,
}

impl Margins {
    /// The steps for a lease of this ttl: a third of it to end in good order, up to 5 s, and a tenth, between 50 and
    /// 500 ms, to find and bury what was killed, on a machine that has other things to do. Renewals begin when two thirds
    /// are left.
    pub(super) fn of(ttl: Duration) -> Self {
        let term = (ttl / 3).min(Duration::from_secs(5));
        let kill = (ttl / 10).clamp(Duration::from_millis(50), Duration::from_millis(500)).min(term / 2);
        Self { term, kill }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_comes_before_the_next_whatever_the_ttl() {
        for millis in [100, 101, 150, 1_000, 3_000, 30_000, 300_000] {
            let ttl = Duration::from_millis(millis);
            let margins = Margins::of(ttl);
            assert!(margins.term < ttl / 2 && margins.kill < margins.term, "{margins:?}");
            assert!(margins.kill >= Duration::from_millis(16), "{margins:?}");
        }
        assert_eq!(Margins::of(Duration::from_secs(30)).term, Duration::from_secs(5));
        assert_eq!(Margins::of(Duration::from_secs(30)).kill, Duration::from_millis(500));
    }
}
