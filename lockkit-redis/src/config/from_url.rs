//! From a URL to a configuration.

use std::path::PathBuf;

use lockkit_core::{
    Error, Result,
    url_options::{self, Hidden, Parts, address, addresses, boolean, duration, number, percent_decode},
};

use crate::config::{Login, RedisConfig, Topology, secret::Secret};

/// The options that every URL may carry after `?`.
const OPTIONS: &[&str] = &[
    "prefix",
    "timeout",
    "password_env",
    "password_file",
    "ca",
    "cert",
    "key",
    "replicas",
    "replica_timeout",
    "max_ttl",
];
/// Those that make sense where another server can take over.
const FAILOVER: &[&str] = &["failover_pause"];
/// Those of sentinels.
const SENTINEL: &[&str] = &["sentinel_user", "sentinel_password", "sentinel_password_env", "sentinel_password_file"];

/// Reads a URL. See [`RedisConfig::from_url`].
pub(crate) fn read(url: &str) -> Result<RedisConfig> {
    let parts = Parts::of(url)?;
    let (family, kind) = parts.scheme.split_once('+').unwrap_or((&parts.scheme, ""));
    let tls = match family {
        "redis" | "valkey" => false,
        "rediss" | "valkeys" => true,
        _ => {
            return Err(Error::invalid(
                "the scheme is redis, rediss, valkey or valkeys, alone or with +sentinel or +cluster",
            ));
        }
    };
    let (mut config, options) = match kind {
        "" => {
            let (host, port) = address(parts.hosts, RedisConfig::PORT)?;
            (RedisConfig::new(host, port).database(database(parts.path)?), vec![OPTIONS])
        }
        "sentinel" => {
            let (primary, path) = parts.path.split_once('/').unwrap_or((parts.path, ""));
            let sentinels = addresses(parts.hosts, RedisConfig::SENTINEL_PORT)?;
            let config = RedisConfig::sentinel(sentinels, percent_decode(primary)?).database(database(path)?);
            (config, vec![OPTIONS, FAILOVER, SENTINEL])
        }
        "cluster" => {
            let seeds = addresses(parts.hosts, RedisConfig::PORT)?;
            (RedisConfig::cluster(seeds).database(database(parts.path)?), vec![OPTIONS, FAILOVER])
        }
        _ => return Err(Error::invalid(format!("after {family}+ comes sentinel or cluster"))),
    };
    config.tls = tls;
    let (username, password) = parts.user_and_password()?;
    config.login = Login { username: Hidden(username), password: password.map(Secret::Given) };
    read_options(&mut config, parts.options, &options.concat())?;
    config.check()?;
    Ok(config)
}

fn read_options(config: &mut RedisConfig, text: &str, known: &[&str]) -> Result<()> {
    let (mut certificate, mut key) = (None, None);
    for (option, text) in url_options::options(text, known)? {
        match option {
            "prefix" => config.prefix = text,
            "timeout" => config.timeout = duration(option, &text)?,
            "password_env" => set_password(&mut config.login, Secret::Env { option: "password_env", name: text })?,
            "password_file" => {
                set_password(&mut config.login, Secret::File { option: "password_file", path: text.into() })?;
            }
            "ca" => config.ca.0 = Some(text.into()),
            "cert" => certificate = Some(PathBuf::from(text)),
            "key" => key = Some(PathBuf::from(text)),
            "replicas" => config.replicas = number(option, &text)?,
            "replica_timeout" => config.replica_timeout = duration(option, &text)?,
            "max_ttl" => config.max_ttl = duration(option, &text)?,
            "failover_pause" => config.failover_pause = boolean(option, &text)?,
            _ => sentinel_option(config, option, text)?,
        }
    }
    config.identity.0 = match (certificate, key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err(Error::invalid("a client certificate takes both cert and key")),
    };
    Ok(())
}

fn sentinel_option(config: &mut RedisConfig, option: &str, text: String) -> Result<()> {
    let Topology::Sentinel { login, .. } = &mut config.topology else { return Ok(()) };
    match option {
        "sentinel_user" => login.username.0 = Some(text),
        "sentinel_password" => set_password(login, Secret::Given(text))?,
        "sentinel_password_env" => {
            set_password(login, Secret::Env { option: "sentinel_password_env", name: text })?;
        }
        _ => set_password(login, Secret::File { option: "sentinel_password_file", path: text.into() })?,
    }
    Ok(())
}

fn set_password(login: &mut Login, secret: Secret) -> Result<()> {
    match login.password.replace(secret) {
        None => Ok(()),
        Some(_) => Err(Error::invalid("the password is given in two ways")),
    }
}

