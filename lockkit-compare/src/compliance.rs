//! The compliance suite of the test kit on the stores that are compared.

use std::{collections::BTreeMap, sync::Arc};

use lockkit_testkit::{Backend, Subject, Verdict, check};

use crate::results::Counts;

/// Runs every case that applies, on locks whose names start with `under`, and calls `done` after each.
///
/// The cases that harm a server are left to the tests: a comparison may run on servers that are in use.
pub(crate) async fn compliance(backend: Arc<dyn Backend>, under: &str, mut done: impl FnMut() + Send) -> Counts {
    let subject = match Subject::new(backend).await {
        Ok(subject) => subject.under(under),
        Err(error) => {
            let failures = vec![format!("it can't be opened: {error}")];
            return Counts { failures, ..Counts::default() };
        }
    };
    let report = check(&subject, |_| done()).await;
    let mut groups = BTreeMap::new();
    for checked in &report.cases {
        let group = checked.case.name.split("::").next().unwrap_or_default();
        let counts: &mut [usize; 3] = groups.entry(group).or_default();
        match checked.verdict {
            Verdict::Passed => counts[0] += 1,
            Verdict::Failed(_) => counts[1] += 1,
            Verdict::Ignored(_) => counts[2] += 1,
        }
    }
    Counts {
        passed: report.passed(),
        ignored: report.ignored().count(),
        failures: report.failed().map(|(case, seen)| format!("{}: {}", case.name, first_line(seen))).collect(),
        groups,
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
