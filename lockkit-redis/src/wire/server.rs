//! What a server says of itself when the store connects, and what that means for its locks.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use lockkit_core::{ErrorKind, Fence, Finding, Result};
use redis::{Pipeline, Value};

use crate::wire::error::{self, Sent};

/// What a server says of itself on a new connection.
///
/// Every restart breaks all connections, so whoever looks at this on each of them notices every restart (unless a proxy
/// hides it).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerFacts {
    /// A random name of the server's process (`run_id`): new after every restart. Empty if it was not told.
    pub run_id: String,
    /// For how long it has been running, at least; zero if it was not told. The server tells it in whole seconds, by its wall
    /// clock. A run that follows upon another that this store was connected to is no older here than the end of that connection.
    pub uptime: Duration,
    /// Whether it is a replica.
    pub is_replica: bool,
    /// How many replicas are attached to it.
    pub replicas: u32,
    /// Whether every write is on disk before it is answered (`appendonly yes`, `appendfsync always`, and no
    /// `no-appendfsync-on-rewrite`). `None` if it was not told, because this user may not ask.
    pub durable: Option<bool>,
    /// Whether the process began with a log (`aof_base_size`, and no rewrite since), as far as can be told. If not, what the one
    /// before it answered may be lost: the log was switched on later, or its directory is a new one.
    pub began_with_log: bool,
}

impl ServerFacts {
    /// Reads the replies to [`questions`]. What this user may not ask for is not known.
    ///
    /// # Errors
    /// If the server answers nothing at the moment, such as `BUSY` while a script runs.
    pub(crate) fn read_replies(replies: Vec<Value>) -> Result<Self> {
        let mut replies = replies.into_iter();
        let info = match replies.next() {
            Some(Value::ServerError(refusal)) => {
                let refusal = error::map(&refusal.into(), Sent::No);
                if refusal.is_retryable() {
                    return Err(refusal);
                }
                String::new()
            }
            reply => reply.and_then(|reply| redis::from_redis_value(reply).ok()).unwrap_or_default(),
        };
        let settings = replies.next().and_then(|reply| redis::from_redis_value(reply).ok());
        Ok(Self::read(&info, settings.as_ref()))
    }

    /// Reads the answers to `INFO` and to `CONFIG GET`.
    pub(crate) fn read(info: &str, settings: Option<&HashMap<String, String>>) -> Self {
        let durable = match (field(info, "aof_enabled"), settings.and_then(|settings| settings.get("appendfsync"))) {
            ("0", _) => Some(false),
            ("1", Some(policy)) => Some(policy == "always" && !pauses_fsync(settings)),
            _ => None,
        };
        // In a log that was made in this run the size is zero until it is first rewritten.
        let has_base = field(info, "aof_base_size").parse::<u64>().is_ok_and(|size| size > 0);
        // The difference of two truncated seconds: of a process that is 0.1 s old it can be 1.
        let uptime = field(info, "uptime_in_seconds").parse::<u64>().unwrap_or(0).saturating_sub(1);
        Self {
            run_id: field(info, "run_id").to_owned(),
            uptime: Duration::from_secs(uptime),
            is_replica: matches!(field(info, "role"), "slave" | "replica"),
            replicas: field(info, "connected_slaves").parse().unwrap_or(0),
            durable,
            began_with_log: has_base && field(info, "aof_last_rewrite_time_sec") == "-1",
        }
    }
}

/// Whether writes are not on disk while a child of the server writes a snapshot or rewrites the log, whatever `appendfsync` says.
pub(crate) fn pauses_fsync(settings: Option<&HashMap<String, String>>) -> bool {
    settings.and_then(|settings| settings.get("no-appendfsync-on-rewrite")).is_some_and(|value| value == "yes")
}

/// Judges a server on every new connection.
#[derive(Clone)]
pub(crate) struct Vet(pub(crate) Arc<Judge>);

type Judge = dyn Fn(&ServerFacts) -> Result<()> + Send + Sync;

impl fmt::Debug for Vet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Vet(..)")
    }
}

/// What [`ServerFacts::read_replies`] reads the replies to.
pub(crate) fn questions() -> Pipeline {
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("INFO").cmd("CONFIG").arg("GET").arg("*appendfsync*");
    requests
}

/// Reads the reply to `TIME`: the server's clock, as a fence. What the server says against it is within.
///
/// # Errors
/// If it is no clock.
pub(crate) fn clock(reply: Value) -> Result<Result<Fence>> {
    if let Value::ServerError(e) = reply {
        return Ok(Err(error::map(&e.into(), Sent::No)));
    }
    let (seconds, micros): (u64, u64) = redis::from_redis_value(reply).map_err(|_| error::odd_reply(Sent::No))?;
    Ok(Ok(Fence::new(seconds.saturating_mul(1_000_000).saturating_add(micros))))
}

