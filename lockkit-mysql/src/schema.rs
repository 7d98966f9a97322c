//! The table: what it looks like, making it, checking it, and bringing an older shape of it forward.

use std::time::Duration;

use lockkit_core::{Error, ErrorKind, Finding, Result};

use crate::{
    client::{
        connection::Replicas,
        pool::{Bound, Connection, Lane, Pool},
    },
    config::MySqlConfig,
    wire::{name::quoted_table, row::column},
};

/// How long changing a table may take.
const CHANGE_WITHIN: Duration = Duration::from_secs(600);

const NO_UNIQUE_KEY: &str = "resource_name has no unique key of its own";
const NOT_INNODB: &str = "its engine is not InnoDB";

/// The columns, each with the type that the server shows for it, its definition, and whether the classic shape has it.
const COLUMNS: [(&str, &str, &str, bool); 12] = [
    ("id", "bigint unsigned", "BIGINT UNSIGNED NOT NULL AUTO_INCREMENT", true),
    ("resource_name", "varbinary(512)", "VARBINARY(512) NOT NULL", true),
    ("node_info", "varchar(256)", "VARCHAR(256) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT ''", true),
    ("count", "int unsigned", "INT UNSIGNED NOT NULL DEFAULT 0", true),
    ("create_time", "datetime(6)", "DATETIME(6) NOT NULL", true),
    ("update_time", "datetime(6)", "DATETIME(6) NOT NULL", true),
    ("token", "binary(16)", "BINARY(16) NULL", false),
    ("fence", "bigint unsigned", "BIGINT UNSIGNED NOT NULL DEFAULT 0", false),
    ("span", "int unsigned", "INT UNSIGNED NOT NULL DEFAULT 0", false),
    ("fence_last", "bigint unsigned", "BIGINT UNSIGNED NOT NULL DEFAULT 0", false),
    ("expires", "datetime(6)", "DATETIME(6) NULL", false),
    ("version", "bigint unsigned", "BIGINT UNSIGNED NOT NULL DEFAULT 0", false),
];

/// The statement that makes the table, on one line.
///
/// # Errors
/// [`InvalidInput`](lockkit_core::ErrorKind::InvalidInput) if the table can't have that name.
pub fn ddl(table: &str) -> Result<String> {
    let table = quoted_table(table)?;
    let columns = COLUMNS.map(|(name, _, definition, _)| format!("`{name}` {definition}")).join(", ");
    Ok(format!(
        "CREATE TABLE IF NOT EXISTS {table} ({columns}, PRIMARY KEY (`id`), UNIQUE KEY `resource_name` (`resource_name`)) \
         ENGINE=InnoDB"
    ))
}

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
    name: std::sync::Arc<str>,
}

