//! A server for all tests of a kind, and short names for requests.

use std::{pin::Pin, sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Claim, Hold, HolderInfo, LockStore, Renewal, Renewed, Result, Token};
use lockkit_mysql::{MySqlConfig, MySqlStore, schema};
pub(crate) use lockkit_testkit::calls::{contended, eventually, eventually_within, free, lost, renew};
use lockkit_testkit::{
    calls,
    faults::Proxy,
    servers::{MySqlFlavor, MySqlOptions, MySqlServer},
};
use sqlx::{Connection as _, Executor as _, MySqlConnection, Row as _};
use tokio::{
    runtime::{Builder, Runtime},
    sync::OnceCell,
    task::spawn_blocking,
};

pub(crate) const TTL: Duration = Duration::from_secs(20);

pub(crate) type Test = fn(Arc<Ctx>) -> Pin<Box<dyn Future<Output = ()>>>;

/// Makes the list of a file's tests.
macro_rules! tests {
    ($($test:ident)*) => {
        pub(crate) const TESTS: &[(&str, crate::support::Test)] = &[
            $((stringify!($test), |ctx| Box::pin($test(ctx)))),*
        ];
    };
}
pub(crate) use tests;

/// What the tests of one kind of server share.
pub(crate) struct Ctx {
    flavor: MySqlFlavor,
    shared: OnceCell<MySqlServer>,
}

impl Ctx {
    pub(crate) fn new(flavor: MySqlFlavor) -> Self {
        Self { flavor, shared: OnceCell::new() }
    }

    pub(crate) fn is_mariadb(&self) -> bool {
        self.flavor == MySqlFlavor::Installed
    }

    /// The server that all share, with the table.
    pub(crate) async fn server(&self) -> &MySqlServer {
        self.shared.get_or_init(|| self.private(&[])).await
    }

    /// A server for one test, with the table. It leaves writing to the disk to the operating system, so that a disk that
    /// is busy for half a second does not look like a fault of the store.
    pub(crate) async fn private(&self, args: &[&str]) -> MySqlServer {
        let ddl = schema::ddl(MySqlConfig::TABLE).expect("ddl");
        let args = ["--innodb-flush-log-at-trx-commit=2"].iter().chain(args).copied();
        let claims = schema::claims_ddl(MySqlConfig::TABLE).expect("ddl");
        let options = MySqlOptions::default().flavor(self.flavor.clone()).init(ddl).init(claims).args(args);
        MySqlServer::start(options).await.expect("a server")
    }

    pub(crate) async fn config(&self) -> MySqlConfig {
        config(self.server().await)
    }

    pub(crate) async fn store(&self) -> MySqlStore {
        MySqlStore::connect(self.config().await).await.expect("connect")
    }

    /// A connection that is not lockkit's.
    pub(crate) async fn raw(&self) -> MySqlConnection {
        raw(self.server().await).await
    }
}

pub(crate) fn config(server: &MySqlServer) -> MySqlConfig {
    MySqlConfig::from_url(&server.url()).expect("url")
}

/// A proxy before a server, and how to connect through it.
pub(crate) async fn proxied(server: &MySqlServer) -> (Proxy, MySqlConfig) {
    let proxy = Proxy::start(server.addr()).await.expect("proxy");
    let url = server.url().replace(&server.addr().to_string(), &proxy.addr().to_string());
    (proxy, MySqlConfig::from_url(&url).expect("url"))
}

pub(crate) async fn raw(server: &MySqlServer) -> MySqlConnection {
    MySqlConnection::connect(&server.url()).await.expect("raw connection")
}

/// A number that the server counts, or the sum of several whose names begin alike.
pub(crate) async fn status(raw: &mut MySqlConnection, name: &str) -> u64 {
    let ask = format!("SHOW GLOBAL STATUS LIKE '{name}'");
    let rows = raw.fetch_all(sqlx::raw_sql(sqlx::AssertSqlSafe(ask))).await.expect("status");
    assert!(!rows.is_empty(), "{name} is not counted");
    rows.iter().map(|row| row.get::<String, _>(1).parse::<u64>().expect("a number")).sum()
}

/// Begins a transaction that keeps the rows of these claims locked, as an administrator's forgotten session would. At the
/// default isolation it would also lock the gap in front of them, and with it the new names of other tests.
pub(crate) async fn lock_rows(raw: &mut MySqlConnection, claims: &[&Claim]) {
    raw.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED").await.expect("isolation");
    raw.execute("BEGIN").await.expect("begin");
    for claim in claims {
        let lock = "SELECT id FROM resource_lock WHERE resource_name = ? FOR UPDATE";
        sqlx::query(lock).bind(claim.key.as_str().as_bytes()).fetch_one(&mut *raw).await.expect("the row is there");
    }
}

pub(crate) async fn end(raw: &mut MySqlConnection) {
    raw.execute("COMMIT").await.expect("commit");
}

/// A claim of a name that nobody else uses.
pub(crate) fn claim() -> Claim {
    let token = Token::random().expect("token");
    calls::claim(&format!("test/{}", &token.reveal()[..12]))
}

/// Another's claim of the same name.
pub(crate) fn rival(claim: &Claim) -> Claim {
    Claim { token: Token::random().expect("token"), ..claim.clone() }
}

pub(crate) fn request(claim: &Claim) -> AcquireRequest {
    AcquireRequest::new(claim.clone(), TTL, HolderInfo::new("test: holder"))
}

pub(crate) async fn attempt(store: &MySqlStore, claim: &Claim) -> Result<Attempt> {
    store.acquire(&request(claim)).await
}

pub(crate) async fn hold(store: &MySqlStore, claim: &Claim) -> Hold {
    calls::granted(attempt(store, claim).await.expect("acquire"))
}

pub(crate) fn renewal(claim: &Claim) -> Renewal {
    Renewal::new(claim.clone(), TTL)
}

pub(crate) fn is_held(renewed: &Result<Renewed>) -> bool {
    matches!(renewed, Ok(Renewed::Held(_)))
}

/// A runtime that is driven while something [runs](Self::run) on it, and at no other time.
pub(crate) struct Undriven(Option<Runtime>);

impl Undriven {
    pub(crate) fn new() -> Self {
        Self(Some(Builder::new_current_thread().enable_all().build().expect("a runtime")))
    }

    /// Leads this to its end there, and nothing else any further.
    pub(crate) async fn run<T: Send + 'static>(&mut self, work: impl Future<Output = T> + Send + 'static) -> T {
        let runtime = self.0.take().expect("a runtime");
        let run = move || (runtime.block_on(work), runtime);
        let (outcome, runtime) = spawn_blocking(run).await.expect("no panic");
        self.0 = Some(runtime);
        outcome
    }
}

impl Drop for Undriven {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Runtime::shutdown_background);
    }
}
