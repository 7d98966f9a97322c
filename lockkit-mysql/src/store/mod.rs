//! The store's answers. Each usual answer takes one statement.

pub(crate) mod acquire;
pub(crate) mod attempt;
mod check;
pub(crate) mod gc;
pub(crate) mod grants;
pub(crate) mod inspect;
pub(crate) mod named_lock_queue;
mod named_lock_watch;
pub(crate) mod order;
pub(crate) mod ordered;
pub(crate) mod records;
pub(crate) mod release;
pub(crate) mod renew;
pub(crate) mod row_slots;
pub mod schema;
pub(crate) mod transaction;
pub(crate) mod versioned;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;
use lockkit_core::{
    AcquireRequest, Attempt, Capability, Claim, Error, Fencing, KeyState, Liveness, LockKey, LockStore, Query, Release,
    Renewal, Renewed, Result, StoreInfo, Waiting,
    store::{Background, Reconnections, Records, operation_bound},
};

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::Pool,
        raw::Replicas,
    },
    config::MySqlConfig,
    store::{gc::Sweeper, grants::Grants, named_lock_queue::NamedLockQueues, ordered::Ordered, row_slots::RowSlots},
    wire::{
        name::{quoted_table, to_column},
        row::LockRow,
        statements::Statements,
        table::of_claims,
    },
};

/// A lock store in a table of a MySQL or MariaDB server.
pub struct MySqlStore {
    pub(crate) info: StoreInfo,
    pub(crate) pool: Arc<Pool>,
    pub(crate) statements: Arc<Statements>,
    pub(crate) timeout: Duration,
    pub(crate) named_locks: Arc<NamedLockQueues>,
    pub(crate) grants: Grants,
    pub(crate) ordered: Ordered,
    pub(crate) entry_slots: RowSlots,
    /// Those of claims that leave, so that none waits behind those that come.
    pub(crate) leave_slots: RowSlots,
    sweeper: Arc<Sweeper>,
}

impl MySqlStore {
    /// What a store can do that has both tables, for tests without a server: [`MemoryStore::like`](lockkit_core::MemoryStore::like).
    /// [`info`](LockStore::info) says what a connected store can do.
    pub const CAPABILITY: Capability = Capability::all_kinds(
        Waiting::Poll,
        Liveness { ttl: Some(StoreInfo::SHORTEST_TTL..=StoreInfo::LONGEST_TTL), session: None },
        Fencing::Hybrid,
    );

    /// Connects, and checks that the server and the table can keep locks. The table is made if it is missing and
    /// [`create`](MySqlConfig::create) allows it.
    ///
    /// So is the second table, of claims that share a lock or wait in an order. If it is missing, or this user may not use it,
    /// the store does without: then it has exclusive locks in no order alone, and [`warnings`](Self::warnings) say so.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](lockkit_core::ErrorKind::InvalidInput) for a wrong configuration; [`ErrorKind::Misconfigured`](lockkit_core::ErrorKind::Misconfigured) for something else
    /// than a MySQL server at the address, and for a database or a table that is missing or wrong, with what makes it right;
    /// [`ErrorKind::Unsupported`](lockkit_core::ErrorKind::Unsupported) for a server that is too old, or logs statements; `Denied`, `Unavailable` or `TimedOut` if it
    /// can't be asked or takes no writes.
    pub async fn connect(config: MySqlConfig) -> Result<Self> {
        let mut store = Self::new(config.clone())?;
        let at = |e: Error, store: &Self| e.at("connect", None, &store.info.name);
        let mut warnings = check::check(&store, &config).await.map_err(|e| at(e, &store))?;
        let no_claims = check::no_claims(&store, &config).await.map_err(|e| at(e, &store))?;
        if no_claims.is_none() {
            store.info.capability = Self::CAPABILITY;
        }
        warnings.extend(no_claims);
        store.info.warnings = warnings.into();
        Ok(store)
    }

