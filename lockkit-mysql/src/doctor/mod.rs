//! Findings about a server, its table and this user: `lockkit doctor`.

mod workload;

use std::{
    collections::HashSet,
    time::{Duration, SystemTime},
};

use lockkit_core::{ClockOffset, Error, ErrorKind, Finding, Result, Severity, Token};

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::ConnectionClass,
        raw::Replicas,
        settings::{of_server, of_session},
    },
    config::MySqlConfig,
    store::{MySqlStore, schema},
    wire::{
        row::column,
        settings::{self, Settings},
        statements::{self, Statement},
    },
};

pub use workload::workload;

/// A row that was not used for this long can be removed, as `lockkit gc` does by default.
const UNUSED: Duration = Duration::from_secs(7 * 24 * 3600);
/// How many such rows are counted at most.
const MANY: u32 = 10_000;
/// How often a connection is checked for leading to the same session.
const LOOKS: usize = 5;

/// Looks at a server: whether it can keep locks, what puts them at risk, what this user may not do.
///
/// Nothing is changed: what is tried is tried with statements that find no row, and is rolled back should they.
///
/// # Errors
/// `InvalidInput` for a wrong configuration; `Misconfigured` for a database that does not exist; `Unavailable`, `TimedOut`
/// or `Denied` if the server can't be asked at all.
pub async fn diagnose(config: &MySqlConfig) -> Result<Vec<Finding>> {
    let store = MySqlStore::on(Replicas::Admitted, config.clone())?;
    let doctor = Doctor { store: &store, config };
    doctor.examine().await.map_err(|e| e.at("examine", None, &store.info.name))
}

struct Doctor<'a> {
    store: &'a MySqlStore,
    config: &'a MySqlConfig,
}

