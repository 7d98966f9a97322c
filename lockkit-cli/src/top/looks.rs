//! A series of looks at a store: asks the question that is due, and keeps the answers.

use std::time::{Duration, Instant};

use lockkit::{KeyState, LockKey, Locker, store::Query};

use super::{
    order::Order,
    pace::{Ask, Pace},
    watch::{Look, Watch},
};
use crate::exit::Failure;

/// How many locks are asked for by name between two lists, so that a store with a hundred thousand of them is not read
/// without a pause.
pub(super) const NAMED: usize = 500;

/// All looks until now, and when the next one is due.
pub(super) struct Looks {
    locker: Locker,
    pub(super) prefix: String,
    pub(super) watch: Watch,
    pub(super) pace: Pace,
    /// Why the last look failed, and since when none has succeeded.
    pub(super) failed: Option<Failed>,
}

/// Looks that failed.
#[derive(Clone, Debug)]
pub(super) struct Failed {
    pub(super) why: Failure,
    pub(super) since: Instant,
}

/// The store's answer to one look.
pub(super) struct Answer {
    pub(super) ask: Ask,
    look: Look,
    states: Result<Vec<KeyState>, Failure>,
}

impl Looks {
    pub(super) fn new(locker: Locker, prefix: String, every: Duration) -> Self {
        let pace = Pace::new(every, Instant::now());
        Self { locker, prefix, watch: Watch::default(), pace, failed: None }
    }

    /// When the next look is due.
    pub(super) fn due(&self) -> Instant {
        self.pace.next(self.watch.locks().next().is_some()).0
    }

    /// The next look. Of many locks those around `place` in this order are asked for by name.
    pub(super) fn ask(&self, order: Order, place: usize) -> impl Future<Output = Answer> + Send + use<> {
        let locker = self.locker.clone();
        let (_, ask) = self.pace.next(self.watch.locks().next().is_some());
        let query = match ask {
            Ask::List => Query::Prefix(self.prefix.clone()),
            Ask::Names => Query::Keys(around(order.sorted(&self.watch).iter().map(|lock| &lock.state.key), place)),
        };
        async move {
            let asked = Instant::now();
            let states = locker.inspect(&query).await.map_err(Failure::from);
            Answer { ask, look: Look { asked, answered: Instant::now() }, states }
        }
    }

    /// Takes in an answer.
    pub(super) fn take(&mut self, Answer { ask, look, states }: Answer) {
        self.pace.answered(ask, look, states.is_ok());
        match (states, ask) {
            (Err(why), _) => {
                let since = self.failed.take().map_or(look.asked, |failed| failed.since);
                self.failed = Some(Failed { why, since });
                return;
            }
            (Ok(states), Ask::List) => self.watch.listed(states, look),
            (Ok(states), Ask::Names) => self.watch.looked(states, look),
        }
        self.failed = None;
    }
}

/// As many as are asked for by name, with as many before the place as behind it.
fn around<'a>(keys: impl ExactSizeIterator<Item = &'a LockKey>, place: usize) -> Vec<LockKey> {
    let first = place.saturating_sub(NAMED / 2).min(keys.len().saturating_sub(NAMED));
    keys.skip(first).take(NAMED).cloned().collect()
}

#[cfg(test)]
mod tests {
    use lockkit::MemoryStore;

    use super::*;

    #[test]
    fn of_many_locks_those_around_the_place_are_asked_for() {
        let keys: Vec<_> = (0..1200).map(|n| LockKey::new(format!("{n:04}")).expect("a name")).collect();
        for (place, first) in [(0, 0), (250, 0), (600, 350), (1199, 700), (9999, 700)] {
            let asked = around(keys.iter(), place);
            assert_eq!((asked.len(), asked[0].as_str()), (NAMED, keys[first].as_str()), "{place}");
        }
        assert_eq!(around(keys[..3].iter(), 2).len(), 3);
    }

    #[tokio::test]
    async fn figures_stay_while_the_store_is_away() {
        let locker = Locker::new(MemoryStore::new());
        let _guard = locker.lock("a").acquire().await.expect("free");
        let mut looks = Looks::new(locker, String::new(), Duration::from_secs(1));
        looks.take(looks.ask(Order::Key, 0).await);
        assert!(looks.failed.is_none() && looks.watch.totals().held == 1);
        let (start, why) = (Instant::now(), Failure::new(69, "away"));
        for second in 0..3 {
            let asked = start + Duration::from_secs(second);
            let look = Look { asked, answered: asked };
            looks.take(Answer { ask: Ask::List, look, states: Err(why.clone()) });
        }
        let failed = looks.failed.clone().expect("it failed");
        assert_eq!((failed.why.message(), failed.since, looks.watch.totals().held), ("away", start, 1));
        looks.take(looks.ask(Order::Key, 0).await);
        assert!(looks.failed.is_none());
    }
}
