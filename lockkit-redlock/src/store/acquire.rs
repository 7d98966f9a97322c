//! Acquiring: rounds of requests to all nodes, and between them a wait at one.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockkit_core::{AcquireRequest, Attempt, Contention, Error, ErrorKind, Hold, Renewal, Renewed, Result};

use crate::{
    client::{
        claims::{Begun, Grant},
        quorum::Quorum,
    },
    store::{
        attempt::{Ended, Rounds},
        renew, wait,
    },
    wire::fence,
};

/// Of a claim that is over, or is being asked for by another call.
const BURNT: &str = "a release of this claim may be under way, or an acquisition: ask with a new token (rule R2)";

/// How a wait at the rendezvous ended.
enum Waited {
    Granted(Hold),
    /// When to ask again.
    Refused(Duration),
}

/// Asks all nodes; and waits at one, if the lock is held.
pub(crate) async fn acquire(quorum: &Arc<Quorum>, request: &AcquireRequest) -> Result<Attempt> {
    quorum.info.admit(request)?;
    let begun = quorum.info.clock.now();
    let mut rounds = match quorum.claims.begin(request, begun) {
        Begun::Attempt(entry) => Rounds::new(quorum, entry),
        Begun::Held => return quorum.repeat(request).await,
        Begun::Burnt => return Err(Error::new(ErrorKind::InvalidInput, BURNT)),
    };
    let waits = !request.wait.is_zero();
    let refusal = match rounds.round(request, fence::proposal(request.fence, wall_clock()), waits).await? {
        Ended::Granted(hold) => return Ok(Attempt::Granted(hold)),
        Ended::Refused(refusal) => refusal,
    };
    let left = request.wait.saturating_sub(quorum.info.clock.now().since(begun));
    let retry_after = if left.is_zero() {
        refusal.contention.retry_after
    } else {
        match quorum.wait(&mut rounds, request, &refusal.held_at, left).await? {
            Waited::Granted(hold) => return Ok(Attempt::Granted(hold)),
            Waited::Refused(retry_after) => Some(retry_after),
        }
    };
    rounds.withdraw();
    Ok(Attempt::Contended(Contention { retry_after, holder: refusal.contention.holder, burnt: true }))
}

impl Quorum {
    /// Waits at the rendezvous, and asks all nodes when the lock was granted there.
    async fn wait(
        self: &Arc<Self>,
        rounds: &mut Rounds<'_>,
        request: &AcquireRequest,
        held_at: &[usize],
        left: Duration,
    ) -> Result<Waited> {
        let Some(rendezvous) = self.rendezvous(&request.claim.key, held_at) else {
            return Ok(Waited::Refused(self.retry_delay().max(Duration::from_millis(10))));
        };
        let there = fence::proposal(request.fence, wall_clock());
        let Some(opened) = wait::wait_at(rounds, self, rendezvous, request, there, left).await else {
            return Ok(Waited::Refused(Duration::ZERO));
        };
        if rounds.gives_way() {
            return Ok(Waited::Refused(self.retry_delay()));
        }
        // The fence granted there is above all that went before, and most likely what the others would grant next.
        Ok(match rounds.round(request, fence::exactly(opened, request.fence.span), true).await? {
            Ended::Granted(hold) => Waited::Granted(hold),
            Ended::Refused(_) => Waited::Refused(self.retry_delay()),
        })
    }

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

/// Only makes it likely that all nodes grant the same number, see [`fence`].
fn wall_clock() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
