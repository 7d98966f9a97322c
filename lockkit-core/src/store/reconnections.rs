//! What a store counts so that the core knows when requests may have overtaken each other.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering},
};

/// How often a store has replaced a connection. What was sent over the former one may be carried out after what is sent over the next:
/// the core takes the answer that a lease is not held for final only if nothing was replaced since the lease was asked for.
///
/// ```
/// use lockkit_core::store::Reconnections;
///
/// let (one, late) = (Reconnections::default(), Reconnections::default());
/// let (opened, both) = (Reconnections::default(), Reconnections::of([one.clone(), late.clone()]));
/// late.follow(opened.clone());
/// one.add_one();
/// opened.add_one();
/// assert_eq!(both.count(), 2);
/// ```
///
/// Clones count together. A store that keeps its requests in order by other means counts nothing.
#[derive(Clone, Debug, Default)]
pub struct Reconnections {
    own: Arc<AtomicU64>,
    parts: Arc<OnceLock<Vec<Self>>>,
}

impl Reconnections {
    /// The sum of what several stores count.
    #[must_use]
    pub fn of(parts: impl IntoIterator<Item = Self>) -> Self {
        Self { parts: Arc::new(OnceLock::from(Vec::from_iter(parts))), ..Self::default() }
    }

    /// Also counts, from now on, what a store counts that was opened later; to be called before that store is used. Only the first call
    /// has an effect, and none has on a sum.
    pub fn follow(&self, store: Self) {
        self.parts.get_or_init(|| vec![store]);
    }

    /// Counts one. To be called in the same step as a connection goes out of use: not before the last request has begun to use it,
    /// and not after the first one has begun to use the next.
    pub fn add_one(&self) {
        self.own.fetch_add(1, Ordering::SeqCst);
    }

    /// How many there were.
    #[must_use]
    pub fn count(&self) -> u64 {
        let parts = self.parts.get().into_iter().flatten();
        parts.fold(self.own.load(Ordering::SeqCst), |sum, part| sum.wrapping_add(part.count()))
    }
}
