//! All that can be told of an ensemble, its nodes and this user: `lockkit doctor`.

mod server;
mod workload;

use std::{sync::Arc, time::SystemTime};

use lockkit_core::{ClockOffset, Error, ErrorKind, Finding, Result, Token, store::join_all};
use tokio::time::timeout;
use zookeeper_client::{self as zk, Acls, Client, CreateMode, Permission, Stat};

use crate::{
    client::{connect, driver::understood},
    config::ZkConfig,
    wire::{
        error::{self, Failure, Sent},
        name::Names,
        queue,
    },
};

pub use workload::workload;

/// How many locks are looked into.
const LOCKS: usize = 500;
/// How many names a finding lists.
const NAMES: usize = 5;
/// Lists that are longer come near to `jute.maxbuffer`, whose default is 1 MiB: clients in Java refuse longer ones.
const LONG_LIST: usize = 700_000;

/// Looks at an ensemble: whether it can keep locks, what puts them at risk, what this user may not do.
///
/// To try what this user may do, and to compare clocks, nodes are made under a name that no lock can have, and removed
/// again, also after an error. Should the process end in between, the servers remove them: one is ephemeral, the other a
/// container.
///
/// # Errors
/// `InvalidInput` for a wrong configuration; `Unavailable`, `TimedOut` or `Denied` if there is no session to be had.
pub async fn diagnose(config: &ZkConfig) -> Result<Vec<Finding>> {
    let names = config.check()?;
    let name: Arc<str> = config.display_name().into();
    examine(config, names).await.map_err(|e| e.at("examine", None, &name))
}

async fn examine(config: &ZkConfig, names: Names) -> Result<Vec<Finding>> {
    // Connecting tries one server after the other.
    let patience = config.timeout * 3;
    let client = timeout(patience, connect::connect(config)).await;
    let client = client.unwrap_or_else(|_| Err(Error::no_answer(patience, Sent::ReadOnly)))?;
    let doctor = Doctor { config, names, client, acls: config.acls() };
    let mut findings = doctor.servers().await;
    findings.push(doctor.ensemble().await?);
    findings.extend(doctor.session().await);
    // Trying comes last, for it may make the root.
    let nodes = doctor.nodes().await?;
    findings.extend(doctor.trial().await?);
    findings.extend(nodes);
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(findings)
}

struct Doctor<'a> {
    config: &'a ZkConfig,
    names: Names,
    client: Client,
    acls: Acls<'static>,
}

