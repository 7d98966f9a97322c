//! The steps from phase to phase, and the end (rules M14 to M16).

use std::time::Duration;

use tokio::time::sleep;

use super::{
    floor::{Fences, check_room, fences, floor, reached},
    migration::{Migration, State, in_both, not_started},
    pair::overtaken,
    phase::{Phase, Side},
    record::{PhaseRecord, drain},
    rules,
};
use crate::{Error, ErrorKind, Fence, Result};

/// How often a drain tells how long it will go on.
const TOLD_EVERY: Duration = Duration::from_secs(1);

/// A wait until nobody acts on the phase before any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drain {
    /// All of it.
    pub whole: Duration,
    /// What is left.
    pub left: Duration,
}

/// How a step went.
#[derive(Clone, Debug)]
pub struct Step {
    /// The record now.
    pub record: PhaseRecord,
    /// Whether the store that is not the home has it, too; if not, why. The step stands all the same: what it allows is allowed, and
    /// the next step brings it there.
    pub copied: Result<()>,
}

impl Migration {
    /// Goes to `goal`, by one step; nothing is done if it is the phase already. A step out of [`Phase::Both`] waits until nobody acts on the
    /// phase before any more, unless it leads back to that; `told` hears of that wait every second.
    ///
    /// # Errors
    /// `InvalidInput` if no single step leads there; `Unavailable` if another changed the phase meanwhile; `Unsupported` if the
    /// fences of a store can't go on where those of the other are; `Misconfigured` while clients that know nothing of the migration
    /// hold locks in a store of the phase, unless it goes on [despite them](Self::despite_others); else as [`settle`](Self::settle).
    ///
    /// # Cancellation
    /// The step may be taken.
    pub async fn step(&self, goal: Phase, mut told: impl FnMut(Drain)) -> Result<Step> {
        loop {
            if let Some(step) = self.step_back_at_once(goal).await? {
                return Ok(step);
            }
            let record = self.settle().await?;
            if record.phase == goal {
                return self.shadow_of(record, false).await;
            }
            let mut next = record.next(goal, Fence::NONE)?;
            self.check_others(&record).await?;
            if goal != Phase::Both {
                self.check_room(goal, self.next_floor(goal, &record).await?).await?;
                let have_both = self.is_settled(&record).await?;
                if !have_both {
                    continue;
                }
                // From here on, for both stores were seen to have the record (rule M14).
                self.pause(record.drain(), &mut told).await;
                let highest = self.next_floor(goal, &record).await?;
                self.check_room(goal, highest).await?;
                self.check_others(&record).await?;
                next = record.next(goal, highest)?;
                if !self.is_settled(&record).await? {
                    continue;
                }
            }
            return self.change(&record, next).await;
        }
    }

    /// The floor of the phase after this one (rule M17). On the way back there is no need of a higher one: all that was granted in both stores
    /// was carried into that one. But a home that may lose a change that it confirmed may have been in the other phase meanwhile.
    async fn next_floor(&self, goal: Phase, record: &PhaseRecord) -> Result<Fence> {
        if record.may_go(goal, record.home_is_durable) { Ok(record.floor) } else { floor(&self.pair, record).await }
    }

    async fn check_room(&self, goal: Phase, floor: Fence) -> Result<()> {
        for side in goal.sides() {
            check_room(&self.pair, *side, floor).await?;
        }
        Ok(())
    }

    /// The step from [`Phase::Both`] to where that came from, where it needs no drain (rule M16): not even the other store.
    async fn step_back_at_once(&self, goal: Phase) -> Result<Option<Step>> {
        let State { record, has } = self.state().await?;
        let home_has_it = matches!(has[record.home.index()], Ok(true));
        let is_back = record.phase == Phase::Both && goal != Phase::Both;
        if !is_back || !home_has_it || !record.may_go(goal, record.home_is_durable) {
            return Ok(None);
        }
        // A client that holds locks in the other store alone would be met by nobody. If that store is away, so is it.
        match self.check_others(&record).await {
            Err(error) if !error.is_retryable() => return Err(error),
            Ok(()) | Err(_) => {}
        }
        let next = record.next(goal, Fence::NONE)?;
        self.change(&record, next).await.map(Some)
    }

