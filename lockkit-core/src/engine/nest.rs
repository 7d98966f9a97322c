//! Whether a lease is still held, for another hold of the same owner.

use std::{pin::pin, sync::Arc, time::Duration};

use tokio::time::sleep;

use super::{Engine, Lease, Limit, backoff::Backoff, closed};
use crate::{LossReason, Result};

impl Engine {
    /// Renews a lease, with the patience and within the limit of an acquisition. `Ok(Some(_))` if it turned out to be lost.
    pub(crate) async fn confirm(self: &Arc<Self>, lease: &Arc<Lease>, limit: Limit) -> Result<Option<LossReason>> {
        let mut closing = pin!(self.closing.notified());
        closing.as_mut().enable();
        self.check_open()?;
        let confirmed = async {
            let (start, mut backoff) =
                (self.now(), Backoff::new(Duration::from_millis(10), Duration::from_millis(500)));
            loop {
                let error = match self.heard(self.within(limit, &lease.claim.key, self.renew_now(lease)).await) {
                    Err(error) if error.is_retryable() => error,
                    answer => return answer,
                };
                let now = self.now();
                if !lease.state().is_live() {
                    // Lost, or given back with the last of the other holds: a look at it says which.
                    return Ok(None);
                }
                if limit.is_over(now) || now.since(start) >= self.settings.patience {
                    return Err(error);
                }
                let pause = backoff.pause();
                sleep(limit.left(now).map_or(pause, |left| left.min(pause))).await;
            }
        };
        tokio::select! {
            biased;
            answer = confirmed => answer,
            () = closing => Err(closed()),
        }
    }
}
