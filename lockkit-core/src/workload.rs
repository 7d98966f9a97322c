//! What servers have done, for those who measure what locks cost them.

use std::{ops::Add, time::Duration};

/// What the servers of a store have done since they started, and what they hold: for all their clients together, and as far as they
/// tell. The difference of two looks is what happened in between, with what the looks themselves took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workload {
    /// Requests that were carried out, as the servers count them; `None` if one of them does not tell.
    pub requests: Option<u64>,
    /// Processor time that was used; `None` if one of them does not tell.
    pub processor: Option<Duration>,
    /// Memory in use, in bytes: of what the servers keep, not of their programs, where they tell these apart; `None` if one of them
    /// does not tell.
    pub memory: Option<u64>,
}

impl Add for Workload {
    type Output = Self;

    /// Both together; what one of them does not tell is not known of both.
    fn add(self, other: Self) -> Self {
        fn both<T>(one: Option<T>, other: Option<T>, sum: impl Fn(T, T) -> T) -> Option<T> {
            Some(sum(one?, other?))
        }
        Self {
            requests: both(self.requests, other.requests, u64::saturating_add),
            processor: both(self.processor, other.processor, Duration::saturating_add),
            memory: both(self.memory, other.memory, u64::saturating_add),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_does_not_tell_is_not_known_of_both() {
        let one = Workload { requests: Some(1), processor: None, memory: Some(3) };
        let other = Workload { requests: Some(2), processor: Some(Duration::from_secs(1)), memory: Some(4) };
        assert_eq!(one + other, Workload { requests: Some(3), processor: None, memory: Some(7) });
    }
}
