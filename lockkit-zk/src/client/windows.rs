//! What a session does to the records of windows, in which locks are kept though nobody holds them.
//!
//! Most names whose locks are kept are asked for again, and whoever gets the lock then removes the record. So that those that are used once
//! leave nothing behind, all windows are also in a list, and each new one has some of those removed that are over.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use lockkit_core::{Error, ErrorKind, Result, Token, store::join_all};
use zookeeper_client::{self as zk, CreateMode, MultiWriter};

use crate::{
    client::session::Session,
    wire::{
        error::{Failure, lasting, read_only, unless_gone},
        name::Names,
        window::{self, Window},
    },
};

/// How many windows are looked at when there is a new one.
const SWEPT: usize = 16;

/// A record as it was read.
#[derive(Clone, Debug)]
pub(crate) struct Record {
    pub(crate) token: Token,
    pub(crate) window: Window,
    /// When it was written, by the leader's clock.
    pub(crate) written: i64,
    pub(crate) version: i32,
}

impl Record {
    /// What is left of the window when it is `now` by the leader's clock; zero if it is over.
    pub(crate) fn left(&self, now: i64) -> Duration {
        self.window.left(self.written, now)
    }
}

/// When a window of this length is due in the list, which begins now.
pub(crate) fn due(millis: i64) -> u64 {
    now().saturating_add(u64::try_from(millis).unwrap_or(0))
}

/// By this machine's clock, in milliseconds since 1970.
pub(crate) fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

impl Session {
    /// Reads the record of a window; `None` if there is none.
    pub(crate) async fn record(&self, lock: &str, token: &Token, bound: Duration) -> Result<Option<Record>> {
        let Some((data, stat)) = self.record_data(lock, token, bound).await? else { return Ok(None) };
        Ok(Some(Record { token: *token, window: parse(&data)?, written: stat.mtime, version: stat.version }))
    }

    /// The same as it stands there, whatever its form.
    pub(crate) async fn record_data(
        &self,
        lock: &str,
        token: &Token,
        bound: Duration,
    ) -> Result<Option<(Vec<u8>, zk::Stat)>> {
        let path = format!("{lock}/{}", window::node(token));
        self.data(&path, bound).await.map_err(|failure| read_only(&failure))
    }

    /// The records of all windows of a lock with these children, but for those that are gone by now.
    pub(crate) async fn records(&self, lock: &str, children: &[String], bound: Duration) -> Result<Vec<Record>> {
        let mut records = Vec::new();
        for token in children.iter().filter_map(|child| window::token(child)) {
            records.extend(self.record(lock, &token, bound).await?);
        }
        Ok(records)
    }

    /// Puts into a transaction that a lock is kept, and into the list if it is to be `listed`.
    pub(crate) fn add_record(
        &self,
        all: &mut MultiWriter<'_>,
        lock: &str,
        token: &Token,
        window: &Window,
        listed: bool,
    ) -> Result<(), zk::Error> {
        let persistent = self.options(CreateMode::Persistent);
        all.add_create(&format!("{lock}/{}", window::node(token)), window.text().as_bytes(), &persistent)?;
        if !listed {
            return Ok(());
        }
        let node = lock.rsplit_once('/').map_or(lock, |(_, node)| node);
        all.add_create(&self.names.window(window.due, token), node.as_bytes(), &persistent)
    }

    /// Removes the record of a window as it was read in this version, whatever its form; tells whether it is gone. It is not if it was
    /// written to since.
    pub(crate) async fn remove_record(
        &self,
        lock: &str,
        token: &Token,
        version: i32,
        bound: Duration,
    ) -> Result<bool, Failure> {
        let path = format!("{lock}/{}", window::node(token));
        match self.lead(self.now(), bound, Box::pin(self.client.delete(&path, Some(version)))).await {
            Err(failure) if failure.is(&zk::Error::BadVersion) => Ok(false),
            removed => unless_gone(removed).map(|_| true),
        }
    }

    /// The same, and what the list has of it.
    pub(crate) async fn remove(&self, lock: &str, record: &Record, bound: Duration) -> Result<bool, Failure> {
        if !self.remove_record(lock, &record.token, record.version, bound).await? {
            return Ok(false);
        }
        // The record alone counts: what is left in the list, which may be another user's, is removed when it is due.
        drop(self.delete(&self.names.window(record.window.due, &record.token), bound).await);
        Ok(true)
    }

