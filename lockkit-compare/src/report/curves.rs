//! The measures of which one number says too little. No I/O.

use std::time::Duration;

use crate::{
    group::Group,
    plan::Plan,
    results::{Results, Rounds},
};

/// How a measure changes along an axis, for each store that it was taken on.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// The name in the JSON, which stays the same.
    pub id: &'static str,
    /// What is shown.
    pub title: &'static str,
    /// What the horizontal axis says, with its unit. It is logarithmic.
    pub x: &'static str,
    /// What the vertical axis says, with its unit.
    pub y: Axis,
    /// One for each store, in the order of [`Report::stores`](super::Report::stores); empty where there is no measurement.
    pub lines: Vec<Vec<(f64, f64)>>,
}

/// The vertical axis of a [`Curve`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// A share of all samples, in percent.
    Share(&'static str),
    /// A number whose magnitude matters, on a logarithmic axis.
    Magnitude(&'static str),
}

impl Axis {
    /// What the axis says.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::Share(title) | Self::Magnitude(title) => title,
        }
    }
}

const DONE: &str = "done within, in µs";
const ACQUIRED: &str = "acquired within, in µs";

/// Those of the groups that were measured.
pub(super) fn curves(stores: &[Results], plan: &Plan) -> Vec<Curve> {
    let shares = "of all, in %";
    let latency = |id, title, x, of: fn(&Results) -> Rounds| Curve {
        id,
        title,
        x,
        y: Axis::Share(shares),
        lines: stores.iter().map(|store| distribution(&of(store))).collect(),
    };
    let by_keys = Curve {
        id: "by_keys",
        title: "Acquire + release on more and more keys, a task each",
        x: "keys",
        y: Axis::Magnitude("per second"),
        lines: stores.iter().map(by_keys).collect(),
    };
    let by_delay = |id, title, y, quantile| Curve {
        id,
        title,
        x: "added to each round trip, in ms",
        y: Axis::Magnitude(y),
        lines: stores.iter().map(|store| store_by_delay(store, quantile)).collect(),
    };
    let all = [
        (
            Group::Alone,
            latency("acquire", "Acquire: one task, nobody else", DONE, |store| store.acquire.at_pace_of(&store.pair)),
        ),
        (
            Group::Alone,
            latency("release", "Release: one task, nobody else", DONE, |store| store.release.at_pace_of(&store.pair)),
        ),
        (
            Group::HandOff,
            latency("hand_off", "Hand-off from one process to another", ACQUIRED, |store| store.hand_off.clone()),
        ),
        (Group::Keys, by_keys),
        (
            Group::Delay,
            by_delay("by_delay_p50", "Acquire + release as the delay of the network grows: p50", "p50, in ms", 0.5),
        ),
        (
            Group::Delay,
            by_delay("by_delay_p99", "Acquire + release as the delay of the network grows: p99", "p99, in ms", 0.99),
        ),
    ];
    all.into_iter().filter(|(group, _)| plan.groups.contains(group)).map(|(_, curve)| curve).collect()
}

/// Which share of the samples took no longer than so many µs.
fn distribution(rounds: &Rounds) -> Vec<(f64, f64)> {
    let Some(all) = rounds.all() else { return Vec::new() };
    let percents = (1..100).map(f64::from).chain([99.5, 99.9]);
    // The quantile of a share that is smaller than one sample is that sample.
    let known = percents.filter(|percent| all.len() as f64 * (100.0 - percent) / 100.0 >= 1.0 || *percent <= 50.0);
    known.filter_map(|percent| Some((all.micros(percent / 100.0)?, percent))).collect()
}

fn by_keys(store: &Results) -> Vec<(f64, f64)> {
    let median = |rounds: &Vec<f64>| crate::stats::median(rounds.iter().copied());
    store.by_keys.iter().filter_map(|(keys, rounds)| Some((*keys as f64, median(rounds)?))).collect()
}

fn store_by_delay(store: &Results, quantile: f64) -> Vec<(f64, f64)> {
    let millis = |(delay, rounds): (&Duration, &Rounds)| {
        let rounds = if quantile > 0.5 { &rounds.at_pace_of(rounds) } else { rounds };
        Some((delay.as_secs_f64() * 1e3, rounds.micros(quantile)?.value / 1e3))
    };
    store.by_delay.iter().filter_map(millis).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{plan::Options, stats::Latencies};

    #[test]
    fn a_known_delay_is_where_the_curve_rises() {
        let mut round = Latencies::new();
        for micros in [100; 90].into_iter().chain([1000; 10]) {
            round.record(Duration::from_micros(micros));
        }
        let mut store = Results::default();
        store.acquire.add(round);
        let curves = curves(&[store, Results::default()], &Plan::new(Options::default()));
        let acquire = &curves[0];
        let share_within = |micros: f64| {
            acquire.lines[0].iter().filter(|(x, _)| *x <= micros * 1.01).map(|(_, y)| *y).fold(0.0, f64::max)
        };
        assert_eq!((share_within(99.0), share_within(100.0), share_within(1000.0)), (0.0, 90.0, 99.0));
        assert_eq!(acquire.lines[1], []);
    }
}
