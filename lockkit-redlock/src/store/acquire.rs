//! Acquiring: rounds of requests to all nodes, and between them a wait at one.

use std::{sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Contention, Error, Renewal, Renewed, Result};

use crate::{
    client::{
        claims::{Begun, Grant},
        quorum::Quorum,
    },
    store::{
        attempt::{Ended, OpenAttempt, proposal},
        renew,
        wait::Waited,
    },
};

/// Of a claim that is over, or is being asked for by another call.
const BURNT: &str = "a release of this claim may be under way, or an acquisition: ask with a new token (rule R2)";

/// Asks all nodes; and waits at one, if the lock is held.
pub(crate) async fn acquire(quorum: &Arc<Quorum>, request: &AcquireRequest) -> Result<Attempt> {
    quorum.info.admit(request)?;
    let begun = quorum.info.clock.now();
    let mut attempt = match quorum.claims.begin(request, begun) {
        Begun::Attempt(entry) => OpenAttempt::new(quorum, entry),
        Begun::Held => return quorum.repeat(request).await,
        Begun::Burnt => return Err(Error::invalid(BURNT)),
    };
    let waits = !request.wait.is_zero();
    let refusal = match attempt.round(request, proposal(request), waits).await? {
        Ended::Granted(hold) => return Ok(Attempt::Granted(hold)),
        Ended::Refused(refusal) => refusal,
    };
    let left = request.wait.saturating_sub(quorum.info.clock.now().since(begun));
    let retry_after = if left.is_zero() {
        refusal.contention.retry_after
    } else {
        match quorum.wait(&mut attempt, request, &refusal.held_at, left).await? {
            Waited::Granted(hold) => return Ok(Attempt::Granted(hold)),
            Waited::Refused(retry_after) => Some(retry_after),
        }
    };
    attempt.withdraw().await;
    Ok(Attempt::Contended(Contention { retry_after, holder: refusal.contention.holder, burnt: true }))
}

impl Quorum {
    /// The same claim again (rule R1): the grant goes on with its fence if a majority still has it.
    async fn repeat(self: &Arc<Self>, request: &AcquireRequest) -> Result<Attempt> {
        let grant = self.claims.get(&request.claim.token).and_then(|entry| entry.grant());
        let depth = grant.map_or(1, |Grant { depth, .. }| depth);
        let renewal =
            Renewal { claim: request.claim.clone(), ttl: request.ttl, depth, fence_floor: None, holder: None };
        match renew::renew(self, &[renewal]).await.pop() {
            Some(Ok(Renewed::Held(hold))) => Ok(Attempt::Granted(hold)),
            Some(Err(error)) => Err(error),
            // It is lost, and being released where it still is.
            Some(Ok(Renewed::Lost(_))) | None => {
                Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), holder: None, burnt: true }))
            }
        }
    }
}