    /// Has clients ask the new store, too, in the phase [`Phase::Old`], or no more. Its answers decide nothing, so that it needs no drain;
    /// [`clients`](Self::clients) shows what they were. The step to [`Phase::Both`] ends it.
    ///
    /// # Errors
    /// `InvalidInput` in another phase; `Unavailable` if another changed the phase meanwhile; else as [`settle`](Self::settle).
    ///
    /// # Cancellation
    /// It may be done.
    pub async fn shadow(&self, is_shadowed: bool) -> Result<Step> {
        let record = self.settle().await?;
        if record.phase != Phase::Old {
            return Err(record.shadowed(is_shadowed).err().unwrap_or_else(overtaken));
        }
        self.shadow_of(record, is_shadowed).await
    }

    async fn shadow_of(&self, record: PhaseRecord, is_shadowed: bool) -> Result<Step> {
        if record.is_shadowed == is_shadowed {
            return Ok(Step { record, copied: Ok(()) });
        }
        self.change(&record, record.shadowed(is_shadowed)?).await
    }

    async fn change(&self, record: &PhaseRecord, next: PhaseRecord) -> Result<Step> {
        self.pair.change_home(Some(record), &next).await?;
        let copied = self.pair.lift(record.home.other(), &next).await;
        Ok(Step { record: next, copied })
    }

    /// Waits until no client acts on what it read before all stores had this end. The next migration must not begin before that: its drains may
    /// be shorter.
    pub(super) async fn wait_for_clients(&self, end: &PhaseRecord, told: &mut impl FnMut(Drain)) {
        self.pause(drain(Duration::ZERO, end.fresh), told).await;
    }

    /// Waits, and tells how long that goes on.
    async fn pause(&self, whole: Duration, told: &mut impl FnMut(Drain)) {
        let start = self.pair.now();
        loop {
            let left = whole.saturating_sub(self.pair.now().since(start));
            told(Drain { whole, left });
            if left.is_zero() {
                return;
            }
            sleep(left.min(TOLD_EVERY)).await;
        }
    }

    /// Whether the store of the phase, used by itself, gives fences above all that there have been; then its clients can do without
    /// the migration.
    ///
    /// # Errors
    /// As [`state`](Self::state); `InvalidInput` in the phase [`Phase::Both`]; as those of [`acquire`](crate::LockStore::acquire).
    pub async fn fences(&self) -> Result<Fences> {
        let record = self.state().await?.record;
        let Some(side) = Side::ALL.into_iter().find(|side| side.alone() == record.phase) else {
            return Err(in_both());
        };
        if record.floor == Fence::NONE { Ok(Fences::Higher) } else { fences(&self.pair, side, record.floor).await }
    }

