//! The migrators of the timed model, and the store that loses a record.
//!
//! A migrator may crash at any moment, and a new one knows nothing (rule M13). It may begin a step in more states than the code's does:
//! wherever the rules M14 to M16 allow it.

use lockkit_core::{
    Fence,
    migrate::{Phase, Side, rules},
};

use crate::{
    exclusion::{Action, Exclusion, State},
    records::{Rec, TICK, rank},
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Migrator {
    Idle,
    /// It has read both stores, and this is the newer record.
    Knows(Rec),
    /// It has made this the record of the home.
    Wrote(Rec),
    /// Both stores were seen to have it so many ticks ago.
    Drains(Rec, u8),
    /// After the drain both stores were seen to have it still.
    Drained(Rec),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Reads,
    /// It sees that both stores have the record, or else writes it anew to the home.
    Settles,
    /// It copies to the other store what it wrote to the home.
    Copies,
    ReadsAgain,
    /// It changes the record of the home.
    Goes(Phase),
    Crashes,
}

/// What the store may fall back to that loses a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Loss {
    Nothing,
    /// The record before the last one, which was written so many ticks ago.
    May(Rec, u8),
    Happened,
}

impl Migrator {
    fn record(&self) -> Option<Rec> {
        match *self {
            Self::Idle => None,
            Self::Knows(record) | Self::Wrote(record) | Self::Drains(record, _) | Self::Drained(record) => Some(record),
        }
    }

    fn record_mut(&mut self) -> Option<&mut Rec> {
        match self {
            Self::Idle => None,
            Self::Knows(record) | Self::Wrote(record) | Self::Drains(record, _) | Self::Drained(record) => Some(record),
        }
    }

    pub(crate) fn key(&self) -> impl Ord + use<> {
        let (stage, waited) = match *self {
            Self::Idle => (0_u8, 0),
            Self::Knows(_) => (1, 0),
            Self::Wrote(_) => (2, 0),
            Self::Drains(_, waited) => (3, waited),
            Self::Drained(_) => (4, 0),
        };
        let number = |phase: Phase| phase as u8;
        let record = |rec: Rec| (rec.epoch, number(rec.phase), number(rec.came_from), rec.stamp);
        (stage, waited, self.record().map(record))
    }
}

impl State {
    /// Makes the epochs ranks: what counts is their order, and whether they are one apart, which a lost record can make of two stores.
    pub(crate) fn rank_epochs(&mut self) {
        let mut all: Vec<&mut Rec> = self.records.iter_mut().collect();
        all.extend(self.migrators.iter_mut().filter_map(Migrator::record_mut));
        if let Loss::May(record, _) = &mut self.loss {
            all.push(record);
        }
        let used: Vec<u8> = all.iter().map(|record| record.epoch).collect();
        for record in all {
            record.epoch = rank(&used, record.epoch);
        }
    }
}

impl Exclusion {
    /// How many ticks a migrator waits.
    pub(crate) fn drain(&self) -> u8 {
        let whole = || self.first().drain().as_nanos().div_ceil(TICK.as_nanos());
        self.drain.unwrap_or_else(|| u8::try_from(whole()).expect("few ticks"))
    }

    fn home_of(&self, migrator: usize) -> Side {
        if migrator == 1 && !self.one_home { self.home.other() } else { self.home }
    }

    pub(crate) fn steps(&self, state: &State, actions: &mut Vec<Action>) {
        for (index, migrator) in state.migrators[..self.migrators].iter().enumerate() {
            let steps: &[Step] = match migrator {
                Migrator::Idle => &[Step::Reads],
                Migrator::Knows(_) => &[Step::Settles, Step::Crashes],
                Migrator::Wrote(_) => &[Step::Copies, Step::Crashes],
                Migrator::Drains(..) => &[Step::ReadsAgain, Step::Crashes],
                Migrator::Drained(_) => &[Step::Crashes],
            };
            actions.extend(steps.iter().map(|step| Action::Migrator(index, *step)));
            let goals = [Phase::Old, Phase::Both, Phase::New].into_iter().filter(|goal| self.may_go(migrator, *goal));
            actions.extend(goals.map(|goal| Action::Migrator(index, Step::Goes(goal))));
        }
    }

    /// Whether a migrator may change the record so, as far as it knows (rules M14 to M16).
    fn may_go(&self, migrator: &Migrator, goal: Phase) -> bool {
        let Some(record) = migrator.record() else { return false };
        let is_durable = self.loses != Some(self.home) || !self.durable_return;
        let is_a_leap = record.phase != Phase::Both && goal != Phase::Both;
        let is_drained = match migrator {
            Migrator::Drains(_, waited) => *waited >= self.drain() && !self.reads_again,
            Migrator::Drained(_) => true,
            _ => false,
        };
        record.of(&self.first()).may_go(goal, is_durable) || is_drained || is_a_leap
    }

