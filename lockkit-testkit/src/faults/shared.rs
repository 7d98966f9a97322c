//! What a proxy shares with its connections: what it was told to do to them.

use super::{
    answers::{Framing, Slip},
    trap::Trap,
};

use lockkit_core::store::unpoisoned;
use std::{fmt, net::SocketAddr, sync::Mutex, time::Duration};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

/// One direction of the traffic through a [`Proxy`](super::Proxy).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server: requests.
    ToServer,
    /// From the server to the client: replies.
    ToClient,
}

/// What is made of each piece that is sent in one direction.
type Rewrite = Box<dyn FnMut(Vec<u8>) -> Vec<u8> + Send>;

/// Up to which delay the time is kept exactly: beyond it, a millisecond matters to nobody.
const EXACT_UP_TO: Duration = Duration::from_millis(50);
/// How long before its time a timer is set that is to be in time on a machine which does something else, too.
const AHEAD: Duration = Duration::from_millis(2);
/// How late a thread wakes up that slept: 50 µs by Linux's timer slack, and a little.
const WAKE_UP: Duration = Duration::from_micros(100);

/// What a proxy shares with its connections.
pub(super) struct Shared {
    pub(super) upstream: SocketAddr,
    pub(super) framing: Mutex<Framing>,
    pub(super) rules: watch::Sender<Rules>,
    /// The connections since the last cut. Each has a receiver for as long as it lives, so that the channel counts
    /// them, tells them to end (by the value `true`), and knows when all have ended.
    pub(super) connections: Mutex<watch::Sender<bool>>,
    pub(super) trap: Mutex<Option<Trap>>,
    /// Indexed by [`Direction`].
    pub(super) rewrites: Mutex<[Option<Rewrite>; 2]>,
    /// How many bytes of what servers say may pass before the rest is held.
    pub(super) until_hold: Mutex<Option<usize>>,
    /// What is to happen to an answer, and to which, counted from 1; to none any more once that is 0.
    pub(super) slip: Mutex<Option<(Slip, usize)>>,
    pub(super) dropped: watch::Sender<bool>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rules {
    pub(super) refuse: bool,
    /// Indexed by [`Direction`].
    pub(super) lanes: [Lane; 2],
}

/// What is done to one direction.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Lane {
    pub(super) held: bool,
    pub(super) delay: Duration,
}

impl Shared {
    pub(super) fn new(upstream: SocketAddr) -> Self {
        Self {
            upstream,
            framing: Mutex::default(),
            rules: watch::Sender::default(),
            connections: Mutex::default(),
            trap: Mutex::default(),
            rewrites: Mutex::default(),
            until_hold: Mutex::default(),
            slip: Mutex::default(),
            dropped: watch::Sender::default(),
        }
    }

    /// Waits until what was read at `read_at` may be delivered.
    pub(super) async fn may_pass(&self, direction: Direction, read_at: Instant) {
        let mut rules = self.rules.subscribe();
        loop {
            let Lane { held, delay } = rules.borrow_and_update().lanes[direction as usize];
            if !held && read_at + delay <= Instant::now() {
                return;
            }
            // The rules can change at any time, so each wait is one for a change too. (Waiting for it can't fail, for
            // the sender is in `self`.)
            let left = (read_at + delay).saturating_duration_since(Instant::now());
            if held {
                let _ = rules.changed().await;
            } else if delay > EXACT_UP_TO {
                let _ = timeout_at(read_at + delay, rules.changed()).await;
            } else if left > AHEAD {
                let _ = timeout_at(read_at + delay - AHEAD, rules.changed()).await;
            } else {
                wait_exactly(left).await;
                // Not another look at the clock: tokio's may be paused, and would not have moved.
                if !rules.has_changed().unwrap_or_default() {
                    return;
                }
            }
        }
    }

    /// Whether the reply to this piece of what a client sends, after what it sent `before`, is the one to be lost.
    pub(super) fn trap_springs(&self, before: &mut Vec<u8>, bytes: &[u8]) -> bool {
        unpoisoned(&self.trap).as_mut().is_some_and(|trap| trap.springs(before, bytes))
    }

    /// What the other side is to read in place of these bytes.
    pub(super) fn rewritten(&self, direction: Direction, bytes: Vec<u8>) -> Vec<u8> {
        match unpoisoned(&self.rewrites)[direction as usize].as_mut() {
            Some(rewrite) => rewrite(bytes),
            None => bytes,
        }
    }

    /// How much of a piece of what a server says may pass. If not all, the rest is held from now on.
    pub(super) fn passes(&self, bytes: &[u8]) -> usize {
        let mut until_hold = unpoisoned(&self.until_hold);
        let Some(left) = until_hold.as_mut() else { return bytes.len() };
        if *left >= bytes.len() {
            *left -= bytes.len();
            return bytes.len();
        }
        let left = *left;
        *until_hold = None;
        self.rules.send_modify(|rules| rules.lanes[Direction::ToClient as usize].held = true);
        left
    }

    /// How answers end on a connection that is made now.
    pub(super) fn answers(&self) -> Framing {
        *unpoisoned(&self.framing)
    }

    /// What is to happen to an answer that begins now.
    pub(super) fn fate(&self, is_greeting: bool) -> Option<Slip> {
        let mut slip = unpoisoned(&self.slip);
        let counts = |slip: &Slip, countdown: usize| countdown > 0 && !(is_greeting && *slip == Slip::Twice);
        let (slip, countdown) = slip.as_mut().filter(|(slip, countdown)| counts(slip, *countdown))?;
        *countdown -= 1;
        (*countdown == 0).then_some(*slip)
    }

    /// Takes note of what became of the reply after the trap sprang.
    pub(super) fn reply_was_lost(&self, was_lost: bool) {
        if was_lost {
            self.dropped.send_replace(true);
        } else if let Some(trap) = unpoisoned(&self.trap).as_mut() {
            trap.set_again();
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("upstream", &self.upstream).finish_non_exhaustive()
    }
}

/// Tokio's timers count whole milliseconds, and go off up to one late. The rest of a short delay is left to a thread.
async fn wait_exactly(left: Duration) {
    let until = std::time::Instant::now() + left;
    let wait = move || {
        // A thread wakes up late, too.
        std::thread::sleep(left.saturating_sub(WAKE_UP));
        while std::time::Instant::now() < until {
            std::hint::spin_loop();
        }
    };
    // It fails only when the runtime ends, and all its connections with it.
    let _ = tokio::task::spawn_blocking(wait).await;
}
