//! Who holds what.

use std::time::Duration;

use lockkit_core::{Error, ErrorKind, Holder, KeyState, LockKey, Mode, Query, Result, Waiter};
use zookeeper_client::Stat;

use crate::{
    client::{driver::Answer, session::Session},
    store::{ZkStore, window},
    wire::{
        error::{self, Failure, Sent, unless_gone},
        fence::FenceRecord,
        name,
        queue::{self, FENCE},
        value::{self, Value},
    },
};

/// How many locks are asked about at once.
const BATCH: usize = 256;

/// How often a lock is looked at again whose holders changed between two looks.
const LOOKS: u32 = 20;

/// Answers a query.
pub(crate) async fn inspect(store: &ZkStore, query: &Query) -> Result<Vec<KeyState>> {
    let (session, bound) = (store.session().await?, store.timeout());
    let states = match query {
        Query::Keys(keys) => states(&session, keys, bound).await?,
        Query::Queue(key) => {
            let path = session.names.lock(key);
            let children = children(session.list(&path, bound).await)?;
            vec![state(&session, key, &path, children, Show::Queue, bound).await?]
        }
        Query::Prefix(prefix) => {
            let mut keys = keys(&session, bound).await?;
            keys.retain(|key| key.as_str().starts_with(prefix));
            keys.sort();
            let mut states = states(&session, &keys, bound).await?;
            states.retain(|state| !state.holders.is_empty());
            states
        }
    };
    Ok(states)
}

async fn keys(session: &Session, bound: Duration) -> Result<Vec<LockKey>> {
    let nodes = session.list(session.names.root(), bound).await.map_err(|failure| read_only(&failure))?;
    Ok(nodes.iter().filter_map(|node| session.names.key(node)).collect())
}

async fn states(session: &Session, keys: &[LockKey], bound: Duration) -> Result<Vec<KeyState>> {
    let mut states = Vec::with_capacity(keys.len());
    for keys in keys.chunks(BATCH) {
        let paths: Vec<_> = keys.iter().map(|key| session.names.lock(key)).collect();
        let queues: Vec<_> =
            paths.iter().map(|path| Box::pin(session.client.list_children(path)) as Answer<'_, _>).collect();
        for ((key, path), queue) in keys.iter().zip(&paths).zip(queues) {
            let children = children(session.read(bound, queue).await)?;
            states.push(state(session, key, path, children, Show::Holders, bound).await?);
        }
    }
    Ok(states)
}

/// How much of a lock is to be shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Show {
    Holders,
    /// And those that wait.
    Queue,
}

async fn state(
    session: &Session,
    key: &LockKey,
    path: &str,
    mut children: Vec<String>,
    show: Show,
    bound: Duration,
) -> Result<KeyState> {
    for _ in 0..LOOKS {
        let kept = window::holders(session, path, &children, bound).await?;
        if !kept.is_empty() {
            let waiting = queue::contenders(&children);
            let fence = kept.iter().filter_map(|holder| holder.fence).max();
            let waiters = Some(u32::try_from(waiting.len()).unwrap_or(u32::MAX));
            let queue = match show {
                Show::Holders => None,
                Show::Queue => Some(queue(session, path, waiting, bound).await?),
            };
            return Ok(KeyState { key: key.clone(), holders: kept, fence, waiters, queue });
        }
        let (nodes, waiters) = queue::holders(&children);
        if nodes.is_empty() {
            let queue = (show == Show::Queue).then(Vec::new);
            return Ok(KeyState { waiters: Some(0), queue, ..KeyState::unknown(key.clone()) });
        }
        let holders = holders(session, path, &nodes, queue::has_record(&children), bound).await?;
        if !holders.is_empty() {
            let fence = holders.iter().filter_map(|holder| holder.fence).max();
            let waiters = Some(u32::try_from(waiters).unwrap_or(u32::MAX));
            let queue = match show {
                Show::Holders => None,
                Show::Queue => Some(queue(session, path, queue::waiters(&children), bound).await?),
            };
            return Ok(KeyState { key: key.clone(), holders, fence, waiters, queue });
        }
        children = session.list(path, bound).await.map_err(|failure| read_only(&failure))?;
    }
    Err(Error::new(ErrorKind::Unavailable, "the lock changes hands faster than it can be looked at"))
}

