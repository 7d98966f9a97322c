//! Making the table, checking it, and bringing an older shape of it forward.

use std::time::Duration;

use lockkit_core::{Error, ErrorKind, Finding, Result, store::Reconnections};

pub use crate::wire::table::{claims_ddl, ddl};
use crate::{
    client::{
        connection::{Bound, Connection},
        pool::{ConnectionClass, Pool},
        raw::{LONGEST_WAIT, Replicas},
    },
    config::MySqlConfig,
    wire::{
        error,
        name::quoted_table,
        row::column,
        table::{Table, of_claims},
    },
};

/// How long changing a table may take.
const CHANGE_WITHIN: Duration = Duration::from_secs(600);

/// Makes the table if it is missing, and the second one, of claims. What is there is not changed. A name that is too long for
/// the second one has the first alone.
///
/// # Errors
/// `InvalidInput` for a wrong configuration; `Denied` if the user may not make tables; else when the server can't be
/// asked.
pub async fn create(config: &MySqlConfig) -> Result<()> {
    let mut connection = open(config).await?;
    let made = async {
        create_if_missing(&mut connection, config).await?;
        // A user without the right to make tables may have both.
        let is_missing = read(&mut connection, &of_claims(&config.table)).await?.is_missing();
        if let (true, Ok(ddl)) = (is_missing, claims_ddl(&config.table)) {
            change(&mut connection, &ddl).await?;
        }
        Ok(())
    };
    made.await.map_err(failed(config, "create table"))
}

/// Checks that the table is there and as lockkit needs it.
///
/// # Errors
/// [`Misconfigured`](lockkit_core::ErrorKind::Misconfigured) if not, with the statement that makes the table; else when the server can't be asked.
pub async fn check(config: &MySqlConfig) -> Result<()> {
    check_table(&mut open(config).await?, config).await.map_err(failed(config, "check table"))
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
    upgrade_table(&mut open(config).await?, config).await.map_err(failed(config, "upgrade table"))
}

async fn open(config: &MySqlConfig) -> Result<Connection> {
    config.check()?;
    let pool = Pool::new(config, Replicas::Refused, Reconnections::default());
    let connect = async {
        // Connecting keeps to the bound of an operation; what is done then may take longer.
        drop(pool.first_connection(config, Bound::new(config.timeout)).await?);
        pool.connection(ConnectionClass::Common, Bound::new(CHANGE_WITHIN)).await
    };
    connect.await.map_err(failed(config, "connect"))
}

fn failed(config: &MySqlConfig, operation: &'static str) -> impl Fn(Error) -> Error {
    let name = config.display_name().into();
    move |e| e.at(operation, None, &name)
}

pub(crate) async fn create_if_missing(connection: &mut Connection, config: &MySqlConfig) -> Result<()> {
    if read(connection, &config.table).await?.is_missing() {
        change(connection, &ddl(&config.table)?).await?;
    }
    Ok(())
}

pub(crate) async fn check_table(connection: &mut Connection, config: &MySqlConfig) -> Result<()> {
    Finding::admit(&examine(connection, config).await?).map(drop)
}

/// What is wrong with the table; nothing if it is as lockkit needs it.
pub(crate) async fn examine(connection: &mut Connection, config: &MySqlConfig) -> Result<Vec<Finding>> {
    let mut findings = read(connection, &config.table).await?.findings(&config.table)?;
    if !findings.is_empty() && can_be_read(connection, &config.table).await? {
        findings = read(connection, &config.table).await?.findings(&config.table)?;
    }
    Ok(findings)
}

/// Makes the table of claims; says whether it did, for the server may refuse.
pub(crate) async fn create_claims(connection: &mut Connection, config: &MySqlConfig) -> Result<bool> {
    let Ok(ddl) = claims_ddl(&config.table) else { return Ok(false) };
    match change(connection, &ddl).await {
        Ok(()) => Ok(true),
        Err(refused) if error::is_lasting_refusal(&refused) => Ok(false),
        Err(failed) => Err(failed),
    }
}