impl Doctor<'_> {
    async fn examine(&self) -> Result<Vec<Finding>> {
        let first = self.store.pool.first_connection(self.config, Bound::new(self.store.timeout)).await;
        let settings = of_server(&mut first?).await?;
        let mut findings = vec![Finding::ok("server", identity(&settings))];
        findings.extend(settings::judge(&settings));
        if findings.iter().all(|finding| finding.code != "durability") {
            findings.push(Finding::ok("durability", "commits are on disk before they are answered"));
        }
        findings.push(self.session().await?);
        findings.extend(proxy(&settings));
        findings.extend(self.replication(brand(&settings) == MARIADB).await?);
        findings.extend(connections(&settings, self.config));
        findings.extend(idle(&settings));
        findings.extend(self.password());
        findings.extend(self.table().await?);
        findings.push(self.clock().await?.finding());
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Ok(findings)
    }

    /// A connection for one question: after an error it is not used again.
    async fn connection(&self) -> Result<Connection> {
        self.store.pool.connection(ConnectionClass::Common, Bound::new(self.store.timeout)).await
    }

    /// Whether one connection is one session, in which what was set holds.
    async fn session(&self) -> Result<Finding> {
        let mut connection = self.connection().await?;
        let mark = Token::random()?.reveal();
        connection.execute(|_| sqlx::query("SET @lockkit_doctor = ?").bind(&mark), None).await?;
        let (mut sessions, mut keeps) = (HashSet::new(), true);
        for _ in 0..LOOKS {
            let look = sqlx::query("SELECT CAST(CONNECTION_ID() AS UNSIGNED), CAST(@lockkit_doctor AS CHAR)");
            for row in connection.rows(look).await? {
                sessions.insert(column::<u64>(&row, 0)?);
                keeps &= column::<Option<String>>(&row, 1)?.as_deref() == Some(mark.as_str());
            }
        }
        let settings = of_session(&mut connection).await?;
        Ok(judge_session(sessions.len() == 1 && keeps, &settings))
    }

    async fn replication(&self, mariadb: bool) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let mut connection = self.connection().await?;
        match connection.rows(sqlx::query("SHOW REPLICA STATUS")).await {
            Ok(rows) if rows.is_empty() => {}
            Ok(_) => {
                let summary = "the server is a replica of another, and takes writes: they are not seen there";
                let advice = "use the primary; if each replicates from the other, let all clients use one of the two";
                findings.push(Finding::warning("replica", summary, advice));
            }
            Err(e) if e.is_retryable() => return Err(e),
            Err(_) => {
                let summary = "the user may not see the replication: whether a failover can lose locks is not known";
                let advice = "REPLICATION CLIENT, or REPLICA MONITOR on MariaDB, lets the doctor look";
                return Ok(vec![Finding::note("replication", summary, advice)]);
            }
        }
        let replicas = self.replicas(mariadb).await?;
        if replicas > 0 {
            let summary = format!("replicas are attached ({replicas}): a failover can give away locks that are held");
            let advice = "replication is not synchronous: check fences at the resource";
            findings.push(Finding::warning("replicas", summary, advice));
        }
        Ok(findings)
    }

    /// How many replicas are attached; none if the user may not ask, which takes yet another permission.
    async fn replicas(&self, mariadb: bool) -> Result<usize> {
        // MySQL does not prepare SHOW REPLICAS, and MariaDB runs without the performance schema by default.
        let ask = if mariadb {
            "SHOW REPLICA HOSTS"
        } else {
            "SELECT thread_id FROM performance_schema.threads WHERE processlist_command LIKE 'Binlog Dump%'"
        };
        match self.connection().await?.rows(sqlx::query(ask)).await {
            Ok(rows) => Ok(rows.len()),
            Err(e) if e.is_retryable() => Err(e),
            Err(_) => Ok(0),
        }
    }

    fn password(&self) -> Option<Finding> {
        let summary = "the server asks for no password: every client that reaches it can take and release every lock";
        let advice = "make a user for lockkit, with a password, and rights on its table alone";
        self.config.password.is_none().then(|| Finding::note("password", summary, advice))
    }

    /// The table, and what this user may do with it.
    async fn table(&self) -> Result<Vec<Finding>> {
        let mut findings = schema::examine(&mut self.connection().await?, self.config).await?;
        let name = &self.config.table;
        if findings.iter().any(|finding| finding.code == "table") && !self.may("SELECT 1 FROM {} LIMIT 0").await? {
            // The server hides what one may not see.
            let summary = format!("the user has no rights on the table {name}, if there is one");
            return Ok(vec![missing_rights(summary, &["SELECT", "INSERT", "UPDATE"], name)]);
        }
        if !findings.is_empty() {
            return Ok(findings);
        }
        findings.push(Finding::ok("table", format!("the table {name} is as lockkit needs it")));
        findings.extend(self.rights().await?);
        if findings.iter().all(|finding| finding.severity != Severity::Error) {
            findings.extend(schema::no_claims(&mut self.connection().await?, self.config).await?);
        }
        findings.extend(self.unused().await?);
        Ok(findings)
    }

    /// What the user may do, found out by statements that find nothing to change. They name the columns that lockkit
    /// writes, for rights can be granted for columns.
    async fn rights(&self) -> Result<Vec<Finding>> {
        let mut missing = Vec::new();
        for (right, statement) in [
            ("SELECT", "SELECT * FROM {} LIMIT 0"),
            (
                "INSERT",
                "INSERT INTO {} (resource_name, create_time, update_time) \
                 SELECT '', UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) FROM DUAL WHERE 1 = 0",
            ),
            (
                "UPDATE",
                "UPDATE {} SET token = NULL, node_info = '', fence = 0, span = 0, fence_last = 0, `count` = 0, \
                 expires = NULL, version = 0, update_time = UTC_TIMESTAMP(6) WHERE 1 = 0",
            ),
        ] {
            if !self.may(statement).await? {
                missing.push(right);
            }
        }
        let name = &self.config.table;
        let mut findings = Vec::new();
        if !missing.is_empty() {
            let summary = format!("the user may not {} in the table {name}", missing.join(", "));
            findings.push(missing_rights(summary, &missing, name));
        }
        if !self.may("DELETE FROM {} WHERE 1 = 0").await? {
            let summary = "the user may not DELETE: rows of locks that nobody uses stay";
            findings.push(Finding::note(
                "gc",
                summary,
                format!("GRANT DELETE ON {name}, or run `lockkit gc` as another user"),
            ));
        }
        if findings.is_empty() {
            findings.push(Finding::ok("access", "the user may do all that lockkit does"));
        }
        Ok(findings)
    }

    /// Whether the server takes a statement on the table, for which it has `{}`; a refusal for another reason than that
    /// the user may not counts as yes.
    async fn may(&self, statement: &str) -> Result<bool> {
        let text = statement.replace("{}", &self.store.statements.table);
        let statement: Statement = sqlx::query(sqlx::AssertSqlSafe(text));
        match self.connection().await?.execute(|_| statement, None).await {
            Err(e) if e.kind() == ErrorKind::Denied => Ok(false),
            Err(e) if matches!(e.kind(), ErrorKind::TimedOut) => Err(e),
            _ => Ok(true),
        }
    }

    /// Rows that were not used for a week.
    async fn unused(&self) -> Result<Option<Finding>> {
        let micros = i64::try_from(UNUSED.as_micros()).unwrap_or(i64::MAX);
        // It may read the whole table.
        let text = format!("SELECT id FROM {} WHERE {} LIMIT ?", self.store.statements.table, statements::UNUSED);
        let idle = sqlx::query(sqlx::AssertSqlSafe(text)).bind(micros).bind(true).bind(MANY);
        let rows = match self.connection().await?.rows(idle).await {
            Ok(rows) => rows.len(),
            // A table so large that it takes longer than an operation may.
            Err(e) if e.kind() == ErrorKind::TimedOut => usize::MAX,
            Err(e) if e.kind() == ErrorKind::Denied => 0,
            Err(e) => return Err(e),
        };
        let summary = match rows {
            0 => return Ok(None),
            usize::MAX => "the table is too large to count the rows that nobody uses".to_owned(),
            rows if rows >= MANY as usize => format!("more than {MANY} rows of locks were not used for a week"),
            rows => format!("rows of locks that were not used for a week: {rows}"),
        };
        let advice = if self.config.keep_rows {
            "`lockkit gc` removes them; nothing depends on it but the size"
        } else {
            "those of leases go by themselves as new names are used, and `lockkit gc` removes all; nothing depends on it but the size"
        };
        Ok(Some(Finding::note("unused", summary, advice)))
    }

    async fn clock(&self) -> Result<ClockOffset> {
        let mut connection = self.connection().await?;
        let ask = "SELECT CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) AS SIGNED)";
        // Once for the server to prepare it, which takes a while.
        connection.rows(sqlx::query(ask)).await?;
        let sent = SystemTime::now();
        let rows = connection.rows(sqlx::query(ask)).await?;
        let received = SystemTime::now();
        let odd = || Error::new(ErrorKind::Unexpected, "the server does not tell the time");
        Ok(ClockOffset::measured(sent, received, column(rows.first().ok_or_else(odd)?, 0)?, 1))
    }
}

