//! All that can be told of a quorum's nodes, each and together: `lockkit doctor`.

use std::{sync::Arc, time::Duration};

use lockkit_core::{ClockOffset, Effect, Error, ErrorKind, Finding, Liveness, LockStore, Result, Severity};
use lockkit_redis::{Examination, RedisStore, examine, said_once};
use tokio::task::JoinSet;

use crate::{
    Node, RedisNodes, RedlockStore,
    redis::Roster,
    wire::{error::NodeErrors, votes::majority},
};

/// Clocks that are further apart than this are worth a word.
const APART: Duration = Duration::from_secs(1);

/// Looks at the nodes: each for itself, as [`lockkit_redis::diagnose`] does, and whether they make a quorum.
///
/// Nothing is changed.
///
/// # Errors
/// `InvalidInput` for a wrong configuration of a node; `Unavailable`, `TimedOut` or `Denied`, with each node's own error,
/// if none of them can be asked.
pub async fn diagnose(nodes: &RedisNodes) -> Result<Vec<Finding>> {
    let mut names = Vec::with_capacity(nodes.nodes.len());
    for node in &nodes.nodes {
        names.push(Arc::clone(&RedisStore::new(node.clone())?.info().name));
    }
    let looks = look(nodes).await?;
    let (mut errors, mut reached) = (NodeErrors::default(), 0);
    for (name, look) in names.iter().zip(&looks) {
        match look {
            Ok(_) => reached += 1,
            Err(e) => errors.push(name, e.clone()),
        }
    }
    let (all, quorum) = (looks.len(), majority(looks.len()));
    if reached == 0 {
        return Err(errors.into_error(0, all, quorum, Effect::None));
    }
    let mut findings = whole(nodes)?;
    if reached < quorum {
        let summary = format!("{reached} of {all} nodes can be asked, and {quorum} are needed: nobody gets a lock");
        let advice = "bring the others back; what is wrong with each is said below";
        findings.push(Finding::error(ErrorKind::Unavailable, "quorum", summary, advice));
    }
    findings.extend(together(nodes, &names, &looks));
    findings.extend(each(&names, looks));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(findings)
}

