//! What can be known of the servers of an ensemble: their versions, and how many there are.

use std::{io, sync::Arc, time::Duration};

use lockkit_core::{ErrorKind, Finding};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// A version: major, minor, patch.
type Version = (u32, u32, u32);
/// An issue, what it is about, and the versions that have it.
type Bug = (&'static str, &'static str, &'static [(Version, Version)]);

/// Bugs that lose transactions which were committed: the issue, in words, and the versions that have it, each from the
/// first up to but without the one that has the fix. From the release notes of 3.5.10, 3.6.3, 3.9.2, 3.9.3 and 3.9.4, and
/// for 3.8 from the branch (apache/zookeeper#2132). Of later versions of a line that a fix is not listed for, nothing is
/// said. All are about servers that join a leader: one server alone has none of them.
const BUGS: [Bug; 5] = [
    (
        "ZOOKEEPER-3642",
        "a leader that crashes while it sends a snapshot leaves a follower without the data in it",
        &[((3, 5, 0), (3, 5, 10))],
    ),
    (
        "ZOOKEEPER-3911",
        "a crash can lose what a follower was sent when it joined, although the leader counted it as kept",
        &[((3, 5, 0), (3, 5, 10)), ((3, 6, 0), (3, 6, 3))],
    ),
    (
        "ZOOKEEPER-4785",
        "a follower that restarts soon after it joined can lose committed transactions",
        &[((3, 7, 0), (3, 8, 4)), ((3, 9, 0), (3, 9, 2))],
    ),
    (
        "ZOOKEEPER-4712",
        "a follower that stops can end up with other data than the leader",
        &[((3, 8, 0), (3, 8, 5)), ((3, 9, 0), (3, 9, 3))],
    ),
    (
        "ZOOKEEPER-4925",
        "a leader that was behind when it joined can pass on a history with holes",
        &[((3, 9, 3), (3, 9, 4))],
    ),
];

/// The longest answer to a word that is read. That to `mntr` has hundreds of lines.
const LONGEST: u64 = 1 << 18;

/// What a server answers to the word `srvr`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Its version, and its role, such as `leader`.
    Serves { version: String, mode: String },
    /// It answers, but not that. In words.
    Silent(String),
    /// It can't be reached. In words.
    Away(String),
}

/// Asks a server, given as `host:port`.
pub(super) async fn ask(server: &str, bound: Duration) -> Answer {
    match timeout(bound, answer(server, "srvr")).await {
        Ok(Ok(answer)) => read(&answer),
        Ok(Err(e)) => Answer::Away(e.to_string()),
        Err(_) => Answer::Away(format!("no answer in {bound:?}")),
    }
}

/// The tick of a server, given as `host:port`; `None` if it does not tell.
pub(super) async fn tick(server: &str, bound: Duration) -> Option<Duration> {
    let answer = timeout(bound, answer(server, "conf")).await.ok()?.ok()?;
    let millis = answer.lines().find_map(|line| line.strip_prefix("tickTime="))?.trim().parse().ok()?;
    Some(Duration::from_millis(millis))
}

/// What a server says to one of its four-letter words.
pub(super) async fn answer(server: &str, word: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect(server).await?;
    stream.write_all(word.as_bytes()).await?;
    let mut answer = Vec::new();
    // Some servers hang up with a reset once they have said all.
    match stream.take(LONGEST).read_to_end(&mut answer).await {
        Err(e) if answer.is_empty() => Err(e),
        _ => Ok(String::from_utf8_lossy(&answer).into_owned()),
    }
}

fn read(answer: &str) -> Answer {
    let field = |name: &str| answer.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    match (field("Zookeeper version:"), field("Mode:")) {
        (Some(version), Some(mode)) => {
            let version = version.split(['-', ',']).next().unwrap_or(version).to_owned();
            Answer::Serves { version, mode: mode.to_owned() }
        }
        _ if answer.contains("whitelist") => Answer::Silent("the word srvr is not in its whitelist".to_owned()),
        _ => {
            let first = answer.lines().next().unwrap_or("it hung up").chars().take(100);
            Answer::Silent(first.map(|c| if c.is_control() { ' ' } else { c }).collect())
        }
    }
}

/// Judges the answers of all servers that are configured.
pub(super) fn judge(answers: &[(Arc<str>, Answer)]) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (server, answer) in answers {
        let found = match answer {
            Answer::Serves { version, mode } => judge_server(version, mode),
            Answer::Silent(why) if why.contains("whitelist") => {
                let summary = format!("its version could not be told: {why}");
                vec![Finding::note("server", summary, "add srvr to 4lw.commands.whitelist to let the doctor look")]
            }
            Answer::Silent(why) => {
                let summary = format!("it does not serve: {why}");
                vec![Finding::warning("server", summary, "an ensemble that lacks a server survives the loss of fewer")]
            }
            Answer::Away(why) => {
                let summary = format!("it can't be reached: {why}");
                vec![Finding::warning("server", summary, "an ensemble that lacks a server survives the loss of fewer")]
            }
        };
        findings.extend(found.into_iter().map(|finding| finding.at(server)));
    }
    findings
}

