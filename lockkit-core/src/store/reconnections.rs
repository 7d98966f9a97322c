//! What a store counts so that the core knows when requests may have overtaken each other.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// How often a store has replaced a connection. What was sent over the former one may be carried out after what is sent over the next:
/// the core takes the answer that a lease is not held for final only if nothing was replaced since the lease was asked for.
///
/// Clones count together. A store that keeps its requests in order by other means counts nothing.
#[derive(Clone, Debug, Default)]
pub struct Reconnections {
    own: Arc<AtomicU64>,
    parts: Arc<[Self]>,
}

impl Reconnections {
    /// The sum of what several stores count.
    #[must_use]
    pub fn of(parts: impl IntoIterator<Item = Self>) -> Self {
        Self { parts: parts.into_iter().collect(), ..Self::default() }
    }

    /// Counts one. To be called in the same step as a connection goes out of use: not before the last request has begun to use it,
    /// and not after the first one has begun to use the next.
    pub fn add_one(&self) {
        self.own.fetch_add(1, Ordering::SeqCst);
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.parts.iter().fold(self.own.load(Ordering::SeqCst), |sum, part| sum.wrapping_add(part.count()))
    }
}
