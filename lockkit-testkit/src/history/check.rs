//! From events to operations, and the report.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    time::Duration,
};

use lockkit_core::{LossReason, Mode};

use super::{
    Event, History, Party, Report, Rule, What,
    judge::{self, violation},
    lease::leases,
    ops::{Grant, Ops, Wanted, Wish},
    order,
    reach::{self, Lives, Trouble, worker},
    writes::Writes,
};

/// Judges a history.
#[must_use]
pub fn check(history: &History) -> Report {
    judged(history, None)
}

/// Judges a history as [`check`] does, and whether a lock was [out of reach](Rule::Reach): asked for, and held by nobody, for
/// longer than `within`.
///
/// Such a time ends with a grant that somebody heard of. A holder had the lock for as long as it was told so, and until it gave it
/// back. So `within` covers what the lease of a holder that was killed has still to run, a release under way, and the next one's
/// grant. An acquisition that ended with an error may have been granted, and its lease be in the way as that of a holder that was
/// killed: the time counts anew from each.
///
/// A [`Fault`](What::Fault) of a worker, by its name without the task, says that it stands still until it is healed, or was killed:
/// it asks for nothing then, and what it holds may lapse. A fault of any other name excuses everybody until it is healed.
#[must_use]
pub fn check_reach(history: &History, within: Duration) -> Report {
    judged(history, Some(within))
}

fn judged(history: &History, within: Option<Duration>) -> Report {
    let mut sweep = Sweep { writes: Writes::new(&history.events), ..Sweep::default() };
    history.events.iter().for_each(|event| sweep.see(event));
    let Sweep { keys, mut report, lives, .. } = sweep;
    for (key, ops) in keys {
        let leases = leases(&ops.grants);
        report.nested += (ops.grants.len() - leases.len()) as u64;
        report.shared += judge::overlaps(key, &leases, &mut report.violations);
        judge::superseded(key, &leases, &mut report.violations);
        judge::losses(key, &leases, &mut report.violations);
        judge::fences(key, &leases, &mut report.violations);
        judge::nesting(key, &ops.grants, &mut report.violations);
        judge::resource(key, &ops, &mut report.violations);
        judge::liveness(key, &ops.wanted, history.end(), &mut report.violations);
        order::judge(key, &ops.wishes, &mut report.violations);
        report.queued += ops.wishes.iter().filter(|wish| wish.seen.is_some()).count() as u64;
        if let Some(within) = within {
            let spans = reach::spans(&ops, &lives);
            let longest = spans.iter().map(|span| Duration::from_nanos(span.to - span.from)).max();
            report.out_of_reach = report.out_of_reach.max(Some(longest.unwrap_or_default()));
            reach::judge(key, &spans, within.as_nanos() as u64, &mut report.violations);
        }
    }
    let origin = history.events.first().map_or(0, |event| event.at);
    report.violations.iter_mut().for_each(|violation| violation.origin = origin);
    report.violations.sort_by_key(|violation| violation.at);
    report
}

impl History {
    /// When the last event happened.
    fn end(&self) -> u64 {
        self.events.last().map_or(0, |event| event.at)
    }
}

