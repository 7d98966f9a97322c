//! The checker itself: seeded bad histories, one or more for each rule, each with its good twin.
//!
//! A history is a stretch of lawful traffic from a seed, with a few events changed. The checker must find exactly that.

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
        let op = self.ask(process, What::Acquire { key: KEY.into(), within: None });
        self.hear(process, op, What::Granted { fence });
        op
    }

    fn is_held(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Ask { grant });
        self.hear(process, op, What::Held);
    }

    fn release(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Release { grant });
        self.hear(process, op, What::Released { held: true });
    }

    fn claim(&mut self, by: &str, fence: u64, admitted: bool) {
        self.order += 1;
        let (at, op) = (self.later(), self.order);
        self.push(at, "resource", op, What::Claimed { key: KEY.into(), by: by.into(), fence, admitted });
    }

    fn write(&mut self, by: &str, fence: u64, admitted: bool, base: u64) {
        let op = self.ask(by, What::Write { key: KEY.into(), fence });
        self.record(by, fence, admitted, base);
        self.hear(by, op, if admitted { What::Written } else { What::Refused });
    }

    /// The resource's side of a write.
    fn record(&mut self, by: &str, fence: u64, admitted: bool, base: u64) {
        self.order += 1;
        let (at, op, version) = (self.later(), self.order, self.version);
        self.version += u64::from(admitted);
        self.push(at, "resource", op, What::Updated { key: KEY.into(), by: by.into(), fence, admitted, base, version });
    }

    /// Lawful traffic of four processes.
    fn traffic(&mut self, rounds: u64) {
        for _ in 0..rounds {
            let process = format!("w{}", self.below(4));
            self.fence += 1 + self.below(3);
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
            let op = script.ask("w1", What::Ask { grant: old });
            script.hear("w1", op, What::Lost { reason: "the lease ran out".into() });
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
        script.ask("w1", What::Acquire { key: KEY.into(), within: None });
        let held = script.acquire("w2", fence);
        let failed = script.ask("w3", What::Acquire { key: KEY.into(), within: None });
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
        // Written, said the resource to the client; but it has no record of it, nor of the one that is open.
        for _ in 0..3 {
            let op = script.ask("w3", What::Write { key: KEY.into(), fence: 1 });
            script.hear("w3", op, What::Written);
        }
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
        let ops = ["w1", "w2"].map(|process| script.ask(process, What::Acquire { key: KEY.into(), within: None }));
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
        script.claim("w1", fence, true);
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
        script.claim("w1", fence, true);
        script.claim("w2", fence + 1, admitted);
    };
    judged(Rule::Resource, 1, |script| run(script, true), |script| run(script, false));
}

#[test]
fn a_lost_update_is_found() {
    let run = |script: &mut Script, behind: u64| {
        let fence = script.fence + 10;
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
        let op = script.ask("w1", What::Acquire { key: KEY.into(), within: Some(100 * MILLI) });
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
        let at = script.later();
        script.push(at, "resource", version, What::Twin { key: KEY.into(), by: "w1".into(), base, version });
    }
    let report = script.check().1;
    assert_eq!((report.grants, report.lost, report.twin_writes, report.lost_on_twins), (3, 0, 3, 1));
    assert!(report.violations.is_empty());
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
