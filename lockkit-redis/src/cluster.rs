//! The members of a cluster, and which of them serves which slot.
//!
//! The map of the slots is asked for when it is needed: at first, when a member says that a slot has moved, and when one
//! could not be reached. All members are asked at once, over connections of their own, for a replica can tell as well;
//! the answer with the highest epoch counts.

use std::{
    collections::HashMap,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Alarm, Error, ErrorKind, Result};
use tokio::{sync::Mutex, task::JoinSet, time::Instant};

use crate::{
    config::{RedisConfig, Topology},
    name::{self, Names},
    node::{Node, Route, Sorted},
    sentinel::Place,
    slots::{self, Range, Signpost, undecided, unserved},
    vote,
};

/// How often one request is sent on.
const HOPS: u32 = 5;
/// The map is not asked for again within this time, unless a member says that it is wrong.
const FRESH: Duration = Duration::from_millis(100);

/// The members of a cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    config: RedisConfig,
    names: Names,
    alarm: Alarm,
    seeds: Vec<Place>,
    map: RwLock<Arc<Map>>,
    is_stale: AtomicBool,
    /// When the map was last asked for, and what came of it; held by the one who asks.
    flight: Mutex<Option<(Instant, Result<()>)>>,
}

#[derive(Debug, Default)]
struct Map {
    /// Who serves which slots, in order.
    ranges: Vec<(u16, u16, Arc<Node>)>,
    /// The servers in `ranges`, each with the slot that its note lies in.
    nodes: HashMap<Place, (u16, Arc<Node>)>,
    /// All members, replicas too.
    places: Vec<Place>,
}

impl Cluster {
    pub(crate) fn new(config: RedisConfig, names: Names, alarm: Alarm) -> Self {
        let seeds = match &config.topology {
            Topology::Cluster { seeds } => seeds.clone(),
            Topology::Single | Topology::Sentinel { .. } => Vec::new(),
        };
        let config = RedisConfig { topology: Topology::Single, ..config };
        let is_stale = AtomicBool::new(true);
        Self { config, names, alarm, seeds, map: RwLock::default(), is_stale, flight: Mutex::default() }
    }

    /// See [`Nodes::route`](crate::node::Nodes::route).
    pub(crate) async fn route(&self, lock: &str) -> Result<Route> {
        let slot = name::slot(lock);
        let mut node = self.fresh().await?.node_of(slot);
        if node.is_none() {
            self.refresh(true).await?;
            node = self.map().node_of(slot);
        }
        node.map(|node| Route { node, asking: false, hops: 0 }).ok_or_else(unserved)
    }

    /// See [`Nodes::follow`](crate::node::Nodes::follow).
    pub(crate) async fn follow(&self, route: Route, error: Error) -> Result<Route> {
        let hops = route.hops + 1;
        match Signpost::of(&error) {
            Some(_) if hops > HOPS => Err(undecided()),
            Some(to) => {
                let to = to.at_host(route.node.link.host());
                if to.asking {
                    return Ok(Route { node: self.node_at(&to), asking: true, hops });
                }
                // What the others say may be older than what this member says, so it is followed in any case.
                _ = self.refresh(true).await;
                Ok(Route { node: self.learn(&to), asking: false, hops })
            }
            None => {
                self.note_failure(&error);
                Err(error)
            }
        }
    }

