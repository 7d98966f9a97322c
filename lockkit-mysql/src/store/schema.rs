//! Making the table, checking it, and bringing an older shape of it forward.

use std::{sync::Arc, time::Duration};

use lockkit_core::{Error, ErrorKind, Finding, Result};

pub use crate::wire::table::ddl;
use crate::{
    client::{
        connection::{Bound, Connection},
        pool::{Lane, Pool},
        raw::Replicas,
    },
    config::MySqlConfig,
    wire::{name::quoted_table, row::column, table::Table},
};

/// How long changing a table may take.
const CHANGE_WITHIN: Duration = Duration::from_secs(600);

/// Makes the table if it is missing. One that is there is not changed.
///
/// # Errors
/// `InvalidInput` for a wrong configuration; `Denied` if the user may not make tables; else when the server can't be
/// asked.
pub async fn create(config: &MySqlConfig) -> Result<()> {
    let mut session = Session::open(config).await?;
    let made = create_if_missing(&mut session.connection, config).await;
    made.map_err(|e| session.at("create table", e))
}

/// Checks that the table is there and as lockkit needs it.
///
/// # Errors
/// [`Misconfigured`](lockkit_core::ErrorKind::Misconfigured) if not, with the statement that makes the table; else when the server can't be asked.
pub async fn check(config: &MySqlConfig) -> Result<()> {
    let mut session = Session::open(config).await?;
    let checked = check_table(&mut session.connection, config).await;
    checked.map_err(|e| session.at("check table", e))
}

/// Brings a table of the classic shape (`id, resource_name, node_info, count, create_time, update_time`, where a row is
/// a held lock) or of an earlier lockkit forward, keeping its rows. Says whether there was anything to do.
///
/// **Stop all clients of the old kind first**: after the change every lock is free, whatever they believe. A `count` that
/// is no number becomes 0.
///
/// The table is copied by the server, and can't be written meanwhile. Should it fail half-way, it can be called again.
///
/// # Errors
/// [`Misconfigured`](lockkit_core::ErrorKind::Misconfigured) if the table is missing or of some other shape; others as the server says, such as that a
/// name is in it twice.
pub async fn upgrade(config: &MySqlConfig) -> Result<bool> {
    let mut session = Session::open(config).await?;
    let upgraded = upgrade_table(&mut session.connection, config).await;
    upgraded.map_err(|e| session.at("upgrade table", e))
}

struct Session {
    connection: Connection,
    name: Arc<str>,
}

impl Session {
    async fn open(config: &MySqlConfig) -> Result<Self> {
        config.check()?;
        let name: Arc<str> = config.display_name().into();
        let pool = Pool::new(config, Replicas::Refused);
        // Connecting keeps to the bound of an operation; what is done then may take longer.
        let probe = pool.first_connection(config, Bound::new(config.timeout)).await;
        drop(probe.map_err(|e| e.at("connect", None, &name))?);
        let connection = pool.connection(Lane::Common, Bound::new(CHANGE_WITHIN)).await;
        Ok(Self { connection: connection.map_err(|e| e.at("connect", None, &name))?, name })
    }

    fn at(&self, operation: &'static str, error: Error) -> Error {
        error.at(operation, None, &self.name)
    }
}

pub(crate) async fn create_if_missing(connection: &mut Connection, config: &MySqlConfig) -> Result<()> {
    if read(connection, config).await?.is_missing() {
        connection.run_text(ddl(&config.table)?).await?;
    }
    Ok(())
}

pub(crate) async fn check_table(connection: &mut Connection, config: &MySqlConfig) -> Result<()> {
    Finding::admit(&examine(connection, config).await?).map(drop)
}

/// What is wrong with the table; nothing if it is as lockkit needs it.
pub(crate) async fn examine(connection: &mut Connection, config: &MySqlConfig) -> Result<Vec<Finding>> {
    read(connection, config).await?.findings(&config.table)
}

async fn upgrade_table(connection: &mut Connection, config: &MySqlConfig) -> Result<bool> {
    let table = read(connection, config).await?;
    if table.is_missing() {
        check_table(connection, config).await?;
    }
    if table.faults().is_empty() {
        return Ok(false);
    }
    if let Some(missing) = table.missing_of_classic() {
        let message = format!("the table {} is not of the classic shape: it has no column {missing}", config.table);
        return Err(Error::new(ErrorKind::Misconfigured, message));
    }
    for statement in table.upgrade(&quoted_table(&config.table)?) {
        connection.run_text(statement).await?;
    }
    check_table(connection, config).await?;
    Ok(true)
}

/// Reads how the server describes the table.
async fn read(connection: &mut Connection, config: &MySqlConfig) -> Result<Table> {
    let columns = "SELECT CAST(column_name AS CHAR), CAST(column_type AS CHAR) FROM information_schema.columns \
         WHERE table_schema = DATABASE() AND table_name = ?";
    let mut table = Table::default();
    for row in connection.rows(sqlx::query(columns).bind(&config.table)).await? {
        table.add_column(&column::<String>(&row, 0)?, &column::<String>(&row, 1)?);
    }
    let engine = "SELECT CAST(engine AS CHAR) FROM information_schema.tables \
         WHERE table_schema = DATABASE() AND table_name = ?";
    for row in connection.rows(sqlx::query(engine).bind(&config.table)).await? {
        let engine: Option<String> = column(&row, 0)?;
        table.is_innodb = engine.is_some_and(|engine| engine.eq_ignore_ascii_case("InnoDB"));
    }
    let unique = "SELECT CAST(index_name AS CHAR) FROM information_schema.statistics \
         WHERE table_schema = DATABASE() AND table_name = ? GROUP BY index_name \
         HAVING COUNT(*) = 1 AND MAX(column_name) = 'resource_name' AND MAX(non_unique) = 0 AND MAX(sub_part) IS NULL";
    table.has_unique_name = !connection.rows(sqlx::query(unique).bind(&config.table)).await?.is_empty();
    Ok(table)
}
