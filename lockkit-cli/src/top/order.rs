//! The order of the locks that are shown.

use std::cmp::Reverse;

use clap::ValueEnum;

use super::watch::{Lock, Watch};

/// An order of locks, and among equals by name. By waiters and by the time left, free locks come last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(super) enum Order {
    /// The most waiters first
    #[default]
    Waiters,
    /// The most changes of holder per second first
    Changes,
    /// The least time left first
    Left,
    /// The most leases that ran out first
    Lapses,
    /// By name
    Key,
}

impl Order {
    /// The order that the key `s` leads to.
    pub(super) fn next(self) -> Self {
        let all = Self::value_variants();
        let next = all.iter().skip_while(|order| **order != self).nth(1);
        *next.unwrap_or(&all[0])
    }

    /// As `--sort` has it.
    pub(super) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The locks in this order.
    pub(super) fn sorted(self, watch: &Watch) -> Vec<&Lock> {
        // They come by name, and a stable sort leaves equals so.
        let mut locks: Vec<_> = watch.locks().collect();
        match self {
            Self::Waiters => locks.sort_by_key(|lock| (Reverse(lock.state.waiters), !lock.is_held())),
            // By what happens now, then by all that was seen.
            Self::Changes => locks.sort_by_cached_key(|lock| Reverse((watch.recent_changes(lock), lock.changes))),
            // A lock whose holder has no time limit comes last.
            Self::Left => locks.sort_by_key(|lock| (!lock.is_held(), lock.left().is_none(), lock.left())),
            Self::Lapses => locks.sort_by_key(|lock| Reverse(lock.lapses)),
            Self::Key => {}
        }
        locks
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::{
        super::watch::tests::{at, lock},
        *,
    };

    #[test]
    fn each_order_puts_what_matters_first() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        let (mut a, mut b, mut c) = (lock("a", &[(1, 30)]), lock("b", &[(2, 5)]), lock("c", &[(3, 9)]));
        (a.waiters, b.waiters, c.waiters) = (Some(0), None, Some(7));
        watch.listed(vec![a, b, c], at(start, 0));
        // The lock b changes hands.
        let mut taken = lock("b", &[(9, 5)]);
        taken.waiters = None;
        watch.looked(vec![taken], at(start, 1));
        let names = |order: Order| -> String {
            order.sorted(&watch).iter().map(|lock| lock.state.key.as_str().to_owned()).collect()
        };
        let all = [
            (Order::Waiters, "cab"),
            (Order::Changes, "bac"),
            (Order::Left, "bca"),
            (Order::Lapses, "abc"),
            (Order::Key, "abc"),
        ];
        for (order, expected) in all {
            assert_eq!(names(order), expected, "{order:?}");
        }
        // The key leads through all of them, and back.
        let mut order = Order::default();
        for (expected, _) in all {
            assert_eq!(order, expected);
            assert_eq!(Order::from_str(&order.name(), false), Ok(expected));
            order = order.next();
        }
        assert_eq!(order, Order::default());
    }

    #[test]
    fn free_locks_come_last_where_no_store_counts_waiters() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        let [mut a, mut b] = ["a", "b"].map(|key| lock(key, &[(1, 30)]));
        (a.waiters, b.waiters) = (None, None);
        watch.listed(vec![a, b.clone()], at(start, 0));
        watch.listed(vec![b], at(start, 1));
        for order in [Order::Waiters, Order::Left] {
            assert_eq!(order.sorted(&watch)[0].state.key.as_str(), "b");
        }
    }

    #[test]
    fn a_session_comes_after_all_leases() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        let mut a = lock("a", &[(1, 1)]);
        a.holders[0].remaining = None;
        watch.listed(vec![a, lock("b", &[(2, 300)])], at(start, 0));
        assert_eq!(Order::Left.sorted(&watch)[0].state.key.as_str(), "b");
    }
}
