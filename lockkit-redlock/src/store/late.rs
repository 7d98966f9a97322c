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
    late.begun_with(&calls);
    for (node, call) in calls.take() {
        let unheard = Unheard { quorum: Arc::clone(quorum), entry: Arc::clone(entry), node, is_heard: false };
        late.add(node, unheard.hear(call));
    }
    quorum.background.spawn(async move { while late.next_ever().await.is_some() {} });
}

/// A node of which it is not known what it grants when the attempt has ended.
struct Unheard {
    quorum: Arc<Quorum>,
    entry: Arc<Entry>,
    node: usize,
    is_heard: bool,
}

impl Unheard {
    async fn hear(mut self, call: Call<Result<Attempt>>) {
        let answer = late_answer(&self.quorum, &self.entry, self.node, call).await;
        self.is_heard = true;
        keep(&self.quorum, &self.entry, self.node, answer).await;
    }
}

/// Its runtime has ended: what nobody holds must not be left there.
impl Drop for Unheard {
    fn drop(&mut self) {
        if !self.is_heard && self.entry.is_over() {
            drop(Undo::new(&self.quorum, Burn::new(&self.entry, self.node), false));
        }
    }
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

/// Leads to its end what is being undone. If nothing else is left of the claim, `and_forget` has it forgotten afterwards.
pub(crate) fn see_undone(quorum: &Arc<Quorum>, entry: &Arc<Entry>, mut undoing: Calls<()>, and_forget: bool) {
    let (background, quorum, entry) = (Arc::clone(quorum), Arc::clone(quorum), Arc::clone(entry));
    let forget = move || {
        if and_forget {
            quorum.claims.forget(&entry);
        }
    };
    if undoing.is_empty() {
        return forget();
    }
    background.background.spawn(async move {
        while undoing.next_ever().await.is_some() {}
        forget();
    });
}

/// A node had not answered when the attempt was refused: releases what it grants yet.
pub(crate) async fn undo_late(quorum: Arc<Quorum>, burn: Burn, call: Call<Result<Attempt>>) {
    let (entry, node) = (Arc::clone(burn.entry()), burn.node());
    let mut undo = Undo::new(&quorum, burn, false);
    match late_answer(&quorum, &entry, node, call).await {
        Ok(Attempt::Granted(_)) => {
            quorum.stats.late_grants_released.add_one();
            undo.settled = true;
            undo.release().await;
        }
        Err(error) if error.effect() == Effect::Unknown => undo.release().await,
        Ok(Attempt::Contended(_)) | Err(_) => undo.end(),
    }
}

/// Releases a claim at one node, and has that repeated if it fails.
pub(crate) async fn undo(quorum: Arc<Quorum>, burn: Burn, settled: bool) {
    Undo::new(&quorum, burn, settled).release().await;
}

/// A claim that is to be released at one node. It is repeated there if it fails, and if this is dropped in the middle, with the runtime that it
/// was begun on.
struct Undo {
    quorum: Arc<Quorum>,
    burn: Option<Burn>,
    /// Whether the node has answered the acquisition.
    settled: bool,
    /// Whether a release was sent, and not answered yet.
    is_sent: bool,
}

impl Undo {
    fn new(quorum: &Arc<Quorum>, burn: Burn, settled: bool) -> Self {
        Self { quorum: Arc::clone(quorum), burn: Some(burn), settled, is_sent: false }
    }

    /// If nothing of the claim is left there for certain, it is not burnt there any more.
    async fn release(mut self) {
        let Some(burn) = &self.burn else { return };
        let (node, entry) = (burn.node(), Arc::clone(burn.entry()));
        self.is_sent = true;
        let answer = self.quorum.nodes[node].release(&entry.claim).await;
        self.is_sent = false;
        if let Some(burn) = &mut self.burn {
            burn.hear(&answer);
        }
        if Owed::new(&entry, self.settled).is_settled_by(&answer) {
            let burn = self.burn.take().filter(|_| answer.is_ok());
            burn.into_iter().for_each(Burn::end);
        }
    }

    /// Nothing is there to be released.
    fn end(mut self) {
        self.burn.take().into_iter().for_each(Burn::end);
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        let Some(mut burn) = self.burn.take() else { return };
        if self.is_sent {
            burn.doubt();
        }
        let (node, owed) = (burn.node(), Owed::new(burn.entry(), self.settled));
        self.quorum.owe(node, Owed { burn: Some(burn), ..owed });
    }
}
