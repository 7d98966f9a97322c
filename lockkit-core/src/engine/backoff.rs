//! How long to wait before asking again: decorrelated jitter.
//!
//! Each pause is drawn between the base and three times the last one, up to a cap ("Exponential Backoff And Jitter",
//! AWS Architecture Blog, 2015): contenders that collided once are unlikely to collide again.

use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};

/// The pauses of one waiter.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    base: Duration,
    cap: Duration,
    last: Duration,
}

impl Backoff {
    pub(crate) fn new(base: Duration, cap: Duration) -> Self {
        Self { base, cap, last: base }
    }

    /// The next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let span = (self.last * 3).saturating_sub(self.base);
        self.last = (self.base + span.mul_f64(f64::from(random()) / f64::from(u32::MAX))).min(self.cap);
        self.last
    }
}

/// A random number for spreading load; nothing depends on its quality. The standard library hashes with other keys each time.
pub(super) fn random() -> u32 {
    RandomState::new().hash_one(()) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_stay_between_base_and_cap_and_differ() {
        let (base, cap) = (Duration::from_millis(10), Duration::from_millis(500));
        let mut backoff = Backoff::new(base, cap);
        let pauses: Vec<_> = (0..200).map(|_| backoff.pause()).collect();
        assert!(pauses.iter().all(|p| (base..=cap).contains(p)));
        assert!(pauses.iter().collect::<std::collections::HashSet<_>>().len() > 50);
    }
}
