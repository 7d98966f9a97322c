//! The decisions of the protocol that are neither the record's nor the phase's: pure, so that the model of it in
//! `tests/migration_model` makes the very same ones.

use std::time::Duration;

use super::{
    phase::{Phase, Side},
    record::PhaseRecord,
};
use crate::{Error, ErrorKind, Fence, Moment, Result};

/// Whether what was asked for at `sent` may still be acted on (rule M3).
#[must_use]
pub fn is_fresh(sent: Moment, now: Moment, fresh: Duration) -> bool {
    now.since(sent) < fresh
}

/// Whether a grant or a renewal as of `phase` stands by the phase and the floor that were confirmed after all answers (rule M3). `granted` is
/// the fence of a new grant, which must lie above that floor (rule M7); a lease that goes on keeps its own.
#[must_use]
pub fn stands(confirmed: (Phase, Fence), phase: Phase, granted: Option<Fence>) -> bool {
    let (now, floor) = confirmed;
    now == phase && granted.is_none_or(|fence| fence > floor)
}

/// Until when a client may believe in a lease that lasts until `ends` at its stores and rests on a check made `now` (rule M4). The client may
/// stand still after that check.
#[must_use]
pub fn deadline(ends: impl IntoIterator<Item = Moment>, now: Moment, max_ttl: Duration) -> Moment {
    ends.into_iter().fold(now + max_ttl, Moment::min)
}

/// Whether a renewal in `phase` of what is held as of `held` asks that store to renew. If it asks none, the lease is lost.
#[must_use]
pub fn is_renewed(held: Phase, phase: Phase, side: Side) -> bool {
    held.uses(side) && phase.uses(side)
}

/// The store that such a renewal adds (rule M10).
#[must_use]
pub fn added(held: Phase, phase: Phase) -> Option<Side> {
    phase.sides().iter().copied().find(|side| !held.uses(*side))
}

/// The floor with which the new store is asked after the old one granted `first` (rule M8): that very number will do, if the new store
/// has not given it yet.
#[must_use]
pub fn floor_after(first: Fence) -> Fence {
    Fence::new(first.get().saturating_sub(1))
}

/// Whether the old store has to be raised to what the new one granted (rule M8).
#[must_use]
pub fn needs_raise(first: Fence, second: Fence) -> bool {
    second != first
}

/// The newest of several records.
#[must_use]
pub fn newest(records: impl IntoIterator<Item = PhaseRecord>) -> Option<PhaseRecord> {
    records.into_iter().max_by_key(|record| record.epoch)
}

/// Of the records that stores or nodes have, that of the migration which is under way; if there is none, the end of the last one. The end of one
/// migration says that it is over also where it has not come to, and nothing of others.
///
/// # Errors
/// [`ErrorKind::Misconfigured`] if they are of two migrations that are under way; [`ErrorKind::Unexpected`] if two of one epoch differ.
pub fn current(found: impl IntoIterator<Item = PhaseRecord>) -> Result<Option<PhaseRecord>> {
    let mut latest: Vec<PhaseRecord> = Vec::new();
    for record in found {
        match latest.iter_mut().find(|known| known.is_of(&record)) {
            Some(known) if known.epoch < record.epoch => *known = record,
            Some(known) if known.epoch == record.epoch && *known != record => return Err(of_one_epoch()),
            Some(_) => {}
            None => latest.push(record),
        }
    }
    let (ended, mut under_way): (Vec<_>, Vec<_>) = latest.into_iter().partition(|record| record.is_over);
    if under_way.len() > 1 {
        let why = "the stores, or their nodes, have the records of two different migrations";
        return Err(Error::new(ErrorKind::Misconfigured, why));
    }
    Ok(under_way.pop().or_else(|| newest(ended)))
}

/// Whether a store that has `known` is to be given `record` (rule M2): only upwards. The end of another migration makes room for one that counts its
/// epochs from there, and needs no other end in its place.
///
/// # Errors
/// [`ErrorKind::Misconfigured`] if `known` is of another migration, which is not over or began later; [`ErrorKind::Unexpected`] if it is another
/// record of the same epoch.
pub fn is_lifted(known: Option<&PhaseRecord>, record: &PhaseRecord) -> Result<bool> {
    let Some(known) = known else { return Ok(true) };
    if !known.is_of(record) {
        return match known.is_over {
            true if record.is_over => Ok(false),
            true if known.epoch < record.epoch => Ok(true),
            _ => Err(Error::new(ErrorKind::Misconfigured, "the store has the record of another migration")),
        };
    }
    if known.epoch == record.epoch && known != record {
        return Err(of_one_epoch());
    }
    Ok(known.epoch < record.epoch)
}

fn of_one_epoch() -> Error {
    let why = "the stores have different records of one epoch: one of them was restored, or changed by hand";
    Error::new(ErrorKind::Unexpected, why)
}

/// Whether what a store has is that very record (rules M14 and M15), not one like it.
#[must_use]
pub fn is_copy(found: Option<&PhaseRecord>, record: &PhaseRecord) -> bool {
    found == Some(record)
}
