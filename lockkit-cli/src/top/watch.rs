//! The locks that a series of looks at a store has shown, and their changes. Decisions alone: no question is asked here, and
//! nothing is drawn.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::{Duration, Instant},
};

use lockkit::{Fence, Holder, KeyState, LockKey, Token};

/// Changes of holder per second are counted over this time, and a lock that became free is shown for as long.
pub(super) const WINDOW: Duration = Duration::from_secs(10);

/// One grant differs from another in its token or its fence. The difference of two fences is no number of grants: Redis starts
/// counters at the clock, MySQL follows it, and ZooKeeper numbers its own transactions.
type Grant = (Option<Token>, Option<Fence>);

/// All that was seen.
#[derive(Debug, Default)]
pub(super) struct Watch {
    locks: BTreeMap<LockKey, Lock>,
    /// The first look and the last one.
    span: Option<(Instant, Instant)>,
    recent: VecDeque<(Instant, u32)>,
    changes: u64,
    lapses: u64,
}

/// One lock.
#[derive(Debug)]
pub(super) struct Lock {
    /// As it was at the last look at it.
    pub(super) state: KeyState,
    /// How often a look found a holder that the look before had not.
    pub(super) changes: u64,
    /// How many leases ran out, as far as looks show.
    pub(super) lapses: u64,
    recent: VecDeque<Instant>,
    /// The last look at it.
    seen: Look,
    held: Instant,
    /// The most that was ever left of each lease.
    longest: HashMap<Grant, Duration>,
}

/// The times of a look: the answer is true of some moment between the two.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    pub(super) asked: Instant,
    pub(super) answered: Instant,
}

/// The figures of all locks together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Totals {
    pub(super) held: usize,
    /// `None` if the store can't tell of any held lock.
    pub(super) waiters: Option<u64>,
    pub(super) changes: u64,
    pub(super) rate: Option<f64>,
    pub(super) lapses: u64,
    /// How long the watch has lasted.
    pub(super) since: Duration,
}

impl Watch {
    /// Takes in a list of all locks that are held. One that was tracked and is not among them is free.
    pub(super) fn listed(&mut self, states: Vec<KeyState>, look: Look) {
        let (is_first, mut changes) = (self.span.is_none(), 0);
        let mut others: BTreeMap<_, _> = states.into_iter().map(|state| (state.key.clone(), state)).collect();
        for (key, lock) in &mut self.locks {
            let free = || KeyState::unknown(key.clone());
            let (changed, lapsed) = lock.looked(others.remove(key).unwrap_or_else(free), look);
            changes += u32::from(changed);
            self.lapses += lapsed;
        }
        for (key, state) in others {
            // A lock that was held already when the watch began has not changed hands.
            changes += u32::from(!is_first);
            self.locks.insert(key, Lock::new(state, look, !is_first));
        }
        self.count(changes, look);
    }

    /// Takes in the states of some of the locks.
    pub(super) fn looked(&mut self, states: Vec<KeyState>, look: Look) {
        let mut changes = 0;
        for state in states {
            if let Some(lock) = self.locks.get_mut(&state.key) {
                let (changed, lapsed) = lock.looked(state, look);
                changes += u32::from(changed);
                self.lapses += lapsed;
            }
        }
        self.count(changes, look);
    }

    fn count(&mut self, changes: u32, look: Look) {
        let first = self.span.map_or(look.answered, |(first, _)| first);
        self.span = Some((first, look.answered));
        self.changes += u64::from(changes);
        if changes > 0 {
            self.recent.push_back((look.answered, changes));
        }
        while self.recent.front().is_some_and(|(at, _)| look.answered.duration_since(*at) >= WINDOW) {
            self.recent.pop_front();
        }
        self.locks.retain(|_, lock| lock.is_held() || look.answered.duration_since(lock.held) < WINDOW);
    }

    pub(super) fn locks(&self) -> impl Iterator<Item = &Lock> {
        self.locks.values()
    }

    /// When the last answer came.
    pub(super) fn last(&self) -> Option<Instant> {
        self.span.map(|(_, last)| last)
    }

