//! Every case of the compliance suite against MariaDB, which is required, and MySQL, if there is one.

use std::{process::ExitCode, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{Clock, LockStore};
use lockkit_mysql::{MySqlConfig, MySqlStore, schema};
use lockkit_testkit::{
    Backend, BoxError, Server, Suite,
    faults::Proxy,
    servers::{MySqlFlavor, MySqlOptions, MySqlServer, Process},
};
use tokio::sync::OnceCell;

fn main() -> ExitCode {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let start = |flavor: MySqlFlavor, name| runtime.block_on(MySqlBackend::start(flavor, name));
    // What is installed must start.
    let required = if MySqlFlavor::Newer.program().find().is_ok() { "mariadb,mysql" } else { "mariadb" };
    let mut suite = Suite::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/expected"), required);
    suite.add("mariadb", start(MySqlFlavor::Installed, "mariadb"));
    suite.add("mysql", start(MySqlFlavor::Newer, "mysql"));
    suite.run()
}

/// The store under test, on one server that all cases share.
#[derive(Debug)]
struct MySqlBackend {
    name: &'static str,
    flavor: MySqlFlavor,
    server: MySqlServer,
}

impl MySqlBackend {
    async fn start(flavor: MySqlFlavor, name: &'static str) -> Result<Self, BoxError> {
        Ok(Self { name, server: start(flavor.clone()).await?, flavor })
    }
}

/// A server whose operator sees to it that the table is always there, also after the loss of all data.
async fn start(flavor: MySqlFlavor) -> Result<MySqlServer, BoxError> {
    let options = MySqlOptions::default().flavor(flavor).init(schema::ddl(MySqlConfig::TABLE)?);
    let options = options.init(schema::claims_ddl(MySqlConfig::TABLE)?);
    // Each commit goes to the operating system, not to the disk: a killed server loses nothing by that, and a disk that is
    // busy for half a second does not look like a fault of the store.
    let options = options.args(["--innodb-flush-log-at-trx-commit=2"]);
    Ok(MySqlServer::start(options).await?)
}

#[async_trait]
impl Backend for MySqlBackend {
    fn name(&self) -> &str {
        self.name
    }

    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(Arc::new(MySqlStore::from_url(&self.server.url()).await?))
    }

    async fn open_with_clock(&self, clock: Arc<dyn Clock>) -> Result<Option<Arc<dyn LockStore>>, BoxError> {
        let config = MySqlConfig::from_url(&self.server.url())?.clock(clock);
        Ok(Some(Arc::new(MySqlStore::connect(config).await?)))
    }

    async fn private_server(&self) -> Result<Option<Box<dyn Server>>, BoxError> {
        Ok(Some(Box::new(Private { flavor: self.flavor.clone(), server: OnceCell::new() })))
    }
}

/// A server for one case. It is started when it is first used, for the suite also asks for one just to see whether there
/// are any.
#[derive(Debug)]
struct Private {
    flavor: MySqlFlavor,
    server: OnceCell<MySqlServer>,
}

impl Private {
    async fn server(&self) -> Result<&MySqlServer, BoxError> {
        self.server.get_or_try_init(|| start(self.flavor.clone())).await
    }
}

#[async_trait]
impl Server for Private {
    async fn open(&self) -> Result<Arc<dyn LockStore>, BoxError> {
        Ok(Arc::new(MySqlStore::from_url(&self.server().await?.url()).await?))
    }

    async fn open_through_proxy(&self) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        self.open_impatient(MySqlConfig::TIMEOUT).await
    }

    async fn open_impatient(&self, timeout: Duration) -> Result<(Arc<dyn LockStore>, Proxy), BoxError> {
        let server = self.server().await?;
        let proxy = Proxy::start(server.addr()).await?;
        let url = server.url().replace(&server.addr().to_string(), &proxy.addr().to_string());
        // Some cases keep dozens of clients, each of which uses all its connections, and a server has 1000.
        let config = MySqlConfig::from_url(&url)?.timeout(timeout).connections(8);
        Ok((Arc::new(MySqlStore::connect(config).await?), proxy))
    }

    async fn processes(&self) -> Result<Vec<&Process>, BoxError> {
        Ok(vec![&**self.server().await?])
    }

    async fn delete(&self, name: &str) -> Result<(), BoxError> {
        let name: String = name.bytes().map(|byte| format!("{byte:02x}")).collect();
        self.server()
            .await?
            .admin(&format!("DELETE FROM {} WHERE resource_name = x'{name}'", MySqlConfig::TABLE))
            .await?;
        Ok(())
    }

    /// What a server may forget here: open tables, and with them every prepared statement's plan.
    async fn forget_caches(&self) -> Result<(), BoxError> {
        self.server().await?.admin("FLUSH TABLES").await?;
        Ok(())
    }

    async fn cut_clients(&self) -> Result<(), BoxError> {
        Ok(self.server().await?.cut_clients().await?)
    }
}
