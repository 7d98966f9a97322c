//! The lease that CMD runs under: our own, or borrowed from an enclosing run.

use std::{convert::Infallible, future::pending, io, os::fd::OwnedFd, time::Duration};

use lockkit::{Clock, Fence, Guard, LossReason, Moment, Outcome, Status, SystemClock, Token};

use super::{borrow::Borrowed, notify::RenewalNotify};

/// A lease with a deadline.
#[derive(Debug)]
pub(super) enum HeldLease {
    Own(Own),
    Borrowed(Borrowed),
}

/// A lease of this run.
#[derive(Debug)]
pub(super) struct Own {
    guard: Guard,
    ttl: Duration,
    lasts: Duration,
    notify: RenewalNotify,
}

impl Own {
    pub(super) fn token(&self) -> Token {
        self.guard.token()
    }

    /// Keeps the lock from others for so long.
    pub(super) fn keep_for(&self, window: Duration) -> lockkit::Result<()> {
        self.guard.keep_for(window)
    }
}

impl HeldLease {
    pub(super) fn own(guard: Guard, ttl: Duration, notify: RenewalNotify) -> Self {
        let lasts = guard.remaining().min(ttl);
        Self::Own(Own { guard, ttl, lasts, notify })
    }

    /// The ttl that was asked for, or what the store gives of it.
    pub(super) fn ttl(&self) -> Duration {
        match self {
            Self::Own(own) => own.ttl,
            Self::Borrowed(borrowed) => borrowed.ttl(),
        }
    }

    /// How long the lease lasts when it has just been renewed. Stores that end leases by session don't ask for a ttl.
    pub(super) fn lasts(&self) -> Duration {
        match self {
            Self::Own(own) => own.lasts,
            Self::Borrowed(borrowed) => borrowed.lasts(),
        }
    }

    pub(super) fn fence(&self) -> Fence {
        match self {
            Self::Own(own) => own.guard.fence(),
            Self::Borrowed(borrowed) => borrowed.fence(),
        }
    }

    /// What is left of the lease if nothing more is heard; zero once it is lost.
    pub(super) fn remaining(&self) -> Duration {
        match self {
            Self::Own(own) => own.guard.remaining(),
            Self::Borrowed(borrowed) => borrowed.remaining(),
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
        match self {
            Self::Own(own) => tokio::select! {
                () = own.notify.notified() => {}
                _ = own.guard.lost() => {}
            },
            Self::Borrowed(borrowed) => borrowed.notify().notified().await,
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
        match self {
            Self::Own(_) => pending().await,
            Self::Borrowed(borrowed) => borrowed.keep().await,
        }
    }

    /// What a lender sees the end of, if the lease is borrowed.
    pub(super) fn loan(&self) -> io::Result<Option<OwnedFd>> {
        match self {
            Self::Own(_) => Ok(None),
            Self::Borrowed(borrowed) => borrowed.loan().map(Some),
        }
    }

    /// What is wrong with the lease.
    pub(super) fn trouble(&self) -> String {
        match self {
            Self::Own(own) => {
                let error = own.notify.error();
                match own.guard.status() {
                    // What came of the last renewal says more than that no time is left.
                    Status::Lost(LossReason::Expired | LossReason::Unreachable) if error.is_some() => {
                        error.unwrap_or_default()
                    }
                    Status::Lost(reason) => reason.to_string(),
                    Status::Suspect | Status::Held => error.unwrap_or_else(|| "it was not renewed in time".to_owned()),
                }
            }
            Self::Borrowed(borrowed) => borrowed.trouble(),
        }
    }

    /// Ends the hold. `Ok(Some(_))` if it had been lost before.
    pub(super) async fn release(self) -> lockkit::Result<Option<String>> {
        match self {
            Self::Own(own) => Ok(match own.guard.release().await? {
                Outcome::Released => None,
                Outcome::NotHeld(reason) => Some(reason.to_string()),
            }),
            Self::Borrowed(borrowed) => Ok(borrowed.check().await),
        }
    }
}
