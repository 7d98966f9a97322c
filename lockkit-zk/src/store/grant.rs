//! Granting the lock to a claim that the queue lets through: its fence is decided on, its node says that where it has to, and the
//! session takes note of it.

use lockkit_core::{Attempt, Hold, Mode, Result};

use crate::{
    client::{
        claims::{Grant, Node, Stage},
        znodes::overtaken,
    },
    store::attempt::{Acquisition, QueueView},
    wire::{
        error::{doubtful, unless_gone},
        fence::{self, FenceRecord},
    },
};

impl Acquisition<'_> {
    /// The lock is ours. `record` is the lock's fence record, if that is known. `None` if another of those that hold it
    /// together changed the record, or our node is gone: then we look again.
    pub(super) async fn grant(&self, queue: &QueueView, record: Option<FenceRecord>) -> Result<Option<Attempt>> {
        let claimed = self.session.claimed(self.token);
        // The node also says for how many fences the claim asked when it was made.
        let said = claimed.as_ref().is_some_and(|claimed| !claimed.written || claimed.span != self.request.fence.span);
        let granted = match claimed.map(|claimed| claimed.stage) {
            Some(Stage::Held(node, grant)) if node == queue.node => grant,
            _ => match self.settle_fence(queue, record, said).await? {
                Some(grant) => grant,
                None => return Ok(None),
            },
        };
        let (fence, span, depth) = (granted.fence, granted.span, granted.depth);
        if self.session.proven() < self.session.now() + self.request.ttl / 3 {
            // It was a long wait. Whoever is to rely on the lease should have something of it.
            let sign = self.session.sign_of_life(self.bound).await;
            sign.map_err(|failure| doubtful(&failure))?;
        }
        if !self.hold(&queue.node, granted) {
            // Its release was asked for while nobody polled this, and may come to nothing.
            self.undo(&queue.node).await?;
            return self.vanished().map(Some);
        }
        if self.session.is_over() {
            return self.vanished().map(Some);
        }
        let until = self.session.proven().min(self.asked + self.request.ttl);
        Ok(Some(Attempt::Granted(Hold { claim: self.request.claim.clone(), fence, span, until, depth })))
    }

    /// Takes note that the claim holds the lock, unless its release was asked for; tells whether it was not. A session that is over
    /// knows no claims, and deletes nothing.
    fn hold(&self, node: &Node, granted: Grant) -> bool {
        let mut is_ours = self.session.is_over();
        self.session.update(self.token, |claimed| {
            is_ours = !claimed.releasing;
            if is_ours {
                // It says what was settled.
                claimed.written |= matches!(claimed.stage, Stage::Queued(_));
                claimed.stage = Stage::Held(node.clone(), granted);
            }
        });
        is_ours
    }

    /// Decides on the fences of the grant, and writes down what they take from the grants to come. `None` if that has to be
    /// decided anew. `said`: a call that came to nothing may have written a fence into the node already. Then the node has to keep one, for
    /// a waiter behind it may look late.
    async fn settle_fence(&self, queue: &QueueView, record: Option<FenceRecord>, said: bool) -> Result<Option<Grant>> {
        let request = &self.request.fence;
        let alone = self.request.claim.mode == Mode::Exclusive;
        let (record, stat) = match record {
            Some(record) => (record, None),
            None => self.session.read_fence_record(&self.lock, &queue.children, self.bound).await?,
        };
        let (fence, write) = fence::grant(record, queue.node.czxid, request, alone)?;
        let holder = self.request.holder.clone();
        // Beside others the record may change as long as we hold, and then our fence would not follow from it.
        let explicit = write.is_some() || said || (!alone && record != FenceRecord::NONE);
        let grant = Grant { fence, span: request.span, depth: 1, explicit, holder };
        let node = queue.node.name.as_str();
        if let Some(record) = write {
            let (own, version) = ((node, grant.value()), stat.map(|stat| stat.version));
            self.session.update(self.token, |claimed| claimed.written = false);
            return match self.session.write_fence_record(&self.lock, record, version, own, self.bound).await? {
                true => Ok(Some(grant)),
                false if alone => Err(overtaken()),
                false => Ok(None),
            };
        }
        let is_shown = !explicit || self.show(node, &grant).await?;
        Ok(is_shown.then_some(grant))
    }

    /// Writes into the claim's node what was granted; tells whether it is still there.
    async fn show(&self, node: &str, grant: &Grant) -> Result<bool> {
        let (path, text) = (format!("{}/{node}", self.lock), grant.value().text());
        // Before the request, which the driver sends with the call: what it proves counts from here.
        let sent = self.session.now();
        let written = Box::pin(self.session.client.set_data(&path, text.as_bytes(), None));
        let written = unless_gone(self.session.lead(sent, self.bound, written).await);
        written.map(|written| written.is_some()).map_err(|failure| doubtful(&failure))
    }
}
