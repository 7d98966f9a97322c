//! Waiting: at one node, the same for all clients, and only then at all others.
//!
//! When a lock becomes free, a client that asks all nodes at once meets all others that do the same, and the votes split.
//! So waiters meet at a *rendezvous*: the first node, in an order that follows from the lock's name, at which the lock is
//! held. They wait there by that node's own means. One of them gets the lock there, and asks the other nodes while its
//! rivals still wait. A newcomer that asks all nodes directly has that one less to win.
//!
//! The rendezvous is no more than a place to meet: it decides nothing, and a client that has waited there for
//! [`SAFETY_POLL`] asks all nodes again.
//!
//! A refused round burns its token. So the wait comes first in the next call, which has a new one: the refusal has the caller
//! come back at once, and leaves a note where to wait.

use std::time::Duration;

use lockkit_core::{AcquireRequest, Attempt, Effect, Error, Fence, LockKey, Order, Waiting, store::Sent};
use tokio::time::timeout;

use crate::{
    client::quorum::Quorum,
    store::attempt::{OpenAttempt, proposal},
};

/// For how long to wait at the rendezvous at most. Longer than any hand-off, and short enough not to matter when that node
/// is lost.
const SAFETY_POLL: Duration = Duration::from_secs(1);

/// A wait that is over sooner, and in vain, is taken for none. Also how long to wait where no node lets anybody wait.
const SHORTEST_WAIT: Duration = Duration::from_millis(10);

impl Quorum {
    /// After how long to ask again after a refusal; notes where that call is to wait.
    pub(crate) fn meet_again(&self, key: &LockKey, held_at: &[usize]) -> Duration {
        match self.rendezvous(key, held_at) {
            Some(rendezvous) => {
                self.note_meeting(key, rendezvous);
                Duration::ZERO
            }
            None => self.ask_again(),
        }
    }

    /// After how long to ask again where nobody says when.
    fn ask_again(&self) -> Duration {
        self.retry_delay().max(SHORTEST_WAIT)
    }

    /// As [`meet_again`](Self::meet_again), after a wait of this length that was in vain. A node that refuses all waits at once, such
    /// as one whose user may not subscribe, is no place to meet at: the callers would ask for ever without a pause.
    pub(crate) fn meet_after(&self, waited: Duration, key: &LockKey, held_at: &[usize]) -> Duration {
        let again = self.meet_again(key, held_at);
        if waited < SHORTEST_WAIT { again.max(self.ask_again()) } else { again }
    }
}

impl OpenAttempt<'_> {
    /// Waits at the rendezvous; the fence that it granted, or `None` if it granted none in time.
    ///
    /// # Cancellation
    /// The wait is dropped, as any future of a store may be: the caller's release gives up the place in its queue.
    pub(crate) async fn wait_at(&mut self, rendezvous: usize, request: &AcquireRequest) -> Option<Fence> {
        let (node, clock) = (&self.quorum.nodes[rendezvous], &*self.quorum.config.clock);
        let wait = request.wait.min(SAFETY_POLL);
        let there = AcquireRequest { wait, order: Order::Any, fence: proposal(request), ..request.clone() };
        self.entry.asked(clock.now() + wait, request.ttl);
        // The node may stop answering in the middle, which must not keep its client from the others.
        let limit = wait + self.quorum.config.timeout_for(request.ttl);
        let answer = timeout(limit, node.acquire(&there, clock)).await.unwrap_or_else(|_| {
            node.note_slow(true);
            Err(Error::no_answer(limit, Sent::Yes))
        });
        match answer {
            Ok(Attempt::Granted(hold)) => {
                self.holds(rendezvous, true);
                return Some(hold.fence);
            }
            Ok(Attempt::Contended(contention)) if contention.burnt => self.entry.burnt.add(rendezvous),
            // It keeps a place in its queue.
            Ok(Attempt::Contended(_)) if node.store().info().capability.waiting == Waiting::Queue => {
                self.holds(rendezvous, true);
            }
            Err(error) if error.effect() == Effect::Unknown => self.holds(rendezvous, false),
            Ok(Attempt::Contended(_)) | Err(_) => {}
        }
        None
    }
}
