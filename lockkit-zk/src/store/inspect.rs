//! Who holds what.

use std::time::Duration;

use lockkit_core::{Error, ErrorKind, Holder, HolderInfo, KeyState, LockKey, Mode, Query, Result};
use zookeeper_client::{self as zk, Stat};

use crate::{
    client::{driver::Answer, session::Session},
    store::ZkStore,
    wire::{
        error::{self, Failure, Sent},
        fence::Record,
        name,
        queue::{self, FENCE},
        value::{self, Value},
    },
};

/// How many locks are asked about at once.
const BATCH: usize = 256;

/// How often a lock is looked at again whose holder changed between two looks.
const LOOKS: u32 = 20;

/// Answers a query.
pub(crate) async fn inspect(store: &ZkStore, query: &Query) -> Result<Vec<KeyState>> {
    let (session, bound) = (store.session().await?, store.timeout());
    let states = match query {
        Query::Keys(keys) => states(&session, keys, bound).await?,
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
            states.push(state(session, key, path, children, bound).await?);
        }
    }
    Ok(states)
}

async fn state(
    session: &Session,
    key: &LockKey,
    path: &str,
    mut children: Vec<String>,
    bound: Duration,
) -> Result<KeyState> {
    for _ in 0..LOOKS {
        let Some((first, waiters)) = queue::holder(&children) else {
            return Ok(KeyState { key: key.clone(), holders: Vec::new(), fence: None, waiters: Some(0) });
        };
        if let Some(holder) = holder(session, path, first, queue::has_record(&children), bound).await? {
            let (fence, waiters) = (holder.fence, Some(u32::try_from(waiters).unwrap_or(u32::MAX)));
            return Ok(KeyState { key: key.clone(), holders: vec![holder], fence, waiters });
        }
        children = session.list(path, bound).await.map_err(|failure| read_only(&failure))?;
    }
    Err(Error::new(ErrorKind::Unavailable, "the lock changes hands faster than it can be looked at"))
}

/// What the first node of a queue says; `None` if it is gone by now.
async fn holder(session: &Session, path: &str, first: &str, recorded: bool, bound: Duration) -> Result<Option<Holder>> {
    let (first_path, record_path) = (format!("{path}/{first}"), format!("{path}/{FENCE}"));
    let first_data = Box::pin(session.client.get_data(&first_path)) as Answer<'_, (Vec<u8>, Stat)>;
    let record = recorded.then(|| Box::pin(session.client.get_data(&record_path)) as Answer<'_, (Vec<u8>, Stat)>);
    let (data, stat) = match session.read(bound, first_data).await {
        Ok(read) => read,
        Err(failure) if failure.is(&zk::Error::NoNode) => return Ok(None),
        Err(failure) => return Err(read_only(&failure)),
    };
    let record = match record {
        None => Some(Record::NONE),
        Some(record) => match session.read(bound, record).await {
            Ok((data, _)) => Record::parse(&data),
            Err(failure) if failure.is(&zk::Error::NoNode) => return Ok(None),
            Err(failure) => return Err(read_only(&failure)),
        },
    };
    let value = Value::parse(&data);
    let fence = value.as_ref().and_then(|v| v.fence.or_else(|| record?.natural(stat.czxid)));
    let info: HolderInfo = value::holder(&data);
    let depth = value.as_ref().map_or(1, |value| value.depth);
    let token = value.and_then(|_| name::token(first));
    Ok(Some(Holder { token, info, mode: Mode::Exclusive, depth, fence, remaining: None }))
}

fn children(listed: Result<Vec<String>, Failure>) -> Result<Vec<String>> {
    match listed {
        Err(failure) if failure.is(&zk::Error::NoNode) => Ok(Vec::new()),
        other => other.map_err(|failure| read_only(&failure)),
    }
}

fn read_only(failure: &Failure) -> Error {
    error::map(failure, Sent::ReadOnly)
}
