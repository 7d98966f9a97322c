//! Getting a place in the queue, and being granted the lock.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Contention, Error, ErrorKind, FenceClock, Hold, HolderInfo, Mode, Moment, Result,
    StoreInfo, Token, store::bound,
};
use tokio::time::Instant;

use crate::{
    client::{
        claims::{Grant, Node, Stage},
        session::Session,
        znodes::overtaken,
    },
    store::ZkStore,
    wire::{
        error::{self, Failure, doubtful, unless_gone},
        fence::{self, FenceRecord},
        name,
        queue::{self, Position},
        value,
    },
};

/// When to look again at a queue that can't be watched.
pub(super) const LOOK_PAUSE: Duration = Duration::from_millis(250);

/// How often a fence is settled that others change at the same time, who hold the lock together with us.
const SETTLE_TRIES: u32 = 20;

/// Asks for a lease, and waits for it in the queue.
pub(crate) async fn acquire(store: &ZkStore, request: &AcquireRequest) -> Result<Attempt> {
    let (session, request, bound) = prepare(store, request).await?;
    Acquisition::new(&session, &request, bound).run().await
}

/// A session for a lease, the request with what this can give, and the bound on each operation.
///
/// # Errors
/// `InvalidInput` and `Unsupported` for what can't be granted here; those of connecting. All without effect.
pub(super) async fn prepare(
    store: &ZkStore,
    request: &AcquireRequest,
) -> Result<(Arc<Session>, AcquireRequest, Duration)> {
    let shortest = StoreInfo::SHORTEST_TTL;
    if request.ttl < shortest {
        return Err(Error::invalid(format!("the ttl must be at least {shortest:?}, not {:?}", request.ttl)));
    }
    if request.claim.mode != Mode::Exclusive && request.fence.clock == FenceClock::Floor {
        let message = "only exclusive locks can have fences without the store's clock";
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    let session = store.session().await?;
    // A lease lasts as long as its session at most, whatever was asked for.
    let ttl = request.ttl.min(store.sessions.session_timeout());
    Ok((session, AcquireRequest { ttl, ..request.clone() }, bound(store.timeout(), ttl)))
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

/// How a wait ended.
pub(crate) enum Woken {
    /// Something changed.
    Changed,
    /// The only node before ours is gone, and nothing has changed since the queue was read but that.
    Next,
    /// There is no room for the watches that it takes.
    Unwatched,
    /// The caller's time is up, or the session's.
    Over,
}

/// What a claim that is the first of its queue finds.
pub(crate) enum Outlook {
    /// No window that is not over.
    Open,
    /// Something changed while it waited.
    Changed,
    /// The lock is kept: the answer to the caller.
    Kept(Attempt),
}

impl<'a> Acquisition<'a> {
    pub(crate) fn new(session: &'a Arc<Session>, request: &'a AcquireRequest, bound: Duration) -> Self {
        let token = &request.claim.token;
        let lock = session.names.lock(&request.claim.key);
        let (protection, asked) = (name::protection(token), session.now());
        Self { session, request, token, lock, protection, bound, asked, leader: None }
    }

    /// Asks, and waits for as long as the request says.
    ///
    /// # Errors
    /// Their effect is unknown as long as there is or may be a node of the claim, whatever was answered: it has to be
    /// released. A session that was declared over knows no claims, and its nodes may live on for as long as anybody believes in a
    /// lease of it.
    pub(crate) async fn run(mut self) -> Result<Attempt> {
        let outcome = self.ask_and_wait().await;
        let may_have_node = self.session.claimed(self.token).is_some() || self.session.is_over();
        outcome.map_err(|e| if may_have_node { e.unknown_effect() } else { e })
    }

    async fn ask_and_wait(&mut self) -> Result<Attempt> {
        let deadline = Instant::now().checked_add(self.request.wait);
        let Some(mut queue) = self.enter().await? else { return self.vanished() };
        while !queue::is_safe(queue.node.sequence) {
            // Its sequence numbers are about to wrap, so the lock's directory is made anew. That takes a moment in which
            // nobody else is in the queue; until it comes nobody of ours enters.
            if let Some(answer) = self.give_way(&queue).await? {
                return Ok(answer);
            }
            if let Some(answer) = self.replace_directory(&queue.node).await? {
                return Ok(answer);
            }
            let Some(anew) = self.line_up().await? else { return self.vanished() };
            queue = anew;
        }
        let mut settled = 0;
        loop {
            let record = match queue::place(&queue.children, &queue.node.name) {
                Position::Holds => match self.outlast(&queue, deadline).await? {
                    Outlook::Open => Some(None),
                    Outlook::Changed => None,
                    Outlook::Kept(answer) => return Ok(answer),
                },
                Position::Absent => return self.vanished(),
                Position::Disagrees(other) => return self.refuse(&queue, other).await,
                Position::Behind { holder, .. } if self.request.wait.is_zero() => {
                    return self.leave(&queue, holder).await;
                }
                Position::Behind { until, .. } => match self.wait(&queue, until, deadline).await? {
                    Woken::Changed => None,
                    Woken::Next => {
                        self.asked = self.session.now();
                        Some(Some(FenceRecord::NONE))
                    }
                    // The claim keeps its place, or has none to keep.
                    Woken::Unwatched => return Ok(Attempt::Contended(contention(None, LOOK_PAUSE))),
                    Woken::Over => return Ok(Attempt::Contended(contention(None, Duration::ZERO))),
                },
            };
            if let Some(record) = record {
                if let Some(answer) = self.grant(&queue, record).await? {
                    return Ok(answer);
                }
                settled += 1;
                if settled == SETTLE_TRIES {
                    return Err(overtaken());
                }
            }
            (self.asked, self.leader) = (self.session.now(), None);
            queue.children = self.list().await.map_err(|failure| doubtful(&failure))?;
        }
    }

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
        let (record, version) = match record {
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
            let own = (node, grant.value());
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

    /// Gives up the place in the queue: those who use the lock must agree on how many permits there are.
    async fn refuse(&self, queue: &QueueView, other: Mode) -> Result<Attempt> {
        self.undo(&queue.node).await?;
        Err(Error::invalid(format!("the lock is in use as a {other}, not as a {}", self.request.claim.mode)))
    }

    /// Gives up the place in the queue again: a try leaves nothing behind.
    async fn leave(&self, queue: &QueueView, holder: &str) -> Result<Attempt> {
        let path = format!("{}/{holder}", self.lock);
        let asked = Box::pin(self.session.client.get_data(&path));
        self.undo(&queue.node).await?;
        let data = self.session.read(self.bound, asked).await;
        Ok(undone(data.ok().map(|(data, _)| value::holder(&data)), Duration::ZERO))
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

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use lockkit_core::{Effect, LockStore as _, Release};
    use lockkit_testkit::faults::poll_until;

    use super::*;
    use crate::{
        ZkConfig,
        testing::{claim, granted, is_given_up_while_it_asks, request, server},
    };

    /// The runtime of the session ends between the grant and its answer, so that the session is found to be over.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_lease_of_a_claim_that_was_asked_for_again_is_not_said_to_have_ended_with_the_session_before() {
        let server = server().await;
        let store = ZkStore::connect(ZkConfig::new([server.addr().to_string()])).await.expect("connect");
        let asked = request(&claim(), Duration::ZERO);
        let mut first = pin!(store.acquire(&asked));
        assert!(poll_until(first.as_mut(), 1, || {}).await.is_none(), "its node is asked for");
        store.sessions().present().expect("a session").abandon();
        let error = first.await.expect_err("the session is over");
        assert!(error.is_retryable() && error.effect() == Effect::Unknown, "{error}");
        granted(store.acquire(&asked).await);
        let release = store.release(&asked.claim).await.expect("release");
        assert!(matches!(release, Release::Released { .. }), "{release:?}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_claim_whose_session_is_declared_over_may_have_a_node() {
        is_given_up_while_it_asks(&[], request(&claim(), Duration::ZERO)).await;
    }
}
