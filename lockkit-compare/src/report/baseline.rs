//! What changed since an earlier comparison. No I/O.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Value;

use super::{Better, Cell, Report, Row, Setting};
use crate::{
    error::{Error, ErrorKind, Result},
    results::Figure,
    stats::grouped,
};

/// An earlier comparison, as [`Report::as_json`] wrote it.
///
/// # Examples
/// ```no_run
/// # fn judge(compared: lockkit_compare::Report) -> Result<(), lockkit_compare::Error> {
/// use lockkit_compare::Baseline;
///
/// let baseline = Baseline::parse(&std::fs::read_to_string("comparison.json").unwrap())?;
/// let report = compared.since(&baseline);
/// assert_eq!(report.changes.as_ref().map(|changes| changes.worse().count()), Some(0));
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, Deserialize)]
pub struct Baseline {
    schema: u32,
    at: String,
    lockkit: String,
    build: String,
    quick: bool,
    groups: Vec<String>,
    processors: usize,
    system: String,
    #[serde(default)]
    interrupted: Option<Value>,
    stores: Vec<String>,
    rows: Vec<BaselineRow>,
}

#[derive(Clone, Debug, Deserialize)]
struct BaselineRow {
    id: String,
    values: BTreeMap<String, Value>,
    ranges: BTreeMap<String, (f64, f64)>,
}

/// What changed since a [`Baseline`].
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Changes {
    /// When the earlier comparison was begun.
    pub since: String,
    /// The figures that are further apart than the rounds of either comparison were, in the order of the rows.
    pub figures: Vec<Change>,
    /// How many figures are no further apart than that.
    pub within_noise: usize,
    /// What else makes the two differ, a sentence each: another machine, another build, stores that only one of them has.
    pub notes: Vec<String>,
}

/// A figure that changed by more than its noise.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Change {
    /// The [`Row::id`] of the figure.
    pub id: &'static str,
    /// What was measured, with the heading that it stands under.
    pub title: String,
    /// The unit of the numbers.
    pub unit: &'static str,
    /// The store.
    pub store: String,
    /// The earlier number.
    pub before: f64,
    /// The number of this comparison.
    pub now: f64,
    /// Whether the new number is worse than the old one.
    pub worse: bool,
}

/// Below a tenth, a difference says more about the day than about the software, even where the rounds of each day agreed.
const LEAST_DIFFERENCE: f64 = 0.1;

impl Baseline {
    /// Reads what an earlier comparison wrote.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for anything else, and for a [schema](Report::SCHEMA) that this version does not know.
    pub fn parse(json: &str) -> Result<Self> {
        let invalid = |why: String| Error::new(ErrorKind::InvalidInput, why);
        let value: Value = serde_json::from_str(json).map_err(|error| invalid(format!("it is not JSON: {error}")))?;
        match value.get("schema").and_then(Value::as_u64) {
            Some(schema) if schema == u64::from(Report::SCHEMA) => {}
            Some(schema) => {
                let known = Report::SCHEMA;
                return Err(invalid(format!(
                    "its schema is {schema}, and this version of lockkit knows schema {known} only"
                )));
            }
            None => {
                return Err(invalid("it has no member `schema`: it is no comparison.json of this version".to_owned()));
            }
        }
        serde_json::from_value(value).map_err(|error| invalid(format!("it is no comparison.json: {error}")))
    }

    /// The names of its stores.
    pub fn stores(&self) -> impl Iterator<Item = &str> {
        self.stores.iter().map(String::as_str)
    }

    fn figure(&self, id: &str, store: &str) -> Option<Figure> {
        let row = self.rows.iter().find(|row| row.id == id)?;
        Some(Figure { value: row.values.get(store)?.as_f64()?, range: row.ranges.get(store).copied() })
    }

