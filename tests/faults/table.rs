//! The table of what happened, for people.

use std::{collections::BTreeMap, fs, io, path::Path};

use lockkit_testkit::history::Rule;

use crate::{
    fault::{Fault, fences_hold},
    run::Row,
};

const BEGIN: &str = "<!-- faults: begin -->";
const END: &str = "<!-- faults: end -->";

/// The table in Markdown, one part for each store, one line for each fault.
pub(crate) fn render(rows: &[Row], seed: u64) -> String {
    let mut stores: BTreeMap<_, Vec<&Row>> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.faults.len() == 1) {
        stores.entry(row.kind).or_default().push(row);
    }
    let mut text = format!(
        "Made by `cargo test --all-features --test faults -- --write docs/guarantees.md --seed {seed}`: four processes, \
         two locks and a semaphore, one fault at a time.\n"
    );
    for (kind, mut rows) in stores {
        rows.sort_by_key(|row| Fault::of(kind).iter().position(|fault| row.faults[..] == [*fault]));
        text += &format!(
            "\n**{}**\n\n| what goes wrong | grants | of these shared | two believed at once | late acts refused by the fence | fenced: \
             updates lost | unfenced twin: updates lost |\n|---|---:|---:|---:|---:|---:|---:|\n",
            kind.title()
        );
        rows.iter().for_each(|row| text += &line(row));
    }
    text
}

fn line(row: &Row) -> String {
    let not_claimed = if fences_hold(row.fencing, &row.faults) { "" } else { " (not claimed)" };
    format!(
        "| {} | {} | {} | {} | {} | {}{not_claimed} | {} of {} |\n",
        row.faults[0].words(row.kind),
        row.report.grants,
        row.report.shared,
        row.report.count(Rule::Overlap),
        row.report.refused,
        row.corrupted(),
        row.report.lost_on_twins,
        row.report.twin_writes,
    )
}

/// Puts the table between the markers of a file.
pub(crate) fn write(path: &Path, table: &str) -> io::Result<()> {
    let text = fs::read_to_string(path)?;
    let missing = || io::Error::other(format!("{} has no lines {BEGIN} and {END}", path.display()));
    let (before, rest) = text.split_once(BEGIN).ok_or_else(missing)?;
    let (_, after) = rest.split_once(END).ok_or_else(missing)?;
    fs::write(path, format!("{before}{BEGIN}\n{table}{END}{after}"))
}