    /// After a failure of a member the map is asked for before it is used again.
    pub(crate) fn note_failure(&self, error: &Error) {
        if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::TimedOut) {
            self.is_stale.store(true, Ordering::Release);
        }
    }

    pub(crate) fn known(&self, lock: &str) -> Option<Arc<Node>> {
        self.map().node_of(name::slot(lock))
    }

    pub(crate) async fn all(&self) -> Result<Vec<Arc<Node>>> {
        Ok(self.fresh().await?.nodes.values().map(|(_, node)| Arc::clone(node)).collect())
    }

    /// See [`Nodes::sort`](crate::node::Nodes::sort).
    pub(crate) async fn sort<T: Send>(&self, things: Vec<T>, lock: impl Fn(&T) -> String + Send) -> Result<Sorted<T>> {
        let map = self.fresh().await?;
        let mut sorted = Sorted { by_node: Vec::<(Arc<Node>, Vec<T>)>::new(), orphans: Vec::new() };
        for thing in things {
            let Some(node) = map.node_of(name::slot(&lock(&thing))) else {
                sorted.orphans.push(thing);
                continue;
            };
            match sorted.by_node.iter_mut().find(|(other, _)| Arc::ptr_eq(other, &node)) {
                Some((_, things)) => things.push(thing),
                None => sorted.by_node.push((node, vec![thing])),
            }
        }
        Ok(sorted)
    }

    /// The map, asked for if there is reason to. If nobody answers, the one that there was still helps to reach the
    /// members that it has right.
    async fn fresh(&self) -> Result<Arc<Map>> {
        if self.is_stale.load(Ordering::Acquire)
            && let Err(e) = self.refresh(false).await
            && self.map().ranges.is_empty()
        {
            return Err(e);
        }
        Ok(self.map())
    }

    /// Asks the members for the map, once for all who want it at the same time.
    pub(crate) async fn refresh(&self, is_wrong: bool) -> Result<()> {
        let wanted = Instant::now();
        let mut flight = self.flight.lock().await;
        if let Some((asked, outcome)) = &*flight
            && (*asked >= wanted || (!is_wrong && outcome.is_ok() && asked.elapsed() < FRESH))
        {
            return outcome.clone();
        }
        let asked = Instant::now();
        self.is_stale.store(false, Ordering::Release);
        let mut places = self.map().places.clone();
        places.extend(self.seeds.iter().cloned());
        places.sort();
        places.dedup();
        let mut questions = JoinSet::new();
        for place in places {
            let config = self.config.clone();
            questions.spawn(async move { slots::ask(&config, &place).await });
        }
        let outcome = vote::newest(questions, self.config.timeout / 4).await.map(|(ranges, _)| self.adopt(ranges));
        if outcome.is_err() {
            self.is_stale.store(true, Ordering::Release);
        }
        *flight = Some((asked, outcome.clone()));
        outcome
    }

    /// Takes over a map. Servers that were there before are kept, with their connections; the others' end.
    fn adopt(&self, told: Vec<Range>) {
        let mut current = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let mut map = Map::default();
        for range in &told {
            map.places.extend(range.places.iter().cloned());
        }
        map.places.sort();
        map.places.dedup();
        for Range { first, last, places } in told {
            let Some(place) = places.into_iter().next() else { continue };
            let node = match map.nodes.get(&place) {
                Some((_, node)) => Arc::clone(node),
                None => {
                    // The first range of a server has its lowest slot.
                    let kept = current.nodes.get(&place).filter(|(slot, _)| *slot == first);
                    let node = kept.map_or_else(|| self.make(&place, first), |(_, node)| Arc::clone(node));
                    map.nodes.insert(place, (first, Arc::clone(&node)));
                    node
                }
            };
            map.ranges.push((first, last, node));
        }
        let gone = std::mem::replace(&mut *current, Arc::new(map));
        let map = Arc::clone(&current);
        drop(current);
        for (_, node) in gone.nodes.values() {
            if !map.nodes.values().any(|(_, other)| Arc::ptr_eq(other, node)) {
                node.link.close();
            }
        }
    }

    fn make(&self, (host, port): &Place, slot: u16) -> Arc<Node> {
        let config = RedisConfig { host: host.clone(), port: *port, ..self.config.clone() };
        Arc::new(Node::new(&config, &self.names.note(Some(slot)), Some(&self.alarm)))
    }

    /// The server that a signpost names. It need not be in the map yet.
    fn node_at(&self, to: &Signpost) -> Arc<Node> {
        let known = self.map().nodes.get(&to.place).map(|(_, node)| Arc::clone(node));
        known.unwrap_or_else(|| self.make(&to.place, to.slot))
    }

    /// Corrects the map by a signpost, until it is asked for again.
    pub(crate) fn learn(&self, to: &Signpost) -> Arc<Node> {
        let mut current = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let known = current.nodes.get(&to.place).map(|(_, node)| Arc::clone(node));
        let node = known.unwrap_or_else(|| self.make(&to.place, to.slot));
        if !current.node_of(to.slot).is_some_and(|owner| Arc::ptr_eq(&owner, &node)) {
            *current = Arc::new(current.with(to, &node));
        }
        node
    }

    fn map(&self) -> Arc<Map> {
        Arc::clone(&self.map.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Map {
    fn node_of(&self, slot: u16) -> Option<Arc<Node>> {
        let index = self.ranges.partition_point(|(_, last, _)| *last < slot);
        self.ranges.get(index).filter(|(first, ..)| *first <= slot).map(|(_, _, node)| Arc::clone(node))
    }
}

impl Map {
    /// The same map, but for one slot.
    fn with(&self, to: &Signpost, node: &Arc<Node>) -> Self {
        let slot = to.slot;
        let mut map = Self { ranges: Vec::new(), nodes: self.nodes.clone(), places: self.places.clone() };
        for (first, last, owner) in &self.ranges {
            if *first < slot {
                map.ranges.push((*first, (*last).min(slot - 1), Arc::clone(owner)));
            }
            if *last > slot {
                map.ranges.push(((*first).max(slot + 1), *last, Arc::clone(owner)));
            }
        }
        map.ranges.push((slot, slot, Arc::clone(node)));
        map.ranges.sort_by_key(|(first, ..)| *first);
        map.nodes.entry(to.place.clone()).or_insert_with(|| (slot, Arc::clone(node)));
        if !map.places.contains(&to.place) {
            map.places.push(to.place.clone());
        }
        map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_slot_is_corrected() {
        let names = Names::new("lockkit:").expect("prefix");
        let cluster = Cluster::new(RedisConfig::cluster([("a", 1)]), names, Alarm::new());
        let range = |first, last, host: &str| Range { first, last, places: vec![(host.into(), 1)] };
        cluster.adopt(vec![range(0, 99, "a"), range(100, 16383, "b")]);
        let shape = || {
            let map = cluster.map();
            map.ranges
                .iter()
                .map(|(first, last, node)| (*first, *last, node.link.host().to_owned()))
                .collect::<Vec<_>>()
        };
        let at = |place: &str, slot| Signpost { place: (place.into(), 1), slot, asking: false };
        let node = cluster.learn(&at("b", 50));
        assert!(Arc::ptr_eq(&node, &cluster.map().node_of(16383).expect("served")), "a server is known once");
        let named = |ranges: &[(u16, u16, &str)]| -> Vec<_> {
            ranges.iter().map(|(first, last, host)| (*first, *last, (*host).to_owned())).collect()
        };
        assert_eq!(shape(), named(&[(0, 49, "a"), (50, 50, "b"), (51, 99, "a"), (100, 16383, "b")]));
        let new = cluster.learn(&at("c", 0));
        assert!(Arc::ptr_eq(&new, &cluster.learn(&at("c", 0))));
        cluster.learn(&at("c", 16383));
        let expected =
            [(0, 0, "c"), (1, 49, "a"), (50, 50, "b"), (51, 99, "a"), (100, 16382, "b"), (16383, 16383, "c")];
        assert_eq!(shape(), named(&expected));
    }
}
