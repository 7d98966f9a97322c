//! Several servers that belong together: all are looked at, and what was found is put together.

use lockkit_core::{Error, Finding, Result, Severity, said_once, store::join_all};

use super::{Doctor, Examination, Part, Patient};
use crate::{
    config::RedisConfig,
    wire::{address, name::Names, server::ServerFacts},
};

/// Looks at all servers at once, and adds what was found at each to what was found already.
///
/// # Errors
/// That of the first, if none of them can be asked, and asking again would not help.
pub(super) async fn examine(
    config: &RedisConfig,
    names: &Names,
    patients: &[Patient],
    mut findings: Vec<Finding>,
) -> Result<Examination> {
    let look = async |patient| Doctor::new(config, names, patient).examine().await;
    let looks = join_all(patients.iter().map(look)).await;
    if let Some(Err(refusal)) = looks.first()
        && looks.iter().all(|look| matches!(look, Err(e) if !e.is_retryable()))
    {
        return Err(refusal.clone());
    }
    let (mut each, mut asked, mut facts, mut clock) = (Vec::new(), 0, ServerFacts::default(), None);
    for (patient, look) in patients.iter().zip(looks) {
        let name = address::text(&patient.address).into();
        match look {
            Ok(look) => {
                asked += 1;
                if asked == 1 {
                    (facts, clock) = (look.facts, look.clock);
                }
                let told = look.findings.into_iter().filter_map(|finding| by_part(finding, patient.part));
                each.extend(told.map(|finding| finding.at(&name)));
            }
            Err(e) => findings.push(away(&e, patient.part).at(&name)),
        }
    }
    findings.extend(said_once(each, asked, "all servers"));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(Examination { findings, facts, clock })
}

/// A finding about a server as one about what it is to the others.
fn by_part(finding: Finding, part: Part) -> Option<Finding> {
    // Of what is well, who the servers are is enough.
    if finding.severity == Severity::Ok && finding.code != "server" {
        return None;
    }
    match (part, finding.code, finding.severity) {
        // That is what a replica is like.
        (Part::Successor, "role" | "writes", _) => None,
        (Part::Successor, code, Severity::Error) => {
            Some(Finding::warning(code, format!("once it takes over: {}", finding.summary), finding.advice))
        }
        _ => Some(finding),
    }
}

/// A server that can't be asked.
fn away(error: &Error, part: Part) -> Finding {
    let why = format!("it can't be asked: {}", error.message());
    let advice = if error.is_retryable() { "bring it back" } else { "correct the URL, or the server" };
    match part {
        Part::Successor => Finding::warning("member", format!("{why}; as it is it can't take over"), advice),
        Part::Alone | Part::Primary => {
            Finding::error(error.kind(), "member", format!("{why}; its locks can't be taken"), advice)
        }
    }
}
