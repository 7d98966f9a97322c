//! Asking for a lease: in the queue, or in the place of one that is to go.

use std::time::Duration;

use lockkit_core::{AcquireRequest, Attempt, Error, Mode, Result};
use tokio::time::Instant;

use crate::{
    client::znodes::overtaken,
    store::{
        ZkStore,
        attempt::{Acquisition, QueueView, contention, prepare, undone},
        keep, replace,
        wait::{LOOK_PAUSE, Woken},
        window::Outlook,
    },
    wire::{
        error::doubtful,
        fence::FenceRecord,
        queue::{self, Position},
        value,
    },
};

/// How often a fence is settled that others change at the same time, who hold the lock together with us.
const SETTLE_TRIES: u32 = 20;

/// Asks for a lease: in the queue, or in the place of another.
pub(crate) async fn acquire(store: &ZkStore, request: &AcquireRequest) -> Result<Attempt> {
    let answer = match (store.info.admit(request), request.from) {
        (Err(refusal), _) => Err(refusal),
        (Ok(()), None) => ask_in_queue(store, request).await,
        (Ok(()), Some(from)) if request.keeps => Box::pin(keep::keep(store, request, from)).await,
        (Ok(()), Some(from)) => Box::pin(replace::replace(store, request, from)).await,
    };
    if answer.is_err() {
        // The session may have ended between the grant and this. Nobody has the lease, so nobody has lost it, and the claim may
        // be asked for again.
        store.sessions.was_not_held(&request.claim.token);
    }
    answer
}

/// Asks for a lease of its own, and waits for it in the queue.
async fn ask_in_queue(store: &ZkStore, request: &AcquireRequest) -> Result<Attempt> {
    let (session, request, bound) = prepare(store, request).await?;
    Acquisition::new(&session, &request, bound).run().await
}

impl Acquisition<'_> {
    /// Asks, and waits for as long as the request says.
    ///
    /// # Errors
    /// Their effect is unknown as long as there is or may be a node of the claim, whatever was answered: it has to be
    /// released. A session that was declared over knows no claims, and its nodes may live on for as long as anybody believes in a
    /// lease of it.
    async fn run(mut self) -> Result<Attempt> {
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
