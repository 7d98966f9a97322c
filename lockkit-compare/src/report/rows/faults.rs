//! The rows of the faults.

use super::{Better, Sheet};
use crate::{
    plan::{Plan, Step},
    report::Cell,
    results::{Absence, Figure, Results},
    timeline::{Fault, Timeline},
};

/// For each fault: the names in the JSON and the titles of how often two believed at once, of the longest such time, and of writes that were
/// refused. One that is killed writes no more.
const ROWS: [(Fault, [&str; 3], [&str; 3]); 4] = [
    (
        Fault::Killed,
        ["killed_overlaps", "killed_longest", ""],
        ["holder killed: two believed at once", "  longest such time", ""],
    ),
    (
        Fault::Frozen,
        ["frozen_overlaps", "frozen_longest", "frozen_refused"],
        ["holder frozen: two believed at once", "  longest such time", "  late writes that the fence refused"],
    ),
    (
        Fault::Cut,
        ["cut_overlaps", "cut_longest", "cut_refused"],
        ["holder cut off: two believed at once", "  longest such time", "  late writes that the fence refused"],
    ),
    (
        Fault::Restarted,
        ["restarted_overlaps", "restarted_longest", "restarted_refused"],
        ["server restarted: two believed at once", "  longest such time", "  late writes that the fence refused"],
    ),
];

pub(super) fn faults(sheet: &mut Sheet<'_>) {
    let (ttl, processes) = (Plan::TAKEOVER_TTL.as_secs(), Plan::PROCESSES);
    sheet.group(format!("Faults: {processes} processes fight for one lock, at a ttl of {ttl} s"), Step::Faults);
    taken(sheet, Fault::Cut, "cut_taken", "holder cut off, until another has the lock");
    taken(sheet, Fault::Restarted, "restarted_taken", "server restarted, until another has the lock");
    for (fault, ids, titles) in ROWS {
        let once = |store: &Results, of: fn(&Timeline) -> f64| Some(Figure::once(of(store.faults.get(&fault)?)));
        let count = |timeline: &Timeline| timeline.overlaps.len() as f64;
        sheet.number(ids[0], titles[0], "", Better::Lower, |store| once(store, count));
        sheet.number(ids[1], titles[1], "ms", Better::Lower, |store| once(store, Timeline::longest_overlap));
        if !ids[2].is_empty() {
            let refused = |timeline: &Timeline| timeline.refused.len() as f64;
            sheet.number(ids[2], titles[2], "", Better::Neither, |store| once(store, refused));
        }
    }
    let updates = Plan::UPDATES;
    sheet.group(format!("{processes} processes add one to a number, {updates} times together"), Step::Faults);
    sheet.number("lost_without_lock", "updates lost without a lock", "", Better::Neither, |store| {
        store.updates.map(|updates| Figure::once(updates.without as f64))
    });
    sheet.number("lost_under_lock", "updates lost under the lock", "", Better::Lower, |store| {
        store.updates.map(|updates| Figure::once(updates.under as f64))
    });
}

/// How long it took from the fault until another had the lock.
fn taken(sheet: &mut Sheet<'_>, fault: Fault, id: &'static str, title: &'static str) {
    let kept = || Cell::Absent(Some(Absence::Inapplicable("its holder kept the lock through the restart of a server")));
    sheet.row(id, title, "s", Better::Lower, |store| {
        let timeline = store.faults.get(&fault)?;
        Some(timeline.taken.map_or_else(kept, |seconds| Cell::Number(Figure::once(seconds))))
    });
}
