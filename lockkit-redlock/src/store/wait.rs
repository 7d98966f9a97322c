//! Waiting: at one node, the same for all clients, and only then at all others.
//!
//! When a lock becomes free, a client that asks all nodes at once meets all others that do the same, and the votes split.
//! So waiters meet at a *rendezvous*: the first node, in an order that follows from the lock's name, at which the lock is
//! held. They wait there by that node's own means. One of them gets the lock there, and asks the other nodes while its
//! rivals still wait. A newcomer that asks all nodes directly has that one less to win.
//!
//! The rendezvous is no more than a place to meet: it decides nothing, and a client that has waited there for
//! [`SAFETY_POLL`] asks all nodes again.

use std::{pin::pin, sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Effect, Fence, FenceRequest, Hold, LockStore, Order, Result, Waiting};

use crate::{
    client::quorum::Quorum,
    store::attempt::{Ended, OpenAttempt, proposal},
    wire::fence,
};

/// For how long to wait at the rendezvous at most. Longer than any hand-off, and short enough not to matter when that node
/// is lost.
const SAFETY_POLL: Duration = Duration::from_secs(1);

/// How a wait at the rendezvous ended.
pub(crate) enum Waited {
    Granted(Hold),
    /// When to ask again.
    Refused(Duration),
}

impl Quorum {
    /// Waits at the rendezvous, and asks all nodes when the lock was granted there.
    pub(crate) async fn wait(
        self: &Arc<Self>,
        attempt: &mut OpenAttempt<'_>,
        request: &AcquireRequest,
        held_at: &[usize],
        left: Duration,
    ) -> Result<Waited> {
        let Some(rendezvous) = self.rendezvous(&request.claim.key, held_at) else {
            return Ok(Waited::Refused(self.retry_delay().max(Duration::from_millis(10))));
        };
        let Some(opened) = wait_at(attempt, self, rendezvous, request, proposal(request), left).await else {
            return Ok(Waited::Refused(Duration::ZERO));
        };
        if attempt.gives_way() {
            return Ok(Waited::Refused(self.retry_delay()));
        }
        // The fence granted there is above all that went before, and most likely what the others would grant next.
        Ok(match attempt.round(request, fence::exactly(opened, request.fence.span), true).await? {
            Ended::Granted(hold) => Waited::Granted(hold),
            Ended::Refused(_) => Waited::Refused(self.retry_delay()),
        })
    }
}

/// Waits at the rendezvous; the fence that it granted, or `None` if it granted none in time.
///
/// # Cancellation
/// The wait is dropped, as any future of a store may be: the caller's release gives up the place in its queue.
async fn wait_at(
    attempt: &mut OpenAttempt<'_>,
    quorum: &Arc<Quorum>,
    rendezvous: usize,
    request: &AcquireRequest,
    fence: FenceRequest,
    wait: Duration,
) -> Option<Fence> {
    let (node, clock) = (&quorum.nodes[rendezvous], &*quorum.info.clock);
    let wait = wait.min(SAFETY_POLL);
    let there = AcquireRequest { wait, order: Order::Any, fence, ..request.clone() };
    attempt.entry().asked(clock.now() + wait, request.ttl);
    let mut opened = pin!(node.acquire(&there, clock));
    let answer = loop {
        tokio::select! {
            biased;
            // What the round before left is undone meanwhile.
            Some(()) = attempt.undone() => {}
            answer = &mut opened => break answer,
        }
    };
    match answer {
        Ok(Attempt::Granted(hold)) => {
            attempt.holds(rendezvous, true);
            return Some(hold.fence);
        }
        Ok(Attempt::Contended(_)) if node.store().info().capability.waiting == Waiting::Queue => {
            attempt.undo_at(rendezvous, true);
        }
        Err(error) if error.effect() == Effect::Unknown => attempt.undo_at(rendezvous, false),
        Ok(Attempt::Contended(_)) | Err(_) => {}
    }
    None
}
