//! The checker itself: seeded bad histories, one or more for each rule, each with its good twin.
//!
//! A history is a stretch of lawful traffic from a seed, with a few events changed. The checker must find exactly that.

use lockkit_core::LossReason;
use lockkit_testkit::history::{Event, History, Report, Rule, What, check, timeline};

const MILLI: u64 = 1_000_000;
const KEY: &str = "account/7";

/// Makes histories.
struct Script {
    events: Vec<Event>,
    now: u64,
    random: u64,
    ops: u64,
    /// The resource's order, its version, and its highest fence.
    order: u64,
    version: u64,
    fence: u64,
}

impl Script {
    fn new(seed: u64) -> Self {
        Self { events: Vec::new(), now: 1_000 * MILLI, random: seed * 2 + 1, ops: 0, order: 0, version: 0, fence: 1000 }
    }

    fn below(&mut self, limit: u64) -> u64 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    fn later(&mut self) -> u64 {
        self.now += 1 + self.below(3 * MILLI);
        self.now
    }

    fn push(&mut self, at: u64, process: &str, op: u64, what: What) {
        self.events.push(Event { at, process: process.into(), op, what });
    }

    fn ask(&mut self, process: &str, what: What) -> u64 {
        self.ops += 1;
        let (at, op) = (self.later(), self.ops);
        self.push(at, process, op, what);
        op
    }

    fn hear(&mut self, process: &str, op: u64, what: What) {
        let at = self.later();
        self.push(at, process, op, what);
    }

    fn acquire(&mut self, process: &str, fence: u64) -> u64 {
        let op = self.ask(process, What::Acquire { key: KEY.into(), within: None, owner: None });
        self.hear(process, op, What::Granted { fence });
        op
    }

    /// For an owner, who may nest.
    fn nest(&mut self, process: &str, owner: u64, fence: u64) -> u64 {
        let op = self.ask(process, What::Acquire { key: KEY.into(), within: None, owner: Some(owner) });
        self.hear(process, op, What::Granted { fence });
        op
    }

    fn is_held(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Ask { grant });
        self.hear(process, op, What::Held);
    }

    fn is_lost(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Ask { grant });
        self.hear(process, op, What::Lost { reason: "the lease ran out".into() });
    }

    fn release(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Release { grant });
        self.hear(process, op, What::Released { held: true, reason: None });
    }

    fn drop_guard(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Release { grant });
        self.hear(process, op, What::Dropped);
    }

    fn claim(&mut self, by: &str, fence: u64, admitted: bool) {
        let (at, op) = (self.later(), self.next_record());
        self.push(at, "resource", op, What::Claimed { key: KEY.into(), by: by.into(), fence, admitted });
    }

    fn write(&mut self, by: &str, fence: u64, admitted: bool, base: u64) {
        let op = self.ask(by, What::Write { key: KEY.into(), fence });
        self.record(by, fence, admitted, base);
        self.hear(by, op, if admitted { What::Written } else { What::Refused });
    }

    /// The resource's order begins at 0.
    fn next_record(&mut self) -> u64 {
        self.order += 1;
        self.order - 1
    }

    /// The resource's side of a write.
    fn record(&mut self, by: &str, fence: u64, admitted: bool, base: u64) {
        let (at, op, version) = (self.later(), self.next_record(), self.version);
        self.version += u64::from(admitted);
        self.push(at, "resource", op, What::Updated { key: KEY.into(), by: by.into(), fence, admitted, base, version });
    }

    fn twin(&mut self, by: &str, version: u64) {
        let (at, op) = (self.later(), self.next_record());
        self.push(at, "resource", op, What::Twin { key: KEY.into(), by: by.into(), base: version, version });
    }

    /// Lawful traffic of four processes.
    fn traffic(&mut self, rounds: u64) {
        for _ in 0..rounds {
            let process = format!("w{}", self.below(4));
            // Never next to one another, so that a fence that is off by one is nobody's.
            self.fence += 3 + self.below(3);
            let fence = self.fence;
            let grant = self.acquire(&process, fence);
            self.claim(&process, fence, true);
            self.is_held(&process, grant);
            let base = self.version;
            self.write(&process, fence, true, base);
            self.is_held(&process, grant);
            self.release(&process, grant);
        }
    }

    fn check(self) -> (History, Report) {
        let history = History::new(self.events);
        let report = check(&history);
        (history, report)
    }
}

/// Runs a good and a bad ending behind the same traffic, for many seeds: the good one must pass, the bad one break
/// exactly this rule, so often.
fn judged(rule: Rule, times: usize, good: impl Fn(&mut Script), bad: impl Fn(&mut Script)) {
    for seed in 0..50 {
        let run = |end: &dyn Fn(&mut Script)| {
            let mut script = Script::new(seed);
            script.traffic(seed % 20);
            end(&mut script);
            script.fence += 3000;
            script.traffic(seed % 7);
            script.check().1
        };
        let passed = run(&good);
        assert!(passed.violations.is_empty(), "seed {seed}: {}", passed.violations[0]);
        let failed = run(&bad);
        assert_eq!(failed.count(rule), times, "seed {seed}: {:?}", failed.violations);
        assert_eq!(failed.violations.len(), times, "seed {seed}: {:?}", failed.violations);
    }
}

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

