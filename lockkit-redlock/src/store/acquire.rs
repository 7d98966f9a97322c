//! Acquiring: a round of requests to all nodes, and before it a wait at one if the lock was held.

use std::{sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Contention, Error, Renewal, Renewed, Result};

use crate::{
    client::{
        backlog::Owed,
        claims::{Begun, Grant},
        quorum::Quorum,
    },
    store::{
        RedlockStore,
        attempt::{Ended, OpenAttempt, Refusal, proposal},
        renew,
    },
    wire::fence,
};

/// Of a claim that is over, or is being asked for by another call.
const BURNT: &str = "a release of this claim may be under way, or an acquisition: ask with a new token (rule R2)";

/// Asks all nodes: after a wait at one of them, if the last refusal left a note where.
pub(crate) async fn acquire(store: &RedlockStore, request: &AcquireRequest) -> Result<Attempt> {
    store.info.admit(request)?;
    let quorum = &store.quorum;
    let begun = quorum.config.clock.now();
    let mut attempt = match quorum.claims.begin(request, begun) {
        Begun::Attempt(entry) => OpenAttempt::new(quorum, entry),
        Begun::Held => return quorum.repeat(request).await,
        Begun::Burnt => return Err(Error::invalid(BURNT)),
    };
    let (key, waits) = (&request.claim.key, !request.wait.is_zero());
    let meeting = if waits { quorum.take_meeting(key) } else { None };
    let opened = match meeting {
        Some(rendezvous) => attempt.wait_at(rendezvous, request).await,
        None => None,
    };
    let waited = quorum.config.clock.now().since(begun);
    // The fence granted there is above all that went before, and most likely what the others would grant next.
    let fence = opened.map_or_else(|| proposal(request), |opened| fence::exactly(opened, request.fence.span));
    let Refusal { contention, held_at } = match attempt.round(request, fence, waits).await? {
        Ended::Granted(hold) => return Ok(Attempt::Granted(hold)),
        Ended::Refused(refusal) => refusal,
    };
    attempt.withdraw().await;
    let is_time_up = request.wait <= quorum.config.clock.now().since(begun);
    let retry_after = match meeting {
        Some(_) if opened.is_some() => Some(quorum.retry_delay()),
        Some(_) if is_time_up => Some(Duration::ZERO),
        None if is_time_up => contention.retry_after,
        Some(_) => Some(quorum.meet_after(waited, key, &held_at)),
        None => Some(quorum.meet_again(key, &held_at)),
    };
    Ok(Attempt::Contended(Contention { retry_after, holder: contention.holder, burnt: true }))
}

impl Quorum {
    /// The same claim again (rule R1): the grant goes on with its fence if a majority still has it.
    async fn repeat(self: &Arc<Self>, request: &AcquireRequest) -> Result<Attempt> {
        let grant = self.claims.get(&request.claim.token).and_then(|entry| entry.grant());
        let depth = grant.map_or(1, |Grant { depth, .. }| depth);
        let renewal = Renewal { depth, ..Renewal::new(request.claim.clone(), request.ttl) };
        match renew::renew_admitted(self, Arc::new([renewal])).await.pop() {
            Some(Ok(Renewed::Held(hold))) => Ok(Attempt::Granted(hold)),
            Some(Err(error)) => Err(error),
            Some(Ok(Renewed::Lost(_))) | None => {
                // The caller takes a refusal for the end of it, and releases nothing.
                if let Some(entry) = self.claims.end(&request.claim.token) {
                    (0..self.nodes.len()).for_each(|node| self.owe(node, Owed::at(&entry, node)));
                }
                Ok(Attempt::Contended(Contention { retry_after: Some(Duration::ZERO), holder: None, burnt: true }))
            }
        }
    }
}
