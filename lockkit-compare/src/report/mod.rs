//! The comparison as a table, as Markdown and as JSON. No I/O.

mod rows;

use std::{fmt, time::Duration};

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use crate::{
    error::Error,
    plan::{Effort, Plan},
    results::{Absence, Results},
    stats::grouped,
};
pub use rows::{Better, Cell, Row};

/// What a comparison showed.
#[derive(Clone, Debug)]
pub struct Report {
    /// The names of the stores.
    pub stores: Vec<String>,
    /// The measures.
    pub rows: Vec<Row>,
    /// What the numbers depend on.
    pub setting: Setting,
    /// The compliance cases that failed, a line each.
    pub failures: Vec<String>,
    /// What else could have been compared, and how; a sentence each.
    pub missing: Vec<String>,
    /// The worst that happened.
    pub verdict: Verdict,
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
    /// How many processors there are.
    pub processors: usize,
    /// The operating system and the architecture.
    pub system: String,
    /// How long it took.
    pub took: Duration,
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
    fn new(effort: Effort, took: Duration) -> Self {
        Self {
            version: env!("CARGO_PKG_VERSION"),
            release: !cfg!(debug_assertions),
            effort,
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            took,
        }
    }

    fn build(&self) -> &'static str {
        if self.release { "release" } else { "debug" }
    }

    /// One line about how the numbers came about.
    fn line(&self) -> String {
        format!(
            "lockkit {}, {} build, {} processors, {}, {}measured in {} s",
            self.version,
            self.build(),
            self.processors,
            self.system,
            if self.effort == Effort::Quick { "quickly " } else { "" },
            self.took.as_secs()
        )
    }
}

impl Report {
    pub(crate) fn new(measured: Vec<(String, Results)>, plan: &Plan, missing: Vec<String>, took: Duration) -> Self {
        let (stores, results): (Vec<_>, Vec<_>) = measured.into_iter().unzip();
        Self {
            rows: rows::rows(&results, plan),
            setting: Setting::new(plan.effort, took),
            failures: failed_cases(&stores, &results),
            missing,
            verdict: Verdict::of(&stores, &results),
            stores,
        }
    }

    /// The table for the terminal, with the reasons for what is missing below.
    #[must_use]
    pub fn as_text(&self) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([vec![String::new(), String::new()], self.stores.clone()].concat());
        let mut group = "";
        for row in &self.rows {
            if row.group != group {
                if !group.is_empty() {
                    table.add_row([""]);
                }
                table.add_row([row.group.to_uppercase()]);
                group = &row.group;
            }
            let cells = row.cells.iter().map(|cell| cell.text());
            table.add_row([format!("  {}", row.title), row.unit.to_owned()].into_iter().chain(cells));
        }
        table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        let mut out = format!("{}\n\n{}\n", table.trim_fmt(), self.setting.line());
        for note in self.notes() {
            out += &format!("{note}\n");
        }
        if !self.missing.is_empty() {
            out += "\nNot compared, for want of the server (a running one can be given with --store URL):\n";
            self.missing.iter().for_each(|how| out += &format!("  {how}\n"));
        }
        out
    }

    /// The file for people, which also tells how it was measured.
    #[must_use]
    pub fn as_markdown(&self) -> String {
        let mut out = format!("# Comparison of lock stores\n\n{}.\n\n", self.setting.line());
        out += &format!("| | | {} |\n|---|---|{}\n", self.stores.join(" | "), "---:|".repeat(self.stores.len()));
        let mut group = "";
        for row in &self.rows {
            if row.group != group {
                out += &format!("| **{}** | | {}\n", row.group, " |".repeat(self.stores.len()));
                group = &row.group;
            }
            let cells: Vec<_> = row.cells.iter().map(|cell| cell.text()).collect();
            out += &format!("| {} | {} | {} |\n", row.title.trim(), row.unit, cells.join(" | "));
        }
        out += "\n";
        self.notes().iter().for_each(|note| out += &format!("- {note}\n"));
        self.missing.iter().for_each(|how| out += &format!("- Not compared: {how}\n"));
        out + METHOD
    }

    /// The file for programs: an object in JSON, of several lines.
    #[must_use]
    pub fn as_json(&self) -> String {
        format!("{:#}", self.json())
    }

    fn json(&self) -> Value {
        let setting = &self.setting;
        json!({
            "lockkit": setting.version,
            "build": setting.build(),
            "quick": setting.effort == Effort::Quick,
            "processors": setting.processors,
            "system": setting.system,
            "seconds": setting.took.as_secs(),
            "stores": self.stores,
            "rows": self.rows.iter().map(|row| self.row_as_json(row)).collect::<Vec<_>>(),
            "failures": self.failures,
            "not_compared": self.missing,
        })
    }

    fn row_as_json(&self, row: &Row) -> Value {
        let (mut values, mut absent) = (Map::new(), Map::new());
        for (store, cell) in self.stores.iter().zip(&row.cells) {
            let value = match cell {
                Cell::Number(number) => json!(number),
                Cell::Text(text) => json!(text),
                Cell::Absent(why) => {
                    absent.insert(store.clone(), why.as_ref().map_or(Value::Null, |why| why.text().into()));
                    Value::Null
                }
            };
            values.insert(store.clone(), value);
        }
        let better = match row.better {
            Better::Higher => Some("higher"),
            Better::Lower => Some("lower"),
            Better::Neither => None,
        };
        let (id, group, title) = (row.id, &row.group, row.title.trim());
        json!({
            "id": id, "group": group, "title": title, "unit": row.unit, "better": better,
            "values": values, "absent": absent,
        })
    }

    /// Why cells are empty: each reason once, with the stores that it is about.
    fn notes(&self) -> Vec<String> {
        let mut notes: Vec<(String, Vec<&str>)> = Vec::new();
        for row in &self.rows {
            for (store, cell) in self.stores.iter().zip(&row.cells) {
                let Cell::Absent(Some(why)) = cell else { continue };
                let why = match why {
                    Absence::Inapplicable(_) => why.text(),
                    Absence::Failed(_) => format!("{}: {}", row.measure, why.text()),
                };
                match notes.iter_mut().find(|(text, _)| *text == why) {
                    Some((_, stores)) if stores.contains(&store.as_str()) => {}
                    Some((_, stores)) => stores.push(store),
                    None => notes.push((why, vec![store])),
                }
            }
        }
        let notes = notes.into_iter().map(|(why, stores)| format!("{}: {why}", stores.join(", ")));
        notes.chain(self.failures.iter().cloned()).collect()
    }
}

