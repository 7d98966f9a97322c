//! Small changes of a good history, one at a time.

use lockkit_testkit::history::{Event, History, What, check};

use crate::script::{KEY, Script};

/// A good history in which everything occurs that can occur.
fn everything(seed: u64) -> Script {
    let mut script = Script::new(seed);
    script.traffic(4);
    let fence = script.fence + 10;
    let outer = script.nest("w1", 1, fence);
    script.claim("w1", fence, true);
    let inner = script.nest("w1", 1, fence);
    let op = script.ask("w1", What::Renew { grant: inner });
    script.hear("w1", op, What::Held);
    let base = script.version;
    script.write("w1", fence, true, base);
    script.twin("w1", 0);
    let rival = script.ask("w2", What::acquire(KEY));
    script.hear("w2", rival, What::Contended);
    let gone = script.ask("w3", What::acquire(KEY));
    script.hear("w3", gone, What::Cancelled);
    script.drop_guard("w1", outer);
    script.is_held("w1", inner);
    script.is_lost("w1", inner);
    // The next one has the lock, and the late one is refused.
    let next = script.acquire("w2", fence + 1);
    script.claim("w2", fence + 1, true);
    script.is_held("w2", next);
    let base = script.version;
    script.write("w1", fence, false, base);
    script.is_lost("w1", inner);
    script.drop_guard("w1", inner);
    script.write("w2", fence + 1, true, base);
    script.twin("w2", 1);
    script.release("w2", next);
    script.fence += 100;
    script.traffic(4);
    script
}

/// Small changes of one event, and whether the history can still have happened. Those that it can have are no fault of the
/// judge: what nobody answered, or nobody saw, counts for nobody.
#[test]
fn whatever_makes_a_history_impossible_is_found() {
    type Change = fn(&mut Event) -> bool;
    let changes: [(&str, Change); 14] = [
        ("a fence one higher", |event| change_fence(&mut event.what, |fence| fence + 1)),
        ("a fence one lower", |event| change_fence(&mut event.what, |fence| fence - 1)),
        ("no fence", |event| change_fence(&mut event.what, |_| 0)),
        ("another process", |event| replace(&mut event.process, "w9")),
        ("another number", |event| {
            event.op += 5000;
            true
        }),
        ("another lock", |event| match &mut event.what {
            What::Acquire { key, .. } | What::Write { key, .. } => replace(key, "account/8"),
            What::Claimed { key, .. } | What::Updated { key, .. } => replace(key, "account/8"),
            _ => false,
        }),
        ("somebody else at the resource", |event| match &mut event.what {
            What::Claimed { by, .. } | What::Updated { by, .. } => replace(by, "w9"),
            _ => false,
        }),
        ("the other verdict of the resource", |event| match &mut event.what {
            What::Claimed { admitted, .. } | What::Updated { admitted, .. } => {
                *admitted = !*admitted;
                true
            }
            _ => false,
        }),
        ("an update from another version", |event| match &mut event.what {
            What::Updated { base, admitted: true, .. } => {
                *base += 1;
                true
            }
            _ => false,
        }),
        ("another version", |event| match &mut event.what {
            What::Updated { version, .. } | What::Twin { version, .. } => {
                *version += 1;
                true
            }
            _ => false,
        }),
        ("the other answer to a write", |event| match &mut event.what {
            what @ What::Written => {
                *what = What::Refused;
                true
            }
            what @ What::Refused => {
                *what = What::Written;
                true
            }
            _ => false,
        }),
        ("not granted", |event| match &mut event.what {
            what @ What::Granted { .. } => {
                *what = What::Contended;
                true
            }
            _ => false,
        }),
        ("another guard", |event| match &mut event.what {
            What::Ask { grant } | What::Renew { grant } | What::Release { grant } => {
                *grant += 5000;
                true
            }
            _ => false,
        }),
        ("held although lost", |event| match &mut event.what {
            what @ What::Lost { .. } => {
                *what = What::Held;
                true
            }
            _ => false,
        }),
    ];
    for seed in 0..8 {
        let good = everything(seed).events;
        let passed = check(&History::new(good.clone()));
        assert!(passed.violations.is_empty(), "seed {seed}: {}", passed.violations[0]);
        for place in 0..good.len() {
            for (name, change) in changes {
                let mut events = good.clone();
                if change(&mut events[place]) && !may_be(name, &good, place) {
                    must_be_found(seed, name, &good[place], events);
                }
            }
            let mut fewer = good.clone();
            let event = fewer.remove(place);
            // An answer that nobody heard, or that only says what was known.
            let unheard = matches!(
                event.what,
                What::Held | What::Lost { .. } | What::Released { .. } | What::Dropped | What::Written | What::Refused
            ) || matches!(event.what, What::Contended | What::Cancelled);
            if !unheard {
                must_be_found(seed, "left out", &event, fewer);
            }
            let mut twice = good.clone();
            twice.insert(place, good[place].clone());
            must_be_found(seed, "twice", &good[place], twice);
            // Heard before it was asked for.
            if let Some(answer) = good.iter().position(|other| is_answer(other, &good[place])) {
                let mut turned = good.clone();
                (turned[place].at, turned[answer].at) = (turned[answer].at, turned[place].at);
                must_be_found(seed, "turned round", &good[place], turned);
            }
        }
    }
}

fn must_be_found(seed: u64, name: &str, event: &Event, events: Vec<Event>) {
    let report = check(&History::new(events));
    assert!(!report.violations.is_empty(), "seed {seed}: {name} is not seen: {event:?}");
}

/// Changes after which the history can still have happened.
fn may_be(name: &str, good: &[Event], place: usize) -> bool {
    let of = |event: &&Event| event.process == good[place].process && event.op == good[place].op;
    let answer = good.iter().filter(of).nth(1).map(|event| &event.what);
    match (name, &good[place].what) {
        // A loss that nobody heard of.
        ("held although lost", _) => !good[..place].iter().any(|event| matches!(event.what, What::Lost { .. })),
        // An acquisition that came to nothing, or that is nested and shows its fence to nobody.
        ("another lock", What::Acquire { owner, .. }) => {
            let nests = good[..place].iter().any(|event| matches!(event.what, What::Acquire { owner: Some(_), .. }));
            matches!(answer, Some(What::Cancelled | What::Contended)) || owner.is_some() && nests
        }
        _ => false,
    }
}

fn is_answer(answer: &Event, asked: &Event) -> bool {
    let asks = matches!(
        asked.what,
        What::Acquire { .. } | What::Ask { .. } | What::Renew { .. } | What::Release { .. } | What::Write { .. }
    );
    asks && answer.process == asked.process && answer.op == asked.op && answer.at > asked.at
}

fn replace(text: &mut String, other: &str) -> bool {
    other.clone_into(text);
    true
}

fn change_fence(what: &mut What, change: fn(u64) -> u64) -> bool {
    match what {
        What::Granted { fence } | What::Write { fence, .. } => *fence = change(*fence),
        What::Claimed { fence, .. } | What::Updated { fence, .. } => *fence = change(*fence),
        _ => return false,
    }
    true
}