/// Killed between asking and hearing: nobody knows whether it was granted, and nobody is blamed.
#[test]
fn what_nobody_heard_is_held_against_nobody() {
    let unheard = |script: &mut Script| {
        let fence = script.fence + 10;
        script.ask("w1", What::Acquire { key: KEY.into(), within: None, owner: None });
        let held = script.acquire("w2", fence);
        let failed = script.ask("w3", What::Acquire { key: KEY.into(), within: None, owner: None });
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
        let ops = ["w1", "w2"]
            .map(|process| script.ask(process, What::Acquire { key: KEY.into(), within: None, owner: None }));
        for ((process, op), fence) in ["w1", "w2"].into_iter().zip(ops).zip(fences) {
            script.hear(process, op, What::Granted { fence: base + fence });
        }
    };
    judged(Rule::FenceOrder, 1, |script| run(script, [2, 1]), |script| run(script, [2, 2]));
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
        let op = script.ask("w1", What::Acquire { key: KEY.into(), within: Some(100 * MILLI), owner: None });
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
        let late = script.ask("w1", What::Acquire { key: KEY.into(), within: None, owner: None });
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
        let late = script.ask("w1", What::Acquire { key: KEY.into(), within: None, owner: None });
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
                script.ask("w2", What::Acquire { key: key(), within: None, owner: None });
            }
            let op = script.ask("w1", What::Acquire { key: key(), within: None, owner: None });
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
        judged(Rule::Answer, 1, |script| run(script, false), |script| run(script, true));
    }
    let mut script = Script::new(1);
    let op = script.ask("w1", What::Acquire { key: KEY.into(), within: None, owner: None });
    script.hear("w1", op, What::Contended);
    assert_eq!(script.check().1.contended_alone, 1);
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
        let op = script.ask("w1", What::Acquire { key: KEY.into(), within: Some(u64::MAX / 2), owner: None });
        let heard = if granted { What::Granted { fence } } else { What::Failed { error: "no".into() } };
        script.hear("w1", op, heard);
    };
    judged(Rule::Liveness, 1, |script| run(script, true), |script| run(script, false));
}

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
    let rival = script.ask("w2", What::Acquire { key: KEY.into(), within: None, owner: None });
    script.hear("w2", rival, What::Contended);
    let gone = script.ask("w3", What::Acquire { key: KEY.into(), within: None, owner: None });
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

#[test]
fn a_violation_is_explained_and_drawn() {
    let mut script = Script::new(3);
    script.traffic(6);
    let at = script.later();
    script.push(at, "nemesis", 1, What::Fault { note: "FLUSHALL <all>".into() });
    let fence = script.fence + 10;
    let old = script.acquire("w1", fence);
    script.claim("w1", fence, true);
    script.is_held("w1", old);
    let new = script.acquire("w2", fence + 1);
    script.claim("w2", fence + 1, true);
    script.is_held("w1", old);
    let base = script.version;
    script.write("w1", fence, false, base);
    script.hear("nemesis", 1, What::Healed);
    script.is_held("w2", new);
    script.release("w2", new);
    script.fence += 100;
    script.traffic(2);
    let (history, report) = script.check();
    let [violation] = &report.violations[..] else { panic!("{:?}", report.violations) };
    let text = violation.to_string();
    for part in ["two holders at once", "w1 ", "w2 ", "grant ", &format!("fence {fence}"), " s to "] {
        assert!(text.contains(part), "{text}");
    }
    let svg = timeline(&history, violation);
    for part in ["<svg ", "FLUSHALL &lt;all&gt;", "class=\"bad\"", "class=\"refused\"", "</svg>"] {
        assert!(svg.contains(part), "no {part} in {svg}");
    }
    // Whoever wants to look at it.
    if let Some(path) = std::env::var_os("LOCKKIT_TIMELINE") {
        std::fs::write(path, svg).expect("write");
    }
}

#[test]
fn a_history_survives_its_files() {
    let mut script = Script::new(11);
    script.traffic(20);
    let (history, _) = script.check();
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("history.jsonl");
    // The last line of a process that was killed.
    std::fs::write(&path, history.to_lines() + "{\"at\":12,\"proc").expect("write");
    let read = History::read([&path]).expect("read");
    assert_eq!(read.events(), history.events());
    std::fs::write(&path, "nonsense\n").expect("write");
    assert!(History::read([&path]).expect_err("nonsense").to_string().contains("line 1"));
}

/// A million events take a moment, not a minute: the rules sort, and search nothing.
#[test]
fn a_long_history_is_judged_at_once() {
    let mut script = Script::new(1);
    script.traffic(40_000);
    let start = std::time::Instant::now();
    let (_, report) = script.check();
    assert_eq!((report.grants, report.violations.len()), (40_000, 0));
    assert!(start.elapsed() < std::time::Duration::from_secs(20), "{:?}", start.elapsed());
}
