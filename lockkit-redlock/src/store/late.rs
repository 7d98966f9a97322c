//! What nodes answer that nobody waits for, after an attempt or when a lease is healed: a grant counts for the lease that there is, or
//! is released.

use std::sync::Arc;

use lockkit_core::{Attempt, Effect, LockStore, Release, Result};
use tokio::time::timeout;

use crate::client::{
    backlog::{Owed, is_final},
    calls::{Call, Calls},
    claims::Entry,
    quorum::Quorum,
};

/// Hears those nodes out that had not answered when the attempt ended: each by itself. Whether nothing is left to be released there.
pub(crate) fn hear_out(quorum: &Arc<Quorum>, entry: &Arc<Entry>, mut calls: Calls<Result<Attempt>>) -> Calls<bool> {
    let mut late = Calls::with_capacity(calls.unheard());
    late.begun_with(&calls);
    for (node, call) in calls.take() {
        late.add(node, Unheard::new(quorum, entry, node).hear(call));
    }
    late
}

/// Leads to its end in the background what is done about a claim. With a claim `to_forget`, that is forgotten if it `is_done` everywhere.
pub(crate) fn see_to<T: Send + 'static>(
    quorum: &Arc<Quorum>,
    to_forget: Option<Arc<Entry>>,
    mut calls: Calls<T>,
    is_done: fn(&T) -> bool,
) {
    let mut left = calls.unheard();
    let (background, quorum) = (&quorum.background, Arc::clone(quorum));
    let forget = move || to_forget.iter().for_each(|entry| quorum.claims.forget(entry));
    if left == 0 {
        return forget();
    }
    background.spawn(async move {
        while let Some((_, answer)) = calls.next_ever().await {
            left -= usize::from(is_done(&answer));
        }
        if left == 0 {
            forget();
        }
    });
}

/// A node whose answer is still to come: the attempt has ended, or the node is asked again for a lease that it had lost.
pub(crate) struct Unheard {
    quorum: Arc<Quorum>,
    entry: Arc<Entry>,
    node: usize,
    is_heard: bool,
}

impl Unheard {
    pub(crate) fn new(quorum: &Arc<Quorum>, entry: &Arc<Entry>, node: usize) -> Self {
        Self { quorum: Arc::clone(quorum), entry: Arc::clone(entry), node, is_heard: false }
    }

    /// Hears the node out. Whether nothing is left to be released there.
    pub(crate) async fn hear(mut self, call: Call<Result<Attempt>>) -> bool {
        let answer = late_answer(&self.quorum, &self.entry, self.node, call).await;
        self.is_heard = true;
        keep(&self.quorum, &self.entry, self.node, answer).await
    }
}

/// Its runtime has ended, and its answer will not be heard: the node is in doubt, and what nobody holds is released there.
impl Drop for Unheard {
    fn drop(&mut self) {
        if self.is_heard {
            return;
        }
        // Noted first: either its release sees this, or this sees that it is over.
        self.entry.in_doubt.add(self.node);
        if self.entry.is_over() {
            drop(Undo::new(&self.quorum, self.node, Owed::new(&self.entry, false)));
        }
    }
}

/// The answer of a node that nobody waits for. It is slow if it takes longer than an attempt waits.
async fn late_answer(quorum: &Quorum, entry: &Entry, node: usize, mut call: Call<Result<Attempt>>) -> Result<Attempt> {
    let limit = quorum.config.timeout_for(entry.ttl);
    if let Ok(answer) = timeout(limit, &mut call).await {
        quorum.nodes[node].note_slow(answer.is_err());
        return answer;
    }
    quorum.nodes[node].note_slow(true);
    call.await
}

/// A node answered late: what it granted counts, or is released if there is no lease, or no more. Whether nothing is left to be released.
async fn keep(quorum: &Arc<Quorum>, entry: &Arc<Entry>, node: usize, answer: Result<Attempt>) -> bool {
    let settled = match answer {
        Ok(Attempt::Granted(hold)) if !entry.is_over() => {
            entry.note(node, hold.fence);
            return true;
        }
        Ok(Attempt::Granted(_)) => true,
        Err(error) if error.effect() == Effect::Unknown => {
            // Noted first: either its release sees this, or this sees that it is over.
            entry.in_doubt.add(node);
            if !entry.is_over() {
                return true;
            }
            false
        }
        Ok(Attempt::Contended(contention)) => {
            if contention.burnt {
                entry.burnt.add(node);
            }
            return true;
        }
        Err(_) => return true,
    };
    if settled && entry.is_unused() {
        quorum.stats.late_grants_released.add_one();
    }
    undo(Arc::clone(quorum), Arc::clone(entry), node, settled).await
}

/// Releases a claim at one node, and has that repeated if it fails. If `settled`, the node has answered the acquisition. Whether
/// nothing is left to be released.
pub(crate) async fn undo(quorum: Arc<Quorum>, entry: Arc<Entry>, node: usize, settled: bool) -> bool {
    match Undo::new(&quorum, node, Owed::new(&entry, settled)).release(settled).await {
        Ok(Release::Released { .. }) => true,
        Ok(Release::NotHeld(_)) => settled,
        Err(_) => false,
    }
}

/// A claim that is to be released at one node. It is repeated there if it fails, and if this is dropped in the middle, with
/// the runtime that it was begun on.
pub(crate) struct Undo {
    quorum: Arc<Quorum>,
    node: usize,
    owed: Owed,
    is_done: bool,
}

impl Undo {
    pub(crate) fn new(quorum: &Arc<Quorum>, node: usize, owed: Owed) -> Self {
        Self { quorum: Arc::clone(quorum), node, owed, is_done: false }
    }

    /// If it is `settled`, the answer is final that the node does not have the claim.
    pub(crate) async fn release(mut self, settled: bool) -> Result<Release> {
        let node = self.quorum.nodes[self.node].store();
        let answer = node.release(&self.owed.claim).await;
        self.is_done = is_final(node, &answer, settled);
        answer
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        if !self.is_done {
            self.quorum.owe(self.node, self.owed.clone());
        }
    }
}
