//! The nodes of a store and what it knows of them and its claims: what all calls share.

use std::{collections::HashMap, sync::Mutex, time::Duration};

use lockkit_core::{
    Hold, LockKey, LockStore, Moment, Token, Waiting,
    store::{Background, unpoisoned},
};

use crate::{
    client::{backlog::Owed, claims::Claims, node::Node, stats::Counters},
    config::RedlockConfig,
    wire::votes::majority,
};

/// How many notes are kept of where to wait. They are taken at once, but for those of callers that gave up just then.
const MOST_MEETINGS: usize = 1024;

/// What the calls of a store share. Background tasks hold it too.
pub(crate) struct Quorum {
    pub(crate) nodes: Vec<Node>,
    pub(crate) majority: usize,
    pub(crate) config: RedlockConfig,
    pub(crate) claims: Claims,
    pub(crate) stats: Counters,
    pub(crate) background: Background,
    /// Where the next call for a lock waits.
    meetings: Mutex<HashMap<LockKey, usize>>,
}

impl Quorum {
    pub(crate) fn new(nodes: Vec<Node>, config: RedlockConfig) -> Self {
        let majority = majority(nodes.len());
        let (claims, stats) = (Claims::default(), Counters::default());
        let (background, meetings) = (Background::new(), Mutex::default());
        Self { nodes, majority, config, claims, stats, background, meetings }
    }

    /// Goes on with the releases that were to be repeated on a runtime that has ended.
    pub(crate) fn adopt_work(&self) {
        self.nodes.iter().for_each(|node| node.adopt_work(&self.config.clock, &self.background));
    }

    /// Has a release that failed at a node repeated there.
    pub(crate) fn owe(&self, node: usize, owed: Owed) {
        self.nodes[node].owe(owed, &self.config.clock, &self.background);
    }

    /// The nodes in the order in which the lock's waiters prefer them.
    fn meeting_order(&self, key: &LockKey) -> impl Iterator<Item = usize> {
        let nodes = self.nodes.len();
        let first = key.as_str().bytes().fold(0_usize, |sum, byte| (sum * 31 + usize::from(byte)) % nodes);
        (first..nodes).chain(0..first).filter(|node| can_wake(self.nodes[*node].store().info().capability.waiting))
    }

    /// The node whose answer decides where to wait.
    pub(crate) fn preferred(&self, key: &LockKey) -> Option<usize> {
        self.meeting_order(key).find(|node| !self.nodes[*node].is_slow())
    }

    /// Where to wait, given the nodes at which the lock is held.
    pub(crate) fn rendezvous(&self, key: &LockKey, held_at: &[usize]) -> Option<usize> {
        self.meeting_order(key).find(|node| held_at.contains(node))
    }

    /// Has the next call for this lock that may wait do so at this node. If another caller takes the note, this one asks all nodes
    /// once more.
    pub(crate) fn note_meeting(&self, key: &LockKey, rendezvous: usize) {
        let mut meetings = unpoisoned(&self.meetings);
        if meetings.len() >= MOST_MEETINGS {
            meetings.clear();
        }
        meetings.insert(key.clone(), rendezvous);
    }

    pub(crate) fn take_meeting(&self, key: &LockKey) -> Option<usize> {
        unpoisoned(&self.meetings).remove(key)
    }

    /// How long to stay away after a lost race: at random, at least as long as it takes to lock a majority and on
    /// average 2.5 times that, so that of several losers one is likely to be done before the next begins.
    pub(crate) fn retry_delay(&self) -> Duration {
        let lock_time = self.stats.lock_time().clamp(Duration::from_micros(200), Duration::from_millis(100));
        let random = Token::random().map_or(128, |token| token.as_bytes()[0]);
        lock_time + lock_time * 3 * u32::from(random) / 255
    }

    /// When a node's lease may lapse, on this store's clock, if that is before `end`: a node that ends leases with its
    /// session may give less than was asked for.
    pub(crate) fn end_of(&self, node: usize, hold: &Hold, end: Moment) -> Moment {
        let info = self.nodes[node].store().info();
        match info.capability.liveness.session {
            None => end,
            Some(_) => end.min(self.config.clock.now() + hold.until.since(info.clock.now())),
        }
    }
}

pub(crate) fn can_wake(waiting: Waiting) -> bool {
    matches!(waiting, Waiting::Notify | Waiting::Queue)
}
