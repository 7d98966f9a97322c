//! The members of a cluster, and which of them serves which slot.
//!
//! The map of the slots is asked for when it is needed: at first, when a member says that a slot has moved, and when one
//! could not be reached. The primaries are asked at once, over the connections that there are to them. If there is none to
//! most of them, all members are asked, over connections for that alone: a replica can tell as well. The answer with the
//! highest configuration epoch counts.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError, RwLock},
    time::Duration,
};

use lockkit_core::{
    Alarm, Error, ErrorKind, Result,
    store::{Reconnections, unpoisoned},
};
use tokio::{
    runtime::Handle,
    task::JoinSet,
    time::{Instant, timeout},
};

use crate::{
    client::{
        node::{Node, Route, Sorted},
        note::{NoteKey, Ranges},
        rounds::Rounds,
        slots::{self, MemberMap, Range},
        vote,
    },
    config::{RedisConfig, Topology},
    wire::{
        address::Address,
        name::{self, Names},
        redirect::{Redirect, settled, unserved},
    },
};

/// How often one request is sent on.
const HOPS: u32 = 5;
/// The map is not asked for again within this time, unless a member says that it is wrong.
const FRESH: Duration = Duration::from_millis(100);

/// What members are asked, side by side.
type Questions = JoinSet<Result<MemberMap>>;

/// The members of a cluster.
#[derive(Debug)]
pub(crate) struct Cluster {
    config: RedisConfig,
    names: Names,
    alarm: Alarm,
    reconnections: Reconnections,
    seeds: Vec<Address>,
    map: RwLock<Arc<Map>>,
    /// When a member failed last.
    failed: Mutex<Option<Instant>>,
    rounds: Rounds<Result<()>>,
    /// Servers that slots are on their way to and that serve none yet. Nothing is granted there, so they keep no note.
    guests: Mutex<HashMap<Address, Arc<Node>>>,
    /// Where this was made, and where the connections to members are to live.
    home: Option<Handle>,
}

#[derive(Debug, Default)]
struct Map {
    /// When it was asked for.
    asked: Option<Instant>,
    /// Which member serves which slots, in order.
    ranges: Vec<(u16, u16, Arc<Node>)>,
    /// The servers in `ranges`.
    nodes: HashMap<Address, Arc<Node>>,
    /// All members, replicas too.
    addresses: Vec<Address>,
}

impl Cluster {
    pub(crate) fn new(config: RedisConfig, names: Names, alarm: Alarm, reconnections: Reconnections) -> Self {
        let seeds = match &config.topology {
            Topology::Cluster { seeds } => seeds.clone(),
            Topology::Single | Topology::Sentinel { .. } => Vec::new(),
        };
        let config = RedisConfig { topology: Topology::Single, ..config };
        let (map, failed, guests) = <(RwLock<_>, Mutex<_>, Mutex<_>)>::default();
        let (rounds, home) = (Rounds::new(), Handle::try_current().ok());
        Self { config, names, alarm, reconnections, seeds, map, failed, rounds, guests, home }
    }

    /// See [`Nodes::route`](crate::client::nodes::Nodes::route).
    pub(crate) async fn route(self: &Arc<Self>, lock: &str) -> Result<Route> {
        let slot = name::slot(lock);
        let mut node = self.fresh().await?.node_of(slot);
        if node.is_none() {
            self.refresh(true).await?;
            node = self.map().node_of(slot);
        }
        node.map(|node| Route { node, asking: false, hops: 0 }).ok_or_else(unserved)
    }