/// What the nodes of those that hold a lock say; none of those that are gone by now, and none at all if the lock was made anew.
async fn holders(
    session: &Session,
    path: &str,
    nodes: &[&str],
    recorded: bool,
    bound: Duration,
) -> Result<Vec<Holder>> {
    let (mut holders, record_path) = (Vec::with_capacity(nodes.len()), format!("{path}/{FENCE}"));
    let record = recorded.then(|| data(session, &record_path));
    let seen = all(session, path, nodes, bound).await?;
    let record = match record {
        None => Some(FenceRecord::NONE),
        Some(record) => match present(session.read(bound, record).await)? {
            Some((data, _)) => FenceRecord::parse(&data),
            None => return Ok(holders),
        },
    };
    for (node, (data, stat)) in nodes.iter().zip(seen).filter_map(|(node, seen)| Some((node, seen?))) {
        holders.push(holder(node, &data, &stat, record));
    }
    Ok(holders)
}

/// Those that wait, the next one first, without those that are gone by now.
async fn queue(session: &Session, path: &str, mut nodes: Vec<&str>, bound: Duration) -> Result<Vec<Waiter>> {
    nodes.truncate(KeyState::LONGEST_QUEUE);
    let seen = all(session, path, &nodes, bound).await?;
    let waiter = |(node, seen): (&&str, Option<(Vec<u8>, Stat)>)| {
        seen.map(|(data, _)| Waiter { info: value::holder(&data), mode: name::mode(node) })
    };
    Ok(nodes.iter().zip(seen).filter_map(waiter).collect())
}

/// What is in these nodes; `None` for those that are gone by now.
async fn all(session: &Session, path: &str, nodes: &[&str], bound: Duration) -> Result<Vec<Option<(Vec<u8>, Stat)>>> {
    let paths: Vec<_> = nodes.iter().map(|node| format!("{path}/{node}")).collect();
    // All are on their way before any is awaited.
    let asked: Vec<_> = paths.iter().map(|path| data(session, path)).collect();
    let mut seen = Vec::with_capacity(nodes.len());
    for answer in asked {
        seen.push(present(session.read(bound, answer).await)?);
    }
    Ok(seen)
}

fn data<'a>(session: &'a Session, path: &'a str) -> Answer<'a, (Vec<u8>, Stat)> {
    Box::pin(session.client.get_data(path))
}

/// What a node says.
fn holder(node: &str, data: &[u8], stat: &Stat, record: Option<FenceRecord>) -> Holder {
    let (value, mode) = (Value::parse(data), name::mode(node));
    // Of those that hold together each says its fence if the record has a part in it: another may change that.
    let record = if mode == Mode::Exclusive { record } else { Some(FenceRecord::NONE) };
    let fence = value.as_ref().and_then(|v| v.fence.or_else(|| record?.natural(stat.czxid)));
    let depth = value.as_ref().map_or(1, |value| value.depth);
    let token = value.and_then(|_| name::token(node));
    Holder { token, info: value::holder(data), mode, depth, fence, remaining: None }
}

/// What was read; `None` if it is gone by now.
fn present<T>(read: Result<T, Failure>) -> Result<Option<T>> {
    unless_gone(read).map_err(|failure| read_only(&failure))
}

fn children(listed: Result<Vec<String>, Failure>) -> Result<Vec<String>> {
    Ok(present(listed)?.unwrap_or_default())
}

fn read_only(failure: &Failure) -> Error {
    error::map(failure, Sent::ReadOnly)
}