    /// The record after a change to `goal`.
    fn next(&self, record: Rec, goal: Phase, stamp: u8) -> Option<Rec> {
        let record = record.of(&self.first());
        let next = record.next(goal, Fence::NONE);
        let next = if self.through_both || goal == record.phase {
            next
        } else {
            next.or_else(|_| record.next(Phase::Both, Fence::NONE)?.next(goal, Fence::NONE))
        };
        next.ok().map(|next| Rec::from(&next, stamp))
    }

    pub(crate) fn step(&self, state: &mut State, index: usize, step: Step) -> Option<()> {
        let (me, home) = (state.migrators[index], self.home_of(index));
        let stamp = u8::from(state.loss == Loss::Happened);
        state.migrators[index] = match (step, me) {
            (Step::Reads, _) => {
                let all = state.records.map(|record| record.of(&self.first()));
                let newest = if self.heals { rules::newest(all)? } else { all[home.index()].clone() };
                let known = state.records.into_iter().find(|record| record.of(&self.first()) == newest)?;
                Migrator::Knows(known)
            }
            (Step::Settles, Migrator::Knows(record)) => self.settle(state, home, record, stamp)?,
            (Step::Copies, Migrator::Wrote(record)) => {
                if self.lift(state, home.other(), record) {
                    Migrator::Knows(record)
                } else {
                    Migrator::Idle
                }
            }
            (Step::ReadsAgain, Migrator::Drains(record, waited)) if waited >= self.drain() => {
                let stands = !self.copies || Side::ALL.into_iter().all(|side| self.has(state, side, record));
                if stands { Migrator::Drained(record) } else { Migrator::Idle }
            }
            (Step::Goes(goal), _) => {
                let record = me.record()?;
                if self.compares && state.records[home.index()] != record {
                    Migrator::Idle
                } else {
                    let next = self.next(record, goal, stamp)?;
                    self.write(state, home, next);
                    Migrator::Wrote(next)
                }
            }
            (Step::Crashes, _) => Migrator::Idle,
            _ => return None,
        };
        Some(())
    }

    /// The wait begins, if both stores have the record; else it is written anew, so that a migrator that waits already sees it.
    fn settle(&self, state: &mut State, home: Side, record: Rec, stamp: u8) -> Option<Migrator> {
        let has = |side: Side| self.has(state, side, record);
        if has(home) && (has(home.other()) || !self.copies) {
            return Some(Migrator::Drains(record, 0));
        }
        let renewed =
            if self.renews_records { Rec::from(&record.of(&self.first()).renewed().ok()?, stamp) } else { record };
        let is_older = state.records[home.index()].epoch < record.epoch;
        if !self.compares || has(home) || is_older {
            self.write(state, home, renewed);
            return Some(Migrator::Wrote(renewed));
        }
        Some(Migrator::Idle)
    }

    fn has(&self, state: &State, side: Side, record: Rec) -> bool {
        let (found, first) = (state.records[side.index()], self.first());
        rules::is_copy(Some(&found.of(&first)), &record.of(&first)) || !self.exact && found.epoch > record.epoch
    }

    /// Makes a store have this record, or a newer one; no, if it has another one of that epoch.
    fn lift(&self, state: &mut State, side: Side, record: Rec) -> bool {
        let first = self.first();
        let is_lifted = rules::is_lifted(Some(&state.records[side.index()].of(&first)), &record.of(&first));
        if matches!(is_lifted, Ok(true)) || !self.compares {
            self.write(state, side, record);
        }
        is_lifted.is_ok() || !self.compares
    }

    fn write(&self, state: &mut State, side: Side, record: Rec) {
        let before = std::mem::replace(&mut state.records[side.index()], record);
        if self.loses == Some(side) && state.loss != Loss::Happened && before != record {
            state.loss = Loss::May(before, 0);
        }
    }

    pub(crate) fn lose(&self, state: &mut State) {
        if let (Some(side), Loss::May(before, _)) = (self.loses, state.loss) {
            state.records[side.index()] = before;
            state.loss = Loss::Happened;
        }
    }

    pub(crate) fn tick_migrators(&self, state: &mut State) {
        for migrator in &mut state.migrators {
            if let Migrator::Drains(_, waited) = migrator {
                *waited = self.drain().min(*waited + 1);
            }
        }
        if let Loss::May(before, age) = state.loss {
            state.loss = if age + 1 < self.drain() { Loss::May(before, age + 1) } else { Loss::Nothing };
        }
    }
}
