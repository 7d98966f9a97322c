//! Programs that once failed, shrunk and cut down by hand. Each is run several times on every store before the search.

use crate::program::{Ask, Patience, Program, Step, Task, Wait};

pub(crate) fn programs() -> Vec<Program> {
    vec![two_tasks_of_an_owner_let_go_at_once()]
}

/// What wrote the depth for the one release came behind the other, and was answered that there is no such lease: the hold was
/// said to have been lost. Seen on ZooKeeper 3.9.
fn two_tasks_of_an_owner_let_go_at_once() -> Program {
    let ask = Ask {
        key: 0,
        owner: Some(0),
        short: false,
        renew: false,
        max_hold: None,
        fifo: false,
        wait: Wait::Forever,
        patience: Patience::Await,
    };
    let task = |sleep| {
        let steps = vec![Step::Acquire(ask.clone()), Step::Nest(0, ask.clone()), Step::Sleep(sleep)];
        Task { locker: 0, runtime: 0, steps: [steps, vec![Step::Release(0), Step::Release(0)]].concat() }
    };
    Program { tasks: vec![task(9), task(10), task(11)], ..Program::default() }
}
