//! Locks that are kept from others for a while after their holder is done: [`Lock::keep_for`](crate::Lock::keep_for).
//!
//! The lease is not renewed to last for longer, for a renewal that comes late would cut it short again: a lease that nobody holds takes
//! its place in one step. Whatever is still on its way for the former one finds the lock another's.

use std::time::Duration;

use super::{Engine, lease::LeaseState};
use crate::{AcquireRequest, Attempt, Claim, Effect, Error, ErrorKind, Moment, Release, Result, Token};

/// No lock is kept for less: a request with a shorter ttl has hardly time to arrive.
const SHORTEST: Duration = Duration::from_secs(1);

/// Until when a lock is to be kept from others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kept {
    /// That of the lease that keeps it. It is asked for again and again until the store answers.
    token: Token,
    until: Moment,
}

impl Kept {
    /// What is to become of a lease; `None` if it is to be released.
    pub(super) fn of(state: &LeaseState) -> Option<Self> {
        let until = state.kept_until()?;
        // Random numbers fail on no system that has given the first one.
        Some(Self { token: Token::random().ok()?, until })
    }
}

impl Engine {
    /// Ends a lease at the store: releases it, or has the lock kept from others.
    pub(super) async fn end_at_store(&self, claim: &Claim, kept: Option<Kept>) -> Result<Release> {
        let left = |kept: Kept| (kept, kept.until.since(self.now()));
        self.heard(match kept.map(left).filter(|(_, left)| !left.is_zero()) {
            Some((kept, left)) => self.keep_from_others(claim, kept.token, left).await,
            None => self.store.release(claim).await,
        })
    }

    async fn keep_from_others(&self, claim: &Claim, token: Token, left: Duration) -> Result<Release> {
        let least =
            self.store.info().capability.liveness.ttl.as_ref().map_or(SHORTEST, |ttl| SHORTEST.max(*ttl.start()));
        let holder = self.settings.holder.done();
        let mut request = AcquireRequest::new(Claim { token, ..claim.clone() }, left.max(least), holder);
        (request.from, request.keeps) = (Some(claim.token), true);
        let refused = match self.store.acquire(&request).await {
            Ok(Attempt::Granted(_)) => return Ok(Release::Released { waiters: Some(0) }),
            Ok(Attempt::Contended(_)) => {
                Error::new(ErrorKind::Unavailable, "could not keep the lock: the store grants no locks at the moment")
            }
            // Asked for again, by the same token: it may have been granted.
            Err(error) if error.is_retryable() || error.effect() == Effect::Unknown => return Err(error),
            Err(error) => error,
        };
        // The lock is not kept. The lease may still be there, for a store that grants nothing for now refuses as well.
        match self.store.release(claim).await? {
            Release::Released { .. } => Err(refused.unknown_effect()),
            not_held @ Release::NotHeld(_) => Ok(not_held),
        }
    }
}
