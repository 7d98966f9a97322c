//! Nodes on Redis or Valkey servers, from a URL.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{
    Clock, Effect, Error, ErrorKind, Result, drift,
    url_options::{self, Parts, boolean, duration},
};
use lockkit_redis::{RedisConfig, RedisStore, ServerFacts};

use crate::{
    Gate, Node, RedlockConfig, RedlockStore,
    client::{calls::Calls, quorum::name_of},
    wire::{error::NodeErrors, votes::majority},
};

/// The options of a URL that are not those of each node.
const OWN_OPTIONS: [&str; 4] = ["node_timeout", "max_ttl", "durable", "delayed_restart"];
/// The options of a URL that each node gets.
const NODE_OPTIONS: [&str; 7] = ["prefix", "timeout", "password_env", "password_file", "ca", "cert", "key"];

/// Several independent Redis or Valkey servers, as the nodes of a quorum.
///
/// ```
/// use std::time::Duration;
/// use lockkit_redlock::{RedisNodes, RedlockConfig};
///
/// let nodes = RedisNodes::from_url("redlock://a:6379,b:6379,c:6379?max_ttl=30s&durable=no")?;
/// let config = RedlockConfig::new().max_ttl(Duration::from_secs(30));
/// assert_eq!(format!("{nodes:?}"), format!("{:?}", RedisNodes::from_url("redlock://a,b,c?durable=no")?.config(config)));
/// # Ok::<(), lockkit_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct RedisNodes {
    pub(crate) nodes: Vec<RedisConfig>,
    pub(crate) config: RedlockConfig,
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
    /// `key` are those of every node, see [`RedisConfig::from_url`]. The others: `node_timeout` and `max_ttl` as in [`RedlockConfig`], such as `200ms` and
    /// `30s`; `durable` and `delayed_restart` as the methods here, `yes` or `no`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] says what is wrong. It never repeats the URL, which may contain a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let parts = Parts::of(url)?;
        let scheme = match parts.scheme.as_str() {
            "redlock" => "redis",
            "redlocks" => "rediss",
            _ => return Err(invalid("the URL should look like redlock://host:port,host:port,host:port")),
        };
        let (own, for_nodes) = sort_options(parts.options)?;
        let login = parts.login.map(|login| format!("{login}@")).unwrap_or_default();
        let (hosts, database) = (parts.hosts, parts.path);
        let of_node = |host: &str| RedisConfig::from_url(&format!("{scheme}://{login}{host}/{database}?{for_nodes}"));
        let mut nodes = Self::new(hosts.split(',').map(of_node).collect::<Result<_>>()?);
        for (option, value) in own {
            match option {
                "node_timeout" => nodes.config.node_timeout = Some(duration(option, &value)?),
                "max_ttl" => nodes.config.max_ttl = duration(option, &value)?,
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

    /// Whether a node that is not durable keeps out of votes for the longest ttl after its start; on by default.
    ///
    /// Off, a node that restarts within a lease can make a second holder of the next who asks.
    #[must_use]
    pub fn delayed_restart(mut self, on: bool) -> Self {
        self.delayed_restart = on;
        self
    }

    /// Connects to the nodes and checks them. Nodes that can't be reached may join later, as long as a majority can.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for less than three nodes, or the same server twice; [`ErrorKind::Unsupported`] for
    /// replicas, members of a cluster and servers that are too old; `Denied` for a wrong login; `Unavailable`, with
    /// each node's own error, if no majority can be reached.
    pub async fn connect(self) -> Result<RedlockStore> {
        if !self.nodes.iter().all(RedisConfig::is_single) {
            return Err(invalid("a node is one server: nothing may take its place, as sentinels and clusters have it"));
        }
        let roster = Arc::new(Roster::new(&self));
        let mut stores = Vec::with_capacity(self.nodes.len());
        for (index, node) in self.nodes.into_iter().enumerate() {
            let roster = Arc::clone(&roster);
            let node = node.clock(Arc::clone(&self.config.clock)).vet(move |facts| roster.admit(index, facts));
            stores.push(Arc::new(RedisStore::new(node)?));
        }
        let mut checks = Calls::with_capacity(stores.len());
        for (index, store) in stores.iter().enumerate() {
            let store = Arc::clone(store);
            checks.add(index, async move { store.check().await });
        }
        let (mut warnings, mut errors, mut reached) = (Vec::new(), NodeErrors::default(), 0);
        while let Some((index, checked)) = checks.next_ever().await {
            let name = &lockkit_core::LockStore::info(&*stores[index]).name;
            match checked {
                Ok(about) => {
                    reached += 1;
                    warnings.extend(about.into_iter().map(|warning| format!("{name}: {warning}")));
                }
                Err(e) if !e.is_retryable() => return Err(e),
                Err(e) => {
                    reached += usize::from(roster.is_known(index));
                    warnings.push(format!("{name}: {}", e.message()));
                    errors.push(name, e);
                }
            }
        }
        if reached < majority(stores.len()) && stores.len() >= 3 {
            let error = errors.into_error(reached, stores.len(), majority(stores.len()), Effect::None);
            return Err(error.at("connect", None, &name_of(stores.len())));
        }
        roster.warn(&stores, &mut warnings);
        let nodes = stores
            .into_iter()
            .enumerate()
            .map(|(index, store)| Node::new(store).durable(roster.is_durable(index)).gate(roster.gates[index].clone()));
        let store = RedlockStore::with_warnings(nodes.collect(), self.config, warnings)?;
        roster.strict.store(store.nodes().iter().all(Node::is_durable), Ordering::Release);
        Ok(store)
    }
}

impl RedlockStore {
    /// Connects to the nodes that a URL names. See [`RedisNodes::from_url`] for its form.
    ///
    /// # Errors
    /// As [`RedisNodes::connect`].
    pub async fn from_url(url: &str) -> Result<Self> {
        RedisNodes::from_url(url)?.connect().await
    }
}

/// Who the servers are, as they said on their latest connections.
pub(crate) struct Roster {
    known: Mutex<Vec<Option<ServerFacts>>>,
    gates: Vec<Gate>,
    clock: Arc<dyn Clock>,
    durable: Option<bool>,
    /// For how long after its start a node that is not durable does not vote.
    kept_out: Duration,
    /// Fences were said to be strict, so that from now on all nodes have to be durable.
    strict: AtomicBool,
}

impl Roster {
    pub(crate) fn new(nodes: &RedisNodes) -> Self {
        let kept_out = nodes.config.max_ttl + drift(nodes.config.max_ttl);
        Self {
            known: Mutex::new(vec![None; nodes.nodes.len()]),
            gates: nodes.nodes.iter().map(|_| Gate::new()).collect(),
            clock: Arc::clone(&nodes.config.clock),
            durable: nodes.durable,
            kept_out: if nodes.delayed_restart { kept_out } else { Duration::ZERO },
            strict: AtomicBool::new(false),
        }
    }

    /// Whether a new connection to a node may be used. Each restart makes one necessary.
    pub(crate) fn admit(&self, index: usize, facts: &ServerFacts) -> Result<()> {
        let refuse = |kind, why: &str| Err(Error::new(kind, why));
        if facts.is_replica {
            return refuse(ErrorKind::Unsupported, "the server is a replica; a node must be independent of the others");
        }
        {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let same = |(other, known): (usize, &Option<ServerFacts>)| {
                other != index && known.as_ref().is_some_and(|known| known.run_id == facts.run_id)
            };
            if !facts.run_id.is_empty() && known.iter().enumerate().any(same) {
                return refuse(ErrorKind::InvalidInput, "two of the nodes are the same server");
            }
            known[index] = Some(facts.clone());
        }
        if self.durable.or(facts.durable) == Some(true) {
            return Ok(());
        }
        if self.strict.load(Ordering::Acquire) {
            return refuse(ErrorKind::Unsupported, "it does not keep its data any more, as fences rely on");
        }
        if facts.uptime >= self.kept_out {
            return Ok(());
        }
        let left = self.kept_out - facts.uptime;
        self.gates[index].close_until(self.clock.now() + left);
        let left = Duration::from_secs(left.as_secs() + 1);
        let why = format!("it started a short while ago and may have lost leases; it votes in {left:?}");
        Err(Error::new(ErrorKind::Unavailable, why))
    }

    fn facts(&self, index: usize) -> Option<ServerFacts> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)[index].clone()
    }

    fn is_known(&self, index: usize) -> bool {
        self.facts(index).is_some()
    }

    pub(crate) fn is_durable(&self, index: usize) -> bool {
        self.durable.or(self.facts(index).and_then(|facts| facts.durable)) == Some(true)
    }

    fn warn(&self, stores: &[Arc<RedisStore>], warnings: &mut Vec<String>) {
        for (index, store) in stores.iter().enumerate() {
            let Some(facts) = self.facts(index) else { continue };
            let name = &lockkit_core::LockStore::info(&**store).name;
            if facts.replicas > 0 {
                let replicas = facts.replicas;
                let why = "do not fail over to them: they may lack leases";
                warnings.push(format!("{name}: {replicas} replicas are attached; {why}"));
            }
            if facts.run_id.is_empty() {
                warnings.push(format!(
                    "{name}: the user may not use INFO: whether it restarted or is there twice is not known"
                ));
            }
        }
    }
}

