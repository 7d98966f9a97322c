//! The fence protocol without time: any lease may lapse at any moment, any message may arrive late or never. So there
//! are no releases here: a release is a lapse.
//!
//! What holds here holds whatever clocks, pauses and partitions do, as long as nodes do not lose their counters.

use stateright::{Model, Property};

/// Which safeguards are on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fences {
    pub(crate) clients: usize,
    /// How often each client may try.
    pub(crate) attempts: u8,
    /// What a client may propose: `1..=proposals`.
    pub(crate) proposals: u8,
    pub(crate) renewals: u8,
    /// Without agreement a second round raises the counters; off: the highest number is taken as it is.
    pub(crate) raise: bool,
    /// Agreed is what a majority granted exactly; off: what a majority granted at least.
    pub(crate) exact: bool,
    /// Only a node that still holds the very grant counts for the raise; off: any that raised its counter.
    pub(crate) very_grant: bool,
    /// A repeated attempt has a new token. For fences it does not matter, which is checked too.
    pub(crate) fresh_token: bool,
    /// A healed node counts after a further round without it; off: in the round that heals it.
    pub(crate) probation: bool,
    /// Nodes keep their counters; off: one of them may forget its own, once.
    pub(crate) durable: bool,
}

impl Fences {
    pub(crate) const SOUND: Self = Self {
        clients: 2,
        attempts: 2,
        proposals: 2,
        renewals: 0,
        raise: true,
        exact: true,
        very_grant: true,
        fresh_token: true,
        probation: true,
        durable: true,
    };

    fn majority(&self) -> usize {
        2
    }

    /// Clients own spans of different lengths.
    fn span(client: usize) -> u8 {
        2 - client as u8 % 2
    }
}

const CLIENTS: usize = 3;

#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct State {
    /// Sorted: what differs only by the order of the nodes is searched once.
    nodes: Vec<Node>,
    clients: [Client; CLIENTS],
    /// The fences that are owned by grants, as a bit set, and the highest of them.
    owned: u64,
    highest: u8,
    /// The highest of a grant behind which a majority still stood when it was returned. In time, the others come after
    /// their deadline, and are none.
    highest_held: u8,
    pub(crate) seen: Seen,
    forgot: bool,
}