impl Session {
    async fn open(config: &MySqlConfig) -> Result<Self> {
        config.check()?;
        let name: std::sync::Arc<str> = config.display_name().into();
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
    if Table::read(connection, config).await?.columns.is_empty() {
        connection.run_text(ddl(&config.table)?).await?;
    }
    Ok(())
}

pub(crate) async fn check_table(connection: &mut Connection, config: &MySqlConfig) -> Result<()> {
    let table = Table::read(connection, config).await?;
    Finding::admit(&table.findings(config)?).map(drop)
}

/// What is wrong with the table; nothing if it is as lockkit needs it.
pub(crate) async fn examine(connection: &mut Connection, config: &MySqlConfig) -> Result<Vec<Finding>> {
    Table::read(connection, config).await?.findings(config)
}

async fn upgrade_table(connection: &mut Connection, config: &MySqlConfig) -> Result<bool> {
    let table = Table::read(connection, config).await?;
    if table.columns.is_empty() {
        check_table(connection, config).await?;
    }
    if table.faults().is_empty() {
        return Ok(false);
    }
    if let Some((missing, ..)) = COLUMNS.iter().find(|(name, _, _, classic)| *classic && table.shown(name).is_none()) {
        let message = format!("the table {} is not of the classic shape: it has no column {missing}", config.table);
        return Err(Error::new(ErrorKind::Misconfigured, message));
    }
    for statement in table.upgrade(&quoted_table(&config.table)?) {
        connection.run_text(statement).await?;
    }
    check_table(connection, config).await?;
    Ok(true)
}

/// A table as the server describes it.
#[derive(Debug, Default)]
struct Table {
    /// Name and type of each column; none if there is no table.
    columns: Vec<(String, String)>,
    is_innodb: bool,
    has_unique_name: bool,
}

impl Table {
    async fn read(connection: &mut Connection, config: &MySqlConfig) -> Result<Self> {
        let columns = "SELECT CAST(column_name AS CHAR), CAST(column_type AS CHAR) FROM information_schema.columns \
             WHERE table_schema = DATABASE() AND table_name = ?";
        let mut table = Self::default();
        for row in connection.rows(sqlx::query(columns).bind(&config.table)).await? {
            let shown: String = column(&row, 1)?;
            table.columns.push((column::<String>(&row, 0)?.to_lowercase(), without_width(&shown)));
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

    /// The type of a column.
    fn shown(&self, name: &str) -> Option<&str> {
        self.columns.iter().find(|(column, _)| column == name).map(|(_, shown)| shown.as_str())
    }

    /// What is wrong with it: one finding, so that connecting tells everything at once.
    fn findings(&self, config: &MySqlConfig) -> Result<Vec<Finding>> {
        let (name, ddl) = (&config.table, ddl(&config.table)?);
        let found = |code, summary, advice| vec![Finding::error(ErrorKind::Misconfigured, code, summary, advice)];
        if self.columns.is_empty() {
            let advice = format!("it is made by `lockkit init`, by the option create=true, or by: {ddl}");
            return Ok(found("table", format!("the table {name} is missing"), advice));
        }
        let faults = self.faults();
        if faults.is_empty() {
            return Ok(Vec::new());
        }
        let (code, remedy) = match faults.as_slice() {
            [one] if one == NO_UNIQUE_KEY => {
                ("unique-key", "`lockkit init --upgrade` adds it, if no name is in it twice")
            }
            [one] if one == NOT_INNODB => ("engine", "`lockkit init --upgrade` changes it"),
            _ if self.is_classic() => {
                ("shape", "stop its other users, then `lockkit init --upgrade` brings it forward")
            }
            _ => ("table", "`lockkit init --upgrade` brings the classic shape forward"),
        };
        let summary = format!("the table {name} is not as lockkit needs it ({})", faults.join(", "));
        Ok(found(code, summary, format!("{remedy}; it should be as made by: {ddl}")))
    }

    /// Whether a row is a held lock, as before lockkit.
    fn is_classic(&self) -> bool {
        COLUMNS.iter().all(|(name, _, _, classic)| self.shown(name).is_some() == *classic)
    }

    /// What is wrong with it, in words.
    fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        for (name, wanted, ..) in COLUMNS {
            match self.shown(name) {
                None => faults.push(format!("{name} is missing")),
                Some(shown) if name == "resource_name" && is_text(shown) => {
                    let why = "text folds case, accents or trailing spaces, by its collation";
                    faults.push(format!("{name} is {shown}, not {wanted}: {why}"));
                }
                Some(shown) if shown != wanted => faults.push(format!("{name} is {shown}, not {wanted}")),
                Some(_) => {}
            }
        }
        if !self.has_unique_name {
            faults.push(NO_UNIQUE_KEY.to_owned());
        }
        if !self.is_innodb {
            faults.push(NOT_INNODB.to_owned());
        }
        faults
    }

    /// The statements that bring it forward. Each leaves a table that they can be made for again.
    fn upgrade(&self, table: &str) -> Vec<String> {
        let mut statements = Vec::new();
        if self.shown("resource_name").is_some_and(is_text) {
            // First to the character set whose bytes names are, else a Latin-1 name would keep other bytes.
            let text = "VARCHAR(512) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL";
            statements.push(format!("ALTER TABLE {table} MODIFY `resource_name` {text}"));
        }
        if self.shown("count").is_some_and(is_text) {
            let number = "`count` REGEXP '^[0-9]{1,9}$'";
            statements.push(format!("UPDATE {table} SET `count` = '0' WHERE `count` IS NULL OR NOT {number}"));
        }
        statements.push(format!(
            "UPDATE {table} SET `node_info` = LEFT(COALESCE(`node_info`, ''), 256), \
             `create_time` = COALESCE(`create_time`, UTC_TIMESTAMP(6)), \
             `update_time` = COALESCE(`update_time`, UTC_TIMESTAMP(6))"
        ));
        let mut changes: Vec<String> = COLUMNS
            .iter()
            .filter(|(name, wanted, ..)| self.shown(name) != Some(wanted))
            .map(|(name, _, definition, _)| match self.shown(name) {
                Some(_) => format!("MODIFY `{name}` {definition}"),
                None => format!("ADD `{name}` {definition}"),
            })
            .collect();
        if !self.has_unique_name {
            changes.push("ADD UNIQUE KEY `lockkit_name` (`resource_name`)".to_owned());
        }
        if !self.is_innodb {
            changes.push("ENGINE=InnoDB".to_owned());
        }
        statements.push(format!("ALTER TABLE {table} {}", changes.join(", ")));
        statements
    }
}

fn is_text(shown: &str) -> bool {
    shown.contains("char") || shown.contains("text")
}

/// A column's type without the display width that MariaDB shows for integers: `bigint(20) unsigned`.
fn without_width(shown: &str) -> String {
    let shown = shown.to_lowercase();
    match (shown.split_once('('), shown.split_once(')')) {
        (Some((kind, _)), Some((_, rest))) if kind.ends_with("int") => format!("{kind}{rest}"),
        _ => shown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_statement_is_one_line() {
        let ddl = ddl("resource_lock").expect("a plain name");
        assert_eq!(ddl.lines().count(), 1);
        assert!(ddl.contains("`resource_name` VARBINARY(512) NOT NULL"), "{ddl}");
        assert_eq!(super::ddl("a`b").expect_err("a quote").kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn both_ways_to_show_an_integer_are_one() {
        assert_eq!(without_width("bigint(20) unsigned"), "bigint unsigned");
        assert_eq!(without_width("INT unsigned"), "int unsigned");
        assert_eq!(without_width("varchar(11)"), "varchar(11)");
        assert_eq!(without_width("datetime(6)"), "datetime(6)");
    }
}
