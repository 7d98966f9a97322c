//! Sentinels: whether they would replace the primary, and all agree on who it is.

use std::{collections::HashMap, sync::Arc};

use lockkit_core::{Error, ErrorKind, Finding, Result, store::join_all};
use redis::{Pipeline, Value};

use super::{Examination, Part, Patient, dialer, group};
use crate::{
    client::sentinel,
    config::{Login, RedisConfig},
    wire::{
        access,
        address::{self, Address},
        error::{self, Sent},
        name::Names,
    },
};

/// With fewer the loss of one, perhaps together with the primary, leaves no majority.
const FEWEST: usize = 3;

/// What one sentinel says.
#[derive(Debug)]
struct SentinelReport {
    primary: Address,
    config_epoch: u64,
    replicas: Vec<Address>,
    /// How many sentinels it knows, with itself.
    known: usize,
    is_down: bool,
    /// Why a majority could not replace the primary.
    no_quorum: Option<String>,
}

/// Asks all sentinels, and looks at the primary and its replicas.
///
/// # Errors
/// If no sentinel can be asked, or nobody else: that which says most.
pub(super) async fn examine(
    config: &RedisConfig,
    names: &Names,
    sentinels: &[Address],
    primary: &str,
    login: &Login,
) -> Result<Examination> {
    let (mut findings, mut told) = (Vec::new(), Vec::new());
    let mut failure: Option<Error> = None;
    let of_sentinels = RedisConfig { database: 0, ..config.clone() };
    let answers = join_all(sentinels.iter().map(|address| ask(&of_sentinels, address, primary, login))).await;
    for (address, answer) in sentinels.iter().map(|address| Arc::from(address::text(address))).zip(answers) {
        match answer {
            Ok(answer) => {
                findings.push(of_one(&answer).at(&address));
                told.push((address, answer));
            }
            Err(e) => {
                findings.push(silent(&e).at(&address));
                failure = Some(failure.filter(|told| !told.is_retryable()).unwrap_or(e));
            }
        }
    }
    let Some((_, newest)) = told.iter().max_by_key(|(_, told)| told.config_epoch) else {
        return Err(failure.unwrap_or_else(|| Error::new(ErrorKind::Unavailable, "no sentinel answers")));
    };
    findings.extend(together(&told, sentinels.len()));
    let mut patients = vec![Patient { address: newest.primary.clone(), part: Part::Primary, slots: Vec::new() }];
    let replicas = newest.replicas.iter().filter(|address| **address != newest.primary);
    patients.extend(replicas.map(|address| Patient {
        address: address.clone(),
        part: Part::Successor,
        slots: Vec::new(),
    }));
    group::examine(config, names, &patients, findings).await
}

async fn ask(config: &RedisConfig, address: &Address, primary: &str, login: &Login) -> Result<SentinelReport> {
    let dialer = dialer(config, address, login);
    let connection = dialer.connection().await?;
    let mut requests = Pipeline::with_capacity(4);
    sentinel::ask_for(&mut requests, primary);
    for question in ["REPLICAS", "CKQUORUM"] {
        requests.cmd("SENTINEL").arg(question).arg(primary);
    }
    let replies = connection.run_all(&requests, config.timeout, Sent::ReadOnly).await?;
    let [master, named, replicas, quorum] =
        <[Value; 4]>::try_from(replies).map_err(|_| error::odd_reply(Sent::ReadOnly))?;
    let (address, config_epoch) = sentinel::read(&[master.clone(), named], primary)?;
    let fields: HashMap<String, String> = redis::from_redis_value(master).unwrap_or_default();
    // While it leads a failover, what it says of the primary is said of the former one.
    let is_of = |host: &str, port: u16| {
        fields.get("ip").is_some_and(|ip| ip == host)
            && fields.get("port").is_some_and(|text| *text == port.to_string())
    };
    let is_down = is_of(&address.0, address.1) && fields.get("flags").is_some_and(|flags| flags.contains("_down"));
    let others = fields.get("num-other-sentinels").and_then(|number| number.parse().ok()).unwrap_or(0);
    let replicas: Vec<HashMap<String, String>> = redis::from_redis_value(replicas).unwrap_or_default();
    let replicas = replicas.into_iter().filter_map(|mut fields| {
        let port = fields.get("port")?.parse().ok()?;
        Some((fields.remove("ip")?, port))
    });
    Ok(SentinelReport {
        primary: address,
        config_epoch,
        replicas: replicas.collect(),
        known: others + 1_usize,
        is_down,
        // It knows less than this user may ask: what is refused is not taken for an answer.
        no_quorum: access::refusal(quorum).map(|refusal| refusal.why().to_owned()).filter(|why| why.contains("QUORUM")),
    })
}

fn of_one(told: &SentinelReport) -> Finding {
    let primary = address::text(&told.primary);
    if told.is_down {
        let summary = format!("it says that the primary is {primary}, and that it is down");
        return Finding::warning("sentinel", summary, "look at the primary, and at the network between the two");
    }
    Finding::ok("sentinel", format!("it says that the primary is {primary}"))
}

fn silent(error: &Error) -> Finding {
    let summary = format!("it can't be asked: {}", error.message());
    let advice = if error.is_retryable() { "bring it back" } else { "correct the URL, or the sentinel" };
    Finding::warning("sentinel", summary, advice)
}

/// What only shows when their answers are compared.
fn together(told: &[(Arc<str>, SentinelReport)], named: usize) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some((one, first)) = told.first()
        && let Some((other, differs)) = told.iter().find(|(_, other)| other.primary != first.primary)
    {
        let (here, there) = (address::text(&first.primary), address::text(&differs.primary));
        let summary = format!("the sentinels do not agree on the primary: {one} says {here}, {other} says {there}");
        let advice = "wait for the end of a failover; else a sentinel is cut off from the others: SENTINEL RESET there";
        findings.push(Finding::warning("sentinels", summary, advice));
    }
    if let Some((one, why)) = told.iter().find_map(|(one, told)| Some((one, told.no_quorum.as_ref()?))) {
        let summary = format!("a primary that dies would not be replaced, says {one}: {why}");
        findings.push(Finding::warning("sentinels", summary, "bring the other sentinels back"));
    }
    let known = told.iter().map(|(_, told)| told.known).max().unwrap_or(0);
    if known < FEWEST {
        let summary = format!("{known} of them: fewer than three can't replace the primary once one is lost");
        findings.push(Finding::warning("sentinels", summary, "run three, on three machines"));
    } else if known > named {
        let summary = format!("the URL names {named} of {known} sentinels");
        findings.push(Finding::note("sentinels", summary, "name all: one of them must answer at each connect"));
    }
    if findings.is_empty() {
        findings.push(Finding::ok("sentinels", format!("{known} of them, and a majority could replace the primary")));
    }
    findings
}
