//! From measurements to the rows of the comparison. No I/O.

mod faults;

use crate::{
    plan::{Plan, Step},
    results::{Absence, Figure, Held, Results, Rounds, Traits, fairness, rate, ratio, round_trips},
    stats::grouped,
    targets::OF_PEERS,
};

/// A row of the comparison: one measure, a cell for each store.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The name in the JSON, which stays the same.
    pub id: &'static str,
    /// The heading that it stands under.
    pub group: String,
    /// What is measured.
    pub title: &'static str,
    /// The unit of the numbers; empty if they have none.
    pub unit: &'static str,
    /// Which numbers are better.
    pub better: Better,
    /// The measure that it comes from, as the [progress](crate::Progress) names it; empty for what the stores say of themselves.
    pub measure: &'static str,
    /// One for each store, in the order of [`Report::stores`](super::Report::stores).
    pub cells: Vec<Cell>,
}

impl Row {
    /// The row in one line, of the stores that have a number; `None` without one.
    pub(crate) fn line<'a>(&self, stores: impl Iterator<Item = &'a str>) -> Option<String> {
        let measured = stores.zip(&self.cells).filter(|(_, cell)| matches!(cell, Cell::Number(_)));
        let figures: Vec<_> = measured.map(|(store, cell)| format!("{store} {}", cell.text())).collect();
        let Self { group, title, unit, .. } = self;
        (!figures.is_empty()).then(|| format!("{group}: {title} ({unit}): {}", figures.join(", ")))
    }
}

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// More is better.
    Higher,
    /// Less is better.
    Lower,
    /// It is a fact and not an achievement, or too much of it is chance.
    Neither,
}

/// What one store showed.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// A measurement, in the unit of the row.
    Number(Figure),
    /// A fact in words.
    Text(String),
    /// Nothing, and why, if that is known.
    Absent(Option<Absence>),
}

/// All rows, in the order of the report.
pub(crate) fn rows(stores: &[Results], plan: &Plan) -> Vec<Row> {
    let mut sheet = Sheet { stores, plan, rows: Vec::new(), group: String::new(), step: None };
    capabilities(&mut sheet);
    alone(&mut sheet);
    contests(&mut sheet);
    hand_off(&mut sheet);
    takeover(&mut sheet);
    delays(&mut sheet);
    held(&mut sheet);
    cost(&mut sheet);
    faults::faults(&mut sheet);
    sheet.rows
}

fn capabilities(sheet: &mut Sheet<'_>) {
    sheet.group = "Guarantees".to_owned();
    sheet.text("fencing", "fencing", |store| Some(store.traits.fencing.clone()));
    sheet.text("waiting", "how waiters learn of a release", |store| Some(store.traits.waiting.clone()));
    sheet.text("liveness", "what ends the lease of a holder that is gone", |store| Some(store.traits.liveness.clone()));
    sheet.kind("fifo", "strict order of arrival", |traits| traits.fifo);
    sheet.kind("shared", "readers and writers", |traits| traits.shared);
    sheet.kind("downgrades", "a writer becomes a reader without a gap", |traits| traits.downgrades);
    sheet.kind("permits", "semaphores", |traits| traits.permits);
    sheet.kind("resume", "leases that outlive their process", |traits| traits.resume);
    sheet.kind("keeps", "once per window", |traits| traits.keeps);
    sheet.step = Some(Step::Compliance);
    sheet.text("compliance", "compliance cases: passed / failed / ignored", |store| {
        let counts = store.compliance.as_ref()?;
        let so_far = if counts.interrupted { " so far" } else { "" };
        Some(format!("{} / {} / {}{so_far}", counts.passed, counts.failures.len(), counts.ignored))
    });
    sheet.step = Some(Step::Processes);
    sheet.number("violations", "overlaps seen in all contests below", "", Better::Lower, |store| {
        store.was_contested().then(|| Figure::once(store.violations() as f64))
    });
}