/// A field of the answer to `INFO`; empty if there is none.
pub(crate) fn field<'a>(info: &'a str, name: &str) -> &'a str {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map_or("", |value| value.trim())
}

/// Judges the answer to `INFO`: errors for what can't keep locks, warnings of what may lose them. A member of a cluster
/// can't, unless one was named.
pub(crate) fn judge(info: &str, as_cluster: bool) -> Vec<Finding> {
    let field = |name: &str| field(info, name);
    let mut findings = Vec::new();
    let mut refuse = |code, summary: String, advice: &str| {
        findings.push(Finding::error(ErrorKind::Unsupported, code, summary, advice));
    };
    if matches!(field("role"), "slave" | "replica") {
        refuse("role", "the server is a replica".into(), "locks need its primary");
    }
    if field("cluster_enabled") == "1" && !as_cluster {
        refuse("cluster", "the server is part of a cluster".into(), "use redis+cluster://host,host,host");
    }
    if field("arch_bits") == "32" {
        refuse("build", "the server is a 32-bit build".into(), "its scripts can't spell a fence; use a 64-bit build");
    }
    if version(field("redis_version")).is_some_and(|version| version < (6, 2, 0)) {
        let summary = format!("the server is Redis {}", field("redis_version"));
        refuse("version", summary, "lockkit needs 6.2 or later, or Valkey");
    }
    findings.extend(eviction(field("maxmemory_policy"), field("maxmemory")));
    findings.extend(memory(field("used_memory"), field("maxmemory")));
    findings
}

fn eviction(policy: &str, limit: &str) -> Option<Finding> {
    if matches!(policy, "" | "noeviction") {
        return None;
    }
    let advice = "only noeviction is safe";
    if limit == "0" {
        let summary = format!("maxmemory-policy is {policy}: under a memory limit locks would be evicted");
        return Some(Finding::note("eviction", summary, advice));
    }
    let summary = format!("the server may evict locks that are held: maxmemory-policy is {policy}");
    Some(Finding::warning("eviction", summary, advice))
}

/// A server that is full takes no locks any more.
fn memory(used: &str, limit: &str) -> Option<Finding> {
    let (used, limit) = (used.parse::<u64>().ok()?, limit.parse::<u64>().ok().filter(|limit| *limit > 0)?);
    let percent = u128::from(used) * 100 / u128::from(limit);
    let summary = format!("{percent} % of maxmemory are in use: a full server takes no locks");
    (percent >= 90).then(|| Finding::warning("memory", summary, "raise maxmemory, or make room"))
}

/// Major, minor and patch version; `None` if it is not one.
pub(crate) fn version(text: &str) -> Option<(u32, u32, u32)> {
    let mut numbers = text.split('.').map_while(|number| number.parse().ok());
    Some((numbers.next()?, numbers.next()?, numbers.next().unwrap_or(0)))
}

/// Warns of a primary that goes on alone when it is cut off from its replicas. (The field is there only if the setting
/// is in force.)
///
/// Before 6.2.7 scripts are carried out all the same ([redis#10160](https://github.com/redis/redis/pull/10160)).
pub(crate) fn judge_isolation(info: &str) -> Option<Finding> {
    let spares_scripts = version(field(info, "redis_version")).is_some_and(|version| version < (6, 2, 7));
    let is_set = !field(info, "min_slaves_good_slaves").is_empty();
    let goes_on_alone = !field(info, "connected_slaves").is_empty() && (spares_scripts || !is_set);
    let summary = "a former primary that is cut off, or comes back, may still grant and renew";
    let advice = match spares_scripts {
        true => {
            "set min-replicas-to-write on servers of Redis 6.2.7 or newer (older ones run scripts all the same), or ?replicas= here"
        }
        false => "set min-replicas-to-write on the servers, or ?replicas= here",
    };
    goes_on_alone.then(|| Finding::warning("isolation", summary, advice))
}

/// Refuses a server that can forget that it took over before the leases of its predecessor have lapsed: a primary without
/// replicas takes a new replication id after `repl-backlog-ttl` seconds, and forgets the former one.
pub(crate) fn judge_backlog(ttl: Option<&str>, pause: Duration) -> Option<Finding> {
    // Zero is never.
    let seconds = ttl?.parse::<u64>().ok().filter(|seconds| *seconds > 0)?;
    let summary = format!("repl-backlog-ttl is {seconds} s, shorter than the pause after a failover ({pause:?})");
    let advice = "set it to 3600 s, the default: without it a server that took over can seem to be an old one";
    let is_short = Duration::from_secs(seconds) < pause;
    is_short.then(|| Finding::error(ErrorKind::Unsupported, "backlog", summary, advice))
}

#[cfg(test)]
mod tests {
    use lockkit_core::Severity;

