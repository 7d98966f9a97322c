//! All that can be told of a server and its settings: `lockkit doctor`.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime},
};

use lockkit_core::{ClockOffset, ErrorKind, Finding, Result};
use redis::{Pipeline, Value};

use crate::{
    access::{self, Subject},
    config::RedisConfig,
    error::{self, Sent},
    link::{Connection, Link},
    name::Names,
    scripts::{INSPECT, PROBE},
    server::{self, ServerFacts, field, version},
    slots,
    store::RedisStore,
};

/// The settings that matter and that `INFO` does not show.
const SETTINGS: [&str; 3] = ["appendfsync", "save", "timeout"];

/// What a look at a server brought up.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Examination {
    /// What was found, the worst first.
    pub findings: Vec<Finding>,
    /// What the server says of itself; empty if this user may not ask.
    pub facts: ServerFacts,
    /// Its clock, if this user may ask.
    pub clock: Option<ClockOffset>,
}

/// Looks at a server: whether it can keep locks, what puts them at risk, what this user may not do.
///
/// Nothing is changed: what is tried is tried under names that no lock can have, with requests that have no effect.
///
/// # Errors
/// `InvalidInput` for a wrong configuration; `Unavailable`, `TimedOut` or `Denied` if the server can't be asked at all.
pub async fn diagnose(config: &RedisConfig) -> Result<Vec<Finding>> {
    Ok(examine(config).await?.findings)
}

/// The same with what the findings were made of, for a quorum.
///
/// # Errors
/// As [`diagnose`].
pub async fn examine(config: &RedisConfig) -> Result<Examination> {
    let store = RedisStore::new(RedisConfig { vet: None, ..config.clone() })?;
    examine_all(&store, config.login.password.is_some()).await.map_err(|e| e.at("examine", None, &store.info.name))
}

/// Looks at all servers. What they have in common is said once.
async fn examine_all(store: &RedisStore, has_password: bool) -> Result<Examination> {
    let (as_cluster, mut all) = (store.nodes.is_cluster(), None::<Examination>);
    for node in store.nodes.all().await? {
        let doctor = Doctor { link: &node.link, names: &store.names, bound: store.timeout, has_password, as_cluster };
        let told = doctor.examine().await?;
        match &mut all {
            None => all = Some(told),
            Some(all) => {
                let news: Vec<_> = told.findings.into_iter().filter(|new| !all.findings.contains(new)).collect();
                all.findings.extend(news);
                all.findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
            }
        }
    }
    all.ok_or_else(slots::unserved)
}

/// What a server is asked when a store connects: whether it can keep locks; what its settings put at risk, in words.
///
/// # Errors
/// As [`RedisStore::connect`].
pub(crate) async fn check(link: &Link, names: &Names, bound: Duration, as_cluster: bool) -> Result<Vec<String>> {
    let connection = link.connection().await?;
    let (info, mut findings) = ask_info(link, &connection, bound).await?;
    findings.extend(server::judge(&info, as_cluster));
    findings.extend(isolation(link, &info));
    // A server that can't keep locks has nothing more to say.
    let mut warnings = Finding::admit(&findings)?;
    let subject = Subject::new(names, link.username())?;
    let replies = link.run_all(&connection, Some(&INSPECT), &subject.basics(), bound, Sent::ReadOnly).await?;
    warnings.extend(Finding::admit(&subject.judge_basics(replies))?);
    Ok(warnings)
}

/// What the server says of itself, or a warning that it does not.
async fn ask_info(link: &Link, connection: &Connection, bound: Duration) -> Result<(String, Vec<Finding>)> {
    let mut requests = Pipeline::new();
    requests.cmd("INFO");
    let replies = link.run_all(connection, None, &requests, bound, Sent::ReadOnly).await?;
    match replies.into_iter().next() {
        Some(Value::ServerError(e)) => match error::map(&e.into(), Sent::ReadOnly) {
            e if matches!(e.kind(), ErrorKind::Denied | ErrorKind::Unsupported) => {
                let summary = "the user may not use INFO: the server's role and eviction policy are not known";
                let advice = format!("ACL SETUSER {} +info", link.username().unwrap_or("default"));
                Ok((String::new(), vec![Finding::warning("info", summary, advice)]))
            }
            e => Err(e),
        },
        Some(reply) => Ok((redis::from_redis_value::<String>(reply).unwrap_or_default(), Vec::new())),
        None => Err(error::odd_reply(Sent::ReadOnly)),
    }
}