    fn notes(&self, stores: &[String], setting: &Setting) -> Vec<String> {
        let mut notes = Vec::new();
        let mut differs = |what: &str, before: &dyn ToString, now: &dyn ToString| {
            let (before, now) = (before.to_string(), now.to_string());
            if before != now {
                notes.push(format!("{what}: {before} then, {now} now"));
            }
        };
        differs("lockkit", &self.lockkit, &setting.version);
        differs("build", &self.build, &setting.build());
        differs("processors", &self.processors, &setting.processors);
        differs("system", &self.system, &setting.system);
        differs("measured quickly", &self.quick, &setting.is_quick());
        differs("interrupted", &self.interrupted.is_some(), &setting.interrupted.is_some());
        let groups: Vec<_> = setting.groups.iter().map(|group| group.name()).collect();
        differs("groups", &self.groups.join(", "), &groups.join(", "));
        let (before, now): (BTreeSet<_>, BTreeSet<_>) = (self.stores.iter().collect(), stores.iter().collect());
        notes.extend(before.difference(&now).map(|store| format!("{store}: only in the earlier comparison")));
        notes.extend(now.difference(&before).map(|store| format!("{store}: not in the earlier comparison")));
        notes
    }
}

impl Report {
    /// Adds what changed since an earlier comparison, of the stores that both have.
    ///
    /// A figure has changed if the gap between the ranges of its rounds, then and now, is at least as wide as the wider of the two
    /// ranges, and the two numbers differ by a tenth or more. Figures that were measured once have no range, and are not judged.
    #[must_use]
    pub fn since(self, baseline: &Baseline) -> Self {
        debug_assert_eq!(baseline.schema, Self::SCHEMA);
        let notes = baseline.notes(&self.stores, &self.setting);
        let mut changes = Changes { since: baseline.at.clone(), notes, ..Changes::default() };
        for row in self.rows.iter().filter(|row| row.better != Better::Neither) {
            for (store, cell) in self.stores.iter().zip(&row.cells) {
                let Cell::Number(now) = cell else { continue };
                let Some(before) = baseline.figure(row.id, store) else { continue };
                match changed(&before, now) {
                    Some(true) => changes.figures.push(Change::new(row, store, before.value, now.value)),
                    Some(false) => changes.within_noise += 1,
                    None => {}
                }
            }
        }
        Self { changes: Some(changes), ..self }
    }
}

/// Whether a figure changed by more than its noise; `None` where its noise is not known.
fn changed(before: &Figure, now: &Figure) -> Option<bool> {
    let ((least, most), (now_least, now_most)) = (before.range?, now.range?);
    let gap = (now_least - most).max(least - now_most);
    // Two rounds of one day and two of another are often apart by chance. By as much as the rounds of one day differ, they rarely are.
    let apart = gap > 0.0 && gap >= (most - least).max(now_most - now_least);
    Some(apart && (now.value - before.value).abs() >= LEAST_DIFFERENCE * before.value.abs())
}

impl Change {
    fn new(row: &Row, store: &str, before: f64, now: f64) -> Self {
        let title = format!("{}: {}", row.group, row.title.trim());
        let worse = (now > before) == (row.better == Better::Lower);
        Self { id: row.id, title, unit: row.unit, store: store.to_owned(), before, now, worse }
    }

    /// One line about it.
    #[must_use]
    pub fn line(&self) -> String {
        let (before, now, unit) = (grouped(self.before), grouped(self.now), self.unit);
        let percent = (self.now / self.before - 1.0) * 100.0;
        let verdict = if self.worse { "worse" } else { "better" };
        format!("{verdict}: {}: {}: {before} then, {now} now {unit} ({percent:+.0} %)", self.store, self.title)
    }
}

impl Changes {
    /// The figures that are worse than they were, beyond their noise.
    pub fn worse(&self) -> impl Iterator<Item = &Change> {
        self.figures.iter().filter(|change| change.worse)
    }

