//! Records: nodes beside those of the locks. One that was removed stays as an empty node, so that the versions of a node never
//! start over, and a version always means one text.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    Error, ErrorKind, LockKey, Result,
    store::{Record, Records, Swap},
};
use zookeeper_client::{self as zk, CreateMode};

use crate::{
    client::session::Session,
    store::ZkStore,
    wire::error::{self, Failure, Sent},
};

/// How often a record is looked at again that changed between two looks.
const LOOKS: u32 = 20;

#[async_trait]
impl Records for ZkStore {
    async fn read(&self, name: &LockKey) -> Result<Option<Record>> {
        let read = async {
            let node = Node::of(self, name).await?;
            for _ in 0..LOOKS {
                let found = node.look().await?;
                if node.is_still(&found).await? {
                    return found.record();
                }
            }
            Err(restless())
        };
        read.await.map_err(|e| e.at("read record", Some(name), self.name()))
    }

    async fn compare_and_set(&self, name: &LockKey, seen: Option<&Record>, new: Option<&Record>) -> Result<Swap> {
        let set = async {
            let node = Node::of(self, name).await?;
            for _ in 0..LOOKS {
                let found = node.look().await?;
                match Swap::of(found.record()?.as_ref(), seen, new) {
                    Some(answer) if node.is_still(&found).await? => return Ok(answer),
                    None if node.write(&found, new).await? => return Ok(Swap::Done),
                    _ => {}
                }
            }
            Err(restless())
        };
        set.await.map_err(|e| e.at("set record", Some(name), self.name()))
    }
}

/// The node of a record.
struct Node {
    session: Arc<Session>,
    path: String,
    bound: Duration,
}

/// What a server knows of a node, which may be old: its data and their version, if it is there.
struct Seen(Option<(Vec<u8>, i32)>);

impl Seen {
    fn record(&self) -> Result<Option<Record>> {
        let text = self.0.as_ref().map(|(data, _)| data).filter(|data| !data.is_empty());
        text.map(|data| Record::found(data)).transpose()
    }
}

impl Node {
    async fn of(store: &ZkStore, name: &LockKey) -> Result<Self> {
        let session = store.session().await?;
        Ok(Self { path: session.names.record(name), session, bound: store.timeout() })
    }

    async fn look(&self) -> Result<Seen> {
        match self.session.read(self.bound, Box::pin(self.session.client.get_data(&self.path))).await {
            Ok((data, stat)) => Ok(Seen(Some((data, stat.version)))),
            Err(failure) if failure.is(&zk::Error::NoNode) => Ok(Seen(None)),
            Err(failure) => Err(error::map(&failure, Sent::ReadOnly)),
        }
    }

    /// Whether that is how it is: asked by a transaction, for only the leader knows, and only with a majority behind it. (A
    /// read shows what one server has, also after a `sync`.)
    async fn is_still(&self, seen: &Seen) -> Result<bool> {
        let mut check = self.session.client.new_multi_writer();
        match seen.0 {
            Some((_, version)) => check.add_check_version(&self.path, version),
            // It can be made only if it is not there. Nobody sees it.
            None => check
                .add_create(&self.path, b"", &self.session.options(CreateMode::Persistent))
                .and_then(|()| check.add_delete(&self.path, None)),
        }
        .map_err(|e| error::map(&e.into(), Sent::No))?;
        let sent = self.session.now();
        let checked = check.commit();
        let checked = Box::pin(async move { checked.await.map_err(zk::Error::from) });
        match self.session.lead(sent, self.bound, checked).await {
            Ok(_) => Ok(true),
            // Without a root there is no record either.
            Err(failure) if failure.is(&zk::Error::NoNode) => Ok(seen.0.is_none()),
            Err(failure) if is_other(&failure) => Ok(false),
            Err(failure) => Err(error::map(&failure, Sent::ReadOnly)),
        }
    }

    /// Writes what is new in the place of what was seen; `false` if that is not there any more.
    async fn write(&self, seen: &Seen, new: Option<&Record>) -> Result<bool> {
        let data = new.map_or("", Record::as_str).as_bytes();
        let (client, sent) = (&self.session.client, self.session.now());
        let written = match seen.0 {
            Some((_, version)) => {
                let set = client.set_data(&self.path, data, Some(version));
                self.session.lead(sent, self.bound, Box::pin(set)).await.map(drop)
            }
            None => {
                let options = self.session.options(CreateMode::Persistent);
                let create = client.create(&self.path, data, &options);
                self.session.lead(sent, self.bound, Box::pin(create)).await.map(drop)
            }
        };
        match written {
            Ok(()) => Ok(true),
            Err(failure) if failure.is(&zk::Error::NoNode) => {
                self.session.make_directory(self.session.names.root(), self.bound).await?;
                Ok(false)
            }
            Err(failure) if is_other(&failure) => Ok(false),
            // What it made does not end with the session.
            Err(failure) if failure.ends_session() => Err(error::map(&failure, Sent::Yes).unknown_effect()),
            Err(failure) => Err(error::map(&failure, Sent::Yes)),
        }
    }
}

/// Whether a write was refused because the node is not as it was.
fn is_other(failure: &Failure) -> bool {
    failure.is(&zk::Error::BadVersion) || failure.is(&zk::Error::NodeExists)
}

fn restless() -> Error {
    Error::new(ErrorKind::Unavailable, "the record changes faster than it can be looked at")
}
