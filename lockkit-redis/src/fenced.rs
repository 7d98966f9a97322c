//! Values in Redis that check fences: [`FencedResource`] by a script.
//!
//! ```no_run
//! use lockkit_core::{Locker, fenced::FencedResource};
//! use lockkit_redis::{RedisConfig, RedisStore, fenced::RedisResource};
//!
//! # async fn pay() -> lockkit_core::Result<()> {
//! let locker = Locker::new(RedisStore::from_url("redis://locks:6379").await?);
//! let stock = RedisResource::connect(RedisConfig::from_url("redis://data:6379")?, "stock/7").await?;
//! let guard = locker.lock("stock/7").acquire().await?;
//! stock.claim(guard.fence()).await?.ok()?; // the first act, before the first read
//! let left = stock.read().await?;
//! # let next = left.unwrap_or_default();
//! stock.write(guard.fence(), &next).await?.ok()?;
//! # guard.release().await?; Ok(()) }
//! ```
//!
//! The value is a plain string at its key; the highest fence stands beside it at `<key>:highest-fence`, and the number of the last write at
//! `<key>:last-write`, both without expiry. A write that was given up on its way may arrive after later ones of the same holder. By its number
//! it undoes none of them, as long as one [`RedisResource`] and its clones sent them all. A user whose rights name keys needs all three.
//!
//! The key must not be that of a lock, which it could be if locks have an empty prefix.
//! Whoever changes the value must do it through the script: a plain `SET` asks for no fence. From another client, or to
//! change something else than a string, use [`SCRIPT`], or put its first lines in front of a script of your own. Readers of
//! such data use [`SHARED_SCRIPT`].
//!
//! The data must outlive what it protects against: a server that loses its data forgets the highest fence too. With
//! locks and data on one server that keeps nothing, both are gone at once, and a writer from before is let in.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use lockkit_core::{
    Error, ErrorKind, Fence, Result, Token,
    fenced::{Admission, FencedResource},
    store::Reconnections,
};
use redis::Cmd;

use crate::{
    client::dialer::Dialer,
    config::{RedisConfig, Topology},
    wire::{
        error::{self, Sent},
        scripts::{self, FENCED, FENCED_SHARED},
    },
};

/// The script: `KEYS` are the key of the value and that of its fence, `ARGV` the fence in decimal and, to write, the
/// new value. To number the writes of a client, add the key of the last write, a name for the client without blanks, and the
/// number. It returns an empty string if the holder is admitted, else the highest fence that was seen.
pub const SCRIPT: &str = scripts::FENCED_CODE;

/// The script of a reader's claim: `KEYS` is the key of the value's fence, `ARGV` the reader's fence in decimal. It returns an
/// empty string if the reader is admitted, else the highest fence of a writer that was seen.
pub const SHARED_SCRIPT: &str = scripts::FENCED_SHARED_CODE;

/// What is added to the key of a value for the key of its fence.
const FENCE_KEY: &str = ":highest-fence";

/// What is added to the key of a value for the key of its last write.
const LAST_WRITE_KEY: &str = ":last-write";

/// A fenced value on one Redis or Valkey server. Cheap to clone.
#[derive(Clone, Debug)]
pub struct RedisResource {
    dialer: Arc<Dialer>,
    timeout: Duration,
    name: Arc<str>,
    key: String,
    writes: Arc<Writes>,
}

/// Numbers what one client writes, in the order in which it was told to.
#[derive(Debug)]
struct Writes {
    client: String,
    next: AtomicU64,
}

