//! How the histories are made: lawful traffic from a seed, and what a test puts behind it.

use lockkit_core::Mode;
use lockkit_testkit::history::{Event, History, Report, Rule, What, check};

pub(crate) const MILLI: u64 = 1_000_000;
pub(crate) const KEY: &str = "account/7";

/// Makes histories.
pub(crate) struct Script {
    pub(crate) events: Vec<Event>,
    pub(crate) now: u64,
    random: u64,
    ops: u64,
    /// The resource's order, its version, and its highest fence.
    order: u64,
    pub(crate) version: u64,
    pub(crate) fence: u64,
}

impl Script {
    pub(crate) fn new(seed: u64) -> Self {
        Self { events: Vec::new(), now: 1_000 * MILLI, random: seed * 2 + 1, ops: 0, order: 0, version: 0, fence: 1000 }
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    pub(crate) fn later(&mut self) -> u64 {
        self.now += 1 + self.below(3 * MILLI);
        self.now
    }

    pub(crate) fn push(&mut self, at: u64, process: &str, op: u64, what: What) {
        self.events.push(Event { at, process: process.into(), op, what });
    }

    pub(crate) fn ask(&mut self, process: &str, what: What) -> u64 {
        self.ops += 1;
        let (at, op) = (self.later(), self.ops);
        self.push(at, process, op, what);
        op
    }

    pub(crate) fn hear(&mut self, process: &str, op: u64, what: What) {
        let at = self.later();
        self.push(at, process, op, what);
    }

    pub(crate) fn acquire(&mut self, process: &str, fence: u64) -> u64 {
        let op = self.ask(process, What::acquire(KEY));
        self.hear(process, op, What::Granted { fence });
        op
    }

    /// Together with others.
    pub(crate) fn share(&mut self, process: &str, mode: Mode, fence: u64) -> u64 {
        let op = self.ask(process, What::Acquire { key: KEY.into(), within: None, owner: None, mode });
        self.hear(process, op, What::Granted { fence });
        op
    }

    /// For an owner, who may nest.
    pub(crate) fn nest(&mut self, process: &str, owner: u64, fence: u64) -> u64 {
        let op = self
            .ask(process, What::Acquire { key: KEY.into(), within: None, owner: Some(owner), mode: Mode::Exclusive });
        self.hear(process, op, What::Granted { fence });
        op
    }

    pub(crate) fn is_held(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Ask { grant });
        self.hear(process, op, What::Held);
    }

    pub(crate) fn is_lost(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Ask { grant });
        self.hear(process, op, What::Lost { reason: "the lease ran out".into() });
    }

    pub(crate) fn release(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Release { grant });
        self.hear(process, op, What::Released { held: true, reason: None });
    }

    pub(crate) fn drop_guard(&mut self, process: &str, grant: u64) {
        let op = self.ask(process, What::Release { grant });
        self.hear(process, op, What::Dropped);
    }

    pub(crate) fn claim(&mut self, by: &str, fence: u64, admitted: bool) {
        let (at, op) = (self.later(), self.next_record());
        self.push(at, "resource", op, What::Claimed { key: KEY.into(), by: by.into(), fence, admitted });
    }

    pub(crate) fn write(&mut self, by: &str, fence: u64, admitted: bool, base: u64) {
        let op = self.ask(by, What::Write { key: KEY.into(), fence });
        self.record(by, fence, admitted, base);
        self.hear(by, op, if admitted { What::Written } else { What::Refused });
    }

    /// The resource's order begins at 0.
    pub(crate) fn next_record(&mut self) -> u64 {
        self.order += 1;
        self.order - 1
    }

    /// The resource's side of a write.
    pub(crate) fn record(&mut self, by: &str, fence: u64, admitted: bool, base: u64) {
        let (at, op, version) = (self.later(), self.next_record(), self.version);
        self.version += u64::from(admitted);
        self.push(at, "resource", op, What::Updated { key: KEY.into(), by: by.into(), fence, admitted, base, version });
    }

    pub(crate) fn twin(&mut self, by: &str, version: u64) {
        let (at, op) = (self.later(), self.next_record());
        self.push(at, "resource", op, What::Twin { key: KEY.into(), by: by.into(), base: version, version });
    }

    /// Lawful traffic of four processes.
    pub(crate) fn traffic(&mut self, rounds: u64) {
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

    pub(crate) fn check(self) -> (History, Report) {
        let history = History::new(self.events);
        let report = check(&history);
        (history, report)
    }
}

/// Runs a good and a bad ending behind the same traffic, for many seeds: the good one must pass, the bad one break
/// exactly this rule, so often.
pub(crate) fn judged(rule: Rule, times: usize, good: impl Fn(&mut Script), bad: impl Fn(&mut Script)) {
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
