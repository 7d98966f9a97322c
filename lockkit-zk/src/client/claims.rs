//! What a session has to do with a claim, and how far that has come.

use lockkit_core::{Fence, HolderInfo};

use crate::wire::value::Value;

/// What a session has to do with a claim.
#[derive(Clone, Debug)]
pub(crate) struct Claimed {
    /// The path of the lock.
    pub(crate) lock: String,
    /// For how many fences its node was asked for at first.
    pub(crate) span: u32,
    pub(crate) stage: Stage,
    /// Whether a watch tells if the node is deleted.
    pub(crate) watched: bool,
    /// Whether its release was asked for, so that a node of it may go at any time.
    pub(crate) releasing: bool,
    /// Whether the node says what the grant says, and before the grant what it said at first. It is not known while a write to it is not
    /// answered, or what was written has not been granted.
    pub(crate) written: bool,
    /// Whether the lease was promised for longer than the session is sure to last by now.
    pub(crate) cut: bool,
}

impl Claimed {
    /// A claim whose node is asked for in the lock of this path, for so many fences.
    pub(crate) fn asked(lock: String, span: u32) -> Self {
        Self { lock, span, stage: Stage::Asked, watched: false, releasing: false, written: true, cut: false }
    }

    /// Its node, as far as it is known.
    pub(crate) fn node(&self) -> Option<&Node> {
        match &self.stage {
            Stage::Queued(node) | Stage::Held(node, _) => Some(node),
            Stage::Asked | Stage::Gone => None,
        }
    }
}

/// How far a claim has come.
#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// Its node was asked for, and may exist or not.
    Asked,
    /// It has a node, which waits, or holds the lock without knowing it.
    Queued(Node),
    /// It holds the lock.
    Held(Node, Grant),
    /// It held the lock, and its node was deleted by somebody else.
    Gone,
}

/// A claim's node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// The number of the transaction that made it, or if it took the place of another node, one no later than that of the
    /// first node that had the place: all that stand behind it have later ones.
    pub(crate) czxid: i64,
    pub(crate) sequence: i64,
}

/// What was granted.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) fence: Fence,
    pub(crate) span: u32,
    pub(crate) depth: u32,
    /// Whether the node's data has to spell out the fence.
    pub(crate) explicit: bool,
    pub(crate) holder: HolderInfo,
}

impl Grant {
    pub(crate) fn value(&self) -> Value {
        Value {
            depth: self.depth,
            span: self.span,
            fence: self.explicit.then_some(self.fence),
            holder: self.holder.clone(),
        }
    }
}
