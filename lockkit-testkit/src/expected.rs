//! Lists of the cases that are to run on a store, so that one that vanishes, or is ignored from now on, is noticed.
//!
//! A list is a text file beside the tests: how many cases run, and a line for each that does not, with its name and why. The names of all
//! cases are in `docs/cases.md`, which a test holds to the code.

use std::{collections::BTreeSet, env, fs, io, path::Path};

use crate::{BoxError, Subject, cases};

/// Set to `write` to have the lists written instead of compared.
const VARIABLE: &str = "LOCKKIT_EXPECTED";

/// Holds what would be run on a store to its list; with `LOCKKIT_EXPECTED=write`, makes the list what would be run.
pub(crate) fn compare(list: &Path, backend: &str, subject: &Subject) -> Result<(), BoxError> {
    let runs = lines(subject);
    if env::var_os(VARIABLE).is_some_and(|value| value == "write") {
        return Ok(write(list, &runs)?);
    }
    differences(list, &runs).map_err(|what| format!("{what}\nIf this is meant to be so: {}", command(backend)).into())
}

fn lines(subject: &Subject) -> BTreeSet<String> {
    let all = cases::all();
    let ignored = all.iter().filter_map(|case| Some(format!("{}: {}", case.name, subject.lacks(case)?)));
    let mut lines: BTreeSet<_> = ignored.collect();
    lines.insert(format!("{} cases run", all.len() - lines.len()));
    lines
}

fn write(list: &Path, runs: &BTreeSet<String>) -> io::Result<()> {
    if let Some(dir) = list.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::write(list, runs.iter().map(|line| format!("{line}\n")).collect::<String>())
}

/// Says what differs, line by line.
fn differences(list: &Path, runs: &BTreeSet<String>) -> Result<(), String> {
    let text = match fs::read_to_string(list) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(format!("there is no list of the cases to expect, {}", list.display()));
        }
        Err(error) => return Err(format!("{} can't be read: {error}", list.display())),
    };
    let expected: BTreeSet<_> = text.lines().map(str::to_owned).collect();
    let gone = expected.difference(runs).map(|line| format!("-{line}"));
    let new = runs.difference(&expected).map(|line| format!("+{line}"));
    let differences: Vec<_> = gone.chain(new).collect();
    if differences.is_empty() {
        return Ok(());
    }
    Err(format!("the cases are not those of {}:\n{}", list.display(), differences.join("\n")))
}

/// What writes the list anew, as far as it can be known here.
fn command(backend: &str) -> String {
    let package = env::var("CARGO_PKG_NAME").map_or_else(|_| String::new(), |name| format!(" -p {name}"));
    // Cargo calls a test program `<test>-<hash>`.
    let program = env::current_exe().ok().and_then(|path| Some(path.file_stem()?.to_str()?.to_owned()));
    let program = program.unwrap_or_default();
    let test = program.rsplit_once('-').map_or(program.as_str(), |(test, _)| test);
    format!("{VARIABLE}=write cargo test{package} --all-features --test {test} {backend}::runs_what_is_expected")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(lines: &[&str]) -> BTreeSet<String> {
        lines.iter().map(|line| (*line).to_owned()).collect()
    }

    #[test]
    fn what_was_written_is_expected() {
        let dir = tempfile::tempdir().expect("a directory");
        let (list, runs) = (dir.path().join("lists/store.txt"), set(&["1 cases run", "a::c: no fences"]));
        let missing = differences(&list, &runs).expect_err("there is no list");
        assert!(missing.contains("there is no list") && missing.contains("store.txt"), "{missing}");
        write(&list, &runs).expect("it can be written");
        assert_eq!(differences(&list, &runs), Ok(()));
    }

    #[test]
    fn what_vanished_appeared_or_is_ignored_now_is_told() {
        let dir = tempfile::tempdir().expect("a directory");
        let list = dir.path().join("store.txt");
        write(&list, &set(&["3 cases run", "a::gone: why", "a::same: why"])).expect("it can be written");
        let told = differences(&list, &set(&["2 cases run", "a::same: why", "a::turned: why"])).expect_err("all");
        let lines: Vec<_> = told.lines().skip(1).collect();
        assert_eq!(lines, ["-3 cases run", "-a::gone: why", "+2 cases run", "+a::turned: why"]);
    }
}
