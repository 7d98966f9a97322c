//! Leases that share a lock: readers, and permits.

use std::num::NonZeroU32;

use lockkit_core::Mode;
use lockkit_testkit::history::{Event, Rule, What};

use crate::script::{KEY, Script, judged};

const THREE: Mode = Mode::Permit { limit: NonZeroU32::new(3).expect("not zero") };
const ONE: Mode = Mode::Permit { limit: NonZeroU32::MIN };
const FOUR: Mode = Mode::Permit { limit: NonZeroU32::new(4).expect("not zero") };

/// Who acquires, how, and how far its fence is above the last one of the traffic.
type Grant = (&'static str, Mode, u64);

/// All acquire in this order, and then all believe.
fn together(script: &mut Script, grants: &[Grant]) {
    let above = script.fence + 10;
    let held: Vec<_> = grants.iter().map(|&(who, mode, fence)| (who, script.share(who, mode, above + fence))).collect();
    for (who, grant) in &held {
        script.is_held(who, *grant);
    }
    for (who, grant) in held {
        script.release(who, grant);
    }
}

/// The good one passes; in the bad one this rule is broken once.
fn once(rule: Rule, good: &[Grant], bad: &[Grant]) {
    judged(rule, 1, |script| together(script, good), |script| together(script, bad));
}

#[test]
fn readers_exclude_writers_and_no_readers() {
    let readers = [("w1", Mode::Shared, 0), ("w2", Mode::Shared, 1)];
    once(Rule::Overlap, &readers, &[readers[0], readers[1], ("w3", Mode::Exclusive, 2)]);
    // Whoever comes second.
    once(Rule::Overlap, &readers, &[("w3", Mode::Exclusive, 0), ("w1", Mode::Shared, 1)]);
    // Behind another reader, whose belief began later.
    once(Rule::Overlap, &readers, &[readers[0], ("w2", Mode::Shared, 1), ("w3", THREE, 2)]);
}

#[test]
fn there_are_no_more_permits_than_the_limit_says() {
    let permits = [("w1", THREE, 0), ("w2", THREE, 1), ("w3", THREE, 2)];
    once(Rule::Overlap, &permits, &[permits[0], permits[1], permits[2], ("w0", THREE, 3)]);
    // With another limit they are no permits of the same kind.
    once(Rule::Overlap, &permits, &[permits[0], permits[1], ("w0", FOUR, 3)]);
    once(Rule::Overlap, &permits, &[permits[0], permits[1], ("w0", Mode::Exclusive, 3)]);
    once(Rule::Overlap, &permits, &[permits[0], permits[1], ("w0", Mode::Shared, 3)]);
}

/// A permit that is over makes room for another, in time and not before.
#[test]
fn a_permit_that_is_over_makes_room() {
    let run = |script: &mut Script, believes_on: bool| {
        let above = script.fence + 10;
        let held = [0, 1, 2].map(|number| script.share("w1", THREE, above + number));
        script.is_held("w1", held[1]);
        script.is_held("w1", held[2]);
        let next = script.share("w2", THREE, above + 3);
        script.is_held("w2", next);
        if believes_on {
            held.iter().for_each(|held| script.is_held("w1", *held));
        } else {
            script.is_lost("w1", held[0]);
        }
    };
    judged(Rule::Overlap, 1, |script| run(script, false), |script| run(script, true));
}

/// Readers may have one number together, and no smaller one than a reader that was there before; writers and permits each have
/// their own.
#[test]
fn fences_of_those_who_share_are_in_order() {
    let readers = [("w1", Mode::Shared, 5), ("w2", Mode::Shared, 5)];
    once(Rule::FenceOrder, &readers, &[readers[0], ("w2", Mode::Shared, 4)]);
    let permits = [("w1", THREE, 5), ("w2", THREE, 6)];
    once(Rule::FenceOrder, &permits, &[permits[0], ("w2", THREE, 5)]);
    once(Rule::FenceOrder, &permits, &[permits[0], ("w2", THREE, 4)]);
    // One after the other.
    let run = |script: &mut Script, first: Mode, second: Mode, fence: u64| {
        let above = script.fence + 10;
        for (who, mode, fence) in [("w1", first, above + 1), ("w2", second, above + fence)] {
            let grant = script.share(who, mode, fence);
            script.release(who, grant);
        }
    };
    for (first, second) in [(Mode::Shared, Mode::Exclusive), (Mode::Exclusive, Mode::Shared), (THREE, Mode::Exclusive)]
    {
        let (good, bad) =
            (|script: &mut Script| run(script, first, second, 2), |script: &mut Script| run(script, first, second, 1));
        judged(Rule::FenceOrder, 1, good, bad);
    }
}

/// One who holds on after a newer fence was given out is late, unless it shares the lock with the one who has that.
#[test]
fn who_shares_is_not_superseded() {
    let run = |script: &mut Script, old: Mode, new: Mode| {
        let above = script.fence + 10;
        let late = script.share("w1", old, above);
        let op = script.ask("w2", What::Acquire { key: KEY.into(), within: None, owner: None, mode: new });
        script.hear("w2", op, What::Granted { fence: above + 1 });
        // It never says that it believes, so that the two do not overlap.
        script.is_held("w1", late);
        script.release("w1", late);
        script.release("w2", op);
    };
    // Of one permit, the second is another's.
    judged(
        Rule::Superseded,
        1,
        |script| run(script, THREE, THREE),
        |script| {
            run(script, ONE, ONE);
            forget_the_last_belief(script);
        },
    );
    for (same, other) in [(Mode::Shared, Mode::Exclusive), (THREE, Mode::Shared), (FOUR, THREE)] {
        let bad = |script: &mut Script| {
            run(script, same, other);
            // The release says that it was held until then, which is a belief: taken back.
            forget_the_last_belief(script);
        };
        judged(Rule::Superseded, 1, |script| run(script, same, same), bad);
    }
}

/// The last release is one that was dropped: it says nothing.
fn forget_the_last_belief(script: &mut Script) {
    if let Some(event) = script.events.last_mut() {
        event.what = What::Dropped;
    }
}

/// Also while it still has the guard of a lease in another mode, which was lost before.
#[test]
fn what_an_owner_nests_has_the_fence_of_the_guard_in_the_same_mode() {
    let run = |script: &mut Script, nested: u64| {
        let above = script.fence + 10;
        let acquire = What::Acquire { key: KEY.into(), within: None, owner: Some(1), mode: Mode::Shared };
        let lost = script.ask("w1", acquire);
        script.hear("w1", lost, What::Granted { fence: above });
        script.is_lost("w1", lost);
        let outer = script.nest("w1", 1, above + 5);
        let inner = script.nest("w1", 1, above + nested);
        // No belief, so that no two overlap.
        [inner, outer, lost].into_iter().for_each(|guard| script.drop_guard("w1", guard));
    };
    let bad = |script: &mut Script| run(script, 7);
    judged(Rule::FenceOrder, 1, |script| run(script, 5), bad);
}

/// Of two readers the one with the lower number may be refused by a resource, and is not late; and numbers that follow each
/// other are no hand-over.
#[test]
fn those_who_share_are_not_counted_as_late_or_handed_over() {
    let counted = |mode: Mode| {
        let mut script = Script::new(0);
        let above = script.fence + 10;
        let first = script.share("w1", mode, above);
        if mode == Mode::Exclusive {
            script.drop_guard("w1", first);
        }
        let second = script.share("w1", mode, above + 1);
        script.claim("w1", above + 1, true);
        script.claim("w1", above, false);
        script.drop_guard("w1", second);
        let report = script.check().1;
        (report.refused, report.handed_over)
    };
    assert_eq!(counted(Mode::Exclusive), (1, 1));
    assert_eq!(counted(Mode::Shared), (0, 0));
    assert_eq!(counted(THREE), (0, 0));
}

#[test]
fn a_mode_is_written_in_its_own_words() {
    let alone = Event { at: 1, process: "w1".into(), op: 1, what: What::acquire(KEY) };
    assert!(!serde_json::to_string(&alone).expect("JSON").contains("mode"));
    for mode in [Mode::Exclusive, Mode::Shared, THREE] {
        let what = What::Acquire { key: KEY.into(), within: None, owner: None, mode };
        let event = Event { what, ..alone.clone() };
        let line = serde_json::to_string(&event).expect("JSON");
        assert_eq!(serde_json::from_str::<Event>(&line).expect(&line), event);
    }
    for bad in ["permit of 0", "permit of", "readers", ""] {
        let line = format!(r#"{{"at":1,"process":"w1","op":1,"event":"acquire","key":"k","mode":"{bad}"}}"#);
        let error = serde_json::from_str::<Event>(&line).expect_err("no such mode").to_string();
        assert!(error.contains("is no mode"), "{error}");
    }
}
