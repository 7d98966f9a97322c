//! How long to wait before asking again: decorrelated jitter.
//!
//! Each pause is drawn between the base and three times the last one, up to a cap ("Exponential Backoff And Jitter",
//! AWS Architecture Blog, 2015): contenders that collided once are unlikely to collide again.

use std::time::Duration;

/// The pauses of one waiter.
#[derive(Clone, Debug)]
pub(crate) struct Backoff {
    base: Duration,
    cap: Duration,
    last: Duration,
    random: Random,
}

impl Backoff {
    pub(crate) fn new(base: Duration, cap: Duration) -> Self {
        Self { base, cap, last: base, random: Random::seeded() }
    }

    /// The next pause.
    pub(crate) fn pause(&mut self) -> Duration {
        let span = (self.last * 3).saturating_sub(self.base);
        self.last = (self.base + span.mul_f64(self.random.fraction())).min(self.cap);
        self.last
    }
}

/// Random numbers for spreading load; nothing depends on their quality.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn seeded() -> Self {
        use std::hash::{BuildHasher, RandomState};
        Self(RandomState::new().hash_one(std::process::id()) | 1)
    }

    /// The next number (xorshift64*, Vigna 2016).
    pub(crate) fn next(&mut self) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }

    fn fraction(&mut self) -> f64 {
        f64::from(self.next()) / f64::from(u32::MAX)
    }
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
