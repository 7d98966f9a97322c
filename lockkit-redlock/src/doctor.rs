//! From what was found at each node to what that means for the quorum. Nothing is asked here: code that
//! knows the kind of the nodes looks at them.

use std::{sync::Arc, time::Duration};

use lockkit_core::{ClockOffset, Effect, ErrorKind, Finding, LockStore, Result, said_once};

use crate::{
    client::node::Node,
    config::RedlockConfig,
    store::{RedlockStore, check::even},
    wire::{error::NodeErrors, votes::majority},
};

/// Clocks that are further apart than this are worth a word.
const APART: Duration = Duration::from_secs(1);

/// What a look at a node brought up.
#[derive(Debug)]
pub struct Report {
    /// The node.
    pub node: Node,
    /// What was found there, or why it can't be asked.
    pub found: Result<Vec<Finding>>,
    /// The clock of its server, if that is known.
    pub clock: Option<ClockOffset>,
}

/// All that can be told of a quorum of these nodes, the worst first. `together` is what only shows when the nodes are
/// compared, by means that their kind has.
///
/// What was found at each node is passed on, with the node's name; what is the same at all of them is said once.
///
/// # Errors
/// If no node can be asked, with each node's own error: their kind, or `Unavailable`.
pub fn findings(reports: Vec<Report>, together: Vec<Finding>, config: RedlockConfig) -> Result<Vec<Finding>> {
    let (all, needed) = (reports.len(), majority(reports.len()));
    let names: Vec<_> = reports.iter().map(|report| Arc::clone(report.node.name())).collect();
    let mut errors = NodeErrors::default();
    for Report { node, found, .. } in &reports {
        if let Err(e) = found {
            errors.push(node.name(), e.clone());
        }
    }
    let reached = all - errors.iter().count();
    if reached == 0 {
        return Err(errors.into_error(0, all, Effect::None));
    }
    let now = config.clock.now();
    let vote = reports.iter().filter(|report| report.found.is_ok() && report.node.votes_from() <= now).count();
    let mut findings = whole(reports.iter().map(|report| report.node.clone()).collect(), config);
    if vote < needed {
        let (able, advice) = match reached < needed {
            true => (format!("{reached} of {all} nodes can be asked"), "bring the others back"),
            false => (format!("{vote} of {all} nodes vote by now"), "wait until the others do"),
        };
        let summary = format!("{able}, and {needed} are needed: nobody gets a lock");
        let advice = format!("{advice}; what is wrong with each is said below");
        findings.push(Finding::error(ErrorKind::Unavailable, "quorum", summary, advice));
    }
    findings.extend(together);
    let known: Vec<_> = reports.iter().enumerate().filter_map(|(index, report)| Some((index, report.clock?))).collect();
    findings.extend(clocks(&names, &known));
    findings.extend(said_once(reports.into_iter().flat_map(of_node).collect(), reached, "all nodes"));
    findings.sort_by_key(|finding| std::cmp::Reverse(finding.severity));
    Ok(findings)
}

/// What follows from the number of nodes and from the configuration alone.
fn whole(nodes: Vec<Node>, config: RedlockConfig) -> Vec<Finding> {
    let count = nodes.len();
    let store = match RedlockStore::new(nodes, config) {
        Ok(store) => store,
        Err(e) => return vec![Finding::error(e.kind(), "quorum", e.message(), "change the URL")],
    };
    let well = || Finding::ok("quorum", format!("{count} nodes: {} may fail", count - majority(count)));
    let mut findings = vec![even(count).unwrap_or_else(well)];
    if let Some(ttl) = &store.info().capability.liveness.ttl {
        let summary = format!("a lock may have a ttl from {:?} to {:?}", ttl.start(), ttl.end());
        findings.push(Finding::ok("ttl", summary));
    }
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

/// What was found at a node, with its name.
fn of_node(Report { node, found, .. }: Report) -> Vec<Finding> {
    let findings = found.unwrap_or_else(|e| {
        let summary = format!("it can't be asked: {}", e.message());
        vec![if e.is_retryable() {
            Finding::warning("node", summary, "locks work as long as a majority does")
        } else {
            Finding::error(e.kind(), "node", summary, "correct the URL, or the server")
        }]
    });
    findings.into_iter().map(|finding| finding.at(node.name())).collect()
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use lockkit_core::Severity;

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
