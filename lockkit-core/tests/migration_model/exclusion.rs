//! Exclusion, in time: leases, beliefs, the ages of what was read, and the drain, in ticks.
//!
//! Nobody is ever forced to act, so that each client and each migrator may be frozen or gone at any moment, and each message may
//! take any time. A client takes, renews and frees leases as it likes, and may use any reading of either store that is not too old,
//! in any order: it may do more than the code's client, which keeps one. What it may *believe* is the code's decision.

use lockkit_core::{
    Moment,
    migrate::{Phase, PhaseRecord, Side, rules},
};
use stateright::{Model, Property};

use crate::{
    migrators::{Loss, Migrator},
    records::{Rec, TICK, first},
};

pub(crate) const CLIENTS: usize = 3;
pub(crate) const MIGRATORS: usize = 2;
const PHASES: [Phase; 3] = [Phase::Old, Phase::Both, Phase::New];

/// The constants, and which safeguards are on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Exclusion {
    pub(crate) clients: usize,
    pub(crate) migrators: usize,
    pub(crate) home: Side,
    /// The longest ttl, and for how long a reading may be acted on.
    pub(crate) max_ttl: u8,
    pub(crate) fresh: u8,
    /// How long a store's answer is good for; at a store with sessions it may be longer than any ttl.
    pub(crate) answer: u8,
    /// A store that may lose its last write of the record, once, as long as a drain has not passed since.
    pub(crate) loses: Option<Side>,
    /// How long a migrator waits; else as long as the code's record says.
    pub(crate) drain: Option<u8>,
    /// A drain begins when both stores have the record; off: when the home has it.
    pub(crate) copies: bool,
    /// Records change by compare-and-set; off: they are overwritten.
    pub(crate) compares: bool,
    /// All migrators write the same store first; off: the second one the other.
    pub(crate) one_home: bool,
    /// Off: there is a step from Old to New and back.
    pub(crate) through_both: bool,
    /// A step back without a drain needs a home that loses nothing; off: it is always allowed.
    pub(crate) durable_return: bool,
    /// Both stores are read again after the drain.
    pub(crate) reads_again: bool,
    /// A migrator starts from the newer of both records; off: from that of the home.
    pub(crate) heals: bool,
    /// A drain counts if both stores have the very record; off: a newer one will do.
    pub(crate) exact: bool,
    /// Where a store lacks the record, it is written anew; off: the same one is copied once more.
    pub(crate) renews_records: bool,
    pub(crate) check: Check,
    /// The belief ends after the longest ttl, whatever the stores say.
    pub(crate) caps: bool,
    /// In Both, both stores are renewed; off: the old one.
    pub(crate) renews_both: bool,
    /// Clocks count while a machine is suspended; off: they may stand still between a reading and its use.
    pub(crate) clocks_run: bool,
    /// The first client knows of no migration.
    pub(crate) plain_client: bool,
    /// Clients that differ by their names alone are one state; off, so that a counterexample can be followed.
    pub(crate) is_symmetric: bool,
}

/// When a client looks whether what it read of the record is fresh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// After the stores' answers.
    After,
    /// Before it asks them.
    Before,
    /// At grants, not at renewals.
    AtGrants,
    /// Not at all: what was read last counts for ever.
    Never,
}

impl Exclusion {
    pub(crate) const SOUND: Self = Self {
        clients: 2,
        migrators: 1,
        home: Side::Old,
        max_ttl: 2,
        fresh: 1,
        answer: 2,
        loses: None,
        drain: None,
        copies: true,
        compares: true,
        one_home: true,
        through_both: true,
        durable_return: true,
        reads_again: true,
        heals: true,
        exact: true,
        renews_records: true,
        check: Check::After,
        caps: true,
        renews_both: true,
        clocks_run: true,
        plain_client: false,
        is_symmetric: true,
    };

