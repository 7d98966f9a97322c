//! Reading who holds what.

use std::{collections::BTreeSet, time::Duration};

use lockkit_core::{ErrorKind, Fence, Holder, HolderInfo, KeyState, LockKey, Mode, Query, Result, Waiter};
use redis::{Pipeline, Value};

use crate::{
    client::{
        connection::Connection,
        node::{Node, Route, Sorted},
    },
    store::RedisStore,
    wire::{
        error::{self, Sent},
        name, redirect,
        scripts::{INSPECT, SHARERS, WAITERS},
        value::{self, Stored, StoredLease},
    },
};

/// How many locks one script reads.
const CHUNK: usize = 128;
/// How many keys one `SCAN` looks at: the server serves nobody else while it runs, some 0.1 ms.
const PAGE: usize = 1000;

/// How often locks are asked for that turn out to be elsewhere in a cluster.
const ROUNDS: u32 = 3;

/// Reads locks by name or by the beginning of their names.
pub(crate) async fn inspect(store: &RedisStore, query: &Query) -> Result<Vec<KeyState>> {
    match query {
        Query::Keys(keys) => Ok(read(store, keys).await?.into_iter().map(|(state, _)| state).collect()),
        Query::Queue(key) => {
            let mut states = read(store, std::slice::from_ref(key)).await?;
            let queue = queue(store, key).await?;
            Ok(states.pop().map(|(state, _)| KeyState { queue, ..state }).into_iter().collect())
        }
        Query::Prefix(start) => {
            let mut names = BTreeSet::new();
            for node in store.nodes.all().await? {
                scan(store, &node, start, &mut names).await.inspect_err(|e| store.nodes.note_failure(e))?;
            }
            let keys: Vec<_> = names.into_iter().collect();
            let states = read(store, &keys).await?;
            let held = states.into_iter().filter(|(state, is_lock)| *is_lock && !state.holders.is_empty());
            Ok(held.map(|(state, _)| state).collect())
        }
    }
}