/// One server, and how to ask it.
struct Doctor<'a> {
    link: &'a Link,
    names: &'a Names,
    bound: Duration,
    has_password: bool,
    as_cluster: bool,
}

impl Doctor<'_> {
    async fn examine(&self) -> Result<Examination> {
        let connection = self.link.connection().await?;
        let (info, mut findings) = ask_info(self.link, &connection, self.bound).await?;
        let settings = self.settings(&connection).await?;
        findings.extend(server::judge(&info, self.as_cluster));
        findings.extend(isolation(self.link, &info));
        if !info.is_empty() {
            findings.extend(identity(&info));
            findings.extend(persistence(&info, settings.as_ref()));
            findings.extend(replicas(&info).filter(|_| !self.link.fails_over()));
            findings.extend(connections(&info));
        }
        findings.extend(idle(settings.as_ref()));
        findings.extend(self.password());
        findings.extend(self.access(&connection).await?);
        let clock = self.clock(&connection).await?;
        findings.push(clock.map_or_else(no_clock, ClockOffset::finding));
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        let fsync = settings.as_ref().and_then(|settings| settings.get("appendfsync")).map(String::as_str);
        Ok(Examination { findings, facts: ServerFacts::read(&info, fsync), clock })
    }

    /// Settings; `None` if this user may not ask.
    async fn settings(&self, connection: &Connection) -> Result<Option<HashMap<String, String>>> {
        let mut requests = Pipeline::new();
        for setting in SETTINGS {
            requests.cmd("CONFIG").arg("GET").arg(setting);
        }
        let mut settings = HashMap::new();
        for reply in self.ask(connection, &requests).await? {
            match redis::from_redis_value::<HashMap<String, String>>(reply) {
                Ok(some) => settings.extend(some),
                Err(_) => return Ok(None),
            }
        }
        Ok(Some(settings))
    }

    async fn ask(&self, connection: &Connection, requests: &Pipeline) -> Result<Vec<Value>> {
        self.link.run_all(connection, None, requests, self.bound, Sent::ReadOnly).await
    }

    fn password(&self) -> Option<Finding> {
        let summary = "whoever can reach the server can take and free every lock: it asks for no password";
        let advice = "ACL SETUSER default >password, or a user for lockkit alone";
        (!self.has_password).then(|| Finding::note("password", summary, advice))
    }

    async fn access(&self, connection: &Connection) -> Result<Vec<Finding>> {
        let subject = Subject::new(self.names, self.link.username())?;
        let (link, bound) = (self.link, self.bound);
        let basics = link.run_all(connection, Some(&INSPECT), &subject.basics(), bound, Sent::ReadOnly).await?;
        let mut findings = subject.judge_basics(basics);
        let mut script = PROBE.by_hash(2, 0, subject.key.len() + subject.counter.len());
        script.arg(&subject.key).arg(&subject.counter);
        let mut requests = Pipeline::new();
        requests.add_command(script);
        let answer = link.run_all(connection, Some(&PROBE), &requests, bound, Sent::ReadOnly).await?;
        match answer.into_iter().next() {
            Some(reply @ Value::ServerError(_)) => {
                let refusal = access::refusal(reply);
                if findings.iter().all(|finding| finding.code != "scripts") {
                    findings.extend(refusal.and_then(|refusal| subject.judge_script(&refusal)));
                }
            }
            Some(reply) => {
                let answers: Vec<String> = redis::from_redis_value(reply).unwrap_or_default();
                findings.extend(subject.judge_commands(&answers));
            }
            None => {}
        }
        if findings.iter().all(|finding| finding.code != "channels") {
            findings.extend(self.waiting(connection, &subject).await?);
        }
        if findings.iter().all(|finding| finding.code != "scripts") {
            findings.extend(self.inspection(connection, &subject).await?);
        }
        if findings.is_empty() {
            findings.push(Finding::ok("access", "the user may do all that lockkit does"));
        }
        Ok(findings)
    }

    /// Whether it is possible to wait. The subscription ends with the connection at the latest.
    async fn waiting(&self, connection: &Connection, subject: &Subject<'_>) -> Result<Option<Finding>> {
        const COMMANDS: [&str; 2] = ["subscribe", "unsubscribe"];
        let mut requests = Pipeline::new();
        for command in COMMANDS {
            requests.cmd(command).arg(&subject.key);
        }
        let refusals = self.ask(connection, &requests).await?.into_iter().map(access::refusal);
        let (commands, refusals): (Vec<_>, Vec<_>) =
            COMMANDS.iter().zip(refusals).filter_map(|(command, refusal)| Some((*command, refusal?))).unzip();
        Ok(refusals.first().map(|refusal| subject.judge_channels(&commands, refusal)))
    }

    /// Whether locks can be listed.
    async fn inspection(&self, connection: &Connection, subject: &Subject<'_>) -> Result<Option<Finding>> {
        let mut requests = Pipeline::new();
        requests.cmd("SCAN").arg(0).arg("MATCH").arg(&subject.key).arg("COUNT").arg(1);
        requests.cmd("PUBSUB").arg("NUMSUB").arg(&subject.key);
        requests.cmd("TYPE").arg(&subject.key);
        let refusals = self.ask(connection, &requests).await?.into_iter().map(access::refusal);
        let refused: Vec<_> =
            ["scan", "pubsub", "type"].iter().zip(refusals).filter_map(|(command, no)| no.map(|_| *command)).collect();
        if refused.is_empty() {
            return Ok(None);
        }
        let summary = format!(
            "the user may not use {}: locks can't be listed, waiters not counted, or strange keys not named",
            refused.join(", ")
        );
        let advice = format!("allow it to whoever looks after locks: +{}", refused.join(" +"));
        Ok(Some(Finding::note("inspection", summary, advice)))
    }

    async fn clock(&self, connection: &Connection) -> Result<Option<ClockOffset>> {
        let mut requests = Pipeline::new();
        requests.cmd("TIME");
        let sent = SystemTime::now();
        let replies = self.ask(connection, &requests).await?;
        let received = SystemTime::now();
        let time = replies.into_iter().next().and_then(|reply| redis::from_redis_value::<(i64, i64)>(reply).ok());
        Ok(time.map(|(seconds, micros)| ClockOffset::measured(sent, received, seconds * 1_000_000 + micros, 1)))
    }
}

