//! A migration: its start, and what the stores say of it (rule M13). Nothing is kept between two calls but what the stores have: whoever calls may be
//! killed at any moment, and another goes on.

use std::{sync::Arc, time::Duration};

use super::{
    floor::{check_room, floor, reached},
    pair::{Pair, is_wrong},
    phase::{Phase, Side},
    record::{PhaseRecord, drain},
    rules,
};
use crate::{Error, ErrorKind, Fence, LockStore, Result, StoreInfo, Token, store::identity};

/// A migration, as those see it who move it on.
#[derive(Clone, Debug)]
pub struct Migration {
    pub(super) pair: Pair,
    pub(super) despite_others: bool,
    pub(super) fences_are_set: bool,
}

/// What a migration is started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// The longest ttl that any client uses; clients of the migration are refused longer ones. The longer it is, the longer
    /// each drain.
    pub max_ttl: Duration,
    /// For how long a client acts on what it read of the phase. Each client that is in use reads it so often; it is a part of each
    /// drain.
    pub fresh: Duration,
    /// Whether the home keeps what it confirmed, through crashes and fail-overs; it is taken to if its fences are
    /// [strict](crate::Fencing::Strict). If so, the step back from [`Phase::Both`] needs neither a drain nor the other store.
    pub home_is_durable: bool,
    /// Every grant lies above this: for a store whose fences were set above a number from outside. It must lie above every fence that
    /// store has given so far.
    pub fence_above: Fence,
}

impl Start {
    /// With these times; the home may lose what it confirmed, and no fences were set from outside.
    #[must_use]
    pub const fn new(max_ttl: Duration, fresh: Duration) -> Self {
        Self { max_ttl, fresh, home_is_durable: false, fence_above: Fence::NONE }
    }

    /// How long each drain takes with these settings, as [`PhaseRecord::drain`] has it.
    #[must_use]
    pub fn drain(&self) -> Duration {
        drain(self.max_ttl, self.fresh)
    }
}

impl Default for Start {
    /// 30 s, the default ttl of a lock, and 10 s; a home that may lose what it confirmed.
    fn default() -> Self {
        Self::new(Duration::from_secs(30), Duration::from_secs(10))
    }
}

/// What the stores say of a migration.
#[derive(Clone, Debug)]
pub struct State {
    /// The newer of the two records.
    pub record: PhaseRecord,
    /// Whether the old store and the new one have this very record; an error if a store could not be asked.
    pub has: [Result<bool>; 2],
}

impl Migration {
    /// A migration from `old` to `new`. No I/O.
    #[must_use]
    pub fn new(old: Arc<dyn LockStore>, new: Arc<dyn LockStore>) -> Self {
        Self { pair: Pair::new(old, new), despite_others: false, fences_are_set: false }
    }

    /// Takes steps although clients that know nothing of the migration hold locks: two can hold a lock at once then.
    #[must_use]
    pub fn despite_others(mut self) -> Self {
        self.despite_others = true;
        self
    }

    /// [Finishes](Self::finish) although the store that is left would by itself give lower fences than there have been: all its
    /// clients are told to ask for higher ones ([`FenceAbove`](crate::FenceAbove)).
    #[must_use]
    pub fn fences_are_set(mut self) -> Self {
        self.fences_are_set = true;
        self
    }

    /// Starts it, in [`Phase::Old`]. From then on clients can [connect](super::Dual::connect). If it is started already, with the
    /// same settings, this does nothing.
    ///
    /// # Errors
    /// `InvalidInput` if both stores are one, or the settings suit neither; `Unsupported` if neither store can be the home, or the
    /// fences of one end too soon; `Misconfigured` if another migration is under way in one of the stores, or the end of the last one has not
    /// come to all nodes; else as those of [`Records`](crate::store::Records).
    ///
    /// # Cancellation
    /// It may be started.
    pub async fn start(&self, start: Start) -> Result<PhaseRecord> {
        let wanted = self.first(start).await?;
        let found = self.records().await?;
        let known = rules::current(found.iter().flatten().cloned())?;
        if let Some(known) = known.as_ref().filter(|known| !known.is_over) {
            let settings = |of: &PhaseRecord| (of.stores, of.home_is_durable, of.max_ttl, of.fresh);
            let is_same = settings(known) == settings(&wanted);
            if !is_same {
                let why = "a migration is under way already, between other stores or with other settings";
                return Err(Error::new(ErrorKind::Misconfigured, why));
            }
            if wanted.floor > known.floor {
                // Fences may have been given above what its record says, and it can't be told of which locks.
                let why = "a migration is under way already, which was started without that number of fences: finish it, and start anew";
                return Err(Error::new(ErrorKind::Misconfigured, why));
            }
            return self.settle().await;
        }
        let ends: Vec<_> = found.iter().flatten().collect();
        let wanted = self.after(&ends, wanted, start).await?;
        let highest = floor(&self.pair, &wanted).await?;
        for side in Side::ALL {
            check_room(&self.pair, side, highest).await?;
        }
        self.pair.change_home(found[wanted.home.index()].as_ref(), &wanted).await?;
        let other = wanted.home.other();
        match self.pair.lift(other, &wanted).await {
            Ok(()) => Ok(wanted),
            Err(error) => {
                // Of a quorum some nodes may have it.
                if error.kind() == ErrorKind::Misconfigured && self.pair.can_be_home(other) {
                    drop(self.withdraw(&wanted).await);
                }
                Err(error)
            }
        }
    }

