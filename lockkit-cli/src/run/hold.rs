//! The lease that CMD runs under: our own, or borrowed from an enclosing run.

use std::{convert::Infallible, future::pending, io, os::fd::OwnedFd, time::Duration};

use lockkit::{Clock, Fence, Guard, Liveness, LossReason, Moment, Outcome, Status, SystemClock};

use super::{borrow::Borrowed, nest::Entry, notify::RenewalNotify};

/// A lease with a deadline.
#[derive(Debug)]
pub(super) struct HeldLease {
    /// The ttl that was asked for, or what the store gives of it.
    pub(super) ttl: Duration,
    /// How long the lease lasts when it has just been renewed. Stores that end leases by session don't ask for a ttl.
    pub(super) lasts: Duration,
    /// The number of the grant.
    pub(super) fence: Fence,
    /// The lease itself.
    pub(super) lease: Lease,
}

/// Whose lease it is.
#[derive(Debug)]
pub(super) enum Lease {
    /// That of this run, and what is heard of its renewals.
    Own(Guard, RenewalNotify),
    /// That of an enclosing run.
    Borrowed(Borrowed),
}

impl HeldLease {
    pub(super) fn own(guard: Guard, ttl: Duration, notify: RenewalNotify) -> Self {
        let (lasts, fence) = (guard.remaining().min(ttl), guard.fence());
        Self { ttl, lasts, fence, lease: Lease::Own(guard, notify) }
    }

    pub(super) fn borrowed(borrowed: Borrowed) -> Self {
        let Entry { ttl, lasts, fence, .. } = borrowed.entry;
        Self { ttl, lasts, fence, lease: Lease::Borrowed(borrowed) }
    }

    /// How long the lease lasts now that it has been renewed. In a session that is no longer than the renewal proved of that, which is less
    /// than the grant did.
    pub(super) fn lasts_since_renewal(&self, liveness: &Liveness) -> Duration {
        match &self.lease {
            Lease::Own(guard, _) if liveness.session.is_some() => guard.remaining().min(self.lasts),
            Lease::Own(..) | Lease::Borrowed(_) => self.lasts,
        }
    }

    /// What is left of the lease if nothing more is heard; zero once it is lost.
    pub(super) fn remaining(&self) -> Duration {
        match &self.lease {
            Lease::Own(guard, _) => guard.remaining(),
            Lease::Borrowed(borrowed) => borrowed.remaining(),
        }
    }

    /// When the lease ends if nothing more is heard; no later than now once it is lost.
    pub(super) fn ends(&self) -> Moment {
        // The clock first: if this process stands still between the two, the moment is too early, and never too late.
        let now = SystemClock.now();
        now + self.remaining()
    }

    /// Returns when [`remaining`](Self::remaining) has become more, or nothing.
    pub(super) async fn changed(&self) {
        match &self.lease {
            Lease::Own(guard, notify) => tokio::select! {
                () = notify.notified() => {}
                _ = guard.lost() => {}
            },
            Lease::Borrowed(borrowed) => borrowed.notify().notified().await,
        }
    }

    /// Returns when the lease is lost.
    pub(super) async fn lost(&self) {
        while !self.remaining().is_zero() {
            tokio::select! {
                () = self.changed() => {}
                () = tokio::time::sleep(self.remaining()) => {}
            }
        }
    }

    /// Keeps the lease, as long as it is polled, as far as that is not done in the background.
    pub(super) async fn keep(&self) -> Infallible {
        match &self.lease {
            Lease::Own(..) => pending().await,
            Lease::Borrowed(borrowed) => borrowed.keep().await,
        }
    }

    /// What a lender sees the end of, if the lease is borrowed.
    pub(super) fn loan(&self) -> io::Result<Option<OwnedFd>> {
        match &self.lease {
            Lease::Own(..) => Ok(None),
            Lease::Borrowed(borrowed) => borrowed.loan().map(Some),
        }
    }

    /// What is wrong with the lease.
    pub(super) fn trouble(&self) -> String {
        match &self.lease {
            Lease::Own(guard, notify) => {
                let error = notify.error();
                match guard.status() {
                    // What came of the last renewal says more than that no time is left.
                    Status::Lost(LossReason::Expired | LossReason::Unreachable) if error.is_some() => {
                        error.unwrap_or_default()
                    }
                    Status::Lost(reason) => reason.to_string(),
                    Status::Suspect | Status::Held => error.unwrap_or_else(|| "it was not renewed in time".to_owned()),
                }
            }
            Lease::Borrowed(borrowed) => borrowed.trouble(),
        }
    }

    /// Ends the hold. `Ok(Some(_))` if it had been lost before.
    pub(super) async fn release(self) -> lockkit::Result<Option<String>> {
        match self.lease {
            Lease::Own(guard, _) => Ok(match guard.release().await? {
                Outcome::Released => None,
                Outcome::NotHeld(reason) => Some(reason.to_string()),
            }),
            Lease::Borrowed(borrowed) => Ok(borrowed.check().await),
        }
    }
}
