//! What the new store answers that is asked beside the old one.

use std::{sync::Mutex, time::Duration};

use crate::store::unpoisoned;

/// What the new store has answered to one client that asked it beside the old store, since the client started: in the shadow of the
/// phase old, and in the phase both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Locks that it granted, too.
    pub granted: u64,
    /// Locks that it refused, though the old store had granted them.
    pub refused: u64,
    /// Requests and renewals that failed.
    pub failed: u64,
    /// Leases that it had no more when they were renewed, though the old store had them.
    pub lost: u64,
    /// How long a grant takes there, on average: what it adds to the time of the old store.
    pub mean: Duration,
    /// How long a grant took there at most.
    pub longest: Duration,
}

/// One answer of the new store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Granted(Duration),
    Refused,
    Failed,
    Lost,
}

/// The answers so far.
#[derive(Debug, Default)]
pub(super) struct Answers(Mutex<Sums>);

#[derive(Debug, Default)]
struct Sums {
    tally: Tally,
    time: Duration,
}

impl Answers {
    pub(super) fn note(&self, answer: Answer) {
        let mut sums = unpoisoned(&self.0);
        match answer {
            Answer::Granted(time) => {
                sums.tally.granted += 1;
                sums.time += time;
                sums.tally.longest = sums.tally.longest.max(time);
            }
            Answer::Refused => sums.tally.refused += 1,
            Answer::Failed => sums.tally.failed += 1,
            Answer::Lost => sums.tally.lost += 1,
        }
    }

    pub(super) fn tally(&self) -> Tally {
        let sums = unpoisoned(&self.0);
        let count = u32::try_from(sums.tally.granted).unwrap_or(u32::MAX);
        Tally { mean: sums.time.checked_div(count).unwrap_or_default(), ..sums.tally }
    }
}

impl Tally {
    /// What several clients were answered together.
    #[must_use]
    pub fn sum(all: impl IntoIterator<Item = Self>) -> Self {
        let mut sum = Self::default();
        let mut time = 0.0;
        for one in all {
            sum.granted += one.granted;
            sum.refused += one.refused;
            sum.failed += one.failed;
            sum.lost += one.lost;
            sum.longest = sum.longest.max(one.longest);
            time += one.mean.as_secs_f64() * to_f64(one.granted);
        }
        sum.mean = Duration::try_from_secs_f64(time / to_f64(sum.granted.max(1))).unwrap_or_default();
        sum
    }

    /// Whether the new store would have decided otherwise than the old one.
    #[must_use]
    pub const fn disagrees(&self) -> bool {
        self.refused > 0 || self.lost > 0
    }

    /// As words that [`from_words`](Self::from_words) reads.
    pub(super) fn to_words(self) -> String {
        let micros = |time: Duration| time.as_micros();
        let Self { granted, refused, failed, lost, mean, longest } = self;
        format!("{granted} {refused} {failed} {lost} {} {}", micros(mean), micros(longest))
    }

    /// Reads the words, and says what follows them.
    pub(super) fn from_words(text: &str) -> Option<(Self, &str)> {
        let mut words = text.splitn(7, ' ');
        let mut number = || words.next()?.parse::<u64>().ok();
        let (granted, refused, failed, lost) = (number()?, number()?, number()?, number()?);
        let (mean, longest) = (Duration::from_micros(number()?), Duration::from_micros(number()?));
        Some((Self { granted, refused, failed, lost, mean, longest }, words.next().unwrap_or_default()))
    }
}

#[expect(clippy::cast_precision_loss, reason = "no count reaches 2^52")]
fn to_f64(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_add_up_and_survive_their_words() {
        let answers = Answers::default();
        for answer in [
            Answer::Granted(Duration::from_millis(1)),
            Answer::Granted(Duration::from_millis(3)),
            Answer::Refused,
            Answer::Failed,
            Answer::Lost,
            Answer::Lost,
        ] {
            answers.note(answer);
        }
        let tally = answers.tally();
        let (mean, longest) = (Duration::from_millis(2), Duration::from_millis(3));
        assert_eq!(tally, Tally { granted: 2, refused: 1, failed: 1, lost: 2, mean, longest });
        let words = format!("{} billing@web-3:4711 of the east", tally.to_words());
        assert_eq!(Tally::from_words(&words), Some((tally, "billing@web-3:4711 of the east")));
        assert_eq!(Tally::from_words("billing@web-3:4711"), None);
        let other = Tally { granted: 6, mean: Duration::from_millis(6), ..Tally::default() };
        let sum = Tally::sum([tally, other]);
        assert_eq!((sum.granted, sum.mean, sum.longest), (8, Duration::from_millis(5), longest));
        assert!(sum.disagrees() && !other.disagrees());
    }
}
