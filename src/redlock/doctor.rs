//! What can be told of Redis servers as the nodes of a quorum.

use lockkit_core::{ErrorKind, Finding, Result, Severity, Workload, store::join_all};
use lockkit_redis::{Examination, examine};
use lockkit_redlock::Report;

use super::{RedisNodes, findings, roster::Roster};

/// Looks at the nodes: each for itself, as [`lockkit_redis::diagnose`] does, and whether they make a quorum.
///
/// Nothing is changed.
///
/// # Errors
/// `InvalidInput` for a wrong configuration of a node; `Unavailable`, `TimedOut` or `Denied`, with each node's own error,
/// if none of them can be asked.
pub async fn diagnose(nodes: &RedisNodes) -> Result<Vec<Finding>> {
    let roster = nodes.roster();
    let members = nodes.members(&nodes.stores()?, &roster);
    let (mut reports, mut together, mut forgetful) = (Vec::with_capacity(members.len()), Vec::new(), 0);
    for ((index, member), look) in members.into_iter().enumerate().zip(join_all(nodes.nodes.iter().map(examine)).await)
    {
        let name = &member.store().info().name.clone();
        let mut clock = None;
        let found = look.map(|look| {
            together.extend(admitted(&roster, index, &look).map(|finding| finding.at(name)));
            forgetful += usize::from(!roster.is_durable(index));
            clock = look.clock;
            look.findings.into_iter().filter_map(for_a_node).collect()
        });
        reports.push(Report { node: member, found, clock });
    }
    together.push(durability(forgetful));
    findings(reports, together, nodes.config.clone())
}

/// What the servers of all nodes have done since they started, and what memory they use, as [`lockkit_redis::workload`] tells it of one.
/// Where a node can't be reached, of none.
///
/// # Errors
/// `InvalidInput` for a wrong configuration of a node; `Denied` if one refuses to be asked.
pub async fn workload(nodes: &RedisNodes) -> Result<Workload> {
    let mut all: Option<Workload> = None;
    for node in &nodes.nodes {
        let told = match lockkit_redis::workload(node).await {
            Err(e) if e.is_retryable() => Workload::default(),
            told => told?,
        };
        all = Some(all.map_or(told, |sum| sum + told));
    }
    Ok(all.unwrap_or_default())
}

/// What only shows when a server is compared with the others, or that means something else for a node than for a store of
/// its own.
fn admitted(roster: &Roster, index: usize, look: &Examination) -> Option<Finding> {
    let error = roster.admit(index, &look.facts).err()?;
    let why = error.message();
    match error.kind() {
        ErrorKind::InvalidInput => Some(Finding::error(error.kind(), "twice", why, "name each server once")),
        ErrorKind::Unavailable => {
            let advice = "wait, or make max_ttl shorter, for all clients; durable=yes if nodes always keep all that they answered";
            Some(Finding::warning("restart", why, advice))
        }
        ErrorKind::Denied => Some(Finding::error(error.kind(), "restart", why, "+info for the user")),
        // That it is a replica is said of the node itself.
        _ => None,
    }
}

fn durability(forgetful: usize) -> Finding {
    if forgetful == 0 {
        return Finding::ok("durability", "all nodes keep what they answered: fences are strict");
    }
    let summary = format!(
        "nodes that may forget: {forgetful}; each keeps out of votes for the longest ttl after its start, and fences are \
         not strict"
    );
    Finding::note("durability", summary, "appendonly yes and appendfsync always on all nodes make fences strict")
}

/// A finding about a server as one about a node.
fn for_a_node(mut finding: Finding) -> Option<Finding> {
    match finding.code {
        // A quorum has its own word on this.
        "persistence" => return None,
        "replicas" => "do not fail over to them: they may lack leases".clone_into(&mut finding.advice),
        _ => {}
    }
    // Of what is well, the names of the nodes are enough.
    (finding.severity > Severity::Ok || finding.code == "server").then_some(finding)
}
