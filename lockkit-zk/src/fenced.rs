//! Nodes in ZooKeeper that check fences: [`FencedResource`] by multi-operations.
//!
//! ```no_run
//! use lockkit_core::{Locker, fenced::FencedResource};
//! use lockkit_zk::{ZkConfig, ZkStore, fenced::ZkResource};
//!
//! # async fn lead() -> lockkit_core::Result<()> {
//! let locker = Locker::new(ZkStore::from_url("zk://zk1,zk2,zk3").await?);
//! let route = ZkResource::connect(ZkConfig::from_url("zk://zk1,zk2,zk3")?, "/routes/7").await?;
//! let guard = locker.lock("routes/7").acquire().await?;
//! route.claim(guard.fence()).await?.ok()?; // the first act, before the first read
//! let now = route.read().await?;
//! # let next = now.unwrap_or_default();
//! route.write(guard.fence(), &next).await?.ok()?;
//! # guard.release().await?; Ok(()) }
//! ```
//!
//! The value is the data of its node; the highest fence is that of a node beside it, `<path>.highest-fence`. Each change
//! is one multi-operation that also checks the version of the fence's node, so that it fails if another holder came in
//! between. The fence of a reader has that of the last writer behind it: `<fence> <writer's fence>`. Both nodes are persistent;
//! their parents must exist. Every client that changes the value must do it so: a plain `setData` asks for no fence.
//!
//! Paths lie below the [chroot](ZkConfig::chroot), as locks do, so that services with a chroot each don't meet: with the chroot `/app` the
//! value at `/a` is in the node `/app/a`, and its fence in `/app/a.highest-fence`. A resource makes no chroot. (Former versions ignored the
//! chroot; `docs/backends/zookeeper.md` says how both nodes are moved.)

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use lockkit_core::{
    Error, ErrorKind, Fence, Result,
    fenced::{Admission, FencedResource, SeenFences},
    store::SingleFlight,
};
use tokio::time::timeout;
use zookeeper_client::{self as zk, Client, CreateMode, MultiWriteError, MultiWriter};

use crate::{
    client::{connect, driver::understood},
    config::ZkConfig,
    wire::error::{self, Failure, Sent},
};

/// What is added to the path of a value for the path of its fence.
const FENCE_NODE: &str = ".highest-fence";

/// How often a change is tried when others come in between. Each time somebody else got on, so this is contention
/// without a lock.
const ATTEMPTS: u32 = 16;

/// A fenced value in a ZooKeeper node. Cheap to clone.
#[derive(Clone)]
pub struct ZkResource {
    shared: Arc<Shared>,
    path: String,
}

/// The session, which is made anew when it is over.
struct Shared {
    config: ZkConfig,
    name: Arc<str>,
    client: SingleFlight<Client>,
}

/// The fence's node as it was read.
#[derive(Clone, Copy, Default)]
struct FenceNode {
    seen: SeenFences,
    /// `None` if there is no such node.
    version: Option<i32>,
}

/// What a holder does.
#[derive(Clone, Copy)]
enum Act<'a> {
    /// A reader claims.
    Read,
    /// A writer claims.
    Claim,
    Write {
        value: &'a [u8],
        /// Whether the value's node is there.
        exists: bool,
    },
}

impl ZkResource {
    /// Connects to the ensemble that keeps the value in the node at this path, below the configuration's chroot, which must exist.
    ///
    /// # Errors
    /// `InvalidInput` for a wrong configuration or path; `Denied`, `Unavailable` or `TimedOut` if there is no session
    /// to be had.
    pub async fn connect(config: ZkConfig, path: impl Into<String>) -> Result<Self> {
        config.check()?;
        let name = config.display_name().into();
        let resource =
            Self { shared: Arc::new(Shared { config, name, client: SingleFlight::new() }), path: path.into() };
        resource.checked().map_err(|e| resource.failed("connect", e))?;
        resource.shared.client().await.map_err(|e| resource.failed("connect", e))?;
        Ok(resource)
    }

    /// The value at another path below the same chroot, in the same session.
    #[must_use]
    pub fn at(&self, path: impl Into<String>) -> Self {
        Self { path: path.into(), ..self.clone() }
    }

    fn checked(&self) -> Result<()> {
        if self.path.len() > 1 && self.path.starts_with('/') && !self.path.ends_with('/') {
            return Ok(());
        }
        Err(Error::invalid(format!("{:?} is no path of a node; it looks like /a/b", self.path)))
    }

    /// The path of the value's node, as the servers know it.
    fn node(&self) -> String {
        format!("{}{}", self.shared.config.prefix(), self.path)
    }

    fn fence_path(&self) -> String {
        format!("{}{FENCE_NODE}", self.node())
    }

    async fn change(&self, fence: Fence, act: Act<'_>) -> Result<Admission> {
        self.checked()?;
        let client = self.shared.client().await?;
        for _ in 0..ATTEMPTS {
            // What is read may be old, but the highest fences only grow: who is refused by an old one is refused.
            let before = self.seen(&client).await?;
            let mut after = before.seen;
            let admission = match act {
                Act::Read => after.admit_shared(fence),
                Act::Claim | Act::Write { .. } => after.admit(fence),
            };
            if !admission.is_admitted() {
                return Ok(admission);
            }
            let act = match act {
                Act::Write { value, .. } => {
                    let stat = client.check_stat(&self.node());
                    Act::Write { value, exists: self.shared.bounded(&client, Sent::ReadOnly, stat).await?.is_some() }
                }
                claim => claim,
            };
            let changed = self.multi(&client, before, after, act);
            if self.shared.bounded(&client, Sent::Yes, changed).await? {
                return Ok(Admission::Admitted);
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "others kept changing the resource; do they hold the lock?"))
    }

