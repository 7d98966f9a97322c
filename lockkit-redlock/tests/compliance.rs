//! Every case of the compliance suite against quorums, as named trials: over memory stores, over five real servers, and
//! over a mixture.
//!
//! A kind of store that is required and can't be found is a failure. `LOCKKIT_REQUIRE` names the required ones,
//! separated by commas; by default those whose servers Debian packages.

use std::{process::ExitCode, sync::Arc};

use async_trait::async_trait;
use libtest_mimic::Arguments;
use lockkit_core::{Clock, LockStore, MemoryStore};
use lockkit_redlock::{Node, RedlockConfig, RedlockStore};
use lockkit_testkit::{Backend, BoxError, Server, trials};

/// A quorum over memory stores; every client is a quorum of its own over the same stores.
#[derive(Debug)]
struct MemoryQuorum {
    nodes: Vec<MemoryStore>,
}

#[async_trait]
impl Backend for MemoryQuorum {
    fn name(&self) -> &str {
        "redlock-memory"
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        let nodes = self.nodes.iter().map(|node| Node::new(Arc::new(node.clone()))).collect();
        Ok(Arc::new(RedlockStore::new(nodes, RedlockConfig::new())?))
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        let nodes = self.nodes.iter().map(|node| Node::new(Arc::new(node.clone()))).collect();
        Ok(Some(Arc::new(RedlockStore::new(nodes, RedlockConfig::new().clock(clock))?)))
    }

    async fn private_server(&self) -> Result<Option<Box<dyn Server>>, BoxError> {
        Ok(None)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let nodes = (0..3).map(|_| MemoryStore::new()).collect();
    let all = trials(Arc::new(MemoryQuorum { nodes })).expect("the store is there");
    libtest_mimic::run(&arguments, all).exit_code()
}
