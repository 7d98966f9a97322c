//! The table: the statement that makes it, what is wrong with one that is there, and the statements that bring it forward.

use lockkit_core::{ErrorKind, Finding, Result};

use crate::wire::name::quoted_table;

const NO_UNIQUE_KEY: &str = "resource_name has no unique key of its own";
const NOT_INNODB: &str = "its engine is not InnoDB";

/// The columns, each with the type that the server shows for it, and its definition. The [first](CLASSIC) are those of the classic
/// shape.
const COLUMNS: [(&str, &str, &str); 12] = [
    ("id", "bigint unsigned", "BIGINT UNSIGNED NOT NULL AUTO_INCREMENT"),
    ("resource_name", "varbinary(512)", "VARBINARY(512) NOT NULL"),
    ("node_info", "varchar(256)", "VARCHAR(256) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT ''"),
    ("count", "int unsigned", "INT UNSIGNED NOT NULL DEFAULT 0"),
    ("create_time", "datetime(6)", "DATETIME(6) NOT NULL"),
    ("update_time", "datetime(6)", "DATETIME(6) NOT NULL"),
    ("token", "binary(16)", "BINARY(16) NULL"),
    ("fence", "bigint unsigned", "BIGINT UNSIGNED NOT NULL DEFAULT 0"),
    ("span", "int unsigned", "INT UNSIGNED NOT NULL DEFAULT 0"),
    ("fence_last", "bigint unsigned", "BIGINT UNSIGNED NOT NULL DEFAULT 0"),
    ("expires", "datetime(6)", "DATETIME(6) NULL"),
    ("version", "bigint unsigned", "BIGINT UNSIGNED NOT NULL DEFAULT 0"),
];

/// How many columns the classic shape has.
const CLASSIC: usize = 6;

/// What follows the name of a table in that of the table of its claims.
const OF_CLAIMS: &str = "_claim";

/// The columns of the table of claims, likewise.
const CLAIM_COLUMNS: [(&str, &str, &str); 12] = [
    ("lock_id", "bigint unsigned", "BIGINT UNSIGNED NOT NULL"),
    ("token", "binary(16)", "BINARY(16) NOT NULL"),
    ("place", "bigint unsigned", "BIGINT UNSIGNED NOT NULL"),
    ("mode", "tinyint unsigned", "TINYINT UNSIGNED NOT NULL"),
    ("permits", "int unsigned", "INT UNSIGNED NOT NULL"),
    ("fence", "bigint unsigned", "BIGINT UNSIGNED NOT NULL"),
    ("span", "int unsigned", "INT UNSIGNED NOT NULL"),
    ("count", "int unsigned", "INT UNSIGNED NOT NULL"),
    ("ttl", "bigint unsigned", "BIGINT UNSIGNED NOT NULL"),
    ("expires", "datetime(6)", "DATETIME(6) NOT NULL"),
    ("kept", "datetime(6)", "DATETIME(6) NOT NULL"),
    ("node_info", "varchar(256)", "VARCHAR(256) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL"),
];

/// The keys of the table of claims, with their columns.
const CLAIM_KEYS: [(&str, &str); 2] = [("PRIMARY", "lock_id,token"), ("turns", "lock_id,place,expires")];

/// The name of the table of claims.
pub(crate) fn of_claims(table: &str) -> String {
    format!("{table}{OF_CLAIMS}")
}

/// The statement that makes the second table, of claims that share a lock or wait for it, on one line.
///
/// # Errors
/// [`InvalidInput`](lockkit_core::ErrorKind::InvalidInput) if the table can't have that name: the second one's is six characters
/// longer.
pub fn claims_ddl(table: &str) -> Result<String> {
    let table = quoted_table(&of_claims(table))?;
    Ok(create(&table, CLAIM_COLUMNS, "PRIMARY KEY (`lock_id`, `token`), KEY `turns` (`lock_id`, `place`, `expires`)"))
}

/// The statement that makes the table, on one line.
///
/// # Errors
/// [`InvalidInput`](lockkit_core::ErrorKind::InvalidInput) if the table can't have that name.
pub fn ddl(table: &str) -> Result<String> {
    let table = quoted_table(table)?;
    Ok(create(&table, COLUMNS, "PRIMARY KEY (`id`), UNIQUE KEY `resource_name` (`resource_name`)"))
}

