//! Who believes when, and the order of fences.

use lockkit_testkit::history::{Rule, What};

use crate::script::{KEY, Script, judged};

#[test]
fn two_who_believe_at_once_are_found() {
    let run = |script: &mut Script, believes_on: bool| {
        let fence = script.fence + 10;
        let old = script.acquire("w1", fence);
        script.is_held("w1", old);
        let new = script.acquire("w2", fence + 1);
        if believes_on {
            script.is_held("w1", old);
        } else {
            script.is_lost("w1", old);
        }
        script.is_held("w2", new);
        script.release("w2", new);
    };
    judged(Rule::Overlap, 1, |script| run(script, false), |script| run(script, true));
}

/// A long belief is compared with all that come in it, not just with the next one.
#[test]
fn a_long_belief_hides_behind_no_short_one() {
    let run = |script: &mut Script, asks_late: bool| {
        let fence = script.fence + 10;
        let old = script.acquire("w1", fence);
        for step in 1..=2 {
            let new = script.acquire("w2", fence + step);
            script.is_held("w2", new);
            script.release("w2", new);
        }
        if asks_late {
            script.is_held("w1", old);
        }
    };
    judged(Rule::Overlap, 2, |script| run(script, false), |script| run(script, true));
}

#[test]
fn a_fence_that_does_not_grow_is_found() {
    for less in [0, 1, 500] {
        let run = |script: &mut Script, less: u64| {
            let fence = script.fence + 1000;
            let first = script.acquire("w1", fence);
            script.release("w1", first);
            let second = script.acquire("w2", fence + 1 - less);
            script.release("w2", second);
        };
        judged(Rule::FenceOrder, 1, |script| run(script, 0), |script| run(script, less + 1));
    }
}

/// Acquisitions that overlap in time may get their fences in any order, but never the same one.
#[test]
fn fences_of_concurrent_grants_are_distinct() {
    let run = |script: &mut Script, fences: [u64; 2]| {
        let base = script.fence + 10;
        let ops = ["w1", "w2"].map(|process| script.ask(process, What::acquire(KEY)));
        for ((process, op), fence) in ["w1", "w2"].into_iter().zip(ops).zip(fences) {
            script.hear(process, op, What::Granted { fence: base + fence });
        }
    };
    judged(Rule::FenceOrder, 1, |script| run(script, [2, 1]), |script| run(script, [2, 2]));
}

/// Neither holder ever asks its guard, but both are told by `release` that they held the lock until then.
#[test]
fn two_releases_that_tell_of_one_time_are_found() {
    let run = |script: &mut Script, late: bool| {
        let fence = script.fence + 10;
        let old = script.acquire("w1", fence);
        if !late {
            script.release("w1", old);
        }
        let new = script.acquire("w2", fence + 1);
        if late {
            script.release("w1", old);
        }
        script.release("w2", new);
    };
    judged(Rule::Overlap, 1, |script| run(script, false), |script| run(script, true));
}

/// It was granted, and the process stood still before it could take note: by then the lease was over.
#[test]
fn who_hears_late_of_a_grant_does_not_believe() {
    let run = |script: &mut Script, believes: bool| {
        let fence = script.fence + 10;
        let late = script.ask("w1", What::acquire(KEY));
        let new = script.acquire("w2", fence + 1);
        script.is_held("w2", new);
        script.hear("w1", late, What::Granted { fence });
        if believes {
            script.is_held("w1", late);
        } else {
            script.is_lost("w1", late);
        }
        script.is_held("w2", new);
    };
    judged(Rule::Overlap, 1, |script| run(script, false), |script| run(script, true));
}

/// The two never believed at the same moment, but by their fences the one who believes later had the lock first.
#[test]
fn an_older_holder_who_believes_after_a_newer_one_is_found() {
    let run = |script: &mut Script, older: bool| {
        let fence = script.fence + 10;
        let late = script.ask("w1", What::acquire(KEY));
        let new = script.acquire("w2", fence + 1);
        script.release("w2", new);
        script.hear("w1", late, What::Granted { fence: if older { fence } else { fence + 2 } });
        script.is_held("w1", late);
    };
    judged(Rule::Superseded, 1, |script| run(script, false), |script| run(script, true));
}

/// The store had ended its lease early and granted another's, and it was handed over in its process all the same: with the
/// next fence of the old grant.
#[test]
fn a_hand_over_behind_a_newer_grant_is_found() {
    let run = |script: &mut Script, late: bool| {
        let fence = script.fence + 10;
        let first = script.acquire("w1/0", fence);
        script.release("w1/0", first);
        if !late {
            let second = script.acquire("w1/1", fence + 1);
            script.release("w1/1", second);
        }
        let other = script.acquire("w2/0", fence + 65);
        script.release("w2/0", other);
        if late {
            let second = script.acquire("w1/1", fence + 1);
            script.release("w1/1", second);
        }
    };
    judged(Rule::Superseded, 1, |script| run(script, false), |script| run(script, true));
}

#[test]
fn no_fence_after_a_fence_is_found() {
    let run = |script: &mut Script, fence: u64| {
        let first = script.acquire("w1", script.fence + 10);
        script.release("w1", first);
        let second = script.acquire("w2", fence);
        script.release("w2", second);
    };
    judged(Rule::FenceOrder, 1, |script| run(script, script.fence + 11), |script| run(script, 0));
    // A store that never gives any is not blamed here, but counted.
    let mut script = Script::new(1);
    for _ in 0..3 {
        let grant = script.acquire("w1", 0);
        script.release("w1", grant);
    }
    let report = script.check().1;
    assert_eq!((report.violations.len(), report.unfenced), (0, 3));
}

/// What one owner holds at once is one lease; what another holds, or what it takes after it had let go, is not.
#[test]
fn nested_grants_are_one_lease_and_no_others_are() {
    let nested = |script: &mut Script, process: &str, owner: u64, fence: u64| {
        let base = script.fence + 10;
        let outer = script.nest("w1", 1, base);
        script.is_held("w1", outer);
        let inner = script.nest(process, owner, base + fence);
        script.is_held("w1", outer);
        script.drop_guard("w1", outer);
        script.is_held(process, inner);
        script.release(process, inner);
    };
    let good = |script: &mut Script| nested(script, "w1", 1, 0);
    judged(Rule::FenceOrder, 1, good, |script| {
        let base = script.fence + 10;
        let first = script.nest("w1", 1, base);
        script.release("w1", first);
        let second = script.nest("w1", 1, base);
        script.release("w1", second);
    });
    for (process, owner, fence, rules) in [
        ("w1", 2, 1, &[Rule::Overlap][..]),
        ("w2", 1, 1, &[Rule::Overlap]),
        ("w1", 2, 0, &[Rule::Overlap, Rule::FenceOrder]),
        ("w1", 1, 1, &[Rule::Overlap, Rule::FenceOrder]),
    ] {
        let mut script = Script::new(9);
        nested(&mut script, process, owner, fence);
        let report = script.check().1;
        let found: Vec<_> = report.violations.iter().map(|violation| violation.rule).collect();
        assert!(rules.iter().all(|rule| found.contains(rule)), "{process} {owner} {fence}: {found:?}");
    }
    let mut script = Script::new(9);
    good(&mut script);
    let report = script.check().1;
    assert_eq!((report.grants, report.nested, report.dropped, report.most_held), (2, 1, 1, 2));
}
