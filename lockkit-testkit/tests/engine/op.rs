//! What happens in a run: steps of applications, of time, and of bad luck.

use std::time::Duration;

use lockkit_core::{Effect, ErrorKind};
use lockkit_sim::{Fault, Operation, Rule};
use proptest::prelude::*;

pub(crate) const CLIENTS: usize = 3;
pub(crate) const OWNERS: usize = 2;
pub(crate) const KEYS: [&str; 2] = ["a", "b"];
/// The longest of all times below but one ttl.
pub(crate) const LONGEST: Duration = Duration::from_millis(2000);

/// One step. What it names by number is taken modulo what there is.
#[derive(Clone, Debug)]
pub(crate) enum Op {
    Acquire(Ask),
    Cancel {
        pending: usize,
    },
    Release {
        guard: usize,
    },
    Drop {
        guard: usize,
    },
    Renew {
        guard: usize,
    },
    Expire {
        key: usize,
    },
    TakeOver {
        key: usize,
        ttl: Duration,
    },
    Revoke {
        key: usize,
    },
    EndSession {
        client: usize,
    },
    Inject {
        client: usize,
        rule: Rule,
    },
    Freeze {
        client: usize,
        time: Duration,
    },
    Heal {
        client: usize,
    },
    Suspend {
        time: Duration,
    },
    /// The process stands still.
    Leap {
        time: Duration,
    },
    Sleep {
        time: Duration,
    },
    Yield,
    Settle,
}

/// An acquisition.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) client: usize,
    pub(crate) key: usize,
    pub(crate) owner: Option<usize>,
    pub(crate) ttl: Duration,
    pub(crate) renew: bool,
    pub(crate) wait: Wait,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Wait {
    Try,
    For(Duration),
    Forever,
}

pub(crate) fn ops() -> impl Strategy<Value = Vec<Op>> {
    proptest::collection::vec(op(), 1..40)
}

fn op() -> impl Strategy<Value = Op> {
    let (client, key) = (0..CLIENTS, 0..KEYS.len());
    prop_oneof![
        10 => ask().prop_map(Op::Acquire),
        2 => (0..8usize).prop_map(|pending| Op::Cancel { pending }),
        4 => (0..8usize).prop_map(|guard| Op::Release { guard }),
        3 => (0..8usize).prop_map(|guard| Op::Drop { guard }),
        1 => (0..8usize).prop_map(|guard| Op::Renew { guard }),
        1 => key.clone().prop_map(|key| Op::Expire { key }),
        1 => (key.clone(), time()).prop_map(|(key, ttl)| Op::TakeOver { key, ttl }),
        1 => key.prop_map(|key| Op::Revoke { key }),
        1 => client.clone().prop_map(|client| Op::EndSession { client }),
        4 => (client.clone(), rule()).prop_map(|(client, rule)| Op::Inject { client, rule }),
        1 => (client.clone(), time()).prop_map(|(client, time)| Op::Freeze { client, time }),
        1 => client.prop_map(|client| Op::Heal { client }),
        1 => time().prop_map(|time| Op::Suspend { time }),
        1 => time().prop_map(|time| Op::Leap { time }),
        6 => time().prop_map(|time| Op::Sleep { time }),
        4 => Just(Op::Yield),
        2 => Just(Op::Settle),
    ]
}

fn ask() -> impl Strategy<Value = Ask> {
    let owner = proptest::option::weighted(0.4, 0..OWNERS);
    let ttls = [200, 600, 2000, 10_000].map(Duration::from_millis);
    // A lease goes from one task to the next only if both want the same ttl.
    let ttl = prop_oneof![1 => Just(ttls[0]), 1 => Just(ttls[1]), 1 => Just(ttls[2]), 3 => Just(ttls[3])];
    let wait = prop_oneof![Just(Wait::Try), time().prop_map(Wait::For), Just(Wait::Forever)];
    (0..CLIENTS, 0..KEYS.len(), owner, ttl, proptest::bool::weighted(0.8), wait).prop_map(
        move |(client, key, owner, ttl, renew, wait)| {
            // All guards of an owner share one lease: what asks for other terms than it has is refused.
            let (ttl, renew) = match owner {
                Some(owner) => (ttls[ttls.len() - 1 - (owner + 2 * key) % ttls.len()], (owner + key) % 3 < 2),
                None => (ttl, renew),
            };
            Ask { client, key, owner, ttl, renew, wait }
        },
    )
}

fn rule() -> impl Strategy<Value = Rule> {
    let fault = prop_oneof![
        Just(Fault::LoseRequest),
        Just(Fault::LoseReply),
        time().prop_map(Fault::DelayRequest),
        time().prop_map(Fault::DelayReply),
        Just(Fault::REFUSED),
        Just(Fault::Fail(ErrorKind::Deadlock, Effect::None)),
        Just(Fault::Fail(ErrorKind::Unavailable, Effect::Unknown)),
    ];
    let operation = prop_oneof![
        2 => Just(None),
        2 => Just(Some(Operation::Acquire)),
        2 => Just(Some(Operation::Renew)),
        2 => Just(Some(Operation::Release)),
        1 => Just(Some(Operation::Inspect)),
    ];
    (fault, operation, proptest::option::weighted(0.8, 1..4u32)).prop_map(|(fault, operation, times)| {
        let rule = Rule::from(fault);
        let rule = operation.map_or(rule, |operation| rule.on(operation));
        times.map_or(rule.until_healed(), |times| rule.times(times))
    })
}

/// From a moment to the longest ttl.
fn time() -> impl Strategy<Value = Duration> {
    prop_oneof![1..20u64, 20..300u64, 300..2000u64].prop_map(Duration::from_millis)
}
