//! What `check` prints.

use std::time::Duration;

use lockkit_testkit::{Case, Checked, Verdict};
use serde_json::{Value, json};

use crate::{
    exit::Failure,
    show::{fit, plain, print, print_json, table},
};

/// How a store did.
#[derive(Debug)]
pub(super) struct Report {
    /// Its name, without secrets.
    pub(super) store: String,
    pub(super) cases: Vec<Checked>,
    pub(super) took: Duration,
    /// What stays in the store, a sentence each.
    pub(super) left: Vec<String>,
}

/// Prints the cases, with what each is about.
pub(super) fn list(cases: &[&Case]) -> Result<(), Failure> {
    let mut rows = table(&["CASE", "WHAT THE STORE MUST DO"]);
    fit(&mut rows);
    for case in cases {
        rows.add_row([case.name, case.doc]);
    }
    print(|out| writeln!(out, "{}", rows.trim_fmt()))
}

impl Report {
    pub(super) fn passed(&self) -> usize {
        self.count(|verdict| matches!(verdict, Verdict::Passed))
    }

    pub(super) fn failed(&self) -> usize {
        self.count(|verdict| matches!(verdict, Verdict::Failed(_)))
    }

    pub(super) fn ignored(&self) -> usize {
        self.count(|verdict| matches!(verdict, Verdict::Ignored(_)))
    }

    fn count(&self, is: impl Fn(&Verdict) -> bool) -> usize {
        self.cases.iter().filter(|checked| is(&checked.verdict)).count()
    }

    /// A table for people, and below it what it comes to.
    pub(super) fn print(&self) -> Result<(), Failure> {
        let mut rows = table(&["CASE", "RESULT", "TIME", "WHY"]);
        fit(&mut rows);
        for checked in &self.cases {
            let why = match &checked.verdict {
                Verdict::Passed => String::new(),
                // The rule, and what was seen of it.
                Verdict::Failed(seen) => format!("{} Seen: {}", checked.case.doc, one_line(seen)),
                Verdict::Ignored(reason) => one_line(reason),
            };
            let time = format!("{:.2} s", checked.took.as_secs_f64());
            rows.add_row([checked.case.name.to_owned(), result(&checked.verdict).to_owned(), time, plain(&why)]);
        }
        print(|out| {
            writeln!(out, "{}\n", rows.trim_fmt())?;
            let (passed, failed, ignored) = (self.passed(), self.failed(), self.ignored());
            let (store, seconds) = (plain(&self.store), self.took.as_secs_f64());
            writeln!(out, "{store}: {passed} passed, {failed} failed, {ignored} ignored, in {seconds:.1} s")?;
            self.left.iter().try_for_each(|left| writeln!(out, "Left in the store: {}", plain(left)))
        })
    }

    /// The same for scripts.
    pub(super) fn print_json(&self) -> Result<(), Failure> {
        print_json(&json!({
            "store": self.store,
            "passed": self.passed(),
            "failed": self.failed(),
            "ignored": self.ignored(),
            "seconds": self.took.as_secs_f64(),
            "left": self.left,
            "cases": self.cases.iter().map(to_json).collect::<Vec<_>>(),
        }))
    }
}

fn to_json(checked: &Checked) -> Value {
    let reason = match &checked.verdict {
        Verdict::Passed => Value::Null,
        Verdict::Failed(reason) | Verdict::Ignored(reason) => reason.as_str().into(),
    };
    json!({
        "case": checked.case.name,
        "doc": checked.case.doc,
        "result": result(&checked.verdict),
        "reason": reason,
        "seconds": checked.took.as_secs_f64(),
    })
}

fn result(verdict: &Verdict) -> &'static str {
    match verdict {
        Verdict::Passed => "passed",
        Verdict::Failed(_) => "failed",
        Verdict::Ignored(_) => "ignored",
    }
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
