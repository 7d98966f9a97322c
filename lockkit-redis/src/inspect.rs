//! Reading who holds what.

use std::collections::BTreeSet;

use lockkit_core::{Fence, Holder, HolderInfo, KeyState, LockKey, Mode, Query, Result};
use redis::{Pipeline, Value};

use crate::{
    error::{self, Sent},
    link::Connection,
    name,
    scripts::INSPECT,
    store::RedisStore,
    value::Stored,
};

/// How many locks one script reads.
const CHUNK: usize = 128;
/// How many keys one `SCAN` looks at: the server serves nobody else while it runs, some 0.1 ms.
const PAGE: usize = 1000;

/// Reads locks by name or by the beginning of their names.
pub(crate) async fn inspect(store: &RedisStore, query: &Query) -> Result<Vec<KeyState>> {
    let connection = store.link.connection().await?;
    match query {
        Query::Keys(keys) => {
            let states = read(store, &connection, keys).await?;
            Ok(states.into_iter().map(|(state, _)| state).collect())
        }
        Query::Prefix(start) => {
            let keys = scan(store, &connection, start).await?;
            let states = read(store, &connection, &keys).await?;
            let held = states.into_iter().filter(|(state, is_lock)| *is_lock && !state.holders.is_empty());
            Ok(held.map(|(state, _)| state).collect())
        }
    }
}

/// The names of the locks that may be held, sorted.
async fn scan(store: &RedisStore, connection: &Connection, start: &str) -> Result<Vec<LockKey>> {
    let mut names = BTreeSet::new();
    for pattern in store.names.patterns(start) {
        let mut cursor = b"0".to_vec();
        loop {
            let mut requests = Pipeline::with_capacity(1);
            requests.cmd("SCAN").arg(&cursor).arg("MATCH").arg(&pattern).arg("COUNT").arg(PAGE);
            requests.arg("TYPE").arg("string");
            let replies = store.link.run_all(connection, None, &requests, store.timeout, Sent::ReadOnly).await?;
            let reply = replies.into_iter().next().unwrap_or_default();
            let reply = store.link.accept(connection, reply, Sent::ReadOnly)?;
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
    Ok(names.into_iter().collect())
}

/// The states of these locks, in order, each with whether what is there is a lock at all.
async fn read(store: &RedisStore, connection: &Connection, keys: &[LockKey]) -> Result<Vec<(KeyState, bool)>> {
    let mut states = Vec::with_capacity(keys.len());
    for keys in keys.chunks(CHUNK) {
        let locks: Vec<String> = keys.iter().map(|key| store.names.lock(key)).collect();
        let mut script = INSPECT.by_hash(2 * locks.len(), 0, 2 * locks.len() * 50);
        for lock in &locks {
            script.arg(lock).arg(name::counter(lock));
        }
        let mut requests = Pipeline::with_capacity(2);
        requests.add_command(script).cmd("PUBSUB").arg("NUMSUB").arg(&locks);
        let replies = store.link.run_all(connection, Some(&INSPECT), &requests, store.timeout, Sent::ReadOnly).await?;
        let odd = || error::odd_reply(Sent::ReadOnly);
        let [parts, subscribers] = <[Value; 2]>::try_from(replies).map_err(|_| odd())?;
        let Value::Array(parts) = store.link.accept(connection, parts, Sent::ReadOnly)? else { return Err(odd()) };
        // Asking for subscribers is a permission of its own, and not worth failing for.
        let subscribers = redis::from_redis_value::<Vec<(Vec<u8>, u32)>>(subscribers).unwrap_or_default();
        let mut parts = parts.into_iter();
        for (index, (key, lock)) in keys.iter().zip(&locks).enumerate() {
            let (Some(value), Some(Value::Int(pttl)), Some(counter)) = (parts.next(), parts.next(), parts.next())
            else {
                return Err(odd());
            };
            let subscribers = subscribers.get(index).map(|(_, count)| *count);
            states.push(state(store, key, lock, value, pttl, counter, subscribers));
        }
    }
    Ok(states)
}

fn state(
    store: &RedisStore,
    key: &LockKey,
    lock: &str,
    value: Value,
    pttl: i64,
    counter: Value,
    subscribers: Option<u32>,
) -> (KeyState, bool) {
    let holder = |token, info, depth, fence| {
        let remaining = u64::try_from(pttl).ok().map(std::time::Duration::from_millis);
        Holder { token, info, mode: Mode::Exclusive, depth, fence, remaining }
    };
    let is_lock = !matches!(value, Value::SimpleString(_));
    let holders = match value {
        Value::BulkString(value) => vec![match Stored::parse(&value) {
            Stored::Lease(lease) => holder(Some(lease.token), lease.holder, lease.depth, Some(lease.fence)),
            Stored::Foreign(info) => holder(None, info, 1, None),
        }],
        Value::SimpleString(kind) => vec![holder(None, HolderInfo::new(&format!("no lock but a {kind}")), 1, None)],
        _ => Vec::new(),
    };
    let fence = redis::from_redis_value::<Option<u64>>(counter).ok().flatten().map(Fence::new);
    // This store's own subscription counts only while somebody here waits.
    let lingering = store.wake.is_subscribed(lock) && store.wake.waiters(lock) == 0;
    let waiters = subscribers.map(|count| count.saturating_sub(lingering.into()));
    (KeyState { key: key.clone(), holders, fence, waiters }, is_lock)
}