    /// Ends a migration that has come to its home alone, because the other store is in another one: perhaps in one that somebody has just started
    /// the other way round. As long as both stores had such records, neither migration could go on, or be finished.
    async fn withdraw(&self, started: &PhaseRecord) -> Result<()> {
        let end = started.ended()?;
        self.pair.change_home(Some(started), &end).await?;
        self.wait_for_clients(&end, &mut |_| ()).await;
        self.pair.lift(end.home, &end.told()).await
    }

    /// The first record of a migration, which goes on from the ends of those before, in epochs and in fences. In a store that was given up there may
    /// be locks whose next fences are no higher than what a migration raised them to.
    async fn after(&self, ends: &[&PhaseRecord], wanted: PhaseRecord, start: Start) -> Result<PhaseRecord> {
        let mut is_finished = ends.iter().all(|end| end.is_told);
        for side in Side::ALL {
            is_finished &= self.pair.at_all_nodes(side).await?.iter().flatten().all(|found| found.is_over);
        }
        if !is_finished {
            let why = "the last migration is not finished at all nodes: finish it, with its own two URLs";
            return Err(Error::new(ErrorKind::Misconfigured, why));
        }
        let had = |side: &Side| ends.iter().any(|end| end.stores.contains(&wanted.stores[side.index()]));
        let follows_log = |side: &Side| self.pair.at(*side).info().capability.liveness.session.is_some();
        let is_of_these = |end: &PhaseRecord| wanted.stores.iter().all(|store| end.stores.contains(store));
        // Fences that follow a log may have been raised above it in a migration, and have grown with it since that started.
        let logs = match ends.iter().map(|end| end.logs).min() {
            Some(logs) if ends.iter().all(|end| is_of_these(end)) => logs,
            Some(_) if Side::ALL.iter().any(|side| had(side) && follows_log(side)) => 0,
            // If fences were set above a number, the logs may have grown by anything since.
            _ if start.fence_above != Fence::NONE => 0,
            _ => reached(&self.pair).await?.1,
        };
        let epoch = ends.iter().map(|end| end.epoch).max().unwrap_or(0) + 1;
        let floor = ends.iter().map(|end| end.floor).fold(wanted.floor, Fence::max);
        Ok(PhaseRecord { epoch, floor, logs, ..wanted })
    }

