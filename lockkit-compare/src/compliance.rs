//! The compliance suite of the test kit on the stores that are compared.

use std::sync::Arc;

use lockkit_testkit::{Backend, Subject, check};

use crate::results::Counts;

/// Runs every case that applies, on locks whose names start with `under`, and calls `done` after each.
///
/// The cases that harm a server are left to the tests: a comparison may run on servers that are in use.
pub(crate) async fn compliance(backend: Arc<dyn Backend>, under: &str, mut done: impl FnMut() + Send) -> Counts {
    let subject = match Subject::new(backend).await {
        Ok(subject) => subject.under(under),
        Err(error) => return Counts { passed: 0, ignored: 0, failures: vec![format!("it can't be opened: {error}")] },
    };
    let report = check(&subject, |_| done()).await;
    Counts {
        passed: report.passed(),
        ignored: report.ignored().count(),
        failures: report.failed().map(|(case, seen)| format!("{}: {}", case.name, first_line(seen))).collect(),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
