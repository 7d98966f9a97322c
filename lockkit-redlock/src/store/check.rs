//! Whether the nodes make a quorum, and what it can do: asked when it is made.

use std::{collections::HashSet, sync::Arc, time::Duration};

use lockkit_core::{Capability, Error, ErrorKind, Fencing, Finding, Liveness, Result, Resume, Waiting};

use crate::{
    client::{node::Node, quorum::can_wake},
    config::RedlockConfig,
    wire::votes::majority,
};

/// Refuses nodes that make no quorum.
pub(super) fn check(nodes: &[Node]) -> Result<()> {
    let refuse = |kind, why: String| Err(Error::new(kind, why));
    if nodes.len() < 3 {
        let why = format!("a quorum needs at least three independent nodes, not {}", nodes.len());
        return refuse(ErrorKind::InvalidInput, why);
    }
    let mut seen = HashSet::new();
    for node in nodes {
        let info = node.store().info();
        if !seen.insert(Arc::as_ptr(node.store()).cast::<()>()) {
            return refuse(ErrorKind::InvalidInput, format!("the node {} is there twice", info.name));
        }
        if info.capability.fencing == Fencing::None {
            return refuse(ErrorKind::Unsupported, format!("the node {} gives no fences", info.name));
        }
    }
    Ok(())
}

/// What the nodes have in common.
pub(super) fn capability(nodes: &[Node], config: &RedlockConfig) -> Result<Capability> {
    let (mut shortest, mut longest) = (config.min_ttl(), config.max_ttl);
    for node in nodes {
        if let Some(ttl) = &node.store().info().capability.liveness.ttl {
            shortest = shortest.max(*ttl.start());
            longest = longest.min(*ttl.end());
        }
    }
    if shortest > longest {
        let message = format!("no ttl is long enough for the node timeout: at least {shortest:?}, at most {longest:?}");
        return Err(Error::invalid(message));
    }
    let wake = nodes.iter().any(|node| can_wake(node.store().info().capability.waiting));
    let outlasts = nodes.iter().all(|node| node.store().info().capability.resume == Resume::UntilTtl);
    let longest_key = nodes.iter().map(|node| node.store().info().capability.max_key_bytes).min();
    let waiting = if wake { Waiting::Notify } else { Waiting::Poll };
    let liveness = Liveness { ttl: Some(shortest..=longest), session: decisive_session(nodes) };
    let fencing = if nodes.iter().all(Node::is_durable) { Fencing::Strict } else { Fencing::BestEffort };
    Ok(Capability {
        // A grant may rest on a bare majority, and one node of it that forgets is one too many.
        resume: if outlasts { Resume::UntilTtl } else { Resume::None },
        max_key_bytes: longest_key.unwrap_or_default(),
        ..Capability::exclusive(waiting, liveness, fencing)
    })
}

/// After which time without a sign of life enough of a client's sessions have ended that others can have a majority; `None`
/// if they can before the first ends.
fn decisive_session(nodes: &[Node]) -> Option<Duration> {
    let session = |node: &Node| node.store().info().capability.liveness.session;
    let mut sessions: Vec<_> = nodes.iter().filter_map(session).collect();
    sessions.sort_unstable();
    // As long as so many last, too few nodes are left for a majority.
    let decisive = nodes.len() - majority(nodes.len()) + 1;
    sessions.len().checked_sub(decisive).map(|ended| sessions[ended])
}

/// An even number of nodes is a waste.
pub(crate) fn even(nodes: usize) -> Option<Finding> {
    let summary = || format!("{nodes} nodes tolerate no more failures than {} would", nodes - 1);
    nodes.is_multiple_of(2).then(|| Finding::warning("quorum", summary(), "use an odd number"))
}