/// Where another server takes over by itself, the former one should know when to stop.
fn isolation(link: &Link, info: &str) -> Option<Finding> {
    if link.fails_over() && !link.asks_replicas() { server::judge_isolation(info) } else { None }
}

fn no_clock() -> Finding {
    Finding::note("clock", "the user may not use TIME: the server's clock was not compared", "+time allows it")
}

fn identity(info: &str) -> Vec<Finding> {
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

fn persistence(info: &str, settings: Option<&HashMap<String, String>>) -> Vec<Finding> {
    let setting = |name: &str| settings.and_then(|settings| settings.get(name)).map(String::as_str);
    let advice = "appendonly yes and appendfsync always keep every lock; else check fences at the resource";
    let mut findings = vec![match (field(info, "aof_enabled"), setting("appendfsync"), setting("save")) {
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

fn replicas(info: &str) -> Option<Finding> {
    let replicas = field(info, "connected_slaves").parse::<u32>().ok().filter(|replicas| *replicas > 0)?;
    let summary = format!("replicas are attached ({replicas}): a failover can give away locks that are held");
    let advice = "replication is asynchronous: check fences at the resource, or use a Redlock quorum";
    Some(Finding::warning("replicas", summary, advice))
}

fn connections(info: &str) -> Option<Finding> {
    let (used, most) = (field(info, "connected_clients").parse::<u64>(), field(info, "maxclients").parse::<u64>());
    let (used, most) = (used.ok()?, most.ok().filter(|most| *most > 0)?);
    let summary = format!("{used} of {most} connections are in use");
    (used * 10 >= most * 9)
        .then(|| Finding::warning("connections", summary, "raise maxclients, or find who leaks them"))
}

fn idle(settings: Option<&HashMap<String, String>>) -> Option<Finding> {
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
