//! What migrators and clients do in the model of the fences, by the code's decisions.

use lockkit_core::{
    Fence,
    migrate::{
        Phase::{self, Both, New, Old},
        PhaseRecord, Side, rules,
    },
};

use super::{Client, Fences, Floor, Migrator, Stage, State};
use crate::records::{Rec, first};

impl Fences {
    /// The number above every fence that the phase before has given.
    pub(super) fn find_floor(&self, state: &mut State, goal: Phase) -> Option<()> {
        let Migrator::Settled(record) = state.migrator else { return None };
        let other = opposite(goal)?;
        let may = match self.floor {
            Floor::Drained => !state.is_alive(other),
            Floor::Unread => !state.is_read(other),
            Floor::Early => true,
            Floor::Missing => false,
        };
        (may && record.phase == Both && state.records[0] == record && self.goes_on(record)).then_some(())?;
        let floor = state.counters[other.sides()[0].index()];
        state.migrator = Migrator::Found { record, floor, goal };
        Some(())
    }

    fn goes_on(&self, record: Rec) -> bool {
        self.changes.is_none_or(|most| record.epoch < most)
    }

    pub(super) fn go(&self, state: &mut State, to: Phase) -> Option<()> {
        let record = state.migrator.record()?;
        let is_drained = || opposite(to).is_some_and(|other| record.phase == Both && !state.is_alive(other));
        let with = match state.migrator {
            Migrator::Found { floor, goal, .. } if goal == to && is_drained() => floor,
            Migrator::Settled(_) if self.floor == Floor::Missing && is_drained() => 0,
            _ if code(record).may_go(to, self.durable_home) => 0,
            _ => return None,
        };
        if state.records[0] != record {
            state.migrator = Migrator::Idle;
            return Some(());
        }
        self.goes_on(record).then_some(())?;
        let next = code(record).next(to, Fence::new(with.into())).ok()?;
        state.records[0] = Rec::from(&next, 0);
        state.migrator = Migrator::Knows(state.records[0]);
        Some(())
    }

    pub(super) fn take(&self, state: &mut State, client: usize, side: Side, jumps: bool) -> Option<()> {
        let me = state.clients[client];
        let is_first = |phase: Phase| phase.sides()[0] == side;
        let floor = me.read.map_or(0, |(_, floor)| floor);
        let (floor, before) = match (me.stage, side) {
            (Stage::Idle, _) if self.asks_blindly || me.read.is_some_and(|(phase, _)| is_first(phase)) => {
                (floor, state.highest)
            }
            (Stage::HasOld, Side::New) if self.carries => (small(rules::floor_after(fence(me.fence))), me.before),
            (Stage::HasOld, Side::New) => (0, me.before),
            _ => return None,
        };
        let granted = state.grant(client, side, floor, jumps)?;
        let needs_raise = self.raises && rules::needs_raise(fence(me.fence), fence(granted));
        let stage = match (me.stage, side) {
            (Stage::HasOld, _) if needs_raise => Stage::Raises,
            (Stage::HasOld, _) => Stage::HasBoth,
            (_, Side::Old) => Stage::HasOld,
            (_, Side::New) => Stage::HasNew,
        };
        state.clients[client] = Client { stage, fence: granted, before, ..me };
        Some(())
    }

    pub(super) fn stand(&self, state: &mut State, client: usize, phase: Phase) -> Option<()> {
        let me = state.clients[client];
        let (read, floor) = me.read?;
        let record = code(Rec { phase: read, floor, ..Rec::FIRST });
        let is_new = match (me.stage, phase) {
            (Stage::HasOld, Old) | (Stage::HasBoth, Both) | (Stage::HasNew, New) => true,
            (Stage::Held(held), _) if held != phase && rules::added(held, phase).is_none() => false,
            _ => return None,
        };
        let granted = (is_new && self.checks_floor).then_some(fence(me.fence));
        rules::stands((record.phase, record.floor), phase, granted).then_some(())?;
        if is_new {
            state.went_back |= me.fence <= me.before;
            state.highest = state.highest.max(me.fence);
        }
        state.clients[client] = Client { stage: Stage::Held(phase), before: 0, ..me };
        Some(())
    }

    /// A renewal that adds a store; the lease keeps its fence.
    pub(super) fn take_along(&self, state: &mut State, client: usize, side: Side) -> Option<()> {
        let me = state.clients[client];
        let (Stage::Held(held), Some((phase, floor))) = (me.stage, me.read) else { return None };
        let goes_on = Side::ALL.into_iter().any(|side| rules::is_renewed(held, phase, side));
        let confirmed = code(Rec { phase, floor, ..Rec::FIRST });
        let stands = rules::stands((confirmed.phase, confirmed.floor), phase, None);
        (goes_on && stands && rules::added(held, phase) == Some(side)).then_some(())?;
        state.grant(client, side, if self.raises_added { me.fence } else { 0 }, false)?;
        state.clients[client].stage = Stage::Held(phase);
        Some(())
    }
}

impl State {
    /// Whether somebody may act on a phase still: a drain waits until nobody does.
    fn is_alive(&self, phase: Phase) -> bool {
        self.is_read(phase) || self.clients.iter().any(|client| client.stage == Stage::Held(phase))
    }

    fn is_read(&self, phase: Phase) -> bool {
        self.clients.iter().any(|client| client.read.is_some_and(|(read, _)| read == phase))
    }

    /// A store's answer: a fence above all that it gave, and above the floor.
    fn grant(&mut self, client: usize, side: Side, floor: u8, jumps: bool) -> Option<u8> {
        let is_taken = self.clients.iter().any(|client| client.stage.has(side));
        (!is_taken && !self.clients[client].stage.has(side)).then_some(())?;
        let top = || {
            let clients = self.clients.iter().flat_map(|client| [client.fence, client.before]);
            let floors = self.records.iter().map(|record| record.floor);
            clients.chain(floors).chain(self.counters).fold(self.highest, u8::max) + 3
        };
        let counter = &self.counters[side.index()];
        let granted = if jumps { top() } else { floor.max(*counter) + 1 };
        self.counters[side.index()] = granted;
        Some(granted)
    }
}

pub(super) fn code(record: Rec) -> PhaseRecord {
    record.of(&first(Side::Old, 1, 1))
}

/// The phase that must be over before this one.
fn opposite(goal: Phase) -> Option<Phase> {
    match goal {
        Old => Some(New),
        New => Some(Old),
        Both => None,
    }
}

fn fence(number: u8) -> Fence {
    Fence::new(number.into())
}

fn small(fence: Fence) -> u8 {
    u8::try_from(fence.get()).expect("ranks are small")
}
