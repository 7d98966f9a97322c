//! Locks that are granted in the order in which they were asked for.

use std::num::NonZeroU32;

use lockkit_core::Mode;
use lockkit_testkit::history::{Rule, What};

use crate::script::{KEY, Script, judged};

/// Asks the store who waits, and is told of these.
fn look(script: &mut Script, waiting: &[&str]) {
    let op = script.ask("observer", What::Look { key: KEY.into() });
    script.hear("observer", op, What::Queue { waiting: waiting.iter().map(|&name| name.into()).collect() });
}

fn wish(mode: Mode) -> What {
    What::Acquire { key: KEY.into(), within: None, owner: None, mode }
}

/// `v1` holds the lock while `first` and then `second` ask for it; they are granted it with fences so far above that of `v1`.
fn line_up(script: &mut Script, is_seen: bool, modes: [Mode; 2], fences: [u64; 2]) {
    let fence = script.fence + 10;
    let held = script.acquire("v1", fence);
    let first = script.ask("first", wish(modes[0]));
    if is_seen {
        look(script, &["first"]);
    }
    let second = script.ask("second", wish(modes[1]));
    look(script, &["first", "second"]);
    script.release("v1", held);
    let mut granted = [("first", first, fence + fences[0]), ("second", second, fence + fences[1])];
    granted.sort_by_key(|(_, _, fence)| *fence);
    for (process, grant, fence) in granted {
        script.hear(process, grant, What::Granted { fence });
        script.is_held(process, grant);
        script.release(process, grant);
    }
}

const ALONE: [Mode; 2] = [Mode::Exclusive, Mode::Exclusive];

#[test]
fn nobody_passes_one_that_had_its_place() {
    for modes in [ALONE, [Mode::Exclusive, Mode::Shared], [Mode::Shared, Mode::Exclusive]] {
        let good = |script: &mut Script| line_up(script, true, modes, [1, 2]);
        judged(Rule::Order, 1, good, |script| line_up(script, true, modes, [2, 1]));
    }
}

/// Which of two came first is known only if the first was seen in its place before the second asked.
#[test]
fn those_that_came_at_once_have_any_order() {
    let good = |script: &mut Script| line_up(script, false, ALONE, [2, 1]);
    judged(Rule::Order, 1, good, |script| line_up(script, true, ALONE, [2, 1]));
}

/// Fences of the order in which the requests came say nothing of the order of the grants.
#[test]
fn one_that_still_waits_was_passed() {
    let passed = |script: &mut Script, waits: bool| {
        let fence = script.fence + 10;
        let held = script.acquire("v1", fence);
        let first = script.ask("first", wish(Mode::Exclusive));
        look(script, &["first"]);
        script.release("v1", held);
        let second = script.acquire("second", fence + 2);
        script.release("second", second);
        look(script, if waits { &["first"] } else { &[] });
        script.hear("first", first, What::Granted { fence: fence + 1 });
    };
    // One that is not seen any more may have been granted the lock before, have lost it, and hear of it late.
    judged(Rule::Order, 1, |script| passed(script, false), |script| passed(script, true));
}

/// A place may be lost while something is wrong.
#[test]
fn what_went_wrong_excuses_a_lost_place() {
    let run = |script: &mut Script, is_wrong: bool, heals: bool| {
        let fence = script.fence + 10;
        let held = script.acquire("v1", fence);
        let first = script.ask("first", wish(Mode::Exclusive));
        look(script, &["first"]);
        if is_wrong {
            let fault = script.ask("nemesis", What::Fault { note: "connections are reset".into() });
            if heals {
                script.hear("nemesis", fault, What::Healed);
            } else {
                look(script, &["first"]);
            }
        }
        let second = script.ask("second", wish(Mode::Exclusive));
        script.release("v1", held);
        for (process, grant, fence) in [("second", second, fence + 1), ("first", first, fence + 2)] {
            script.hear(process, grant, What::Granted { fence });
            script.is_held(process, grant);
            script.release(process, grant);
        }
    };
    for heals in [true, false] {
        judged(Rule::Order, 1, |script| run(script, true, heals), |script| run(script, false, heals));
    }
}

/// One process that has asked twice: nobody knows which of the two is shown.
#[test]
fn a_name_that_means_two_says_nothing() {
    let run = |script: &mut Script, twice: bool| {
        let fence = script.fence + 10;
        let held = script.acquire("v1", fence);
        let first = script.ask("first", wish(Mode::Exclusive));
        let other = twice.then(|| script.ask("first", wish(Mode::Exclusive)));
        look(script, &["first"]);
        let second = script.ask("second", wish(Mode::Exclusive));
        script.release("v1", held);
        let granted = [("second", Some(second)), ("first", Some(first)), ("first", other)];
        for (process, grant) in granted {
            let Some(grant) = grant else { continue };
            script.fence += 20;
            let fence = script.fence;
            script.hear(process, grant, What::Granted { fence });
            script.is_held(process, grant);
            script.release(process, grant);
        }
    };
    judged(Rule::Order, 1, |script| run(script, true), |script| run(script, false));
}

/// Those that share a lock get in together, whichever hears of it first.
#[test]
fn those_that_share_the_lock_may_get_in_in_any_order() {
    let run = |script: &mut Script, [first, second]: [Mode; 2], [one, two]: [u64; 2]| {
        let fence = script.fence + 10;
        let held = script.acquire("v1", fence);
        let early = script.ask("first", wish(first));
        look(script, &["first"]);
        let late = script.ask("second", wish(second));
        script.release("v1", held);
        script.hear("second", late, What::Granted { fence: fence + two });
        look(script, &["first"]);
        script.release("second", late);
        script.hear("first", early, What::Granted { fence: fence + one });
        script.release("first", early);
    };
    let two = Mode::Permit { limit: NonZeroU32::new(2).expect("not zero") };
    let writer = |script: &mut Script| run(script, [Mode::Exclusive, Mode::Shared], [2, 1]);
    judged(Rule::Order, 1, |script| run(script, [Mode::Shared; 2], [1, 1]), writer);
    judged(Rule::Order, 1, |script| run(script, [two; 2], [2, 1]), writer);
    // A group of readers has its number when its first one gets in.
    let another_group = |script: &mut Script| run(script, [Mode::Shared; 2], [2, 1]);
    judged(Rule::Order, 1, |script| run(script, [Mode::Shared; 2], [1, 2]), another_group);
}

#[test]
fn those_that_were_seen_to_wait_are_counted() {
    let mut script = Script::new(1);
    line_up(&mut script, true, ALONE, [1, 2]);
    let (_, report) = script.check();
    assert_eq!((report.queued, report.violations.len()), (2, 0), "{:?}", report.violations);
    let mut script = Script::new(1);
    script.traffic(5);
    assert_eq!(script.check().1.queued, 0);
}