impl Doctor<'_> {
    /// The answer to a request; an error of the user's own making, such as a missing permission, is one too.
    async fn answer<T>(&self, request: impl Future<Output = Result<T, zk::Error>>) -> Result<Result<T, zk::Error>> {
        use zk::Error::{NoAuth, NoNode, NodeExists, NotEmpty, Unimplemented};
        match timeout(self.config.timeout, understood(request)).await {
            Ok(Err(e)) if !matches!(e, NoAuth | NoNode | NodeExists | NotEmpty | Unimplemented) => {
                Err(error::map(&Failure::Driver(e), Sent::ReadOnly))
            }
            Ok(answer) => Ok(answer),
            Err(_) => Err(Error::no_answer(self.config.timeout, Sent::ReadOnly)),
        }
    }

    async fn servers(&self) -> Vec<Finding> {
        let servers: Vec<Arc<str>> = self.config.addresses().into_iter().map(Into::into).collect();
        if self.config.tls.is_some() {
            let summary = "the versions of the servers could not be told: over TLS they are not asked";
            return vec![Finding::note("server", summary, "look at what each answers to the word srvr")];
        }
        let answers = join_all(servers.iter().map(|server| server::ask(server, self.config.timeout))).await;
        server::judge(&servers.into_iter().zip(answers).collect::<Vec<_>>())
    }

    async fn ensemble(&self) -> Result<Finding> {
        let config = self.answer(self.client.get_config()).await?.ok();
        let text = config.map(|(data, _)| String::from_utf8_lossy(&data).into_owned());
        Ok(server::judge_ensemble(text.as_deref()))
    }

    /// How long a session lasts, wherever it is, and whether that is long enough for its tick.
    async fn session(&self) -> Vec<Finding> {
        let mut findings = vec![self.given()];
        let given = self.client.session_timeout();
        if let Ok(shortest) = connect::shortest_timeout(self.config, given).await
            && shortest < given
        {
            let summary = format!("a session that moves to another server lasts {shortest:?} there, not {given:?}");
            let advice = "configure all servers alike: leases are lost when the session moves";
            findings.push(Finding::warning("session", summary, advice));
        }
        if self.config.tls.is_none() {
            for server in self.config.addresses() {
                let Some(tick) = server::tick(&server, self.config.timeout).await.filter(|tick| given < *tick * 2)
                else {
                    continue;
                };
                let summary = format!("a session lasts {given:?}, less than two ticks of {tick:?} each");
                let advice = "ask for a longer session, or set tickTime lower: leases may be believed in for too long";
                findings.push(Finding::warning("tick", summary, advice).at(&server.into()));
            }
        }
        findings
    }

    fn given(&self) -> Finding {
        let (asked, given) = (self.config.session, self.client.session_timeout());
        if asked == given {
            return Finding::ok("session", format!("a session lasts {given:?}, as was asked for"));
        }
        let (bound, what) = if given > asked {
            ("minSessionTimeout", "the locks of a client that died stay held for that long")
        } else {
            ("maxSessionTimeout", "no lease lasts longer, whatever its ttl")
        };
        let summary = format!("a session lasts {given:?}, not {asked:?} as was asked for: {what}");
        let advice = format!("change {bound} of the servers, or ask for session={}ms", given.as_millis());
        Finding::warning("session", summary, advice)
    }

    /// What is there already: other things than locks, and who may do what to it.
    async fn nodes(&self) -> Result<Vec<Finding>> {
        let root = self.names.root();
        let children = match self.answer(self.client.list_children(root)).await? {
            Ok(children) => children,
            Err(zk::Error::NoAuth) => return Ok(vec![self.denied("list the children")]),
            Err(_) => {
                let summary = format!("{root} does not exist yet: it is made when it is needed");
                return Ok(vec![Finding::ok("nodes", summary)]);
            }
        };
        let mut findings = Vec::new();
        if let Ok((acls, _)) = self.answer(self.client.get_acl(root)).await? {
            let open = Permission::CREATE | Permission::DELETE;
            let is_open = |acl: &zk::Acl| acl.scheme() == "world" && (acl.permission() & open) != Permission::NONE;
            if acls.iter().any(is_open) {
                let summary = format!("{root} is open to the world: whoever reaches the servers can free every lock");
                let advice = "set an access control list, and log in with the option auth";
                findings.push(Finding::note("acl", summary, advice));
            }
        }
        let strange: Vec<_> =
            children.iter().filter(|node| self.names.key(node).is_none() && !Names::is_own(node)).cloned().collect();
        if !strange.is_empty() {
            let summary = format!("{root} has children that are no locks: {}", list(&strange));
            findings.push(Finding::note("foreign", summary, "give lockkit a node of its own: base="));
        }
        findings.extend(self.locks(&children).await?);
        findings.extend(long_list(root, &children));
        let windows = self.names.windows();
        let kept = self.answer(self.client.list_children(&windows)).await?;
        findings.extend(kept.ok().and_then(|kept| long_list(&windows, &kept)));
        Ok(findings)
    }

    /// What is in the queues of the locks.
    async fn locks(&self, nodes: &[String]) -> Result<Vec<Finding>> {
        let mut findings = Vec::new();
        let locks: Vec<_> = nodes.iter().filter_map(|node| self.names.key(node)).collect();
        let (mut foreign, mut eternal) = (Vec::new(), Vec::new());
        for lock in locks.iter().take(LOCKS) {
            let path = self.names.lock(lock);
            let Ok(children) = self.answer(self.client.list_children(&path)).await? else { continue };
            let strangers = queue::contenders(&children).into_iter().filter(|child| queue::sequence(child).is_none());
            foreign.extend(strangers.map(|child| format!("{path}/{child}")));
            if let Some(first) = queue::holders(&children).0.first()
                && queue::sequence(first).is_some()
            {
                let holder = format!("{path}/{first}");
                let stat = self.answer(self.client.check_stat(&holder)).await?;
                eternal.extend(stat.ok().flatten().filter(|stat| stat.ephemeral_owner == 0).map(|_| holder));
            }
            findings.extend(long_list(&path, &children));
        }
        if !foreign.is_empty() {
            let summary = format!("in the queues of locks are nodes that are no claims: {}", list(&foreign));
            let advice = "remove them: all children of a lock take part in its queue, and these hold it for ever";
            findings.push(Finding::warning("queue", summary, advice));
        }
        if !eternal.is_empty() {
            let summary = format!("locks are held by nodes that no session ends: {}", list(&eternal));
            let advice = "remove them, if nobody works under them any more: they are not ephemeral";
            findings.push(Finding::warning("queue", summary, advice));
        }
        if locks.len() > LOCKS {
            let summary = format!("{LOCKS} of {} locks were looked into", locks.len());
            findings.push(Finding::note("nodes", summary, "the others may have other nodes in their queues"));
        }
        Ok(findings)
    }

    fn denied(&self, what: &str) -> Finding {
        let root = self.names.root();
        let summary =
            format!("the access control list of {root}, or of what is above it, does not let the user {what}");
        let advice = format!("grant read, write, create and delete on {root} and below to this user, or log in: auth=");
        Finding::error(ErrorKind::Denied, "access", summary, advice)
    }

    /// Does what an acquisition does, and tells the time by it.
    async fn trial(&self) -> Result<Vec<Finding>> {
        let directory = self.names.trial(&Token::random()?.reveal());
        let missing = self.missing(&directory).await?;
        let tried = self.try_all(&directory).await;
        self.clean_up(&directory, missing).await;
        let (access, clock) = tried?;
        let no_clock = || {
            let summary = "the servers' clock was not compared: it takes a node to read it from";
            Finding::note("clock", summary, "see what is said of access")
        };
        Ok(vec![access, clock.unwrap_or_else(no_clock)])
    }

    /// The paths above one that do not exist, the longest first.
    async fn missing(&self, path: &str) -> Result<Vec<String>> {
        let mut missing = Vec::new();
        let mut path = path;
        while let Some((above, _)) = path.rsplit_once('/').filter(|(above, _)| !above.is_empty()) {
            if matches!(self.answer(self.client.check_stat(above)).await?, Ok(Some(_)) | Err(zk::Error::NoAuth)) {
                break;
            }
            missing.push(above.to_owned());
            path = above;
        }
        Ok(missing)
    }

    async fn try_all(&self, directory: &str) -> Result<(Finding, Option<Finding>)> {
        let options = CreateMode::Container.with_acls(self.acls);
        match self.answer(self.client.mkdir(directory, &options)).await? {
            Ok(()) => {}
            Err(zk::Error::Unimplemented) => {
                let summary = "the servers do not know container nodes, which locks are kept in";
                let advice = "upgrade to 3.8 or later";
                return Ok((Finding::error(ErrorKind::Unsupported, "version", summary, advice), None));
            }
            Err(_) => return Ok((self.denied("create nodes"), None)),
        }
        let options = CreateMode::EphemeralSequential.with_acls(self.acls);
        let sent = SystemTime::now();
        let made = self.answer(self.client.create(&format!("{directory}/n-"), b"", &options)).await?;
        let received = SystemTime::now();
        let Ok((Stat { ctime, .. }, _)) = made else { return Ok((self.denied("create nodes"), None)) };
        let clock = ClockOffset::measured(sent, received, ctime.saturating_mul(1000), 1000).finding();
        let nodes = match self.answer(self.client.list_children(directory)).await? {
            Ok(nodes) => nodes,
            Err(_) => return Ok((self.denied("list children"), Some(clock))),
        };
        for node in nodes.iter().map(|node| format!("{directory}/{node}")) {
            let read = self.answer(self.client.get_data(&node)).await?.map(drop);
            let write = self.answer(self.client.set_data(&node, b"", None)).await?.map(drop);
            let delete = self.answer(self.client.delete(&node, None)).await?;
            for (what, done) in [("read nodes", read), ("write to nodes", write), ("delete nodes", delete)] {
                if done.is_err() {
                    return Ok((self.denied(what), Some(clock)));
                }
            }
        }
        let ok = Finding::ok("access", format!("the user may do all that lockkit does in {}", self.names.root()));
        // In the trial directory, which was just made, everything is allowed. Whether it may go is up to the root.
        match self.answer(self.client.delete(directory, None)).await? {
            Err(zk::Error::NoAuth) => Ok((self.denied("delete nodes"), Some(clock))),
            _ => Ok((ok, Some(clock))),
        }
    }

    /// Whatever is left when this fails ends by itself: the servers remove what is ephemeral, and empty containers.
    async fn clean_up(&self, directory: &str, made: Vec<String>) {
        if let Ok(Ok(nodes)) = self.answer(self.client.list_children(directory)).await {
            for node in nodes {
                drop(self.answer(self.client.delete(&format!("{directory}/{node}"), None)).await);
            }
        }
        // What others have put something into meanwhile is not empty, and stays.
        for path in std::iter::once(directory.to_owned()).chain(made) {
            drop(self.answer(self.client.delete(&path, None)).await);
        }
    }
}

fn long_list(path: &str, children: &[String]) -> Option<Finding> {
    // Each name is sent with its length.
    let bytes: usize = children.iter().map(|child| child.len() + 4).sum();
    let summary = format!("the list of the children of {path} has {bytes} bytes");
    let advice = "use several bases; Java clients fail beyond jute.maxbuffer, 1048575 bytes by default";
    (bytes > LONG_LIST).then(|| Finding::warning("children", summary, advice))
}

/// The first of some names.
fn list(names: &[String]) -> String {
    let shown: Vec<_> = names.iter().take(NAMES).map(|name| name.chars().take(120).collect::<String>()).collect();
    let more = if names.len() > NAMES { format!(" and {} more", names.len() - NAMES) } else { String::new() };
    format!("{}{more}", shown.join(", "))
}
