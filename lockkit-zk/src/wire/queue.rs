//! Who holds a lock, from nothing but the names of the nodes in its directory.
//!
//! The order is Curator's, to the letter (`LockInternals`, `StandardLockInternalsDriver`), because exclusion between the
//! two rests on both seeing the same order: all children take part, whoever made them, sorted as text by what follows
//! the last `lock-`, or by the whole name where there is none. Each waits for those before it, unless it may hold beside them:
//!
//! - an exclusive node holds when it is the first, as in Curator;
//! - a reader's holds when none but readers are before it;
//! - a permit's holds when only permits of the same limit are before it, and fewer than the limit.
//!
//! So nobody passes anybody, and what holds goes on to, for whoever comes later stands behind it. Clients that know
//! only the first rule wait for all that is before them, and are waited for.
//!
//! One thing is added. kazoo names its nodes `<hex>__lock__<number>`, and Curator, which sorts them by the hex digits,
//! does not see them where they belong. We sort them by their numbers, and so wait for those that came before. That can
//! only make us wait longer, and never in a circle, since everyone waits for lower numbers only.

use std::num::NonZeroU32;

use lockkit_core::Mode;

use crate::wire::{
    name::{self, LOCK},
    window,
};

/// The node that keeps a lock's fence record. It is older than it looks: `~` sorts behind all that takes part, so
/// Curator, which counts every child, never waits for it.
pub(crate) const FENCE: &str = "~fence";

/// The node that comes and goes in the step in which a lock gets its directory. Servers show such a step in parts, so that somebody may see it.
pub(crate) const FIRST: &str = "~new";

/// Where sequence numbers become dangerous.
///
/// ZooKeeper counts them in 32 bits, with a sign (ZOOKEEPER-2944). After `2147483647` comes `-2147483648`, which sorts
/// **before** all that is in the queue: the newcomer would hold the lock together with the holder. So nobody queues
/// beyond this number; the directory is made anew first. The distance leaves room for all that may be under way.
pub(crate) const LAST_SEQUENCE: i64 = if cfg!(test) { 40 } else { 2_000_000_000 };

/// A claim's place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Position<'a> {
    /// It holds the lock.
    Holds,
    /// It waits.
    Behind {
        /// What it waits for. It can't hold before, and may not even then.
        until: Until<'a>,
        /// The first node of the queue, which holds the lock.
        holder: &'a str,
    },
    /// It is a permit, and the first permit before it has another limit: this one.
    Disagrees(Mode),
    /// It is not in the queue.
    Absent,
}

/// What a claim waits for. It is as little as can be watched without ever missing that the lock is free for it, so that a
/// release wakes few, and not a herd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Until<'a> {
    /// This node is gone.
    Gone {
        /// The node just before it, or of those that a reader or a permit can't hold beside, the nearest.
        node: &'a str,
        /// Whether no other is before it, so that the lock is its own then.
        alone: bool,
    },
    /// Fewer than so many of these are left. Any of them may be the one to go, so that it takes that many watches.
    Fewer {
        /// How many.
        than: usize,
        /// All that are before it, the nearest first.
        ahead: Vec<&'a str>,
    },
}

/// Finds the place of `own` among the children of a lock. Its name tells what it asks for.
pub(crate) fn place<'a>(children: &'a [String], own: &str) -> Position<'a> {
    if !children.iter().any(|child| child == own) {
        return Position::Absent;
    }
    // Equal keys can't come from the server's counter. If somebody made up such a name, it goes before ours: rather wait
    // for a node that does not matter than hold a lock together with its owner.
    let own_key = key(own);
    let mut ahead = sorted(children.iter().filter(|child| *child != own && key(child) <= own_key));
    let Some(holder) = ahead.first().copied() else { return Position::Holds };
    // From here on the nearest is the first.
    ahead.reverse();
    let alone = ahead.len() == 1;
    let gone = |node| Position::Behind { until: Until::Gone { node, alone }, holder };
    match name::mode(own) {
        Mode::Shared => {
            let other = ahead.iter().find(|child| name::mode(child) != Mode::Shared);
            other.map_or(Position::Holds, |node| gone(node))
        }
        permit @ Mode::Permit { limit } => {
            let (mut nearest, mut first) = (None, permit);
            for child in &ahead {
                let mode = name::mode(child);
                if mode != permit {
                    nearest = nearest.or(Some(*child));
                }
                if matches!(mode, Mode::Permit { .. }) {
                    first = mode;
                }
            }
            // The first permit's limit counts. One behind it that has another is about to be refused.
            if first != permit {
                return Position::Disagrees(first);
            }
            match most(limit) {
                than if ahead.len() < than => nearest.map_or(Position::Holds, gone),
                1 => gone(ahead[0]),
                than => Position::Behind { until: Until::Fewer { than, ahead }, holder },
            }
        }
        _ => gone(ahead[0]),
    }
}

