//! Ending a lease, or a claim's place in the queue.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Claim, Error, LossReason, Release, Result};
use zookeeper_client as zk;

use crate::{
    error::{self, Failure, Sent},
    link::Link,
    name,
    queue::{self, Place},
    session::{Claimed, Session, Stage},
};

/// Releases a claim, whoever made it. It is definite only when no node of the claim is left.
///
/// On the claim's own session it goes behind all that may have been sent for the claim, so a creation that was given
/// up on is found. In another session (the claim's own is over, or this is another process) the nodes are found by their
/// name.
pub(crate) async fn release(link: &Link, claim: &Claim, bound: Duration) -> Result<Release> {
    let session = link.session().await?;
    let claimed = session.claimed(&claim.token);
    let release = match &claimed {
        Some(Claimed { stage: Stage::Queued(node) | Stage::Held(node, _), .. }) => {
            let path = format!("{}/{}", session.names.lock(&claim.key), node.name);
            release_node(&session, claim, &claimed, &path, bound).await
        }
        Some(Claimed { stage: Stage::Asked | Stage::Gone, .. }) | None => release_all(&session, claim, bound).await,
    };
    let release = release.map_err(|failure| doubtful(&failure))?;
    session.claims().remove(&claim.token);
    if link.forget(&claim.token) {
        return Ok(Release::NotHeld(LossReason::SessionEnded));
    }
    Ok(release)
}

/// Deletes the node of a claim of this session.
async fn release_node(
    session: &Arc<Session>,
    claim: &Claim,
    claimed: &Option<Claimed>,
    path: &str,
    bound: Duration,
) -> Result<Release, Failure> {
    session.update(&claim.token, |claimed| claimed.releasing = true);
    let deleted = session.delete(path, bound).await?;
    let Some(Claimed { stage, releasing, .. }) = claimed else { return Ok(Release::NotHeld(LossReason::Gone)) };
    match stage {
        // If it is gone because an earlier deletion of ours got no answer, the lease was ours until then.
        Stage::Held(..) if deleted || *releasing => Ok(Release::Released { waiters: None }),
        Stage::Queued(_) if deleted => Ok(Release::NotHeld(LossReason::Taken)),
        _ => Ok(Release::NotHeld(why_not(session, claim, bound).await?)),
    }
}

/// Deletes whatever nodes the claim has.
async fn release_all(session: &Arc<Session>, claim: &Claim, bound: Duration) -> Result<Release, Failure> {
    let lock = session.names.lock(&claim.key);
    let children = list(session, &lock, bound).await?;
    let mut held = false;
    for node in queue::of_claim(&children, &name::protection(&claim.token)) {
        let first = queue::place(&children, node) == Place::First;
        let deleted = session.delete(&format!("{lock}/{node}"), bound).await?;
        held |= first && deleted;
    }
    if held {
        let others = u32::try_from(children.len() - 1).unwrap_or(u32::MAX);
        return Ok(Release::Released { waiters: Some(others) });
    }
    Ok(Release::NotHeld(why_not(session, claim, bound).await?))
}

/// Why a claim does not hold its lock.
pub(crate) async fn why_not(session: &Session, claim: &Claim, bound: Duration) -> Result<LossReason, Failure> {
    let children = list(session, &session.names.lock(&claim.key), bound).await?;
    Ok(if queue::holder(&children).is_some() { LossReason::Taken } else { LossReason::Gone })
}

async fn list(session: &Session, lock: &str, bound: Duration) -> Result<Vec<String>, Failure> {
    let listed = Box::pin(session.client.list_children(lock));
    match session.read(session.now(), bound, listed).await {
        Err(failure) if failure.is(&zk::Error::NoNode) => Ok(Vec::new()),
        other => other,
    }
}

fn doubtful(failure: &Failure) -> Error {
    error::map(failure, Sent::Yes)
}
