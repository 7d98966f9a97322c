//! What can be known of a server before it is trusted with locks.

use lockkit_core::{Error, ErrorKind, Result};

use crate::pool::{Connection, column};

/// Asks the server what it is, refuses what can't keep locks, and warns of settings that put them at risk.
pub(crate) async fn check(connection: &mut Connection) -> Result<Vec<String>> {
    let settings = "SELECT VERSION(), CAST(@@global.read_only AS SIGNED), \
        CAST(@@global.innodb_flush_log_at_trx_commit AS SIGNED), \
        CAST(@@global.log_bin AS SIGNED), CAST(@@global.sync_binlog AS SIGNED)";
    let rows = connection.rows(sqlx::query(settings)).await?;
    let Some(row) = rows.first() else { return Ok(Vec::new()) };
    let version: String = column(row, 0)?;
    let setting = |index| column::<i64>(row, index);
    judge(&version, setting(1)? != 0, setting(2)?, setting(3)? != 0, setting(4)?)
}

fn judge(version: &str, read_only: bool, flush: i64, binlog: bool, sync_binlog: i64) -> Result<Vec<String>> {
    let (least, brand) = if version.contains("MariaDB") { ((10, 6), "MariaDB 10.6") } else { ((8, 0), "MySQL 8.0") };
    if numbers(version) < least {
        let message = format!("the server is too old: {version}; lockkit needs {brand} or newer");
        return Err(Error::new(ErrorKind::Unsupported, message));
    }
    if read_only {
        // A user with enough rights could write all the same, behind the back of the replica's primary.
        let message = "the server is set to read_only, as a replica is: locks need the primary";
        return Err(Error::new(ErrorKind::Unavailable, message));
    }
    let mut warnings = Vec::new();
    if flush != 1 {
        warnings.push(format!(
            "innodb_flush_log_at_trx_commit is {flush}: a crash of the server may lose the last second of locks, and \
             give a lock away that is still held"
        ));
    }
    if binlog && sync_binlog != 1 {
        warnings.push(format!(
            "sync_binlog is {sync_binlog}: a crash of the server may lose the last locks, and give one away that is \
             still held"
        ));
    }
    Ok(warnings)
}

/// Major and minor version; some MariaDB servers put `5.5.5-` in front for old clients.
fn numbers(version: &str) -> (u32, u32) {
    let mut numbers = version.trim_start_matches("5.5.5-").split(['.', '-']).map_while(|part| part.parse().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_keep_locks_is_taken() {
        for good in ["10.11.19-MariaDB-0+deb12u1", "5.5.5-10.6.2-MariaDB", "9.7.4", "8.0.36-28.1", "11.4.2-MariaDB"] {
            assert!(judge(good, false, 1, true, 1).expect(good).is_empty());
        }
        for old in ["10.5.1-MariaDB", "5.7.44", "5.5.5-10.4.1-MariaDB"] {
            assert_eq!(judge(old, false, 1, false, 0).expect_err(old).kind(), ErrorKind::Unsupported);
        }
        assert_eq!(judge("9.7.4", true, 1, false, 0).expect_err("replica").kind(), ErrorKind::Unavailable);
    }

    #[test]
    fn what_may_lose_locks_is_warned_of() {
        assert_eq!(judge("9.7.4", false, 2, true, 0).expect("works").len(), 2);
        assert_eq!(judge("9.7.4", false, 0, false, 0).expect("works").len(), 1);
    }
}