    /// The record that it starts with.
    async fn first(&self, start: Start) -> Result<PhaseRecord> {
        let invalid = |why: String| Err(Error::invalid(why));
        // Whole milliseconds, as the record has them.
        let [max_ttl, fresh] = [start.max_ttl, start.fresh]
            .map(|time| Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)));
        if fresh < Duration::from_millis(100) || fresh > Duration::from_secs(600) {
            return invalid(format!("the phase must be read anew every 100 ms to 10 minutes, not {fresh:?}"));
        }
        if max_ttl < StoreInfo::SHORTEST_TTL {
            return invalid(format!("the longest ttl is at least 100 ms, not {max_ttl:?}"));
        }
        for side in Side::ALL {
            let info = self.pair.at(side).info();
            if let Some(range) = info.capability.liveness.ttl.as_ref().filter(|range| !range.contains(&max_ttl)) {
                let (least, most) = (range.start(), range.end());
                return invalid(format!("{} takes ttls from {least:?} to {most:?}, not {max_ttl:?}", info.name));
            }
        }
        let stores = [identity(&**self.pair.at(Side::Old)).await?, identity(&**self.pair.at(Side::New)).await?];
        if stores[0] == stores[1] {
            return invalid("the old store and the new one are one and the same".to_owned());
        }
        let home = self.home()?;
        Ok(PhaseRecord {
            id: Token::random()?,
            stores,
            home,
            home_is_durable: start.home_is_durable || self.pair.is_durable(home),
            max_ttl,
            fresh,
            epoch: 1,
            phase: Phase::Old,
            is_over: false,
            is_told: false,
            is_shadowed: false,
            came_from: Phase::Old,
            floor: start.fence_above,
            logs: 0,
            stamp: Token::random()?,
        })
    }

    /// The store in which each change is made first: one that keeps what it confirmed, if there is one, and rather the old one.
    ///
    /// # Errors
    /// `Unsupported` if neither can be: a quorum can't change its record in one step.
    pub fn home(&self) -> Result<Side> {
        let can = |side: &Side| self.pair.can_be_home(*side);
        let safe = Side::ALL.into_iter().filter(can).find(|side| self.pair.is_durable(*side));
        safe.or_else(|| Side::ALL.into_iter().find(can)).ok_or_else(|| {
            let why = "a quorum can't be the home of a migration, and both stores are quorums";
            Error::new(ErrorKind::Unsupported, why)
        })
    }

    /// What the stores say. Changes nothing.
    ///
    /// # Errors
    /// `Misconfigured` if there is no migration; as those of [`Records`](crate::store::Records) if neither store answers.
    pub async fn state(&self) -> Result<State> {
        let (old, new) = tokio::join!(self.pair.read_all(Side::Old), self.pair.read_all(Side::New));
        let records = [old, new];
        // That a store is the wrong one is said before anything else; one that is away is shown as such.
        if let Some(error) = records.iter().filter_map(|found| found.as_ref().err()).find(|error| is_wrong(error)) {
            return Err(error.clone());
        }
        let current = rules::current(records.iter().flatten().flatten().cloned())?;
        let Some(record) = current.filter(|record| !record.is_over) else {
            return Err(records.into_iter().find_map(Result::err).unwrap_or_else(not_started));
        };
        for (side, found) in Side::ALL.into_iter().zip(&records) {
            // The wrong store, if it has no record and is another one.
            if matches!(found, Ok(found) if found.as_ref().is_none_or(|found| !found.is_of(&record)))
                && let Err(error) = self.pair.check_identity(side, &record).await
                && error.kind() == ErrorKind::Misconfigured
            {
                return Err(error);
            }
        }
        let has = records.map(|found| Ok(found?.as_ref() == Some(&record)));
        Ok(State { record, has })
    }

    /// Makes both stores have the newer of their records (rule M13), the home first. Where one lacks it, both get a new record of that
    /// phase: a migrator that waits for a drain must notice that a store did not have its record all the time.
    ///
    /// # Errors
    /// As [`state`](Self::state), for either store; `Unexpected` if they have different records of one epoch; `Unavailable` if
    /// another changed the record meanwhile.
    pub async fn settle(&self) -> Result<PhaseRecord> {
        let found = self.records().await?;
        let current = rules::current(found.iter().flatten().cloned())?;
        let record = current.filter(|record| !record.is_over).ok_or_else(not_started)?;
        // A node of a quorum may have missed the last changes. With another one that loses its data, it would be a majority. It is not
        // brought this very record: another migrator that waits for a drain would not notice that it lacked it.
        if self.is_settled(&record).await? && self.pair.is_nowhere_behind(record.home.other(), &record).await? {
            return Ok(record);
        }
        let renewed = self.renewed(&record, &found)?;
        for (side, known) in Side::ALL.into_iter().zip(&found) {
            let is_of_this = known.as_ref().is_some_and(|known| known.is_of(&record));
            rules::is_lifted(known.as_ref(), if is_of_this { &record } else { &renewed })?;
            if !is_of_this {
                self.pair.check_identity(side, &record).await?;
            }
        }
        self.pair.change_home(found[record.home.index()].as_ref(), &renewed).await?;
        self.pair.lift(record.home.other(), &renewed).await?;
        Ok(renewed)
    }

    /// The record with which this one is renewed. A start that stopped between its two stores is gone on with also if the other store was in
    /// another migration meanwhile, from the end of which it goes on.
    fn renewed(&self, record: &PhaseRecord, found: &[Option<PhaseRecord>; 2]) -> Result<PhaseRecord> {
        let [home, other] = [record.home, record.home.other()].map(|side| found[side.index()].as_ref());
        let is_home = home.is_some_and(|home| home.is_of(record));
        let end = other.filter(|other| is_home && other.is_over && other.is_told && !other.is_of(record));
        let (epoch, floor) = end.map_or((0, Fence::NONE), |end| (end.epoch, end.floor));
        PhaseRecord { epoch: record.epoch.max(epoch), floor: record.floor.max(floor), ..record.clone() }.renewed()
    }

    /// What each store has; both must answer.
    pub(super) async fn records(&self) -> Result<[Option<PhaseRecord>; 2]> {
        let (old, new) = tokio::join!(self.pair.read_all(Side::Old), self.pair.read_all(Side::New));
        Ok([old?, new?])
    }

    /// Whether both stores still have this very record (rule M15).
    pub(super) async fn is_settled(&self, record: &PhaseRecord) -> Result<bool> {
        let (old, new) = tokio::join!(self.pair.has(Side::Old, record), self.pair.has(Side::New, record));
        Ok(old? && new?)
    }
}

pub(super) fn not_started() -> Error {
    let why = "there is no migration between these stores; start one with: lockkit migrate start";
    Error::new(ErrorKind::Misconfigured, why)
}

pub(super) fn in_both() -> Error {
    Error::invalid("the locks are in both stores: go on to one of them first")
}
