//! The comparison as a table, as Markdown and as JSON. No I/O.

use comfy_table::{CellAlignment, Table, presets};
use serde_json::{Map, Value, json};

use super::{
    results::Absence,
    rows::{Better, Cell, Row},
    stats::grouped,
};

/// Everything that is reported.
#[derive(Clone, Debug)]
pub(crate) struct Report {
    pub(crate) stores: Vec<String>,
    pub(crate) rows: Vec<Row>,
    pub(crate) setting: Setting,
    /// The compliance cases that failed, a line each.
    pub(crate) failures: Vec<String>,
    /// What else could have been compared, and how; a sentence each.
    pub(crate) missing: Vec<String>,
}

/// What the numbers depend on.
#[derive(Clone, Debug)]
pub(crate) struct Setting {
    pub(crate) version: &'static str,
    pub(crate) release: bool,
    pub(crate) quick: bool,
    pub(crate) processors: usize,
    pub(crate) system: String,
    pub(crate) seconds: u64,
}

impl Setting {
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
            if self.quick { "quickly " } else { "" },
            self.seconds
        )
    }
}

impl Report {
    /// The table for the terminal, with the reasons for what is missing below.
    pub(crate) fn as_text(&self) -> String {
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

    /// The file for people.
    pub(crate) fn as_markdown(&self) -> String {
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

    /// The file for programs.
    pub(crate) fn as_json(&self) -> Value {
        let setting = &self.setting;
        json!({
            "lockkit": setting.version,
            "build": setting.build(),
            "quick": setting.quick,
            "processors": setting.processors,
            "system": setting.system,
            "seconds": setting.seconds,
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
                match notes.iter_mut().find(|(text, _)| *text == why.text()) {
                    Some((_, stores)) if stores.contains(&store.as_str()) => {}
                    Some((_, stores)) => stores.push(store),
                    None => notes.push((why.text(), vec![store])),
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
            Self::Failed(failure) => failure.message().to_owned(),
        }
    }
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
- **Keys**: one task for each key, all over one connection.
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
        compare::{
            plan::{Plan, Step},
            results::Results,
            rows::rows,
        },
        exit::Failure,
    };

    fn report() -> Report {
        let mut memory = Results::default();
        memory.absent.insert(Step::Processes, Absence::Inapplicable("inside one process"));
        let mut redis = Results { many_keys: vec![154_321.0], ..Results::default() };
        redis.absent.insert(Step::HandOff, Absence::Failed(Failure::new(69, "gone")));
        Report {
            stores: vec!["memory".into(), "redis 7".into()],
            rows: rows(&[memory, redis], &Plan::new(true, true, 10_000)),
            setting: Setting {
                version: "0.1.0",
                release: true,
                quick: true,
                processors: 2,
                system: "linux x86_64".into(),
                seconds: 20,
            },
            failures: Vec::new(),
            missing: vec!["no valkey-server: get it".into()],
        }
    }

    #[test]
    fn the_table_fits_and_tells_why_cells_are_empty() {
        let text = report().as_text();
        assert!(text.lines().all(|line| line.chars().count() <= 120), "{text}");
        assert!(text.contains("154 321") && text.contains("failed"), "{text}");
        assert!(text.contains("memory: inside one process"), "{text}");
        assert!(text.contains("redis 7: gone") && text.contains("no valkey-server"), "{text}");
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
        let json = report().as_json();
        let row = |id: &str| json["rows"].as_array().and_then(|rows| rows.iter().find(|row| row["id"] == id)).cloned();
        let many = row("many_keys").expect("row");
        assert_eq!(many["values"]["redis 7"], 154_321.0);
        assert_eq!(many["values"]["memory"], Value::Null);
        assert_eq!(row("hand_off_p50").expect("row")["absent"]["redis 7"], "gone");
    }
}