/// Why there can be no claims, and what to do; `None` if there can.
pub(crate) async fn no_claims(connection: &mut Connection, config: &MySqlConfig) -> Result<Option<Finding>> {
    let because = |why: &str, advice: String| {
        let summary = format!("no shared locks, no permits and no order among waiters: {why}");
        Ok(Some(Finding::warning("claims", summary, advice)))
    };
    let Ok(ddl) = claims_ddl(&config.table) else {
        return because(
            "the name of the table has more than 58 characters",
            "name a table by a shorter one".to_owned(),
        );
    };
    let name = of_claims(&config.table);
    let mut table = read(connection, &name).await?;
    if !table.faults_of_claims().is_empty() && can_be_read(connection, &name).await? {
        table = read(connection, &name).await?;
    }
    if table.is_missing() {
        let advice = format!("it is made by `lockkit init`, by the option create=true, or by: {ddl}");
        return because("the table of claims is missing, or hidden from this user", advice);
    }
    let faults = table.faults_of_claims();
    if !faults.is_empty() {
        let fault = format!("the table of claims is not as lockkit needs it ({})", faults.join(", "));
        return because(&fault, format!("while no lock is shared or waited for, drop it and make it anew: {ddl}"));
    }
    // Nothing of this is done, but it takes the rights to do it.
    let name = quoted_table(&name)?;
    let all = format!(
        "EXPLAIN INSERT INTO {name} SELECT * FROM {name} WHERE 1 = 0; EXPLAIN UPDATE {name} SET expires = expires WHERE 1 = 0; \
         EXPLAIN DELETE FROM {name} WHERE 1 = 0"
    );
    match connection.run_text(all).await {
        Ok(_) => Ok(None),
        // Mostly because of the user's rights.
        Err(refused) if error::is_lasting_refusal(&refused) => {
            let fault = format!("the server refuses the use of the table of claims ({})", refused.message());
            because(&fault, "GRANT SELECT, INSERT, UPDATE, DELETE on it to the user".to_owned())
        }
        Err(failed) => Err(failed),
    }
}

/// Whether a table is there for this user. While somebody keeps it from all others, as an `ALTER TABLE` does, MariaDB describes it as
/// if it were missing, in whole or in part: so a table that seems to be wrong is looked at again once this says yes. After a no
/// the connection is closed.
///
/// # Errors
/// When somebody keeps it for longer, or the server can't be asked.
async fn can_be_read(connection: &mut Connection, table: &str) -> Result<bool> {
    match connection.run_text(format!("SELECT 1 FROM {} LIMIT 0", quoted_table(table)?)).await {
        Ok(_) => Ok(true),
        Err(refused) if error::is_lasting_refusal(&refused) => Ok(false),
        Err(failed) => Err(failed),
    }
}

/// Reads how the server describes a table, in one query: that is asked at each start of a program.
async fn read(connection: &mut Connection, name: &str) -> Result<Table> {
    let here = "table_schema = DATABASE() AND table_name = ?";
    // A key of which a column is indexed in part has another name of a column. A name that has other characters than its column could
    // not be written.
    let ask = format!(
        "SELECT 1, CAST(column_name AS CHAR), CAST(CONCAT(column_type, IF(column_name = 'resource_name' OR COALESCE(character_set_name, 'utf8mb4') = 'utf8mb4', '', \
         CONCAT(' in ', character_set_name))) AS CHAR) FROM information_schema.columns WHERE {here} \
         UNION ALL SELECT 2, CAST(index_name AS CHAR), \
         CAST(GROUP_CONCAT(column_name, COALESCE(sub_part, '') ORDER BY seq_in_index) AS CHAR) \
         FROM information_schema.statistics WHERE {here} GROUP BY index_name \
         UNION ALL SELECT 3, '', CAST(engine AS CHAR) FROM information_schema.tables WHERE {here} \
         UNION ALL SELECT 4, CAST(index_name AS CHAR), '' FROM information_schema.statistics WHERE {here} GROUP BY index_name \
         HAVING COUNT(*) = 1 AND MAX(column_name) = 'resource_name' AND MAX(non_unique) = 0 AND MAX(sub_part) IS NULL"
    );
    let ask = sqlx::query(sqlx::AssertSqlSafe(ask)).bind(name).bind(name).bind(name).bind(name);
    let mut table = Table::default();
    for row in connection.rows(ask).await? {
        let (what, name) = (column::<i64>(&row, 0)?, column::<String>(&row, 1)?);
        let value = column::<Option<String>>(&row, 2)?.unwrap_or_default();
        match what {
            1 => table.add_column(&name, &value),
            2 => table.add_key(&name, &value),
            3 => table.is_innodb = value.eq_ignore_ascii_case("InnoDB"),
            _ => table.has_unique_name = true,
        }
    }
    Ok(table)
}

/// Makes a table or changes one. That may wait for those who use the table, unlike a statement on a lock.
async fn change(connection: &mut Connection, statement: &str) -> Result<()> {
    let wait = |seconds| format!("SET SESSION lock_wait_timeout = {seconds}");
    let (longest, usual) = (wait(CHANGE_WITHIN.as_secs()), wait(LONGEST_WAIT.as_secs()));
    let changed = connection.run_text(format!("{longest}; {statement}; {usual}")).await;
    if changed.is_err() {
        // It may have been refused before the last of the three.
        connection.close_if_answered();
    }
    changed.map(drop)
}

async fn upgrade_table(connection: &mut Connection, config: &MySqlConfig) -> Result<bool> {
    let table = read(connection, &config.table).await?;
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
        change(connection, &statement).await?;
    }
    check_table(connection, config).await?;
    Ok(true)
}
