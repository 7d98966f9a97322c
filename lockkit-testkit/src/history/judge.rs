//! The rules, for one lock at a time: no lock has anything to do with another.

use super::{
    Event, Party, Rule, Violation, What,
    check::{Grant, Ops, Wanted},
};

/// Nobody believes while another does: sorted by when they began, whoever begins before the last one so far has ended
/// overlaps with that one. O(n log n).
pub(super) fn overlaps(key: &str, grants: &[Grant], found: &mut Vec<Violation>) {
    let mut sorted: Vec<_> = grants.iter().collect();
    sorted.sort_by_key(|grant| grant.heard);
    let mut last: Option<&Grant> = None;
    for grant in sorted {
        if let Some(before) = last.filter(|before| grant.heard < before.believed) {
            let until = before.believed.min(grant.believed);
            let text = format!(
                "{} was told that the lock is its own, {} after {} had got it, and {} was still told so {} later",
                grant.process,
                millis(grant.heard - before.heard),
                before.process,
                before.process,
                millis(before.believed - grant.heard),
            );
            found.push(violation(
                Rule::Overlap,
                key,
                (grant.heard, until.max(grant.heard)),
                vec![belief(before), belief(grant)],
                text,
            ));
        }
        if last.is_none_or(|before| before.believed < grant.believed) {
            last = Some(grant);
        }
    }
}

/// Fences follow the order of time wherever there is one: of all grants that were returned before this one was asked
/// for, the highest fence is below its own. No two are the same, whatever the order. O(n log n).
pub(super) fn fences(key: &str, grants: &[Grant], found: &mut Vec<Violation>) {
    let mut by_asked: Vec<_> = grants.iter().filter(|grant| grant.fence != 0).collect();
    let mut by_heard = by_asked.clone();
    by_asked.sort_by_key(|grant| grant.asked);
    by_heard.sort_by_key(|grant| grant.heard);
    let mut returned = by_heard.into_iter().peekable();
    let mut highest: Option<&Grant> = None;
    for grant in &by_asked {
        while let Some(before) = returned.next_if(|before| before.heard < grant.asked) {
            if highest.is_none_or(|highest| highest.fence < before.fence) {
                highest = Some(before);
            }
        }
        if let Some(before) = highest.filter(|before| before.fence >= grant.fence) {
            let text = format!(
                "{} asked {} after {} had got the fence {}, and got {}, which is not greater",
                grant.process,
                millis(grant.asked - before.heard),
                before.process,
                before.fence,
                grant.fence,
            );
            found.push(violation(
                Rule::FenceOrder,
                key,
                (grant.heard, grant.heard),
                vec![belief(before), belief(grant)],
                text,
            ));
        }
    }
    let mut by_fence = by_asked;
    by_fence.sort_by_key(|grant| (grant.fence, grant.heard));
    for (one, other) in by_fence.iter().zip(by_fence.iter().skip(1)) {
        // Where one was returned before the other was asked for, that has been said above.
        if one.fence == other.fence && other.asked <= one.heard {
            let text = format!("{} and {} both got the fence {}", one.process, other.process, one.fence);
            found.push(violation(
                Rule::FenceOrder,
                key,
                (other.heard, other.heard),
                vec![belief(one), belief(other)],
                text,
            ));
        }
    }
}

/// What a resource did, in its own order: it admits whoever is not below the highest fence so far, and nobody else, and
/// each update that it takes was made from the version that stands there. O(n log n) for the order, O(n) for the rest.
pub(super) fn resource(key: &str, ops: &Ops, found: &mut Vec<Violation>) {
    let mut records: Vec<_> = ops.records.iter().collect();
    records.sort_by_key(|event| event.op);
    let (mut highest, mut holder, mut last): (u64, Option<&Event>, Option<&Event>) = (0, None, None);
    let mut updates = 0_u64;
    for event in records {
        let (fence, admitted) = match &event.what {
            What::Claimed { fence, admitted, .. } | What::Updated { fence, admitted, .. } => (*fence, *admitted),
            _ => continue,
        };
        let mut blame = |text, other: Option<&Event>| {
            let parties = other.into_iter().chain([event]).map(visitor).collect();
            found.push(violation(Rule::Resource, key, (event.at, event.at), parties, text));
        };
        if admitted && fence < highest {
            blame(format!("the fence {fence} was admitted after {highest}"), holder);
        }
        if !admitted && fence >= highest && fence != 0 {
            blame(format!("the fence {fence} was refused although {highest} was the highest"), holder);
        }
        if admitted && fence >= highest {
            (highest, holder) = (fence, Some(event));
        }
        if let What::Updated { admitted: true, base, version, .. } = &event.what {
            if base != version {
                blame(format!("an update made from version {base} was written over version {version}"), last);
            }
            updates += 1;
            last = Some(event);
        }
    }
    let most = ops.acknowledged + ops.unknown;
    if !(ops.acknowledged..=most).contains(&updates) && (ops.acknowledged, most) != (0, 0) {
        let at = last.map_or(0, |event| event.at);
        let text = format!(
            "the resource took {updates} updates, but {} were acknowledged and {} more were never answered",
            ops.acknowledged, ops.unknown
        );
        found.push(violation(Rule::Resource, key, (at, at), last.into_iter().map(visitor).collect(), text));
    }
}

/// What must be granted within some time is; of what had more time left than the history has, nothing is known. O(n).
pub(super) fn liveness(key: &str, wanted: &[Wanted], end: u64, found: &mut Vec<Violation>) {
    for wanted in wanted {
        let due = wanted.asked + wanted.within;
        let text = match wanted.granted {
            Some(at) if at > due => {
                format!("it was granted after {}, {} were allowed", millis(at - wanted.asked), millis(wanted.within))
            }
            None if end >= due => format!("it was not granted in {}", millis(wanted.within)),
            _ => continue,
        };
        let to = wanted.granted.unwrap_or(end);
        let party = Party { process: wanted.process.clone(), grant: None, fence: None, from: wanted.asked, to };
        found.push(violation(Rule::Liveness, key, (due, to), vec![party], text));
    }
}

fn violation(rule: Rule, key: &str, (at, until): (u64, u64), parties: Vec<Party>, text: String) -> Violation {
    Violation { rule, key: key.to_owned(), at, until, parties, text, origin: 0 }
}

fn belief(grant: &Grant) -> Party {
    let (process, to) = (grant.process.clone(), grant.believed);
    Party { process, grant: Some(grant.op), fence: Some(grant.fence), from: grant.heard, to }
}

fn visitor(event: &Event) -> Party {
    let (process, fence) = match &event.what {
        What::Claimed { by, fence, .. } | What::Updated { by, fence, .. } => (by.clone(), Some(*fence)),
        _ => (event.process.clone(), None),
    };
    Party { process, grant: None, fence, from: event.at, to: event.at }
}

fn millis(nanos: u64) -> String {
    format!("{:.3} ms", nanos as f64 / 1e6)
}
