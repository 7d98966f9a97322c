//! All that can be told of servers and their settings: `lockkit doctor`.
//!
//! Here is what is asked of each server; where there are several, `sentinels` and `cluster` say which and what they are
//! to each other, `commands` what a user may not call in scripts, and `group` puts together what was found.

mod cluster;
mod commands;
mod group;
mod info;
mod sentinels;
mod workload;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, SystemTime},
};

use lockkit_core::{ClockOffset, ErrorKind, Finding, Result, Token, store::Reconnections};
use redis::{Pipeline, Value};

use crate::{
    client::{connection::Connection, dialer::Dialer},
    config::{Login, RedisConfig, Topology},
    store::check::{BACKLOG, ask_info},
    wire::{
        access::{self, Subject},
        address::Address,
        error::Sent,
        name::Names,
        scripts::PROBE,
        server::{self, ServerFacts},
    },
};

pub use workload::workload;

/// The settings that matter and that `INFO` does not show.
const SETTINGS: [&str; 4] = ["*appendfsync*", "save", "timeout", BACKLOG];

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
    let names = config.check()?;
    let outcome = match &config.topology {
        Topology::Single => {
            let address = (config.host.clone(), config.port);
            Doctor::new(config, &names, &Patient { address, part: Part::Alone, slots: Vec::new() }).examine().await
        }
        Topology::Sentinel { sentinels, primary, login } => {
            sentinels::examine(config, &names, sentinels, primary, login).await
        }
        Topology::Cluster { seeds } => cluster::examine(config, &names, seeds).await,
    };
    outcome.map_err(|e| e.at("examine", None, &config.display_name().into()))
}

/// What a server is to the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// The one that keeps all locks. Nobody takes its place.
    Alone,
    /// It keeps locks until another takes its place.
    Primary,
    /// A replica that may take the place of a primary.
    Successor,
}

/// A server to be looked at.
#[derive(Clone, Debug)]
struct Patient {
    address: Address,
    part: Part,
    /// Which slots of a cluster it serves, first and last; none if it is not in one, or a replica.
    slots: Vec<(u16, u16)>,
}

/// A dialer for asking, which changes nothing at the server: it leaves no note of an epoch.
fn dialer(config: &RedisConfig, (host, port): &Address, login: &Login) -> Arc<Dialer> {
    let (topology, login) = (Topology::Single, login.clone());
    let config = RedisConfig { host: host.clone(), port: *port, topology, login, vet: None, ..config.clone() };
    Dialer::new(config, None, None, Arc::default(), Reconnections::default())
}

/// One server, and how to ask it.
struct Doctor<'a> {
    dialer: Arc<Dialer>,
    names: &'a Names,
    patient: &'a Patient,
    bound: Duration,
    pause: Duration,
    has_password: bool,
    as_cluster: bool,
}

impl<'a> Doctor<'a> {
    fn new(config: &RedisConfig, names: &'a Names, patient: &'a Patient) -> Self {
        let as_cluster = matches!(config.topology, Topology::Cluster { .. });
        let has_password = config.login.password.is_some();
        let dialer = dialer(config, &patient.address, &config.login);
        let (bound, pause) = (config.timeout, config.pause());
        Self { dialer, names, patient, bound, pause, has_password, as_cluster }
    }

