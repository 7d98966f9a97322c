//! From what was written down to who held the lock when. No I/O.

use std::{collections::BTreeMap, fmt};

use lockkit_testkit::history::{Event, History, Rule, What, check};

use crate::error::{Error, Result};

/// What happens to a holder, or to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// The holder is killed (SIGKILL): its system closes its connections.
    Killed,
    /// The holder is frozen (SIGSTOP) past the end of its lease, and then goes on.
    Frozen,
    /// Between the holder and the servers nothing comes through any more, until after the end of its lease.
    Cut,
    /// A server is killed (SIGKILL) and started again; of a quorum one of its servers.
    Restarted,
}

impl Fault {
    /// All faults, in the order in which they are inflicted.
    pub const ALL: [Self; 4] = [Self::Killed, Self::Frozen, Self::Cut, Self::Restarted];

    /// The name in the JSON, which stays the same.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Killed => "killed",
            Self::Frozen => "frozen",
            Self::Cut => "cut",
            Self::Restarted => "restarted",
        }
    }

    /// What it is, for people.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Killed => "Holder killed",
            Self::Frozen => "Holder frozen past its lease, then continued",
            Self::Cut => "Holder cut from the servers past its lease",
            Self::Restarted => "Server killed and started again",
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Who held a lock when, while a fault was inflicted. All times are in seconds from the beginning of the fault, and negative before it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Timeline {
    /// What was inflicted.
    pub fault: Fault,
    /// The store.
    pub store: String,
    /// Those who fought for the lock. Other members name them by their place here.
    pub processes: Vec<String>,
    /// Which of them met with the fault; `None` if a server did.
    pub victim: Option<usize>,
    /// When the fault was over; `None` of one that is not.
    pub over: Option<f64>,
    /// From when to when it was watched.
    pub span: (f64, f64),
    /// Who believed to hold the lock, in the order of time.
    pub beliefs: Vec<Belief>,
    /// When two believed at once.
    pub overlaps: Vec<Overlap>,
    /// How many writes the resource took.
    pub written: u64,
    /// The writes that it refused, for it had seen a higher fence.
    pub refused: Vec<Refusal>,
    /// When another process than the one that had held it then got the lock; `None` if that one kept it.
    pub taken: Option<f64>,
    /// Whether the server came back without its locks, as the store says of such a server, so that another may be granted what is held.
    pub forgets: bool,
    /// How often a rule was broken that the store keeps: two at once, fences out of order, what a fence must refuse.
    pub(crate) broken: u64,
}

/// A time in which a process believed to hold the lock: from when it heard of its grant until it last asked and was told so.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Belief {
    /// Whose.
    pub process: usize,
    /// When it heard of its grant.
    pub from: f64,
    /// When it last asked and was told yes, or gave the lock back.
    pub until: f64,
    /// The fence of the grant.
    pub fence: u64,
    /// How it ended.
    pub end: Ending,
}

/// How it ended that somebody believed to hold a lock.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Ending {
    /// The lock was given back.
    Released,
    /// The holder was told that it is lost.
    Lost {
        /// When.
        told: f64,
        /// Why.
        reason: String,
    },
    /// The holder was not heard of any more, or the watching ended.
    Open,
}

/// A time in which two believed to hold the lock.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Overlap {
    /// When the second one began to.
    pub from: f64,
    /// When one of them ceased to.
    pub until: f64,
    /// The two.
    pub processes: [usize; 2],
}

/// A write that the resource refused.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Refusal {
    /// Who wrote.
    pub process: usize,
    /// When.
    pub at: f64,
    /// The fence that it showed.
    pub fence: u64,
}

/// The fault, in nanoseconds of the clock that all processes share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Struck {
    pub(crate) began: u64,
    pub(crate) ended: Option<u64>,
    pub(crate) victim: Option<usize>,
    /// Whether the server came back without its locks.
    pub(crate) forgets: bool,
}

impl Overlap {
    /// How long it was, in milliseconds.
    #[must_use]
    pub fn millis(&self) -> f64 {
        (self.until - self.from) * 1e3
    }
}

