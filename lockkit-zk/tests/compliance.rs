//! Every case of the compliance suite against real ZooKeeper servers: the system's own, which is required, and a newer
//! one where it can be had.

use std::{process::ExitCode, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{Clock, LockStore};
use lockkit_testkit::{
    Backend, BoxError, Server, Suite,
    faults::{Framing, Proxy},
    servers::{Process, ZooKeeperFlavor, ZooKeeperServer},
};
use lockkit_zk::{ZkConfig, ZkStore};
use tokio::sync::Mutex;

fn main() -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let start = |name, flavor| runtime.block_on(ZooKeeperBackend::start(name, flavor));
    let mut suite = Suite::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/expected"), "zk");
    suite.add("zk", start("zk", ZooKeeperFlavor::Installed));
    suite.add("zk-newer", start("zk-newer", ZooKeeperFlavor::Newer));
    suite.run()
}

/// One server for the cases that do it no harm, and others for those that do.
#[derive(Debug)]
struct ZooKeeperBackend {
    name: &'static str,
    flavor: ZooKeeperFlavor,
    shared: ZooKeeperServer,
}

impl ZooKeeperBackend {
    async fn start(name: &'static str, flavor: ZooKeeperFlavor) -> Result<Self, BoxError> {
        Ok(Self { name, shared: ZooKeeperServer::start(flavor.clone()).await?, flavor })
    }
}

async fn connect(address: std::net::SocketAddr) -> Result<Arc<dyn LockStore>, BoxError> {
    Ok(Arc::new(ZkStore::connect(ZkConfig::new([address.to_string()])).await?))
}

#[async_trait]
impl Backend for ZooKeeperBackend {
    fn name(&self) -> &str {
        self.name
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        connect(self.shared.addr()).await
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        let config = ZkConfig::new([self.shared.addr().to_string()]).clock(clock);
        Ok(Some(Arc::new(ZkStore::connect(config).await?)))
    }

    async fn private_server(&self) -> Result<Option<Box<dyn Server>>, BoxError> {
        let server = ZooKeeperServer::start(self.flavor.clone()).await?;
        Ok(Some(Box::new(PrivateServer { server, proxies: Mutex::default() })))
    }
}

/// A server whose clients all come through proxies, so that they can be cut off: it has no command for that.
#[derive(Debug)]
struct PrivateServer {
    server: ZooKeeperServer,
    proxies: Mutex<Vec<Proxy>>,
}

#[async_trait]
impl Server for PrivateServer {
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        let proxy = Proxy::start(self.server.addr()).await?;
        let store = connect(proxy.addr()).await?;
        self.proxies.lock().await.push(proxy);
        Ok(store)
    }

    async fn open_through_proxy(&self) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        self.open_impatient(ZkConfig::TIMEOUT).await
    }

    async fn open_impatient(&self, timeout: Duration) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        let proxy = Proxy::start(self.server.addr()).await?.framing(Framing::Length);
        let config = ZkConfig::new([proxy.addr().to_string()]).timeout(timeout);
        Ok((Arc::new(ZkStore::connect(config).await?), proxy))
    }

    async fn processes(&self) -> Result<Vec<&Process>, BoxError> {
        Ok(vec![&*self.server])
    }

    async fn delete(&self, name: &str) -> Result<(), BoxError> {
        let client = zookeeper_client::Client::connect(&self.server.addr().to_string()).await?;
        // The names of the suite have no characters but slashes that a node's name can't have.
        let lock = format!("{}/{}", ZkConfig::BASE, name.replace('/', "%2F"));
        for child in client.list_children(&lock).await? {
            client.delete(&format!("{lock}/{child}"), None).await?;
        }
        Ok(())
    }

    async fn forget_caches(&self) -> Result<(), BoxError> {
        Ok(())
    }

    async fn cut_clients(&self) -> Result<(), BoxError> {
        for proxy in &*self.proxies.lock().await {
            proxy.cut().await;
        }
        Ok(())
    }
}