const MARIADB: &str = "MariaDB";

fn brand(settings: &Settings) -> &'static str {
    if settings.get("version").contains(MARIADB) { MARIADB } else { "MySQL" }
}

/// Its brand and version, without what distributions add.
fn identity(settings: &Settings) -> String {
    let version = settings.get("version").trim_start_matches("5.5.5-");
    format!("{} {}", brand(settings), version.split('-').next().unwrap_or(version))
}

fn missing_rights(summary: String, rights: &[&str], table: &str) -> Finding {
    Finding::error(ErrorKind::Denied, "access", summary, format!("GRANT {} ON {table}", rights.join(", ")))
}

fn judge_session(is_one: bool, settings: &Settings) -> Finding {
    if !is_one {
        let summary = "the statements of one connection reach several sessions: a proxy in between distributes them";
        let advice = "connect to the server itself, or turn off multiplexing and pooling by transaction";
        return Finding::error(ErrorKind::Unsupported, "proxy", summary, advice);
    }
    let isolation = [settings.get("transaction_isolation"), settings.get("tx_isolation")].concat();
    if isolation.starts_with("READ-COMMITTED") && settings.is_on("autocommit") && settings.get("time_zone") == "+00:00"
    {
        return Finding::ok("session", "each connection uses READ COMMITTED, autocommit and UTC");
    }
    let (autocommit, zone) = (settings.get("autocommit"), settings.get("time_zone"));
    let summary = format!(
        "the settings of a connection do not hold: isolation {isolation}, autocommit {autocommit}, time zone {zone}"
    );
    let advice = "connect to the server itself: a proxy in between drops SET statements";
    Finding::error(ErrorKind::Unsupported, "session", summary, advice)
}