    pub(crate) fn first(&self) -> PhaseRecord {
        first(self.home, self.max_ttl, self.fresh)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// What each store says, by [`Side::index`].
    pub(crate) records: [Rec; 2],
    pub(crate) migrators: [Migrator; MIGRATORS],
    pub(crate) loss: Loss,
    pub(crate) clients: [Client; CLIENTS],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Client {
    /// For how many ticks its lease at each store lasts by the store's last answer; 0: it has none.
    leases: [u8; 2],
    /// As what it acts, and for how many ticks still.
    pub(crate) belief: Option<(Phase, u8)>,
    /// How long ago the last reading that showed each phase was asked for; `fresh`: so long or longer.
    ages: [u8; 3],
    /// What a client goes by that does not check after the answers.
    checked: Option<Phase>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Tick,
    /// A tick during which a client's clock stands still.
    TickWithout(usize),
    Migrator(usize, crate::migrators::Step),
    StoreLosesItsLastRecord,
    /// A client reads the record at a store.
    Reads(usize, Side),
    /// It takes or renews a lease.
    Asks(usize, Side),
    Frees(usize, Side),
    /// Only if it checks before it asks.
    Checks(usize, Phase),
    /// A grant or a renewal stands as of that phase.
    Believes(usize, Phase),
}

impl Action {
    pub(crate) fn is_of_clients(&self) -> bool {
        !matches!(self, Self::Migrator(..) | Self::StoreLosesItsLastRecord)
    }
}

impl Model for Exclusion {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        let client = Client { leases: [0; 2], belief: None, ages: [self.fresh; 3], checked: None };
        vec![State {
            records: [Rec::FIRST; 2],
            migrators: [Migrator::Idle; MIGRATORS],
            loss: Loss::Nothing,
            clients: [client; CLIENTS],
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        actions.push(Action::Tick);
        if !self.clocks_run {
            actions.extend((0..self.clients).map(Action::TickWithout));
        }
        self.steps(state, actions);
        if matches!(state.loss, Loss::May(..)) {
            actions.push(Action::StoreLosesItsLastRecord);
        }
        for client in 0..self.clients {
            for side in Side::ALL {
                actions.extend([Action::Reads(client, side), Action::Asks(client, side), Action::Frees(client, side)]);
            }
            for phase in PHASES {
                actions.push(Action::Believes(client, phase));
                if self.check == Check::Before {
                    actions.push(Action::Checks(client, phase));
                }
            }
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::Tick => self.tick(&mut state, None),
            Action::TickWithout(client) => self.tick(&mut state, Some(client)),
            Action::Migrator(migrator, step) => self.step(&mut state, migrator, step)?,
            Action::StoreLosesItsLastRecord => self.lose(&mut state),
            Action::Reads(client, side) => {
                let phase = state.records[side.index()].phase;
                let me = &mut state.clients[client];
                me.ages[phase as usize] = 0;
                if self.check == Check::Never {
                    me.checked = Some(phase);
                }
            }
            Action::Asks(client, side) => {
                let is_mine = state.clients[client].leases[side.index()] > 0;
                let is_taken = state.clients.iter().any(|client| client.leases[side.index()] > 0);
                if is_taken && !is_mine {
                    return None;
                }
                state.clients[client].leases[side.index()] = self.answer;
            }
            Action::Frees(client, side) => state.clients[client].free(side),
            Action::Checks(client, phase) => {
                self.is_fresh(&state.clients[client], phase).then_some(())?;
                state.clients[client].checked = Some(phase);
            }
            Action::Believes(client, phase) => {
                let me = &mut state.clients[client];
                me.belief = Some((phase, self.belief(client, me, phase)?));
                if self.check == Check::Before {
                    me.checked = None;
                }
            }
        }
        if self.plain_client && matches!(action, Action::Reads(0, _) | Action::Asks(0, Side::New)) {
            return None;
        }
        self.normalize(&mut state);
        (state != *before).then_some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        fn is_seen(state: &State, phase: Phase) -> bool {
            state.clients.iter().any(|client| client.belief.is_some_and(|(held, _)| held == phase))
        }
        vec![
            Property::always("at most one client believes that it holds the lock", |_, state: &State| {
                state.clients.iter().filter(|client| client.belief.is_some()).count() <= 1
            }),
            Property::sometimes("held as of Old", |_, state: &State| is_seen(state, Phase::Old)),
            Property::sometimes("held as of Both", |_, state: &State| is_seen(state, Phase::Both)),
            Property::sometimes("held as of New", |_, state: &State| is_seen(state, Phase::New)),
            Property::sometimes("back in Old", |_, state: &State| {
                state.records.iter().all(|record| record.phase == Phase::Old && record.came_from == Phase::Old)
                    && state.clients.iter().any(|client| client.belief.is_some_and(|(held, _)| held == Phase::Both))
            }),
        ]
    }
}

impl Exclusion {
    fn tick(&self, state: &mut State, frozen: Option<usize>) {
        for (index, client) in state.clients[..self.clients].iter_mut().enumerate() {
            if frozen != Some(index) {
                client.ages = client.ages.map(|age| self.fresh.min(age + 1));
            }
            client.leases = client.leases.map(|left| left.saturating_sub(1));
            client.belief = client.belief.map(|(phase, left)| (phase, left - 1)).filter(|(_, left)| *left > 0);
        }
        self.tick_migrators(state);
    }

    /// How long a grant or a renewal as of `phase` may be believed in, by the code's rules.
    fn belief(&self, index: usize, me: &Client, phase: Phase) -> Option<u8> {
        let held = me.belief.map(|(held, _)| held);
        if self.plain_client && index == 0 {
            return (phase == Phase::Old && me.leases[0] > 0).then_some(me.leases[0]);
        }
        let may = match self.check {
            Check::After => self.is_fresh(me, phase),
            Check::Before => me.checked == Some(phase),
            Check::AtGrants => self.is_fresh(me, phase) || held == Some(phase),
            Check::Never => self.is_fresh(me, phase) || me.checked == Some(phase),
        };
        let left = may.then(|| self.lasts(me, held, phase)).flatten()?;
        let is_news = me.belief.is_none_or(|(held, before)| held != phase || before < left);
        is_news.then_some(left)
    }

    /// Whether a reading allows that phase at this moment.
    fn is_fresh(&self, me: &Client, phase: Phase) -> bool {
        let first = self.first();
        PHASES.into_iter().zip(me.ages).any(|(read, age)| {
            let sent = Moment::from_nanos(0);
            rules::is_fresh(sent, sent + TICK * u32::from(age), first.fresh)
                && rules::stands((read, first.floor), phase, None)
        })
    }

    /// For how many ticks the leases allow it to be held as of that phase: those of all its stores.
    fn lasts(&self, me: &Client, held: Option<Phase>, phase: Phase) -> Option<u8> {
        let goes_on = |held: Phase| Side::ALL.into_iter().any(|side| rules::is_renewed(held, phase, side));
        if !held.is_none_or(goes_on) {
            return None;
        }
        let only_old = !self.renews_both && held == Some(Phase::Both) && phase == Phase::Both;
        let counts = |side: &Side| match held {
            None => phase.sides().contains(side),
            Some(_) if only_old => *side == Side::Old,
            Some(held) => rules::is_renewed(held, phase, *side) || rules::added(held, phase) == Some(*side),
        };
        let leases = || Side::ALL.into_iter().filter(counts).map(|side| me.leases[side.index()]);
        if leases().any(|left| left == 0) {
            return None;
        }
        let now = Moment::from_nanos(0);
        let most = if self.caps { self.first().max_ttl } else { TICK * u32::from(self.answer) };
        let deadline = rules::deadline(leases().map(|left| now + TICK * u32::from(left)), now, most);
        u8::try_from(deadline.since(now).as_secs()).ok()
    }

    /// Gives states one form that differ in nothing that matters.
    fn normalize(&self, state: &mut State) {
        state.rank_epochs();
        if self.is_symmetric {
            state.clients[..self.clients].sort_unstable_by_key(Client::key);
        }
        if self.is_symmetric {
            state.migrators[..self.migrators].sort_unstable_by_key(Migrator::key);
        }
    }
}

impl Client {
    /// What was believed in ends where a store of it is freed.
    fn free(&mut self, side: Side) {
        self.leases[side.index()] = 0;
        self.belief = self.belief.filter(|(phase, _)| !phase.uses(side));
    }

    fn key(&self) -> impl Ord + use<> {
        let number = |phase: Phase| phase as u8;
        let belief = self.belief.map(|(phase, left)| (number(phase), left));
        (self.leases, belief, self.ages, self.checked.map(number))
    }
}