/// The nodes that hold the lock, in their order, and those that wait behind them, the next one first.
pub(crate) fn holders(children: &[String]) -> (Vec<&str>, Vec<&str>) {
    let mut queue = sorted(children.iter());
    let waiters = queue.split_off(beside(&queue));
    (queue, waiters)
}

/// All that take part, the first in front, whether or not it holds the lock.
pub(crate) fn contenders(children: &[String]) -> Vec<&str> {
    sorted(children.iter())
}

/// How many in front of a queue hold the lock together.
fn beside(queue: &[&str]) -> usize {
    let first = queue.first().map_or(Mode::Exclusive, |child| name::mode(child));
    let most = match first {
        Mode::Shared => usize::MAX,
        Mode::Permit { limit } => most(limit),
        _ => 1,
    };
    queue.iter().take(most).take_while(|child| name::mode(child) == first).count()
}

/// The nodes of the claim whose nodes begin like this.
pub(crate) fn of_claim<'a>(children: &'a [String], protection: &str) -> impl Iterator<Item = &'a str> {
    children.iter().map(String::as_str).filter(move |child| child.starts_with(protection))
}

/// Whether the lock has a fence record.
pub(crate) fn has_record(children: &[String]) -> bool {
    children.iter().any(|child| child == FENCE)
}

/// The sequence number of a node of ours.
pub(crate) fn sequence(node: &str) -> Option<i64> {
    key(node).parse().ok()
}

/// Whether a node with this number may stay in the queue, or the counter may soon wrap, or has.
pub(crate) fn is_safe(sequence: i64) -> bool {
    (0..LAST_SEQUENCE).contains(&sequence)
}

fn most(limit: NonZeroU32) -> usize {
    usize::try_from(limit.get()).unwrap_or(usize::MAX)
}

/// Those that take part, the first in front.
fn sorted<'a>(children: impl Iterator<Item = &'a String>) -> Vec<&'a str> {
    let is_contender = |child: &&str| !matches!(*child, FENCE | FIRST) && !window::is_record(child);
    let contenders = children.map(String::as_str).filter(is_contender);
    let mut queue: Vec<_> = contenders.map(|child| (key(child), child)).collect();
    queue.sort_unstable();
    queue.into_iter().map(|(_, child)| child).collect()
}