fn judge_server(version: &str, mode: &str) -> Vec<Finding> {
    let mut findings = vec![Finding::ok("server", format!("ZooKeeper {version}, {mode}"))];
    if mode == "read-only" {
        let summary = "the server has lost the others and only lets read: it grants no locks";
        findings.push(Finding::warning("read-only", summary, "find out why it can't reach a majority"));
    }
    let Some(version) = parse(version) else { return findings };
    if version < (3, 6, 0) {
        let summary = "the server does not know the question which nodes a session has (getEphemerals)";
        findings.push(Finding::error(ErrorKind::Unsupported, "version", summary, "upgrade to 3.8 or later"));
    }
    if mode == "standalone" {
        return findings;
    }
    for (issue, what, versions) in BUGS {
        if versions.iter().any(|(from, fixed)| (*from..*fixed).contains(&version)) {
            let advice = "upgrade; until then check fences at the resource";
            findings.push(Finding::warning("data-loss", format!("{issue}: {what}"), advice));
        }
    }
    findings
}

fn parse(version: &str) -> Option<Version> {
    let mut numbers = version.split('.').map_while(|number| number.parse().ok());
    Some((numbers.next()?, numbers.next()?, numbers.next()?))
}

/// Judges how many servers vote, by the node that describes the ensemble; `None` if it could not be read.
pub(super) fn judge_ensemble(config: Option<&str>) -> Finding {
    let Some(config) = config else {
        let summary = "the servers don't say how many they are";
        return Finding::note("ensemble", summary, "let lockkit read /zookeeper/config to let the doctor look");
    };
    let is_server = |line: &&str| line.trim_start().starts_with("server.") && !line.contains(":observer");
    match config.lines().filter(is_server).count() {
        0 | 1 => {
            let summary = "there is one server: without it nobody gets a lock, and with its disk all locks are gone";
            Finding::warning("ensemble", summary, "run three or five")
        }
        voters if voters.is_multiple_of(2) => {
            let summary = format!("{voters} servers vote: they survive the loss of no more than {} would", voters - 1);
            Finding::note("ensemble", summary, "run an odd number")
        }
        voters => Finding::ok("ensemble", format!("{voters} servers vote: {} may fail", (voters - 1) / 2)),
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::Severity;

    use super::*;

    #[test]
    fn answers_are_understood() {
        let answer = "Zookeeper version: 3.8.0-5a02a05eddb59aee6ac762f7ea82e92a68eb9c0f, built on 2022-02-25 08:49 UTC\n\
                      Latency min/avg/max: 0/0.0/0\nMode: follower\nNode count: 5\n";
        assert_eq!(read(answer), Answer::Serves { version: "3.8.0".into(), mode: "follower".into() });
        let refused = read("srvr is not executed because it is not in the whitelist.\n");
        assert!(matches!(&refused, Answer::Silent(why) if why.contains("whitelist")), "{refused:?}");
        let waiting = read("This ZooKeeper instance is not currently serving requests\n");
        assert!(matches!(&waiting, Answer::Silent(why) if why.contains("not currently")), "{waiting:?}");
    }

    #[test]
    fn a_server_that_does_not_tell_is_no_failure() {
        let judge_one = |answer| judge(&[("a:2181".into(), answer)]).remove(0);
        let silent = judge_one(read("srvr is not executed because it is not in the whitelist.\n"));
        assert_eq!((silent.severity, silent.server.as_deref()), (Severity::Note, Some("a:2181")));
        let waiting = judge_one(read("This ZooKeeper instance is not currently serving requests\n"));
        assert_eq!(waiting.severity, Severity::Warning);
    }

    #[test]
    fn bugs_are_named_by_their_issues() {
        let issues = |version: &str, mode: &str| {
            let found = judge_server(version, mode);
            let bugs = found.iter().filter(|finding| finding.code == "data-loss");
            bugs.map(|bug| bug.summary["ZOOKEEPER-".len()..][..4].to_owned()).collect::<Vec<_>>()
        };
        for (version, expected) in [
            ("3.5.9", ["3642", "3911"].as_slice()),
            ("3.6.2", &["3911"]),
            ("3.7.2", &["4785"]),
            ("3.8.0", &["4785", "4712"]),
            ("3.8.4", &["4712"]),
            ("3.8.6", &[]),
            ("3.9.1", &["4785", "4712"]),
            ("3.9.2", &["4712"]),
            ("3.9.3", &["4925"]),
            ("3.9.4", &[]),
        ] {
            assert_eq!(issues(version, "leader"), expected, "{version}");
            assert!(issues(version, "standalone").is_empty());
        }
        assert!(judge_server("3.5.10", "leader").iter().any(|finding| finding.severity == Severity::Error));
        assert!(judge_server("3.8.4", "read-only").iter().any(|finding| finding.code == "read-only"));
    }

    #[test]
    fn voters_are_counted() {
        let config = |servers: &[&str]| {
            let line = |(n, role): (usize, &&str)| format!("server.{n}=h{n}:2888:3888:{role};0.0.0.0:2181");
            let lines: Vec<_> = servers.iter().enumerate().map(line).collect();
            judge_ensemble(Some(&format!("{}\nversion=100000000", lines.join("\n")))).severity
        };
        assert_eq!(config(&[]), Severity::Warning);
        assert_eq!(config(&["participant", "observer"]), Severity::Warning);
        assert_eq!(config(&["participant"; 2]), Severity::Note);
        assert_eq!(config(&["participant", "participant", "participant", "observer"]), Severity::Ok);
        assert_eq!(judge_ensemble(None).severity, Severity::Note);
    }
}
