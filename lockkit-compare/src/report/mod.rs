//! The comparison as a table, as a page, as Markdown and as JSON. No I/O.

mod baseline;
mod curves;
mod facts;
mod json;
mod method;
mod page;
mod rows;
mod text;
mod timelines;

use std::{
    fmt,
    time::{Duration, SystemTime},
};

use crate::{
    error::Error,
    group::Group,
    plan::{Effort, Plan},
    results::{Absence, Results},
    timeline::{Fault, Timeline},
};
pub use baseline::{Baseline, Change, Changes};
pub use curves::{Axis, Curve};
pub use facts::{Cases, Facts};
pub(crate) use rows::rows;
pub use rows::{Better, Cell, Row};

/// What a comparison showed.
#[derive(Clone, Debug)]
pub struct Report {
    /// The names of the stores, and after them those of the [peers](crate::Peer).
    pub stores: Vec<String>,
    /// The measures.
    pub rows: Vec<Row>,
    /// The measures of which one number says too little.
    pub curves: Vec<Curve>,
    /// Who held a lock when, while faults were inflicted: by fault, and for each in the order of the stores.
    pub timelines: Vec<Timeline>,
    /// What each store is, in the order of the stores.
    pub facts: Vec<Facts>,
    /// What the numbers depend on.
    pub setting: Setting,
    /// The compliance cases that failed, a line each.
    pub failures: Vec<String>,
    /// What else could have been compared, and how; a sentence each.
    pub missing: Vec<String>,
    /// The worst that happened.
    pub verdict: Verdict,
    /// What changed since an earlier comparison, if [one was given](Self::since).
    pub changes: Option<Changes>,
}

/// What the numbers depend on.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Setting {
    /// The version of this crate.
    pub version: &'static str,
    /// Whether it is a release build. The numbers of a debug build say little about one.
    pub release: bool,
    /// How long was measured.
    pub effort: Effort,
    /// What was measured.
    pub groups: Vec<Group>,
    /// The groups that were to be measured and that none of the stores can take, each with the reason.
    pub impossible: Vec<String>,
    /// How many processors there are.
    pub processors: usize,
    /// The operating system and the architecture, and where Linux tells it the processor's model and the memory.
    pub system: String,
    /// When it was begun, in UTC, as RFC 3339 has it.
    pub at: String,
    /// How long it took.
    pub took: Duration,
    /// How far it came, if it was interrupted.
    pub interrupted: Option<Interrupted>,
}

/// How far a comparison came that was interrupted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Interrupted {
    /// How many measures were taken: each counts once for each store and round.
    pub taken: u32,
    /// How many there were to be.
    pub of: u32,
    /// The measures that some store did not take, as the [progress](crate::Progress) names them.
    pub missing: Vec<&'static str>,
    /// Those that all stores took, but some in fewer rounds than usual.
    pub fewer_rounds: Vec<&'static str>,
}

impl Interrupted {
    /// What to say first in a report.
    fn sentence(&self) -> String {
        let mut says = format!("This comparison was {self}.");
        for (what, measures) in
            [("Not measured on every store", &self.missing), ("In fewer rounds than usual", &self.fewer_rounds)]
        {
            if !measures.is_empty() {
                says += &format!(" {what}: {}.", measures.join("; "));
            }
        }
        says
    }
}

impl fmt::Display for Interrupted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "interrupted after {} of {} measures", self.taken, self.of)
    }
}

/// The worst that happened in a comparison: a lock that let two in at once is worse than a measure that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing went wrong.
    Sound,
    /// Critical sections overlapped, or updates were lost.
    Overlapped {
        /// The store whose lock it was.
        store: String,
        /// How often.
        times: u64,
    },
    /// Compliance cases failed.
    Failed {
        /// The store that they failed on.
        store: String,
        /// How many.
        cases: usize,
    },
    /// A measure could not be taken.
    Unmeasured {
        /// The store.
        store: String,
        /// What was measured.
        measure: &'static str,
        /// Why it failed.
        error: Error,
    },
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sound => write!(f, "no lock let two in at once"),
            Self::Overlapped { store, times } => write!(f, "{store}: {times} critical sections overlapped"),
            Self::Failed { store, cases } => write!(f, "{store}: {cases} compliance cases failed"),
            Self::Unmeasured { store, measure, error } => write!(f, "{store}: {measure}: {error}"),
        }
    }
}

impl Verdict {
    fn of(stores: &[String], results: &[Results]) -> Self {
        let all = || stores.iter().zip(results).map(|(store, results)| (store.clone(), results));
        for (store, results) in all() {
            match (results.violations(), results.compliance.as_ref().map_or(0, |counts| counts.failures.len())) {
                (0, 0) => {}
                (0, cases) => return Self::Failed { store, cases },
                (times, _) => return Self::Overlapped { store, times },
            }
        }
        for (store, results) in all() {
            for (step, absence) in &results.absent {
                if let Absence::Failed(error) = absence {
                    return Self::Unmeasured { store, measure: step.title(), error: error.clone() };
                }
            }
        }
        Self::Sound
    }
}

