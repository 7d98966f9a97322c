//! Clusters: whether all slots are served, and whoever serves one can be replaced.

use lockkit_core::{ErrorKind, Finding, Result};
use redis::Pipeline;
use tokio::task::JoinSet;

use super::{Doctor, Examination, Part, Patient, dialer, group};
use crate::{
    client::{
        connection::Connection,
        slots::{self, Range},
        vote,
    },
    config::RedisConfig,
    wire::{
        address::Address,
        error::Sent,
        name::{Names, SLOTS},
        server::field,
    },
};

/// With fewer primaries the loss of one leaves no majority that could let its replica take over.
const FEWEST: usize = 3;

/// Asks the members who serves what, and looks at all of them.
///
/// # Errors
/// If no member can be asked: that which says most.
pub(super) async fn examine(config: &RedisConfig, names: &Names, seeds: &[Address]) -> Result<Examination> {
    let mut questions = JoinSet::new();
    for seed in seeds {
        let (config, seed) = (config.clone(), seed.clone());
        questions.spawn(async move {
            let (epoch, ranges) = slots::ask_anew(&config, &seed).await?;
            Ok((epoch, (ranges, replicas(&config, &seed).await?)))
        });
    }
    let ((ranges, replicas), _) = vote::newest(questions, config.timeout / 4, |_, _| true).await?;
    let mut patients = primaries(&ranges);
    let findings = vec![coverage(&ranges), majority(patients.len(), replicas.len())];
    patients.extend(replicas.into_iter().map(|address| Patient { address, part: Part::Successor, slots: Vec::new() }));
    group::examine(config, names, &patients, findings).await
}

/// The members that serve slots.
fn primaries(ranges: &[Range]) -> Vec<Patient> {
    let mut patients: Vec<Patient> = Vec::new();
    for Range { first, last, addresses } in ranges {
        let Some(address) = addresses.first() else { continue };
        match patients.iter_mut().find(|patient| patient.address == *address) {
            Some(patient) => patient.slots.push((*first, *last)),
            None => {
                let (address, slots) = (address.clone(), vec![(*first, *last)]);
                patients.push(Patient { address, part: Part::Primary, slots });
            }
        }
    }
    patients
}

/// All replicas that a member knows. (`CLUSTER SLOTS` leaves out those that failed, and those that are new.) None if this
/// user may not ask.
async fn replicas(config: &RedisConfig, member: &Address) -> Result<Vec<Address>> {
    let dialer = dialer(config, member, &config.login);
    let connection = dialer.connection().await?;
    let mut request = redis::cmd("CLUSTER");
    request.arg("NODES");
    let reply = connection.run_one(request, config.timeout, Sent::ReadOnly).await?;
    let nodes = redis::from_redis_value::<String>(reply).unwrap_or_default();
    Ok(nodes.lines().filter_map(|line| replica(line, &member.0, config.tls)).collect())
}

/// Reads `<id> <ip>:<port>@<bus port>[,<hostname>] <flags> ...`, if it is of a replica. With TLS its name counts, if it
/// has one: it is what a certificate names.
fn replica(line: &str, asked: &str, tls: bool) -> Option<Address> {
    let mut words = line.split(' ').skip(1);
    let (address, flags) = (words.next()?, words.next()?);
    let is_lost = |flag| matches!(flag, "noaddr" | "handshake");
    if !flags.split(',').any(|flag| flag == "slave") || flags.split(',').any(is_lost) {
        return None;
    }
    let (address, rest) = address.split_once('@')?;
    let (ip, port) = address.rsplit_once(':')?;
    let hostname = rest.split(',').nth(1).filter(|name| tls && !name.is_empty() && !name.contains('='));
    let host = hostname.unwrap_or(if ip.is_empty() { asked } else { ip });
    Some((host.to_owned(), port.parse().ok()?))
}

fn coverage(ranges: &[Range]) -> Finding {
    let served: u32 = ranges.iter().map(|range| u32::from(range.last - range.first) + 1).sum();
    match u32::from(SLOTS) - served.min(SLOTS.into()) {
        0 => Finding::ok("slots", "every slot belongs to a primary"),
        missing => {
            let summary = format!("{missing} of {SLOTS} slots belong to nobody: locks in them can't be taken");
            // Whoever gets them knows nothing of the leases there, nor of a pause.
            let advice = "redis-cli --cluster fix, but not before max_ttl has passed since the member that had them was last there";
            Finding::error(ErrorKind::Unavailable, "slots", summary, advice)
        }
    }
}