    /// Lets a window end so late after now, if its record is still as it was read; tells whether it was.
    pub(crate) async fn extend(
        &self,
        lock: &str,
        record: &Record,
        millis: i64,
        bound: Duration,
    ) -> Result<bool, Failure> {
        let path = format!("{lock}/{}", window::node(&record.token));
        // It stays in the list where it is. When it is due there, it is found not to be over.
        let text = Window { millis, ..record.window.clone() }.text();
        let written = Box::pin(self.client.set_data(&path, text.as_bytes(), Some(record.version)));
        match self.lead(self.now(), bound, written).await {
            Err(failure) if failure.is(&zk::Error::BadVersion) => Ok(false),
            written => Ok(unless_gone(written)?.is_some()),
        }
    }

    /// Removes some of the windows that are over, whatever locks they are of. What can't be removed stays: the next window is another occasion.
    pub(crate) async fn sweep_windows(&self, bound: Duration) -> Result<(), Failure> {
        let list = self.list(&self.names.windows(), bound).await?;
        let mut due: Vec<_> = list.iter().filter(|node| is_due(node)).collect();
        if due.is_empty() {
            return Ok(());
        }
        // From anywhere on: some may stay for long, for they are another user's, or were extended.
        let start = usize::try_from(now()).unwrap_or_default() % due.len();
        due.rotate_left(start);
        due.truncate(SWEPT);
        let now = self.leader_time().await?;
        // That one can't be read or removed says nothing of the others.
        drop(join_all(due.into_iter().map(|node| self.sweep_window(node, now, bound))).await);
        Ok(())
    }

    /// Removes a window of the list, if it is over.
    async fn sweep_window(&self, node: &str, now: i64, bound: Duration) -> Result<()> {
        let Some((_, token)) = Names::listed_window(node) else { return Ok(()) };
        let path = format!("{}/{node}", self.names.windows());
        let Some((lock, _)) = self.data(&path, bound).await.map_err(|failure| lasting(&failure))? else {
            return Ok(());
        };
        let lock = self.names.in_root(&String::from_utf8_lossy(&lock));
        match self.record(&lock, &token, bound).await? {
            Some(record) if !record.left(now).is_zero() => {}
            Some(record) => _ = self.remove(&lock, &record, bound).await.map_err(|failure| lasting(&failure))?,
            // It was removed by whoever got the lock, or ended by somebody.
            None => _ = self.delete(&path, bound).await.map_err(|failure| lasting(&failure))?,
        }
        Ok(())
    }
}

/// Whether a window in the list is to be looked at.
fn is_due(node: &str) -> bool {
    Names::listed_window(node).is_some_and(|(due, _)| due < now())
}

/// What a record says.
///
/// # Errors
/// `Unexpected` if it has another form.
pub(crate) fn parse(data: &[u8]) -> Result<Window> {
    Window::parse(data).ok_or_else(|| {
        let message = "the record that the lock is kept has another form: others wrote to it, or a newer lockkit";
        Error::new(ErrorKind::Unexpected, message)
    })
}

#[cfg(test)]
mod tests {
    use lockkit_core::{AcquireRequest, LockStore as _};

    use super::*;
    use crate::{
        ZkConfig, ZkStore,
        testing::{claim, granted, request, server},
    };

    const BOUND: Duration = Duration::from_secs(5);

    /// It was asked for again, and goes on.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_window_that_was_extended_since_it_was_read_is_not_removed() {
        let server = server().await;
        let store = ZkStore::connect(ZkConfig::new([server.addr().to_string()])).await.expect("connect");
        let (session, holder) = (store.sessions().present().expect("a session"), claim());
        granted(store.acquire(&request(&holder, Duration::ZERO)).await);
        let asked = request(&claim(), Duration::ZERO);
        let keeping = AcquireRequest { from: Some(holder.token), keeps: true, ..asked };
        let first = granted(store.acquire(&keeping).await);
        let (lock, token) = (session.names.lock(&holder.key), &keeping.claim.token);
        let before = session.record(&lock, token, BOUND).await.expect("read").expect("it is kept");
        let longer = AcquireRequest { ttl: keeping.ttl * 2, ..keeping.clone() };
        assert_eq!(granted(store.acquire(&longer).await).fence, first.fence);
        assert!(!session.remove(&lock, &before, BOUND).await.expect("ask"), "it was removed");
        let after = session.record(&lock, token, BOUND).await.expect("read").expect("it is kept");
        assert!(after.left(before.written) >= longer.ttl);
        assert!(session.remove(&lock, &after, BOUND).await.expect("ask"));
        assert!(session.remove(&lock, &after, BOUND).await.expect("ask"), "it is gone all the same");
        assert!(session.record(&lock, token, BOUND).await.expect("read").is_none());
    }
}
