//! Guarantee by guarantee, each with what shows it on this page. No I/O.

use std::collections::BTreeSet;

use maud::{Markup, html};

use crate::report::{Cases, Facts, Report};

/// A guarantee: what it is called, the compliance cases that are about it, and what a store says.
struct Guarantee {
    title: &'static str,
    /// Groups of cases.
    evidence: &'static [&'static str],
    says: fn(&Facts) -> String,
}

const GUARANTEES: [Guarantee; 10] = [
    Guarantee {
        title: "Two never hold the lock at once, in all contests here",
        evidence: &[],
        says: |facts| match facts.overlaps {
            Some(0) => "none seen".into(),
            Some(times) => format!("{times} overlaps"),
            None => "not measured".into(),
        },
    },
    Guarantee { title: "Fences grow", evidence: &["fencing"], says: |facts| fencing(&facts.traits.fencing).into() },
    Guarantee {
        title: "The lease of a holder that is gone ends by",
        evidence: &["expiry"],
        says: |facts| facts.traits.liveness.clone(),
    },
    Guarantee {
        title: "A lock when a server loses data that it had confirmed",
        evidence: &[],
        says: |facts| facts.after_loss().text().into(),
    },
    Guarantee { title: "Strict order of arrival", evidence: &["fairness"], says: |facts| yes(facts.traits.fifo) },
    Guarantee { title: "Readers and writers", evidence: &["modes"], says: |facts| yes(facts.traits.shared) },
    Guarantee {
        title: "A writer becomes a reader without a gap",
        evidence: &["modes"],
        says: |facts| yes(facts.traits.downgrades),
    },
    Guarantee { title: "Semaphores", evidence: &["modes"], says: |facts| yes(facts.traits.permits) },
    Guarantee {
        title: "Leases that outlive their process",
        evidence: &["lifecycle"],
        says: |facts| yes(facts.traits.resume),
    },
    Guarantee { title: "A job once per window", evidence: &["window"], says: |facts| yes(facts.traits.keeps) },
];

fn yes(it_has: bool) -> String {
    if it_has { "yes" } else { "no" }.to_owned()
}

/// What `Fencing` says, in words.
fn fencing(name: &str) -> &str {
    match name {
        "Strict" => "always",
        "Hybrid" => "also after a loss of data, unless the clock was set back, too",
        "BestEffort" => "as long as nothing is lost",
        _ => "no",
    }
}

/// The table of guarantees.
pub(super) fn guarantees(report: &Report) -> Markup {
    html! {
        section #guarantees aria-labelledby="guarantees-title" {
            h2 #guarantees-title { "Guarantees" }
            p { "What each store promises. Where something was seen of it here, the cell leads there." }
            div.wide tabindex="0" role="region" aria-labelledby="guarantees-title" {
                table {
                    thead { tr { td {} @for (store, _) in report.own() { th scope="col" { (store) } } } }
                    @for guarantee in &GUARANTEES {
                        tr {
                            th scope="row" { (guarantee.title) }
                            @for (_, facts) in report.own() { td.words { (cell(guarantee, facts, report)) } }
                        }
                    }
                    tr {
                        th scope="row" { "Compliance cases" }
                        @for (_, facts) in report.own() { td.words { (all_cases(facts)) } }
                    }
                }
            }
        }
    }
}

/// Where the page shows whether a lock let two in, if it does.
fn seen_at(report: &Report) -> Option<&'static str> {
    let has_row = report.rows.iter().any(|row| row.id == "violations");
    if has_row { Some("#violations") } else { (!report.timelines.is_empty()).then_some("#timelines") }
}

fn cell(guarantee: &Guarantee, facts: &Facts, report: &Report) -> Markup {
    let (seen_at, has_faults) = (seen_at(report), !report.timelines.is_empty());
    let text = (guarantee.says)(facts);
    let mut seen = Cases::default();
    for name in guarantee.evidence {
        if let Some(cases) = facts.cases.get(name) {
            seen = Cases {
                passed: seen.passed + cases.passed,
                failed: seen.failed + cases.failed,
                ignored: seen.ignored + cases.ignored,
            };
        }
    }
    let group = guarantee.evidence.iter().find(|name| facts.cases.contains_key(*name));
    html! {
        @if guarantee.evidence.is_empty() {
            @if guarantee.title.starts_with("Two") {
                @match seen_at { Some(place) if facts.overlaps.is_some() => { a href=(place) { (text) } }, _ => { (text) } }
            } @else { a href=(if has_faults { "#timelines" } else { "#method" }) { (text) } }
        } @else {
            (text)
            @if let Some(group) = group {
                br;
                a.small href=(format!("#cases-{group}")) {
                    @if seen.passed + seen.failed == 0 { "none of " (seen.ignored) " cases applies" }
                    @else { (seen.passed) (if seen.passed == 1 { " case passed" } else { " cases passed" }) }
                    @if seen.failed > 0 { ", " strong.bad { (seen.failed) " failed" } }
                }
            }
        }
    }
}

fn all_cases(facts: &Facts) -> Markup {
    let (passed, failed) = facts.cases.values().fold((0, 0), |(p, f), cases| (p + cases.passed, f + cases.failed));
    html! {
        @if facts.cases.is_empty() { "not measured" }
        @else { a href="#cases" { (passed) " passed, " (failed) " failed" } }
    }
}

/// How the compliance cases went, by the rule that they are about.
pub(super) fn cases(report: &Report) -> Markup {
    let groups: BTreeSet<&str> = report.facts.iter().flat_map(|facts| facts.cases.keys().copied()).collect();
    html! {
        section #cases aria-labelledby="cases-title" {
            h2 #cases-title { "Compliance cases" }
            @if groups.is_empty() {
                p { "None was run." }
            } @else {
                p { "Passed and failed, by the rule that the cases are about. What a store does not offer, and what would harm a server, is "
                    "not counted. " code { "docs/cases.md" } " of lockkit describes each case." }
                div.wide tabindex="0" role="region" aria-labelledby="cases-title" {
                    table {
                        thead { tr { th scope="col" { "Rule" } @for (store, _) in report.own() { th scope="col" { (store) } } } }
                        @for group in &groups {
                            tr id=(format!("cases-{group}")) {
                                th scope="row" { (group) }
                                @for (_, facts) in report.own() { td { (counts(facts.cases.get(group).copied().unwrap_or_default())) } }
                            }
                        }
                    }
                }
                @for failure in &report.failures { p.bad { (failure) } }
            }
        }
    }
}

fn counts(cases: Cases) -> Markup {
    html! {
        @if cases.passed + cases.failed == 0 { "-" } @else { (cases.passed) }
        @if cases.failed > 0 { ", " strong.bad { (cases.failed) " failed" } }
    }
}
