//! What nodes answer when an attempt has ended: a grant counts for the lease that there is, or is released.

use std::sync::Arc;

use lockkit_core::{Attempt, Effect, Result};
use tokio::time::timeout;

use crate::client::{
    calls::{Call, Calls, in_background},
    claims::Entry,
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
    in_background(async move { while late.next_ever().await.is_some() {} });
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
    undo(Arc::clone(quorum), Arc::clone(entry), node, settled).await;
}

pub(crate) fn forget_when_undone(quorum: &Arc<Quorum>, entry: &Arc<Entry>, mut undoing: Calls<bool>, mut clean: bool) {
    let (quorum, entry) = (Arc::clone(quorum), Arc::clone(entry));
    let forget = move |clean| {
        if clean {
            quorum.claims.forget(&entry);
        }
    };
    if undoing.is_empty() {
        return forget(clean);
    }
    in_background(async move {
        while let Some((_, undone)) = undoing.next_ever().await {
            clean &= undone;
        }
        forget(clean);
    });
}

/// A node had not answered when the attempt was refused: releases what it grants yet.
pub(crate) async fn undo_late(
    quorum: Arc<Quorum>,
    entry: Arc<Entry>,
    node: usize,
    call: Call<Result<Attempt>>,
) -> bool {
    let answer = late_answer(&quorum, &entry, node, call).await;
    match answer {
        Ok(Attempt::Granted(_)) => {
            quorum.stats.late_grants_released.add_one();
            undo(quorum, entry, node, true).await
        }
        Err(error) if error.effect() == Effect::Unknown => undo(quorum, entry, node, false).await,
        Ok(Attempt::Contended(_)) | Err(_) => true,
    }
}

/// Releases a claim at one node, and has that repeated if it fails. Whether nothing of it is left there for certain.
pub(crate) async fn undo(quorum: Arc<Quorum>, entry: Arc<Entry>, node: usize, settled: bool) -> bool {
    let (member, owed) = (&quorum.nodes[node], entry.owed(settled));
    let answer = member.release(&entry.claim).await;
    if owed.is_settled_by(&answer) {
        return answer.is_ok();
    }
    member.owe(owed, &quorum.info.clock);
    false
}