    /// Ends the migration, in the phase [`Phase::Old`] or [`Phase::New`]: the records say that it is over. Clients of the migration get no locks from
    /// then on, so that all must use the store itself by now. It waits for a drain first, and once both stores have the end, until no client
    /// can act on what it read before that; `told` hears of both waits. An end that has not come to all nodes is brought there.
    ///
    /// # Errors
    /// `InvalidInput` in the phase [`Phase::Both`]; `Unavailable` while a client of the migration holds a lock, and while the store
    /// by itself gives lower [fences](Self::fences) than there were; else as [`settle`](Self::settle), for all nodes of a quorum.
    ///
    /// # Cancellation
    /// It may be over in one of the stores: this can be called again.
    pub async fn finish(&self, mut told: impl FnMut(Drain)) -> Result<()> {
        let found = self.records().await?;
        if rules::current(found.iter().flatten().cloned())?.is_none_or(|current| current.is_over) {
            return self.finish_again(found, &mut told).await;
        }
        let record = self.settle().await?;
        if record.phase == Phase::Both {
            return Err(in_both());
        }
        match self.fences().await? {
            Fences::Higher => {}
            _ if self.fences_are_set => {}
            Fences::HigherIn(time) => {
                let minutes = time.as_secs() / 60 + 1;
                let why = format!(
                    "used by itself, the {} store gives lower fences than there were, for {minutes} more minutes",
                    record.phase
                );
                return Err(Error::new(ErrorKind::Unavailable, why));
            }
            Fences::Lower => {
                let why = format!(
                    "used by itself, the {} store gives lower fences than there were: its clients need fence_above={}",
                    record.phase, record.floor
                );
                return Err(Error::new(ErrorKind::Unavailable, why));
            }
        }
        self.check_nobody_holds(&record).await?;
        self.pause(record.drain(), &mut told).await;
        self.check_nobody_holds(&record).await?;
        if !self.is_settled(&record).await? {
            return Err(overtaken());
        }
        // A node that keeps the record of a migration that is over would be in the way of the next one.
        for side in Side::ALL {
            self.pair.at_all_nodes(side).await?;
        }
        let end = PhaseRecord { floor: self.last_floor(&record).await?, ..record.ended()? };
        // After the very record that was drained, or not at all: somebody may have gone on from it.
        self.pair.change_home(Some(&record), &end).await?;
        self.spread_end(&end, &mut told).await
    }

    /// The floor that the next migration begins with. Fences may be above that of this one: the step back from both at once leaves the floor as it
    /// is, and what a log gave in both, or a clock that is ahead of all others.
    async fn last_floor(&self, record: &PhaseRecord) -> Result<Fence> {
        let follows_log = |side: &Side| self.pair.at(*side).info().capability.liveness.session.is_some();
        if Side::ALL.iter().any(follows_log) {
            return floor(&self.pair, record).await;
        }
        match reached(&self.pair).await {
            // Without what a floor is ahead: the next migration adds that.
            Ok((highest, _)) => Ok(record.floor.max(Fence::new(highest))),
            // There a person has set the fences.
            Err(error) if error.kind() == ErrorKind::Unsupported => Ok(record.floor),
            Err(error) => Err(error),
        }
    }

    /// Brings an end of this pair of stores where it has not come to.
    async fn finish_again(&self, ends: [Option<PhaseRecord>; 2], told: &mut impl FnMut(Drain)) -> Result<()> {
        for end in ends.iter().flatten().filter(|found| found.is_over) {
            let (old, new) =
                tokio::join!(self.pair.check_identity(Side::Old, end), self.pair.check_identity(Side::New, end));
            match old.and(new) {
                // That of another pair.
                Err(error) if error.kind() == ErrorKind::Misconfigured => {}
                Err(error) => return Err(error),
                Ok(()) => return self.spread_end(end, told).await,
            }
        }
        Err(not_started())
    }

    /// Makes both stores have the end of the migration, all their nodes included; the home last, which says then that the other is told.
    async fn spread_end(&self, end: &PhaseRecord, told: &mut impl FnMut(Drain)) -> Result<()> {
        if !end.is_told {
            self.pair.lift(end.home.other(), end).await?;
            self.wait_for_clients(end, told).await;
        }
        let end = end.told();
        for side in [end.home.other(), end.home] {
            self.pair.lift(side, &end).await?;
            let is_behind = |found: &PhaseRecord| found.is_of(&end) && found.epoch < end.epoch;
            if self.pair.at_all_nodes(side).await?.iter().flatten().any(is_behind) {
                let why = "a node has not been told that the migration is over: finish it once more";
                return Err(Error::new(ErrorKind::Unavailable, why));
            }
        }
        Ok(())
    }
}
