//! Who waits for which store while holding the other (rule M9): in the phase [`Phase::Both`], just after [`Phase::New`].
//!
//! Nothing fails, and nobody stops working on their own: where nobody can go on, the protocol is to blame.

use lockkit_core::migrate::{
    Phase::{self, Both, New},
    Side, rules,
};
use stateright::Model;

pub(crate) const CLIENTS: usize = 3;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    /// A lock that is held at the second store is given back at the first; off: the second is waited for.
    pub(crate) gives_way: bool,
}

/// Where a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Stage {
    /// It holds the lock as of this phase.
    Held(Phase),
    Idle,
    /// It has the first store, and asks the second.
    Asking,
    Ended,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    AskFirst(usize),
    AskSecond(usize),
    GiveWay(usize),
    /// The holder adds the store that it lacks.
    TakeAlong(usize),
    End(usize),
}

impl Stage {
    fn has(self, side: Side) -> bool {
        match self {
            Self::Held(phase) => phase.uses(side),
            Self::Asking => Both.sides()[0] == side,
            Self::Idle | Self::Ended => false,
        }
    }
}

impl Model for Waiting {
    type State = [Stage; CLIENTS];
    type Action = Action;

    fn init_states(&self) -> Vec<Self::State> {
        let mut clients = [Stage::Idle; CLIENTS];
        clients[0] = Stage::Held(New);
        vec![clients]
    }

    fn actions(&self, clients: &Self::State, actions: &mut Vec<Action>) {
        for (client, stage) in clients.iter().enumerate() {
            match stage {
                Stage::Idle => actions.push(Action::AskFirst(client)),
                Stage::Asking => actions.extend([Action::AskSecond(client), Action::GiveWay(client)]),
                // A long-held lease: it ends when it has been taken along.
                Stage::Held(New) => actions.push(Action::TakeAlong(client)),
                Stage::Held(_) => actions.push(Action::End(client)),
                Stage::Ended => {}
            }
        }
    }

    fn next_state(&self, before: &Self::State, action: Action) -> Option<Self::State> {
        let is_free = |side: Side| before.iter().all(|stage| !stage.has(side));
        let [first, second] = *Both.sides() else { return None };
        let (client, next) = match action {
            Action::AskFirst(client) => (client, is_free(first).then_some(Stage::Asking)),
            Action::AskSecond(client) => (client, is_free(second).then_some(Stage::Held(Both))),
            Action::GiveWay(client) => (client, (self.gives_way && !is_free(second)).then_some(Stage::Idle)),
            Action::TakeAlong(client) => (client, is_free(rules::added(New, Both)?).then_some(Stage::Held(Both))),
            Action::End(client) => (client, Some(Stage::Ended)),
        };
        let mut clients = *before;
        clients[client] = next?;
        Some(clients)
    }
}
