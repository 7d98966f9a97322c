//! The stores that `race` and `compare` run on: those given by URL, or private servers of what is installed.

use std::fmt;

use clap::Args;
use lockkit_compare::Targets;

use crate::{
    exit::Failure,
    store::{self, URL_VARIABLE},
};

/// Which stores to run on.
#[derive(Args, Clone)]
pub(crate) struct StoresArgs {
    /// URL of a store, such as redis://host:6379; may be given several times. Default: LOCKKIT_STORE, or else a private
    /// server of every kind that is installed
    #[arg(long = "store", value_name = "URL", env = URL_VARIABLE, hide_env = true, hide_env_values = true)]
    urls: Vec<String>,
}

impl StoresArgs {
    /// Whether stores were given by URL. An empty variable counts as unset.
    pub(crate) fn are_given(&self) -> bool {
        self.urls.iter().any(|url| !url.is_empty())
    }

    /// Connects to the stores and says what that showed, or starts what is installed.
    pub(crate) async fn targets(&self) -> Result<Targets, Failure> {
        if !self.are_given() {
            return Ok(Targets::installed().await?);
        }
        let mut targets = Targets::default();
        for url in self.urls.iter().filter(|url| !url.is_empty()) {
            let target = targets.add(url).await?;
            store::warn(target.name(), target.warnings());
        }
        Ok(targets)
    }
}

impl fmt::Debug for StoresArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // URLs may contain passwords.
        f.write_str("StoresArgs(..)")
    }
}