fn create(table: &str, columns: [(&str, &str, &str); 12], keys: &str) -> String {
    let columns = columns.map(|(name, _, definition)| format!("`{name}` {definition}")).join(", ");
    format!("CREATE TABLE IF NOT EXISTS {table} ({columns}, {keys}) ENGINE=InnoDB")
}

/// A table as the server describes it.
#[derive(Debug, Default)]
pub(crate) struct Table {
    /// Name and type of each column; none if there is no table.
    columns: Vec<(String, String)>,
    pub(crate) is_innodb: bool,
    pub(crate) has_unique_name: bool,
    /// Name and columns of each key.
    keys: Vec<(String, String)>,
}

impl Table {
    /// A column with the type that the server shows for it.
    pub(crate) fn add_column(&mut self, name: &str, shown: &str) {
        self.columns.push((name.to_lowercase(), without_width(shown)));
    }

    /// A key with its columns in their order, separated by commas.
    pub(crate) fn add_key(&mut self, name: &str, columns: &str) {
        self.keys.push((name.to_lowercase(), columns.to_lowercase()));
    }

    pub(crate) fn is_missing(&self) -> bool {
        self.columns.is_empty()
    }

    /// A column of the classic shape that the table does not have.
    pub(crate) fn missing_of_classic(&self) -> Option<&'static str> {
        COLUMNS[..CLASSIC].iter().map(|(name, ..)| *name).find(|name| self.shown(name).is_none())
    }

    /// The type of a column.
    fn shown(&self, name: &str) -> Option<&str> {
        self.columns.iter().find(|(column, _)| column == name).map(|(_, shown)| shown.as_str())
    }

    /// What is wrong with it: one finding, so that connecting tells everything at once.
    pub(crate) fn findings(&self, name: &str) -> Result<Vec<Finding>> {
        let ddl = ddl(name)?;
        let found = |code, summary, advice| vec![Finding::error(ErrorKind::Misconfigured, code, summary, advice)];
        if self.is_missing() {
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
        COLUMNS.iter().enumerate().all(|(at, (name, ..))| self.shown(name).is_some() == (at < CLASSIC))
    }

    /// What keeps it from keeping claims, in words.
    pub(crate) fn faults_of_claims(&self) -> Vec<String> {
        let has_key = |name: &str, columns: &str| {
            self.keys.iter().any(|(key, of)| key.eq_ignore_ascii_case(name) && of == columns)
        };
        let keys = CLAIM_KEYS.iter().filter(|(name, columns)| !has_key(name, columns));
        let keys = keys.map(|(name, columns)| format!("it has no key {name} ({columns})"));
        self.faults_with(&CLAIM_COLUMNS, keys.collect())
    }

    /// What is wrong with it, in words.
    pub(crate) fn faults(&self) -> Vec<String> {
        let key = (!self.has_unique_name).then(|| NO_UNIQUE_KEY.to_owned());
        self.faults_with(&COLUMNS, key.into_iter().collect())
    }

    /// What is wrong with it, where this is wrong with its keys.
    fn faults_with(&self, columns: &[(&str, &str, &str)], keys: Vec<String>) -> Vec<String> {
        let mut faults = Vec::new();
        for (name, wanted, _) in columns {
            match self.shown(name) {
                None => faults.push(format!("{name} is missing")),
                Some(shown) if *name == "resource_name" && is_text(shown) => {
                    let why = "text folds case, accents or trailing spaces, by its collation";
                    faults.push(format!("{name} is {shown}, not {wanted}: {why}"));
                }
                Some(shown) if shown != *wanted => faults.push(format!("{name} is {shown}, not {wanted}")),
                Some(_) => {}
            }
        }
        faults.extend(keys);
        if !self.is_innodb {
            faults.push(NOT_INNODB.to_owned());
        }
        faults
    }

    /// The statements that bring it forward. Each leaves a table that they can be made for again.
    pub(crate) fn upgrade(&self, table: &str) -> Vec<String> {
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
            .filter(|(name, wanted, _)| self.shown(name) != Some(wanted))
            .map(|(name, _, definition)| match self.shown(name) {
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
