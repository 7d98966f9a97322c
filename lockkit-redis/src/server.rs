//! What a server says of itself when the store connects, and what that means for its locks.

use lockkit_core::{Error, ErrorKind, Result};

/// Judges the answer to `INFO`: refuses what can't keep locks, and warns of what may lose them.
///
/// # Errors
/// [`ErrorKind::Unsupported`] for a replica, a member of a cluster, or a server that is too old or a 32-bit build.
pub(crate) fn judge(info: &str) -> Result<Vec<String>> {
    let field = |name: &str| {
        info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map_or("", |value| value.trim())
    };
    let refuse = |why: String| Err(Error::new(ErrorKind::Unsupported, why));
    if matches!(field("role"), "slave" | "replica") {
        return refuse("the server is a replica; locks need its primary".into());
    }
    if field("cluster_enabled") == "1" {
        return refuse("the server is part of a cluster; this store is for a single one".into());
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

#[cfg(test)]
mod tests {
    use super::*;

    const SOUND: &str = "# Server\r\nredis_version:7.0.15\r\narch_bits:64\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n\
                         role:master\r\ncluster_enabled:0\r\n";

    #[test]
    fn a_sound_server_passes() {
        assert!(judge(SOUND).expect("sound").is_empty());
        assert!(judge("").expect("silent").is_empty());
        assert!(judge(&SOUND.replace("noeviction", "allkeys-lru")).expect("no limit, no eviction").is_empty());
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
            let error = judge(&SOUND.replace(from, to)).expect_err(to);
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(error.message().contains(hint), "{error}");
        }
    }

    #[test]
    fn eviction_is_a_warning() {
        let info = SOUND.replace("maxmemory:0", "maxmemory:1000").replace("noeviction", "volatile-lru");
        let warnings = judge(&info).expect("runs");
        assert!(warnings.len() == 1 && warnings[0].contains("volatile-lru"), "{warnings:?}");
    }
}
