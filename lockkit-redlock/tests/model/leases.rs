//! The leases in time: acquisition, expiry, renewal, healing, restarts, pauses, and clocks of different rates.
//!
//! Time goes in ticks, and everybody may take as long as they like for anything, so that a pause needs no action of its
//! own. One client's clock is slow: within a lease it falls behind by one tick.

use stateright::{Model, Property};

/// How long a lease lasts at a node.
const TTL: u8 = 3;
/// What a careful client takes off for drift.
const DRIFT: u8 = 1;
const MAJORITY: usize = 2;
const CLIENTS: usize = 2;
/// The clock of this client is slow.
const SLOW: usize = 0;

/// Which safeguards are on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leases {
    /// How often each client may try.
    pub(crate) attempts: [u8; CLIENTS],
    pub(crate) renewals: u8,
    /// Until when time goes on.
    pub(crate) end: u8,
    /// A node may restart without its data, once.
    pub(crate) restart: bool,
    /// The deadline counts from before the first request; off: from the reply that made the majority.
    pub(crate) from_sent: bool,
    /// Drift is taken off.
    pub(crate) drift: bool,
    /// The deadline is looked at whenever it matters; off: only when the lease is granted.
    pub(crate) deadline: bool,
    /// A node that restarted does not vote for one ttl.
    pub(crate) delayed_restart: bool,
    /// A repeated attempt has a new token; off: always the same.
    pub(crate) fresh_token: bool,
    /// The attempts of the slow client begin with a wait at one node, which it asks again when it asks all.
    pub(crate) waits: bool,
}