fn database(path: &str) -> Result<u32> {
    match path.trim_start_matches('/') {
        "" => Ok(0),
        number => number.parse().map_err(|_| Error::invalid("the path of the URL ends in the number of a database")),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockkit_core::ErrorKind;

    use super::*;

    fn password(login: &Login) -> Option<String> {
        login.password.as_ref().map(|secret| secret.read().expect("password"))
    }

    #[test]
    fn a_url_names_sentinels_and_their_primary() {
        let config = RedisConfig::from_url(
            "valkey+sentinel://app:pw@a:1,[::1],b/my%2Fname/3?sentinel_user=watch&sentinel_password=hunter2&max_ttl=10s",
        )
        .expect("url");
        let Topology::Sentinel { sentinels, primary, login } = &config.topology else { panic!("{config:?}") };
        assert_eq!(*sentinels, [("a".into(), 1), ("::1".into(), 26379), ("b".into(), 26379)]);
        assert_eq!((primary.as_str(), config.database), ("my/name", 3));
        assert_eq!((login.username.as_deref(), password(login)), (Some("watch"), Some("hunter2".to_owned())));
        assert_eq!(password(&config.login), Some("pw".to_owned()));
        assert_eq!(config.max_ttl, Duration::from_secs(10));
        assert_eq!(config.display_name(), "redis my/name of a:1,[::1]:26379,b:26379/3");
        assert!(!format!("{config:?}").contains("hunter2"), "{config:?}");
    }

    #[test]
    fn a_url_names_a_cluster() {
        let config =
            RedisConfig::from_url("redis+cluster://a,b:7001?replicas=1&replica_timeout=200ms&failover_pause=no")
                .expect("url");
        let Topology::Cluster { seeds } = &config.topology else { panic!("{config:?}") };
        assert_eq!(*seeds, [("a".into(), 6379), ("b".into(), 7001)]);
        assert_eq!((config.replicas, config.replica_timeout), (1, Duration::from_millis(200)));
        assert!(!config.failover_pause && config.pause().is_zero());
        assert_eq!(config.display_name(), "redis cluster a:6379,b:7001");
    }

    #[test]
    fn a_password_may_lie_elsewhere() {
        let config = RedisConfig::from_url("redis://app@h?password_env=LOCKKIT_NO_SUCH_VARIABLE").expect("url");
        let error = config.login.password.as_ref().expect("password").read().expect_err("not set");
        assert!(error.message().contains("password_env"), "{error}");
        let config = RedisConfig::from_url("redis://app@h?password_file=/no/such/file").expect("url");
        let error = config.login.password.as_ref().expect("password").read().expect_err("no file");
        assert!(error.message().contains("password_file"), "{error}");
        assert_eq!(error.to_string().lines().count(), 1);
    }

    #[test]
    fn a_url_says_it_all() {
        let config =
            RedisConfig::from_url("valkey://a%40b:p%2Fw%25%3A@[::1]:7000/3?prefix=&timeout=250ms").expect("url");
        assert_eq!((config.host.as_str(), config.port, config.database), ("::1", 7000, 3));
        assert_eq!(config.login.username.as_deref(), Some("a@b"));
        assert_eq!(password(&config.login), Some("p/w%:".to_owned()));
        assert_eq!((config.prefix.as_str(), config.timeout), ("", Duration::from_millis(250)));
        assert_eq!(config.display_name(), "redis [::1]:7000/3");
        let config = RedisConfig::from_url("redis://:pw@h").expect("url");
        assert_eq!((config.host.as_str(), config.port, config.database, config.tls), ("h", 6379, 0, false));
        assert_eq!((&*config.login.username, password(&config.login)), (&None, Some("pw".to_owned())));
        assert_eq!(config.prefix, "lockkit:");
    }

    #[test]
    fn a_wrong_url_is_explained_without_its_password() {
        for (url, hint) in [
            ("http://h", "scheme"),
            ("redis:///0", "no host"),
            ("redis://u:hunter2@h:99999", "port"),
            ("redis://u:hunter2@h/x", "database"),
            ("redis://u:hunter2@h/0?retry=1", "prefix, timeout, password_env"),
            ("redis://u:hunter2@h/0?ca=x", "rediss"),
            ("redis://u:hunter2@h?prefix=a&prefix=b", "twice"),
            ("redis://u:hunter2@h?prefix={a}", "braces"),
            ("redis://u:hunter2@h?timeout=0s", "250ms"),
            ("redis://u:hunter2@h?timeout=2", "250ms"),
            ("redis://u:hunter2@h?timeout=99999999999999999999s", "250ms"),
            ("redis://u:hunter2%zz@h", "percent"),
            ("redis://u@h", "password"),
            ("redis://u:hunter2@h?password_env=X", "two ways"),
            ("redis://h?password_env=X&password_file=Y", "two ways"),
            ("redis://u:hunter2@h?failover_pause=no", "option that there is not"),
            ("redis://u:hunter2@h?cert=x&ca=y", "both cert and key"),
            ("redis://u:hunter2@h?cert=x&key=y", "rediss"),
            ("redis://u:hunter2@h?replicas=x", "number"),
            ("redis://u:hunter2@h?max_ttl=10m", "5 minutes"),
            ("redis+magic://u:hunter2@h", "sentinel or cluster"),
            ("redis+sentinel://u:hunter2@h", "name of the primary"),
            ("redis+sentinel://u:hunter2@a,,b/p", "no host"),
            ("redis+sentinel://u:hunter2@a/p/x", "database"),
            ("redis+sentinel://u:hunter2@a/p?sentinel_user=x", "a user of the sentinels"),
            ("redis+sentinel://a/p?sentinel_password=hunter2&sentinel_password_env=X", "two ways"),
            ("redis+cluster://u:hunter2@a,b/1", "database 0"),
            ("redis+cluster://u:hunter2@a,b?failover_pause=maybe", "yes or no"),
            ("redis+cluster://u:hunter2@a,b?sentinel_password=hunter2", "option that there is not"),
        ] {
            let error = RedisConfig::from_url(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
            assert!(error.message().contains(hint), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn tls_is_a_feature() {
        let outcome = RedisConfig::from_url("rediss://h");
        if cfg!(feature = "tls") {
            assert!(outcome.expect("url").tls);
        } else {
            assert!(outcome.expect_err("no feature").message().contains("feature \"tls\""));
        }
    }
}