fn majority(primaries: usize, replicas: usize) -> Finding {
    if primaries < FEWEST {
        let summary = format!("{primaries} primaries: with fewer than three nobody lets a replica take over");
        return Finding::warning("members", summary, "run three primaries at least, on three machines");
    }
    Finding::ok("members", format!("{primaries} primaries and {replicas} replicas"))
}

/// What a primary says of its cluster. Nothing if this user may not ask.
pub(super) async fn own_view(doctor: &Doctor<'_>, connection: &Connection) -> Result<Vec<Finding>> {
    let mut requests = Pipeline::with_capacity(2);
    requests.cmd("CLUSTER").arg("INFO").cmd("CLUSTER").arg("NODES");
    let replies = doctor.ask(connection, &requests).await?;
    let mut texts = replies.into_iter().map(|reply| redis::from_redis_value::<String>(reply).unwrap_or_default());
    let (info, nodes) = (texts.next().unwrap_or_default(), texts.next().unwrap_or_default());
    let mut findings = Vec::new();
    if field(&info, "cluster_state") == "fail" {
        let summary = "it refuses all locks: cluster_state is fail";
        let advice =
            "bring the other primaries back; cluster-require-full-coverage no keeps those that are left at work";
        findings.push(Finding::error(ErrorKind::Unavailable, "slots", summary, advice));
    }
    // `<id> <address> myself,master - 0 0 1 connected 0-5460 [5461->-<id>]`
    let own = nodes.lines().find(|line| line.split(' ').nth(2).is_some_and(|flags| flags.contains("myself")));
    let moving = own.map_or(0, |line| line.split(' ').filter(|word| word.starts_with('[')).count());
    if moving > 0 {
        let summary = format!("{moving} slots are on their way to or from it: free locks in them can't be taken");
        let advice = "wait for the end of the move; if it broke off: redis-cli --cluster fix";
        findings.push(Finding::warning("slots", summary, advice));
    }
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use lockkit_core::Severity;

    use super::*;

    #[test]
    fn two_primaries_are_too_few() {
        assert_eq!(majority(2, 4).severity, Severity::Warning);
        assert_eq!(majority(3, 0).severity, Severity::Ok);
    }

    #[test]
    fn slots_of_nobody_are_not_given_away_before_their_leases_have_lapsed() {
        let all = |last| coverage(&[Range { first: 0, last, addresses: Vec::new() }]);
        assert_eq!(all(SLOTS - 1).severity, Severity::Ok);
        let finding = all(SLOTS - 2);
        assert!(finding.summary.starts_with("1 of 16384"), "{finding:?}");
        assert!(finding.advice.contains("not before max_ttl"), "{finding:?}");
    }

    #[test]
    fn replicas_are_told_apart() {
        let read = |address: &str, flags: &str, tls| {
            replica(&format!("id {address} {flags} other 0 1 2 connected"), "asked", tls).map(|(host, _)| host)
        };
        assert_eq!(read("10.0.0.1:7000@17000", "slave", false).as_deref(), Some("10.0.0.1"));
        assert_eq!(read("10.0.0.1:7000@17000,b.example", "myself,slave,fail?", false).as_deref(), Some("10.0.0.1"));
        assert_eq!(read("10.0.0.1:7000@17000,b.example", "slave", true).as_deref(), Some("b.example"));
        assert_eq!(read("10.0.0.1:7000@17000,,shard-id=7", "slave", true).as_deref(), Some("10.0.0.1"));
        assert_eq!(read("10.0.0.1:7000@17000,shard-id=7", "slave", true).as_deref(), Some("10.0.0.1"));
        assert_eq!(read("::1:7000@17000", "slave", true).as_deref(), Some("::1"));
        assert_eq!(read(":7000@17000", "slave", false).as_deref(), Some("asked"));
        assert_eq!(read("10.0.0.1:7000@17000", "master", false), None);
        assert_eq!(read(":0@0", "slave,noaddr", false), None);
    }
}
