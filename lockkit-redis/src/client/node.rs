//! One server that keeps locks.

use std::sync::Arc;

use lockkit_core::{Alarm, store::Reconnections};

use crate::{
    client::{
        dialer::Dialer,
        note::{NoteKey, Ranges},
        replicas::Replicas,
        subscriptions::Subscriptions,
    },
    config::RedisConfig,
};

/// One server, and what this store has to do with it.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) dialer: Arc<Dialer>,
    pub(crate) subscriptions: Arc<Subscriptions>,
    pub(crate) replicas: Option<Replicas>,
    /// Where the server's note about its epoch is, or would be.
    note: Arc<NoteKey>,
}

impl Node {
    /// A server that is not connected to yet, with the key of its note about its epoch. There is an alarm where servers
    /// can take over from each other.
    pub(crate) fn new(
        config: &RedisConfig,
        note: NoteKey,
        alarm: Option<&Alarm>,
        reconnections: &Reconnections,
    ) -> Self {
        let note = Arc::new(note);
        let keeps = alarm.map(|_| Arc::clone(&note));
        let dialer = |alarm, subscriptions: &Arc<Subscriptions>| {
            Dialer::new(config.clone(), keeps.clone(), alarm, Arc::clone(subscriptions), reconnections.clone())
        };
        let replicas =
            (config.replicas > 0).then(|| Replicas::new(config, dialer(None, &Arc::default()), Arc::clone(&note)));
        let subscriptions = Arc::new(Subscriptions::default());
        Self { dialer: dialer(alarm.cloned(), &subscriptions), subscriptions, replicas, note }
    }

    /// The server has these slots now: its note is to be in one of them.
    pub(crate) fn keep_note_in(&self, slots: &Ranges) {
        if self.note.keep_in(slots) {
            self.dialer.write_note();
        }
    }
}

/// The way to the server of a lock.
#[derive(Clone, Debug)]
pub(crate) struct Route {
    pub(crate) node: Arc<Node>,
    /// The lock's slot is on its way to that server, which has to be told that we know (`ASKING`).
    pub(crate) asking: bool,
    pub(crate) hops: u32,
}

/// Things that were sorted by the server that they belong to.
pub(crate) struct Sorted<T> {
    pub(crate) by_node: Vec<(Arc<Node>, Vec<T>)>,
    /// Those that nobody serves at the moment.
    pub(crate) orphans: Vec<T>,
}
