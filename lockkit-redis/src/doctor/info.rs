//! What the answer to `INFO`, and the settings that it does not show, mean for locks.

use std::collections::HashMap;

use lockkit_core::{ErrorKind, Finding};

use crate::wire::server::{field, pauses_fsync, version};

/// A replica that has acknowledged nothing for so many seconds is late; they do so every second.
const LATE: u64 = 3;

pub(super) fn identity(info: &str) -> Vec<Finding> {
    let (redis, valkey) = (field(info, "redis_version"), field(info, "valkey_version"));
    let (brand, text) = if valkey.is_empty() { ("Redis", redis) } else { ("Valkey", valkey) };
    let mut findings = vec![Finding::ok("server", format!("{brand} {text}, {}", field(info, "role")))];
    // Fixed in these, and in all that came after the last of them.
    let fixed: &[(u32, u32, u32)] = match brand {
        "Redis" => &[(6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)],
        _ => &[(7, 2, 11), (8, 0, 6), (8, 1, 4)],
    };
    if version(text).is_some_and(|version| is_older(version, fixed)) {
        let summary = format!("{brand} {text} has CVE-2025-49844: whoever may run scripts can take over the server");
        let advice = "upgrade, unless your distribution has patched it without changing the version";
        findings.push(Finding::note("cve", summary, advice));
    }
    findings
}

/// Whether a version comes before the one with a fix in its own line, or has none there and comes before the last one.
fn is_older(version: (u32, u32, u32), fixed: &[(u32, u32, u32)]) -> bool {
    let line = |of: (u32, u32, u32)| (of.0, of.1);
    match fixed.iter().find(|fix| line(**fix) == line(version)) {
        Some(fix) => version < *fix,
        None => fixed.last().is_some_and(|last| version < *last),
    }
}

pub(super) fn persistence(info: &str, settings: Option<&HashMap<String, String>>) -> Vec<Finding> {
    let setting = |name: &str| settings.and_then(|settings| settings.get(name)).map(String::as_str);
    let advice = "appendonly yes and appendfsync always keep every lock; else check fences at the resource";
    let mut findings = vec![match (field(info, "aof_enabled"), setting("appendfsync"), setting("save")) {
        ("1", Some("always"), _) if pauses_fsync(settings) => {
            let summary =
                "no-appendfsync-on-rewrite is yes: a crash of the machine during a rewrite or a snapshot loses locks";
            Finding::note("persistence", summary, "set no-appendfsync-on-rewrite to no")
        }
        ("1", Some("always"), _) => Finding::ok("persistence", "every write is on disk before it is answered"),
        ("1", Some("everysec"), _) => {
            let summary = "appendfsync is everysec: a crash of the machine loses the locks of the last second or two";
            Finding::note("persistence", summary, advice)
        }
        ("1", Some(policy), _) => {
            let summary = format!("appendfsync is {policy}: a crash of the machine loses the latest locks");
            Finding::warning("persistence", summary, advice)
        }
        ("1", None, _) => {
            let summary = "the user may not use CONFIG: how soon writes are on disk is not known";
            Finding::note("persistence", summary, "look at appendfsync")
        }
        (_, _, Some("")) => {
            Finding::warning("persistence", "nothing is kept on disk: a restart frees every lock that is held", advice)
        }
        (_, _, Some(_)) => {
            let summary = "only snapshots are kept on disk: a crash frees locks that are held";
            Finding::warning("persistence", summary, advice)
        }
        _ => {
            let summary = "nothing but perhaps snapshots is kept on disk: a crash frees locks that are held";
            Finding::warning("persistence", summary, advice)
        }
    }];
    for (what, name) in [("snapshot", "rdb_last_bgsave_status"), ("write of the log", "aof_last_write_status")] {
        if field(info, name) == "err" {
            let summary = format!("the last {what} to disk failed: the server may refuse writes");
            findings.push(Finding::warning("disk", summary, "look into its log: the disk may be full"));
        }
    }
    findings
}

pub(super) fn replicas(info: &str) -> Option<Finding> {
    let replicas = field(info, "connected_slaves").parse::<u32>().ok().filter(|replicas| *replicas > 0)?;
    let summary = format!("replicas are attached ({replicas}): a failover can give away locks that are held");
    let advice = "replication is asynchronous: check fences at the resource, or use a Redlock quorum";
    Some(Finding::warning("replicas", summary, advice))
}

