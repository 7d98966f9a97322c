//! The number above every fence that a phase has given (rules M7 and M17).

use std::{sync::Arc, time::Duration};

use super::{pair::Pair, phase::Side, record::PhaseRecord};
use crate::{
    Error, ErrorKind, Fence, HandOver, LockStore, Locker, Result, Token, clock::wall_clock, store::FENCE_ROOM,
};

/// How far a fence may be ahead of the clocks that are asked: an hour, in microseconds.
const AHEAD: u64 = 3_600_000_000;
/// How far the first fence of a new lock may be from the wall clock on a store whose fences follow a clock: a day.
const FAR: u64 = 24 * AHEAD;
/// By how much more than the first fence of a new lock those of others may have grown on a store whose fences follow its log: a
/// grant may own a thousand fences, and the log moves by 128 for it (ZooKeeper).
const LOG: u64 = 8;
/// What the names of locks for the migration's own use begin with.
pub(super) const OWN: &str = "lockkit/migration/";
/// The ttl of these locks. Stores wait for an answer for no longer than a part of it: with a short one, those on a slow network, or a
/// quorum on machines that stall for a moment, would never be asked in time.
const PROBE: Duration = Duration::from_secs(60);

/// What fences a store gives by itself, compared with all that there have been.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fences {
    /// Higher ones.
    Higher,
    /// Higher ones as soon as its clock has gone on for so long.
    HigherIn(Duration),
    /// Lower ones: its clients have to ask for higher ones ([`FenceAbove`](crate::FenceAbove)).
    Lower,
}

/// What fences a store gives by itself to locks that it has no counter of.
///
/// # Errors
/// As [`floor`].
pub(super) async fn fences(pair: &Pair, side: Side, floor: Fence) -> Result<Fences> {
    let found = follows(pair, side, wall_clock()).await?;
    Ok(match found {
        Follows::Clock(first) | Follows::Log(first) if first > floor.get() => Fences::Higher,
        Follows::Clock(first) => Fences::HigherIn(Duration::from_micros(floor.get() - first + 1)),
        Follows::Log(_) => Fences::Lower,
    })
}

/// What the first fence of a new lock shows of a store.
enum Follows {
    /// The store's clock, in microseconds.
    Clock(u64),
    /// The store's log.
    Log(u64),
}

/// A number above every fence that either store has given.
///
/// A fence is at most: what some clock or log said when a counter began, or a floor that was asked for before, and since then one
/// more for each microsecond, or for each entry of a log. It holds as long as no lock takes more than one fence in a microsecond, and
/// no clock that counters began at was set back by more than an hour since.
///
/// # Errors
/// `Unsupported` if the fences of a store follow neither a clock nor a log; as those of [`LockStore::acquire`].
pub(super) async fn floor(pair: &Pair, record: &PhaseRecord) -> Result<Fence> {
    let (highest, logs) = reached(pair).await?;
    let grown = logs.saturating_sub(record.logs).saturating_mul(LOG);
    Ok(Fence::new(highest.max(record.floor.get()).saturating_add(grown).saturating_add(AHEAD)))
}

/// The highest of what this machine's clock and the first fences of new locks show, and what the logs have reached that fences follow, of both
/// stores together.
///
/// # Errors
/// As [`floor`].
pub(super) async fn reached(pair: &Pair) -> Result<(u64, u64)> {
    let here = wall_clock();
    let (mut highest, mut logs) = (here, 0_u64);
    for side in Side::ALL {
        match follows(pair, side, here).await? {
            Follows::Clock(there) => highest = highest.max(there),
            Follows::Log(there) => {
                highest = highest.max(there);
                logs = logs.saturating_add(there);
            }
        }
    }
    Ok((highest, logs))
}

/// Refuses a floor above which a store could not grant for long.
///
/// # Errors
/// `Unsupported` if its fences end too soon; else as those of [`LockStore::acquire`].
pub(super) async fn check_room(pair: &Pair, side: Side, floor: Fence) -> Result<()> {
    let high = Fence::new(floor.get().saturating_add(FENCE_ROOM));
    probe(pair, side, "room", high).await.map(drop).map_err(|error| match error.kind() {
        ErrorKind::InvalidInput | ErrorKind::Unexpected => {
            let why = format!("{} can't grant fences above {floor} for long", pair.at(side).info().name);
            Error::new(ErrorKind::Unsupported, why).with_source(error)
        }
        _ => error,
    })
}

async fn follows(pair: &Pair, side: Side, here: u64) -> Result<Follows> {
    let first = probe(pair, side, "clock", Fence::NONE).await?.get();
    let info = pair.at(side).info();
    let liveness = &info.capability.liveness;
    // A log may come near the clock's number, and goes its own way from there.
    if first.abs_diff(here) < FAR && liveness.ttl.is_some() {
        Ok(Follows::Clock(first))
    } else if liveness.session.is_some() {
        Ok(Follows::Log(first))
    } else {
        let why = format!(
            "the fences of {} follow no clock, or one that is more than a day off: what they have reached can't be told",
            info.name
        );
        Err(Error::new(ErrorKind::Unsupported, why))
    }
}

/// The fence of a new lock, which is released at once.
///
/// Where leases end with the session, and names leave a trace for ever, it is one lock for each purpose. There a fence does not
/// depend on how often a lock was taken, and elsewhere what is left of a name goes by itself.
async fn probe(pair: &Pair, side: Side, purpose: &str, floor: Fence) -> Result<Fence> {
    let store = pair.at(side);
    let liveness = &store.info().capability.liveness;
    let unique = if liveness.session.is_some() { "probe".to_owned() } else { Token::random()?.reveal() };
    let ttl = liveness.ttl.as_ref().map_or(PROBE, |range| PROBE.clamp(*range.start(), *range.end()));
    // One that stays held would be in the way of whoever asks next: a locker sees to its release, also if this is dropped.
    let locker = Locker::shared_builder(Arc::clone(store)).hand_over(HandOver::OFF).build();
    let lock = locker.lock(format!("{OWN}{purpose}/{unique}")).ttl(ttl).no_renewal().fence_above(floor);
    let Some(guard) = lock.try_acquire().await? else {
        let why = "a lock for the migration's own use is held: somebody else moves it on, or too few nodes of a quorum are up";
        return Err(Error::new(ErrorKind::Unavailable, why));
    };
    let fence = guard.fence();
    guard.release().await.map(|_| fence)
}
