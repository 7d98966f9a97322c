//! Reading who holds what.

use std::collections::BTreeSet;

use lockkit_core::{Fence, Holder, HolderInfo, KeyState, LockKey, Mode, Query, Result};
use redis::{Pipeline, Value};

use crate::{
    client::node::{Node, Sorted},
    store::RedisStore,
    wire::{
        error::{self, Sent},
        name, redirect,
        scripts::INSPECT,
        value::{self, Stored},
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
            let mut requests = Pipeline::with_capacity(1);
            requests.cmd("SCAN").arg(&cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(PAGE);
            requests.arg("TYPE").arg("string");
            let replies = connection.run_all(None, &requests, store.timeout, Sent::ReadOnly).await?;
            let reply = replies.into_iter().next().unwrap_or_default();
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
        let replies = connection.run_all(Some(&INSPECT), &requests, store.timeout, Sent::ReadOnly).await?;
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
        let mut parts = parts.into_iter();
        for (index, key) in keys.iter().enumerate() {
            let (Some(value), Some(Value::Int(pttl)), Some(counter)) = (parts.next(), parts.next(), parts.next())
            else {
                return Err(odd());
            };
            let subscribers = subscribers.get(index).map(|(_, count)| *count);
            let value = connection.accept(value, Sent::ReadOnly)?;
            states.push(state(key, value, pttl, counter, subscribers));
        }
    }
    Ok(states)
}

fn state(key: &LockKey, value: Value, pttl: i64, counter: Value, subscribers: Option<u32>) -> (KeyState, bool) {
    let holder = |token, info, depth, fence| {
        let remaining = u64::try_from(pttl).ok().map(std::time::Duration::from_millis);
        Holder { token, info, mode: Mode::Exclusive, depth, fence, remaining }
    };
    let is_lock = !matches!(value, Value::SimpleString(_));
    let holders = match value {
        Value::BulkString(value) => vec![match Stored::parse(&value) {
            Stored::Lease(lease) => holder(Some(lease.token), lease.holder, lease.depth, Some(lease.fence)),
            Stored::Foreign => holder(None, value::foreign(), 1, None),
        }],
        Value::SimpleString(kind) => vec![holder(None, HolderInfo::new(&format!("no lock but a {kind}")), 1, None)],
        _ => Vec::new(),
    };
    let fence = redis::from_redis_value::<Option<u64>>(counter).ok().flatten().map(Fence::new);
    (KeyState { key: key.clone(), holders, fence, waiters: subscribers }, is_lock)
}