    pub(super) fn totals(&self) -> Totals {
        let held = || self.locks.values().filter(|lock| lock.is_held());
        // Nobody waits for a lock that is free.
        let mut waiters = if held().next().is_none() { Some(0) } else { None };
        for known in held().filter_map(|lock| lock.state.waiters) {
            waiters = Some(waiters.unwrap_or(0) + u64::from(known));
        }
        Totals {
            held: held().count(),
            waiters,
            changes: self.changes,
            rate: self.per_second(self.recent.iter().map(|(_, changes)| u64::from(*changes)).sum()),
            lapses: self.lapses,
            since: self.span.map_or(Duration::ZERO, |(first, last)| last.duration_since(first)),
        }
    }

    /// Changes of holder per second of one lock. As of the last look: while a store is away, nothing is known of changes.
    pub(super) fn rate(&self, lock: &Lock) -> Option<f64> {
        self.per_second(self.recent_changes(lock))
    }

    /// Changes of holder of one lock in the last seconds.
    pub(super) fn recent_changes(&self, lock: &Lock) -> u64 {
        let is_recent = |at: &&Instant| self.last().is_some_and(|last| last.duration_since(**at) < WINDOW);
        u64::try_from(lock.recent.iter().filter(is_recent).count()).unwrap_or(u64::MAX)
    }

    fn per_second(&self, recent: u64) -> Option<f64> {
        let (first, last) = self.span?;
        let time = last.duration_since(first).min(WINDOW);
        // There is no rate after one look. And no watch counts beyond what a float holds exactly.
        #[allow(clippy::cast_precision_loss)]
        (!time.is_zero()).then(|| recent as f64 / time.as_secs_f64())
    }
}

impl Lock {
    fn new(state: KeyState, look: Look, is_change: bool) -> Self {
        let recent = if is_change { VecDeque::from([look.answered]) } else { VecDeque::new() };
        let longest = longest(&state, &HashMap::new());
        let changes = u64::from(is_change);
        Self { state, changes, lapses: 0, recent, seen: look, held: look.answered, longest }
    }

    /// Takes in a look at it: whether it changed hands, and how many leases ran out. However many holders came and went
    /// between two looks, one change is all that they prove.
    fn looked(&mut self, state: KeyState, look: Look) -> (bool, u64) {
        let is_new = |holder: &Holder| !self.longest.contains_key(&grant(holder));
        let changed = state.holders.iter().any(is_new);
        let now: HashMap<_, _> = longest(&state, &self.longest);
        let gone = self.state.holders.iter().filter(|holder| !now.contains_key(&grant(holder)));
        let lapsed = gone.filter(|holder| self.has_lapsed(holder, look)).count();
        let lapsed = u64::try_from(lapsed).unwrap_or(u64::MAX);
        while self.recent.front().is_some_and(|at| look.answered.duration_since(*at) >= WINDOW) {
            self.recent.pop_front();
        }
        if changed {
            self.recent.push_back(look.answered);
        }
        self.changes += u64::from(changed);
        self.lapses += lapsed;
        self.seen = look;
        if !state.holders.is_empty() {
            self.held = look.answered;
        }
        self.state = state;
        if now.is_empty() {
            // A list may have missed the lock, and then the same grant is back. Without a token it can't be told from another.
            self.longest.retain(|(token, _), _| token.is_some());
        } else {
            self.longest = now;
        }
        (changed, lapsed)
    }

    /// Whether the lease of a holder that is gone ended by time, as far as looks show: it had not been renewed when it should
    /// have been, and its time may have been over when the answer was given. A lease that is over before anybody saw that its
    /// renewals fail is not counted.
    fn has_lapsed(&self, holder: &Holder, look: Look) -> bool {
        let is_over = |left: Duration| look.answered.saturating_duration_since(self.seen.asked) >= left;
        self.is_late(holder) && holder.remaining.is_some_and(is_over)
    }

    /// Whether less than half of the longest that was seen is left of a holder's lease. Renewals come after a third.
    pub(super) fn is_late(&self, holder: &Holder) -> bool {
        let longest = self.longest.get(&grant(holder));
        holder.remaining.zip(longest).is_some_and(|(left, longest)| left < *longest / 2)
    }

