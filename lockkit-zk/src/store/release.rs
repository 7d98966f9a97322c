//! Ending a lease, or a claim's place in the queue.

use std::{sync::Arc, time::Duration};

use crate::{
    client::{
        claims::{Claimed, Node, Stage},
        session::Session,
    },
    store::{ZkStore, keep},
    wire::{
        error::{Failure, lasting},
        name, queue, window,
    },
};
use lockkit_core::{Claim, Effect, LossReason, Release, Result, store::unpoisoned};

/// Releases a claim, whoever made it. It is definite only when no node of the claim is left.
///
/// On the claim's own session it goes behind all that may have been sent for the claim, so a creation that was given
/// up on is found. In another session (the claim's own is over, or this is another process) the nodes are found by their
/// name.
pub(crate) async fn release(store: &ZkStore, claim: &Claim) -> Result<Release> {
    store.info.admit_mode(claim.mode)?;
    let (sessions, bound) = (&store.sessions, store.timeout());
    let session = sessions.session().await?;
    let claimed = session.begin_release(&claim.token);
    let release = match &claimed {
        Some(known @ Claimed { stage: Stage::Queued(node) | Stage::Held(node, _), .. }) => {
            release_node(&session, claim, known, node, bound).await.map_err(|failure| lasting(&failure))
        }
        Some(Claimed { stage: Stage::Asked | Stage::Gone, .. }) => release_all(&session, claim, false, bound).await,
        None => release_all(&session, claim, !sessions.was_ours(&claim.token), bound).await,
    };
    let release = release.inspect_err(|error| {
        let before = claimed.as_ref().is_some_and(|claimed| claimed.releasing);
        if error.effect() == Effect::None {
            session.update(&claim.token, |claimed| claimed.releasing = before);
        }
    })?;
    let left = session.claims().remove(&claim.token);
    let node = claimed.as_ref().and_then(Claimed::node);
    if left.is_some_and(|left| left.node().is_none() || left.node() != node) {
        // Whoever asked for its node may have gone away without an answer, so the creation may still be carried out; or it got another
        // node meanwhile.
        session.is_in_doubt();
    }
    if sessions.forget(&claim.token) {
        return Ok(Release::NotHeld(LossReason::SessionEnded));
    }
    Ok(release)
}

/// Deletes the node of a claim of this session, of which so much was known when its release was asked for.
async fn release_node(
    session: &Session,
    claim: &Claim,
    known: &Claimed,
    node: &Node,
    bound: Duration,
) -> Result<Release, Failure> {
    let lock = known.lock.as_str();
    let deleted = session.delete(&format!("{lock}/{}", node.name), bound).await?;
    if deleted {
        unpoisoned(&session.uncontended).deleted(lock, node.sequence);
    }
    match (&known.stage, known.releasing) {
        (Stage::Held(..), _) if deleted => Ok(Release::Released { waiters: None }),
        // An earlier deletion of ours got no answer. It was the one, or somebody else's was, who revoked the lease and said so in
        // the same step, or who has its place. One without a word can't be told from ours, which by far most are.
        (Stage::Held(..), true)
            if !session.is_revoked(lock, &claim.token, bound).await?
                && !is_taken_up(session, lock, node, bound).await? =>
        {
            Ok(Release::Released { waiters: None })
        }
        _ if deleted => Ok(Release::NotHeld(LossReason::Taken)),
        _ => Ok(Release::NotHeld(session.why_not(claim, bound).await?)),
    }
}

/// Whether another has the place of a node that is gone: no other way leads to its number, unless the directory was made anew meanwhile.
async fn is_taken_up(session: &Session, lock: &str, node: &Node, bound: Duration) -> Result<bool, Failure> {
    let children = session.list(lock, bound).await?;
    Ok(queue::contenders(&children).into_iter().any(|child| queue::sequence(child) == Some(node.sequence)))
}

/// Deletes whatever nodes the claim has, or the record of its window. A lease of somebody else, who is to lose it, is told why: that word
/// lasts longer than the session.
async fn release_all(session: &Arc<Session>, claim: &Claim, foreign: bool, bound: Duration) -> Result<Release> {
    let lock = session.names.lock(&claim.key);
    let children = session.list_settled(&lock, bound).await.map_err(|failure| lasting(&failure))?;
    if children.contains(&window::node(&claim.token))
        && let Some(ended) = keep::end(session, &lock, &claim.token, queue::contenders(&children).len(), bound).await?
    {
        return Ok(ended);
    }
    let (mut holders, waiters) = queue::holders(&children);
    if window::is_kept(&children) {
        // The first in the queue waits, too.
        holders.clear();
    }
    let mut held = false;
    for node in queue::of_claim(&children, &name::protection(&claim.token)) {
        let holds = holders.contains(&node);
        let path = format!("{lock}/{node}");
        let deleted = match foreign && holds {
            true => session.revoke(&lock, &path, &claim.token, bound).await,
            false => session.delete(&path, bound).await,
        };
        let deleted = deleted.map_err(|failure| lasting(&failure))?;
        held |= holds && deleted;
    }
    if held {
        return Ok(Release::Released { waiters: u32::try_from(waiters.len()).ok() });
    }
    Ok(Release::NotHeld(session.why_not(claim, bound).await.map_err(|failure| lasting(&failure))?))
}

#[cfg(test)]
mod tests {
    use lockkit_core::{ErrorKind, LockStore as _};
    use zookeeper_client::{Acl, Acls, AuthId, CreateMode, Permission};

    use crate::{
        ZkConfig, ZkStore,
        testing::{claim, granted, request, server},
    };

    /// A release before that got no answer is taken for the one that deleted the node; this one got an answer.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_release_that_was_refused_is_none_that_is_under_way() {
        let server = server().await;
        let store = ZkStore::connect(ZkConfig::new([server.addr().to_string()])).await.expect("connect");
        let (session, mine) = (store.sessions().present().expect("a session"), claim());
        let lock = session.names.lock(&mine.key);
        session.make_directory(session.names.root(), store.timeout()).await.expect("the root");
        let acl = [Acl::new(Permission::READ | Permission::CREATE, AuthId::anyone())];
        let options = CreateMode::Container.with_acls(Acls::new(&acl));
        session.client.create(&lock, b"", &options).await.expect("the directory");
        granted(store.acquire(&request(&mine, std::time::Duration::ZERO)).await);
        let error = store.release(&mine).await.expect_err("nobody may delete the node");
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(session.claimed(&mine.token).is_some_and(|claimed| !claimed.releasing));
    }
}
