//! The `--store` option, and how a verb gets from it to locks.

use std::future::Future;

use clap::Args;
use lockkit::{Locker, LockerBuilder};

use crate::exit::{Failure, USAGE};

/// Where the locks are.
#[derive(Args, Clone)]
pub(crate) struct StoreArgs {
    /// URL of the store, such as redis://host:6379; better in the environment, where no process list shows its password
    #[arg(long = "store", value_name = "URL", env = "LOCKKIT_STORE", hide_env_values = true)]
    url: Option<String>,
}

impl StoreArgs {
    /// The URL. May have a password in it.
    pub(crate) fn url(&self) -> Result<&str, Failure> {
        let url = self.url.as_deref().filter(|url| !url.is_empty());
        url.ok_or_else(|| Failure::new(USAGE, "no store: give --store URL, or set LOCKKIT_STORE"))
    }

    /// Connects.
    pub(crate) async fn builder(&self) -> Result<LockerBuilder, Failure> {
        Ok(Locker::shared_builder(lockkit::open(self.url()?).await?))
    }

    /// Connects, with default settings.
    pub(crate) async fn locker(&self) -> Result<Locker, Failure> {
        Ok(self.builder().await?.build())
    }
}

impl std::fmt::Debug for StoreArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The URL may contain a password.
        f.write_str("StoreArgs(..)")
    }
}

/// Runs a verb's asynchronous part on this very thread.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::system("start the runtime", &error))?;
    runtime.block_on(work)
}
