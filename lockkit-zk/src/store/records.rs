//! Records: nodes beside those of the locks. The node of a record has a child whose name is random and stands in front of its
//! text. Versions of a node start over when it is removed and made anew, and a writer that saw the former one must not take the
//! new one for it: so each change checks that child, too.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use async_trait::async_trait;
use lockkit_core::{
    Error, ErrorKind, LockKey, Result, Token,
    store::{Record, Records, Swap},
};
use zookeeper_client::{self as zk, CreateMode, MultiWriter};

use crate::{
    client::session::Session,
    store::ZkStore,
    wire::error::{self, Failure, Sent, lasting, read_only},
};

/// The length of the name of a record's child.
const CHILD: usize = 16;

#[async_trait]
impl Records for ZkStore {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        let read = async {
            let node = RecordNode::of(self, name).await?;
            while node.since.elapsed() < node.bound {
                let found = node.look().await?;
                if node.is_still(&found).await? {
                    return Ok(found.map(|found| found.text));
                }
            }
            Err(restless())
        };
        read.await.map_err(|e| e.at("read record", Some(name), &self.info.name))
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        let set = async {
            let node = RecordNode::of(self, name).await?;
            while node.since.elapsed() < node.bound {
                let found = node.look().await?;
                match Swap::of(found.as_ref().map(|found| &found.text), seen, new) {
                    Some(answer) if node.is_still(&found).await? => return Ok(answer),
                    None if node.write(&found, new).await? => return Ok(Swap::Done),
                    _ => {}
                }
            }
            Err(restless())
        };
        set.await.map_err(|e| e.at("set record", Some(name), &self.info.name))
    }
}

/// The node of a record.
struct RecordNode {
    session: Arc<Session>,
    path: String,
    /// When it was asked for, and the bound on that, and on each of its steps.
    since: Instant,
    bound: Duration,
}

/// What a server knows of a node, which may be old.
struct FoundRecord {
    /// The name of the node's child.
    child: String,
    text: Record,
    version: i32,
}

impl FoundRecord {
    fn parse(data: &[u8], version: i32) -> Result<Self> {
        let (child, text) = data.split_at_checked(CHILD).unwrap_or_default();
        let text = Record::found(text.strip_prefix(b" ").unwrap_or_default())?;
        Ok(Self { child: Record::found(child)?.as_str().to_owned(), text, version })
    }
}

impl RecordNode {
    async fn of(store: &ZkStore, name: &LockKey) -> Result<Self> {
        let session = store.session().await?;
        Ok(Self { path: session.names.record(name), session, since: Instant::now(), bound: store.timeout() })
    }

    /// `None` if it is not there.
    async fn look(&self) -> Result<Option<FoundRecord>> {
        let data = self.session.data(&self.path, self.bound).await;
        let data = data.map_err(|failure| read_only(&failure))?;
        data.map(|(data, stat)| FoundRecord::parse(&data, stat.version)).transpose()
    }

    /// Whether the node is still as it was seen. A transaction asks, which a majority confirms: a read shows what one server
    /// has, also after a `sync`.
    async fn is_still(&self, seen: &Option<FoundRecord>) -> Result<bool> {
        let mut check = self.session.client.new_multi_writer();
        match seen {
            Some(found) => self.check(&mut check, found),
            // It can be made only if it is not there. Nobody sees it.
            None => check
                .add_create(&self.path, b"", &self.session.options(CreateMode::Persistent))
                .and_then(|()| check.add_delete(&self.path, None)),
        }
        .map_err(|e| error::map(&e.into(), Sent::No))?;
        match self.session.commit(check, self.bound).await {
            Ok(()) => Ok(true),
            // Without a root there is no record either.
            Err(failure) if failure.is(&zk::Error::NoNode) => Ok(seen.is_none()),
            Err(failure) if is_other(&failure) => Ok(false),
            Err(failure) => Err(read_only(&failure)),
        }
    }

    /// Writes what is new in the place of what was seen; `false` if that is not there any more.
    async fn write(&self, seen: &Option<FoundRecord>, new: Option<&Record>) -> Result<bool> {
        let mut change = self.session.client.new_multi_writer();
        let options = self.session.options(CreateMode::Persistent);
        let data = |child: &str, text: &Record| format!("{child} {}", text.as_str()).into_bytes();
        match (seen, new) {
            (None, None) => Ok(()),
            (None, Some(text)) => {
                let child = &Token::random()?.reveal()[..CHILD];
                change
                    .add_create(&self.path, &data(child, text), &options)
                    .and_then(|()| change.add_create(&self.child(child), b"", &options))
            }
            (Some(found), Some(text)) => self
                .check(&mut change, found)
                .and_then(|()| change.add_set_data(&self.path, &data(&found.child, text), Some(found.version))),
            (Some(found), None) => self
                .check(&mut change, found)
                .and_then(|()| change.add_delete(&self.child(&found.child), None))
                .and_then(|()| change.add_delete(&self.path, Some(found.version))),
        }
        .map_err(|e| error::map(&e.into(), Sent::No))?;
        match self.session.commit(change, self.bound).await {
            Ok(()) => Ok(true),
            Err(failure) if failure.is(&zk::Error::NoNode) && seen.is_none() => {
                self.session.make_directory(self.session.names.root(), self.bound).await?;
                Ok(false)
            }
            Err(failure) if failure.is(&zk::Error::NoNode) || is_other(&failure) => Ok(false),
            Err(failure) => Err(lasting(&failure)),
        }
    }

    /// That the node is the one that was seen, and has not changed.
    fn check(&self, all: &mut MultiWriter<'_>, found: &FoundRecord) -> Result<(), zk::Error> {
        all.add_check_version(&self.path, found.version)?;
        all.add_check_version(&self.child(&found.child), 0)
    }

    fn child(&self, child: &str) -> String {
        format!("{}/{child}", self.path)
    }
}

/// Whether a write was refused because the node is not as it was.
fn is_other(failure: &Failure) -> bool {
    failure.is(&zk::Error::BadVersion) || failure.is(&zk::Error::NodeExists)
}

fn restless() -> Error {
    Error::new(ErrorKind::Unavailable, "the record changes faster than it can be looked at")
}
