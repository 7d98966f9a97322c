//! What a quorum can be told.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Clock, StoreInfo, SystemClock, store::operation_bound};

/// How a quorum of nodes works together.
///
/// All clients of the same nodes must agree on [`max_ttl`](Self::max_ttl()).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RedlockConfig {
    /// See [`node_timeout`](Self::node_timeout()); `None` for one that follows the ttl.
    pub node_timeout: Option<Duration>,
    /// See [`max_ttl`](Self::max_ttl()).
    pub max_ttl: Duration,
    /// See [`clock`](Self::clock()).
    pub clock: Arc<dyn Clock>,
}

impl RedlockConfig {
    /// The longest ttl by default.
    pub const MAX_TTL: Duration = StoreInfo::LONGEST_TTL;
    /// The shortest ttl by default, for the shortest node timeout.
    pub const SHORTEST_TTL: Duration = Self::SHORTEST_TIMEOUT.saturating_mul(4);
    /// The node timeout is never shorter by default.
    pub const SHORTEST_TIMEOUT: Duration = Duration::from_millis(50);
    /// The node timeout is never longer by default.
    pub const LONGEST_TIMEOUT: Duration = Duration::from_millis(500);
    /// Renewals, releases and inspections wait for a majority no longer than this.
    pub(crate) const PATIENCE: Duration = Duration::from_secs(2);

    /// All at its default.
    #[must_use]
    pub fn new() -> Self {
        Self { node_timeout: None, max_ttl: Self::MAX_TTL, clock: Arc::new(SystemClock) }
    }

    /// How long a node may take to answer before the verdict is made without it.
    ///
    /// By default a 200th of the ttl, at least 50 ms and at most 500 ms: small against the ttl, as the Redlock
    /// description asks ("Distributed Locks with Redis", step 2), and long enough for a network within a region. For
    /// nodes further away make it several round trips.
    #[must_use]
    pub fn node_timeout(mut self, timeout: Duration) -> Self {
        self.node_timeout = Some(timeout);
        self
    }

    /// The longest ttl of any client of these nodes; 5 minutes by default.
    ///
    /// For so long a node that restarted without its data does not vote, see [`RestartPolicy`](crate::RestartPolicy). A shorter one
    /// makes restarts cheaper.
    #[must_use]
    pub fn max_ttl(mut self, ttl: Duration) -> Self {
        self.max_ttl = ttl;
        self
    }

    /// The clock that leases are measured by, for tests.
    #[must_use]
    pub fn clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.clock = clock;
        self
    }

    /// The node timeout for a lease of `ttl`.
    pub(crate) fn timeout_for(&self, ttl: Duration) -> Duration {
        let by_ttl = || (ttl / 200).clamp(Self::SHORTEST_TIMEOUT, Self::LONGEST_TIMEOUT);
        self.node_timeout.unwrap_or_else(by_ttl)
    }

    /// The limit of a renewal of a lease of `ttl`. The core takes it for doubtful after a sixth of the ttl: what each node had to say is
    /// to be known before that.
    pub(crate) fn renewal_patience_for(&self, ttl: Duration) -> Duration {
        self.patience_for(ttl).min(ttl / 7).max(self.timeout_for(ttl))
    }

    /// The limit of a release of a lease of `ttl`, and at most that of a renewal.
    ///
    /// Longer than that of an acquisition, for nothing is won by giving up: the belief in the lease has its own deadline,
    /// a client that releases believes no more, and a majority that answers ends the wait anyway.
    pub(crate) fn patience_for(&self, ttl: Duration) -> Duration {
        operation_bound(Self::PATIENCE, ttl).max(self.timeout_for(ttl))
    }

    /// The shortest ttl that leaves something of a lease when both rounds of an acquisition take as long as they may:
    /// two timeouts, drift, and a quarter of the ttl as the least useful validity.
    pub(crate) fn min_ttl(&self) -> Duration {
        self.node_timeout.map_or(Self::SHORTEST_TTL, |timeout| timeout.saturating_mul(4))
    }
}

impl Default for RedlockConfig {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_node_timeout_follows_the_ttl_within_bounds() {
        let config = RedlockConfig::new();
        for (ttl, timeout) in [(1, 50), (10, 50), (20, 100), (30, 150), (300, 500)] {
            assert_eq!(config.timeout_for(Duration::from_secs(ttl)), Duration::from_millis(timeout));
        }
        assert_eq!(config.min_ttl(), Duration::from_millis(200));
    }

    #[test]
    fn the_shortest_ttl_survives_two_slow_rounds() {
        let config = RedlockConfig::new();
        let ttl = config.min_ttl();
        let left = ttl - 2 * config.timeout_for(ttl) - lockkit_core::drift(ttl);
        assert!(left >= ttl / 4);
    }
}