    async fn seen(&self, client: &Client) -> Result<FenceNode> {
        let path = self.fence_path();
        let read = async {
            match client.get_data(&path).await {
                Err(zk::Error::NoNode) => Ok(None),
                other => other.map(Some),
            }
        };
        let Some((data, stat)) = self.shared.bounded(client, Sent::ReadOnly, read).await? else {
            return Ok(FenceNode::default());
        };
        let seen = parse(&data)
            .ok_or_else(|| Error::new(ErrorKind::Unexpected, format!("what is in the node {path} is no fence")))?;
        Ok(FenceNode { seen, version: Some(stat.version) })
    }

    /// Writes the fence, and the value if there is one, in one step; `false` if anything was not as it was read.
    async fn multi(
        &self,
        client: &Client,
        before: FenceNode,
        after: SeenFences,
        act: Act<'_>,
    ) -> Result<bool, zk::Error> {
        let options = CreateMode::Persistent.with_acls(self.shared.config.acls());
        let (node, path, text) = (self.node(), self.fence_path(), text(after));
        let mut all: MultiWriter<'_> = client.new_multi_writer();
        match (before.version, act) {
            (None, _) => all.add_create(&path, text.as_bytes(), &options)?,
            // Readers that find their fence there are not in each other's way. The check is a transaction, too: nobody has come
            // since it was read.
            (Some(version), Act::Read) if after == before.seen => all.add_check_version(&path, version)?,
            // Also if the fence is the same: the version says that nobody has come since it was read.
            (Some(version), _) => all.add_set_data(&path, text.as_bytes(), Some(version))?,
        }
        match act {
            Act::Write { value, exists: true } => all.add_set_data(&node, value, None)?,
            Act::Write { value, exists: false } => all.add_create(&node, value, &options)?,
            Act::Read | Act::Claim => {}
        }
        match all.commit().await {
            Ok(_) => Ok(true),
            Err(MultiWriteError::OperationFailed { source: zk::Error::BadVersion | zk::Error::NodeExists, .. }) => {
                Ok(false)
            }
            // A node that was there has been deleted since: that of the fence, which comes first, or that of the value. A missing
            // parent stays missing.
            Err(MultiWriteError::OperationFailed { source: zk::Error::NoNode, index })
                if [before.version.is_some(), matches!(act, Act::Write { exists: true, .. })].get(index)
                    == Some(&true) =>
            {
                Ok(false)
            }
            Err(other) => Err(other.into()),
        }
    }

    async fn look(&self) -> Result<Option<Vec<u8>>> {
        self.checked()?;
        let (client, node) = (self.shared.client().await?, self.node());
        let read = async {
            // The server that is asked may lag behind; after a sync it has all that was committed before.
            client.sync(&node).await?;
            match client.get_data(&node).await {
                Err(zk::Error::NoNode) => Ok(None),
                other => other.map(|(data, _)| Some(data)),
            }
        };
        self.shared.bounded(&client, Sent::ReadOnly, read).await
    }

    fn failed(&self, operation: &'static str, error: Error) -> Error {
        error.at(operation, None, &self.shared.name)
    }
}

impl Shared {
    async fn client(&self) -> Result<Client> {
        let is_alive = |client: &Client| !client.state().is_terminated();
        let connect = || {
            let config = self.config.clone();
            async move { connect::connect(&config).await }
        };
        self.client.get(is_alive, self.config.timeout * 2, connect).await
    }

    async fn bounded<T>(
        &self,
        client: &Client,
        sent: Sent,
        answer: impl Future<Output = Result<T, zk::Error>>,
    ) -> Result<T> {
        let bound = self.config.timeout;
        let answer = match timeout(bound, understood(answer)).await {
            Ok(answer) => answer.map_err(Failure::Driver),
            Err(_) => Err(Failure::TimedOut(bound)),
        };
        answer.map_err(|failure| {
            if failure.ends_session() || matches!(failure, Failure::TimedOut(_)) {
                self.let_go(client);
            }
            error::map_lasting(&failure, sent)
        })
    }

    /// Has the next operation connect anew. A driver that waits for the rest of an answer whose length was spoilt, or whose
    /// runtime has ended, says of its session for ever that it is connected.
    fn let_go(&self, client: &Client) {
        self.client.present(|present| present.session_id() != client.session_id());
    }
}

#[async_trait]
impl FencedResource for ZkResource {
    async fn claim(&self, fence: Fence) -> Result<Admission> {
        self.change(fence, Act::Claim).await.map_err(|e| self.failed("claim", e))
    }

    async fn write(&self, fence: Fence, value: &[u8]) -> Result<Admission> {
        let write = self.change(fence, Act::Write { value, exists: false }).await;
        write.map_err(|e| self.failed("write", e))
    }

    async fn claim_shared(&self, fence: Fence) -> Result<Admission> {
        self.change(fence, Act::Read).await.map_err(|e| self.failed("claim", e))
    }

    async fn read(&self) -> Result<Option<Vec<u8>>> {
        self.look().await.map_err(|e| self.failed("read", e))
    }
}

/// What is in the fence's node: the highest fence, and behind it that of the last writer if it is another.
fn text(seen: SeenFences) -> String {
    if seen.writer() == seen.highest() {
        seen.highest().to_string()
    } else {
        format!("{} {}", seen.highest(), seen.writer())
    }
}

fn parse(data: &[u8]) -> Option<SeenFences> {
    let text = str::from_utf8(data).ok()?;
    let (highest, writer) = text.split_once(' ').unwrap_or((text, text));
    Some(SeenFences::new(Fence::new(highest.parse().ok()?), Fence::new(writer.parse().ok()?)))
}

impl fmt::Debug for ZkResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkResource").field("servers", &self.shared.name).field("path", &self.path).finish()
    }
}