    /// Connects to the database that a URL names. See [`MySqlConfig::from_url`] for its form.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub async fn from_url(url: &str) -> Result<Self> {
        Self::connect(MySqlConfig::from_url(url)?).await
    }

    /// A store that connects when it is first used, and checks neither server nor table: for a quorum, whose members may
    /// be down when it starts. As it does not know of the second table, it has exclusive locks in no order alone.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](lockkit_core::ErrorKind::InvalidInput) for a wrong configuration.
    pub fn new(config: MySqlConfig) -> Result<Self> {
        Self::on(Replicas::Refused, config)
    }

    /// The same, on servers of this kind.
    pub(crate) fn on(replicas: Replicas, config: MySqlConfig) -> Result<Self> {
        let config = MySqlConfig { timeout: config.timeout.min(MySqlConfig::LONGEST_TIMEOUT), ..config };
        let statements = Arc::new(Statements::new(config.check()?, quoted_table(&of_claims(&config.table)).ok()));
        let reconnections = Reconnections::default();
        let pool = Arc::new(Pool::new(&config, replicas, reconnections.clone()));
        let background = Arc::new(Background::new());
        let sweeper = Sweeper::new(Arc::clone(&pool), Arc::clone(&statements), &config, Arc::clone(&background));
        let named_locks = Arc::new(NamedLockQueues::new(&config.table, config.timeout, background));
        let info = StoreInfo {
            scheme: "mysql",
            name: config.display_name().into(),
            // The others need a second table.
            capability: Capability {
                shared: false,
                permits: false,
                fifo: false,
                downgrades: false,
                ..Self::CAPABILITY
            },
            clock: config.clock,
            alarm: None,
            reconnections,
            warnings: Arc::default(),
        };
        Ok(Self {
            info,
            entry_slots: RowSlots::new(pool.common_connections()),
            leave_slots: RowSlots::new(pool.common_connections()),
            pool,
            statements,
            timeout: config.timeout,
            named_locks,
            grants: Grants::default(),
            ordered: Ordered::default(),
            sweeper: Arc::new(sweeper),
        })
    }

    /// Warnings about the server's settings; known only after [`connect`](Self::connect).
    #[must_use]
    pub fn warnings(&self) -> &[String] {
        &self.info.warnings
    }

    /// Removes the rows of locks that nobody has used for at least `unused_for`, and says how many. Nothing depends on
    /// it but the size of the table. Rows that were unused for a week go by themselves, a few at a time, as new names are
    /// used, unless [`keep_rows`](MySqlConfig::keep_rows) is set.
    ///
    /// A transaction's lock counts as no use, for it changes nothing in the row; here a row goes also if only transactions use it,
    /// and the next one makes it anew.
    ///
    /// A row is kept while its lock is held, while somebody keeps the row locked, and while its fence counter is ahead of
    /// the server's clock or does not follow it, so that the fences of a removed lock go on growing when it is used again.
    ///
    /// # Errors
    /// As those of [`LockStore::release`]; some rows may have been removed. A period below one minute is
    /// [`ErrorKind::InvalidInput`](lockkit_core::ErrorKind::InvalidInput).
    ///
    /// # Cancellation
    /// Some rows may have been removed.
    pub async fn remove_unused(&self, unused_for: Duration) -> Result<u64> {
        let removed = self.sweeper.remove_unused(unused_for, self.info.capability.shared).await;
        removed.map_err(|e| e.at("remove unused", None, &self.info.name))
    }
}

#[async_trait]
impl LockStore for MySqlStore {
    fn info(&self) -> &StoreInfo {
        &self.info
    }

    async fn acquire(&self, request: &AcquireRequest) -> Result<Attempt> {
        acquire::acquire(self, request).await.map_err(|e| e.at("acquire", Some(&request.claim.key), &self.info.name))
    }

    async fn renew(&self, renewals: &[Renewal]) -> Vec<Result<Renewed>> {
        self.info.renewals_at(renewals, renew::renew(self, renewals).await)
    }

    async fn release(&self, claim: &Claim) -> Result<Release> {
        release::release(self, claim).await.map_err(|e| e.at("release", Some(&claim.key), &self.info.name))
    }

    async fn inspect(&self, query: &Query) -> Result<Vec<KeyState>> {
        inspect::inspect(self, query).await.map_err(|e| e.at("inspect", None, &self.info.name))
    }

    fn records(&self) -> Vec<Box<dyn Records + '_>> {
        vec![Box::new(self)]
    }
}

impl MySqlStore {
    /// Makes the row of a lock if there is none. Gives the row's id if this made it.
    pub(crate) async fn make_row(&self, connection: &mut Connection, key: &LockKey) -> Result<Option<u64>> {
        let (done, _) = connection.execute(|_| self.statements.insert().bind(to_column(key)), None).await?;
        Ok(Some(done.last_insert_id()).filter(|_| done.rows_affected() > 0))
    }

    /// Has unused rows removed when it is time, after the row with this id was made on this connection.
    pub(crate) fn sweep_after(&self, made: Option<u64>, connection: Connection) {
        if let Some(id) = made {
            self.sweeper.made_row(id, self.info.capability.shared, connection);
        }
    }

    pub(crate) async fn look(&self, connection: &mut Connection, key: &LockKey) -> Result<Option<LockRow>> {
        Ok(inspect::read(self, connection, &[key], false).await?.into_values().next())
    }

    /// The same after a statement that seems to have changed nothing. That answer has no number: until this one is known to be
    /// the next, it may have been another's, and the effect of the statement is open.
    pub(crate) async fn look_after(&self, connection: &mut Connection, key: &LockKey) -> Result<Option<LockRow>> {
        self.look(connection, key).await.map_err(Error::unknown_effect)
    }

    /// The [bound](operation_bound) on an operation that asks for a lease of `ttl`.
    pub(crate) fn bound(&self, ttl: Duration) -> Bound {
        Bound::new(operation_bound(self.timeout, ttl))
    }
}

impl fmt::Debug for MySqlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlStore").field("name", &self.info.name).field("pool", &self.pool).finish_non_exhaustive()
    }
}
