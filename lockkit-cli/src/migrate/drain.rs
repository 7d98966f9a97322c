//! How long a drain goes on, for people who wait for it or look on.

use std::time::Instant;

use indicatif::ProgressBar;
use lockkit::migrate::{Drain, PhaseRecord, State};

use crate::duration::{millis, spoken};

/// A bar on the terminal, if there is one; `left` says what stands behind it, with `{msg}` for the time.
pub(super) fn bar(left: &str) -> ProgressBar {
    crate::show::bar(1, &format!("waiting until nobody acts on the phase before: [{{bar:30}}] {left}"))
}

pub(super) fn show(bar: &ProgressBar, drain: Drain) {
    bar.set_length(millis(drain.whole));
    bar.set_position(millis(drain.whole - drain.left));
    bar.set_message(spoken(drain.left));
}

/// A command that watches while others move a migration. It is not told when the record changed; but once it has seen the record
/// in both stores, nobody acts on an earlier one after a drain from then (rule M14).
#[derive(Debug, Default)]
pub(super) struct Onlooker {
    /// The record, and when both stores were first seen to have it.
    seen: Option<(PhaseRecord, Instant)>,
}

impl Onlooker {
    /// How long, at most, a client may still act on the phase before; `None` if none can. `now` is after the answers that `state` is
    /// made of.
    pub(super) fn look(&mut self, state: &State, now: Instant) -> Option<Drain> {
        let fell_back = state.has.iter().any(|has| matches!(has, Ok(false)));
        let is_known = self.seen.as_ref().is_some_and(|(record, _)| *record == state.record);
        let whole = state.record.drain();
        if !is_known || fell_back {
            let in_both = state.has.iter().all(|has| matches!(has, Ok(true)));
            self.seen = in_both.then(|| (state.record.clone(), now));
        }
        if state.record.epoch == 1 {
            // There was no phase before.
            return None;
        }
        // Not in both stores yet: it has not begun.
        let since = self.seen.as_ref().map_or(now, |(_, since)| *since);
        let left = whole.saturating_sub(now - since);
        (!left.is_zero()).then_some(Drain { whole, left })
    }
}

/// The same as a line, where there is no terminal.
pub(super) fn in_words(drain: Drain) -> String {
    format!("drain   at most {} more: until then a client may act on the phase before\n", spoken(drain.left))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit::{Error, ErrorKind};

    use super::{super::status::tests::record, *};

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn who_looks_on_counts_from_when_both_stores_had_the_record() {
        let (mut onlooker, start) = (Onlooker::default(), Instant::now());
        let (record, away) = (record(), || Err(Error::new(ErrorKind::Unavailable, "away")));
        let whole = record.drain();
        let mut look = |record: &PhaseRecord, old, new, seconds: u32| {
            let state = State { record: record.clone(), has: [old, new] };
            onlooker.look(&state, start + seconds * SECOND).map(|drain| drain.left)
        };
        assert_eq!(look(&record, Ok(true), Ok(false), 1), Some(whole), "one store lacks it");
        assert_eq!(look(&record, Ok(true), away(), 2), Some(whole), "nobody knows whether it has it");
        assert_eq!(look(&record, Ok(true), Ok(true), 3), Some(whole));
        assert_eq!(look(&record, Ok(true), Ok(true), 5), Some(whole - 2 * SECOND));
        assert_eq!(look(&record, away(), Ok(true), 6), Some(whole - 3 * SECOND), "it had it");
        assert_eq!(look(&record, Ok(false), Ok(true), 7), Some(whole), "it fell back");
        assert_eq!(look(&record, Ok(true), Ok(true), 8), Some(whole));
        assert_eq!(look(&record, Ok(true), Ok(true), 48), Some(whole - 40 * SECOND));
        assert_eq!(look(&record, Ok(true), Ok(true), 49), None);
        let next = PhaseRecord { epoch: 3, ..record.clone() };
        assert_eq!(look(&next, Ok(true), Ok(true), 50), Some(whole), "another change");
        let first = PhaseRecord { epoch: 1, ..record };
        assert_eq!(look(&first, Ok(true), Ok(true), 51), None, "no phase before");
    }
}
