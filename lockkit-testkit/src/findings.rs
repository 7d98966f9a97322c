//! What a doctor found, for tests of it.

use lockkit_core::{Finding, Severity};

/// The severity and the code of each.
#[must_use]
pub fn codes(findings: &[Finding]) -> Vec<(Severity, &'static str)> {
    findings.iter().map(|finding| (finding.severity, finding.code)).collect()
}

/// Those that are not among the usual ones.
#[must_use]
pub fn beyond(mut findings: Vec<Finding>, usual: &[(Severity, &str)]) -> Vec<Finding> {
    findings.retain(|finding| !usual.contains(&(finding.severity, finding.code)));
    findings
}

/// Expects one finding, which says this, and what to do.
///
/// # Panics
/// If there is none, another, or more than one.
#[track_caller]
pub fn only(findings: &[Finding], severity: Severity, code: &str, hint: &str) {
    let [finding] = findings else { panic!("not one finding but {findings:#?}") };
    assert_eq!((finding.severity, finding.code), (severity, code), "{finding:?}");
    assert!(finding.in_words().contains(hint), "{finding:?}");
    assert!(!finding.advice.is_empty());
}