/// Adds the names of the locks that one server may have as held.
async fn scan(store: &RedisStore, node: &Node, start: &str, names: &mut BTreeSet<LockKey>) -> Result<()> {
    let connection = node.dialer.connection().await?;
    for pattern in store.names.patterns(start) {
        let mut cursor = b"0".to_vec();
        loop {
            let mut request = redis::cmd("SCAN");
            request.arg(&cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(PAGE).arg("TYPE").arg("string");
            let reply = connection.run_one(request, store.timeout, Sent::ReadOnly).await?;
            let reply = connection.accept(reply, Sent::ReadOnly)?;
            let (next, keys): (Vec<u8>, Vec<Vec<u8>>) =
                redis::from_redis_value(reply).map_err(|_| error::odd_reply(Sent::ReadOnly))?;
            let found = keys.iter().filter_map(|key| store.names.name(key));
            names.extend(found.filter(|name| name.as_str().starts_with(start)));
            if next == b"0" {
                break;
            }
            cursor = next;
        }
    }
    Ok(())
}

/// The states of these locks, in order, each with whether what is there is a lock at all.
async fn read(store: &RedisStore, keys: &[LockKey]) -> Result<Vec<(KeyState, bool)>> {
    let mut states: Vec<Option<(KeyState, bool)>> = keys.iter().map(|_| None).collect();
    let mut todo: Vec<usize> = (0..keys.len()).collect();
    for round in 1.. {
        let mut redirects = Vec::new();
        let Sorted { by_node, orphans } =
            store.nodes.sort(std::mem::take(&mut todo), |index| store.names.lock(&keys[*index])).await?;
        if !orphans.is_empty() {
            return Err(redirect::unserved());
        }
        for (node, indices) in by_node {
            let asked: Vec<_> = indices.iter().map(|index| &keys[*index]).collect();
            match read_at(store, &node, &asked).await {
                Ok(told) => indices.into_iter().zip(told).for_each(|(index, state)| states[index] = Some(state)),
                Err(e) if round < ROUNDS && store.nodes.is_redirected(&e) => {
                    todo.extend(indices);
                    redirects.push(e);
                }
                Err(e) => {
                    store.nodes.note_failure(&e);
                    return Err(store.nodes.settle(e));
                }
            }
        }
        if todo.is_empty() {
            break;
        }
        store.nodes.redirect(&redirects).await;
    }
    Ok(states.into_iter().flatten().collect())
}

/// The same of one server. In a cluster a script reads one lock, for it may not read from several slots.
async fn read_at(store: &RedisStore, node: &Node, keys: &[&LockKey]) -> Result<Vec<(KeyState, bool)>> {
    let connection = node.dialer.connection().await?;
    let each = if store.nodes.is_cluster() { 1 } else { CHUNK };
    let mut states = Vec::with_capacity(keys.len());
    for keys in keys.chunks(CHUNK) {
        let locks: Vec<String> = keys.iter().map(|key| store.names.lock(key)).collect();
        let mut requests = Pipeline::with_capacity(1 + locks.len() / each);
        requests.cmd("PUBSUB").arg("NUMSUB").arg(&locks);
        for locks in locks.chunks(each) {
            let mut script = INSPECT.by_hash(2 * locks.len(), 0, 2 * locks.len() * 50);
            for lock in locks {
                script.arg(lock).arg(name::counter(lock));
            }
            requests.add_command(script);
        }
        // Both are sent at once, in this order, so that they take one round trip.
        let (replies, sharers) = tokio::join!(
            connection.run_all(&requests, store.timeout, Sent::ReadOnly),
            sharers_at(store, &connection, &locks, each)
        );
        let replies = replies?;
        let odd = || error::odd_reply(Sent::ReadOnly);
        let mut replies = replies.into_iter();
        // Asking for subscribers is a permission of its own, and not worth failing for.
        let subscribers = replies.next().unwrap_or_default();
        let subscribers = redis::from_redis_value::<Vec<(Vec<u8>, u32)>>(subscribers).unwrap_or_default();
        let mut parts = Vec::with_capacity(3 * keys.len());
        for reply in replies {
            let Value::Array(told) = connection.accept(reply, Sent::ReadOnly)? else { return Err(odd()) };
            parts.extend(told);
        }
        for (index, (key, parts)) in keys.iter().zip(parts.chunks_mut(3)).enumerate() {
            let [value, Value::Int(pttl), counter] = parts else { return Err(odd()) };
            let read = Read {
                value: connection.accept(std::mem::take(value), Sent::ReadOnly)?,
                remaining: milliseconds(*pttl),
                counter: std::mem::take(counter),
                sharers: sharers.get(index),
                subscribers: subscribers.get(index).map(|(_, count)| *count),
            };
            states.push(read.state(key));
        }
    }
    Ok(states)
}

/// Who shares each of these locks, and how many wait in its queue; nothing of those where that can't be read: to read it takes
/// permissions, and in a cluster keys, that plain locks do not need.
async fn sharers_at(store: &RedisStore, connection: &Connection, locks: &[String], each: usize) -> Vec<Sharers> {
    let mut requests = Pipeline::with_capacity(locks.len() / each);
    for locks in locks.chunks(each) {
        let mut script = SHARERS.by_hash(3 * locks.len(), 0, 3 * locks.len() * 60);
        for lock in locks {
            script.arg(&name::sharers(lock));
        }
        requests.add_command(script);
    }
    let replies = connection.run_all(&requests, store.timeout, Sent::ReadOnly).await.unwrap_or_default();
    let mut sharers = Vec::with_capacity(locks.len());
    for (reply, locks) in replies.into_iter().zip(locks.chunks(each)) {
        match reply {
            Value::Array(parts) if parts.len() == 2 * locks.len() => {
                sharers.extend(parts.chunks(2).map(|pair| Sharers::read(pair).unwrap_or_default()));
            }
            _ => sharers.extend(locks.iter().map(|_| Sharers::default())),
        }
    }
    sharers
}

/// Those that wait for a lock in order; `None` if the user may not read that.
async fn queue(store: &RedisStore, key: &LockKey) -> Result<Option<Vec<Waiter>>> {
    let lock = store.names.lock(key);
    let mut route = store.nodes.route(&lock).await?;
    loop {
        match queue_at(store, &route, &lock).await {
            Ok(queue) => return Ok(Some(queue)),
            Err(e) if e.kind() == ErrorKind::Denied => return Ok(None),
            Err(e) => route = store.nodes.follow(route, e).await?,
        }
    }
}

async fn queue_at(store: &RedisStore, route: &Route, lock: &str) -> Result<Vec<Waiter>> {
    let connection = route.node.dialer.connection().await?;
    let mut script = WAITERS.by_hash(2, 1, 2 * lock.len() + 80);
    script.arg(&name::waiters(lock)).arg(KeyState::LONGEST_QUEUE);
    let reply = connection.run(script, route.asking, store.timeout, Sent::ReadOnly).await?;
    let parts: Vec<Vec<u8>> = redis::from_redis_value(reply).map_err(|_| error::odd_reply(Sent::ReadOnly))?;
    let waiter = |pair: &[Vec<u8>]| {
        let [mode, lease] = pair else { return None };
        let Stored::Lease(_, lease) = Stored::parse(lease) else { return None };
        Some(Waiter { info: lease.holder, mode: value::mode(str::from_utf8(mode).ok()?)? })
    };
    Ok(parts.chunks(2).filter_map(waiter).collect())
}

/// The leases that share a lock, and those that wait.
#[derive(Debug, Default)]
struct Sharers {
    queued: u32,
    /// Each with its remaining time; `None` if they could not be read.
    leases: Option<Vec<(StoredLease, Option<Duration>)>>,
}

impl Sharers {
    fn read(pair: &[Value]) -> Option<Self> {
        let [Value::Int(queued), Value::Array(leases)] = pair else { return None };
        let lease = |pair: &[Value]| {
            let [Value::BulkString(lease), Value::Int(remaining)] = pair else { return None };
            let Stored::Lease(_, lease) = Stored::parse(lease) else { return None };
            Some((lease, milliseconds(*remaining)))
        };
        let leases = Some(leases.chunks(2).filter_map(lease).collect());
        Some(Self { queued: u32::try_from(*queued).unwrap_or_default(), leases })
    }
}

/// What a server told of a lock.
struct Read<'a> {
    value: Value,
    remaining: Option<Duration>,
    counter: Value,
    sharers: Option<&'a Sharers>,
    /// How many listen on its channel.
    subscribers: Option<u32>,
}

