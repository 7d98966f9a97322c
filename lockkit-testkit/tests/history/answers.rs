//! Answers that can't be true: of guards, of resources, and of locks that must be free.

use lockkit_core::{LossReason, Mode};
use lockkit_testkit::history::{Rule, What};

use crate::script::{KEY, MILLI, Script, judged};

/// Killed between asking and hearing: nobody knows whether it was granted, and nobody is blamed.
#[test]
fn what_nobody_heard_is_held_against_nobody() {
    let unheard = |script: &mut Script| {
        let fence = script.fence + 10;
        script.ask("w1", What::acquire(KEY));
        let held = script.acquire("w2", fence);
        let failed = script.ask("w3", What::acquire(KEY));
        script.hear("w3", failed, What::Failed { error: "timed out".into() });
        // The guard was asked, and the process died before it heard.
        script.ask("w2", What::Ask { grant: held });
        let next = script.acquire("w3", fence + 1);
        script.is_held("w3", next);
        // A write that was never answered, and that the resource took; another that it did not.
        script.claim("w3", fence + 1, true);
        script.ask("w3", What::Write { key: KEY.into(), fence: fence + 1 });
        let base = script.version;
        script.record("w3", fence + 1, true, base);
        script.ask("w3", What::Write { key: KEY.into(), fence: fence + 1 });
    };
    judged(Rule::Resource, 1, unheard, |script| {
        unheard(script);
        // Written, said the resource to the client, and it has no record of it. A count would not show that: it has one of
        // a write that was never answered.
        let op = script.ask("w3", What::Write { key: KEY.into(), fence: script.fence + 11 });
        script.hear("w3", op, What::Written);
    });
}

#[test]
fn a_resource_that_admits_the_late_is_found() {
    let run = |script: &mut Script, admitted: bool| {
        let fence = script.fence + 10;
        script.acquire("w1", fence);
        script.claim("w1", fence, true);
        script.acquire("w2", fence + 1);
        script.claim("w2", fence + 1, true);
        let base = script.version;
        script.write("w1", fence, admitted, base);
    };
    judged(Rule::Resource, 1, |script| run(script, false), |script| run(script, true));
}

#[test]
fn a_resource_that_refuses_the_newest_is_found() {
    let run = |script: &mut Script, admitted: bool| {
        let fence = script.fence + 10;
        script.acquire("w1", fence);
        script.claim("w1", fence, true);
        script.acquire("w2", fence + 1);
        script.claim("w2", fence + 1, admitted);
    };
    judged(Rule::Resource, 1, |script| run(script, true), |script| run(script, false));
}

#[test]
fn a_lost_update_is_found() {
    let run = |script: &mut Script, behind: u64| {
        let fence = script.fence + 10;
        script.acquire("w1", fence);
        script.claim("w1", fence, true);
        let base = script.version;
        script.write("w1", fence, true, base);
        script.write("w1", fence, true, base + 1 - behind);
    };
    judged(Rule::Resource, 1, |script| run(script, 0), |script| run(script, 1));
}

#[test]
fn a_lock_that_is_not_to_be_had_is_found() {
    let run = |script: &mut Script, waits: u64, granted: bool| {
        let fence = script.fence + 10;
        let op = script.ask(
            "w1",
            What::Acquire { key: KEY.into(), within: Some(100 * MILLI), owner: None, mode: Mode::Exclusive },
        );
        script.now += waits;
        let heard = if granted { What::Granted { fence } } else { What::Failed { error: "no answer in time".into() } };
        script.hear("w1", op, heard);
    };
    judged(Rule::Liveness, 1, |script| run(script, 90 * MILLI, true), |script| run(script, 200 * MILLI, true));
    judged(Rule::Liveness, 1, |script| run(script, 90 * MILLI, true), |script| run(script, 200 * MILLI, false));
}

#[test]
fn the_twin_counts_what_happens_without_a_check() {
    let mut script = Script::new(7);
    script.traffic(3);
    for (base, version) in [(0, 0), (0, 1), (2, 2)] {
        let (at, op) = (script.later(), script.next_record());
        script.push(at, "resource", op, What::Twin { key: KEY.into(), by: "w1".into(), base, version });
    }
    let report = script.check().1;
    assert_eq!((report.grants, report.lost, report.twin_writes, report.lost_on_twins), (3, 0, 3, 1));
    assert!(report.violations.is_empty());
}

