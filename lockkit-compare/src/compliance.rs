//! The compliance suite of the test kit on the stores that are compared.

use std::sync::{Arc, Mutex};

use lockkit::store::unpoisoned;
use lockkit_testkit::{Backend, Checked, Subject, Verdict, cases};

use crate::results::Counts;

/// Runs every case that applies, on locks whose names start with `under`; enters what became of each in `seen`, so that it is
/// known also when this is cut short, and calls `done` after each.
///
/// The cases that harm a server are left to the tests: a comparison may run on servers that are in use.
pub(crate) async fn compliance(
    backend: Arc<dyn Backend>,
    under: &str,
    seen: &Mutex<Counts>,
    mut done: impl FnMut() + Send,
) {
    let subject = match Subject::new(backend).await {
        Ok(subject) => subject.under(under),
        Err(error) => {
            unpoisoned(seen).failures.push(format!("it can't be opened: {error}"));
            return;
        }
    };
    for case in cases::all() {
        let checked = subject.run(case).await;
        unpoisoned(seen).enter(&checked);
        done();
    }
}

impl Counts {
    fn enter(&mut self, checked: &Checked) {
        let name = checked.case.name;
        let of_group = self.groups.entry(name.split("::").next().unwrap_or_default()).or_default();
        match &checked.verdict {
            Verdict::Passed => {
                self.passed += 1;
                of_group[0] += 1;
            }
            Verdict::Failed(seen) => {
                self.failures.push(format!("{name}: {}", first_line(seen)));
                of_group[1] += 1;
            }
            Verdict::Ignored(_) => {
                self.ignored += 1;
                of_group[2] += 1;
            }
        }
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