impl Timeline {
    /// What a record shows.
    ///
    /// # Errors
    /// If the record is one that nobody can have lived through: then it is the recording that is wrong.
    pub(crate) fn of(
        fault: Fault,
        store: &str,
        processes: Vec<String>,
        struck: &Struck,
        record: Vec<Event>,
    ) -> Result<Self> {
        let history = History::new(record);
        let judged = check(&history);
        let by_rule = |rule| judged.violations.iter().filter(move |violation| violation.rule == rule);
        if let Some(violation) = by_rule(Rule::Record).next() {
            return Err(Error::internal(format!("the record of a fault is wrong: {}", violation.text)));
        }
        let scale = Scale { zero: struck.began, names: &processes };
        let mut overlaps = Vec::new();
        for violation in by_rule(Rule::Overlap) {
            let [one, other] = &violation.parties[..] else { continue };
            let (from, until) = (scale.seconds(violation.at), scale.seconds(violation.until));
            overlaps.push(Overlap {
                from,
                until,
                processes: [scale.place(&one.process)?, scale.place(&other.process)?],
            });
        }
        let excused = |rule| struck.forgets && matches!(rule, Rule::Overlap | Rule::Superseded);
        let broken = judged.violations.iter().filter(|violation| !excused(violation.rule)).count() as u64;
        let events = history.events();
        let (beliefs, refused) = (scale.beliefs(events)?, scale.refused(events)?);
        let ends = |event: Option<&Event>| event.map_or(0.0, |event| scale.seconds(event.at));
        Ok(Self {
            fault,
            store: store.to_owned(),
            victim: struck.victim,
            over: struck.ended.map(|ended| scale.seconds(ended)),
            span: (ends(events.first()), ends(events.last())),
            taken: taken(&beliefs),
            written: events.iter().filter(|event| matches!(event.what, What::Updated { admitted: true, .. })).count()
                as u64,
            forgets: struck.forgets,
            beliefs,
            overlaps,
            refused,
            broken,
            processes,
        })
    }

    /// How long the longest time was in which two believed, in milliseconds; 0 without one.
    #[must_use]
    pub fn longest_overlap(&self) -> f64 {
        self.overlaps.iter().map(Overlap::millis).fold(0.0, f64::max)
    }
}

/// When another got the lock than the one that held it when the fault came. If that one gave it back before, nobody had to take it.
fn taken(beliefs: &[Belief]) -> Option<f64> {
    let holder = beliefs.iter().rfind(|belief| belief.from < 0.0)?;
    let next = beliefs.iter().find(|belief| belief.from >= 0.0 && belief.process != holder.process)?;
    let kept = holder.end == Ending::Released && holder.until <= next.from;
    (!kept).then_some(next.from)
}

/// From the times and names of a record to those of a timeline.
#[derive(Clone, Copy)]
struct Scale<'a> {
    zero: u64,
    names: &'a [String],
}

impl Scale<'_> {
    fn seconds(&self, at: u64) -> f64 {
        (at as f64 - self.zero as f64) / 1e9
    }

    fn place(&self, name: &str) -> Result<usize> {
        let place = self.names.iter().position(|known| known == name);
        place.ok_or_else(|| Error::internal(format!("the record of a fault has a stranger: {name}")))
    }

    fn beliefs(&self, events: &[Event]) -> Result<Vec<Belief>> {
        let mut beliefs: Vec<Belief> = Vec::new();
        // By process and grant; and what was asked by process and operation: of which grant, and when.
        let mut granted: BTreeMap<(&str, u64), usize> = BTreeMap::new();
        let mut asked: BTreeMap<(&str, u64), (u64, u64)> = BTreeMap::new();
        for event in events {
            let (process, op, at) = (event.process.as_str(), event.op, event.at);
            match &event.what {
                What::Granted { fence } => {
                    granted.insert((process, op), beliefs.len());
                    let (process, from) = (self.place(process)?, self.seconds(at));
                    beliefs.push(Belief { process, from, until: from, fence: *fence, end: Ending::Open });
                }
                What::Ask { grant } | What::Release { grant } => _ = asked.insert((process, op), (*grant, at)),
                answer => {
                    let Some((grant, at_asking)) = asked.get(&(process, op)) else { continue };
                    let Some(place) = granted.get(&(process, *grant)) else { continue };
                    beliefs[*place].hear(answer, self.seconds(*at_asking), self.seconds(at));
                }
            }
        }
        Ok(beliefs)
    }

    fn refused(&self, events: &[Event]) -> Result<Vec<Refusal>> {
        let refused = events.iter().filter_map(|event| match &event.what {
            What::Updated { by, fence, admitted: false, .. } => Some((by, *fence, event.at)),
            _ => None,
        });
        refused.map(|(by, fence, at)| Ok(Refusal { process: self.place(by)?, at: self.seconds(at), fence })).collect()
    }
}

