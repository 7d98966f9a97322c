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
use redis::{AsyncConnectionConfig, Pipeline, RedisError, Value, aio::MultiplexedConnection};
use tokio::{
    sync::Mutex,
    task::JoinSet,
    time::{Instant, timeout},
};

use crate::{
    config::{RedisConfig, Topology},
    error::{self, Sent},
    name::{self, Names},
    node::{Node, Route, Sorted},
    secret,
    sentinel::Place,
    stream, vote,
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
            Some(Signpost { place, asking: true, slot }) => {
                Ok(Route { node: self.node_at(place, slot, &route), asking: true, hops })
            }
            Some(Signpost { place, slot, asking: false }) => {
                // What the others say may be older than what this member says, so it is followed in any case.
                _ = self.refresh(true).await;
                Ok(Route { node: self.node_at(place, slot, &route), asking: false, hops })
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
            questions.spawn(async move { ask(&config, &place).await });
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
    fn node_at(&self, (host, port): Place, slot: u16, from: &Route) -> Arc<Node> {
        // An empty host means that of the member that answered.
        let host = if host.is_empty() { from.node.link.host().to_owned() } else { host };
        let place = (host, port);
        let known = self.map().nodes.get(&place).map(|(_, node)| Arc::clone(node));
        known.unwrap_or_else(|| self.make(&place, slot))
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

/// A range of slots, and who serves it: the primary first.
#[derive(Debug, PartialEq)]
struct Range {
    first: u16,
    last: u16,
    places: Vec<Place>,
}

/// Asks one member, over a connection of its own.
async fn ask(config: &RedisConfig, place: &Place) -> Result<(u64, Vec<Range>)> {
    let (host, port) = place;
    let exchange = async {
        let stream = stream::open(config, host, *port, Arc::default()).await.map_err(error::map_open)?;
        let settings = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let (mut connection, driver) =
            MultiplexedConnection::new_with_config(&secret::login(&config.login, 0)?, stream, settings)
                .await
                .map_err(|e| error::map_login(&e))?;
        let driver = tokio::spawn(driver);
        let mut requests = Pipeline::with_capacity(2);
        requests.cmd("CLUSTER").arg("SLOTS").cmd("CLUSTER").arg("INFO");
        let replies = connection.send_packed_commands(&requests, 0, requests.len()).await;
        driver.abort();
        let replies = replies.map_err(|e| error::map(&e, Sent::No))?;
        <[Value; 2]>::try_from(replies).map_err(|_| error::odd_reply(Sent::No))
    };
    let read = async {
        let [slots, info] = exchange.await?;
        if let Value::ServerError(e) = slots {
            return Err(match e.details() {
                Some(details) if details.contains("cluster support disabled") => {
                    Error::new(ErrorKind::InvalidInput, "the server is not part of a cluster")
                }
                _ => error::map(&e.into(), Sent::No),
            });
        }
        let ranges = ranges(slots, host).ok_or_else(|| error::odd_reply(Sent::No))?;
        if ranges.is_empty() {
            return Err(Error::new(ErrorKind::Unavailable, "it serves no slots and knows nobody who does"));
        }
        let info = redis::from_redis_value::<String>(info).unwrap_or_default();
        let epoch = info.lines().find_map(|line| line.strip_prefix("cluster_current_epoch:")?.trim().parse().ok());
        Ok((epoch.unwrap_or(0), ranges))
    };
    let outcome = timeout(config.timeout, read).await;
    outcome.unwrap_or_else(|_| Err(error::timed_out(config.timeout, Sent::No))).map_err(|e| {
        let message = format!("member {host}:{port}: {}", e.message());
        Error::new(e.kind(), message).with_source(e)
    })
}

/// Reads the answer to `CLUSTER SLOTS`: `[first, last, [host, port, ..], ..]` for each range.
fn ranges(reply: Value, asked: &str) -> Option<Vec<Range>> {
    let Value::Array(entries) = reply else { return None };
    let number = |value: &Value| match value {
        Value::Int(number) => u16::try_from(*number).ok(),
        _ => None,
    };
    let place = |value: &Value| {
        let Value::Array(parts) = value else { return None };
        let host = match parts.first()? {
            Value::BulkString(host) if !host.is_empty() && host != b"?" => String::from_utf8(host.clone()).ok()?,
            // The member does not know its own address: it is the one that led there.
            _ => asked.to_owned(),
        };
        Some((host, number(parts.get(1)?)?))
    };
    let range = |entry: &Value| {
        let Value::Array(parts) = entry else { return None };
        let places = parts.get(2..)?.iter().map(place).collect::<Option<_>>()?;
        Some(Range { first: number(parts.first()?)?, last: number(parts.get(1)?)?, places })
    };
    let mut ranges: Vec<Range> = entries.iter().map(range).collect::<Option<_>>()?;
    ranges.sort_by_key(|range| range.first);
    Some(ranges)
}

/// Where an error says that a slot is.
#[derive(Debug, PartialEq)]
pub(crate) struct Signpost {
    place: Place,
    slot: u16,
    pub(crate) asking: bool,
}

impl Signpost {
    /// What `MOVED` and `ASK` say.
    pub(crate) fn of(error: &Error) -> Option<Self> {
        let cause = std::error::Error::source(error)?.downcast_ref::<RedisError>()?;
        let (address, slot) = cause.redirect_node()?;
        let (host, port) = address.rsplit_once(':')?;
        let asking = cause.code() == Some("ASK");
        Some(Self { place: (host.to_owned(), port.parse().ok()?), slot, asking })
    }
}

/// A slot is on its way, or its members do not agree on whose it is. Nothing was done.
pub(crate) fn undecided() -> Error {
    Error::new(ErrorKind::Unavailable, "the lock's slot is moving from one member of the cluster to another")
}

/// Nobody serves a slot.
pub(crate) fn unserved() -> Error {
    Error::new(ErrorKind::Unavailable, "no member of the cluster serves the lock's slot")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn member(host: Value, port: i64) -> Value {
        Value::Array(vec![host, Value::Int(port), Value::BulkString(b"id".into())])
    }

    #[test]
    fn ranges_are_read() {
        let named = |name: &str| Value::BulkString(name.into());
        let entry = |first, last, mut members: Vec<Value>| {
            members.splice(0..0, [Value::Int(first), Value::Int(last)]);
            Value::Array(members)
        };
        let reply = Value::Array(vec![
            entry(100, 16383, vec![member(named("b"), 2), member(named("c"), 3)]),
            entry(0, 99, vec![member(named(""), 1)]),
        ]);
        let expected = [
            Range { first: 0, last: 99, places: vec![("asked".into(), 1)] },
            Range { first: 100, last: 16383, places: vec![("b".into(), 2), ("c".into(), 3)] },
        ];
        assert_eq!(ranges(reply, "asked").expect("ranges"), expected);
        assert_eq!(ranges(Value::Array(vec![entry(0, 99, vec![Value::Nil])]), "asked"), None);
        assert_eq!(ranges(Value::Nil, "asked"), None);
    }

    #[test]
    fn signposts_are_read() {
        let error = |text: &str| {
            let reply = redis::parse_redis_value(text.as_bytes()).expect("reply");
            let Value::ServerError(e) = reply else { panic!("{reply:?}") };
            error::map(&e.into(), Sent::Yes)
        };
        let read = |text| Signpost::of(&error(text));
        let moved = Signpost { place: ("10.0.0.1".into(), 7000), slot: 7, asking: false };
        assert_eq!(read("-MOVED 7 10.0.0.1:7000\r\n"), Some(moved));
        assert_eq!(read("-ASK 7 ::1:7000\r\n").map(|to| (to.place.0, to.asking)), Some(("::1".into(), true)));
        assert_eq!(read("-MOVED 7 :7000\r\n").map(|to| to.place.0), Some(String::new()));
        assert_eq!(read("-CLUSTERDOWN Hash slot not served\r\n"), None);
    }
}