    /// What changed, a line each.
    pub(crate) fn lines(&self) -> Vec<String> {
        let noise = format!("{} figures: no change beyond the noise of their rounds", self.within_noise);
        self.figures.iter().map(Change::line).chain([noise]).chain(self.notes.iter().cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        group::Group,
        plan::{Options, Plan},
        results::Results,
    };

    fn report(rates: &[f64]) -> Report {
        let store = Results { many_keys: rates.to_vec(), ..Results::default() };
        Report::new(vec![("redis".into(), store)], &Plan::new(Options::default()), Vec::new(), Duration::ZERO)
    }

    fn since(before: &[f64], now: &[f64]) -> Changes {
        let baseline = Baseline::parse(&report(before).as_json()).expect("a baseline");
        report(now).since(&baseline).changes.expect("changes")
    }

    #[test]
    fn what_is_beyond_the_noise_is_told_and_nothing_else() {
        let before = [900.0, 1000.0, 1100.0];
        let slower = since(&before, &[500.0, 600.0, 700.0]);
        let seen: Vec<_> = slower.figures.iter().map(|change| (change.id, change.worse)).collect();
        assert_eq!((seen, slower.worse().count()), (vec![("many_keys", true)], 1));
        assert!(slower.lines()[0].contains("1 000 then, 600 now /s (-40 %)"), "{:?}", slower.lines());
        let faster = since(&before, &[1500.0, 1600.0]);
        assert_eq!((faster.figures.len(), faster.worse().count()), (1, 0));
        // The ranges have something in common, or the two numbers differ by less than a tenth.
        for now in [&[600.0, 700.0, 950.0][..], &[1000.0, 1050.0]] {
            let changes = since(&before, now);
            assert_eq!((changes.figures.len(), changes.within_noise), (0, 1), "{changes:?}");
        }
        assert_eq!(since(&[1000.0, 1001.0], &[1050.0, 1051.0]).within_noise, 1);
        // The ranges are 100 apart, and one of them is 200 wide.
        assert_eq!(since(&[1000.0, 1200.0], &[800.0, 900.0]).within_noise, 1);
        let once = since(&before, &[100.0]);
        assert_eq!((once.figures.len(), once.within_noise), (0, 0), "its noise is not known");
        assert_eq!(since(&before, &before).notes, [""; 0]);
    }

    /// All that two rounds then and two now can be on a machine on which a round shows one of these numbers.
    #[test]
    fn two_rounds_of_the_same_software_rarely_differ_by_chance() {
        let rounds = [840.0, 910.0, 950.0, 980.0, 1000.0, 1020.0, 1050.0, 1090.0, 1160.0];
        let pairs = rounds.into_iter().flat_map(|one| rounds.map(|other| [one, other]));
        let figures: Vec<_> = pairs.filter_map(Figure::median).collect();
        let mut more = 0;
        for before in &figures {
            more += figures.iter().filter(|now| now.value > before.value && changed(before, now) == Some(true)).count();
        }
        // It would be a tenth of them if it were enough that the ranges have nothing in common.
        assert!(more * 20 < figures.len().pow(2), "{more} of {} squared", figures.len());
    }

    #[test]
    fn another_machine_and_other_stores_are_told() {
        let mut before: Value = serde_json::from_str(&report(&[1.0, 2.0]).as_json()).expect("JSON");
        before["processors"] = 1024.into();
        before["stores"] = serde_json::json!(["zookeeper"]);
        let changes = report(&[1.0, 2.0]).since(&Baseline::parse(&before.to_string()).expect("a baseline")).changes;
        let notes = changes.expect("changes").notes.join("\n");
        for told in ["processors: 1024 then", "zookeeper: only in the earlier", "redis: not in the earlier"] {
            assert!(notes.contains(told), "{notes}");
        }
    }

    #[test]
    fn nothing_is_said_of_what_only_one_of_the_two_measured() {
        let report = |groups: &[Group]| {
            let store = Results { many_keys: vec![10.0, 11.0], ..Results::default() };
            let plan = Plan::new(Options::default().groups(groups.iter().copied()));
            Report::new(vec![("redis".into(), store)], &plan, Vec::new(), Duration::ZERO)
        };
        for (before, now) in [(&[Group::Keys][..], &[Group::Hot][..]), (&[Group::Hot], &Group::ALL)] {
            let baseline = Baseline::parse(&report(before).as_json()).expect("a baseline");
            let changes = report(now).since(&baseline).changes.expect("changes");
            assert_eq!((changes.figures.len(), changes.within_noise), (0, 0), "{changes:?}");
            assert!(changes.notes[0].starts_with("groups: "), "{changes:?}");
        }
    }

    #[test]
    fn what_is_no_comparison_is_refused_in_one_line() {
        for (json, why) in [
            ("", "not JSON"),
            ("{}", "no member `schema`"),
            (r#"{"schema":9}"#, "schema is 9"),
            (r#"{"schema":2}"#, "no comparison.json"),
        ] {
            let error = Baseline::parse(json).expect_err(json);
            assert!(error.kind() == ErrorKind::InvalidInput && error.to_string().contains(why), "{error}");
            assert_eq!(error.to_string().lines().count(), 1);
        }
    }
}
