//! The rules, for one lock at a time: no lock has anything to do with another.

use std::collections::HashMap;

use lockkit_core::Mode;

use super::{
    Event, Party, Rule, Violation, What,
    lease::Lease,
    mode,
    ops::{Grant, Ops, Wanted},
};

/// Nobody believes while another does with whom it can't share the lock: sorted by when they began, each is held against those that
/// still believe. Who never heard yes counts for nothing: it may have been long over when it heard of its grant. Returns how many shared
/// the lock with one that was there before.
/// O(n log n), and O(n) for each that believes at once.
pub(super) fn overlaps(key: &str, leases: &[Lease<'_>], found: &mut Vec<Violation>) -> u64 {
    let mut sorted: Vec<_> = leases.iter().filter_map(|lease| lease.believed.map(|until| (lease, until))).collect();
    sorted.sort_by_key(|(lease, _)| lease.heard);
    let mut standing: Vec<(&Lease<'_>, u64)> = Vec::new();
    let mut shared = 0;
    for (lease, believed) in sorted {
        standing.retain(|(_, until)| lease.heard < *until);
        let is_full = standing.len() >= mode::limit(lease.mode);
        shared += u64::from(standing.iter().any(|(other, _)| !mode::excludes(lease.mode, other.mode)));
        let rivals = standing.iter().filter(|(other, _)| is_full || mode::excludes(lease.mode, other.mode));
        if let Some((before, until)) = rivals.max_by_key(|(_, until)| *until) {
            let mut text = format!(
                "{} was told that the lock is its own, {} after {} had got it, and {} was still told so {} later",
                lease.first().process,
                millis(lease.heard - before.heard),
                before.first().process,
                before.first().process,
                millis(until - lease.heard),
            );
            if lease.mode != Mode::Exclusive || before.mode != Mode::Exclusive {
                text += &format!(" ({} beside {}, {} in all)", lease.mode, before.mode, standing.len() + 1);
            }
            let time = (lease.heard, (*until).min(believed).max(lease.heard));
            found.push(violation(Rule::Overlap, key, time, vec![belief(before), belief(lease)], text));
        }
        standing.push((lease, believed));
    }
    shared
}

/// Who has an older fence does not believe once a newer one was heard of: by the fences its lease came first, so that it
/// had ended when the newer one was granted, unless the two share the lock. Where both believed at once, or the older fence was asked
/// for after the newer one was returned, another rule says so. O(n log n), and O(n) for each limit of permits.
pub(super) fn superseded(key: &str, leases: &[Lease<'_>], found: &mut Vec<Violation>) {
    let mut sorted: Vec<_> = leases.iter().filter(|lease| lease.fence != 0).collect();
    sorted.sort_by_key(|lease| std::cmp::Reverse(lease.fence));
    // Of those with a higher fence, for each mode the one that was heard of first.
    let mut newer: Vec<&Lease<'_>> = Vec::new();
    for same in sorted.chunk_by(|one, other| one.fence == other.fence) {
        for lease in same {
            let rivals = newer.iter().filter(|newer| mode::excludes(lease.mode, newer.mode));
            if let (Some(newer), Some(believed)) = (rivals.min_by_key(|newer| newer.heard), lease.believed)
                && newer.heard < believed
                && lease.asked <= newer.heard
                && newer.believed.is_none_or(|until| lease.heard >= until)
            {
                let text = format!(
                    "{} was told that the lock is its own, {} after {} had got it with a greater fence",
                    lease.first().process,
                    millis(believed - newer.heard),
                    newer.first().process,
                );
                let parties = vec![belief(lease), belief(newer)];
                found.push(violation(Rule::Superseded, key, (newer.heard, believed), parties, text));
            }
        }
        for lease in same {
            match newer.iter_mut().find(|newer| newer.mode == lease.mode) {
                Some(newer) if lease.heard < newer.heard => *newer = lease,
                Some(_) => {}
                None => newer.push(lease),
            }
        }
    }
}

/// A lease that is lost stays lost, whichever of its guards is asked. O(n).
pub(super) fn losses(key: &str, leases: &[Lease<'_>], found: &mut Vec<Violation>) {
    for lease in leases {
        if let (Some(lost), Some(believed)) = (lease.lost, lease.believed)
            && lost < believed
        {
            let after = millis(believed - lost);
            let text = format!("{} was told that its lease is held, {after} after it was lost", lease.first().process);
            found.push(violation(Rule::Answer, key, (lost, believed), vec![belief(lease)], text));
        }
    }
}

/// Fences follow the order of time wherever there is one: of all leases that were returned before this one was asked
/// for, the highest fence is below its own. No two are the same, whatever the order, but those of readers: they may have one number
/// together. A store that never gives a fence has no order; one that gives them sometimes does not keep it.
///
/// A lease that is handed over in its process goes on with fences of the same grant. Where the store has ended it early, those
/// are older than what others get meanwhile, as the fence of a holder who does not know yet is: that is [`Rule::Superseded`].
/// O(n log n).
pub(super) fn fences(key: &str, leases: &[Lease<'_>], found: &mut Vec<Violation>) {
    if leases.iter().all(|lease| lease.fence == 0) {
        return;
    }
    let share = |one: &Lease<'_>, other: &Lease<'_>| one.mode == Mode::Shared && other.mode == Mode::Shared;
    let mut by_heard: Vec<_> = leases.iter().collect();
    by_heard.sort_by_key(|lease| lease.heard);
    let mut returned = by_heard.into_iter().peekable();
    // Of those that were returned, the highest of a reader and the highest of all others.
    let mut highest: [Option<&Lease<'_>>; 2] = [None; 2];
    for lease in leases {
        while let Some(before) = returned.next_if(|before| before.heard < lease.asked) {
            let highest = &mut highest[usize::from(before.mode == Mode::Shared)];
            if highest.is_none_or(|highest| highest.fence < before.fence) {
                *highest = Some(before);
            }
        }
        let bars =
            |before: &&Lease<'_>| before.fence > lease.fence || before.fence == lease.fence && !share(before, lease);
        if let Some(before) = highest.into_iter().flatten().filter(bars).max_by_key(|before| before.fence) {
            let text = format!(
                "{} asked {} after {} had got the fence {}, and got {}, which is not greater",
                lease.first().process,
                millis(lease.asked - before.heard),
                before.first().process,
                before.fence,
                lease.fence,
            );
            let parties = vec![belief(before), belief(lease)];
            let is_handed = lease.first().handed && before.fence != lease.fence;
            let rule = if is_handed { Rule::Superseded } else { Rule::FenceOrder };
            found.push(violation(rule, key, (lease.heard, lease.heard), parties, text));
        }
    }
    let mut by_fence: Vec<_> = leases.iter().collect();
    by_fence.sort_by_key(|lease| (lease.fence, lease.heard));
    for (one, other) in by_fence.iter().zip(by_fence.iter().skip(1)) {
        // Where one was returned before the other was asked for, that has been said above.
        if one.fence == other.fence && other.asked <= one.heard && !share(one, other) {
            let (first, second) = (&one.first().process, &other.first().process);
            let text = format!("{first} and {second} both got the fence {}", one.fence);
            let parties = vec![belief(one), belief(other)];
            found.push(violation(Rule::FenceOrder, key, (other.heard, other.heard), parties, text));
        }
    }
}

/// What an owner is granted while it has a guard of the lock, in the same mode, all the time has the fence of that guard. O(n log n).
pub(super) fn nesting(key: &str, grants: &[Grant], found: &mut Vec<Violation>) {
    let mut owned: HashMap<_, Vec<&Grant>> = HashMap::new();
    for grant in grants.iter().filter(|grant| grant.owner.is_some()) {
        owned.entry((&grant.process, grant.owner, grant.mode)).or_default().push(grant);
    }
    for mut nested in owned.into_values() {
        nested.sort_by_key(|grant| grant.asked);
        // Of the guards of this owner so far, the one that it has had for longest to come.
        let mut outer: Option<&Grant> = None;
        for grant in nested {
            if let Some(outer) = outer
                && outer.heard < grant.asked
                && outer.given_up.is_none_or(|end| end > grant.heard)
                && outer.fence != grant.fence
            {
                let text = format!(
                    "{} had the lock with the fence {}, and what it nested in that has {}",
                    grant.process, outer.fence, grant.fence
                );
                let parties = vec![party(outer), party(grant)];
                found.push(violation(Rule::FenceOrder, key, (grant.heard, grant.heard), parties, text));
            }
            let until = |grant: &Grant| grant.given_up.unwrap_or(u64::MAX);
            if outer.is_none_or(|outer| until(outer) < until(grant)) {
                outer = Some(grant);
            }
        }
    }
}

/// What a resource did, in its own order: it admits whoever is not below the highest fence so far, and nobody else; each
/// update that it takes was made from the version that stands there, and is the next version. O(n log n) for the order, O(n)
/// for the rest.
pub(super) fn resource(key: &str, ops: &Ops, found: &mut Vec<Violation>) {
    let mut records: Vec<_> = ops.records.iter().collect();
    records.sort_by_key(|event| event.op);
    let (mut highest, mut holder, mut last): (u64, Option<&Event>, Option<&Event>) = (0, None, None);
    let (mut stands, mut twin_stands) = (None, None);
    for event in records {
        let mut blame = |text, other: Option<&Event>| {
            let parties = other.into_iter().chain([event]).map(visitor).collect();
            found.push(violation(Rule::Resource, key, (event.at, event.at), parties, text));
        };
        if let What::Twin { version, .. } = &event.what {
            if let Some(stands) = twin_stands.filter(|stands| stands != version) {
                blame(format!("the twin says that it is at version {version}, and it must be at {stands}"), last);
            }
            twin_stands = Some(version + 1);
        }
        let (fence, admitted) = match &event.what {
            What::Claimed { fence, admitted, .. } | What::Updated { fence, admitted, .. } => (*fence, *admitted),
            _ => continue,
        };
        if admitted && (fence < highest || fence == 0) {
            blame(format!("the fence {fence} was admitted after {highest}"), holder);
        }
        if !admitted && fence >= highest && fence != 0 {
            blame(format!("the fence {fence} was refused although {highest} was the highest"), holder);
        }
        if admitted && fence >= highest {
            (highest, holder) = (fence, Some(event));
        }
        if let What::Updated { base, version, .. } = &event.what {
            if let Some(stands) = stands.filter(|stands| stands != version) {
                blame(format!("version {version} stood there, and it must have been {stands}"), last);
            }
            if admitted && base != version {
                blame(format!("an update made from version {base} was written over version {version}"), last);
            }
            stands = Some(version + u64::from(admitted));
            if admitted {
                last = Some(event);
            }
        }
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
            None if wanted.denied.is_some() => "it was asked for in vain".to_owned(),
            None if end >= due => format!("it was not granted in {}", millis(wanted.within)),
            _ => continue,
        };
        let to = wanted.granted.or(wanted.denied).unwrap_or(end);
        let party = Party { process: wanted.process.clone(), grant: None, fence: None, from: wanted.asked, to };
        found.push(violation(Rule::Liveness, key, (due.min(to), to), vec![party], text));
    }
}

pub(super) fn violation(
    rule: Rule,
    key: &str,
    (at, until): (u64, u64),
    parties: Vec<Party>,
    text: String,
) -> Violation {
    Violation { rule, key: key.to_owned(), at, until, parties, text, origin: 0 }
}

fn belief(lease: &Lease<'_>) -> Party {
    Party { to: lease.believed.unwrap_or(lease.heard), ..party(lease.first()) }
}

fn party(grant: &Grant) -> Party {
    let (process, to) = (grant.process.clone(), grant.believed.unwrap_or(grant.heard));
    Party { process, grant: Some(grant.op), fence: Some(grant.fence), from: grant.heard, to }
}

fn visitor(event: &Event) -> Party {
    let (process, fence) = match &event.what {
        What::Claimed { by, fence, .. } | What::Updated { by, fence, .. } => (by.clone(), Some(*fence)),
        _ => (event.process.clone(), None),
    };
    Party { process, grant: None, fence, from: event.at, to: event.at }
}

pub(super) fn millis(nanos: u64) -> String {
    format!("{:.3} ms", nanos as f64 / 1e6)
}