    async fn examine(&self) -> Result<Examination> {
        let connection = self.dialer.connection().await?;
        let (info, mut findings) = ask_info(&self.dialer, &connection, self.bound).await?;
        if self.patient.part != Part::Alone {
            findings.iter_mut().for_each(info::needed);
        }
        let settings = self.settings(&connection).await?;
        findings.extend(server::judge(&info, self.as_cluster));
        if !info.is_empty() {
            findings.extend(info::identity(&info));
            findings.extend(info::persistence(&info, settings.as_ref()));
            findings.extend(match self.patient.part {
                Part::Alone => info::replicas(&info),
                Part::Primary => Some(info::followers(&info)),
                Part::Successor => None,
            });
            if self.patient.part != Part::Successor {
                findings.extend(info::confirming(&info, self.dialer.replicas()));
            }
            findings.extend(self.isolation(&info));
            findings.extend(info::connections(&info));
        }
        findings.extend(info::idle(settings.as_ref()));
        if self.patient.part != Part::Alone {
            let ttl = settings.as_ref().and_then(|settings| settings.get(BACKLOG)).map(String::as_str);
            findings.extend(server::judge_backlog(ttl, self.pause));
        }
        findings.extend(self.password());
        findings.extend(self.access(&connection).await?);
        if self.as_cluster && self.patient.part == Part::Primary {
            findings.extend(cluster::own_view(self, &connection).await?);
        }
        let clock = self.clock(&connection).await?;
        findings.push(clock.map_or_else(no_clock, ClockOffset::finding));
        findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
        Ok(Examination { findings, facts: ServerFacts::read(&info, settings.as_ref()), clock })
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

    /// Where another server takes over by itself, the former one should know when to stop. A successor will be one.
    fn isolation(&self, info: &str) -> Option<Finding> {
        let can_be_replaced = self.patient.part != Part::Alone && self.dialer.replicas() == 0;
        server::judge_isolation(info).filter(|_| can_be_replaced)
    }

    async fn ask(&self, connection: &Connection, requests: &Pipeline) -> Result<Vec<Value>> {
        connection.run_all(requests, self.bound, Sent::ReadOnly).await
    }

    fn password(&self) -> Option<Finding> {
        let summary = "whoever can reach the server can take and free every lock: it asks for no password";
        let advice = "ACL SETUSER default >password, or a user for lockkit alone";
        (!self.has_password).then(|| Finding::note("password", summary, advice))
    }

    async fn access(&self, connection: &Connection) -> Result<Vec<Finding>> {
        let subject = Subject::new(self.names, &Token::random()?, self.dialer.username(), &self.patient.slots);
        let mut findings = subject.judge_basics(self.ask(connection, &subject.basics()).await?);
        let mut script = PROBE.by_hash(2, 0, subject.key.len() + subject.counter.len());
        script.arg(&subject.key).arg(&subject.counter);
        let mut requests = Pipeline::new();
        requests.add_command(script);
        match self.ask(connection, &requests).await?.pop() {
            Some(reply @ Value::ServerError(_)) => {
                let refusal = access::refusal(reply);
                if findings.iter().all(|finding| finding.code != "scripts") {
                    findings.extend(refusal.and_then(|refusal| subject.judge_script(&refusal)));
                }
            }
            Some(reply) => {
                let answers: Vec<String> = redis::from_redis_value(reply).unwrap_or_default();
                findings.extend(commands::judge(subject.user, &answers));
            }
            None => {}
        }
        if findings.iter().all(|finding| finding.code != "channels") {
            findings.extend(self.waiting(connection, &subject).await?);
        }
        if self.dialer.replicas() > 0 {
            findings.extend(self.confirming(connection, &subject).await?);
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

    /// Whether it is possible to wait for replicas.
    async fn confirming(&self, connection: &Connection, subject: &Subject<'_>) -> Result<Option<Finding>> {
        let mut requests = Pipeline::new();
        requests.cmd("WAIT").arg(0).arg(1);
        let refusal = self.ask(connection, &requests).await?.pop().and_then(access::refusal);
        Ok(refusal.filter(access::Refusal::is_lasting).map(|refusal| {
            let summary = format!("WAIT is refused ({}): no replica can confirm a grant", refusal.why());
            let advice = format!("ACL SETUSER {} +wait, or do without replicas=", subject.user);
            Finding::error(ErrorKind::Denied, "replicas", summary, advice)
        }))
    }

    /// Whether locks can be listed.
    async fn inspection(&self, connection: &Connection, subject: &Subject<'_>) -> Result<Option<Finding>> {
        let mut requests = Pipeline::new();
        requests.cmd("SCAN").arg(0).arg("MATCH").arg(&subject.key).arg("COUNT").arg(1);
        requests.cmd("PUBSUB").arg("NUMSUB").arg(&subject.key);
        requests.cmd("TYPE").arg(&subject.key);
        let refusals = self.ask(connection, &requests).await?.into_iter().map(access::refusal);
        let commands = ["scan", "pubsub", "type"].into_iter().zip(refusals);
        let refused: Vec<_> = commands
            .filter_map(|(command, refusal)| refusal.filter(access::Refusal::is_lasting).map(|_| command))
            .collect();
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
        let micros = |(seconds, micros): (i64, i64)| seconds.saturating_mul(1_000_000).saturating_add(micros);
        Ok(time.map(|time| ClockOffset::measured(sent, received, micros(time), 1)))
    }
}

fn no_clock() -> Finding {
    Finding::note("clock", "the user may not use TIME: the server's clock was not compared", "+time allows it")
}