    pub(super) fn is_held(&self) -> bool {
        !self.state.holders.is_empty()
    }

    /// The least that is left of a lease of it.
    pub(super) fn left(&self) -> Option<Duration> {
        self.state.holders.iter().filter_map(|holder| holder.remaining).min()
    }
}

fn grant(holder: &Holder) -> Grant {
    (holder.token, holder.fence)
}

/// The most that was left of each lease until now.
fn longest(state: &KeyState, before: &HashMap<Grant, Duration>) -> HashMap<Grant, Duration> {
    let of = |holder: &Holder| {
        let left = holder.remaining.unwrap_or(Duration::ZERO);
        (grant(holder), before.get(&grant(holder)).map_or(left, |before| left.max(*before)))
    };
    state.holders.iter().map(of).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use lockkit::{HolderInfo, Mode};

    use super::*;

    /// A lock with a holder for each pair of a token's digit and the seconds left.
    pub(in crate::top) fn lock(key: &str, holders: &[(u8, u64)]) -> KeyState {
        let holder = |(digit, left): &(u8, u64)| Holder {
            token: Some(format!("{digit:032x}").parse().expect("32 digits")),
            info: HolderInfo::new(&format!("host-{digit}")),
            mode: Mode::Exclusive,
            depth: 1,
            fence: Some(Fence::new(u64::from(*digit))),
            remaining: Some(Duration::from_secs(*left)),
        };
        let key = LockKey::new(key).expect("a name");
        KeyState { holders: holders.iter().map(holder).collect(), waiters: Some(1), ..KeyState::unknown(key) }
    }

    /// A look that took no time, so many seconds after the first.
    pub(in crate::top) fn at(start: Instant, seconds: u64) -> Look {
        let moment = start + Duration::from_secs(seconds);
        Look { asked: moment, answered: moment }
    }

    fn only(watch: &Watch) -> &Lock {
        let mut locks = watch.locks();
        let first = locks.next().expect("a lock");
        assert!(locks.next().is_none(), "more than one lock");
        first
    }

    #[test]
    fn a_look_counts_one_change_at_most() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        // Held when the watch began: no change.
        watch.listed(vec![lock("a", &[(1, 30)])], at(start, 0));
        assert_eq!((watch.totals().changes, watch.totals().rate), (0, None));
        watch.looked(vec![lock("a", &[(1, 30)])], at(start, 1));
        assert_eq!((watch.totals().changes, watch.totals().rate), (0, Some(0.0)));
        watch.looked(vec![lock("a", &[(9, 30)])], at(start, 2));
        // Two that share it came at once.
        watch.looked(vec![lock("a", &[(10, 30), (11, 30)])], at(start, 4));
        assert_eq!((only(&watch).changes, watch.totals().changes), (2, 2));
        assert_eq!(watch.rate(only(&watch)), Some(0.5));
        // One of them left.
        watch.looked(vec![lock("a", &[(11, 30)])], at(start, 5));
        assert_eq!(watch.totals().changes, 2);
    }

    #[test]
    fn one_token_with_another_fence_is_another_grant() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        let mut state = lock("a", &[(1, 30)]);
        watch.listed(vec![state.clone()], at(start, 0));
        state.holders[0].fence = Some(Fence::new(77));
        watch.looked(vec![state], at(start, 1));
        assert_eq!(only(&watch).changes, 1);
    }

    #[test]
    fn a_holder_without_a_token_is_another_one_after_the_lock_was_free() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        let foreign = |left| {
            let mut state = lock("a", &[(1, left)]);
            (state.holders[0].token, state.holders[0].fence) = (None, None);
            state
        };
        watch.listed(vec![foreign(30)], at(start, 0));
        watch.listed(vec![], at(start, 1));
        watch.listed(vec![foreign(5)], at(start, 2));
        assert_eq!(only(&watch).changes, 1);
        assert!(!only(&watch).is_late(&only(&watch).state.holders[0]));
    }

    #[test]
    fn what_a_later_list_finds_was_taken_in_between() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        watch.listed(vec![], at(start, 0));
        watch.listed(vec![lock("a", &[(1, 30)])], at(start, 1));
        assert_eq!((only(&watch).changes, watch.totals().held), (1, 1));
        // Not on the list, so free; the same grant on the next one is no change.
        watch.listed(vec![], at(start, 2));
        assert_eq!((only(&watch).is_held(), watch.totals().held), (false, 0));
        watch.listed(vec![lock("a", &[(1, 30)])], at(start, 3));
        assert_eq!(only(&watch).changes, 1);
    }

    #[test]
    fn a_free_lock_is_shown_for_a_while() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        watch.listed(vec![lock("a", &[(1, 30)])], at(start, 0));
        watch.looked(vec![lock("a", &[])], at(start, 9));
        assert_eq!(watch.locks().count(), 1);
        watch.looked(vec![lock("a", &[])], at(start, 10));
        assert_eq!(watch.locks().count(), 0);
    }

    #[test]
    fn a_lease_has_lapsed_if_it_was_not_renewed_and_its_time_is_over() {
        // What was left at each look, and when the holder was gone.
        for (left, gone, lapses) in [
            // Renewed after a third, and released.
            (&[30, 25, 21][..], 3, 0),
            // Not renewed; gone before its time was over: released, or broken.
            (&[30, 10], 10, 0),
            (&[30, 10, 2], 4, 1),
            // Nobody saw that it was not renewed.
            (&[1], 5, 0),
        ] {
            let (mut watch, start) = (Watch::default(), Instant::now());
            watch.listed(vec![lock("a", &[(1, left[0])])], at(start, 0));
            for (second, left) in (1..).zip(&left[1..]) {
                watch.looked(vec![lock("a", &[(1, *left)])], at(start, second));
            }
            watch.looked(vec![lock("a", &[(2, 30)])], at(start, gone));
            assert_eq!((watch.totals().lapses, only(&watch).lapses), (lapses, lapses), "{left:?}");
        }
    }

    #[test]
    fn a_session_does_not_lapse_by_time() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        let mut state = lock("a", &[(1, 30)]);
        state.holders[0].remaining = None;
        watch.listed(vec![state.clone()], at(start, 0));
        assert!(!only(&watch).is_late(&state.holders[0]) && only(&watch).left().is_none());
        watch.listed(vec![], at(start, 100));
        assert_eq!(watch.totals().lapses, 0);
    }

    #[test]
    fn rates_are_of_the_last_ten_seconds_of_looks() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        watch.listed(vec![lock("a", &[(1, 30)])], at(start, 0));
        for second in 1..=20 {
            watch.looked(vec![lock("a", &[(u8::try_from(second + 1).unwrap(), 30)])], at(start, second));
        }
        assert_eq!((watch.totals().changes, watch.totals().rate), (20, Some(1.0)));
        assert_eq!(watch.rate(only(&watch)), Some(1.0));
        watch.looked(vec![lock("a", &[(21, 30)])], at(start, 25));
        assert_eq!((watch.rate(only(&watch)), watch.totals().since), (Some(0.5), Duration::from_secs(25)));
        watch.looked(vec![lock("a", &[(21, 30)])], at(start, 60));
        assert_eq!((watch.rate(only(&watch)), watch.totals().rate), (Some(0.0), Some(0.0)));
    }

    #[test]
    fn waiters_are_summed_where_they_are_known() {
        let (mut watch, start) = (Watch::default(), Instant::now());
        let mut unknown = lock("b", &[(2, 30)]);
        unknown.waiters = None;
        watch.listed(vec![], at(start, 0));
        assert_eq!(watch.totals().waiters, Some(0));
        watch.listed(vec![unknown.clone()], at(start, 0));
        assert_eq!(watch.totals().waiters, None);
        watch.listed(vec![unknown, lock("a", &[(1, 30)]), lock("c", &[(3, 30)])], at(start, 1));
        assert_eq!(watch.totals().waiters, Some(2));
    }
}