    use super::*;

    const SOUND: &str = "# Server\r\nredis_version:7.0.15\r\narch_bits:64\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n\
                         role:master\r\ncluster_enabled:0\r\n";

    #[test]
    fn a_primary_whose_scripts_need_no_replicas_is_warned_of() {
        let warned = |info: &str| judge_isolation(info).map(|finding| finding.advice.contains("6.2.7"));
        let primary = |version: &str, set: &str| format!("redis_version:{version}\r\nconnected_slaves:1\r\n{set}");
        const SET: &str = "min_slaves_good_slaves:1\r\n";
        assert_eq!(warned(&primary("6.2.6", SET)), Some(true));
        assert_eq!(warned(&primary("6.2.7", SET)), None);
        assert_eq!(warned(&primary("7.0.15", "")), Some(false));
        assert_eq!(warned("redis_version:6.2.6\r\n"), None, "it was not told");
    }

    fn admit(info: &str) -> Result<Vec<String>> {
        Finding::admit(&judge(info, false))
    }

    #[test]
    fn a_sound_server_passes() {
        assert_eq!((judge(SOUND, false), judge("", false)), (Vec::new(), Vec::new()));
        let no_limit = judge(&SOUND.replace("noeviction", "allkeys-lru"), false);
        assert!(matches!(no_limit.as_slice(), [only] if only.severity == Severity::Note), "{no_limit:?}");
    }

    #[test]
    fn what_can_not_keep_locks_is_refused() {
        for (from, to, hint) in [
            ("role:master", "role:slave", "replica"),
            ("cluster_enabled:0", "cluster_enabled:1", "cluster"),
            ("7.0.15", "6.0.16", "6.2"),
            ("7.0.15", "5.0.7", "6.2"),
            ("bits:64", "bits:32", "32-bit"),
        ] {
            let error = admit(&SOUND.replace(from, to)).expect_err(to);
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains(hint), "{error}");
        }
    }

    #[test]
    fn facts_are_read_and_not_guessed() {
        let info = "run_id:abc\r\nuptime_in_seconds:7\r\nrole:master\r\nconnected_slaves:2\r\naof_enabled:1\r\n\
                    aof_last_rewrite_time_sec:-1\r\naof_base_size:89\r\n";
        let settings = |fsync: &str, pause: &str| {
            let settings = [("appendfsync", fsync), ("no-appendfsync-on-rewrite", pause)];
            HashMap::from(settings.map(|(name, value)| (name.to_owned(), value.to_owned())))
        };
        let facts = ServerFacts::read(info, Some(&settings("always", "no")));
        let (durable, uptime) = (Some(true), Duration::from_secs(6));
        let expected =
            ServerFacts { run_id: "abc".into(), uptime, is_replica: false, replicas: 2, durable, began_with_log: true };
        assert_eq!(facts, expected);
        assert_eq!(ServerFacts::read(info, Some(&settings("everysec", "no"))).durable, Some(false));
        assert_eq!(ServerFacts::read(info, Some(&settings("always", "yes"))).durable, Some(false));
        for (from, to) in [("base_size:89", "base_size:0"), ("time_sec:-1", "time_sec:0"), ("aof_base_size:89", "")] {
            assert!(!ServerFacts::read(&info.replace(from, to), None).began_with_log, "{to}");
        }
        assert_eq!(ServerFacts::read(info, None).durable, None);
        assert_eq!(ServerFacts::read(&info.replace("enabled:1", "enabled:0"), None).durable, Some(false));
        assert_eq!(ServerFacts::read("", None).durable, None);
        assert_eq!(ServerFacts::read("uptime_in_seconds:0\r\n", None).uptime, Duration::ZERO);
    }

    #[test]
    fn a_clock_is_read_whatever_it_says() {
        let read = |seconds: i64, micros: i64| clock(Value::Array(vec![Value::Int(seconds), Value::Int(micros)]));
        assert_eq!(read(7, 8).expect("a clock").expect("allowed"), Fence::new(7_000_008));
        assert_eq!(read(i64::MAX, 8).expect("a clock").expect("allowed"), Fence::new(u64::MAX));
    }

    #[test]
    fn eviction_and_a_full_memory_are_warned_of() {
        let limited = SOUND.replace("maxmemory:0", "maxmemory:1000");
        let warnings = admit(&limited.replace("noeviction", "volatile-lru")).expect("runs");
        assert!(warnings.len() == 1 && warnings[0].contains("volatile-lru"), "{warnings:?}");
        let warnings = admit(&format!("{limited}used_memory:950\r\n")).expect("runs");
        assert!(warnings.len() == 1 && warnings[0].contains("95 %"), "{warnings:?}");
        assert!(admit(&format!("{limited}used_memory:500\r\n")).expect("runs").is_empty());
    }
}