/// What is asked and not answered yet.
enum Open<'a> {
    Acquire { key: &'a str, asked: u64, by: (Option<u64>, Mode), wanted: Option<usize>, wish: usize },
    Ask { grant: Place<'a>, asked: u64, renews: bool },
    Write { key: &'a str },
    Release { grant: Place<'a>, asked: u64 },
    Look { key: &'a str, asked: u64 },
    Fault { trouble: usize },
}

/// The place of a grant: its lock, and its index there.
type Place<'a> = (&'a str, usize);

/// Who asked, and the number of the operation.
type Id<'a> = (&'a str, u64);

/// All events, one after the other, in the order of time.
#[derive(Default)]
struct Sweep<'a> {
    keys: BTreeMap<&'a str, Ops>,
    report: Report,
    /// All operations so far.
    asked: HashSet<Id<'a>>,
    open: HashMap<Id<'a>, Open<'a>>,
    places: HashMap<Id<'a>, Place<'a>>,
    /// The fences that were granted, to which process and for which lock, and in which mode.
    fences: HashMap<(&'a str, &'a str, u64), Mode>,
    /// How many guards each process has.
    held: HashMap<&'a str, usize>,
    writes: Writes<'a>,
    lives: Lives<'a>,
    /// The last place in the order of each resource.
    order: HashMap<&'a str, u64>,
}

impl<'a> Sweep<'a> {
    fn see(&mut self, event: &'a Event) {
        if !matches!(event.what, What::Fault { .. } | What::Healed) {
            self.lives.last.insert(worker(&event.process), event.at);
        }
        match &event.what {
            What::Acquire { .. }
            | What::Ask { .. }
            | What::Renew { .. }
            | What::Release { .. }
            | What::Write { .. }
            | What::Look { .. }
            | What::Fault { .. } => self.ask(event),
            What::Claimed { .. } | What::Updated { .. } | What::Twin { .. } => self.record(event),
            _ => self.hear(event),
        }
    }

    fn ask(&mut self, event: &'a Event) {
        let id = (event.process.as_str(), event.op);
        if !self.asked.insert(id) {
            return self.broken(Rule::Record, event, "", "a number that another operation has already");
        }
        let asked = event.at;
        let open = match &event.what {
            What::Acquire { key, within, owner, mode } => {
                let ops = self.keys.entry(key).or_default();
                ops.asked += 1;
                let wanted = within.map(|within| {
                    let process = event.process.clone();
                    ops.wanted.push(Wanted { process, asked, within, granted: None, denied: None });
                    ops.wanted.len() - 1
                });
                let wish = ops.wishes.len();
                ops.wishes.push(Wish::new(event, *mode));
                Open::Acquire { key, asked, by: (*owner, *mode), wanted, wish }
            }
            What::Ask { grant } | What::Renew { grant } => {
                let Some(grant) = self.guard(event, *grant) else { return };
                Open::Ask { grant, asked, renews: matches!(event.what, What::Renew { .. }) }
            }
            What::Release { grant } => {
                let Some(grant) = self.guard(event, *grant) else { return };
                if let Some(grant) = self.grant(grant) {
                    grant.given_up = Some(asked);
                }
                if let Some(held) = self.held.get_mut(worker(id.0)) {
                    *held -= 1;
                }
                Open::Release { grant, asked }
            }
            What::Write { key, fence } => {
                self.shows(event, id.0, key, *fence);
                self.writes.asked(id.0, key, event.op, *fence);
                Open::Write { key }
            }
            What::Look { key } => Open::Look { key, asked },
            _ => {
                self.lives.troubles.push(Trouble { of: id.0, from: asked, to: None });
                // From here on a place may be lost.
                let waiting = self.keys.values_mut().flat_map(|ops| &mut ops.wishes);
                waiting.filter(|wish| wish.answered.is_none()).for_each(|wish| wish.seen = None);
                Open::Fault { trouble: self.lives.troubles.len() - 1 }
            }
        };
        self.open.insert(id, open);
    }

    fn hear(&mut self, event: &'a Event) {
        let id = (event.process.as_str(), event.op);
        let Some(open) = self.open.remove(&id) else {
            return self.broken(Rule::Record, event, "", "an answer to what was not asked, or was answered before");
        };
        match (&event.what, open) {
            (What::Granted { fence }, Open::Acquire { key, asked, by, wanted, wish }) => {
                self.answered(event, key, wish);
                self.granted(event, key, Grant::new(event, asked, by, *fence), wanted);
            }
            (What::Contended | What::Cancelled | What::Failed { .. }, Open::Acquire { key, wanted, wish, .. }) => {
                self.answered(event, key, wish);
                self.denied(event, key, wanted);
            }
            (What::Held, Open::Ask { grant, asked, .. }) => self.believes(grant, asked),
            (What::Lost { reason }, Open::Ask { grant, .. }) => {
                self.report.lost += 1;
                self.loses(event, grant, reason);
            }
            (What::Released { held, reason }, Open::Release { grant, asked }) => {
                if *held {
                    self.believes(grant, asked);
                } else {
                    self.loses(event, grant, reason.as_deref().unwrap_or_default());
                }
                self.ends(event, grant);
            }
            (What::Dropped, Open::Release { grant, .. }) => {
                self.report.dropped += 1;
                self.ends(event, grant);
            }
            (What::Failed { .. }, Open::Release { grant, .. }) => self.ends(event, grant),
            (answer @ (What::Written | What::Refused), Open::Write { key }) => {
                let (told, done) = (matches!(answer, What::Written), self.writes.answered(id.0, key, event.op));
                if done != Some(told) {
                    let recorded = done.map_or("nothing", |done| if done { "an update" } else { "a refusal" });
                    let told = if told { "it is written" } else { "it is refused" };
                    let text = format!("{} was told that {told}, and the resource has recorded {recorded}", id.0);
                    self.broken(Rule::Resource, event, key, &text);
                }
            }
            (What::Failed { .. }, Open::Ask { renews: true, .. } | Open::Write { .. } | Open::Look { .. }) => {}
            (What::Queue { waiting }, Open::Look { key, asked }) => {
                let is_calm = self.lives.troubles.iter().all(|trouble| trouble.to.is_some_and(|to| to < asked));
                if let Some(ops) = self.keys.get_mut(key).filter(|_| is_calm) {
                    order::see(&mut ops.wishes, waiting, asked, event.at);
                }
            }
            (What::Healed, Open::Fault { trouble }) => self.lives.troubles[trouble].to = Some(event.at),
            _ => self.broken(Rule::Record, event, "", "an answer to another question"),
        }
    }

    fn record(&mut self, event: &'a Event) {
        let next = self.order.insert(event.process.as_str(), event.op).map_or(0, |before| before.wrapping_add(1));
        if next != event.op {
            let text = format!("number {} in the resource's order stands where {next} must be", event.op);
            self.broken(Rule::Record, event, "", &text);
        }
        match &event.what {
            What::Claimed { key, by, fence, admitted } => {
                self.shows(event, by, key, *fence);
                self.report.refused += u64::from(!admitted && !self.shares(by, key, *fence));
                self.keys.entry(key).or_default().records.push(event.clone());
            }
            What::Updated { key, by, fence, admitted, .. } => {
                self.report.refused += u64::from(!admitted && !self.shares(by, key, *fence));
                self.report.admitted += u64::from(*admitted);
                if !self.writes.recorded(by, key, *fence, *admitted) {
                    self.broken(Rule::Record, event, key, &format!("{by} has not asked for this write"));
                }
                self.keys.entry(key).or_default().records.push(event.clone());
            }
            What::Twin { key, base, version, .. } => {
                self.report.twin_writes += 1;
                self.report.lost_on_twins += u64::from(base != version);
                self.keys.entry(key).or_default().records.push(event.clone());
            }
            _ => {}
        }
    }

    fn granted(&mut self, event: &'a Event, key: &'a str, mut grant: Grant, wanted: Option<usize>) {
        let process = event.process.as_str();
        self.report.grants += 1;
        self.report.unfenced += u64::from(grant.fence == 0);
        let before = grant.fence.checked_sub(1).filter(|before| *before != 0);
        // Those who share a lock may have numbers that follow each other, and nothing is handed over.
        grant.handed =
            grant.mode == Mode::Exclusive && before.is_some_and(|before| self.alone(worker(process), key, before));
        self.report.handed_over += u64::from(grant.handed);
        self.fences.insert((process, key, grant.fence), grant.mode);
        self.fences.insert((worker(process), key, grant.fence), grant.mode);
        let held = self.held.entry(worker(process)).or_default();
        *held += 1;
        self.report.most_held = self.report.most_held.max(*held);
        let ops = self.keys.entry(key).or_default();
        if let Some(wanted) = wanted {
            ops.wanted[wanted].granted = Some(event.at);
        }
        self.places.insert((process, event.op), (key, ops.grants.len()));
        ops.grants.push(grant);
    }

    fn answered(&mut self, event: &'a Event, key: &'a str, wish: usize) {
        if let Some(wish) = self.keys.get_mut(key).and_then(|ops| ops.wishes.get_mut(wish)) {
            wish.answered = Some(event.at);
            wish.is_in_doubt = matches!(event.what, What::Failed { .. });
            wish.is_refused = wish.is_in_doubt || event.what == What::Contended;
            if let What::Granted { fence } = event.what {
                wish.fence = Some(fence);
            }
        }
    }

    fn denied(&mut self, event: &'a Event, key: &'a str, wanted: Option<usize>) {
        self.report.cancelled += u64::from(event.what == What::Cancelled);
        let ops = self.keys.entry(key).or_default();
        if let Some(wanted) = wanted {
            ops.wanted[wanted].denied = Some(event.at);
        }
        self.report.contended_alone += u64::from(event.what == What::Contended && ops.asked == 1);
    }

    fn believes(&mut self, place: Place<'a>, asked: u64) {
        if let Some(grant) = self.grant(place) {
            // A guard that says yes has not said no before, so it would have said yes at the moment it was asked.
            grant.believed = grant.believed.max(Some(asked));
        }
    }

    fn loses(&mut self, event: &'a Event, place: Place<'a>, reason: &str) {
        let Some(ops) = self.keys.get_mut(place.0) else { return };
        let (asked, mine) = (ops.asked, &ops.grants[place.1]);
        // What an owner nests in its lease sends no claim of its own.
        let same = |grant: &&Grant| {
            grant.op == mine.op || mine.owner.is_some() && grant.owner == mine.owner && grant.fence == mine.fence
        };
        let own = ops.grants.iter().rev().take(64).filter(|grant| grant.process == mine.process).filter(same).count();
        let is_alone = asked <= own as u64;
        let mine = &mut ops.grants[place.1];
        mine.lost = Some(mine.lost.map_or(event.at, |lost| lost.min(event.at)));
        if is_alone && reason == LossReason::Taken.to_string() {
            self.broken(Rule::Rival, event, place.0, "taken by another, and nobody else ever asked for the lock");
        }
    }

    fn ends(&mut self, event: &'a Event, place: Place<'a>) {
        if let Some(grant) = self.grant(place) {
            grant.ended = Some(event.at);
        }
    }

    /// Where the guard is that an operation uses, if its process has it.
    fn guard(&mut self, event: &'a Event, grant: u64) -> Option<Place<'a>> {
        let place = self.places.get(&(event.process.as_str(), grant)).copied();
        let is_there = place.is_some_and(|place| self.grant(place).is_some_and(|grant| grant.given_up.is_none()));
        if !is_there {
            self.broken(
                Rule::Record,
                event,
                "",
                &format!("the guard of grant {grant}, which its process does not have"),
            );
        }
        place.filter(|_| is_there)
    }

    fn grant(&mut self, (key, index): Place<'a>) -> Option<&mut Grant> {
        self.keys.get_mut(key)?.grants.get_mut(index)
    }

    fn shows(&mut self, event: &'a Event, by: &'a str, key: &'a str, fence: u64) {
        if !self.fences.contains_key(&(by, key, fence)) {
            self.broken(Rule::Record, event, key, &format!("{by} shows the fence {fence}, which it was not granted"));
        }
    }

    /// Whether a process was granted this fence for itself alone.
    fn alone(&self, process: &str, key: &str, fence: u64) -> bool {
        self.fences.get(&(process, key, fence)) == Some(&Mode::Exclusive)
    }

    /// Whether a process was granted this fence together with others.
    fn shares(&self, process: &str, key: &str, fence: u64) -> bool {
        self.fences.get(&(process, key, fence)).is_some_and(|mode| *mode != Mode::Exclusive)
    }

    fn broken(&mut self, rule: Rule, event: &Event, key: &str, text: &str) {
        let (process, at) = (event.process.clone(), event.at);
        let party = Party { process, grant: None, fence: None, from: at, to: at };
        let text = format!("{text} (operation {} of {})", event.op, event.process);
        self.report.violations.push(violation(rule, key, (at, at), vec![party], text));
    }
}