impl Cell {
    fn text(&self) -> String {
        match self {
            Self::Number(number) => grouped(*number),
            Self::Text(text) => text.clone(),
            Self::Absent(Some(Absence::Failed(_))) => "failed".into(),
            Self::Absent(_) => "-".into(),
        }
    }
}

impl Absence {
    fn text(&self) -> String {
        match self {
            Self::Inapplicable(why) => (*why).to_owned(),
            Self::Failed(error) => error.to_string(),
        }
    }
}

fn failed_cases(stores: &[String], results: &[Results]) -> Vec<String> {
    let all = stores.iter().zip(results).filter_map(|(store, results)| Some((store, results.compliance.as_ref()?)));
    all.flat_map(|(store, counts)| counts.failures.iter().map(move |case| format!("{store}: {case}"))).collect()
}

/// How it was measured, for the file.
const METHOD: &str = "
## How it was measured

All stores are measured through the same `Locker`, in turns: each round visits every store, so that whatever else the
machine does hits all of them alike. Rates and fairness are medians over the rounds, latencies are quantiles over all
samples. Every measure begins with a warm-up that is not counted. Compare columns of one report, not numbers of
different reports: machines differ by more than stores do.

- **Bare round trip**: `inspect` of one free lock. What a store needs for one question, to measure the rest by.
- **Acquire + release**: one task, one lock, nobody else.
- **A store named after two others** (`redis to mariadb`): a migration between private servers of both, in the phase both: each
  lock is taken in the one, then in the other. Only what takes and releases single locks is measured there.
- **Keys**: one task for each key, all with one store, which has as many connections as it thinks right.
- **Hot lock**: tasks that take the same lock as often as they can. In one process, a release hands the lease to the
  next task without asking the store, up to 64 times or 50 ms in a row; the second rate is without that. Over
  processes, each has a runtime of one thread, and each holder reads, changes and writes back a number in a file.
- **Compliance**: the cases of `lockkit-testkit`. Those that harm a server are ignored here; `./run test` runs them.
- **Overlaps**: holders whose fence was not above that of the one before, and updates of the counter that got lost.
  Anything but 0 is a fault.
- **Fairness**: Jain's index of the acquisitions: 1 if all got the same, 1/n if one got everything.
- **Hand-off**: from the call of `release` in one process to the moment when a waiter in another has the lock, on the
  clock that both share (`CLOCK_BOOTTIME`). The waiter is known to wait before the lock is released, so that all who
  take part have been idle for some milliseconds and must be woken by their systems; a bare round trip after the same
  pause tells how much of the time that is.
- **Leases**: growth of the resident memory of a process of its own per held lease. The processor's share is what the
  renewals of one cycle took, for a cycle of 10 s (a third of the ttl). For `memory`, the store is in that process too.
";

#[cfg(test)]
mod tests {
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
        let mut redis = Results { many_keys: vec![154_321.0], ..Results::default() };
        redis.absent.insert(Step::HandOff, failed());
        let measured = vec![("memory".into(), memory), ("redis 7".into(), redis)];
        let plan = Plan::new(Options::default().effort(Effort::Quick));
        Report::new(measured, &plan, vec!["no valkey-server: get it".into()], Duration::from_secs(20))
    }

    #[test]
    fn the_worst_is_told() {
        let mut unmeasured = Results::default();
        unmeasured.absent.insert(Step::HandOff, failed());
        let counts = Counts { passed: 1, ignored: 0, failures: vec!["x".into(), "y".into()] };
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
