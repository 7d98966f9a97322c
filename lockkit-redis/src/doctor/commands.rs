//! The commands that scripts call: whether this user may, and the server knows them.

use lockkit_core::{ErrorKind, Finding};

use crate::wire::access::Refusal;

/// Judges the answers of `probe.lua`. `user` is for advice.
pub(super) fn judge(user: &str, answers: &[String]) -> Vec<Finding> {
    let (mut denied, mut unknown, mut refused, mut not_shared) = (Vec::new(), Vec::new(), None, Vec::new());
    for answer in answers.chunks_exact(3) {
        let [command, error, which] = answer else { continue };
        let command = command.to_lowercase();
        match refusal(error) {
            Some(Refusal::Denied(_) | Refusal::Unknown(_)) if which == "queue" => not_shared.push(command),
            Some(Refusal::Denied(_)) => denied.push(command),
            Some(Refusal::Unknown(_)) => unknown.push(command),
            Some(Refusal::Other(why)) => refused = Some(why),
            None => {}
        }
    }
    let mut findings = Vec::new();
    if !denied.is_empty() {
        let summary = format!("the user may not use {} in scripts", denied.join(", "));
        let advice = format!("ACL SETUSER {user} +{}", denied.join(" +"));
        findings.push(Finding::error(ErrorKind::Denied, "commands", summary, advice));
    }
    if !unknown.is_empty() {
        let summary = format!("the server has no {}", unknown.join(", "));
        let advice = "undo rename-command for these: scripts call them by their names";
        findings.push(Finding::error(ErrorKind::Unsupported, "commands", summary, advice));
    }
    if !not_shared.is_empty() {
        let summary = format!("no readers, permits or order: {} can't be used in scripts", not_shared.join(", "));
        let advice = format!("where they are needed: ACL SETUSER {user} +{}", not_shared.join(" +"));
        findings.push(Finding::note("kinds", summary, advice));
    }
    if let Some(why) = refused {
        let summary = format!("the server refuses writes: {why}");
        let advice = "no lock can be taken until this is over; look into the server's log";
        findings.push(Finding::error(ErrorKind::Unavailable, "writes", summary, advice));
    }
    findings
}

/// An error that a command gave inside of a script, where every version words it in its own way. `None` if it is what
/// `probe.lua` provokes, or nothing.
fn refusal(error: &str) -> Option<Refusal> {
    let error = error.trim_start_matches('-').to_owned();
    let is = |marks: &[&str]| marks.iter().any(|mark| error.contains(mark));
    if error.is_empty() || is(&["invalid expire time", "not an integer"]) {
        None
    } else if is(&["can't run this command", "can't access at least", "ACL failure", "NOPERM", "no permissions"]) {
        Some(Refusal::Denied(error))
    } else if is(&["Unknown Redis command", "nknown command", "Unknown Valkey command"]) {
        Some(Refusal::Unknown(error))
    } else {
        Some(Refusal::Other(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wording_of_a_refusal_is_understood() {
        for denied in [
            "ERR The user executing the script can't run this command or subcommand",
            "ERR ACL failure in script: User app has no permissions to run the 'set' command",
            "NOPERM this user has no permissions to run the 'set' command",
            "The user executing the script can't access at least one of the keys mentioned in the command arguments",
        ] {
            assert!(matches!(refusal(denied), Some(Refusal::Denied(_))), "{denied}");
        }
        let unknown = "ERR Unknown Redis command called from script";
        assert!(matches!(refusal(unknown), Some(Refusal::Unknown(_))));
        assert!(matches!(refusal("-READONLY You can't write"), Some(Refusal::Other(_))));
        for fine in ["", "ERR invalid expire time in 'set' command", "ERR value is not an integer or out of range"] {
            assert_eq!(refusal(fine), None);
        }
    }
}
