//! One attempt to get a lease: what all of its steps know of the claim and its lock, and what they do to nodes.
//!
//! The steps are the files that use this one. They add their methods to [`Acquisition`], and this one calls none of them.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Contention, Error, ErrorKind, HolderInfo, Moment, Result, Token, store::operation_bound,
};

use crate::{
    client::{
        claims::Node,
        driver::Answer,
        session::Session,
        watched::{Use, Watched},
    },
    store::ZkStore,
    wire::{
        error::{self, Failure, doubtful, unless_gone},
        name,
    },
};

/// A session for a lease, the request with what this can give, and the bound on each operation.
///
/// # Errors
/// Those of connecting. All without effect.
pub(super) async fn prepare(
    store: &ZkStore,
    request: &AcquireRequest,
) -> Result<(Arc<Session>, AcquireRequest, Duration)> {
    let session = store.session().await?;
    // A lease lasts as long as its session at most, whatever was asked for.
    let ttl = request.ttl.min(store.sessions.session_timeout());
    Ok((session, AcquireRequest { ttl, ..request.clone() }, operation_bound(store.timeout(), ttl)))
}

/// One call of `acquire`.
pub(crate) struct Acquisition<'a> {
    pub(crate) session: &'a Arc<Session>,
    pub(crate) request: &'a AcquireRequest,
    pub(crate) token: &'a Token,
    /// The path of the lock.
    pub(crate) lock: String,
    /// What the names of the claim's nodes begin with.
    pub(crate) protection: String,
    /// The bound on one operation.
    pub(crate) bound: Duration,
    /// The moment before the last request that could tell that the lock is ours.
    pub(crate) asked: Moment,
    /// When the claim's node was made, by the leader's clock, if it was made just now.
    pub(crate) leader: Option<i64>,
}

/// The claim's node and all children of the lock, as seen together.
pub(crate) struct QueueView {
    pub(crate) node: Node,
    pub(crate) children: Vec<String>,
}

impl<'a> Acquisition<'a> {
    pub(crate) fn new(session: &'a Arc<Session>, request: &'a AcquireRequest, bound: Duration) -> Self {
        let token = &request.claim.token;
        let lock = session.names.lock(&request.claim.key);
        let (protection, asked) = (name::protection(token), session.now());
        Self { session, request, token, lock, protection, bound, asked, leader: None }
    }

    /// Deletes the node of the claim, and forgets the claim when that is done. Until then it is known that the node may go
    /// at any time: whoever asks again with the same claim must not take it for a place in the queue.
    pub(crate) async fn undo(&self, node: &Node) -> Result<()> {
        self.session.update(self.token, |claimed| claimed.releasing = true);
        self.delete(&node.name).await.map_err(|failure| doubtful(&failure))?;
        self.session.claims().remove(self.token);
        Ok(())
    }

    /// Deletes a node of the lock; that it is not there is as good.
    pub(crate) async fn delete(&self, node: &str) -> Result<(), Failure> {
        self.session.delete(&format!("{}/{node}", self.lock), self.bound).await.map(drop)
    }

    pub(crate) async fn list(&self) -> Result<Vec<String>, Failure> {
        self.session.list(&self.lock, self.bound).await
    }

    /// Asks for the data of a node of the queue and for a watch on it, if there is room for one.
    pub(super) fn look(&self, path: &str, purpose: Use) -> Option<Answer<'a, (Vec<u8>, Watched)>> {
        let client = &self.session.client;
        self.session.watches.ask(path, purpose, || {
            let answer = client.get_and_watch_data(path);
            async { answer.await.map(|(data, _, watcher)| (data, watcher)) }
        })
    }

    /// What was asked of a node, or a lock; `None` if it is gone.
    pub(super) async fn seen<T>(&self, asked: Answer<'_, T>) -> Result<Option<T>> {
        unless_gone(self.session.read(self.bound, asked).await).map_err(|failure| doubtful(&failure))
    }

    /// The node of the claim was deleted by somebody else, who may delete again what has this token; or the session is over.
    pub(crate) fn vanished(&self) -> Result<Attempt> {
        if self.session.is_over() {
            return Err(error::session_over());
        }
        self.session.claims().remove(self.token);
        if self.request.wait.is_zero() {
            // Who only tries would take another answer for a no.
            return Err(Error::new(ErrorKind::Unavailable, "the node of the claim was deleted"));
        }
        Ok(undone(None, Duration::ZERO))
    }
}

/// The lock is another's; when to ask again.
pub(super) fn contention(holder: Option<HolderInfo>, retry_after: Duration) -> Contention {
    Contention { retry_after: Some(retry_after), holder, burnt: false }
}

/// The same when the node of the claim was deleted: its token is burnt.
pub(crate) fn undone(holder: Option<HolderInfo>, retry_after: Duration) -> Attempt {
    Attempt::Contended(Contention { burnt: true, ..contention(holder, retry_after) })
}