impl RedisResource {
    /// Connects to the server that keeps the value at this key. The configuration's prefix is for locks; the key is
    /// taken as it is.
    ///
    /// # Errors
    /// `InvalidInput` for a wrong configuration, and for one with `replicas`; `Unsupported` for a cluster; `Denied`, `Unavailable` or `TimedOut` if the server can't be reached.
    pub async fn connect(config: RedisConfig, key: impl Into<String>) -> Result<Self> {
        config.check()?;
        if matches!(config.topology, Topology::Cluster { .. }) {
            let why = "a fenced value is kept on one server: name it, or its sentinels, not a cluster";
            return Err(Error::new(ErrorKind::Unsupported, why));
        }
        if config.replicas > 0 {
            return Err(Error::invalid("a fenced value waits for no replicas: leave out the option replicas"));
        }
        let (timeout, name) = (config.timeout, config.display_name().into());
        let dialer = Dialer::new(config, None, None, Arc::default(), Reconnections::default());
        let writes = Arc::new(Writes { client: Token::random()?.reveal(), next: AtomicU64::new(1) });
        let resource = Self { dialer, timeout, name, key: key.into(), writes };
        resource.dialer.connection().await.map_err(|e| resource.failed("connect", e))?;
        Ok(resource)
    }

    /// The value at another key, over the same connection.
    #[must_use]
    pub fn at(&self, key: impl Into<String>) -> Self {
        Self { key: key.into(), ..self.clone() }
    }

    async fn ask(&self, fence: Fence) -> Result<Admission> {
        let mut request = FENCED.by_hash(2, 1, 2 * self.key.len() + 64);
        request.arg(&self.key).arg(self.fence_key()).arg(fence.get());
        self.run(request).await
    }

    async fn ask_to_write(&self, fence: Fence, value: &[u8]) -> Result<Admission> {
        let number = self.writes.next.fetch_add(1, Ordering::Relaxed);
        let mut request = FENCED.by_hash(3, 4, 3 * self.key.len() + 128 + value.len());
        request.arg(&self.key).arg(self.fence_key()).arg(format!("{}{LAST_WRITE_KEY}", self.key));
        request.arg(fence.get()).arg(value).arg(&self.writes.client).arg(number);
        self.run(request).await
    }

    async fn ask_shared(&self, fence: Fence) -> Result<Admission> {
        let mut request = FENCED_SHARED.by_hash(1, 1, self.key.len() + 64);
        request.arg(self.fence_key()).arg(fence.get());
        self.run(request).await
    }

    async fn run(&self, request: Cmd) -> Result<Admission> {
        let connection = self.dialer.connection().await?;
        let reply = connection.run(request, false, self.timeout, Sent::Yes).await?;
        let highest = redis::from_redis_value::<String>(reply).map_err(|_| error::odd_reply(Sent::Yes))?;
        match highest.parse() {
            _ if highest.is_empty() => Ok(Admission::Admitted),
            Ok(highest) => Ok(Admission::Refused { highest: Fence::new(highest) }),
            Err(_) => Err(error::odd_reply(Sent::Yes)),
        }
    }

    fn fence_key(&self) -> String {
        format!("{}{FENCE_KEY}", self.key)
    }

    async fn look(&self) -> Result<Option<Vec<u8>>> {
        let connection = self.dialer.connection().await?;
        let reply = connection.run_one(Cmd::get(&self.key), self.timeout, Sent::ReadOnly).await?;
        let reply = connection.accept(reply, Sent::ReadOnly)?;
        redis::from_redis_value(reply).map_err(|_| error::odd_reply(Sent::ReadOnly))
    }

    fn failed(&self, operation: &'static str, error: Error) -> Error {
        error.at(operation, None, &self.name)
    }
}

#[async_trait]
impl FencedResource for RedisResource {
    async fn claim(&self, fence: Fence) -> Result<Admission> {
        self.ask(fence).await.map_err(|e| self.failed("claim", e))
    }

    async fn write(&self, fence: Fence, value: &[u8]) -> Result<Admission> {
        self.ask_to_write(fence, value).await.map_err(|e| self.failed("write", e))
    }

    async fn claim_shared(&self, fence: Fence) -> Result<Admission> {
        self.ask_shared(fence).await.map_err(|e| self.failed("claim", e))
    }

    async fn read(&self) -> Result<Option<Vec<u8>>> {
        self.look().await.map_err(|e| self.failed("read", e))
    }
}