/// What happened on the way here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Seen {
    twice: bool,
    out_of_order: bool,
    stale_renewal: bool,
    agreed: bool,
    raised: bool,
    renewed: bool,
    healed: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Node {
    /// The holder's token and the first number of the grant.
    lease: Option<(u8, u8)>,
    counter: u8,
    /// What each client knows of this node, and has on its way to it.
    cells: [Cell; CLIENTS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Cell {
    /// What the node granted, as far as the client knows and lets it count.
    grant: u8,
    on_probation: u8,
    /// What was on probation when the present renewal was sent.
    seasoned: u8,
    vote: Vote,
    /// Requests that have not arrived yet.
    acquire: bool,
    /// The same of the attempt before.
    late_acquire: bool,
    heal: bool,
    /// To raise the counter, or to renew.
    round: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Client {
    phase: Phase,
    attempt: u8,
    proposal: u8,
    renewals: u8,
    /// The highest fence that had been returned when the attempt, or the present renewal, was invoked.
    invoked_at: u8,
    fence: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Phase {
    #[default]
    Idle,
    Asking,
    Raising,
    Held,
    Renewing,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Vote {
    #[default]
    Open,
    Yes,
    No,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Action {
    Invoke {
        client: usize,
        proposal: u8,
    },
    /// A request arrives and takes effect; its reply may get lost.
    Acquire {
        client: usize,
        node: usize,
        heard: bool,
    },
    LateAcquire {
        client: usize,
        node: usize,
    },
    Heal {
        client: usize,
        node: usize,
    },
    Raise {
        client: usize,
        node: usize,
    },
    RenewAt {
        client: usize,
        node: usize,
    },
    /// The client draws the consequence of what it has heard.
    Decide(usize),
    GiveUp(usize),
    Renew(usize),
    Lapse(usize),
    ForgetCounter(usize),
}

impl Model for Fences {
    type State = State;
    type Action = Action;

    /// Counters may be apart from the start, as attempts that failed leave them.
    fn init_states(&self) -> Vec<State> {
        let apart: [&[u8]; 6] = [&[0, 0, 0], &[0, 0, 1], &[0, 0, 2], &[0, 1, 1], &[0, 1, 2], &[0, 2, 2]];
        let node = |counter: &u8| Node { counter: *counter, ..Node::default() };
        apart.map(|counters| State { nodes: counters.iter().map(node).collect(), ..State::default() }).to_vec()
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        for (index, client) in state.clients[..self.clients].iter().enumerate() {
            match client.phase {
                Phase::Idle if client.attempt < self.attempts && self.may_begin(state, index) => {
                    actions.extend((1..=self.proposals).map(|proposal| Action::Invoke { client: index, proposal }));
                }
                Phase::Asking | Phase::Raising if self.verdict(state, index).is_some() => {
                    actions.push(Action::Decide(index));
                }
                Phase::Renewing if state.yes(index) >= self.majority() => actions.push(Action::Decide(index)),
                Phase::Held if client.renewals < self.renewals => actions.push(Action::Renew(index)),
                _ => {}
            }
            // Giving up at the end of all attempts would be no different from standing still.
            let over = self.fresh_token && client.phase != Phase::Idle
                || matches!(client.phase, Phase::Asking | Phase::Raising);
            if over && client.attempt < self.attempts {
                actions.push(Action::GiveUp(index));
            }
            for (node, at) in state.nodes.iter().enumerate() {
                deliveries(client.phase, &at.cells[index], index, node, actions);
            }
        }
        for (index, node) in state.nodes.iter().enumerate() {
            if node.lease.is_some() {
                actions.push(Action::Lapse(index));
            }
            if !self.durable && !state.forgot && node.counter > 0 {
                actions.push(Action::ForgetCounter(index));
            }
        }
    }

    fn next_state(&self, before: &State, action: Action) -> Option<State> {
        let mut state = before.clone();
        match action {
            Action::Invoke { client, proposal } => self.invoke(&mut state, client, proposal),
            Action::Acquire { client, node, heard } => self.acquire(&mut state, client, node, heard),
            Action::LateAcquire { client, node } => {
                let token = self.token(client, state.clients[client].attempt - 1);
                state.nodes[node].cells[client].late_acquire = false;
                state.nodes[node].grant(token, 1, Self::span(client));
            }
            Action::Heal { client, node } => self.heal(&mut state, client, node),
            Action::Raise { client, node } => self.raise_at(&mut state, client, node),
            Action::RenewAt { client, node } => self.renew_at(&mut state, client, node),
            Action::Decide(client) => self.decide(&mut state, client),
            Action::GiveUp(client) => state.clients[client].phase = Phase::Idle,
            Action::Renew(client) => {
                let highest = state.highest_held;
                let me = &mut state.clients[client];
                (me.phase, me.renewals, me.invoked_at) = (Phase::Renewing, me.renewals + 1, highest);
                state.open_round(client, |_| true);
                for node in &mut state.nodes {
                    node.cells[client].seasoned = node.cells[client].on_probation;
                }
            }
            Action::Lapse(node) => state.nodes[node].lease = None,
            Action::ForgetCounter(node) => {
                (state.nodes[node].lease, state.nodes[node].counter) = (None, 0);
                state.forgot = true;
            }
        }
        state.nodes.sort_unstable();
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        let mut properties = vec![
            Property::always("no fence is owned twice", |_, state: &State| !state.seen.twice),
            Property::always("later grants have higher fences", |_, state: &State| !state.seen.out_of_order),
            Property::always("no renewal succeeds after another held the lock", |_, state: &State| {
                !state.seen.stale_renewal
            }),
            Property::sometimes("agreed in one round", |_, state: &State| state.seen.agreed),
            Property::sometimes("raised", |_, state: &State| state.seen.raised),
        ];
        if self.renewals > 0 {
            properties.push(Property::sometimes("renewed", |_, state: &State| state.seen.renewed));
            properties.push(Property::sometimes("healed", |_, state: &State| state.seen.healed));
        }
        properties
    }
}

/// What may arrive at a node next.
fn deliveries(phase: Phase, cell: &Cell, client: usize, node: usize, actions: &mut Vec<Action>) {
    if cell.acquire {
        actions.push(Action::Acquire { client, node, heard: true });
        // Whether it is heard matters only as long as the client listens.
        if phase == Phase::Asking {
            actions.push(Action::Acquire { client, node, heard: false });
        }
    }
    if cell.late_acquire {
        actions.push(Action::LateAcquire { client, node });
    }
    if cell.heal {
        actions.push(Action::Heal { client, node });
    }
    match phase {
        Phase::Raising if cell.round => actions.push(Action::Raise { client, node }),
        Phase::Renewing if cell.round => actions.push(Action::RenewAt { client, node }),
        _ => {}
    }
}

impl Fences {
    fn token(&self, client: usize, attempt: u8) -> u8 {
        1 + 4 * client as u8 + if self.fresh_token { attempt } else { 0 }
    }

    /// A token is used again only after an attempt that failed, and when each node has answered its release; but the
    /// acquisitions of that attempt may still come.
    fn may_begin(&self, state: &State, index: usize) -> bool {
        let token = self.token(index, 0);
        self.fresh_token || state.nodes.iter().all(|node| node.lease.is_none_or(|(holder, _)| holder != token))
    }

    fn invoke(&self, state: &mut State, index: usize, proposal: u8) {
        let highest = state.highest;
        let me = &mut state.clients[index];
        let attempt = me.attempt + 1;
        *me = Client { phase: Phase::Asking, attempt, proposal, invoked_at: highest, ..Client::default() };
        for node in &mut state.nodes {
            let before = node.cells[index];
            node.cells[index] = Cell { acquire: true, late_acquire: before.acquire, ..Cell::default() };
        }
    }

    fn acquire(&self, state: &mut State, index: usize, node: usize, heard: bool) {
        let me = state.clients[index];
        let at = &mut state.nodes[node];
        at.cells[index].acquire = false;
        let granted = at.grant(self.token(index, me.attempt), me.proposal, Self::span(index));
        let (Some(fence), true) = (granted, heard) else { return };
        match me.phase {
            Phase::Asking => at.cells[index].grant = fence,
            Phase::Held | Phase::Renewing => at.note(index, fence, me.fence),
            Phase::Idle | Phase::Raising => {}
        }
    }

    fn heal(&self, state: &mut State, index: usize, node: usize) {
        let me = state.clients[index];
        let at = &mut state.nodes[node];
        at.cells[index].heal = false;
        let span = Self::span(index);
        if let Some(fence) = at.grant(self.token(index, me.attempt), me.fence + span, span)
            && matches!(me.phase, Phase::Held | Phase::Renewing)
        {
            at.note(index, fence, me.fence);
            state.seen.healed = true;
        }
    }

    fn raise_at(&self, state: &mut State, index: usize, node: usize) {
        let me = state.clients[index];
        let token = self.token(index, me.attempt);
        let at = &mut state.nodes[node];
        let held = at.lease.filter(|(holder, _)| *holder == token).map(|(_, fence)| fence);
        if held.is_some() || !self.very_grant {
            at.counter = at.counter.max(me.fence + Self::span(index) - 1);
        }
        let cell = &mut at.cells[index];
        let counts = held == Some(cell.grant) || !self.very_grant;
        (cell.round, cell.vote) = (false, if counts { Vote::Yes } else { Vote::No });
    }

    fn renew_at(&self, state: &mut State, index: usize, node: usize) {
        let me = state.clients[index];
        let token = self.token(index, me.attempt);
        let at = &mut state.nodes[node];
        let held = at.lease.filter(|(holder, _)| *holder == token).map(|(_, fence)| fence);
        let cell = &mut at.cells[index];
        let counts = held.is_some() && held == Some(cell.grant);
        (cell.round, cell.vote) = (false, if counts { Vote::Yes } else { Vote::No });
        if !counts && !self.probation {
            // The safeguard is off: it is asked for anew, and counts at once.
            if let Some(fence) = at.grant(token, 1, Self::span(index)) {
                let cell = &mut at.cells[index];
                (cell.grant, cell.vote) = (fence, Vote::Yes);
                state.seen.healed = true;
            }
        }
    }

    /// What a client may conclude: the fence, and whether counters have to be raised to it first.
    fn verdict(&self, state: &State, index: usize) -> Option<(u8, bool)> {
        let me = &state.clients[index];
        if me.phase == Phase::Raising {
            return (state.yes(index) >= self.majority()).then_some((me.fence, false));
        }
        let grants = || state.nodes.iter().map(|node| node.cells[index].grant).filter(|grant| *grant > 0);
        if grants().count() < self.majority() {
            return None;
        }
        let same = |fence: u8| grants().filter(|other| *other == fence).count() >= self.majority();
        let highest = grants().max().unwrap_or(0);
        match grants().find(|fence| same(*fence)) {
            _ if !self.exact => Some((me.proposal, false)),
            Some(agreed) => Some((agreed, false)),
            None => Some((highest, self.raise)),
        }
    }

    fn decide(&self, state: &mut State, index: usize) {
        if state.clients[index].phase == Phase::Renewing {
            return self.end_renewal(state, index);
        }
        let Some((fence, raise)) = self.verdict(state, index) else { return };
        let (before, span) = (state.clients[index], Self::span(index));
        state.clients[index].fence = fence;
        if raise {
            state.clients[index].phase = Phase::Raising;
            return state.open_round(index, |cell| cell.grant > 0);
        }
        let mine = ((1_u64 << span) - 1) << fence;
        state.seen.twice |= state.owned & mine != 0;
        state.seen.out_of_order |= fence <= before.invoked_at;
        state.seen.agreed |= before.phase == Phase::Asking;
        state.seen.raised |= before.phase == Phase::Raising;
        state.owned |= mine;
        state.highest = state.highest.max(fence + span - 1);
        let token = self.token(index, before.attempt);
        let held = state.nodes.iter().filter(|node| node.lease.is_some_and(|(holder, _)| holder == token));
        if held.count() >= self.majority() {
            state.highest_held = state.highest_held.max(fence + span - 1);
        }
        state.clients[index].phase = Phase::Held;
        for node in &mut state.nodes {
            let grant = std::mem::take(&mut node.cells[index].grant);
            if grant > 0 {
                node.note(index, grant, fence);
            }
        }
        state.open_round(index, |_| false);
    }

    /// A majority still has the very grants: what was on probation before counts from now on, and lost nodes are healed.
    fn end_renewal(&self, state: &mut State, index: usize) {
        let me = state.clients[index];
        state.clients[index].phase = Phase::Held;
        state.seen.renewed = true;
        state.seen.stale_renewal |= me.invoked_at >= me.fence + Self::span(index);
        for node in &mut state.nodes {
            let cell = &mut node.cells[index];
            cell.heal |= cell.vote == Vote::No && self.probation;
            // Not what came while the renewal was under way: its answers may be older than that.
            let seasoned = std::mem::take(&mut cell.seasoned);
            if seasoned > 0 {
                cell.grant = seasoned;
                cell.on_probation = if cell.on_probation == seasoned { 0 } else { cell.on_probation };
            }
        }
        state.open_round(index, |_| false);
    }
}

impl Node {
    /// The node's answer to an acquisition: the first number of the token's grant.
    fn grant(&mut self, token: u8, least: u8, span: u8) -> Option<u8> {
        if self.lease.is_none() {
            let fence = least.max(self.counter + 1);
            (self.lease, self.counter) = (Some((token, fence)), fence + span - 1);
        }
        self.lease.filter(|(holder, _)| *holder == token).map(|(_, fence)| fence)
    }

    /// Records a grant. Beyond the fence, it may have come after another's.
    fn note(&mut self, index: usize, fence: u8, held: u8) {
        let cell = &mut self.cells[index];
        if fence <= held {
            cell.grant = fence;
        } else {
            cell.on_probation = fence;
        }
    }
}

impl State {
    fn yes(&self, index: usize) -> usize {
        self.nodes.iter().filter(|node| node.cells[index].vote == Vote::Yes).count()
    }

    /// Sends a round to some of the nodes. What is left of the one before changes nothing any more.
    fn open_round(&mut self, index: usize, to: impl Fn(&Cell) -> bool) {
        for node in &mut self.nodes {
            let cell = &mut node.cells[index];
            (cell.round, cell.vote) = (to(cell), Vote::Open);
        }
    }
}
