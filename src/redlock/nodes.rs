//! Nodes on Redis or Valkey servers, from a URL.

use std::sync::Arc;

use lockkit_core::{
    Effect, Error, ErrorKind, LockStore, Result,
    url_options::{self, Parts, boolean, duration},
};
use lockkit_redis::{RedisConfig, RedisStore};
use lockkit_redlock::{Node, NodeErrors, RedlockConfig, RedlockStore, majority};
use tokio::task::{JoinError, JoinSet};

use super::roster::Roster;

/// The options of a URL that are not those of each node.
const OWN_OPTIONS: [&str; 4] = ["node_timeout", "max_ttl", "durable", "delayed_restart"];
/// The options of a URL that each node gets.
const NODE_OPTIONS: [&str; 7] = ["prefix", "timeout", "password_env", "password_file", "ca", "cert", "key"];

/// Several independent Redis or Valkey servers, as the nodes of a quorum.
///
/// ```
/// use std::time::Duration;
/// use lockkit::redlock::{RedisNodes, RedlockConfig};
///
/// let nodes = RedisNodes::from_url("redlock://a:6379,b:6379,c:6379?max_ttl=30s&durable=no")?;
/// let config = RedlockConfig::new().max_ttl(Duration::from_secs(30));
/// assert_eq!(format!("{nodes:?}"), format!("{:?}", RedisNodes::from_url("redlock://a,b,c?durable=no")?.config(config)));
/// # Ok::<(), lockkit::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RedisNodes {
    pub(super) nodes: Vec<RedisConfig>,
    pub(super) config: RedlockConfig,
    durable: Option<bool>,
    delayed_restart: bool,
}

impl RedisNodes {
    /// These servers, with all else at its default.
    #[must_use]
    pub fn new(nodes: Vec<RedisConfig>) -> Self {
        Self { nodes, config: RedlockConfig::new(), durable: None, delayed_restart: true }
    }

    /// Reads `redlock://[user[:password]@]host[:port],host[:port],…[/database][?options]`; `redlocks` for TLS.
    ///
    /// User, password, database and the options `prefix`, `timeout`, `password_env`, `password_file`, `ca`, `cert` and
    /// `key` are those of every node, see [`RedisConfig::from_url`]. The others: `node_timeout` and `max_ttl` as in
    /// [`RedlockConfig`], such as `200ms` and `30s`; `durable` and `delayed_restart` as the methods here, `yes` or `no`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] says what is wrong. It never repeats the URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let parts = Parts::of(url)?;
        let scheme = match parts.scheme.as_str() {
            "redlock" => "redis",
            "redlocks" => "rediss",
            _ => return Err(Error::invalid("the URL should look like redlock://host:port,host:port,host:port")),
        };
        let (own, for_nodes) = sort_options(parts.options)?;
        let login = parts.login.map(|login| format!("{login}@")).unwrap_or_default();
        let (hosts, database) = (parts.hosts, parts.path);
        let of_node = |host: &str| RedisConfig::from_url(&format!("{scheme}://{login}{host}/{database}?{for_nodes}"));
        let mut nodes = Self::new(hosts.split(',').map(of_node).collect::<Result<_>>()?);
        for (option, value) in own {
            match option {
                "node_timeout" => nodes.config = nodes.config.node_timeout(duration(option, &value)?),
                "max_ttl" => nodes.config = nodes.config.max_ttl(duration(option, &value)?),
                "durable" => nodes.durable = Some(boolean(option, &value)?),
                _ => nodes.delayed_restart = boolean(option, &value)?,
            }
        }
        Ok(nodes)
    }

    /// How the nodes work together. The clock goes to the nodes too.
    #[must_use]
    pub fn config(mut self, config: RedlockConfig) -> Self {
        self.config = config;
        self
    }

    /// Declares that all nodes are durable, or that none is. By default each is asked: it is if every write is on disk
    /// before it is answered (`appendonly yes`, `appendfsync always`), and isn't if this user may not ask.
    #[must_use]
    pub fn durable(mut self, durable: bool) -> Self {
        self.durable = Some(durable);
        self
    }

    /// Whether a node that may have lost leases keeps out of votes for the longest ttl after its start; on by default. It may have, unless it
    /// is declared to be durable, or says that it is and this client knew its former run.
    ///
    /// Off, a node that restarts within a lease can let in a second holder.
    #[must_use]
    pub fn delayed_restart(mut self, on: bool) -> Self {
        self.delayed_restart = on;
        self
    }

    /// Connects to the nodes and checks them. Nodes that can't be reached may join later, as long as a majority can.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for less than three nodes, or the same server twice; [`ErrorKind::Unsupported`] for
    /// replicas, members of a cluster and servers that are too old; `Denied` for a wrong login, or a user who may not use `INFO`; `Unavailable`, with
    /// each node's own error, if no majority can be reached.
    pub async fn connect(self) -> Result<RedlockStore> {
        if !self.nodes.iter().all(RedisConfig::is_single) {
            return Err(Error::invalid(
                "a node is one server: nothing may take its place, as sentinels and clusters have it",
            ));
        }
        let roster = Arc::new(self.roster());
        let vetted = |(index, node): (usize, &RedisConfig)| {
            let roster = Arc::clone(&roster);
            node.clone().vet(move |facts| roster.admit(index, facts))
        };
        let nodes = Self { nodes: self.nodes.iter().enumerate().map(vetted).collect(), ..self };
        let stores = nodes.stores()?;
        let warnings = check(&stores, &roster).await?;
        let members = nodes.members(&stores, &roster).into_iter().zip(warnings);
        let members = members.map(|(node, warnings)| node.warnings(warnings)).collect();
        let store = RedlockStore::new(members, nodes.config)?;
        roster.expect_strict(store.nodes().iter().all(Node::is_durable));
        Ok(store)
    }

    /// A roster on which nothing is known yet.
    pub(super) fn roster(&self) -> Roster {
        Roster::new(self.nodes.len(), &self.config, self.durable, self.delayed_restart)
    }

    /// A store for each node. None is connected.
    pub(super) fn stores(&self) -> Result<Vec<Arc<RedisStore>>> {
        let clock = &self.config.clock;
        let store = |node: &RedisConfig| RedisStore::new(node.clone().clock(Arc::clone(clock))).map(Arc::new);
        self.nodes.iter().map(store).collect()
    }

    /// The stores as members of a quorum, by what is known of their servers.
    pub(super) fn members(&self, stores: &[Arc<RedisStore>], roster: &Roster) -> Vec<Node> {
        let member = |(index, store): (usize, &Arc<RedisStore>)| {
            Node::new(Arc::<RedisStore>::clone(store))
                .durable(roster.is_durable(index))
                .restart_policy(roster.restart_policy(index))
        };
        stores.iter().enumerate().map(member).collect()
    }
}