impl Setting {
    fn new(plan: &Plan, took: Duration) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            release: !cfg!(debug_assertions),
            effort: plan.effort,
            groups: plan.groups.iter().copied().collect(),
            impossible: Vec::new(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            system: system(),
            at: humantime::format_rfc3339_seconds(SystemTime::now() - took).to_string(),
            took,
            interrupted: None,
        }
    }

    pub(crate) fn is_quick(&self) -> bool {
        self.effort == Effort::Quick
    }

    pub(crate) fn build(&self) -> &'static str {
        if self.release { "release" } else { "debug" }
    }

    /// Whether anything of these groups was measured; no group at all is everything.
    pub(crate) fn has(&self, groups: &[Group]) -> bool {
        groups.is_empty() || groups.iter().any(|group| self.groups.contains(group))
    }

    /// One line about what was measured and what was not, unless everything was.
    fn scope(&self) -> Option<String> {
        let names = |groups: Vec<Group>| groups.into_iter().map(Group::name).collect::<Vec<_>>().join(", ");
        let left_out: Vec<_> = Group::ALL.into_iter().filter(|group| !self.groups.contains(group)).collect();
        match left_out.len() {
            0 => None,
            some if some < self.groups.len() => Some(format!("Left out: {}.", names(left_out))),
            _ => Some(format!("Measured only: {}.", names(self.groups.clone()))),
        }
    }

    /// How the numbers came about, in two lines.
    fn line(&self) -> String {
        format!(
            "lockkit {}, {} build, {}measured in {} s at {},\non {} processors, {}",
            self.version,
            self.build(),
            if self.is_quick() { "quickly " } else { "" },
            self.took.as_secs(),
            self.at,
            self.processors,
            self.system,
        )
    }
}

/// The machine, as far as it tells.
fn system() -> String {
    let mut system = format!("{} {}", std::env::consts::OS, std::env::consts::ARCH);
    let told = |file: &str, name: &str| {
        let text = std::fs::read_to_string(file).ok()?;
        let (_, value) = text.lines().find(|line| line.starts_with(name))?.split_once(':')?;
        Some(value.trim().to_owned())
    };
    if let Some(model) = told("/proc/cpuinfo", "model name") {
        system += &format!(", {model}");
    }
    let kib = told("/proc/meminfo", "MemTotal").and_then(|value| value.trim_end_matches(" kB").parse::<u64>().ok());
    if let Some(kib) = kib {
        system += &format!(", {:.1} GiB", kib as f64 / 1_048_576.0);
    }
    system
}

impl Report {
    /// Whether nothing was measured. A comparison that was interrupted early has only what the stores say of themselves.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let mut measured = self.rows.iter().filter(|row| !row.measure.is_empty()).flat_map(|row| &row.cells);
        measured.all(|cell| matches!(cell, Cell::Absent(_)))
    }

    /// The names of the peers among the stores.
    pub fn peers(&self) -> impl Iterator<Item = &str> {
        self.known().filter(|(_, facts)| facts.traits.is_peer).map(|(name, _)| name)
    }

    /// The stores of lockkit, and what each is.
    fn own(&self) -> impl Iterator<Item = (&str, &Facts)> {
        self.known().filter(|(_, facts)| !facts.traits.is_peer)
    }

    fn known(&self) -> impl Iterator<Item = (&str, &Facts)> {
        self.stores.iter().map(String::as_str).zip(&self.facts)
    }

    pub(crate) fn new(measured: Vec<(String, Results)>, plan: &Plan, missing: Vec<String>, took: Duration) -> Self {
        let (stores, results): (Vec<_>, Vec<_>) = measured.into_iter().unzip();
        Self {
            rows: rows::rows(&results, plan),
            curves: curves::curves(&results, plan),
            timelines: Fault::ALL
                .iter()
                .flat_map(|fault| results.iter().filter_map(|store| store.faults.get(fault).cloned()))
                .collect(),
            facts: results.iter().map(Facts::of).collect(),
            setting: Setting::new(plan, took),
            failures: failed_cases(&stores, &results),
            missing,
            verdict: Verdict::of(&stores, &results),
            stores,
            changes: None,
        }
    }
}

