//! Numbers made of samples. No I/O.

use std::time::Duration;

use hdrhistogram::Histogram;

/// Durations, kept to three digits.
#[derive(Clone, Debug)]
pub(crate) struct Latencies {
    histogram: Histogram<u64>,
    /// How many were measured.
    measured: u64,
}

impl Latencies {
    /// From a nanosecond to ten minutes, beyond which a sample counts as ten minutes.
    const LONGEST: u64 = 600_000_000_000;

    pub(crate) fn new() -> Self {
        // Three digits over this range are within what the histogram takes; there is nothing to go wrong.
        Self { histogram: Histogram::new_with_bounds(1, Self::LONGEST, 3).expect("valid bounds"), measured: 0 }
    }

    pub(crate) fn record(&mut self, sample: Duration) {
        self.histogram.saturating_record(u64::try_from(sample.as_nanos()).unwrap_or(u64::MAX));
        self.measured += 1;
    }

    /// What a client would have measured that asks once in so many µs, whether or not it has its answers: for a call that took longer, the
    /// calls are added that would have been made meanwhile and would have waited for the rest of it. Without them a long pause of a server
    /// would count as a single slow call (coordinated omission).
    ///
    /// Gil Tene, "How NOT to Measure Latency", 2013; the correction is that of HdrHistogram.
    pub(crate) fn at_pace(&self, micros: f64) -> Self {
        Self { histogram: self.histogram.clone_correct((micros * 1e3) as u64), measured: self.measured }
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        // Both have the same bounds, so this can't fail.
        let _ = self.histogram.add(&other.histogram);
        self.measured += other.measured;
    }

    /// How many were measured. What a [pace](Self::at_pace) adds does not count.
    pub(crate) fn len(&self) -> u64 {
        self.measured
    }

    /// The time in µs that this share of the samples did not exceed; `None` without samples.
    pub(crate) fn micros(&self, quantile: f64) -> Option<f64> {
        (self.len() > 0).then(|| self.histogram.value_at_quantile(quantile) as f64 / 1000.0)
    }

    /// The mean in µs; `None` without samples.
    pub(crate) fn mean_micros(&self) -> Option<f64> {
        (self.len() > 0).then(|| self.histogram.mean() / 1000.0)
    }
}

/// Jain's fairness index: 1 if all got the same, 1/n if one got everything.
///
/// Jain, Chiu, Hawe: "A Quantitative Measure of Fairness and Discrimination", DEC-TR-301, 1984.
pub(crate) fn jain(shares: &[u64]) -> Option<f64> {
    let (sum, squares) = shares.iter().map(|&share| share as f64).fold((0.0, 0.0), |(s, q), x| (s + x, q + x * x));
    (squares > 0.0).then(|| sum * sum / (shares.len() as f64 * squares))
}

/// The middle value, or the mean of the two in the middle.
pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        len if len % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// A number as people read it: three digits at least, no more than make sense, thousands apart.
pub(crate) fn grouped(value: f64) -> String {
    let decimals = match value.abs() {
        size if size < 10.0 && size != size.trunc() => 2,
        size if size < 100.0 && size != size.trunc() => 1,
        _ => 0,
    };
    let text = format!("{value:.decimals$}");
    let (whole, rest) = text.split_once('.').map_or((text.as_str(), None), |(whole, rest)| (whole, Some(rest)));
    let mut out = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at).is_multiple_of(3) && !out.ends_with('-') {
            out.push(' ');
        }
        out.push(digit);
    }
    match rest {
        Some(rest) => format!("{out}.{rest}"),
        None => out,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_merging() {
        let mut all = Latencies::new();
        assert_eq!(all.micros(0.5), None);
        for micros in 1..=100 {
            let mut one = Latencies::new();
            one.record(Duration::from_micros(micros));
            all.merge(&one);
        }
        assert_eq!(all.len(), 100);
        let near = |quantile, expected: f64| all.micros(quantile).is_some_and(|got| (got - expected).abs() < 0.2);
        assert!(near(0.5, 50.0) && near(0.99, 99.0));
        all.record(Duration::MAX);
        assert_eq!(all.len(), 101);
    }

    #[test]
    fn a_pause_counts_for_all_that_would_have_been_asked_meanwhile() {
        let (mut answers, pace) = (Latencies::new(), Duration::from_millis(1));
        (0..900).for_each(|_| answers.record(pace));
        answers.record(Duration::from_millis(100));
        let p99 = |answers: &Latencies| answers.micros(0.99).expect("samples");
        assert!((p99(&answers) - 1000.0).abs() < 2.0, "one of 901");
        // They would have waited for 99, 98, 97 ms and so on.
        let corrected = answers.at_pace(1000.0);
        assert_eq!((corrected.len(), corrected.histogram.len()), (901, 1000));
        assert!((p99(&corrected) - 90_000.0).abs() < 1000.0, "{}", p99(&corrected));
        assert_eq!(corrected.micros(0.5), answers.micros(0.5));
    }

    #[test]
    fn fairness_is_between_one_and_one_nth() {
        assert_eq!(jain(&[5, 5, 5, 5]), Some(1.0));
        assert_eq!(jain(&[9, 0, 0, 0]), Some(0.25));
        assert_eq!(jain(&[0, 0]), None);
        assert_eq!(jain(&[]), None);
    }

    #[test]
    fn the_median_ignores_an_outlier() {
        assert_eq!(median([3.0, 1000.0, 1.0]), Some(3.0));
        assert_eq!(median([4.0, 2.0]), Some(3.0));
        assert_eq!(median([]), None);
    }

    #[test]
    fn numbers_are_easy_to_read() {
        for (value, text) in [
            (0.0, "0"),
            (0.9987, "1.00"),
            (0.123, "0.12"),
            (7.25, "7.25"),
            (42.42, "42.4"),
            (999.6, "1 000"),
            (154_321.9, "154 322"),
            (1_000_000.0, "1 000 000"),
            (-1234.0, "-1 234"),
            (-123.0, "-123"),
            (64.0, "64"),
        ] {
            assert_eq!(grouped(value), text);
        }
    }
}