fn key(child: &str) -> &str {
    [LOCK, "__lock__", "__rlock__"].into_iter().find_map(|mark| Some(child.rsplit_once(mark)?.1)).unwrap_or(child)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(children: &[&str]) -> Vec<String> {
        children.iter().map(|child| (*child).to_owned()).collect()
    }

    /// The nodes that hold the lock, and how many wait.
    fn held(children: &[String]) -> (Vec<&str>, usize) {
        let (holders, waiters) = holders(children);
        (holders, waiters.len())
    }

    fn behind<'a>(node: &'a str, alone: bool, holder: &'a str) -> Position<'a> {
        Position::Behind { until: Until::Gone { node, alone }, holder }
    }

    #[test]
    fn the_lowest_number_holds_and_each_watches_the_one_before() {
        let children = queue(&["_c_b-lock-0000000010", "_c_a-lock-0000000012", "_c_z-lock-0000000009"]);
        let first = "_c_z-lock-0000000009";
        assert_eq!(place(&children, first), Position::Holds);
        assert_eq!(place(&children, "_c_b-lock-0000000010"), behind(first, true, first));
        assert_eq!(place(&children, "_c_a-lock-0000000012"), behind("_c_b-lock-0000000010", false, first));
        assert_eq!(place(&children, "_c_a-lock-0000000013"), Position::Absent);
        assert_eq!(held(&children), (vec![first], 2));
        assert_eq!(held(&[]), (vec![], 0));
    }

    /// The name of a node of lockkit.
    fn node(mode: Mode, number: u32) -> String {
        format!("_c_00000000-0000-4000-8000-000000000000-{}{number:010}", name::mark(mode))
    }

    fn permit(limit: u32) -> Mode {
        Mode::Permit { limit: NonZeroU32::new(limit).expect("not zero") }
    }

    #[test]
    fn readers_hold_beside_each_other_and_wait_for_the_nearest_of_another_kind() {
        let modes = [Mode::Shared, Mode::Shared, Mode::Exclusive, Mode::Shared, permit(2), Mode::Shared, Mode::Shared];
        let all: Vec<_> = modes.into_iter().zip(1..).map(|(mode, number)| node(mode, number)).collect();
        assert_eq!((place(&all, &all[0]), place(&all, &all[1])), (Position::Holds, Position::Holds));
        assert_eq!(place(&all, &all[2]), behind(&all[1], false, &all[0]));
        assert_eq!(place(&all, &all[3]), behind(&all[2], false, &all[0]));
        for late in [5, 6] {
            assert_eq!(place(&all, &all[late]), behind(&all[4], false, &all[0]));
        }
        assert_eq!(place(&all[2..], &all[3]), behind(&all[2], true, &all[2]));
        assert_eq!(held(&all), (vec![&*all[0], &*all[1]], 5));
    }

    #[test]
    fn permits_hold_beside_so_many() {
        let three: Vec<_> = (1..=5).map(|number| node(permit(3), number)).collect();
        assert_eq!((place(&three, &three[0]), place(&three, &three[2])), (Position::Holds, Position::Holds));
        let ahead = |last: usize| three[..last].iter().rev().map(String::as_str).collect::<Vec<_>>();
        for late in [3, 4] {
            let until = Until::Fewer { than: 3, ahead: ahead(late) };
            assert_eq!(place(&three, &three[late]), Position::Behind { until, holder: &three[0] });
        }
        assert_eq!(held(&three), (vec![&*three[0], &*three[1], &*three[2]], 2));
        let mixed = [node(Mode::Exclusive, 1), node(permit(3), 2), node(permit(2), 3)];
        assert_eq!(place(&mixed, &mixed[1]), behind(&mixed[0], true, &mixed[0]));
        assert_eq!(place(&mixed, &mixed[2]), Position::Disagrees(permit(3)));
        let odd = [node(permit(3), 1), node(permit(2), 2), node(permit(3), 3)];
        assert_eq!(place(&odd, &odd[1]), Position::Disagrees(permit(3)));
        assert_eq!(place(&odd, &odd[2]), behind(&odd[1], false, &odd[0]), "the first was there before the odd one");
        let single = [node(permit(1), 1), node(permit(1), 2), node(permit(1), 3)];
        assert_eq!(place(&single, &single[2]), behind(&single[1], false, &single[0]));
    }

    /// Random queues from which nodes go in a random order: nobody holds beside another who must not, and what a claim waits
    /// for has come to pass whenever it holds, so that it was woken.
    #[test]
    fn nobody_holds_wrongly_or_sleeps_on() {
        let modes = [Mode::Exclusive, Mode::Shared, Mode::Shared, permit(3), permit(3), permit(3), permit(1)];
        let mut state: u32 = 12345;
        let mut pick = |among: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as usize % among
        };
        for _ in 0..3000 {
            let first = pick(3);
            let mut all: Vec<_> = (0..8).map(|number| node(modes[first + pick(modes.len() - first)], number)).collect();
            let all_before = all.clone();
            let waiting: Vec<_> = all_before.iter().map(|own| (own, place(&all_before, own))).collect();
            while !all.is_empty() {
                let holding: Vec<_> = all.iter().filter(|own| place(&all, own) == Position::Holds).collect();
                let (holders, waiters) = holders(&all);
                assert_eq!(holders, holding, "{all:?}");
                assert_eq!(holders.len() + waiters.len(), all.len(), "{all:?}");
                assert!(waiters.is_sorted_by_key(|node| key(node)), "{all:?}");
                let mode = name::mode(holding[0]);
                assert!(holding.iter().all(|held| name::mode(held) == mode), "{holding:?}");
                let most = match mode {
                    Mode::Shared => all.len(),
                    Mode::Permit { limit } => most(limit),
                    _ => 1,
                };
                assert!(holding.len() <= most, "{holding:?}");
                for (own, before) in waiting.iter().filter(|(own, _)| holding.contains(own)) {
                    let is_left = |node: &&str| all.iter().any(|child| child == node);
                    let woken = match before {
                        Position::Behind { until: Until::Gone { node, .. }, .. } => !is_left(node),
                        Position::Behind { until: Until::Fewer { than, ahead }, .. } => {
                            // Watches on any so many of them would do.
                            ahead.iter().filter(|node| is_left(node)).count() < *than
                        }
                        Position::Holds => true,
                        // It is not there any more.
                        Position::Disagrees(_) | Position::Absent => true,
                    };
                    assert!(woken, "{own} sleeps on among {all:?}");
                }
                all.remove(pick(all.len()));
            }
        }
    }

    #[test]
    fn foreign_children_take_part_as_in_curator() {
        let children = queue(&["x-lock-0000000003", "lock-0000000002", "clock-lock-0000000004", "0000000001", "zebra"]);
        assert_eq!(place(&children, "lock-0000000002"), behind("0000000001", true, "0000000001"));
        assert_eq!(place(&children, "clock-lock-0000000004"), behind("x-lock-0000000003", false, "0000000001"));
        for kazoo in ["f0__lock__0000000000", "f0__rlock__0000000000"] {
            let children = queue(&[kazoo, "_c_a-lock-0000000001", &node(Mode::Shared, 2)]);
            assert_eq!(place(&children, "_c_a-lock-0000000001"), behind(kazoo, true, kazoo));
            let alone = [children[0].clone(), children[2].clone()];
            assert_eq!(place(&alone, &alone[1]), behind(kazoo, true, kazoo), "a reader holds beside no stranger");
        }
        let later = queue(&["00__lock__0000000002", "_c_a-lock-0000000001"]);
        assert_eq!(place(&later, "_c_a-lock-0000000001"), Position::Holds);
    }

    #[test]
    fn the_fence_record_waits_for_nothing_and_nobody_waits_for_it() {
        let children = queue(&[FENCE, "_c_a-lock-0000000001"]);
        assert_eq!(place(&children, "_c_a-lock-0000000001"), Position::Holds);
        assert_eq!(held(&children), (vec!["_c_a-lock-0000000001"], 0));
        assert_eq!(held(&queue(&[FENCE])), (vec![], 0));
        assert!(has_record(&children) && !has_record(&children[1..]));
        assert!(key(FENCE) > "9999999999" && key(FENCE) > "_c_a" && key(FENCE) > "zzz", "Curator would wait for it");
    }

    #[test]
    fn the_record_of_a_window_waits_for_nothing_and_nobody_waits_for_it() {
        let kept = window::node(&lockkit_core::Token::random().expect("random"));
        let children = queue(&[&kept, "_c_a-lock-0000000001", &node(Mode::Shared, 2)]);
        assert_eq!(place(&children, "_c_a-lock-0000000001"), Position::Holds);
        assert_eq!((held(&children).1, contenders(&children).len()), (1, 2));
        assert!(key(&kept) > "9999999999" && key(&kept) > "_c_a" && key(&kept) > "zzz", "Curator would wait for it");
    }

    #[test]
    fn a_forged_twin_goes_first() {
        let children = queue(&["_c_a-lock-0000000001", "forged-lock-0000000001"]);
        let forged = "forged-lock-0000000001";
        assert_eq!(place(&children, "_c_a-lock-0000000001"), behind(forged, true, forged));
    }

    #[test]
    fn a_number_about_to_wrap_is_not_safe() {
        for safe in ["_c_a-lock-0000000000", "_c_a-lock-0000000039"] {
            assert!(sequence(safe).is_some_and(is_safe), "{safe}");
        }
        for wild in ["_c_a-lock-0000000040", "_c_a-lock-2147483647", "_c_a-lock--2147483648", "_c_a-lock--000000001"] {
            assert!(sequence(wild).is_some_and(|number| !is_safe(number)), "{wild}");
        }
    }

    #[test]
    fn the_nodes_of_a_claim_are_found() {
        let children = queue(&["_c_a-lock-0000000001", "_c_b-lock-0000000002", "_c_a-lock-0000000003"]);
        let own: Vec<_> = of_claim(&children, "_c_a-").collect();
        assert_eq!(own, ["_c_a-lock-0000000001", "_c_a-lock-0000000003"]);
    }
}