fn failed_cases(stores: &[String], results: &[Results]) -> Vec<String> {
    let all = stores.iter().zip(results).filter_map(|(store, results)| Some((store, results.compliance.as_ref()?)));
    all.flat_map(|(store, counts)| counts.failures.iter().map(move |case| format!("{store}: {case}"))).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::{
        error::ErrorKind,
        plan::{Options, Step},
        results::{Contest, Counts},
    };

    fn failed() -> Absence {
        Absence::Failed(Error::new(ErrorKind::Unavailable, "gone"))
    }

    fn report() -> Report {
        let mut memory = Results::default();
        memory.absent.insert(Step::Processes, Absence::Inapplicable("inside one process"));
        let mut redis = Results { many_keys: vec![150_000.0, 158_642.0], ..Results::default() };
        redis.absent.insert(Step::HandOff, failed());
        let measured = vec![("memory".into(), memory), ("redis 7".into(), redis)];
        let plan = Plan::new(Options::default().effort(Effort::Quick));
        Report::new(measured, &plan, vec!["no valkey-server: get it".into()], Duration::from_secs(20))
    }

    #[test]
    fn the_worst_is_told() {
        let mut unmeasured = Results::default();
        unmeasured.absent.insert(Step::HandOff, failed());
        let counts = Counts { passed: 1, ignored: 0, failures: vec!["x".into(), "y".into()], ..Counts::default() };
        let noncompliant = Results { compliance: Some(counts), ..Results::default() };
        let contest = Contest { per_second: 1.0, fairness: None, violations: 3 };
        let overlapped = Results { processes: vec![contest], ..noncompliant.clone() };
        let verdict = |results: &[&Results]| {
            let stores: Vec<_> = (0..results.len()).map(|number| format!("store {number}")).collect();
            Verdict::of(&stores, &results.iter().map(|&results| results.clone()).collect::<Vec<_>>()).to_string()
        };
        let sound = Results::default();
        assert_eq!(Verdict::of(&["redis".into()], std::slice::from_ref(&sound)), Verdict::Sound);
        assert_eq!(verdict(&[&sound, &unmeasured]), "store 1: hand-off between processes: gone");
        assert_eq!(verdict(&[&unmeasured, &noncompliant]), "store 1: 2 compliance cases failed");
        assert_eq!(verdict(&[&unmeasured, &overlapped]), "store 1: 3 critical sections overlapped");
    }

    #[test]
    fn the_table_fits_and_tells_why_cells_are_empty() {
        let text = report().as_text();
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        assert!(text.contains("154 321") && text.contains("failed"), "{text}");
        assert!(text.contains("memory: inside one process"), "{text}");
        let narrow = report().as_text_within(100);
        assert_eq!(narrow.matches("GUARANTEES").count(), 2, "a table for each store: {narrow}");
        assert!(narrow.split("GUARANTEES").nth(2).is_some_and(|second| second.contains("154 321")), "{narrow}");
        assert!(
            text.contains("redis 7: hand-off between processes: gone") && text.contains("no valkey-server"),
            "{text}"
        );
    }

    #[test]
    fn markdown_has_a_cell_for_every_store_in_every_row() {
        let text = report().as_markdown();
        let table: Vec<_> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert!(table.len() > 20);
        assert!(table.iter().all(|line| line.matches('|').count() == 5), "{table:#?}");
        assert!(text.contains("| 154 321 (150 000–158 642) |"), "{text}");
    }

    #[test]
    fn an_interrupted_comparison_says_so_in_every_format() {
        let mut report = report();
        let texts = |report: &Report| [report.as_text(), report.as_markdown(), report.as_html()];
        assert!(texts(&report).iter().all(|text| !text.contains("interrupted")));
        let whole: Value = serde_json::from_str(&report.as_json()).expect("JSON");
        assert!(whole["interrupted"].is_null());
        report.setting.interrupted = Some(Interrupted {
            taken: 3,
            of: 20,
            missing: vec!["held leases", "compliance cases"],
            fewer_rounds: vec!["many keys"],
        });
        let says = "This comparison was interrupted after 3 of 20 measures. \
            Not measured on every store: held leases; compliance cases. In fewer rounds than usual: many keys.";
        for text in texts(&report) {
            assert!(text.contains(says), "{text}");
        }
        let json: Value = serde_json::from_str(&report.as_json()).expect("JSON");
        assert_eq!((&json["interrupted"]["taken"], &json["interrupted"]["of"]), (&3.into(), &20.into()));
        assert_eq!(json["interrupted"]["missing"], serde_json::json!(["held leases", "compliance cases"]));
        assert_eq!(json["interrupted"]["fewer_rounds"], serde_json::json!(["many keys"]));
    }

    #[test]
    fn what_stores_say_of_themselves_is_no_measurement() {
        let nothing = vec![("redis".into(), Results::default())];
        let plan = Plan::new(Options::default());
        assert!(Report::new(nothing, &plan, Vec::new(), Duration::ZERO).is_empty());
        assert!(!report().is_empty());
    }

    #[test]
    fn json_has_numbers_and_reasons() {
        let json: Value = serde_json::from_str(&report().as_json()).expect("JSON");
        let row = |id: &str| json["rows"].as_array().and_then(|rows| rows.iter().find(|row| row["id"] == id)).cloned();
        let many = row("many_keys").expect("row");
        assert_eq!(many["values"]["redis 7"], 154_321.0);
        assert_eq!(many["values"]["memory"], Value::Null);
        assert_eq!(row("hand_off_p50").expect("row")["absent"]["redis 7"], "gone");
    }
}
