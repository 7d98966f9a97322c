//! Which leases are to be renewed, in what order and how many at a time.
//!
//! Each class of ttl has a lane of its own, and within it those in doubt another: leases whose server does not answer must
//! not take up the calls that others need, nor long ones those of short ones. In a lane the earliest deadline comes first.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use super::Lease;
use crate::{Moment, store::unpoisoned};

/// How many leases one call is about: few enough that its answer comes soon, and no fewer than Redis extends with one
/// script and MySQL with two statements.
pub(super) const BATCH: usize = 128;
/// How many calls of one lane are under way.
const AT_ONCE: usize = 8;

/// The leases of one `Locker` that wait for a call to the store.
#[derive(Debug, Default)]
pub(super) struct Lanes(Mutex<BTreeMap<LaneId, Lane>>);

/// Leases that share calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LaneId {
    /// The binary logarithm of the ttl.
    ttl: u32,
    in_doubt: bool,
}

#[derive(Debug, Default)]
struct Lane {
    /// By deadline, and by number among equals.
    waiting: BTreeMap<(Moment, u64), Arc<Lease>>,
    under_way: usize,
}

impl Lanes {
    pub(super) fn add(&self, leases: Vec<Arc<Lease>>) {
        let mut lanes = unpoisoned(&self.0);
        for lease in leases {
            let state = lease.state();
            let id = LaneId { ttl: lease.ttl.as_millis().max(1).ilog2(), in_doubt: !state.is_sure() };
            let key = (state.deadline(), lease.id);
            drop(state);
            lanes.entry(id).or_default().waiting.insert(key, lease);
        }
    }

    /// Takes out what is to be asked now.
    pub(super) fn take(&self) -> Vec<(LaneId, Vec<Arc<Lease>>)> {
        let mut lanes = unpoisoned(&self.0);
        let mut now = Vec::new();
        for (id, lane) in lanes.iter_mut() {
            while lane.under_way < AT_ONCE
                && let Some(batch) = lane.take()
            {
                lane.under_way += 1;
                now.push((*id, batch));
            }
        }
        now
    }

    /// The leases that a caller asks for after those that it has done. If there are none, the caller is no longer counted.
    pub(super) fn next(&self, id: LaneId) -> Option<Vec<Arc<Lease>>> {
        let mut lanes = unpoisoned(&self.0);
        let batch = lanes.get_mut(&id).and_then(Lane::take);
        if batch.is_none() {
            leave(&mut lanes, id);
        }
        batch
    }

    /// A call is no longer counted.
    pub(super) fn leave(&self, id: LaneId) {
        leave(&mut unpoisoned(&self.0), id);
    }
}

fn leave(lanes: &mut BTreeMap<LaneId, Lane>, id: LaneId) {
    if let Some(lane) = lanes.get_mut(&id) {
        lane.under_way -= 1;
        if lane.under_way == 0 && lane.waiting.is_empty() {
            lanes.remove(&id);
        }
    }
}

impl Lane {
    /// The most urgent leases that have not ended meanwhile.
    fn take(&mut self) -> Option<Vec<Arc<Lease>>> {
        let mut batch = Vec::new();
        while batch.len() < BATCH
            && let Some((_, lease)) = self.waiting.pop_first()
        {
            if lease.state().is_live() {
                batch.push(lease);
            }
        }
        (!batch.is_empty()).then_some(batch)
    }
}