#[test]
fn held_after_lost_is_found() {
    let run = |script: &mut Script, end: &dyn Fn(&mut Script, u64)| {
        let fence = script.fence + 10;
        let grant = script.acquire("w1", fence);
        script.is_held("w1", grant);
        script.is_lost("w1", grant);
        end(script, grant);
    };
    let lost = |script: &mut Script, grant| {
        script.is_lost("w1", grant);
        script.drop_guard("w1", grant);
    };
    let renewed = |script: &mut Script, grant| {
        let op = script.ask("w1", What::Renew { grant });
        script.hear("w1", op, What::Held);
    };
    for bad in [&|script: &mut Script, grant| script.is_held("w1", grant), &renewed as &dyn Fn(&mut Script, u64)] {
        judged(Rule::Answer, 1, |script| run(script, &lost), |script| run(script, bad));
    }
    judged(
        Rule::Answer,
        1,
        |script| run(script, &lost),
        |script| run(script, &|script, grant| script.release("w1", grant)),
    );
}

/// A lease is lost for all the guards that its owner has of it.
#[test]
fn held_after_lost_is_found_among_nested_guards() {
    let run = |script: &mut Script, held: bool| {
        let fence = script.fence + 10;
        let outer = script.nest("w1", 1, fence);
        let inner = script.nest("w1", 1, fence);
        script.is_held("w1", outer);
        script.is_lost("w1", inner);
        if held {
            script.is_held("w1", outer);
        }
    };
    judged(Rule::Answer, 1, |script| run(script, false), |script| run(script, true));
}

/// Lost to another, says an answer; and nobody else ever asked for the lock.
#[test]
fn a_rival_that_never_was_is_found() {
    for asked in [true, false] {
        let run = |script: &mut Script, alone: bool| {
            let key = || String::from(if alone { "account/alone" } else { KEY });
            if !alone {
                script.ask("w2", What::acquire(key()));
            }
            let op = script.ask("w1", What::acquire(key()));
            let reason = LossReason::Taken.to_string();
            let fence = script.fence + 10;
            script.hear("w1", op, What::Granted { fence });
            if asked {
                let asked = script.ask("w1", What::Ask { grant: op });
                script.hear("w1", asked, What::Lost { reason });
            } else {
                let asked = script.ask("w1", What::Release { grant: op });
                script.hear("w1", asked, What::Released { held: false, reason: Some(reason) });
            }
        };
        judged(Rule::Rival, 1, |script| run(script, false), |script| run(script, true));
    }
    let mut script = Script::new(1);
    let op = script.ask("w1", What::acquire(KEY));
    script.hear("w1", op, What::Contended);
    assert_eq!(script.check().1.contended_alone, 1);
}

/// The resource acknowledged a write and lost it, and did one whose writer never heard of it: by number all is well.
#[test]
fn an_acknowledged_write_does_not_hide_behind_an_unanswered_one() {
    let run = |script: &mut Script, lost: bool| {
        let fence = script.fence + 10;
        script.acquire("w1", fence);
        script.claim("w1", fence, true);
        script.ask("w1", What::Write { key: KEY.into(), fence });
        let base = script.version;
        script.record("w1", fence, true, base);
        let op = script.ask("w1", What::Write { key: KEY.into(), fence });
        if !lost {
            script.record("w1", fence, true, base + 1);
        }
        script.hear("w1", op, What::Written);
    };
    // The record of the first write comes before the second was asked for.
    judged(Rule::Resource, 1, |script| run(script, false), |script| run(script, true));
}

#[test]
fn versions_that_do_not_advance_are_found() {
    let run = |script: &mut Script, step: u64| {
        let fence = script.fence + 10;
        script.acquire("w1", fence);
        script.claim("w1", fence, true);
        let base = script.version;
        script.write("w1", fence, true, base);
        script.version = base + step;
        script.write("w1", fence, true, base + step);
        script.version = base + 2;
        if step != 1 {
            // Back on its course, so that it is one step that is wrong.
            script.version = base + step + 1;
        }
    };
    judged(Rule::Resource, 1, |script| run(script, 1), |script| run(script, 0));
    judged(Rule::Resource, 1, |script| run(script, 1), |script| run(script, 2));
}

/// What is asked in vain need not wait for the end of the history to be found.
#[test]
fn an_early_refusal_is_not_in_time() {
    let run = |script: &mut Script, granted: bool| {
        let fence = script.fence + 10;
        let op = script.ask(
            "w1",
            What::Acquire { key: KEY.into(), within: Some(u64::MAX / 2), owner: None, mode: Mode::Exclusive },
        );
        let heard = if granted { What::Granted { fence } } else { What::Failed { error: "no".into() } };
        script.hear("w1", op, heard);
    };
    judged(Rule::Liveness, 1, |script| run(script, true), |script| run(script, false));
}
