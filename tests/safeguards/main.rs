//! Every safeguard off, one at a time: a test must notice.
//!
//! The safeguards are in [`list`], with the test that is to notice. All are compiled into one copy of the workspace, with a
//! switch each, so that the tests run again and again without a build between. What this checkout holds is not touched.
//!
//! ```sh
//! cargo test --test safeguards                           # the list fits the source and the docs
//! cargo test --test safeguards -- --ignored --nocapture  # switches them off: minutes
//! LOCKKIT_SAFEGUARD=drift cargo test --test safeguards -- --ignored --nocapture   # only those with this in their names
//! LOCKKIT_EXPECTED=write cargo test --test safeguards    # writes the table in docs/testing.md anew
//! ```

mod belief;
mod build;
mod copy;
mod engine;
mod list;
mod migration;
mod mysql;
mod redis;
mod redlock;
mod zookeeper;

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    time::{Duration, Instant},
};

use self::{
    build::{Build, Ended, Test},
    list::{Safeguard, all},
};

#[test]
fn each_is_found_once_in_the_source() {
    let mut names = BTreeSet::new();
    for safeguard in all() {
        assert!(names.insert(safeguard.name), "{} is there twice", safeguard.name);
        let source = fs::read_to_string(copy::workspace().join(safeguard.file)).expect(safeguard.file);
        copy::switched(safeguard.file, &source);
    }
}

#[test]
fn the_docs_have_the_table() {
    let (file, begin, end) = (copy::workspace().join("docs/testing.md"), "<!-- safeguards -->\n", "<!-- end -->\n");
    let docs = fs::read_to_string(&file).expect("docs");
    let (before, rest) = docs.split_once(begin).expect("where the table begins");
    let (found, after) = rest.split_once(end).expect("where the table ends");
    let table = table();
    if env::var("LOCKKIT_EXPECTED").is_ok_and(|what| what == "write") {
        fs::write(&file, [before, begin, &table, end, after].concat()).expect("write");
    } else {
        assert!(found == table, "run LOCKKIT_EXPECTED=write cargo test --test safeguards; the table is now:\n{table}");
    }
}

fn table() -> String {
    let mut table = String::from("\n| safeguard | switched off in | noticed by |\n|---|---|---|\n");
    for Safeguard { does, file, noticed_by, .. } in all() {
        let (place, test) = noticed_by.split_once("::").expect("package/target::name");
        table += &format!("| {does} | `{file}` | `{test}` in `{place}` |\n");
    }
    table + "\n"
}

#[test]
#[ignore = "compiles a copy of the workspace and takes minutes"]
fn each_is_missed_by_a_test() {
    let only = env::var("LOCKKIT_SAFEGUARD").unwrap_or_default();
    let chosen: Vec<_> = all().filter(|safeguard| safeguard.name.contains(&only)).collect();
    let tests: BTreeSet<Test> = chosen.iter().map(|safeguard| Test::of(safeguard.noticed_by)).collect();
    let (start, build) = (Instant::now(), Build::of(&tests));
    println!("built in {:.0?}", start.elapsed());
    let (mut usual, mut unfit) = (BTreeMap::new(), Vec::new());
    for test in tests {
        let start = Instant::now();
        match build.run(&test, None, Duration::from_secs(300)) {
            Ended::Passed => drop(usual.insert(test, start.elapsed())),
            ended => unfit.push((test, ended)),
        }
    }
    assert!(unfit.is_empty(), "with all safeguards on: {unfit:#?}");
    let mut survivors = Vec::new();
    for safeguard in chosen {
        let test = Test::of(safeguard.noticed_by);
        let ended = build.run(&test, Some(safeguard.name), usual[&test]);
        println!("{}: {ended:?} ({})", safeguard.name, safeguard.noticed_by);
        if ended == Ended::Passed {
            survivors.push(safeguard.name);
        }
    }
    println!("all in {:.0?}", start.elapsed());
    assert!(survivors.is_empty(), "switched off, and not missed: {survivors:?}");
}
