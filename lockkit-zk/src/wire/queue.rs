//! Who holds a lock, from nothing but the names of the nodes in its directory.
//!
//! The rule is Curator's, to the letter (`LockInternals`, `StandardLockInternalsDriver`), because exclusion between the
//! two rests on both seeing the same order: all children take part, whoever made them, sorted as text by what follows
//! the last `lock-`, or by the whole name where there is none. The first holds the lock.
//!
//! One thing is added. kazoo names its nodes `<hex>__lock__<number>`, and Curator, which sorts them by the hex digits,
//! does not see them where they belong. We sort them by their numbers, and so wait for those that came before. That can
//! only make us wait longer, and never in a circle, since everyone waits for lower numbers only.

use crate::wire::name::LOCK;

/// The node that keeps a lock's fence record. It is older than it looks: `~` sorts behind all that takes part, so
/// Curator, which counts every child, never waits for it.
pub(crate) const FENCE: &str = "~fence";

/// Where sequence numbers become dangerous.
///
/// ZooKeeper counts them in 32 bits, with a sign (ZOOKEEPER-2944). After `2147483647` comes `-2147483648`, which sorts
/// **before** all that is in the queue: the newcomer would hold the lock together with the holder. So nobody queues
/// beyond this number; the directory is made anew first. The distance leaves room for all that may be under way.
const LAST_SEQUENCE: i64 = if cfg!(test) { 40 } else { 2_000_000_000 };

/// A claim's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Position<'a> {
    /// It holds the lock.
    First,
    /// It waits.
    Behind {
        /// The node just before it: the one to watch, so that a release wakes one waiter and not a herd.
        before: &'a str,
        /// The node that holds the lock.
        holder: &'a str,
    },
    /// It is not in the queue.
    Absent,
}

/// Finds the place of `own` among the children of a lock.
pub(crate) fn place<'a>(children: &'a [String], own: &str) -> Position<'a> {
    if !children.iter().any(|child| child == own) {
        return Position::Absent;
    }
    // Equal keys can't come from the server's counter. If somebody made up such a name, it goes before ours: rather wait
    // for a node that does not matter than hold a lock together with its owner.
    let ahead = || contenders(children).filter(|child| *child != own && key(child) <= key(own));
    match (ahead().max_by_key(|child| key(child)), ahead().min_by_key(|child| key(child))) {
        (Some(before), Some(holder)) => Position::Behind { before, holder },
        _ => Position::First,
    }
}

/// The node that holds the lock, and how many wait behind it.
pub(crate) fn holder(children: &[String]) -> Option<(&str, usize)> {
    let first = contenders(children).min_by_key(|child| key(child))?;
    Some((first, contenders(children).count() - 1))
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

fn contenders(children: &[String]) -> impl Iterator<Item = &str> {
    children.iter().map(String::as_str).filter(|child| *child != FENCE)
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

    #[test]
    fn the_lowest_number_holds_and_each_watches_the_one_before() {
        let children = queue(&["_c_b-lock-0000000010", "_c_a-lock-0000000012", "_c_z-lock-0000000009"]);
        assert_eq!(place(&children, "_c_z-lock-0000000009"), Position::First);
        let behind = |before| Position::Behind { before, holder: "_c_z-lock-0000000009" };
        assert_eq!(place(&children, "_c_b-lock-0000000010"), behind("_c_z-lock-0000000009"));
        assert_eq!(place(&children, "_c_a-lock-0000000012"), behind("_c_b-lock-0000000010"));
        assert_eq!(place(&children, "_c_a-lock-0000000013"), Position::Absent);
        assert_eq!(holder(&children), Some(("_c_z-lock-0000000009", 2)));
        assert_eq!(holder(&[]), None);
    }

    #[test]
    fn foreign_children_take_part_as_in_curator() {
        let children = queue(&["x-lock-0000000003", "lock-0000000002", "clock-lock-0000000004", "0000000001", "zebra"]);
        assert_eq!(
            place(&children, "lock-0000000002"),
            Position::Behind { before: "0000000001", holder: "0000000001" }
        );
        let ours = place(&children, "clock-lock-0000000004");
        assert_eq!(ours, Position::Behind { before: "x-lock-0000000003", holder: "0000000001" });
        for kazoo in ["f0__lock__0000000000", "f0__rlock__0000000000"] {
            let children = queue(&[kazoo, "_c_a-lock-0000000001"]);
            assert_eq!(place(&children, "_c_a-lock-0000000001"), Position::Behind { before: kazoo, holder: kazoo });
        }
        let later = queue(&["00__lock__0000000002", "_c_a-lock-0000000001"]);
        assert_eq!(place(&later, "_c_a-lock-0000000001"), Position::First);
    }

    #[test]
    fn the_fence_record_waits_for_nothing_and_nobody_waits_for_it() {
        let children = queue(&[FENCE, "_c_a-lock-0000000001"]);
        assert_eq!(place(&children, "_c_a-lock-0000000001"), Position::First);
        assert_eq!(holder(&children), Some(("_c_a-lock-0000000001", 0)));
        assert_eq!(holder(&queue(&[FENCE])), None);
        assert!(has_record(&children) && !has_record(&children[1..]));
        assert!(key(FENCE) > "9999999999" && key(FENCE) > "_c_a" && key(FENCE) > "zzz", "Curator would wait for it");
    }

    #[test]
    fn a_forged_twin_goes_first() {
        let children = queue(&["_c_a-lock-0000000001", "forged-lock-0000000001"]);
        let behind = Position::Behind { before: "forged-lock-0000000001", holder: "forged-lock-0000000001" };
        assert_eq!(place(&children, "_c_a-lock-0000000001"), behind);
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