impl Belief {
    /// An answer to what was asked then, and heard now.
    fn hear(&mut self, answer: &What, asked: f64, heard: f64) {
        match answer {
            What::Held => self.until = asked,
            What::Released { held: true, .. } => (self.until, self.end) = (asked, Ending::Released),
            What::Lost { reason } => self.end = Ending::Lost { told: heard, reason: reason.clone() },
            What::Released { held: false, reason } => {
                self.end = Ending::Lost { told: heard, reason: reason.clone().unwrap_or_default() };
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "lock";

    /// A record in the making, in milliseconds.
    #[derive(Default)]
    struct Written {
        record: Vec<Event>,
        writes: u64,
        version: u64,
    }

    impl Written {
        fn event(&mut self, at: u64, process: &str, op: u64, what: What) -> &mut Self {
            self.record.push(Event { at: at * 1_000_000, process: process.to_owned(), op, what });
            self
        }

        fn granted(&mut self, at: u64, process: &str, op: u64, fence: u64) -> &mut Self {
            self.event(at - 1, process, op, What::acquire(KEY)).event(at, process, op, What::Granted { fence })
        }

        fn asked(&mut self, at: u64, process: &str, op: u64, grant: u64, answer: What) -> &mut Self {
            self.event(at, process, op, What::Ask { grant }).event(at + 1, process, op, answer)
        }

        fn released(&mut self, at: u64, process: &str, op: u64, grant: u64) -> &mut Self {
            let answer = What::Released { held: true, reason: None };
            self.event(at, process, op, What::Release { grant }).event(at + 1, process, op, answer)
        }

        fn wrote(&mut self, at: u64, process: &str, op: u64, fence: u64, admitted: bool) -> &mut Self {
            let (key, by, version) = (KEY.to_owned(), process.to_owned(), self.version);
            let what = What::Updated { key: key.clone(), by, fence, admitted, base: version, version };
            let place = self.writes;
            self.writes += 1;
            self.version += u64::from(admitted);
            let answer = if admitted { What::Written } else { What::Refused };
            self.event(at, process, op, What::Write { key, fence }).event(at, "resource", place, what);
            self.event(at + 1, process, op, answer)
        }

        fn timeline(&mut self, forgets: bool) -> Result<Timeline> {
            let names = vec!["a".to_owned(), "b".to_owned()];
            let struck = Struck { began: 1_000_000_000, ended: Some(4_000_000_000), victim: Some(0), forgets };
            Timeline::of(Fault::Frozen, "store", names, &struck, std::mem::take(&mut self.record))
        }
    }

    fn lost() -> What {
        What::Lost { reason: "the lease ran out".to_owned() }
    }

    #[test]
    fn a_frozen_holder_believes_until_it_last_asked_and_its_late_write_is_told() {
        let mut written = Written::default();
        written.granted(500, "a", 1, 7).asked(900, "a", 2, 1, What::Held).granted(3400, "b", 1, 8);
        written.wrote(3401, "b", 2, 8, true).asked(3500, "b", 3, 1, What::Held).released(3600, "b", 4, 1);
        written.wrote(4010, "a", 3, 7, false).asked(4020, "a", 4, 1, lost());
        let timeline = written.timeline(false).expect("a record");
        let [a, b] = &timeline.beliefs[..] else { panic!("{timeline:?}") };
        assert_eq!((a.process, a.from, a.until), (0, -0.5, -0.1));
        assert_eq!(a.end, Ending::Lost { told: 3.021, reason: "the lease ran out".to_owned() });
        assert_eq!((b.process, b.from, b.until, &b.end), (1, 2.4, 2.6, &Ending::Released));
        assert_eq!(timeline.refused, [Refusal { process: 0, at: 3.01, fence: 7 }]);
        assert_eq!((timeline.taken, timeline.over, timeline.written), (Some(2.4), Some(3.0), 1));
        assert_eq!((timeline.overlaps.len(), timeline.broken), (0, 0));
    }

    #[test]
    fn two_at_once_are_excused_only_where_the_server_forgot() {
        let two = |forgets| {
            let mut written = Written::default();
            written.granted(500, "a", 1, 7).granted(1100, "b", 1, 8).asked(1150, "b", 2, 1, What::Held);
            written.asked(1300, "a", 2, 1, What::Held).released(1400, "b", 3, 1).asked(2000, "a", 3, 1, lost());
            written.timeline(forgets).expect("a record")
        };
        let [believed, forgot] = [two(false), two(true)];
        for timeline in [&believed, &forgot] {
            let [overlap] = &timeline.overlaps[..] else { panic!("{timeline:?}") };
            assert_eq!((overlap.processes, overlap.from), ([0, 1], 0.1));
            assert!((timeline.longest_overlap() - 200.0).abs() < 1e-6, "{timeline:?}");
        }
        assert!(believed.broken > 0 && forgot.broken == 0, "{believed:?}");
    }

    #[test]
    fn what_its_holder_gave_back_nobody_had_to_take() {
        let mut written = Written::default();
        written.granted(500, "a", 1, 7).asked(900, "a", 2, 1, What::Held).released(3000, "a", 3, 1);
        written.granted(3100, "b", 1, 8);
        assert_eq!(written.timeline(false).expect("a record").taken, None);
    }

    #[test]
    fn a_record_that_can_not_be_is_an_error() {
        let mut written = Written::default();
        written.granted(500, "a", 1, 7).wrote(600, "a", 2, 9, true);
        let failure = written.timeline(false).expect_err("a fence that nobody was granted");
        assert!(failure.to_string().contains("the record of a fault is wrong"), "{failure}");
        let mut stranger = Written::default();
        assert!(stranger.granted(500, "c", 1, 7).timeline(false).is_err());
    }
}
