//! Whether a lock is granted in the order in which it was asked for.

use lockkit_core::Mode;

use super::{
    Party, Rule, Violation,
    judge::{millis, violation},
    mode,
    ops::{Sighting, Wish},
};

/// Those that wait, as the store shows them to a question that was asked at `asked` and answered at `at`: each is an acquisition that its
/// process had under way all the while. If it had several, or none, it is not known which one is meant.
pub(super) fn see(wishes: &mut [Wish], waiting: &[String], asked: u64, at: u64) {
    for process in waiting {
        let mut meant = wishes.iter_mut().filter(|wish| wish.answered.is_none() && wish.process == *process);
        if let (Some(wish), None) = (meant.next(), meant.next())
            && wish.asked < asked
        {
            let first = wish.seen.map_or(at, |seen| seen.first);
            wish.seen = Some(Sighting { first, last: asked });
        }
    }
}

/// Of those that had their place, in one mode: the one with the highest fence, and the one that was seen to wait for longest.
struct Ahead<'a> {
    mode: Mode,
    highest: &'a Wish,
    longest: (Sighting, &'a Wish),
}

/// Nobody is granted the lock before one that had its place in the queue when it asked: with a lower fence, or while that one still
/// waits. Those that share a lock may get in together, in any order; of permits, their fences say no more than that. O(n log n), and O(n)
/// for each mode.
pub(super) fn judge(key: &str, wishes: &[Wish], found: &mut Vec<Violation>) {
    let mut queued: Vec<_> = wishes.iter().filter_map(|wish| Some((wish.seen?, wish))).collect();
    queued.sort_by_key(|(seen, _)| seen.first);
    let mut by_asked: Vec<_> = wishes.iter().collect();
    by_asked.sort_by_key(|wish| wish.asked);
    let (mut queued, mut ahead) = (queued.into_iter().peekable(), Vec::new());
    for wish in by_asked {
        while let Some((seen, other)) = queued.next_if(|(seen, _)| seen.first < wish.asked) {
            note(&mut ahead, seen, other);
        }
        let (Some(fence), Some(granted)) = (wish.fence, wish.answered) else { continue };
        let passed = ahead.iter().find_map(|ahead| {
            let is_apart = mode::excludes(ahead.mode, wish.mode);
            let is_ordered = fence > 0 && (is_apart || wish.mode == Mode::Shared);
            let later = Some(ahead.highest).filter(|other| is_ordered && other.fence > Some(fence));
            let (seen, waits) = ahead.longest;
            later.or(Some(waits).filter(|_| is_apart && seen.last > granted))
        });
        if let Some(other) = passed {
            let text = format!(
                "{} was granted the lock before {}, which had its place in the queue when it asked, {} later",
                wish.process,
                other.process,
                millis(wish.asked - other.asked),
            );
            let until = other.answered.unwrap_or(granted).max(granted);
            found.push(violation(Rule::Order, key, (granted, until), vec![party(other), party(wish)], text));
        }
    }
}

fn note<'a>(ahead: &mut Vec<Ahead<'a>>, seen: Sighting, wish: &'a Wish) {
    match ahead.iter_mut().find(|ahead| ahead.mode == wish.mode) {
        None => ahead.push(Ahead { mode: wish.mode, highest: wish, longest: (seen, wish) }),
        Some(ahead) => {
            if ahead.highest.fence < wish.fence {
                ahead.highest = wish;
            }
            if ahead.longest.0.last < seen.last {
                ahead.longest = (seen, wish);
            }
        }
    }
}

fn party(wish: &Wish) -> Party {
    let to = wish.answered.unwrap_or(wish.asked);
    Party { process: wish.process.clone(), grant: None, fence: wish.fence, from: wish.asked, to }
}