/// As many as the URL asks for have to acknowledge every grant.
pub(super) fn confirming(info: &str, wanted: u32) -> Option<Finding> {
    let attached = field(info, "connected_slaves").parse::<u32>().unwrap_or(0);
    let summary = format!(
        "{attached} of the {wanted} replicas are attached that have to confirm each grant: no lock can be taken"
    );
    let advice = "bring the others back, or ask for fewer (replicas=)";
    (attached < wanted).then(|| Finding::error(ErrorKind::Unavailable, "replicas", summary, advice))
}

/// That INFO is refused is worse where servers can take over from each other.
pub(super) fn needed(refused: &mut Finding) {
    let summary = "the user may not use INFO: no lock can be taken, for every script asks who is in charge";
    *refused = Finding::error(ErrorKind::Denied, refused.code, summary, refused.advice.clone());
}

/// Replicas of a server that another may take the place of. Somebody should be able to.
pub(super) fn followers(info: &str) -> Finding {
    // `slave0:ip=10.0.0.2,port=6379,state=online,offset=14,lag=1`
    let lines = info.lines().filter(|line| line.starts_with("slave") && line.contains(":ip="));
    let followers: Vec<HashMap<&str, &str>> = lines
        .filter_map(|line| line.trim().split_once(':'))
        .map(|(_, fields)| fields.split(',').filter_map(|field| field.split_once('=')).collect())
        .collect();
    if followers.is_empty() {
        let summary = "no replica is attached: nobody can take over, and its locks stop with it";
        return Finding::warning("replicas", summary, "attach one, on another machine");
    }
    let text = |of: &HashMap<&str, &str>, name| (*of.get(name).unwrap_or(&"")).to_owned();
    let late = |of: &HashMap<&str, &str>| match text(of, "lag").parse() {
        _ if text(of, "state") != "online" => Some(format!("is not in sync ({})", text(of, "state"))),
        Ok(seconds @ LATE..) => Some(format!("has acknowledged nothing for {seconds} s")),
        _ => None,
    };
    match followers.iter().find_map(|of| late(of).map(|why| format!("{}:{} {why}", text(of, "ip"), text(of, "port")))) {
        Some(late) => {
            let summary = format!("the replica {late}: it would lack the latest fences if it took over");
            Finding::warning("replicas", summary, "look into its log, and at the network between the two")
        }
        None => Finding::ok("replicas", format!("replicas that follow: {}", followers.len())),
    }
}

pub(super) fn connections(info: &str) -> Option<Finding> {
    let (used, most) = (field(info, "connected_clients").parse::<u64>(), field(info, "maxclients").parse::<u64>());
    let (used, most) = (used.ok()?, most.ok().filter(|most| *most > 0)?);
    let summary = format!("{used} of {most} connections are in use");
    (used * 10 >= most * 9)
        .then(|| Finding::warning("connections", summary, "raise maxclients, or find who leaks them"))
}

pub(super) fn idle(settings: Option<&HashMap<String, String>>) -> Option<Finding> {
    let seconds = settings?.get("timeout")?.parse::<u64>().ok().filter(|seconds| *seconds > 0)?;
    let summary = format!("the server closes connections that are idle for {seconds} s");
    let advice = "lockkit connects anew when it is needed; timeout 0 saves that round trip";
    Some(Finding::note("idle", summary, advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fix_counts_in_its_own_line() {
        let fixed = [(6, 2, 20), (7, 2, 11), (8, 2, 2)];
        for (version, older) in [
            ((6, 2, 19), true),
            ((6, 2, 20), false),
            ((7, 0, 15), true),
            ((7, 2, 11), false),
            ((8, 2, 1), true),
            ((8, 4, 0), false),
        ] {
            assert_eq!(is_older(version, &fixed), older, "{version:?}");
        }
    }

    #[test]
    fn what_info_shows_is_judged() {
        let code = |finding: Option<Finding>| finding.map(|finding| finding.code);
        assert_eq!(code(connections("connected_clients:95\r\nmaxclients:100\r\n")), Some("connections"));
        assert_eq!(code(connections("connected_clients:5\r\nmaxclients:100\r\n")), None);
        let findings = persistence("aof_enabled:0\r\nrdb_last_bgsave_status:err\r\n", None);
        assert_eq!(findings.iter().map(|finding| finding.code).collect::<Vec<_>>(), ["persistence", "disk"]);
    }
}
