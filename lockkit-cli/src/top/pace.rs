//! When to ask the store, and for which locks. Decisions alone.

use std::time::{Duration, Instant};

use super::watch::Look;

/// A list of all locks makes some stores read all of their keys. After it comes a pause of this many times its own time, so that
/// lists take less than a tenth of the time.
const REST: u32 = 10;

/// A question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// All locks that are held.
    List,
    /// Those that are known already.
    Names,
}

/// When the next question is due, and which.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    every: Duration,
    due: Instant,
    pub(super) list_due: Instant,
    /// When the last list came.
    pub(super) listed: Option<Instant>,
}

impl Pace {
    /// A list is due at once.
    pub(super) fn new(every: Duration, now: Instant) -> Self {
        Self { every, due: now, list_due: now, listed: None }
    }

    /// The next question, and from when on it may be asked. Where no name is known, only a list can tell of any.
    pub(super) fn next(&self, knows_names: bool) -> (Instant, Ask) {
        match self.list_due <= self.due || !knows_names {
            true => (self.due.max(self.list_due), Ask::List),
            false => (self.due, Ask::Names),
        }
    }

    /// An answer came, or an error. After an error the same is asked again.
    pub(super) fn answered(&mut self, ask: Ask, look: Look, is_answer: bool) {
        let took = look.answered.duration_since(look.asked);
        // However slow the store is, half of the time it is left alone.
        self.due = (look.asked + self.every).max(look.answered + took);
        if ask == Ask::List && is_answer {
            self.listed = Some(look.answered);
            self.list_due = (look.asked + self.every).max(look.answered + took * REST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_secs(1);

    fn look(start: Instant, asked: u64, took: u64) -> Look {
        let asked = start + Duration::from_millis(asked);
        Look { asked, answered: asked + Duration::from_millis(took) }
    }

    #[test]
    fn a_quick_list_is_asked_for_each_time() {
        let start = Instant::now();
        let mut pace = Pace::new(EVERY, start);
        assert_eq!(pace.next(false), (start, Ask::List));
        pace.answered(Ask::List, look(start, 0, 90), true);
        assert_eq!(pace.next(true), (start + EVERY, Ask::List));
    }

    #[test]
    fn a_slow_list_takes_a_tenth_of_the_time() {
        let start = Instant::now();
        let mut pace = Pace::new(EVERY, start);
        pace.answered(Ask::List, look(start, 0, 300), true);
        // Over at 0.3 s; the next not before 3.3 s.
        for second in 1..=3 {
            assert_eq!(pace.next(true), (start + EVERY * second, Ask::Names));
            pace.answered(Ask::Names, look(start, u64::from(second) * 1000, 5), true);
        }
        assert_eq!(pace.next(true), (start + EVERY * 4, Ask::List));
        // Nothing to ask for by name: the list alone, no sooner.
        assert_eq!(Pace { due: start, ..pace }.next(false), (start + Duration::from_millis(3300), Ask::List));
    }

    #[test]
    fn a_slow_store_is_left_alone_for_half_of_the_time() {
        let start = Instant::now();
        let mut pace = Pace::new(EVERY, start);
        pace.answered(Ask::List, look(start, 0, 2), true);
        pace.answered(Ask::Names, look(start, 1000, 800), true);
        assert_eq!(pace.next(true).0, start + Duration::from_millis(2600));
    }

    #[test]
    fn what_failed_is_asked_for_again() {
        let start = Instant::now();
        let mut pace = Pace::new(EVERY, start);
        pace.answered(Ask::List, look(start, 0, 2000), false);
        assert_eq!(pace.next(false), (start + EVERY * 4, Ask::List));
        assert_eq!(pace.listed, None);
    }
}
