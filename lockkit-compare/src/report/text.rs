//! The comparison for people who read text: tables for the terminal, and a file in Markdown. No I/O.

use std::ops::Range;

use comfy_table::{CellAlignment, Table, presets};

use super::{Report, method, rows::Cell};
use crate::{
    results::{Absence, Figure},
    stats::grouped,
};

impl Report {
    /// The table for the terminal, with the reasons for what is missing below.
    #[must_use]
    pub fn as_text(&self) -> String {
        self.as_text_within(usize::MAX)
    }

    /// The same with several tables, each of some of the stores, where one would have more characters to a line than this.
    #[must_use]
    pub fn as_text_within(&self, width: usize) -> String {
        let mut out = format!("{}\n\n{}\n", self.tables(width).join("\n\n"), self.setting.line());
        if let Some(scope) = self.setting.scope() {
            out += &format!("{scope}\n");
        }
        if let Some(interrupted) = &self.setting.interrupted {
            out += &format!("{}\n", interrupted.sentence());
        }
        for note in self.notes() {
            out += &format!("{note}\n");
        }
        if let Some(changes) = &self.changes {
            out += &format!("\nSince the comparison of {}:\n", changes.since);
            changes.lines().iter().for_each(|line| out += &format!("  {line}\n"));
        }
        if !self.missing.is_empty() {
            out +=
                "\nNot compared, for want of what is not installed (a running server can be given with --store URL):\n";
            self.missing.iter().for_each(|how| out += &format!("  {how}\n"));
        }
        out
    }

    /// Each of as many of the next stores as fit.
    fn tables(&self, width: usize) -> Vec<String> {
        let (mut tables, mut first, count) = (Vec::new(), 0, self.stores.len());
        let fits = |table: &String| table.lines().all(|line| line.chars().count() <= width);
        while first < count {
            let mut last = count;
            let mut table = self.table(first..last);
            while last > first + 1 && !fits(&table) {
                last -= 1;
                table = self.table(first..last);
            }
            tables.push(table);
            first = last;
        }
        tables
    }

    /// The table of these stores.
    fn table(&self, stores: Range<usize>) -> String {
        let mut table = Table::new();
        table.load_style(presets::NOTHING);
        table.set_header([&[String::new(), String::new()], &self.stores[stores.clone()]].concat());
        let mut group = "";
        for row in &self.rows {
            if row.group != group {
                if !group.is_empty() {
                    table.add_row([""]);
                }
                table.add_row([row.group.to_uppercase()]);
                group = &row.group;
            }
            let cells = row.cells[stores.clone()].iter().map(Cell::text);
            table.add_row([format!("  {}", row.title), row.unit.to_owned()].into_iter().chain(cells));
        }
        table.column_iter_mut().skip(2).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
        table.trim_fmt()
    }

    /// The file for people, with the range of the rounds behind each figure, which also tells how it was measured.
    #[must_use]
    pub fn as_markdown(&self) -> String {
        let mut out = format!("# Comparison of lock stores\n\n{}.\n\n", self.setting.line());
        if let Some(scope) = self.setting.scope() {
            out += &format!("{scope}\n\n");
        }
        if let Some(interrupted) = &self.setting.interrupted {
            out += &format!("**{}**\n\n", interrupted.sentence());
        }
        out += &format!("| | | {} |\n|---|---|{}\n", self.stores.join(" | "), "---:|".repeat(self.stores.len()));
        let mut group = "";
        for row in &self.rows {
            if row.group != group {
                out += &format!("| **{}** | | {}\n", row.group, " |".repeat(self.stores.len()));
                group = &row.group;
            }
            let cells: Vec<_> = row.cells.iter().map(Cell::text_with_range).collect();
            out += &format!("| {} | {} | {} |\n", row.title.trim(), row.unit, cells.join(" | "));
        }
        out += "\nWhere there are brackets: the least and the most that a single round showed, or of the cost at the server a part of its time.\n\n";
        self.notes().iter().for_each(|note| out += &format!("- {note}\n"));
        self.missing.iter().for_each(|how| out += &format!("- Not compared: {how}\n"));
        if let Some(changes) = &self.changes {
            out += &format!("\n## Since the comparison of {}\n\n", changes.since);
            changes.lines().iter().for_each(|line| out += &format!("- {line}\n"));
        }
        out += &format!("\n## How it was measured\n\n{}\n\n", method::ALL);
        method::of(&self.setting).for_each(|(name, how)| out += &format!("- **{name}**: {how}\n"));
        out
    }

    /// Why cells are empty: each reason once, with the stores that it is about.
    pub(super) fn notes(&self) -> Vec<String> {
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
        let impossible = self.setting.impossible.iter().map(|why| format!("Not measured: {why}"));
        notes.chain(impossible).chain(self.failures.iter().cloned()).collect()
    }
}

impl Cell {
    pub(super) fn text_with_range(&self) -> String {
        match self {
            Self::Number(Figure { range: Some((least, most)), .. }) => {
                format!("{} ({}–{})", self.text(), grouped(*least), grouped(*most))
            }
            _ => self.text(),
        }
    }

    pub(super) fn text(&self) -> String {
        match self {
            Self::Number(figure) => grouped(figure.value),
            Self::Text(text) => text.clone(),
            Self::Absent(Some(Absence::Failed(_))) => "failed".into(),
            Self::Absent(_) => "-".into(),
        }
    }
}

impl Absence {
    pub(crate) fn text(&self) -> String {
        match self {
            Self::Inapplicable(why) => (*why).to_owned(),
            Self::Failed(error) => error.to_string(),
        }
    }
}