impl Leases {
    pub(crate) const SOUND: Self = Self {
        attempts: [2, 1],
        renewals: 1,
        end: 7,
        restart: false,
        from_sent: true,
        drift: true,
        deadline: true,
        delayed_restart: true,
        fresh_token: true,
        waits: false,
    };
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct State {
    now: u8,
    /// Sorted: what differs only by the order of the nodes is searched once.
    nodes: [Node; 3],
    clients: [Client; CLIENTS],
    restarted: bool,
    seen: Seen,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Seen {
    granted: [bool; CLIENTS],
    renewed: bool,
    healed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Node {
    /// The holder's token, and when its lease lapses.
    lease: Option<(u8, u8)>,
    votes_from: u8,
    cells: [Cell; CLIENTS],
}

/// What a client heard from a node, and what is on its way there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Cell {
    vote: Vote,
    acquire: bool,
    release: bool,
    /// What was asked there during the wait is on its way while all are asked.
    stray: bool,
    renew: bool,
    heal: bool,
    /// The same of the attempt before.
    late_acquire: bool,
    late_release: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Vote {
    #[default]
    Open,
    Yes,
    No,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    phase: Phase,
    attempt: u8,
    renewals: u8,
    /// From when the present lease counts, and the round that is to extend it.
    since: u8,
    round: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Phase {
    #[default]
    Idle,
    /// At one node.
    Waiting,
    Asking,
    Held,
    Renewing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    Tick,
    Restart(usize),
    Invoke(usize),
    /// An attempt begins with a wait at this node.
    Wait {
        client: usize,
        node: usize,
    },
    /// The wait is over, whatever came of it, and all are asked.
    AskAll(usize),
    /// A request arrives; the reply may get lost.
    Acquire {
        client: usize,
        node: usize,
        heard: bool,
    },
    LateAcquire {
        client: usize,
        node: usize,
    },
    Stray {
        client: usize,
        node: usize,
    },
    Release {
        client: usize,
        node: usize,
    },
    LateRelease {
        client: usize,
        node: usize,
    },
    RenewAt {
        client: usize,
        node: usize,
    },
    Heal {
        client: usize,
        node: usize,
    },
    /// A majority has granted or renewed, and the client takes note.
    Decide(usize),
    Renew(usize),
    /// The attempt is given up, or the lease released.
    End(usize),
}

impl Model for Leases {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        vec![State::default()]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        if state.now < self.end {
            actions.push(Action::Tick);
        }
        for (client, me) in state.clients.iter().enumerate() {
            match me.phase {
                Phase::Idle if me.attempt < self.attempts[client] && self.waits && client == SLOW => {
                    actions.extend((0..state.nodes.len()).map(|node| Action::Wait { client, node }));
                }
                Phase::Idle if me.attempt < self.attempts[client] => actions.push(Action::Invoke(client)),
                Phase::Waiting => actions.push(Action::AskAll(client)),
                Phase::Asking | Phase::Renewing if state.yes(client) >= MAJORITY => {
                    actions.push(Action::Decide(client));
                }
                Phase::Held if me.renewals < self.renewals && self.may_act(state, client) => {
                    actions.push(Action::Renew(client));
                }
                _ => {}
            }
            if me.phase != Phase::Idle {
                actions.push(Action::End(client));
            }
            for (node, at) in state.nodes.iter().enumerate() {
                deliveries(me.phase, &at.cells[client], client, node, actions);
            }
        }
        if self.restart && !state.restarted {
            actions
                .extend((0..state.nodes.len()).filter(|node| state.nodes[*node].lease.is_some()).map(Action::Restart));
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::Tick => state.tick(),
            Action::Restart(node) => {
                let votes_from = if self.delayed_restart { state.now + TTL } else { 0 };
                (state.nodes[node].lease, state.nodes[node].votes_from) = (None, votes_from);
                state.restarted = true;
            }
            Action::Invoke(client) => {
                invoke(&mut state, client);
                ask_all(&mut state, client);
            }
            Action::Wait { client, node } => {
                invoke(&mut state, client);
                state.nodes[node].cells[client].acquire = true;
            }
            Action::AskAll(client) => ask_all(&mut state, client),
            Action::Acquire { client, node, heard } => self.acquire(&mut state, client, node, heard),
            Action::LateAcquire { client, node } => {
                let (now, token) = (state.now, self.token(client, state.clients[client].attempt - 1));
                let at = &mut state.nodes[node];
                at.cells[client].late_acquire = false;
                at.cells[client].late_release |= at.grant(token, now);
            }
            Action::Stray { client, node } => {
                let (now, me) = (state.now, state.clients[client]);
                let at = &mut state.nodes[node];
                at.cells[client].stray = false;
                let granted = at.grant(self.token(client, me.attempt), now);
                // It was given up before: the release is repeated until the lease must have lapsed.
                at.cells[client].release |= granted && me.phase == Phase::Idle;
            }
            Action::Release { client, node } => {
                let token = self.token(client, state.clients[client].attempt);
                let cell = &mut state.nodes[node].cells[client];
                cell.release = false;
                state.nodes[node].release(token);
            }
            Action::LateRelease { client, node } => {
                let token = self.token(client, state.clients[client].attempt - 1);
                state.nodes[node].cells[client].late_release = false;
                state.nodes[node].release(token);
            }
            Action::RenewAt { client, node } => {
                let (now, token) = (state.now, self.token(client, state.clients[client].attempt));
                let at = &mut state.nodes[node];
                let held = at.lease.is_some_and(|(holder, _)| holder == token);
                if held {
                    at.lease = Some((token, now + TTL));
                }
                let vote = if held { Vote::Yes } else { Vote::No };
                (at.cells[client].renew, at.cells[client].vote) = (false, vote);
            }
            Action::Heal { client, node } => self.heal(&mut state, client, node),
            Action::Decide(client) => self.decide(&mut state, client),
            Action::Renew(client) => {
                let now = state.now;
                let me = &mut state.clients[client];
                (me.phase, me.renewals, me.round) = (Phase::Renewing, me.renewals + 1, now);
                for node in &mut state.nodes {
                    (node.cells[client].renew, node.cells[client].vote) = (true, Vote::Open);
                }
            }
            Action::End(client) => end(&mut state, client),
        }
        state.nodes.sort_unstable();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("at most one client believes", |model: &Self, state: &State| {
                (0..CLIENTS).filter(|client| model.believes(state, *client)).count() <= 1
            }),
            Property::sometimes("acquired", |_, state: &State| state.seen.granted[0]),
            Property::sometimes("renewed", |_, state: &State| state.seen.renewed),
            Property::sometimes("granted to all that ask", |model: &Self, state: &State| {
                (0..CLIENTS).all(|client| state.seen.granted[client] == (model.attempts[client] > 0))
            }),
            Property::sometimes("healed", |_, state: &State| state.seen.healed),
        ];
        if !self.restart {
            properties.push(Property::always("who believes holds a majority", |model: &Self, state: &State| {
                let held = |client: usize| {
                    let token = model.token(client, state.clients[client].attempt);
                    state.nodes.iter().filter(|node| node.lease.is_some_and(|(holder, _)| holder == token)).count()
                };
                (0..CLIENTS).all(|client| !model.believes(state, client) || held(client) >= MAJORITY)
            }));
        }
        properties
    }
}

/// What may arrive at a node next.
fn deliveries(phase: Phase, cell: &Cell, client: usize, node: usize, actions: &mut Vec<Action>) {
    if cell.acquire {
        actions.push(Action::Acquire { client, node, heard: true });
        if matches!(phase, Phase::Waiting | Phase::Asking) {
            actions.push(Action::Acquire { client, node, heard: false });
        }
    }
    if cell.late_acquire {
        actions.push(Action::LateAcquire { client, node });
    }
    if cell.stray {
        actions.push(Action::Stray { client, node });
    }
    if cell.release {
        actions.push(Action::Release { client, node });
    }
    if cell.late_release {
        actions.push(Action::LateRelease { client, node });
    }
    if cell.renew && phase == Phase::Renewing {
        actions.push(Action::RenewAt { client, node });
    }
    if cell.heal {
        actions.push(Action::Heal { client, node });
    }
}

impl Leases {
    fn token(&self, client: usize, attempt: u8) -> u8 {
        1 + 4 * client as u8 + if self.fresh_token { attempt } else { 0 }
    }

    /// Whether the lease still stands by the client's own clock, which may be slow.
    fn is_valid(&self, state: &State, client: usize) -> bool {
        let behind = u8::from(client == SLOW);
        let margin = if self.drift { DRIFT } else { 0 };
        let elapsed = (state.now - state.clients[client].since).saturating_sub(behind);
        elapsed < TTL - margin
    }

    fn may_act(&self, state: &State, client: usize) -> bool {
        !self.deadline || self.is_valid(state, client)
    }

    fn believes(&self, state: &State, client: usize) -> bool {
        matches!(state.clients[client].phase, Phase::Held | Phase::Renewing) && self.may_act(state, client)
    }

    fn acquire(&self, state: &mut State, client: usize, node: usize, heard: bool) {
        let (now, me) = (state.now, state.clients[client]);
        let at = &mut state.nodes[node];
        at.cells[client].acquire = false;
        let granted = at.grant(self.token(client, me.attempt), now);
        match me.phase {
            Phase::Waiting | Phase::Asking if heard => {
                at.cells[client].vote = if granted { Vote::Yes } else { Vote::No }
            }
            // It was given up before: what comes late is released.
            Phase::Idle => at.cells[client].release |= granted,
            _ => {}
        }
    }

    fn heal(&self, state: &mut State, client: usize, node: usize) {
        let (now, me) = (state.now, state.clients[client]);
        let at = &mut state.nodes[node];
        at.cells[client].heal = false;
        let granted = at.grant(self.token(client, me.attempt), now);
        if me.phase == Phase::Idle {
            at.cells[client].release |= granted;
        } else {
            state.seen.healed |= granted;
        }
    }

    fn decide(&self, state: &mut State, client: usize) {
        let (now, renewing) = (state.now, state.clients[client].phase == Phase::Renewing);
        if !self.from_sent && !renewing {
            state.clients[client].since = now;
        }
        if !self.may_act(state, client) {
            // Too late: another may have had it.
            return end(state, client);
        }
        let me = &mut state.clients[client];
        me.phase = Phase::Held;
        if renewing {
            me.since = me.round;
            state.seen.renewed = true;
        } else {
            state.seen.granted[client] = true;
        }
        for node in &mut state.nodes {
            let cell = &mut node.cells[client];
            (cell.heal, cell.renew) = (renewing && cell.vote == Vote::No, false);
            cell.vote = Vote::Open;
        }
    }
}

/// A new attempt, with a new token. What the one before has on its way stays there.
fn invoke(state: &mut State, client: usize) {
    let me = &mut state.clients[client];
    let (attempt, renewals) = (me.attempt + 1, me.renewals);
    *me = Client { phase: Phase::Waiting, attempt, renewals, since: state.now, round: 0 };
    for node in &mut state.nodes {
        let before = node.cells[client];
        node.cells[client] = Cell {
            late_acquire: before.acquire || before.heal || before.stray,
            late_release: before.release,
            ..Cell::default()
        };
    }
}

/// The lease counts from here. What the node said at which the client waited does not count: it is asked again, with the same token, for no
/// release was sent.
fn ask_all(state: &mut State, client: usize) {
    (state.clients[client].phase, state.clients[client].since) = (Phase::Asking, state.now);
    for node in &mut state.nodes {
        let cell = &mut node.cells[client];
        (cell.stray, cell.acquire, cell.vote) = (cell.acquire, true, Vote::Open);
    }
}

/// Belief ends first; the releases may take their time. Who said no has nothing to release.
fn end(state: &mut State, client: usize) {
    state.clients[client].phase = Phase::Idle;
    for node in &mut state.nodes {
        let cell = &mut node.cells[client];
        cell.release |= cell.vote != Vote::No;
        (cell.vote, cell.renew) = (Vote::Open, false);
    }
}

impl Node {
    /// Grants, or extends what is the token's already.
    fn grant(&mut self, token: u8, now: u8) -> bool {
        let mine = self.lease.is_some_and(|(holder, _)| holder == token);
        let free = self.lease.is_none() && now >= self.votes_from;
        if mine || free {
            self.lease = Some((token, now + TTL));
        }
        mine || free
    }

    fn release(&mut self, token: u8) {
        self.lease.take_if(|(holder, _)| *holder == token);
    }
}

impl State {
    fn tick(&mut self) {
        self.now += 1;
        let now = self.now;
        for node in &mut self.nodes {
            node.lease.take_if(|(_, lapses)| *lapses <= now);
            if node.votes_from <= now {
                node.votes_from = 0;
            }
        }
    }

    fn yes(&self, client: usize) -> usize {
        self.nodes.iter().filter(|node| node.cells[client].vote == Vote::Yes).count()
    }
}
