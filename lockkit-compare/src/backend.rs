//! A store that is known by its URL, as the compliance suite wants it.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use lockkit::{
    Clock, LockStore,
    mysql::{MySqlConfig, MySqlStore},
    redis::{RedisConfig, RedisStore},
    zk::{ZkConfig, ZkStore},
};
use lockkit_testkit::{Backend, BoxError, MemoryBackend};

/// The store at a URL, for the compliance suite; a new one if it is in this process.
#[must_use]
pub fn backend(name: &str, url: &str, in_process: bool) -> Arc<dyn Backend> {
    match in_process {
        true => Arc::new(MemoryBackend::default()),
        false => Arc::new(Url { name: name.to_owned(), url: url.to_owned() }),
    }
}

/// A store in use, which is not to be harmed.
struct Url {
    name: String,
    url: String,
}

impl fmt::Debug for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The URL may contain a password.
        f.debug_tuple("Url").field(&self.name).finish()
    }
}

#[async_trait]
impl Backend for Url {
    fn name(&self) -> &str {
        &self.name
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(lockkit::open(&self.url).await?)
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        // A URL of another kind is no configuration of this one.
        Ok(if let Ok(config) = RedisConfig::from_url(&self.url) {
            Some(Arc::new(RedisStore::connect(config.clock(clock)).await?))
        } else if let Ok(config) = MySqlConfig::from_url(&self.url) {
            Some(Arc::new(MySqlStore::connect(config.clock(clock)).await?))
        } else if let Ok(config) = ZkConfig::from_url(&self.url) {
            Some(Arc::new(ZkStore::connect(config.clock(clock)).await?))
        } else {
            None
        })
    }
}
