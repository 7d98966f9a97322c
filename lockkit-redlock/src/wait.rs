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

use lockkit_core::{AcquireRequest, Attempt, Effect, Fence, FenceRequest, LockKey, LockStore, Order, Token, Waiting};

use crate::{attempt::Pursuit, store::Quorum};

/// For how long to wait at the door at most. Longer than any hand-off, short enough not to matter when the door is lost.
const SAFETY_POLL: Duration = Duration::from_secs(1);

impl Quorum {
    /// The nodes in the order in which the lock's waiters prefer them.
    fn doors(&self, key: &LockKey) -> impl Iterator<Item = usize> {
        let nodes = self.nodes.len();
        let first = key.as_str().bytes().fold(0_usize, |sum, byte| (sum * 31 + usize::from(byte)) % nodes);
        (first..nodes).chain(0..first).filter(|node| can_wake(self.nodes[*node].store().info().capability.waiting))
    }

    /// The node whose answer decides where to wait.
    pub(crate) fn leader(&self, key: &LockKey) -> Option<usize> {
        self.doors(key).find(|node| !self.nodes[*node].is_slow())
    }

    /// Where to wait, given the nodes at which the lock is held.
    pub(crate) fn door(&self, key: &LockKey, held_at: &[usize]) -> Option<usize> {
        self.doors(key).find(|node| held_at.contains(node))
    }

    /// How long to stay away after a lost race: at random, at least as long as it takes to lock a majority and on
    /// average 2.5 times that, so that of several losers one is likely to be done before the next begins.
    pub(crate) fn retry_delay(&self) -> Duration {
        let lock_time = self.stats.lock_time().clamp(Duration::from_micros(200), Duration::from_millis(100));
        let random = Token::random().map_or(128, |token| token.as_bytes()[0]);
        lock_time + lock_time * 3 * u32::from(random) / 255
    }
}

pub(crate) fn can_wake(waiting: Waiting) -> bool {
    matches!(waiting, Waiting::Notify | Waiting::Queue)
}

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