fn alone(sheet: &mut Sheet<'_>) {
    sheet.group("One task, nobody else", Step::RoundTrip);
    sheet.number("round_trip_p50", "bare round trip (inspect), p50", "µs", Better::Neither, |store| {
        store.round_trip.micros(0.5)
    });
    sheet.step = Some(Step::Pair);
    sheet.number("pair_p50", "acquire + release, p50", "µs", Better::Lower, |store| store.pair.micros(0.5));
    sheet.tail("pair_p99", "acquire + release, p99", 0.99, |store| store.pair.at_pace_of(&store.pair));
    sheet.tail("pair_p999", "acquire + release, p99.9", 0.999, |store| store.pair.at_pace_of(&store.pair));
    sheet.number("pair_rate", "acquire + release", "/s", Better::Higher, |store| store.pair.per_second());
    sheet.number("pair_round_trips", "acquire + release, p50", "round trips", Better::Lower, |store| {
        // There is no trip to a store in this process, and nothing to compare with it.
        if store.traits.in_process { None } else { ratio(&store.pair, &store.round_trip) }
    });
    sheet.number("acquire_p50", "acquire, p50", "µs", Better::Lower, |store| store.acquire.micros(0.5));
    sheet.tail("acquire_p999", "acquire, p99.9", 0.999, |store| store.acquire.at_pace_of(&store.pair));
    sheet.number("release_p50", "release, p50", "µs", Better::Lower, |store| store.release.micros(0.5));
    sheet.tail("release_p999", "release, p99.9", 0.999, |store| store.release.at_pace_of(&store.pair));
    sheet.group("Other kinds of locks, one task", Step::Kinds);
    sheet.number("fifo_p50", "in order of arrival: acquire + release, p50", "µs", Better::Lower, |store| {
        store.fifo.micros(0.5)
    });
    sheet.number("reader_p50", "a reader: acquire + release, p50", "µs", Better::Lower, |store| {
        store.reader.micros(0.5)
    });
    sheet.number(
        "reader_beside_p50",
        "a reader beside another: acquire + release, p50",
        "µs",
        Better::Lower,
        |store| store.reader_beside.micros(0.5),
    );
    sheet.number("writer_p50", "a writer: acquire + release, p50", "µs", Better::Lower, |store| {
        store.writer.micros(0.5)
    });
    sheet.number("permit_p50", "one of 1 000 permits: acquire + release, p50", "µs", Better::Lower, |store| {
        store.permit.micros(0.5)
    });
    if sheet.plan.takes(Step::Pair) {
        let unit = "of a plain lock's";
        let of = |sheet: &mut Sheet<'_>, id, title, rounds: fn(&Results) -> &Rounds| {
            sheet.number(id, title, unit, Better::Lower, move |store| ratio(rounds(store), &store.pair));
        };
        of(sheet, "fifo_of_pair", "in order of arrival: acquire + release, p50", |store| &store.fifo);
        of(sheet, "reader_of_pair", "a reader: acquire + release, p50", |store| &store.reader);
        of(sheet, "reader_beside_of_pair", "a reader beside another: acquire + release, p50", |store| {
            &store.reader_beside
        });
        of(sheet, "permit_of_pair", "one of 1 000 permits: acquire + release, p50", |store| &store.permit);
    }
    sheet.group(format!("{} keys, a task each", Plan::KEYS), Step::ManyKeys);
    sheet.number("many_keys", "acquire + release", "/s", Better::Higher, |store| {
        Figure::median(store.many_keys.iter().copied())
    });
    sheet.number("acquire_loaded_p50", "acquire, p50", "µs", Better::Lower, |store| store.acquire_loaded.micros(0.5));
    sheet.tail("acquire_loaded_p999", "acquire, p99.9", 0.999, |store| store.acquire_loaded.clone());
    sheet.number("release_loaded_p50", "release, p50", "µs", Better::Lower, |store| store.release_loaded.micros(0.5));
    sheet.tail("release_loaded_p999", "release, p99.9", 0.999, |store| store.release_loaded.clone());
}

fn contests(sheet: &mut Sheet<'_>) {
    sheet.group(format!("One hot lock, {} tasks of one process", Plan::TASKS), Step::HandedOver);
    sheet.number("hot_handed_over", "acquisitions, handed over locally", "/s", Better::Higher, |store| {
        rate(&store.handed_over)
    });
    sheet.number("hot_handed_over_fairness", "  fairness over tasks (Jain)", "", Better::Higher, |store| {
        fairness(&store.handed_over)
    });
    sheet.step = Some(Step::NotHandedOver);
    sheet.number("hot", "acquisitions, each through the store", "/s", Better::Higher, |store| {
        rate(&store.not_handed_over)
    });
    sheet.number("hot_fairness", "  fairness over tasks (Jain)", "", Better::Higher, |store| {
        fairness(&store.not_handed_over)
    });
    let group = format!("One hot lock, {} processes of {} tasks", Plan::PROCESSES, Plan::TASKS_EACH);
    sheet.group(group, Step::Processes);
    sheet.number("processes", "acquisitions, most handed over within a process", "/s", Better::Higher, |store| {
        rate(&store.processes)
    });
    sheet.number("processes_fairness", "fairness over processes (Jain)", "", Better::Higher, |store| {
        fairness(&store.processes)
    });
}

