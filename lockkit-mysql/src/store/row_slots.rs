//! Slots at the rows of locks that many claims ask for at once.

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::Mutex,
};

use lockkit_core::{LockKey, Result, store::unpoisoned};
use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use crate::{
    client::{connection::Bound, pool::NEXT_LOOK},
    wire::error,
};

/// Slots at the rows of locks that are shared or have an order: for claims that have no place yet, and for those that leave. All their transactions meet
/// at a lock's row, so that it is of no use to have many there at once; and with all connections there, nobody could keep a place, look whose
/// turn it is, or renew a lease.
pub(crate) struct RowSlots {
    /// How many may be at one row at once: half of the common connections.
    most: usize,
    /// Each for some locks.
    rows: [Row; 64],
    hasher: RandomState,
}

#[derive(Default)]
struct Row {
    /// The deadlines of the slots that are taken. An acquisition that is not polled any more keeps its slot for no longer.
    deadlines: Mutex<Vec<Instant>>,
    ended: Notify,
}

/// A slot at the row of a lock. Dropping it gives it back.
pub(crate) struct RowSlot<'a> {
    row: &'a Row,
    deadline: Instant,
}

impl RowSlots {
    pub(crate) fn new(connections: usize) -> Self {
        let most = (connections / 2).max(1);
        Self { most, rows: std::array::from_fn(|_| Row::default()), hasher: RandomState::new() }
    }

    /// Waits for a slot, which is free again at the deadline.
    pub(crate) async fn slot(&self, key: &LockKey, bound: Bound) -> Result<RowSlot<'_>> {
        let at = usize::try_from(self.hasher.hash_one(key) % self.rows.len() as u64).unwrap_or_default();
        let row = &self.rows[at];
        loop {
            let now = Instant::now();
            {
                let mut deadlines = unpoisoned(&row.deadlines);
                deadlines.retain(|deadline| *deadline > now);
                if deadlines.len() < self.most {
                    deadlines.push(bound.at);
                    return Ok(RowSlot { row, deadline: bound.at });
                }
            }
            if now >= bound.at {
                return Err(error::busy(bound.whole));
            }
            // The word that a slot is free may go to an acquisition that is not polled.
            let _ = timeout_at(bound.at.min(now + NEXT_LOOK), row.ended.notified()).await;
        }
    }
}

impl Drop for RowSlot<'_> {
    fn drop(&mut self) {
        let mut deadlines = unpoisoned(&self.row.deadlines);
        if let Some(mine) = deadlines.iter().position(|deadline| *deadline == self.deadline) {
            deadlines.swap_remove(mine);
            self.row.ended.notify_one();
        }
    }
}
