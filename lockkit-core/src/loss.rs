//! The end of a hold, for those that have not got the guard.

use std::{
    fmt,
    pin::pin,
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::timeout;

use crate::{
    LossReason,
    engine::{Engine, Lease, LeaseStatus},
};

/// How late a timer may be after the machine has slept.
const AWAKE: Duration = Duration::from_secs(1);

/// Tells how a hold ends. It can be cloned, goes anywhere, and outlives the guard that it is of
/// ([`Guard::loss_signal`](crate::Guard::loss_signal)).
///
/// Work that a holder spawned can stop when the lock is lost, and does not keep the lock held meanwhile.
///
/// ```
/// # use lockkit_core::{Locker, MemoryStore};
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockkit_core::Result<()> {
/// # let locker = Locker::new(MemoryStore::new());
/// let guard = locker.lock("nightly-report").acquire().await?;
/// let signal = guard.loss_signal();
/// let worker = tokio::spawn(async move {
///     tokio::select! {
///         reason = signal.lost() => reason,        // stop: the lock was lost, or released
///         () = std::future::pending() => None,     // the work
///     }
/// });
/// drop(guard);
/// assert_eq!(worker.await.expect("no panic"), None);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct LossSignal {
    // Weak, so that a forgotten signal keeps nothing running.
    engine: Weak<Engine>,
    lease: Arc<Lease>,
}

impl LossSignal {
    pub(crate) fn new(engine: &Arc<Engine>, lease: &Arc<Lease>) -> Self {
        Self { engine: Arc::downgrade(engine), lease: Arc::clone(lease) }
    }

    /// Returns when the hold has ended: why it was lost, at the latest at its deadline; `None` if it was released, or its guard
    /// dropped. Stays pending as long as it is held. Of nested holds the last one counts.
    ///
    /// # Cancellation
    /// Loses nothing: it can be called again.
    pub async fn lost(&self) -> Option<LossReason> {
        loop {
            let mut end = pin!(self.lease.end());
            end.as_mut().enable();
            match self.look() {
                Ok(left) => {
                    // By then it may have been renewed. A timer stands still while the machine sleeps; the lease goes on.
                    drop(timeout(left.min(AWAKE), end).await);
                }
                Err(reason) => return reason,
            }
        }
    }

    /// Whether the lease is believed to be held. The deadline is checked, as by [`Guard::status`](crate::Guard::status).
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.look().is_ok()
    }

    /// What is left of the lease, or how it ended.
    fn look(&self) -> Result<Duration, Option<LossReason>> {
        let Some(engine) = self.engine.upgrade() else {
            // The guard is gone, too.
            return Err(match self.lease.state().status() {
                LeaseStatus::Lost(reason) => Some(reason),
                LeaseStatus::Held | LeaseStatus::Suspect | LeaseStatus::Released => None,
            });
        };
        match engine.look(&self.lease) {
            LeaseStatus::Held | LeaseStatus::Suspect => Ok(self.lease.state().deadline().since(engine.now())),
            LeaseStatus::Lost(reason) => Err(Some(reason)),
            LeaseStatus::Released => Err(None),
        }
    }
}

impl fmt::Debug for LossSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LossSignal").field("key", &self.lease.claim.key).field("held", &self.is_held()).finish()
    }
}
