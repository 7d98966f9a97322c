//! The settings of a server, and what they say of locks on it.

use std::collections::HashMap;

use lockkit_core::{ErrorKind, Finding};

use crate::wire::error;

/// Zero, or on a server that is set to take no writes the error [`OUT_OF_RANGE`](crate::wire::error): a user with enough rights is not
/// refused there, and a process that was frozen does not know for how long its connection was not probed. Some servers give a number,
/// others a word. It costs no question of its own.
pub(crate) const WRITABLE: &str = "0 * (~0 + (CAST(@@GLOBAL.read_only AS CHAR) NOT IN ('0', 'OFF')))";

/// The settings that matter, quoted. Each kind of server has some of them.
pub(crate) const NAMES: &str = "'version', 'version_comment', 'read_only', 'super_read_only', 'innodb_flush_log_at_trx_commit', \
     'log_bin', 'sync_binlog', 'binlog_format', 'wsrep_on', 'group_replication_group_name', 'group_replication_single_primary_mode', \
     'max_connections', 'max_user_connections', 'wait_timeout', 'autocommit', 'transaction_isolation', 'tx_isolation', \
     'time_zone'";

/// Settings of a server or a session.
#[derive(Debug, Default)]
pub(crate) struct Settings(HashMap<String, String>);

impl Settings {
    /// The value; empty if the server has no such setting.
    pub(crate) fn get(&self, name: &str) -> &str {
        self.0.get(name).map_or("", String::as_str)
    }

    #[cfg(feature = "doctor")]
    pub(crate) fn number(&self, name: &str) -> Option<i64> {
        self.get(name).parse().ok()
    }

    pub(crate) fn is_on(&self, name: &str) -> bool {
        is_on(self.get(name))
    }
}

/// Whether a setting with this value is on. Some servers give a number, others a word; a missing setting is off.
pub(crate) fn is_on(value: &str) -> bool {
    !matches!(value, "" | "0" | "OFF")
}

impl FromIterator<(String, String)> for Settings {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(settings: I) -> Self {
        Self(settings.into_iter().collect())
    }
}

/// Judges a server: errors for what can't keep locks, warnings of what puts them at risk.
pub(crate) fn judge(settings: &Settings) -> Vec<Finding> {
    let fitness = [too_old(settings.get("version")), not_writable(settings), logs_statements(settings)];
    fitness.into_iter().flatten().chain(durability(settings)).chain(primaries(settings)).collect()
}

fn too_old(version: &str) -> Option<Finding> {
    let (least, brand) = if version.contains("MariaDB") { ((10, 6), "MariaDB 10.6") } else { ((8, 0), "MySQL 8.0") };
    let summary = format!("the server is too old: {version}");
    let advice = format!("lockkit needs {brand} or newer");
    (numbers(version) < least).then(|| Finding::error(ErrorKind::Unsupported, "version", summary, advice))
}

fn not_writable(settings: &Settings) -> Option<Finding> {
    let name = ["super_read_only", "read_only"].into_iter().find(|name| settings.is_on(name))?;
    Some(Finding::error(ErrorKind::Unavailable, "read-only", error::set_to(name), error::NEEDS_PRIMARY))
}

/// What is read as committed can't be logged as statements, and the server refuses each write.
fn logs_statements(settings: &Settings) -> Option<Finding> {
    let logs = settings.is_on("log_bin") && settings.get("binlog_format") == "STATEMENT";
    logs.then(|| {
        Finding::error(ErrorKind::Unsupported, "binlog-format", error::LOGS_STATEMENTS, error::SET_BINLOG_FORMAT)
    })
}

fn durability(settings: &Settings) -> Vec<Finding> {
    let mut findings = Vec::new();
    let flush = settings.get("innodb_flush_log_at_trx_commit");
    if flush != "1" {
        let summary = format!(
            "innodb_flush_log_at_trx_commit is {flush}: a crash of the server may lose the last second of locks, and \
             give a lock away that is still held"
        );
        findings.push(Finding::warning("durability", summary, "set it to 1, or check fences at the resource"));
    }
    let binlog = settings.get("sync_binlog");
    if settings.is_on("log_bin") && binlog != "1" {
        let summary = format!(
            "sync_binlog is {binlog}: a crash of the server may lose the last locks, and give one away that is still \
             held"
        );
        findings.push(Finding::warning("durability", summary, "set it to 1, or check fences at the resource"));
    }
    findings
}

/// Several servers that take writes at the same time.
fn primaries(settings: &Settings) -> Option<Finding> {
    let advice = "let all clients of the locks use one server, and check fences at the resource";
    if settings.is_on("wsrep_on") {
        let summary = "the server is a node of a Galera cluster (wsrep_on): other nodes may accept writes at the same time, \
                       and a certified write is not yet durable";
        return Some(Finding::warning("multi-primary", summary, advice));
    }
    if !settings.get("group_replication_group_name").is_empty()
        && !settings.is_on("group_replication_single_primary_mode")
    {
        let summary = "the server is a member of a group with several primaries: a lock that was taken at one may not \
                       be seen at another yet";
        return Some(Finding::warning("multi-primary", summary, advice));
    }
    None
}

/// Major and minor version; some MariaDB servers put `5.5.5-` in front for old clients.
fn numbers(version: &str) -> (u32, u32) {
    let mut numbers = version.trim_start_matches("5.5.5-").split(['.', '-']).map_while(|part| part.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use lockkit_core::Result;

    use super::*;

    fn admit(version: &str, others: &[(&str, &str)]) -> Result<Vec<String>> {
        let sound = [("version", version), ("innodb_flush_log_at_trx_commit", "1"), ("sync_binlog", "1")];
        let all = sound.iter().chain(others).map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Finding::admit(&judge(&all.collect()))
    }

    #[test]
    fn what_can_keep_locks_is_taken() {
        for good in ["10.11.19-MariaDB-0+deb12u1", "5.5.5-10.6.2-MariaDB", "9.7.4", "8.0.36-28.1", "11.4.2-MariaDB"] {
            assert!(
                admit(good, &[("read_only", "OFF"), ("log_bin", "ON"), ("wsrep_on", "OFF")]).expect(good).is_empty()
            );
        }
        for old in ["10.5.1-MariaDB", "5.7.44", "5.5.5-10.4.1-MariaDB"] {
            assert_eq!(admit(old, &[]).expect_err(old).kind(), ErrorKind::Unsupported);
        }
        assert_eq!(admit("9.7.4", &[("read_only", "ON")]).expect_err("replica").kind(), ErrorKind::Unavailable);
    }

    #[test]
    fn what_may_lose_locks_is_warned_of() {
        let warnings = |others: &[(&str, &str)]| admit("9.7.4", others).expect("works");
        let flush = ("innodb_flush_log_at_trx_commit", "2");
        assert_eq!(warnings(&[flush, ("log_bin", "ON"), ("sync_binlog", "0")]).len(), 2);
        assert_eq!(warnings(&[flush, ("log_bin", "OFF"), ("sync_binlog", "0")]).len(), 1);
    }

    #[test]
    fn several_primaries_are_warned_of() {
        let warnings = |others: &[(&str, &str)]| admit("9.7.4", others).expect("works");
        assert!(warnings(&[("wsrep_on", "ON")])[0].contains("Galera"));
        let group = ("group_replication_group_name", "aaaa");
        assert!(warnings(&[group, ("group_replication_single_primary_mode", "OFF")])[0].contains("several primaries"));
        assert!(warnings(&[group, ("group_replication_single_primary_mode", "ON")]).is_empty());
        assert!(warnings(&[("group_replication_group_name", "")]).is_empty());
    }
}
