//! What a server says of itself when the store connects, and what that means for its locks.

use std::{collections::HashMap, fmt, sync::Arc, time::Duration};

use lockkit_core::{Error, ErrorKind, Result};
use redis::{Pipeline, aio::MultiplexedConnection};

use crate::error::{self, Sent};

/// What a server says of itself on a new connection.
///
/// Every restart breaks all connections, so whoever looks at this on each of them notices every restart (unless a proxy
/// hides it).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerFacts {
    /// A random name of the server's process (`run_id`): new after every restart. Empty if it was not told.
    pub run_id: String,
    /// For how long it has been running, in whole seconds, rounded down. Zero if it was not told.
    pub uptime: Duration,
    /// Whether it is a replica.
    pub is_replica: bool,
    /// How many replicas are attached to it.
    pub replicas: u32,
    /// Whether every write is on disk before it is answered (`appendonly yes`, `appendfsync always`). `None` if it was
    /// not told, because this user may not ask.
    pub durable: Option<bool>,
}

impl ServerFacts {
    /// Reads the answers to `INFO` and `CONFIG GET appendfsync`.
    pub(crate) fn read(info: &str, fsync: Option<&str>) -> Self {
        let durable = match (field(info, "aof_enabled"), fsync) {
            ("0", _) => Some(false),
            ("1", Some(policy)) => Some(policy == "always"),
            _ => None,
        };
        Self {
            run_id: field(info, "run_id").to_owned(),
            uptime: Duration::from_secs(field(info, "uptime_in_seconds").parse().unwrap_or(0)),
            is_replica: matches!(field(info, "role"), "slave" | "replica"),
            replicas: field(info, "connected_slaves").parse().unwrap_or(0),
            durable,
        }
    }
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

/// What the server says of itself. What this user may not ask for is not known.
pub(crate) async fn ask(connection: &MultiplexedConnection) -> Result<ServerFacts> {
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("INFO").cmd("CONFIG").arg("GET").arg("appendfsync");
    let replies = MultiplexedConnection::clone(connection).send_packed_commands(&requests, 0, requests.len()).await;
    let mut replies = replies.map_err(|e| error::map(&e, Sent::No))?.into_iter();
    let info = replies.next().and_then(|reply| redis::from_redis_value::<String>(reply).ok()).unwrap_or_default();
    let fsync = replies.next().and_then(|reply| redis::from_redis_value::<HashMap<String, String>>(reply).ok());
    Ok(ServerFacts::read(&info, fsync.as_ref().and_then(|settings| settings.get("appendfsync")).map(String::as_str)))
}

/// A field of the answer to `INFO`; empty if there is none.
fn field<'a>(info: &'a str, name: &str) -> &'a str {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map_or("", |value| value.trim())
}

/// Judges the answer to `INFO`: refuses what can't keep locks, and warns of what may lose them.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a replica, a member of a cluster (unless one was named), or a server that is too old
/// or a 32-bit build.
pub(crate) fn judge(info: &str, as_cluster: bool) -> Result<Vec<String>> {
    let field = |name: &str| field(info, name);
    let refuse = |why: String| Err(Error::new(ErrorKind::Unsupported, why));
    if matches!(field("role"), "slave" | "replica") {
        return refuse("the server is a replica; locks need its primary".into());
    }
    if field("cluster_enabled") == "1" && !as_cluster {
        return refuse("the server is part of a cluster; use redis+cluster://host,host,host".into());
    }
    if field("arch_bits") == "32" {
        return refuse("the server is a 32-bit build; its scripts can't spell a fence".into());
    }
    let version = field("redis_version");
    let mut numbers = version.split('.').map_while(|number| number.parse::<u32>().ok());
    if let (Some(major), Some(minor)) = (numbers.next(), numbers.next())
        && (major, minor) < (6, 2)
    {
        return refuse(format!("the server is Redis {version}; lockkit needs 6.2 or later, or Valkey"));
    }
    let mut warnings = Vec::new();
    let policy = field("maxmemory_policy");
    if field("maxmemory") != "0" && !matches!(policy, "" | "noeviction") {
        warnings.push(format!(
            "the server may evict locks that are held: maxmemory-policy is {policy}; only noeviction is safe"
        ));
    }
    Ok(warnings)
}

/// Warns of a primary that goes on alone when it is cut off from its replicas. (The field is there only if the setting
/// is in force.)
pub(crate) fn judge_isolation(info: &str) -> Option<String> {
    let alone = !field(info, "connected_slaves").is_empty() && field(info, "min_slaves_good_slaves").is_empty();
    alone.then(|| {
        "a former primary that is cut off, or comes back, may still grant and renew: \
         set min-replicas-to-write on the servers, or ?replicas= here"
            .into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: &str = "# Server\r\nredis_version:7.0.15\r\narch_bits:64\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n\
                         role:master\r\ncluster_enabled:0\r\n";

    #[test]
    fn a_sound_server_passes() {
        assert!(judge(SOUND, false).expect("sound").is_empty());
        assert!(judge("", false).expect("silent").is_empty());
        assert!(judge(&SOUND.replace("noeviction", "allkeys-lru"), false).expect("no limit, no eviction").is_empty());
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
            let error = judge(&SOUND.replace(from, to), false).expect_err(to);
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains(hint), "{error}");
        }
    }

    #[test]
    fn facts_are_read_and_not_guessed() {
        let info = "run_id:abc\r\nuptime_in_seconds:7\r\nrole:master\r\nconnected_slaves:2\r\naof_enabled:1\r\n";
        let facts = ServerFacts::read(info, Some("always"));
        let uptime = Duration::from_secs(7);
        let expected =
            ServerFacts { run_id: "abc".into(), uptime, is_replica: false, replicas: 2, durable: Some(true) };
        assert_eq!(facts, expected);
        assert_eq!(ServerFacts::read(info, Some("everysec")).durable, Some(false));
        assert_eq!(ServerFacts::read(info, None).durable, None);
        assert_eq!(ServerFacts::read(&info.replace("enabled:1", "enabled:0"), None).durable, Some(false));
        assert_eq!(ServerFacts::read("", None).durable, None);
    }

    #[test]
    fn eviction_is_a_warning() {
        let info = SOUND.replace("maxmemory:0", "maxmemory:1000").replace("noeviction", "volatile-lru");
        let warnings = judge(&info, false).expect("runs");
        assert!(warnings.len() == 1 && warnings[0].contains("volatile-lru"), "{warnings:?}");
    }
}