/// Examines all nodes at once; in their order.
async fn look(nodes: &RedisNodes) -> Result<Vec<Result<Examination>>> {
    let mut looks = JoinSet::new();
    for (index, node) in nodes.nodes.iter().cloned().enumerate() {
        looks.spawn(async move { (index, examine(&node).await) });
    }
    let mut answers = Vec::with_capacity(nodes.nodes.len());
    while let Some(look) = looks.join_next().await {
        answers.push(look.map_err(|e| Error::new(ErrorKind::Unexpected, "a look at a node broke off").with_source(e))?);
    }
    answers.sort_by_key(|(index, _)| *index);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

/// What follows from the configuration alone, and what connecting would say of it.
fn whole(nodes: &RedisNodes) -> Result<Vec<Finding>> {
    let mut members = Vec::with_capacity(nodes.nodes.len());
    for node in &nodes.nodes {
        members.push(Node::new(Arc::new(RedisStore::new(node.clone())?)));
    }
    let count = members.len();
    let store = match RedlockStore::new(members, nodes.config.clone()) {
        Ok(store) => store,
        Err(e) => return Ok(vec![Finding::error(e.kind(), "quorum", e.message(), "change the URL")]),
    };
    let mut findings: Vec<_> = store
        .warnings()
        .iter()
        .map(|warning| {
            let (summary, advice) = warning.split_once("; ").unwrap_or((warning, ""));
            Finding::warning("quorum", summary, advice)
        })
        .collect();
    if findings.is_empty() {
        findings.push(Finding::ok("quorum", format!("{count} nodes: {} may fail", count - majority(count))));
    }
    if let Liveness::Ttl { min, max } = store.info().capability.liveness {
        findings.push(Finding::ok("ttl", format!("a lock may have a ttl from {min:?} to {max:?}")));
    }
    Ok(findings)
}

/// What only shows when nodes are compared, or that means something else for a node than for a store of its own.
fn together(nodes: &RedisNodes, names: &[Arc<str>], looks: &[Result<Examination>]) -> Vec<Finding> {
    let roster = Roster::new(nodes);
    let mut findings = Vec::new();
    let mut forgetful = 0;
    for (index, look) in looks.iter().enumerate() {
        let Ok(look) = look else { continue };
        let admitted = roster.admit(index, &look.facts);
        forgetful += usize::from(!roster.is_durable(index));
        let Err(e) = admitted else { continue };
        let why = e.message();
        findings.push(match e.kind() {
            ErrorKind::InvalidInput => {
                Finding::error(e.kind(), "twice", why, "name each server once").at(&names[index])
            }
            ErrorKind::Unavailable => {
                let advice = "wait, or make max_ttl shorter, for all clients; a durable node votes at once";
                Finding::warning("restart", why, advice).at(&names[index])
            }
            // That it is a replica is said of the node itself.
            _ => continue,
        });
    }
    if forgetful > 0 {
        let summary = format!(
            "nodes that may forget: {forgetful}; each keeps out of votes for the longest ttl after its start, and fences \
             are not strict"
        );
        let advice = "appendonly yes and appendfsync always on all nodes make fences strict";
        findings.push(Finding::note("durability", summary, advice));
    } else {
        findings.push(Finding::ok("durability", "all nodes keep what they answered: fences are strict"));
    }
    let clock = |(index, look): (usize, &Result<Examination>)| Some((index, look.as_ref().ok()?.clock?));
    let known: Vec<_> = looks.iter().enumerate().filter_map(clock).collect();
    findings.extend(clocks(names, &known));
    findings
}

/// The two clocks that are furthest apart, of those that are known by the index of their node.
fn clocks(names: &[Arc<str>], known: &[(usize, ClockOffset)]) -> Option<Finding> {
    let pairs =
        known.iter().enumerate().flat_map(|(place, one)| known[place + 1..].iter().map(move |other| (one, other)));
    let (apart, one, other) = pairs
        .map(|(one, other)| (one.1.between(other.1).certain(), one.0, other.0))
        .max_by_key(|(apart, ..)| *apart)?;
    if apart < APART {
        return Some(Finding::ok("clocks", "the nodes' clocks agree"));
    }
    let summary = format!("the clocks of {} and {} are {apart:.1?} apart", names[one], names[other]);
    let advice = "slew the one that is wrong; a step ends leases on that node early or late";
    Some(Finding::warning("clocks", summary, advice))
}

/// What was found at each node. What is the same at all of them is said once.
fn each(names: &[Arc<str>], looks: Vec<Result<Examination>>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut asked = 0;
    for (name, look) in names.iter().zip(looks) {
        match look {
            Ok(look) => {
                asked += 1;
                findings.extend(look.findings.into_iter().filter_map(for_a_node).map(|finding| finding.at(name)));
            }
            Err(e) if e.is_retryable() => {
                let summary = format!("it can't be asked: {}", e.message());
                let advice = "locks work as long as a majority does";
                findings.push(Finding::warning("node", summary, advice).at(name));
            }
            Err(e) => {
                let summary = format!("it can't be asked: {}", e.message());
                findings.push(Finding::error(e.kind(), "node", summary, "correct the URL, or the server").at(name));
            }
        }
    }
    said_once(findings, asked, "all nodes")
}

/// A finding about a server as one about a node.
fn for_a_node(mut finding: Finding) -> Option<Finding> {
    match finding.code {
        // A quorum has its own word on this.
        "persistence" => return None,
        "replicas" => "do not fail over to them: they may lack leases".clone_into(&mut finding.advice),
        _ => {}
    }
    // Of what is well, who the nodes are is enough.
    (finding.severity > Severity::Ok || finding.code == "server").then_some(finding)
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn the_clocks_that_are_furthest_apart_are_named() {
        let names: Vec<Arc<str>> = ["a", "b", "c"].map(Into::into).into();
        let clock = |seconds: i64| ClockOffset::measured(UNIX_EPOCH, UNIX_EPOCH, seconds * 1_000_000, 1);
        let found = clocks(&names, &[(0, clock(3)), (1, clock(-4)), (2, clock(0))]).expect("a finding");
        assert_eq!(found.severity, Severity::Warning);
        assert!(found.summary.contains("of a and b are 7.0s apart"), "{}", found.summary);
        assert_eq!(clocks(&names, &[(0, clock(0)), (2, clock(0))]).expect("a finding").severity, Severity::Ok);
        assert!(clocks(&names, &[(1, clock(9))]).is_none());
    }
}
