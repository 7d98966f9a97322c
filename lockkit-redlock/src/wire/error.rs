//! A quorum's failures carry each node's own error.

use std::{error::Error as StdError, sync::Arc};

use lockkit_core::{Effect, Error, ErrorKind};

use crate::wire::votes::majority;

/// What went wrong at each node, when too many of them failed: the source of the quorum's error.
#[derive(Clone, Debug, Default, thiserror::Error)]
#[error("{}", .0.iter().map(NodeError::line).collect::<Vec<_>>().join("; "))]
pub struct NodeErrors(Vec<NodeError>);

/// What went wrong at one node.
#[derive(Clone, Debug)]
pub struct NodeError {
    /// The node's name.
    pub node: Arc<str>,
    /// Its own error.
    pub error: Error,
}

impl NodeError {
    fn line(&self) -> String {
        format!("{}: {}: {}", self.node, self.error.kind(), self.error.message())
    }
}

impl NodeErrors {
    /// The nodes' errors behind a quorum's error, if that is what it is.
    #[must_use]
    pub fn of(error: &Error) -> Option<&Self> {
        let source = StdError::source(error)?;
        // An error keeps its source behind a pointer, which is what it may show.
        let behind = source.downcast_ref::<Arc<dyn StdError + Send + Sync>>();
        source.downcast_ref().or_else(|| behind.and_then(|source| source.downcast_ref()))
    }

    /// The errors, in the order in which they came.
    pub fn iter(&self) -> impl Iterator<Item = &NodeError> {
        self.0.iter()
    }

    /// Adds the error of a node.
    pub fn push(&mut self, node: &Arc<str>, error: Error) {
        self.0.push(NodeError { node: Arc::clone(node), error });
    }

    /// The kind that all share; otherwise the store as a whole is unavailable.
    fn kind(&self) -> ErrorKind {
        let mut kinds = self.0.iter().map(|node| node.error.kind());
        match kinds.next() {
            Some(first) if kinds.all(|kind| kind == first) => first,
            _ => ErrorKind::Unavailable,
        }
    }

    /// Makes one error of all. `got` of `nodes` did what was asked.
    #[must_use]
    pub fn into_error(self, got: usize, nodes: usize, effect: Effect) -> Error {
        let message = format!("{got} of {nodes} nodes did it, {} are needed; {self}", majority(nodes));
        let error = Error::new(self.kind(), message).with_source(self);
        match effect {
            Effect::None => error,
            Effect::Unknown => error.unknown_effect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_has_its_say_in_one_line() {
        let mut errors = NodeErrors::default();
        errors.push(&"redis a:1".into(), Error::new(ErrorKind::Unavailable, "connection refused"));
        errors.push(&"redis b:1".into(), Error::new(ErrorKind::TimedOut, "no answer in 50ms").unknown_effect());
        let error = errors.into_error(1, 3, Effect::Unknown);
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, Effect::Unknown));
        assert_eq!(
            error.message(),
            "1 of 3 nodes did it, 2 are needed; redis a:1: unavailable: connection refused; redis b:1: timed out: no answer in 50ms"
        );
        assert_eq!(NodeErrors::of(&error).expect("the nodes' errors").iter().count(), 2);
        assert!(NodeErrors::of(&Error::new(ErrorKind::Lost, "another")).is_none());
    }

    #[test]
    fn a_kind_that_all_share_is_the_quorums() {
        let mut errors = NodeErrors::default();
        for node in ["a", "b"] {
            errors.push(&node.into(), Error::new(ErrorKind::Denied, "no permission"));
        }
        assert_eq!(errors.into_error(0, 3, Effect::None).kind(), ErrorKind::Denied);
    }
}
