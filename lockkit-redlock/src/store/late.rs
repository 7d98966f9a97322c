//! What nodes answer when an attempt has ended: a grant counts for the lease that there is, or is released.

use std::sync::Arc;

use lockkit_core::{Attempt, Effect, Result};
use tokio::time::timeout;

use crate::client::{
    backlog::Owed,
    calls::{Call, Calls},
    claims::{Burn, Entry},
    quorum::Quorum,
};

/// Hears those nodes out that had not answered when the attempt ended: each by itself.
pub(crate) fn keep_late(quorum: &Arc<Quorum>, entry: &Arc<Entry>, mut calls: Calls<Result<Attempt>>) {
    if calls.is_empty() {
        return;
    }
    let mut late = Calls::with_capacity(quorum.nodes.len());
    for (node, call) in calls.take() {
        let (quorum, entry) = (Arc::clone(quorum), Arc::clone(entry));
        late.add(node, async move {
            let answer = late_answer(&quorum, &entry, node, call).await;
            keep(&quorum, &entry, node, answer).await;
        });
    }
    quorum.background.spawn(async move { while late.next_ever().await.is_some() {} });
}

/// The answer of a node that the others did not wait for. It is slow if it takes as long again.
async fn late_answer(quorum: &Quorum, entry: &Entry, node: usize, mut call: Call<Result<Attempt>>) -> Result<Attempt> {
    let limit = quorum.config.timeout_for(entry.ttl);
    if let Ok(answer) = timeout(limit, &mut call).await {
        quorum.nodes[node].note_slow(answer.is_err());
        return answer;
    }
    quorum.nodes[node].note_slow(true);
    call.await
}

/// A node answered when the attempt had ended: what it granted counts, or is released if there is no lease, or no more.
pub(crate) async fn keep(quorum: &Arc<Quorum>, entry: &Arc<Entry>, node: usize, answer: Result<Attempt>) {
    let settled = match answer {
        Ok(Attempt::Granted(hold)) if !entry.is_over() => return entry.note(node, hold.fence),
        Ok(Attempt::Granted(_)) => true,
        Err(error) if error.effect() == Effect::Unknown && entry.is_over() => false,
        Ok(Attempt::Contended(_)) | Err(_) => return,
    };
    undo(Arc::clone(quorum), Burn::new(entry, node), settled).await;
}

/// Nothing is left to be undone but this: the claim is forgotten afterwards.
pub(crate) fn forget_when_undone(quorum: &Arc<Quorum>, entry: &Arc<Entry>, mut undoing: Calls<()>) {
    let (quorum, entry) = (Arc::clone(quorum), Arc::clone(entry));
    if undoing.is_empty() {
        return quorum.claims.forget(&entry);
    }
    let background = Arc::clone(&quorum);
    background.background.spawn(async move {
        while undoing.next_ever().await.is_some() {}
        quorum.claims.forget(&entry);
    });
}

/// A node had not answered when the attempt was refused: releases what it grants yet.
pub(crate) async fn undo_late(quorum: Arc<Quorum>, burn: Burn, call: Call<Result<Attempt>>) {
    match late_answer(&quorum, burn.entry(), burn.node(), call).await {
        Ok(Attempt::Granted(_)) => {
            quorum.stats.late_grants_released.add_one();
            undo(quorum, burn, true).await;
        }
        Err(error) if error.effect() == Effect::Unknown => undo(quorum, burn, false).await,
        Ok(Attempt::Contended(_)) | Err(_) => burn.end(),
    }
}

/// Releases a claim at one node, and has that repeated if it fails. If nothing of it is left there for certain, it is not burnt
/// there any more.
pub(crate) async fn undo(quorum: Arc<Quorum>, mut burn: Burn, settled: bool) {
    let (node, entry) = (burn.node(), Arc::clone(burn.entry()));
    let owed = Owed::new(&entry, settled);
    let answer = quorum.nodes[node].release(&entry.claim).await;
    burn.hear(&answer);
    if !owed.is_settled_by(&answer) {
        quorum.owe(node, Owed { burn: Some(burn), ..owed });
    } else if answer.is_ok() {
        burn.end();
    }
}
