//! Which server keeps a lock: always the same, or one of a cluster.

use std::sync::Arc;

use lockkit_core::{Alarm, Error, Result, store::Reconnections};

use crate::{
    client::{
        cluster::Cluster,
        node::{Node, Route, Sorted},
        note::NoteKey,
    },
    config::{RedisConfig, Topology},
    wire::{
        name::{self, Names},
        redirect::{self, Redirect},
    },
};

/// All servers of a store.
#[derive(Debug)]
pub(crate) enum Nodes {
    One(Arc<Node>),
    Cluster(Arc<Cluster>),
}

impl Nodes {
    /// There is an alarm where servers can take over from each other.
    pub(crate) fn new(config: RedisConfig, names: &Names, alarm: Option<Alarm>, reconnections: Reconnections) -> Self {
        match alarm {
            Some(alarm) if matches!(config.topology, Topology::Cluster { .. }) => {
                Self::Cluster(Arc::new(Cluster::new(config, names.clone(), alarm, reconnections)))
            }
            alarm => {
                let note = NoteKey::new(names, &[(0, name::SLOTS - 1)]);
                Self::One(Arc::new(Node::new(&config, note, alarm.as_ref(), &reconnections)))
            }
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

    /// The way on, if an error was a redirect. A request that was answered by one was not carried out.
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
        self.is_cluster() && Redirect::of(error).is_some()
    }

    /// What to tell if a request was sent on and on.
    pub(crate) fn settle(&self, error: Error) -> Error {
        if self.is_cluster() { redirect::settled(error) } else { error }
    }

    /// Finds out anew who serves what, after errors that say that others are to be asked.
    pub(crate) async fn redirect(&self, errors: &[Error]) {
        if let Self::Cluster(cluster) = self {
            // If nobody can be asked, or what they say is older, the errors tell all the same.
            cluster.look(true).await;
            for to in errors.iter().filter_map(Redirect::of).filter(|to| !to.asking && !to.address.0.is_empty()) {
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
