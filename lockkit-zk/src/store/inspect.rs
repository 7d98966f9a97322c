//! Who holds what.

use std::time::Duration;

use lockkit_core::{Error, ErrorKind, Holder, KeyState, LockKey, Mode, Query, Result, Waiter, store::join_all};
use tokio::sync::OnceCell;
use zookeeper_client::{self as zk, Stat};

use crate::{
    client::{driver::Answer, session::Session, windows},
    store::ZkStore,
    wire::{
        error::{Failure, read_only, unless_gone},
        fence::FenceRecord,
        name,
        queue::{self, FENCE},
        value::{self, Value},
        window::{self, Window},
    },
};

/// How many locks are asked about at once.
const BATCH: usize = 256;

/// How often a lock is looked at again whose holders changed between two looks.
const LOOKS: u32 = 20;

/// Answers a query.
pub(crate) async fn inspect(store: &ZkStore, query: &Query) -> Result<Vec<KeyState>> {
    let (session, bound) = (store.session().await?, store.timeout());
    let look = Inspection { session: &session, bound, time: OnceCell::new() };
    match query {
        Query::Keys(keys) => look.states(keys).await,
        Query::Queue(key) => {
            let path = session.names.lock(key);
            let children = children(session.list(&path, bound).await)?;
            Ok(vec![look.state(key, &path, children, true).await?])
        }
        Query::Prefix(prefix) => {
            let mut keys = look.keys().await?;
            keys.retain(|key| key.as_str().starts_with(prefix));
            keys.sort();
            let mut states = look.states(&keys).await?;
            states.retain(|state| !state.holders.is_empty());
            Ok(states)
        }
    }
}

/// One look, at however many locks.
struct Inspection<'a> {
    session: &'a Session,
    /// The bound on one operation.
    bound: Duration,
    /// By the leader's clock, asked for when the first window was found: a write for each would be too much. Later ones are shown to last a moment
    /// longer than they do.
    time: OnceCell<i64>,
}

