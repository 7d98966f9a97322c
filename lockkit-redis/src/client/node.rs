//! Which server keeps a lock: always the same, or one of a cluster.

use std::sync::{Arc, PoisonError};

use lockkit_core::{Alarm, Error, Result};

use crate::{
    client::{
        cluster::Cluster,
        connection::{Link, NoteKey},
        replicas::Replicas,
        slots::{self, Signpost},
        subscriptions::Wake,
    },
    config::{RedisConfig, Topology},
    wire::name::Names,
};

/// One server, and what this store has to do with it.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) link: Link,
    pub(crate) wake: Arc<Wake>,
    pub(crate) replicas: Option<Replicas>,
    /// Where the server's note about its reign is, or would be.
    note: Arc<NoteKey>,
}

impl Node {
    /// A server that is not connected to yet, with the key of its note about its reign. There is an alarm where servers
    /// can take over from each other.
    pub(crate) fn new(config: &RedisConfig, note: String, alarm: Option<&Alarm>) -> Self {
        let note = Arc::new(NoteKey::new(note));
        let keeps = alarm.map(|_| Arc::clone(&note));
        let link = |alarm, wake: &Arc<Wake>| Link::new(config.clone(), keeps.clone(), alarm, Arc::clone(wake));
        let replicas =
            (config.replicas > 0).then(|| Replicas::new(config, link(None, &Arc::default()), Arc::clone(&note)));
        let wake = Arc::new(Wake::default());
        Self { link: link(alarm.cloned(), &wake), wake, replicas, note }
    }

    /// The slots of a server have changed: its note is to be at this key from now on.
    pub(crate) fn keep_note_at(&self, key: String) {
        let former = std::mem::replace(&mut *self.note.lock().unwrap_or_else(PoisonError::into_inner), key.clone());
        if former != key {
            self.link.write_note();
        }
    }
}

/// All servers of a store.
#[derive(Debug)]
pub(crate) enum Nodes {
    One(Arc<Node>),
    Cluster(Arc<Cluster>),
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

impl Nodes {
    /// There is an alarm where servers can take over from each other.
    pub(crate) fn new(config: RedisConfig, names: &Names, alarm: Option<Alarm>) -> Self {
        match alarm {
            Some(alarm) if matches!(config.topology, Topology::Cluster { .. }) => {
                Self::Cluster(Arc::new(Cluster::new(config, names.clone(), alarm)))
            }
            alarm => Self::One(Arc::new(Node::new(&config, names.note(|_| true), alarm.as_ref()))),
        }
    }

    /// The way to the server of a lock.
    ///
    /// # Errors
    /// If nobody knows.
    pub(crate) async fn route(&self, lock: &str) -> Result<Route> {
        match self {
            Self::One(node) => Ok(Route { node: Arc::clone(node), asking: false, hops: 0 }),
            Self::Cluster(cluster) => Box::pin(cluster.route(lock)).await,
        }
    }

    /// The way on, if an error was a signpost. A request that was answered by one was not carried out.
    ///
    /// # Errors
    /// The same error, if it was none.
    pub(crate) async fn follow(&self, route: Route, error: Error) -> Result<Route> {
        match self {
            Self::One(_) => Err(error),
            Self::Cluster(cluster) => Box::pin(cluster.follow(route, error)).await,
        }
    }

    /// The server of a lock, as far as it is known.
    pub(crate) fn known(&self, lock: &str) -> Option<Arc<Node>> {
        match self {
            Self::One(node) => Some(Arc::clone(node)),
            Self::Cluster(cluster) => cluster.known(lock),
        }
    }

    /// All servers that keep locks.
    ///
    /// # Errors
    /// If nobody knows.
    pub(crate) async fn all(&self) -> Result<Vec<Arc<Node>>> {
        match self {
            Self::One(node) => Ok(vec![Arc::clone(node)]),
            Self::Cluster(cluster) => cluster.all().await,
        }
    }

    /// Sorts things by the servers of their locks.
    ///
    /// # Errors
    /// If nobody knows the servers.
    pub(crate) async fn sort<T>(&self, things: Vec<T>, lock: impl Fn(&T) -> String + Send) -> Result<Sorted<T>>
    where
        T: Send,
    {
        match self {
            Self::One(node) => Ok(Sorted { by_node: vec![(Arc::clone(node), things)], orphans: Vec::new() }),
            Self::Cluster(cluster) => cluster.sort(things, lock).await,
        }
    }

    /// Whether an error says that another member of the cluster is to be asked; nothing was done then.
    pub(crate) fn is_redirected(&self, error: &Error) -> bool {
        self.is_cluster() && Signpost::of(error).is_some()
    }

    /// What to tell if a request was sent on and on.
    pub(crate) fn settle(&self, error: Error) -> Error {
        if self.is_redirected(&error) { slots::undecided() } else { error }
    }

    /// Finds out anew who serves what, after errors that say that others are to be asked.
    pub(crate) async fn redirect(&self, errors: &[Error]) {
        if let Self::Cluster(cluster) = self {
            // If nobody can be asked, or what they say is older, the errors tell all the same.
            _ = cluster.refresh(true).await;
            for to in errors.iter().filter_map(Signpost::of).filter(|to| !to.asking && !to.place.0.is_empty()) {
                cluster.learn(&to);
            }
        }
    }

    /// After a failure it is found out anew who serves what, before it matters again.
    pub(crate) fn note_failure(&self, error: &Error) {
        if let Self::Cluster(cluster) = self {
            cluster.note_failure(error);
        }
    }

    pub(crate) fn is_cluster(&self) -> bool {
        matches!(self, Self::Cluster(_))
    }
}
