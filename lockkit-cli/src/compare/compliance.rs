//! The compliance suite of the test kit on the stores that are compared.

use std::sync::Arc;

use async_trait::async_trait;
use lockkit::{
    Clock, LockStore,
    redis::{RedisConfig, RedisStore},
};
use lockkit_testkit::{Backend, BoxError, MemoryBackend, Server, Verdict, check};

use super::results::Counts;
use crate::targets::Target;

/// The store as the suite wants it.
pub(super) fn backend(target: &Target) -> Arc<dyn Backend> {
    match target.in_process {
        true => Arc::new(MemoryBackend::default()),
        false => Arc::new(Url { name: target.name.clone(), url: target.url.clone() }),
    }
}

/// Runs every case that applies; `progress` is told the name of each when it is done.
///
/// The cases that harm a server are left to the tests: a comparison may run on servers that are in use.
pub(super) async fn compliance(backend: Arc<dyn Backend>, mut progress: impl FnMut(&str) + Send) -> Counts {
    let report = check(backend, |checked| progress(checked.case.name)).await;
    Counts {
        passed: report.passed(),
        ignored: report.ignored().count(),
        failures: report.failed().map(|(case, seen)| format!("{}: {}", case.name, first_line(seen))).collect(),
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// A store that is known by its URL.
struct Url {
    name: String,
    url: String,
}

impl std::fmt::Debug for Url {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
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
        match RedisConfig::from_url(&self.url) {
            Ok(config) => Ok(Some(Arc::new(RedisStore::connect(config.clock(clock)).await?))),
            // Another kind of store, which has no way to be given a clock by URL.
            Err(_) => Ok(None),
        }
    }

    async fn private_server(&self) -> Result<Option<Box<dyn Server>>, BoxError> {
        Ok(None)
    }
}