    /// See [`Nodes::follow`](crate::client::nodes::Nodes::follow).
    pub(crate) async fn follow(self: &Arc<Self>, route: Route, error: Error) -> Result<Route> {
        let hops = route.hops + 1;
        match Redirect::of(&error) {
            Some(_) if hops > HOPS => Err(settled(error)),
            Some(to) => {
                let to = to.at_host(route.node.dialer.host());
                if to.asking {
                    return Ok(Route { node: self.node_at(&to), asking: true, hops });
                }
                // What the others say may be older than what this member says, so it is followed in any case.
                self.look(true).await;
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
            *unpoisoned(&self.failed) = Some(Instant::now());
        }
    }

    pub(crate) fn known(&self, lock: &str) -> Option<Arc<Node>> {
        self.map().node_of(name::slot(lock))
    }

    pub(crate) async fn all(self: &Arc<Self>) -> Result<Vec<Arc<Node>>> {
        Ok(self.fresh().await?.nodes.values().map(Arc::clone).collect())
    }

    /// See [`Nodes::sort`](crate::client::nodes::Nodes::sort).
    pub(crate) async fn sort<T: Send>(
        self: &Arc<Self>,
        things: Vec<T>,
        lock: impl Fn(&T) -> String + Send,
    ) -> Result<Sorted<T>> {
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

    /// The map, asked for if there is reason to. If nobody answers soon, the one that there was still helps to reach the
    /// members that it has right.
    async fn fresh(self: &Arc<Self>) -> Result<Arc<Map>> {
        let map = self.map();
        match map.asked {
            Some(asked) if *unpoisoned(&self.failed) <= Some(asked) => return Ok(map),
            Some(_) => self.look(false).await,
            None => self.refresh(false).await?,
        }
        Ok(self.map())
    }

    /// Asks the members for the map, and waits for a while only: what they say is taken over whenever it comes.
    pub(crate) async fn look(self: &Arc<Self>, is_wrong: bool) {
        _ = timeout(self.config.timeout / 4, self.refresh(is_wrong)).await;
    }

    /// Asks the members for the map, once for all who want it at the same time.
    async fn refresh(self: &Arc<Self>, is_wrong: bool) -> Result<()> {
        if !is_wrong && self.map().asked.is_some_and(|asked| asked.elapsed() < FRESH) {
            return Ok(());
        }
        let ask = || {
            let cluster = Arc::clone(self);
            async move { cluster.ask().await }
        };
        // Two questions, if the first one is in vain.
        self.rounds.join(self.config.timeout.saturating_mul(2), ask).await?
    }

    async fn ask(&self) -> Result<()> {
        let asked = Instant::now();
        let map = self.map();
        let mut told = self.newest(map.questions(self.config.timeout)).await;
        if told.is_err() {
            told = self.newest(self.questions_to_all(&map)).await;
        }
        self.adopt(asked, told?);
        Ok(())
    }

    async fn newest(&self, questions: Questions) -> Result<Vec<Range>> {
        // A map that is wrong is corrected by the members that it leads to.
        vote::newest(questions, self.config.timeout / 4, |_, _| true).await.map(|(ranges, _)| ranges)
    }

    fn questions_to_all(&self, map: &Map) -> Questions {
        let mut addresses = map.addresses.clone();
        addresses.extend(self.seeds.iter().cloned());
        addresses.sort();
        addresses.dedup();
        let mut questions = Questions::new();
        for address in addresses {
            let config = self.config.clone();
            questions.spawn(async move { slots::ask_anew(&config, &address).await });
        }
        questions
    }

    /// Takes over a map, unless there is one that was asked for later: an answer may have taken long, on a runtime that was not
    /// driven. Servers that were there before are kept, with their connections; the others' end.
    fn adopt(&self, asked: Instant, told: Vec<Range>) {
        let mut current = self.map.write().unwrap_or_else(PoisonError::into_inner);
        if current.asked > Some(asked) {
            return;
        }
        let mut map = Map { asked: Some(asked), ..Map::default() };
        let mut slots: HashMap<&Address, Vec<(u16, u16)>> = HashMap::new();
        for Range { first, last, addresses } in &told {
            map.addresses.extend(addresses.iter().cloned());
            if let Some(primary) = addresses.first() {
                slots.entry(primary).or_default().push((*first, *last));
            }
        }
        map.addresses.sort();
        map.addresses.dedup();
        for (address, slots) in slots {
            let node = match current.nodes.get(address) {
                Some(node) => {
                    node.keep_note_in(&slots);
                    Arc::clone(node)
                }
                None => self.make(address, &slots),
            };
            map.ranges.extend(slots.iter().map(|(first, last)| (*first, *last, Arc::clone(&node))));
            map.nodes.insert(address.clone(), node);
        }
        map.ranges.sort_by_key(|(first, ..)| *first);
        let gone = std::mem::replace(&mut *current, Arc::new(map));
        let map = Arc::clone(&current);
        if gone.nodes.keys().any(|address| !map.nodes.contains_key(address)) {
            // `close` counts a connection that is there, but not one that is still being made, which its waiters will use.
            self.reconnections.add_one();
        }
        drop(current);
        unpoisoned(&self.guests).retain(|address, _| !map.nodes.contains_key(address));
        for (_, node) in gone.nodes.iter().filter(|(address, _)| !map.nodes.contains_key(*address)) {
            node.dialer.close();
        }
    }

    fn make(&self, address: &Address, slots: &Ranges) -> Arc<Node> {
        let note = NoteKey::new(&self.names, slots);
        self.at_home(|| Arc::new(Node::new(&self.config_of(address), note, Some(&self.alarm), &self.reconnections)))
    }

    fn config_of(&self, (host, port): &Address) -> RedisConfig {
        RedisConfig { host: host.clone(), port: *port, ..self.config.clone() }
    }

    /// The server that a slot is on its way to. It need not be in the map yet.
    fn node_at(&self, to: &Redirect) -> Arc<Node> {
        if let Some(node) = self.map().nodes.get(&to.address) {
            return Arc::clone(node);
        }
        let mut guests = unpoisoned(&self.guests);
        let guest = guests.entry(to.address.clone());
        let make = || Arc::new(Node::new(&self.config_of(&to.address), NoteKey::default(), None, &self.reconnections));
        Arc::clone(guest.or_insert_with(|| self.at_home(make)))
    }

    /// What is made connects where it was made, and the runtime of an operation may not be driven any more when that is over.
    fn at_home<T>(&self, make: impl FnOnce() -> T) -> T {
        let _entered = self.home.as_ref().map(Handle::enter);
        make()
    }

    /// Corrects the map by a redirect, until it is asked for again.
    pub(crate) fn learn(&self, to: &Redirect) -> Arc<Node> {
        let mut current = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let known = current.nodes.get(&to.address).map(Arc::clone);
        let node = known.unwrap_or_else(|| self.make(&to.address, &[(to.slot, to.slot)]));
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

    /// Asks the servers that there are connections to, if they are a majority.
    fn questions(&self, bound: Duration) -> Questions {
        let nodes = || self.nodes.values().filter_map(|node| Some((Arc::clone(node), node.dialer.current()?)));
        let mut questions = Questions::new();
        if nodes().count() > self.nodes.len() / 2 {
            for (node, connection) in nodes() {
                questions.spawn(async move { slots::ask(node.dialer.host(), &connection, bound).await });
            }
        }
        questions
    }

    /// The same map, but for one slot.
    fn with(&self, to: &Redirect, node: &Arc<Node>) -> Self {
        let slot = to.slot;
        let (nodes, addresses) = (self.nodes.clone(), self.addresses.clone());
        let mut map = Self { asked: self.asked, ranges: Vec::new(), nodes, addresses };
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
        map.nodes.entry(to.address.clone()).or_insert_with(|| Arc::clone(node));
        if !map.addresses.contains(&to.address) {
            map.addresses.push(to.address.clone());
        }
        map
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_question_that_does_not_end_leaves_the_map_stale() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let config = RedisConfig::cluster([("127.0.0.1", silent.local_addr().expect("bound").port())]);
        let cluster =
            Cluster::new(config, Names::new("lockkit:").expect("prefix"), Alarm::new(), Reconnections::default());
        let left = tokio::time::timeout(Duration::from_millis(20), cluster.ask()).await;
        assert!(left.is_err() && cluster.map().asked.is_none());
    }

    #[tokio::test]
    async fn an_older_map_takes_no_place() {
        let names = Names::new("lockkit:").expect("prefix");
        let cluster = Cluster::new(RedisConfig::cluster([("a", 1)]), names, Alarm::new(), Reconnections::default());
        let all = |host: &str| vec![Range { first: 0, last: 16383, addresses: vec![(host.into(), 1)] }];
        let (older, newer) = (Instant::now(), Instant::now() + FRESH);
        cluster.adopt(newer, all("new"));
        cluster.adopt(older, all("old"));
        assert_eq!(cluster.map().node_of(7).expect("served").dialer.host(), "new");
    }

    #[tokio::test]
    async fn one_slot_is_corrected() {
        let names = Names::new("lockkit:").expect("prefix");
        let cluster = Cluster::new(RedisConfig::cluster([("a", 1)]), names, Alarm::new(), Reconnections::default());
        let range = |first, last, host: &str| Range { first, last, addresses: vec![(host.into(), 1)] };
        cluster.adopt(Instant::now(), vec![range(0, 99, "a"), range(100, 16383, "b")]);
        let shape = || {
            let map = cluster.map();
            map.ranges
                .iter()
                .map(|(first, last, node)| (*first, *last, node.dialer.host().to_owned()))
                .collect::<Vec<_>>()
        };
        let at = |address: &str, slot| Redirect { address: (address.into(), 1), slot, asking: false };
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