impl fmt::Debug for Roster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Roster").field("known", &self.known).finish_non_exhaustive()
    }
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

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
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

    fn facts(uptime: u64, run_id: &str) -> ServerFacts {
        let mut facts = ServerFacts::default();
        (facts.uptime, facts.run_id) = (Duration::from_secs(uptime), run_id.to_owned());
        facts
    }

    #[test]
    fn a_node_votes_when_old_leases_must_have_lapsed() {
        let nodes = RedisNodes::from_url("redlock://a,b,c?max_ttl=10s").expect("url");
        let roster = Roster::new(&nodes);
        assert!(roster.admit(0, &facts(60, "a")).is_ok());
        assert_eq!(roster.admit(1, &facts(60, "a")).expect_err("twice").kind(), ErrorKind::InvalidInput);
        assert_eq!(roster.admit(1, &facts(4, "b")).expect_err("young").kind(), ErrorKind::Unavailable);
        let left = roster.gates[1].votes_from().since(roster.clock.now());
        assert!(left > Duration::from_secs(6) && left < Duration::from_millis(6_200), "{left:?}");
        assert!(Roster::new(&nodes.clone().delayed_restart(false)).admit(1, &facts(4, "b")).is_ok());
        assert!(Roster::new(&nodes.durable(true)).admit(1, &facts(4, "b")).is_ok());
    }
}
