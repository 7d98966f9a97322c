//! How long a lock is out of reach: asked for, and held by nobody.

use std::collections::HashMap;

use super::{
    Party, Rule, Violation,
    judge::{millis, violation},
    ops::{Grant, Ops, Wish},
};

/// Who was refused asks again. For so long it still counts as asking, in nanoseconds: a lock that everybody is refused at once is
/// out of reach, too.
const ASKS_AGAIN: u64 = 100_000_000;

/// Something that befell a worker, or everybody.
#[derive(Debug)]
pub(super) struct Trouble<'a> {
    pub(super) of: &'a str,
    pub(super) from: u64,
    /// `None` if it was never healed.
    pub(super) to: Option<u64>,
}

/// The workers of a history: what befell them, and when they were last heard of.
#[derive(Debug, Default)]
pub(super) struct Lives<'a> {
    pub(super) troubles: Vec<Trouble<'a>>,
    pub(super) last: HashMap<&'a str, u64>,
}

/// A time for which a lock was out of reach.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span<'a> {
    pub(super) from: u64,
    pub(super) to: u64,
    /// Who let the lock go or began to ask, and who got it or gave up.
    between: [&'a str; 2],
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Holds,
    Asks,
    Excused,
}

/// The beginning or the end of something, in the order in which they count at one moment: beginnings first, so that a lock that
/// goes from hand to hand is never out of reach, and a grant that is heard of too late ends the time before it.
struct Edge<'a> {
    at: u64,
    is_end: bool,
    kind: Kind,
    of: &'a str,
}

/// The times for which somebody asked for a lock and nobody had it, each until the next grant, or until nobody asked any more.
/// O(n log n), and O(n) for each trouble.
pub(super) fn spans<'a>(ops: &'a Ops, lives: &Lives<'a>) -> Vec<Span<'a>> {
    let mut edges = Vec::new();
    let mut add = |kind, of, (from, to): (u64, u64)| {
        edges.push(Edge { at: from, is_end: false, kind, of });
        edges.push(Edge { at: to.max(from), is_end: true, kind, of });
    };
    for grant in &ops.grants {
        add(Kind::Holds, grant.process.as_str(), (grant.heard, lives.held_until(grant)));
    }
    for wish in &ops.wishes {
        for asked in lives.asked(wish) {
            add(Kind::Asks, wish.process.as_str(), asked);
        }
        if let Some(at) = wish.answered.filter(|_| wish.is_in_doubt) {
            add(Kind::Holds, wish.process.as_str(), (at, at));
        }
    }
    for trouble in lives.troubles.iter().filter(|trouble| !lives.last.contains_key(trouble.of)) {
        add(Kind::Excused, trouble.of, (trouble.from, trouble.to.unwrap_or(u64::MAX)));
    }
    edges.sort_by_key(|edge| (edge.at, edge.is_end));
    let (mut counts, mut open, mut spans) = ([0_usize; 3], None, Vec::new());
    for edge in edges {
        let count = &mut counts[edge.kind as usize];
        *count = if edge.is_end { *count - 1 } else { *count + 1 };
        let is_open =
            counts[Kind::Asks as usize] > 0 && counts[Kind::Holds as usize] + counts[Kind::Excused as usize] == 0;
        match open {
            None if is_open => open = Some((edge.at, edge.of)),
            Some((from, of)) if !is_open => {
                spans.push(Span { from, to: edge.at, between: [of, edge.of] });
                open = None;
            }
            _ => {}
        }
    }
    spans
}

/// No lock is out of reach for longer than `within`.
pub(super) fn judge(key: &str, spans: &[Span<'_>], within: u64, found: &mut Vec<Violation>) {
    for Span { from, to, between } in spans.iter().filter(|span| span.to - span.from > within) {
        let text = format!(
            "it was asked for, and nobody had it for {}, {} were allowed: from {} to {}",
            millis(to - from),
            millis(within),
            between[0],
            between[1],
        );
        let party = |of: &&str| Party { process: (*of).to_owned(), grant: None, fence: None, from: *from, to: *to };
        found.push(violation(Rule::Reach, key, (*from, *to), between.iter().map(party).collect(), text));
    }
}

impl Lives<'_> {
    /// Until when a holder surely had the lock. What it had when it was killed or stood still may lapse from then on.
    fn held_until(&self, grant: &Grant) -> u64 {
        let sure = grant.believed.unwrap_or(grant.heard).max(grant.heard);
        if grant.lost.is_some() {
            return sure;
        }
        let troubles = self.of(&grant.process).map(|trouble| trouble.from);
        let trouble = troubles.filter(|from| *from >= sure).min();
        trouble.into_iter().chain(grant.given_up).min().unwrap_or(sure).max(sure)
    }

    /// When somebody asked who could be answered: one that was killed asks no more, nor does one that stands still.
    fn asked(&self, wish: &Wish) -> Vec<(u64, u64)> {
        let last = self.last.get(worker(&wish.process)).copied().unwrap_or(wish.asked);
        let until = match wish.answered {
            Some(at) if wish.is_refused => at + ASKS_AGAIN,
            Some(at) => at,
            None => last,
        };
        let mut asked = vec![(wish.asked, until)];
        for trouble in self.of(&wish.process) {
            let end = trouble.to.unwrap_or(u64::MAX);
            let cut = |(from, to): (u64, u64)| [(from, to.min(trouble.from)), (from.max(end), to)];
            asked = asked.into_iter().flat_map(cut).filter(|(from, to)| from < to).collect();
        }
        asked
    }

    fn of(&self, process: &str) -> impl Iterator<Item = &Trouble<'_>> {
        let worker = worker(process).to_owned();
        self.troubles.iter().filter(move |trouble| trouble.of == worker)
    }
}

/// The process, of which the part behind a `/` is a task.
pub(super) fn worker(process: &str) -> &str {
    process.split('/').next().unwrap_or(process)
}