/// Makes sure that a majority of the servers can be asked; each node's warnings, in their order.
async fn check(stores: &[Arc<RedisStore>], roster: &Roster) -> Result<Vec<Vec<String>>> {
    let mut checks = JoinSet::new();
    for (index, store) in stores.iter().enumerate() {
        let store = Arc::clone(store);
        checks.spawn(async move { (index, store.check().await) });
    }
    let mut warnings = vec![Vec::new(); stores.len()];
    let (mut errors, mut reached) = (NodeErrors::default(), 0);
    while let Some(checked) = checks.join_next().await {
        let (index, checked) = checked.map_err(broken_off)?;
        match checked {
            Ok(about) => {
                reached += 1;
                warnings[index] = about;
            }
            Err(e) if !e.is_retryable() => return Err(e),
            Err(e) => {
                reached += usize::from(roster.is_known(index));
                warnings[index].push(e.message().to_owned());
                errors.push(&stores[index].info().name, e);
            }
        }
    }
    if reached < majority(stores.len()) && stores.len() >= 3 {
        let error = errors.into_error(reached, stores.len(), Effect::None);
        return Err(error.at("connect", None, &RedlockStore::name_of(stores.len())));
    }
    for (index, warnings) in warnings.iter_mut().enumerate() {
        warnings.extend(roster.warnings(index));
    }
    Ok(warnings)
}

/// The task that asked a node ended without an answer.
pub(super) fn broken_off(e: JoinError) -> Error {
    Error::new(ErrorKind::Unexpected, "connecting to a node broke off").with_source(e)
}

/// Tells the quorum's own options from those of its nodes.
fn sort_options(options: &str) -> Result<(Vec<(&'static str, String)>, String)> {
    let (mut own, mut for_nodes): (Vec<&str>, Vec<&str>) = (Vec::new(), Vec::new());
    for pair in options.split('&').filter(|pair| !pair.is_empty()) {
        let option = pair.split_once('=').map_or(pair, |(option, _)| option);
        if NODE_OPTIONS.contains(&option) {
            for_nodes.push(pair);
        } else if OWN_OPTIONS.contains(&option) {
            own.push(pair);
        } else {
            return Err(url_options::unknown(&[NODE_OPTIONS.as_slice(), &OWN_OPTIONS].concat()));
        }
    }
    Ok((url_options::options(&own.join("&"), &OWN_OPTIONS)?, for_nodes.join("&")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_url_is_explained_without_its_password() {
        for (url, hint) in [
            ("redis://h", "redlock://host"),
            ("redlock://u:hunter2@a,b,c?retry=1", "node_timeout"),
            ("redlock://u:hunter2@a,b,c?max_ttl=1", "250ms"),
            ("redlock://u:hunter2@a,b,c?durable=maybe", "yes or no"),
            ("redlock://u:hunter2@a,b,c?max_ttl=1m&max_ttl=1m", "twice"),
            ("redlock://u:hunter2@a,,c", "host"),
            ("redlock://u:hunter2@a,b:x,c", "port"),
        ] {
            let error = RedisNodes::from_url(url).expect_err(url);
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{url}");
            assert!(error.message().contains(hint), "{url}: {error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[tokio::test]
    async fn a_node_is_one_server() {
        let node = || RedisConfig::sentinel([("a", 26379)], "p");
        let error = RedisNodes::new(vec![node(), node(), node()]).connect().await.expect_err("fails over");
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.message().contains("one server"), "{error}");
    }
}