fn hand_off(sheet: &mut Sheet<'_>) {
    sheet.group("Hand-off from one process to another", Step::HandOff);
    sheet.number("hand_off_p50", "release to acquired, p50", "µs", Better::Lower, |store| store.hand_off.micros(0.5));
    sheet.tail("hand_off_p99", "release to acquired, p99", 0.99, |store| store.hand_off.clone());
    if sheet.plan.takes(Step::RoundTrip) {
        sheet.number("hand_off_round_trips", "release to acquired, p50", "round trips", Better::Lower, |store| {
            ratio(&store.hand_off, &store.round_trip)
        });
    }
    sheet.number(
        "hand_off_in_order_p50",
        "in order of arrival: release to acquired, p50",
        "µs",
        Better::Lower,
        |store| store.hand_off_in_order.micros(0.5),
    );
    sheet.number("idle_round_trip_p50", "bare round trip after the same pause, p50", "µs", Better::Neither, |store| {
        store.idle_round_trip.micros(0.5)
    });
    sheet.number(
        "hand_off_idle_round_trips",
        "release to acquired, p50",
        "of these round trips",
        Better::Lower,
        |store| ratio(&store.hand_off, &store.idle_round_trip),
    );
}

fn takeover(sheet: &mut Sheet<'_>) {
    let ttl = Plan::TAKEOVER_TTL.as_secs();
    sheet.group(format!("The holder is gone, at a ttl of {ttl} s or a session as the store has it"), Step::Takeover);
    sheet.number("takeover_killed", "killed, until another has the lock", "s", Better::Lower, |store| {
        store.takeover.map(|takeover| takeover.killed)
    });
    sheet.number("takeover_frozen", "frozen, until another has the lock", "s", Better::Lower, |store| {
        store.takeover.map(|takeover| takeover.frozen)
    });
    sheet.number("takeover_believed", "  woken, believed that they have it", "", Better::Lower, |store| {
        store.takeover.map(|takeover| Figure::once(takeover.believed as f64))
    });
}

/// For each of [`Plan::DELAYS`]: the names of its two rows in the JSON, and their titles.
const BY_DELAY: [[&str; 4]; 4] = [
    ["delay_200us_p50", "delay_200us_p99", "0.2 ms: acquire + release, p50", "0.2 ms: acquire + release, p99"],
    ["delay_1ms_p50", "delay_1ms_p99", "1 ms: acquire + release, p50", "1 ms: acquire + release, p99"],
    ["delay_5ms_p50", "delay_5ms_p99", "5 ms: acquire + release, p50", "5 ms: acquire + release, p99"],
    ["delay_20ms_p50", "delay_20ms_p99", "20 ms: acquire + release, p50", "20 ms: acquire + release, p99"],
];

fn delays(sheet: &mut Sheet<'_>) {
    sheet.group("Each round trip delayed by the network", Step::Delay);
    for (delay, [p50, p99, title_p50, title_p99]) in Plan::DELAYS.into_iter().zip(BY_DELAY) {
        sheet.number(p50, title_p50, "µs", Better::Lower, |store| store.by_delay.get(&delay)?.micros(0.5));
        // At the longest delay it is about the worst of the two dozen samples of a round: too much of it is chance to judge by.
        sheet.number(p99, title_p99, "µs", Better::Neither, |store| {
            let rounds = store.by_delay.get(&delay)?;
            rounds.at_pace_of(rounds).micros(0.99)
        });
    }
    let [.., from, to] = Plan::DELAYS;
    sheet.number("delay_round_trips", "acquire + release, by its growth", "round trips", Better::Lower, |store| {
        round_trips(&store.by_delay, from, to)
    });
}

fn held(sheet: &mut Sheet<'_>) {
    let group = format!("{} leases, held and renewed", grouped(sheet.plan.leases as f64));
    sheet.group(group, Step::Leases);
    let once = |value: Option<f64>| value.map(Figure::once);
    sheet.number("lease_bytes", "memory of the process, per lease", "bytes", Better::Lower, |store| {
        once(store.held.as_ref().map(Held::bytes_each))
    });
    sheet.number("lease_cpu", "processor, at a ttl of 30 s", "% of a core", Better::Lower, |store| {
        once(store.held.as_ref()?.cpu_percent())
    });
    sheet.number("lease_margin", "least left of a lease when renewed", "% of ttl", Better::Higher, |store| {
        once(store.held.as_ref()?.margin_percent())
    });
    sheet.number("lease_failed", "renewals that failed at first", "", Better::Lower, |store| {
        once(Some(store.held?.cost.failed as f64))
    });
    sheet.number("lease_lost", "leases lost", "", Better::Lower, |store| once(Some(store.held?.cost.lost as f64)));
}