impl Inspection<'_> {
    async fn keys(&self) -> Result<Vec<LockKey>> {
        let names = &self.session.names;
        let nodes = self.session.list(names.root(), self.bound).await.map_err(|failure| read_only(&failure))?;
        Ok(nodes.iter().filter_map(|node| names.key(node)).collect())
    }

    async fn states(&self, keys: &[LockKey]) -> Result<Vec<KeyState>> {
        let (session, mut states) = (self.session, Vec::with_capacity(keys.len()));
        for keys in keys.chunks(BATCH) {
            let paths: Vec<_> = keys.iter().map(|key| session.names.lock(key)).collect();
            let queues: Vec<_> =
                paths.iter().map(|path| Box::pin(session.client.list_children(path)) as Answer<'_, _>).collect();
            // Side by side: where the servers are far, one after the other would take minutes.
            let looks = keys.iter().zip(&paths).zip(queues).map(|((key, path), queue)| async move {
                let children = children(session.read(self.bound, queue).await)?;
                self.state(key, path, children, false).await
            });
            states.extend(join_all(looks).await.into_iter().collect::<Result<Vec<_>>>()?);
        }
        Ok(states)
    }

    /// Who holds a lock, and if it is to be `with_queue`, who waits.
    async fn state(&self, key: &LockKey, path: &str, mut children: Vec<String>, with_queue: bool) -> Result<KeyState> {
        for _ in 0..LOOKS {
            let (nodes, waiting) = queue::holders(&children);
            let (holders, waiting) = match self.windows(path, &children).await? {
                // Those in the queue all wait.
                kept if !kept.is_empty() => (kept, queue::contenders(&children)),
                none if nodes.is_empty() => (none, waiting),
                _ => (self.holders(path, &nodes, queue::has_record(&children)).await?, waiting),
            };
            if nodes.is_empty() || !holders.is_empty() {
                let fence = holders.iter().filter_map(|holder| holder.fence).max();
                let waiters = Some(u32::try_from(waiting.len()).unwrap_or(u32::MAX));
                let queue = if with_queue { Some(self.queue(path, waiting).await?) } else { None };
                return Ok(KeyState { key: key.clone(), holders, fence, waiters, queue });
            }
            children = self.session.list(path, self.bound).await.map_err(|failure| read_only(&failure))?;
        }
        Err(Error::new(ErrorKind::Unavailable, "the lock changes hands faster than it can be looked at"))
    }

    /// What the nodes of those that hold a lock say; none of those that are gone by now, and none at all if the lock was made anew.
    async fn holders(&self, path: &str, nodes: &[&str], recorded: bool) -> Result<Vec<Holder>> {
        let (mut holders, record_path) = (Vec::with_capacity(nodes.len()), format!("{path}/{FENCE}"));
        let record = recorded.then(|| self.data(&record_path));
        let seen = self.all(path, nodes).await?;
        let record = match record {
            None => Some(FenceRecord::NONE),
            Some(record) => match present(self.session.read(self.bound, record).await)? {
                Some((data, _)) => FenceRecord::parse(&data),
                None => return Ok(holders),
            },
        };
        for (node, (data, stat)) in nodes.iter().zip(seen).filter_map(|(node, seen)| Some((node, seen?))) {
            holders.push(holder(node, &data, &stat, record));
        }
        Ok(holders)
    }

    /// Those windows of a lock with these children that are not over, as its holders.
    ///
    /// A record of another form is shown as it stands there. It keeps the lock until somebody ends it, who has to be told its token.
    async fn windows(&self, lock: &str, children: &[String]) -> Result<Vec<Holder>> {
        let mut holders = Vec::new();
        for token in children.iter().filter_map(|child| window::token(child)) {
            let Some((data, stat)) = self.session.record_data(lock, &token, self.bound).await? else { continue };
            let (info, mode) = (value::holder(&data), Mode::Exclusive);
            let holder = Holder { token: Some(token), info, mode, depth: 1, fence: None, remaining: None };
            let Some(window) = Window::parse(&data) else {
                holders.push(holder);
                continue;
            };
            let left = window.left(stat.mtime, *self.time.get_or_try_init(|| time(self.session)).await?);
            if !left.is_zero() {
                holders.push(Holder {
                    info: window.holder,
                    fence: Some(window.fence),
                    remaining: Some(left),
                    ..holder
                });
            }
        }
        Ok(holders)
    }

    /// Those that wait, the next one first, without those that are gone by now.
    async fn queue(&self, path: &str, mut nodes: Vec<&str>) -> Result<Vec<Waiter>> {
        nodes.truncate(KeyState::LONGEST_QUEUE);
        let seen = self.all(path, &nodes).await?;
        let waiter = |(node, seen): (&&str, Option<(Vec<u8>, Stat)>)| {
            seen.map(|(data, _)| Waiter { info: value::holder(&data), mode: name::mode(node) })
        };
        Ok(nodes.iter().zip(seen).filter_map(waiter).collect())
    }

    /// What is in these nodes; `None` for those that are gone by now.
    async fn all(&self, path: &str, nodes: &[&str]) -> Result<Vec<Option<(Vec<u8>, Stat)>>> {
        let paths: Vec<_> = nodes.iter().map(|node| format!("{path}/{node}")).collect();
        // All are on their way before any is awaited.
        let asked: Vec<_> = paths.iter().map(|path| self.data(path)).collect();
        let mut seen = Vec::with_capacity(nodes.len());
        for answer in asked {
            seen.push(present(self.session.read(self.bound, answer).await)?);
        }
        Ok(seen)
    }

    fn data<'s>(&'s self, path: &'s str) -> Answer<'s, (Vec<u8>, Stat)> {
        Box::pin(self.session.client.get_data(path))
    }
}

/// The time by the leader's clock; for who may only read, by that of this machine.
async fn time(session: &Session) -> Result<i64> {
    match session.leader_time().await {
        Err(failure) if failure.is(&zk::Error::NoAuth) => Ok(i64::try_from(windows::now()).unwrap_or(i64::MAX)),
        time => time.map_err(|failure| read_only(&failure)),
    }
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
