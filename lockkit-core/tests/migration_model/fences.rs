//! Fences, without time: each lease may end at any moment, and "drained" is what the timed model proves: that no reading of the phase before,
//! and no lease that is believed in as of it, is left.
//!
//! Fences, floors and counters are ranks: a store may grant just above what it must exceed or, where `jumps` says so, above everything, as
//! a counter does that starts at a clock.

mod steps;

use lockkit_core::migrate::{
    Phase::{self, Both, New, Old},
    Side, rules,
};
use stateright::{Model, Property};

use self::steps::code;
use crate::records::{Rec, rank};

pub(crate) const CLIENTS: usize = 2;

/// The constants, and which safeguards are on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fences {
    /// How many changes of the record there are at most; `None`: any number.
    pub(crate) changes: Option<u8>,
    pub(crate) jumps: bool,
    /// The home may go back at once to where a Both came from.
    pub(crate) durable_home: bool,
    pub(crate) floor: Floor,
    /// The new store is asked for no less than the old one granted.
    pub(crate) carries: bool,
    /// The old store is raised to what the new one granted.
    pub(crate) raises: bool,
    /// A new grant must lie above the floor of the record that was checked.
    pub(crate) checks_floor: bool,
    /// A store that is added to a lease is asked for fences above its own. The record's floor would do.
    pub(crate) raises_added: bool,
    /// A client may ask a store without having read that its phase is on.
    pub(crate) asks_blindly: bool,
    pub(crate) is_symmetric: bool,
}

/// When a migrator finds the floor of the next phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Floor {
    /// After the drain, as the code does.
    Drained,
    /// When no reading of the phase before is left; leases may be.
    Unread,
    /// As soon as both stores have the record.
    Early,
    /// There is none.
    Missing,
}

impl Fences {
    pub(crate) const SOUND: Self = Self {
        changes: None,
        jumps: false,
        durable_home: false,
        floor: Floor::Drained,
        carries: true,
        raises: true,
        checks_floor: true,
        raises_added: true,
        asks_blindly: false,
        is_symmetric: true,
    };

