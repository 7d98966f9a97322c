//! Locks that are asked for, and that nobody has.

use std::time::Duration;

use lockkit_testkit::history::{History, Report, Rule, What, check, check_reach};

use crate::script::{KEY, MILLI, Script};

/// What the histories here allow.
const WITHIN: Duration = Duration::from_millis(500);

fn wish() -> What {
    What::acquire(KEY)
}

/// Traffic of `w0` to `w3`, what `end` puts behind it, and more traffic; judged for many seeds.
fn reports(end: impl Fn(&mut Script)) -> impl Iterator<Item = Report> {
    (0..50).map(move |seed| {
        let mut script = Script::new(seed);
        script.traffic(1 + seed % 20);
        end(&mut script);
        script.fence += 3000;
        script.traffic(seed % 7);
        let history = History::new(script.events);
        let plain = check(&history);
        assert_eq!((plain.count(Rule::Reach), plain.out_of_reach), (0, None), "nobody wanted to know");
        check_reach(&history, WITHIN)
    })
}

#[track_caller]
fn passes(end: impl Fn(&mut Script)) {
    for report in reports(end) {
        assert!(report.violations.is_empty(), "{}", report.violations[0]);
        assert!(report.out_of_reach.is_some_and(|longest| longest <= WITHIN), "{report:?}");
    }
}

#[track_caller]
fn is_found(times: usize, end: impl Fn(&mut Script)) {
    for report in reports(end) {
        assert_eq!((report.count(Rule::Reach), report.violations.len()), (times, times), "{:?}", report.violations);
        assert!(report.out_of_reach.is_some_and(|longest| longest > WITHIN), "{report:?}");
    }
}

#[test]
fn a_lock_that_nobody_has_and_nobody_gets_is_found() {
    let run = |script: &mut Script, free: u64| {
        let fence = script.fence + 10;
        let held = script.acquire("v1", fence);
        let op = script.ask("v2", wish());
        // For as long as it is held, there is nothing to be had.
        script.now += 2000 * MILLI;
        script.is_held("v1", held);
        script.release("v1", held);
        script.now += free;
        script.hear("v2", op, What::Granted { fence: fence + 1 });
    };
    passes(|script| run(script, 450 * MILLI));
    is_found(1, |script| run(script, 520 * MILLI));
}

/// One after the other gives up, and each refusal comes at once: the lock is out of reach all the same.
#[test]
fn several_who_ask_in_vain_count_as_one() {
    let run = |script: &mut Script, heard: &What, pause: u64| {
        for turn in 0..12 {
            let process = format!("v{}", turn % 3);
            let op = script.ask(&process, wish());
            script.hear(&process, op, heard.clone());
            script.now += pause;
        }
    };
    is_found(1, |script| run(script, &What::Contended, 60 * MILLI));
    // Nobody asks for a while; and who gives up by itself asks for nothing.
    passes(|script| run(script, &What::Contended, 110 * MILLI));
    passes(|script| run(script, &What::Cancelled, 60 * MILLI));
}

/// What ended with an error may have been granted, and be in the way for as long as a lease lasts: once.
#[test]
fn after_an_error_the_time_counts_anew() {
    let run = |script: &mut Script, after: u64| {
        let waiting = script.ask("v2", wish());
        script.now += 400 * MILLI;
        let op = script.ask("v3", wish());
        script.hear("v3", op, What::Failed { error: "no answer".into() });
        script.now += after;
        script.hear("v2", waiting, What::Granted { fence: script.fence + 10 });
    };
    passes(|script| run(script, 450 * MILLI));
    is_found(1, |script| run(script, 520 * MILLI));
}

/// The lease of a holder that was killed may run on: from then the time counts. So it does for one that stands still.
#[test]
fn a_holder_that_is_killed_or_stands_still_has_the_lock_no_more() {
    let run = |script: &mut Script, free: u64, healed: bool| {
        let fence = script.fence + 10;
        let held = script.acquire("v1/0", fence);
        script.is_held("v1/0", held);
        let op = script.ask("v2/0", wish());
        // Alive and working for as long as this.
        script.now += 700 * MILLI;
        if healed {
            // Else nobody would know: it is told later that it has lost the lock.
            script.is_held("v1/0", held);
        }
        let trouble = script.ask("v1", What::Fault { note: "trouble".into() });
        script.now += free;
        script.hear("v2/0", op, What::Granted { fence: fence + 1 });
        if healed {
            script.hear("v1", trouble, What::Healed);
            script.is_lost("v1/0", held);
            script.drop_guard("v1/0", held);
        }
    };
    for healed in [false, true] {
        passes(|script| run(script, 450 * MILLI, healed));
        is_found(1, |script| run(script, 520 * MILLI, healed));
    }
}

/// Who was killed between asking and hearing, and who stands still, waits for nothing.
#[test]
fn who_can_not_hear_does_not_ask() {
    let run = |script: &mut Script, note: Option<&str>, healed: bool| {
        let op = script.ask("v3/1", wish());
        let trouble = note.map(|note| script.ask("v3", What::Fault { note: note.into() }));
        script.now += 2000 * MILLI;
        if let (Some(trouble), true) = (trouble, healed) {
            script.hear("v3", trouble, What::Healed);
        }
        if healed {
            script.hear("v3/1", op, What::Cancelled);
        }
    };
    passes(|script| run(script, Some("killed"), false));
    passes(|script| run(script, None, false));
    passes(|script| run(script, Some("stands still"), true));
    is_found(1, |script| run(script, None, true));
}

#[test]
fn a_fault_of_the_store_excuses_it_until_it_is_healed() {
    let run = |script: &mut Script, whom: &str, after: u64| {
        script.fence += 10;
        let (fence, op) = (script.fence, script.ask("v0/7", wish()));
        script.hear("v0/7", op, What::Cancelled);
        let op = script.ask("v2", wish());
        let fault = script.ask(whom, What::Fault { note: "cut off".into() });
        script.now += 2000 * MILLI;
        script.hear(whom, fault, What::Healed);
        script.now += after;
        script.hear("v2", op, What::Granted { fence });
    };
    passes(|script| run(script, "store", 450 * MILLI));
    is_found(1, |script| run(script, "store", 520 * MILLI));
    // What befalls one worker is no excuse for the others.
    is_found(1, |script| run(script, "v0", 0));
}

/// A grant that was heard of too late, when it was over, still says that the lock was given out.
#[test]
fn a_lease_that_was_lost_at_once_ends_the_wait() {
    passes(|script| {
        let fence = script.fence + 10;
        let op = script.ask("v2", wish());
        for step in 0..3 {
            script.now += 400 * MILLI;
            let late = script.acquire("v1", fence + 10 * step);
            script.is_lost("v1", late);
            script.drop_guard("v1", late);
        }
        script.hear("v2", op, What::Cancelled);
    });
}