fn cost(sheet: &mut Sheet<'_>) {
    let locks = grouped(sheet.plan.cost.locks as f64);
    let (ttl, waiters) = (Plan::COST_TTL.as_secs(), Plan::WAITERS);
    let group = format!("Cost at the server: {locks} locks, held and renewed at a ttl of {ttl} s; {waiters} waiters");
    sheet.group(group, Step::Cost);
    let lock = |store: &Results| Some(store.cost?.locks);
    let waiter = |store: &Results| Some(store.cost?.waiters);
    sheet.told("cost_lock_requests", "requests, per held lock", "/s", NO_REQUESTS, |store| lock(store)?.requests);
    sheet.told("cost_lock_processor", "processor, per held lock", "µs/s", NO_PROCESSOR, |store| lock(store)?.micros);
    sheet.told("cost_lock_bytes", "memory, per held lock", "bytes", NO_MEMORY, |store| lock(store)?.bytes);
    sheet.told("cost_waiter_requests", "requests, per waiter", "/s", NO_REQUESTS, |store| waiter(store)?.requests);
    sheet.told("cost_waiter_processor", "processor, per waiter", "µs/s", NO_PROCESSOR, |store| waiter(store)?.micros);
    sheet.told("cost_waiter_bytes", "memory, per waiter", "bytes", NO_MEMORY, |store| waiter(store)?.bytes);
}

const NO_REQUESTS: &str = "how many requests there were is not told by the servers";
const NO_PROCESSOR: &str =
    "the processor time is not told by the servers, and they were not started for this comparison";
const NO_MEMORY: &str = "the memory of what they keep is not told by the servers";

/// Rows in the making.
struct Sheet<'a> {
    stores: &'a [Results],
    plan: &'a Plan,
    rows: Vec<Row>,
    group: String,
    /// The measure that the next rows come from: without it there are none. `None` for what the stores say of themselves.
    step: Option<Step>,
}

