//! The `--store` option, and how a verb gets from it to locks.

use std::{future::Future, path::PathBuf, sync::Arc};

use clap::Args;
use lockkit::{LockStore, Locker, LockerBuilder};

use crate::exit::{Failure, USAGE, say};

/// What stands before the colon of a store's URL, and before `+sentinel` or `+cluster`.
const SCHEMES: [&str; 10] =
    ["redis", "rediss", "valkey", "valkeys", "redlock", "redlocks", "mysql", "mariadb", "zk", "zks"];

/// The variable of the environment that has the URL, unless `--store` has it.
pub(crate) const URL_VARIABLE: &str = "LOCKKIT_STORE";

/// Where the locks are.
#[derive(Args, Clone)]
pub(crate) struct StoreArgs {
    /// URL of the store, such as redis://host:6379; better in the environment, where no process list shows its password
    #[arg(long = "store", value_name = "URL", env = URL_VARIABLE, hide_env_values = true)]
    url: Option<String>,
}

impl StoreArgs {
    /// The URL. May have a password in it.
    pub(crate) fn url(&self) -> Result<&str, Failure> {
        let url = self.url.as_deref().filter(|url| !url.is_empty());
        url.ok_or_else(|| Failure::new(USAGE, "no store: give --store URL, or set LOCKKIT_STORE"))
    }

    /// Connects, and says what that showed.
    pub(crate) async fn builder(&self) -> Result<LockerBuilder, Failure> {
        Ok(Locker::shared_builder(open(self.url()?).await?))
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

/// Connects to a store, and says what that showed.
pub(crate) async fn open(url: &str) -> Result<Arc<dyn LockStore>, Failure> {
    let store = lockkit::open(url).await?;
    warn(&store.info().name, &store.info().warnings);
    Ok(store)
}

/// Says on one line what puts the locks of a store at risk, if anything does.
pub(crate) fn warn(store: &str, warnings: &[String]) {
    if !warnings.is_empty() {
        say(&format!("warning: {store}: {}", warnings.join("; also: ")));
    }
}

/// Reads a name, or other text that is shown to people. The URL of a store is refused: it may have a password in it, and it
/// stands here by mistake.
pub(crate) fn text(text: &str) -> Result<String, String> {
    match is_store_url(text) {
        true => Err("the URL of a store is given with --store, or in LOCKKIT_STORE".to_owned()),
        false => Ok(text.to_owned()),
    }
}

/// Reads the name of a file, as [`text`].
pub(crate) fn file(name: &str) -> Result<PathBuf, String> {
    text(name).map(PathBuf::from)
}

/// Whether it is meant as the URL of a store, as far as that can be told. The name of a lock may have colons too.
pub(crate) fn is_store_url(text: &str) -> bool {
    let Some((scheme, rest)) = text.trim_start().split_once(':') else { return false };
    let scheme = scheme.to_ascii_lowercase();
    let family = scheme.split('+').next().unwrap_or_default();
    let is_known = SCHEMES.contains(&family) && (rest.starts_with('/') || rest.contains('@'));
    let is_pair = scheme == "migrate" && rest.starts_with("?from=");
    is_known || is_pair || (rest.starts_with("//") && rest.contains('@')) || (scheme == "memory" && rest.is_empty())
}

/// Runs a verb's asynchronous part on this very thread.
pub(crate) fn block_on<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::system("start the runtime", &error))?;
    runtime.block_on(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_of_stores_are_told_from_names() {
        for url in
            ["redis://h", "REDIS://h", " redis+sentinel://h", "mysql:/u:p@h", "zk:u@h", "rdis://u:p@h", "memory:"]
        {
            assert!(is_store_url(url), "{url}");
        }
        for name in ["redis", "redis:cache:42", "https://example.com/42", "a@b", "memory:x", "", ":"] {
            assert!(!is_store_url(name), "{name}");
        }
    }
}