impl Read<'_> {
    /// The state of the lock, and whether what is there is a lock at all.
    fn state(self, key: &LockKey) -> (KeyState, bool) {
        let remaining = self.remaining;
        let unknown = |info, mode| Holder { token: None, info, mode, depth: 1, fence: None, remaining };
        let is_lock = !matches!(self.value, Value::SimpleString(_));
        let holders = match self.value {
            Value::BulkString(value) => match Stored::parse(&value) {
                Stored::Lease(mode, lease) => vec![holder(lease, mode, remaining)],
                Stored::Shared(mode) => match self.sharers.and_then(|sharers| sharers.leases.as_ref()) {
                    Some(leases) => leases.iter().map(|(lease, left)| holder(lease.clone(), mode, *left)).collect(),
                    None => vec![unknown(Stored::Shared(mode).into_holder(), mode)],
                },
                Stored::Foreign => vec![unknown(value::foreign(), Mode::Exclusive)],
            },
            Value::SimpleString(kind) => {
                vec![unknown(HolderInfo::new(&format!("no lock but a {kind}")), Mode::Exclusive)]
            }
            _ => Vec::new(),
        };
        let fence = redis::from_redis_value::<Option<u64>>(self.counter).ok().flatten().map(Fence::new);
        // The first in the queue listens on the lock's channel, too.
        let queued = self.sharers.map_or(0, |sharers| sharers.queued);
        let waiters = self.subscribers.map(|others| queued + others.saturating_sub(queued.min(1)));
        (KeyState { holders, fence, waiters, ..KeyState::unknown(key.clone()) }, is_lock)
    }
}

fn holder(lease: StoredLease, mode: Mode, remaining: Option<Duration>) -> Holder {
    let StoredLease { token, depth, fence, holder, .. } = lease;
    Holder { token: Some(token), info: holder, mode, depth, fence: Some(fence), remaining }
}

fn milliseconds(number: i64) -> Option<Duration> {
    u64::try_from(number).ok().map(Duration::from_millis)
}