impl Sheet<'_> {
    fn group(&mut self, title: impl Into<String>, step: Step) {
        self.group = title.into();
        self.step = Some(step);
    }

    fn number(
        &mut self,
        id: &'static str,
        title: &'static str,
        unit: &'static str,
        better: Better,
        value: impl Fn(&Results) -> Option<Figure>,
    ) {
        self.row(id, title, unit, better, |store| value(store).map(Cell::Number));
    }

    /// The time that nearly all samples did not exceed.
    fn tail(&mut self, id: &'static str, title: &'static str, quantile: f64, of: impl Fn(&Results) -> Rounds) {
        let too_few = || Cell::Absent(Some(Absence::Inapplicable("too few samples for a p99 or p99.9")));
        self.row(id, title, "µs", Better::Lower, |store| {
            let rounds = of(store);
            rounds.all().map(|_| rounds.tail(quantile).map_or_else(too_few, Cell::Number))
        });
    }

    /// What the servers of a store were asked for at the only measure of their cost, or why they did not tell.
    fn told(
        &mut self,
        id: &'static str,
        title: &'static str,
        unit: &'static str,
        otherwise: &'static str,
        value: impl Fn(&Results) -> Option<Figure>,
    ) {
        let untold = || Cell::Absent(Some(Absence::Inapplicable(otherwise)));
        self.row(id, title, unit, Better::Lower, |store| {
            store.cost.map(|_| value(store).map_or_else(untold, Cell::Number))
        });
    }

    fn text(&mut self, id: &'static str, title: &'static str, value: impl Fn(&Results) -> Option<String>) {
        self.row(id, title, "", Better::Neither, |store| value(store).map(Cell::Text));
    }

    fn kind(&mut self, id: &'static str, title: &'static str, has: impl Fn(&Traits) -> bool) {
        let in_words = |has| if has { "yes" } else { "no" }.to_owned();
        self.text(id, title, |store| Some(in_words(has(&store.traits))));
    }

    fn row(
        &mut self,
        id: &'static str,
        title: &'static str,
        unit: &'static str,
        better: Better,
        cell: impl Fn(&Results) -> Option<Cell>,
    ) {
        let step = self.step;
        if step.is_some_and(|step| !self.plan.takes(step)) {
            return;
        }
        let absent = |store: &Results| Cell::Absent(step.and_then(|step| store.absent.get(&step).cloned()));
        let unknown = || Cell::Absent(Some(Absence::Inapplicable(OF_PEERS)));
        let cells = self.stores.iter().map(|store| match step {
            // It is not asked what it is: what it promises is for its own documentation to say.
            None if store.traits.is_peer => unknown(),
            _ => cell(store).unwrap_or_else(|| absent(store)),
        });
        let cells = cells.collect();
        self.rows.push(Row {
            id,
            group: self.group.clone(),
            title,
            unit,
            better,
            measure: step.map_or("", Step::title),
            cells,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::{
        group::Group,
        plan::Options,
        results::{Contest, ServerCost, Share},
    };

    #[test]
    fn every_row_has_a_cell_for_every_store_and_a_name_of_its_own() {
        let rows = rows(&[Results::default(), Results::default()], &Plan::new(Options::default().leases(10)));
        assert!(rows.iter().all(|row| row.cells.len() == 2));
        assert_eq!(rows.iter().map(|row| row.id).collect::<HashSet<_>>().len(), rows.len());
    }

    #[test]
    fn a_row_in_one_line_has_the_stores_that_have_a_number() {
        let redis = Results { many_keys: vec![4000.0], ..Results::default() };
        let rows = rows(&[Results::default(), redis, Results::default()], &Plan::new(Options::default()));
        let line =
            |id| rows.iter().find(|row| row.id == id).expect("row").line(["memory", "redis", "mysql"].into_iter());
        assert_eq!(line("many_keys").as_deref(), Some("64 keys, a task each: acquire + release (/s): redis 4 000"));
        assert_eq!(line("pair_p50"), None);
    }

    #[test]
    fn what_is_missing_keeps_its_reason() {
        let reason = Absence::Inapplicable("one process only");
        let mut store = Results::default();
        store.absent.insert(Step::Processes, reason.clone());
        store.handed_over.push(Contest { per_second: 5.0, fairness: Some(1.0), violations: 0 });
        let rows = rows(&[store], &Plan::new(Options::default().leases(10)));
        let cell = |id| rows.iter().find(|row| row.id == id).map(|row| row.cells[0].clone());
        assert_eq!(cell("processes"), Some(Cell::Absent(Some(reason))));
        assert_eq!(cell("hot_handed_over"), Some(Cell::Number(Figure::once(5.0))));
        assert_eq!(cell("hand_off_p50"), Some(Cell::Absent(None)));
        let overlaps = cell("violations");
        assert!(
            matches!(overlaps, Some(Cell::Absent(Some(_)))),
            "one locker asks with one task at a time: {overlaps:?}"
        );
    }

    #[test]
    fn what_was_not_to_be_measured_has_no_row() {
        let ids = |groups: &[Group]| {
            let plan = Plan::new(Options::default().groups(groups.iter().copied()));
            rows(&[Results::default()], &plan).iter().map(|row| row.id).collect::<Vec<_>>()
        };
        let alone = ids(&[Group::Alone]);
        assert!(alone.contains(&"fencing") && alone.contains(&"pair_p50"), "{alone:?}");
        for absent in ["violations", "compliance", "hand_off_p50", "hot"] {
            assert!(!alone.contains(&absent), "{alone:?}");
        }
        let hand_off = ids(&[Group::HandOff]);
        assert!(hand_off.contains(&"hand_off_p50") && !hand_off.contains(&"hand_off_round_trips"), "{hand_off:?}");
        assert!(ids(&[Group::Processes]).contains(&"violations"));
    }

    #[test]
    fn what_servers_do_not_tell_has_its_reason() {
        let told = Share { requests: Some(Figure::once(2.0)), ..Share::default() };
        let cost = ServerCost { locks: told, waiters: Share::default() };
        let stores = [Results { cost: Some(cost), ..Results::default() }, Results::default()];
        let rows = rows(&stores, &Plan::new(Options::default().leases(200).groups([Group::Cost])));
        let row = |id| rows.iter().find(|row| row.id == id).expect("row");
        assert_eq!(row("cost_lock_requests").cells, [Cell::Number(Figure::once(2.0)), Cell::Absent(None)]);
        for (id, why) in [("cost_lock_bytes", NO_MEMORY), ("cost_waiter_processor", NO_PROCESSOR)] {
            assert_eq!(row(id).cells[0], Cell::Absent(Some(Absence::Inapplicable(why))));
        }
        assert!(row("cost_lock_bytes").group.contains("200 locks"), "no more than there may be leases");
    }

    #[test]
    fn where_nothing_was_contested_no_overlap_is_denied() {
        let rows = rows(&[Results::default()], &Plan::new(Options::default()));
        let overlaps = rows.iter().find(|row| row.id == "violations").expect("row");
        assert_eq!(overlaps.cells[0], Cell::Absent(None));
    }
}