    /// To switch a safeguard off.
    pub(crate) const NAMED: Self = Self { jumps: true, durable_home: true, is_symmetric: false, ..Self::SOUND };
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// The highest fence that each store has given, or was raised to.
    counters: [u8; 2],
    /// That of the home is the first.
    records: [Rec; 2],
    migrator: Migrator,
    /// The highest fence of all grants that were returned.
    highest: u8,
    clients: [Client; CLIENTS],
    /// A grant was returned whose fence is not above one that was returned before it was asked for.
    went_back: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Client {
    stage: Stage,
    /// What it last read of the record: the phase and the floor.
    read: Option<(Phase, u8)>,
    fence: u8,
    /// The highest fence that had been returned when it began to ask.
    before: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    Idle,
    /// It has the old store, or the new one.
    HasOld,
    HasNew,
    /// It has both, and the old one has to be raised.
    Raises,
    HasBoth,
    Held(Phase),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Migrator {
    Idle,
    Knows(Rec),
    /// Both stores were seen to have it.
    Settled(Rec),
    Found {
        record: Rec,
        floor: u8,
        goal: Phase,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    MigratorReads,
    MigratorCopies,
    MigratorCrashes,
    MigratorFindsTheFloorFor(Phase),
    MigratorGoes(Phase),
    /// What a client read is too old by now.
    Forgets(usize),
    Reads(usize, Side),
    /// A store grants: just above what it must exceed, or far above.
    Takes(usize, Side, bool),
    Raises(usize),
    /// The grant is returned, or the lease goes on as of that phase.
    Stands(usize, Phase),
    TakesAlong(usize, Side),
    Frees(usize),
}

impl Stage {
    fn has(self, side: Side) -> bool {
        match self {
            Self::Idle => false,
            Self::HasOld => side == Side::Old,
            Self::HasNew => side == Side::New,
            Self::Raises | Self::HasBoth => true,
            Self::Held(phase) => phase.uses(side),
        }
    }

    fn number(self) -> u8 {
        match self {
            Self::Idle => 0,
            Self::HasOld => 1,
            Self::HasNew => 2,
            Self::Raises => 3,
            Self::HasBoth => 4,
            Self::Held(phase) => 5 + phase as u8,
        }
    }
}

impl Migrator {
    fn record(self) -> Option<Rec> {
        match self {
            Self::Idle => None,
            Self::Knows(record) | Self::Settled(record) | Self::Found { record, .. } => Some(record),
        }
    }
}

impl Model for Fences {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client { stage: Stage::Idle, read: None, fence: 0, before: 0 };
        vec![State {
            counters: [0; 2],
            records: [Rec::FIRST; 2],
            migrator: Migrator::Idle,
            highest: 0,
            clients: [client; CLIENTS],
            went_back: false,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        match state.migrator {
            Migrator::Idle => actions.push(Action::MigratorReads),
            Migrator::Knows(_) => actions.push(Action::MigratorCopies),
            Migrator::Settled(_) | Migrator::Found { .. } => actions.push(Action::MigratorCrashes),
        }
        actions.extend([Old, New].map(Action::MigratorFindsTheFloorFor));
        actions.extend([Old, Both, New].map(Action::MigratorGoes));
        for client in 0..CLIENTS {
            actions.extend([Action::Forgets(client), Action::Raises(client), Action::Frees(client)]);
            actions.extend([Old, Both, New].map(|phase| Action::Stands(client, phase)));
            for side in Side::ALL {
                actions.extend([Action::Reads(client, side), Action::TakesAlong(client, side)]);
                actions.push(Action::Takes(client, side, false));
                if self.jumps {
                    actions.push(Action::Takes(client, side, true));
                }
            }
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::MigratorReads => {
                let all = state.records.map(code);
                state.migrator = Migrator::Knows(Rec::from(&rules::newest(all)?, 0));
            }
            Action::MigratorCopies => {
                let record = state.migrator.record()?;
                if rules::is_lifted(Some(&code(state.records[1])), &code(record)).ok()? {
                    state.records[1] = record;
                }
                state.migrator = Migrator::Settled(record);
            }
            Action::MigratorCrashes => state.migrator = Migrator::Idle,
            Action::MigratorFindsTheFloorFor(goal) => self.find_floor(&mut state, goal)?,
            Action::MigratorGoes(goal) => self.go(&mut state, goal)?,
            Action::Forgets(client) => state.clients[client].read = None,
            Action::Reads(client, side) => {
                let record = state.records[side.index()];
                state.clients[client].read = Some((record.phase, record.floor));
            }
            Action::Takes(client, side, jumps) => self.take(&mut state, client, side, jumps)?,
            Action::Raises(client) => {
                let me = &mut state.clients[client];
                (me.stage == Stage::Raises).then_some(())?;
                me.stage = Stage::HasBoth;
                state.counters[0] = state.counters[0].max(me.fence);
            }
            Action::Stands(client, phase) => self.stand(&mut state, client, phase)?,
            Action::TakesAlong(client, side) => self.take_along(&mut state, client, side)?,
            Action::Frees(client) => {
                let me = &mut state.clients[client];
                *me = Client { stage: Stage::Idle, fence: 0, before: 0, ..*me };
            }
        }
        self.normalize(&mut state);
        (state != *before).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn is_held(state: &State, phase: Phase) -> bool {
            state.clients.iter().any(|client| client.stage == Stage::Held(phase))
        }
        vec![
            Property::always("fences rise", |_, state: &State| !state.went_back),
            Property::sometimes("held as of Old", |_, state: &State| is_held(state, Old)),
            Property::sometimes("held as of Both", |_, state: &State| is_held(state, Both)),
            Property::sometimes("held as of New", |_, state: &State| is_held(state, New)),
        ]
    }
}

impl Fences {
    /// Gives states one form that differ in nothing that matters: numbers become ranks, with room above each.
    fn normalize(&self, state: &mut State) {
        let mut epochs: Vec<&mut u8> = Vec::with_capacity(3);
        let mut values: Vec<&mut u8> = state.counters.iter_mut().collect();
        values.push(&mut state.highest);
        for record in &mut state.records {
            epochs.push(&mut record.epoch);
            values.push(&mut record.floor);
        }
        match &mut state.migrator {
            Migrator::Idle => {}
            Migrator::Knows(record) | Migrator::Settled(record) => {
                epochs.push(&mut record.epoch);
                values.push(&mut record.floor);
            }
            Migrator::Found { record, floor, .. } => {
                epochs.push(&mut record.epoch);
                values.extend([&mut record.floor, floor]);
            }
        }
        for client in &mut state.clients {
            values.extend([&mut client.fence, &mut client.before]);
            values.extend(client.read.as_mut().map(|(_, floor)| floor));
        }
        let mut used: Vec<u8> = values.iter().map(|value| **value).collect();
        used.push(0);
        for value in values {
            *value = 2 * rank(&used, *value);
        }
        if self.changes.is_none() {
            let used: Vec<u8> = epochs.iter().map(|epoch| **epoch).collect();
            for epoch in epochs {
                *epoch = rank(&used, *epoch);
            }
        }
        if self.is_symmetric {
            let key = |client: &Client| {
                let read = client.read.map(|(phase, floor)| (phase as u8, floor));
                (client.stage.number(), read, client.fence, client.before)
            };
            state.clients.sort_unstable_by_key(key);
        }
    }
}
