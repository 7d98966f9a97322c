//! From events to operations, and the report.

use std::collections::{BTreeMap, HashMap};

use super::{Event, History, Rule, Violation, What, judge};

/// What a history shows.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Every broken rule, in the order of time. What a store does not claim may be broken; that is for the caller to
    /// judge.
    pub violations: Vec<Violation>,
    /// How many times a lock was granted.
    pub grants: u64,
    /// How many times a guard, when it was asked, said that the lock is lost.
    pub lost: u64,
    /// How many writes the fenced resources admitted.
    pub admitted: u64,
    /// How many writes and claims of late holders the fenced resources refused.
    pub refused: u64,
    /// How many updates were lost on the unfenced twins: what happens without the check.
    pub lost_on_twins: u64,
    /// How many writes the unfenced twins took.
    pub twin_writes: u64,
}

impl Report {
    /// How often a rule was broken.
    #[must_use]
    pub fn count(&self, rule: Rule) -> usize {
        self.violations.iter().filter(|violation| violation.rule == rule).count()
    }
}

/// Judges a history.
#[must_use]
pub fn check(history: &History) -> Report {
    let (keys, mut report) = collect(history);
    for (key, ops) in keys {
        judge::overlaps(&key, &ops.grants, &mut report.violations);
        judge::fences(&key, &ops.grants, &mut report.violations);
        judge::resource(&key, &ops, &mut report.violations);
        judge::liveness(&key, &ops.wanted, history.end(), &mut report.violations);
    }
    let origin = history.events.first().map_or(0, |event| event.at);
    report.violations.iter_mut().for_each(|violation| violation.origin = origin);
    report.violations.sort_by_key(|violation| violation.at);
    report
}

/// A lock that was granted.
#[derive(Clone, Debug)]
pub(super) struct Grant {
    pub(super) process: String,
    pub(super) op: u64,
    pub(super) fence: u64,
    /// When it was asked for.
    pub(super) asked: u64,
    /// When the grant was heard of: from here on the holder believed.
    pub(super) heard: u64,
    /// When the holder last asked its guard and was told yes: until here it surely believed.
    pub(super) believed: u64,
}

/// An acquisition that must succeed within some time.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) process: String,
    pub(super) asked: u64,
    pub(super) within: u64,
    /// When it was granted, if it was.
    pub(super) granted: Option<u64>,
}

/// All that was done with one lock and its resource.
#[derive(Clone, Debug, Default)]
pub(super) struct Ops {
    pub(super) grants: Vec<Grant>,
    pub(super) wanted: Vec<Wanted>,
    /// The resource's own record, in its own order.
    pub(super) records: Vec<Event>,
    /// Writes that their writers know to have happened, by process and fence.
    pub(super) acknowledged: u64,
    /// Writes of which the writers never heard.
    pub(super) unknown: u64,
}

impl History {
    /// When the last event happened.
    fn end(&self) -> u64 {
        self.events.last().map_or(0, |event| event.at)
    }
}

/// What is asked and not answered yet.
enum Open {
    Acquire { key: String, asked: u64, wanted: Option<usize> },
    Ask { grant: u64, asked: u64 },
    Write { key: String },
    Release,
}

/// The place of a grant: its lock, and its index there.
type Place = (String, usize);

fn collect(history: &History) -> (BTreeMap<String, Ops>, Report) {
    let mut keys: BTreeMap<String, Ops> = BTreeMap::new();
    let mut report = Report::default();
    let mut open: HashMap<(&str, u64), Open> = HashMap::new();
    let mut places: HashMap<(&str, u64), Place> = HashMap::new();
    for event in &history.events {
        let id = (event.process.as_str(), event.op);
        match &event.what {
            What::Acquire { key, within } => {
                let ops = keys.entry(key.clone()).or_default();
                let wanted = within.map(|within| {
                    let process = event.process.clone();
                    ops.wanted.push(Wanted { process, asked: event.at, within, granted: None });
                    ops.wanted.len() - 1
                });
                open.insert(id, Open::Acquire { key: key.clone(), asked: event.at, wanted });
            }
            What::Granted { fence } => {
                if let Some(Open::Acquire { key, asked, wanted }) = open.remove(&id) {
                    report.grants += 1;
                    let ops = keys.entry(key.clone()).or_default();
                    if let Some(wanted) = wanted {
                        ops.wanted[wanted].granted = Some(event.at);
                    }
                    places.insert(id, (key, ops.grants.len()));
                    let (process, heard) = (event.process.clone(), event.at);
                    ops.grants.push(Grant { process, op: event.op, fence: *fence, asked, heard, believed: heard });
                }
            }
            What::Ask { grant } => drop(open.insert(id, Open::Ask { grant: *grant, asked: event.at })),
            What::Held => {
                if let Some(Open::Ask { grant, asked }) = open.remove(&id)
                    && let Some((key, index)) = places.get(&(id.0, grant))
                    && let Some(ops) = keys.get_mut(key)
                {
                    // A guard that says yes has not said no before, so it would have said yes at the moment it was asked.
                    let grant = &mut ops.grants[*index];
                    grant.believed = grant.believed.max(asked);
                }
            }
            What::Write { key, .. } => drop(open.insert(id, Open::Write { key: key.clone() })),
            What::Written => {
                if let Some(Open::Write { key }) = open.remove(&id) {
                    keys.entry(key).or_default().acknowledged += 1;
                }
            }
            // A release without an answer means nothing: belief ended when it was asked for, or before.
            What::Release { .. } => drop(open.insert(id, Open::Release)),
            // What failed stays open: it may have happened.
            What::Failed { .. } => {}
            What::Lost { .. } => {
                report.lost += 1;
                open.remove(&id);
            }
            What::Contended | What::Released { .. } | What::Refused => drop(open.remove(&id)),
            What::Claimed { key, admitted, .. } => {
                report.refused += u64::from(!admitted);
                keys.entry(key.clone()).or_default().records.push(event.clone());
            }
            What::Updated { key, admitted, .. } => {
                report.refused += u64::from(!admitted);
                report.admitted += u64::from(*admitted);
                keys.entry(key.clone()).or_default().records.push(event.clone());
            }
            What::Twin { base, version, .. } => {
                report.twin_writes += 1;
                report.lost_on_twins += u64::from(base != version);
            }
            What::Fault { .. } | What::Healed => {}
        }
    }
    for unanswered in open.into_values() {
        if let Open::Write { key } = unanswered {
            keys.entry(key).or_default().unknown += 1;
        }
    }
    (keys, report)
}