fn proxy(settings: &Settings) -> Option<Finding> {
    let said = [settings.get("version"), settings.get("version_comment")].join(" ").to_lowercase();
    let name = ["proxysql", "maxscale"].into_iter().find(|name| said.contains(name))?;
    let summary = format!("{name} answers in place of the server");
    let advice = "make sure that it sends no reads to replicas, and keeps a connection in one session";
    Some(Finding::warning("proxy", summary, advice))
}

fn connections(settings: &Settings, config: &MySqlConfig) -> Option<Finding> {
    let wanted = i64::from(config.connections);
    let limit = |name| settings.number(name).filter(|limit| *limit > 0 && *limit < wanted).map(|limit| (name, limit));
    let (name, limit) = limit("max_connections").or_else(|| limit("max_user_connections"))?;
    let summary = format!("a store opens up to {wanted} connections, and {name} is {limit}");
    Some(Finding::warning("connections", summary, "raise it, or lower the option connections"))
}

fn idle(settings: &Settings) -> Option<Finding> {
    let seconds = settings.number("wait_timeout").filter(|seconds| *seconds < 60)?;
    let summary = format!("the server closes connections that are idle for {seconds} s");
    let advice = "lockkit reconnects when needed; a longer wait_timeout saves that round trip";
    Some(Finding::note("idle", summary, advice))
}

#[cfg(test)]
mod tests {
    use lockkit_core::Severity;

    use super::*;

    fn settings(all: &[(&str, &str)]) -> Settings {
        all.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_connection_that_is_not_one_session_is_an_error() {
        let good = settings(&[("tx_isolation", "READ-COMMITTED"), ("autocommit", "ON"), ("time_zone", "+00:00")]);
        assert_eq!(judge_session(true, &good).severity, Severity::Ok);
        assert_eq!(judge_session(false, &good).code, "proxy");
        let lost = settings(&[("tx_isolation", "REPEATABLE-READ"), ("autocommit", "ON"), ("time_zone", "+00:00")]);
        let found = judge_session(true, &lost);
        assert_eq!((found.severity, found.code), (Severity::Error, "session"));
        assert!(found.summary.contains("REPEATABLE-READ"));
    }

    #[test]
    fn a_server_is_named_in_short() {
        for (version, name) in [
            ("10.11.19-MariaDB-0+deb12u1", "MariaDB 10.11.19"),
            ("5.5.5-10.6.2-MariaDB", "MariaDB 10.6.2"),
            ("9.7.4", "MySQL 9.7.4"),
        ] {
            assert_eq!(identity(&settings(&[("version", version)])), name);
        }
    }

    #[test]
    fn a_proxy_that_says_so_is_found() {
        assert!(proxy(&settings(&[("version_comment", "(ProxySQL)")])).is_some());
        assert!(proxy(&settings(&[("version", "10.6.2-MaxScale")])).is_some());
        assert!(proxy(&settings(&[("version", "10.11.1-MariaDB"), ("version_comment", "Debian 12")])).is_none());
    }
}
