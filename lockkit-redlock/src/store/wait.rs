//! Waiting: at one node, the same for all who wait, and only then at all others.
//!
//! When a lock becomes free, whoever asks all nodes at once meets everyone else who does the same, and the votes split.
//! So those who wait queue up at a *door*: the first node, in an order that follows from the lock's name, at which the
//! lock is held. They wait there by that node's own means. One of them gets it there, and asks the others while its
//! rivals still wait at the door. A newcomer that asks all nodes directly has that one less to win.
//!
//! The door is no more than a place to meet: it decides nothing, and whoever finds it shut for [`SAFETY_POLL`] asks all
//! nodes again.

use std::{pin::pin, sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Effect, Fence, FenceRequest, LockStore, Order, Waiting};

use crate::{client::quorum::Quorum, store::attempt::Pursuit};

/// For how long to wait at the door at most. Longer than any hand-off, short enough not to matter when the door is lost.
const SAFETY_POLL: Duration = Duration::from_secs(1);

/// Waits at the door; the fence that it granted, or `None` if it did not open in time.
///
/// # Cancellation
/// The wait is dropped, as any future of a store may be: the caller's release gives up the place at the door.
pub(crate) async fn wait_at(
    pursuit: &mut Pursuit<'_>,
    quorum: &Arc<Quorum>,
    door: usize,
    request: &AcquireRequest,
    fence: FenceRequest,
    wait: Duration,
) -> Option<Fence> {
    let (node, clock) = (&quorum.nodes[door], &*quorum.info.clock);
    let wait = wait.min(SAFETY_POLL);
    let at_door = AcquireRequest { wait, order: Order::Any, fence, ..request.clone() };
    pursuit.entry().asked(clock.now() + wait, request.ttl);
    let mut opened = pin!(node.acquire(&at_door, clock));
    let answer = loop {
        tokio::select! {
            biased;
            // What the round before left is undone meanwhile.
            Some(()) = pursuit.undone() => {}
            answer = &mut opened => break answer,
        }
    };
    match answer {
        Ok(Attempt::Granted(hold)) => {
            pursuit.holds(door, true);
            return Some(hold.fence);
        }
        Ok(Attempt::Contended(_)) if node.store().info().capability.waiting == Waiting::Queue => {
            pursuit.undo_at(door, true);
        }
        Err(error) if error.effect() == Effect::Unknown => pursuit.undo_at(door, false),
        Ok(Attempt::Contended(_)) | Err(_) => {}
    }
    None
}
