//! The suite itself under test: stores that are wrong must fail, each in the cases that are there for its bug, and the
//! same store without a bug must pass them all.

use std::{collections::BTreeSet, process::ExitCode, sync::Arc};

use libtest_mimic::{Failed, Trial};
use lockkit_testkit::{
    BoxError, Subject, Verdict,
    broken::{Bug, Catch, SimpleBackend},
    cases, trials,
};

const DOCS: &str = include_str!("../../docs/testing.md");
const CASES: &str = include_str!("../../docs/cases.md");

fn main() -> ExitCode {
    let arguments = lockkit_testkit::arguments_of_idle_tests();
    // The sound store's machine runs here for as long as its trials do.
    let runtime = runtime().expect("a runtime");
    let sound = runtime.block_on(SimpleBackend::start(None)).expect("a port");
    let mut all = trials(Arc::new(sound)).expect("the store is there");
    for bug in Bug::ALL {
        all.extend(
            bug.caught_by()
                .iter()
                .map(|catch| Trial::test(format!("{bug:?}::{}", catch.case), move || must_fail(*bug, *catch))),
        );
    }
    all.push(Trial::test("the_docs_show_the_table", the_docs_show_the_table));
    all.push(Trial::test("the_docs_name_the_cases", the_docs_name_the_cases));
    all.push(Trial::test("the_docs_name_the_cases_that_no_bug_fails", the_docs_name_the_cases_that_no_bug_fails));
    all.push(Trial::test("no_catch_is_listed_twice", no_catch_is_listed_twice));
    libtest_mimic::run(&arguments, all).exit_code()
}

fn must_fail(bug: Bug, catch: Catch) -> Result<(), Failed> {
    let case = cases::all().into_iter().find(|case| case.name == catch.case).ok_or("there is no such case")?;
    let runtime = runtime()?;
    let verdict = runtime.block_on(async {
        let backend = SimpleBackend::start(Some(bug)).await?;
        Ok::<_, BoxError>(Subject::new(Arc::new(backend)).await?.run(case).await.verdict)
    })?;
    runtime.shutdown_background();
    match verdict {
        Verdict::Failed(message) if message.contains(catch.says) => Ok(()),
        Verdict::Failed(message) => {
            Err(format!("it failed, but for another reason than {:?}:\n{message}", catch.says).into())
        }
        Verdict::Passed => Err(format!("it passed, although: {}", bug.what()).into()),
        Verdict::Ignored(reason) => Err(format!("it was left out: {reason}").into()),
    }
}

fn the_docs_show_the_table() -> Result<(), Failed> {
    let table = Bug::table();
    if DOCS.contains(&table) { Ok(()) } else { Err(format!("docs/testing.md should contain\n{table}").into()) }
}

/// Every case is on the page, and every name on the page is a case.
fn the_docs_name_the_cases() -> Result<(), Failed> {
    let cases: BTreeSet<_> = cases::all().into_iter().map(|case| case.name).collect();
    let quoted = CASES.split('`').skip(1).step_by(2);
    let named: BTreeSet<_> = quoted.filter(|quoted| quoted.contains("::")).collect();
    let different: Vec<_> = cases.symmetric_difference(&named).collect();
    if different.is_empty() {
        Ok(())
    } else {
        Err(format!("docs/cases.md and the cases differ in {different:?}").into())
    }
}

/// A case is there for a bug that it names, or stands on the page among those that are not.
fn the_docs_name_the_cases_that_no_bug_fails() -> Result<(), Failed> {
    let caught: BTreeSet<_> = Bug::ALL.iter().flat_map(|bug| bug.caught_by()).map(|catch| catch.case).collect();
    let others: BTreeSet<_> =
        cases::all().into_iter().map(|case| case.name).filter(|case| !caught.contains(case)).collect();
    let (_, list) = DOCS.split_once("These cases no bug above fails:").ok_or("docs/testing.md has no list of them")?;
    let named: BTreeSet<_> = list.split("\n\n").next().unwrap_or_default().split('`').skip(1).step_by(2).collect();
    let different: Vec<_> = others.symmetric_difference(&named).collect();
    if different.is_empty() {
        Ok(())
    } else {
        Err(format!("docs/testing.md and the bugs differ in {different:?}").into())
    }
}

fn no_catch_is_listed_twice() -> Result<(), Failed> {
    for bug in Bug::ALL {
        let named: BTreeSet<_> = bug.caught_by().iter().map(|catch| catch.case).collect();
        if named.is_empty() || named.len() != bug.caught_by().len() {
            return Err(format!("{bug:?}").into());
        }
    }
    Ok(())
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}
