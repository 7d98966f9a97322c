//! From the driver's errors to lockkit's: the one place that knows them.

use std::time::Duration;

pub(crate) use lockkit_core::store::Sent;
use lockkit_core::store::one_line;
use lockkit_core::{Error, ErrorKind};
use sqlx::mysql::MySqlDatabaseError;

/// Maps an error of the driver.
///
/// A statement runs in autocommit, so an error that the **server** answered to it means that it was rolled back, as
/// far as the error is one that comes before the commit. Of errors that are not known to, the effect is left open.
pub(crate) fn map(error: sqlx::Error, sent: Sent) -> Error {
    let mapped = match &error {
        sqlx::Error::Database(refusal) => match refusal.try_downcast_ref::<MySqlDatabaseError>() {
            // The server repeats the user name, and a password may have been given in its place: its text is not passed on.
            Some(refusal) if matches!(refusal.number(), 1045 | 1698 | 3118 | 4151) => {
                return refused_login(refusal.message());
            }
            Some(refusal) => server_error(refusal.number(), refusal.message(), sent),
            None => Error::new(ErrorKind::Unexpected, one_line(refusal.message())).after(sent),
        },
        // This is how TLS says that it does not trust the other side.
        sqlx::Error::Io(cause) if cause.kind() == std::io::ErrorKind::InvalidData && sent == Sent::No => {
            Error::new(ErrorKind::Denied, one_line(&format!("TLS failed: {cause}")))
        }
        sqlx::Error::Io(cause) => {
            let timed_out = cause.kind() == std::io::ErrorKind::TimedOut;
            let kind = if timed_out { ErrorKind::TimedOut } else { ErrorKind::Unavailable };
            Error::new(kind, one_line(&lost(cause))).after(sent)
        }
        sqlx::Error::Tls(cause) => Error::new(ErrorKind::Unavailable, one_line(&format!("TLS failed: {cause}"))),
        // The driver has no error of its own for a build without the feature `mysql-rsa`.
        sqlx::Error::Configuration(cause) if cause.to_string().starts_with("RSA") => {
            Error::new(ErrorKind::Unsupported, NEEDS_RSA)
        }
        sqlx::Error::Configuration(cause) => Error::invalid(one_line(&cause.to_string())),
        // The driver does not understand the server's answer.
        sqlx::Error::Protocol(cause) => {
            Error::new(ErrorKind::Unavailable, one_line(&format!("the server's answer can't be understood: {cause}")))
                .after(sent)
        }
        other => Error::new(ErrorKind::Unexpected, one_line(&other.to_string())).after(sent),
    };
    mapped.with_source(error)
}

const NEEDS_RSA: &str = "the server wants the password over TLS, or encrypted by its own key, which this build can't do: set \
     `tls`, or turn on the cargo feature `mysql-rsa` of lockkit (`rsa` of lockkit-mysql)";

/// Whether the server answered that it gave up a lock on the row or the table, or all locks because of a deadlock. The connection
/// is as good as before.
pub(crate) fn is_row_busy(error: &Error) -> bool {
    matches!(number_of(error), Some(1205 | 1213))
}

/// Whether it was the server that answered with this error, and not the connection that failed.
pub(crate) fn is_refusal(error: &Error) -> bool {
    number_of(error).is_some()
}

/// Whether the server answered with this error, and would again, as it does about a user's rights; not if something was busy, or the
/// server not ready.
pub(crate) fn is_lasting_refusal(error: &Error) -> bool {
    is_refusal(error) && !error.is_retryable()
}

/// The server's number of the error that this one was [mapped](map) from.
fn number_of(error: &Error) -> Option<u16> {
    std::error::Error::source(error)?.downcast_ref().and_then(number)
}

/// The server's number of an error, if it was the server that answered it.
pub(crate) fn number(error: &sqlx::Error) -> Option<u16> {
    let refusal = error.as_database_error()?;
    refusal.try_downcast_ref::<MySqlDatabaseError>().map(MySqlDatabaseError::number)
}

/// The table does not exist.
pub(crate) const NO_SUCH_TABLE: u16 = 1146;

/// A number is out of range: with `OFF` in its text it is that of [`WRITABLE`](crate::wire::settings::WRITABLE).
const OUT_OF_RANGE: u16 = 1690;

/// The table has no such column.
pub(crate) const NO_SUCH_COLUMN: u16 = 1054;

/// Names an error that the server answered, by its number. The server may have answered an error that is not in this list after
/// the commit.
fn server_error(number: u16, text: &str, sent: Sent) -> Error {
    let text = one_line(text);
    if let Some(ended) = ended_half_way(number, &text) {
        return Error::new(ErrorKind::Unavailable, format!("{ended}: {text}")).after(sent);
    }
    let (kind, message) = match number {
        1213 => (ErrorKind::Deadlock, "the server rolled this statement back to end a deadlock".to_owned()),
        // MariaDB with innodb_snapshot_isolation: the view of a transaction is older than the row. No deadlock, and the same to do.
        1020 => (ErrorKind::Deadlock, format!("the server rolled the transaction back: {text}")),
        1205 => return row_busy(),
        1040 => (ErrorKind::Unavailable, "the server has too many connections".to_owned()),
        1203 | 1226 => (ErrorKind::Unavailable, format!("the user may have no more connections: {text}")),
        OUT_OF_RANGE if text.contains("OFF") => return read_only(),
        1036 | 1223 | 1290 | 1792 | 1836 | 3100 => {
            (ErrorKind::Unavailable, format!("the server takes no writes: {text}"))
        }
        // Galera, out of its cluster or not yet in it; group replication, which first waits for the group.
        1047 | 3796..=3799 => (ErrorKind::Unavailable, format!("the server is not ready within its cluster: {text}")),
        // Another member had changed the same row.
        3101 => (ErrorKind::Unavailable, format!("the group of servers rolled the statement back: {text}")),
        1114 | 1135 | 1206 | 1461 | 1637 => (ErrorKind::Unavailable, format!("the server is out of resources: {text}")),
        1243 | 1412 | 1615 => (ErrorKind::Unavailable, format!("the statement must be prepared again: {text}")),
        1665 => return logs_statements(),
        3159 => (ErrorKind::Denied, "the server demands TLS: `tls` is `encrypt` or `verify`".to_owned()),
        1129 | 1130 | 1820 | 1862 => (ErrorKind::Denied, format!("the server refused the login: {text}")),
        1044 => (ErrorKind::Denied, format!("{text}; or there is no such database")),
        1142 | 1143 | 1227 | 1370 => (ErrorKind::Denied, text),
        1049 => (ErrorKind::Misconfigured, format!("{text}; make it, or name another in the path of the URL")),
        NO_SUCH_TABLE => {
            let remedy = "`lockkit init`, the option create=true or the statement of `schema::ddl` makes it";
            (ErrorKind::Misconfigured, format!("the table is missing: {text}; {remedy}"))
        }
        NO_SUCH_COLUMN | 1064 | 1366 | 1406 => (ErrorKind::Unexpected, text),
        _ => return Error::new(ErrorKind::Unexpected, format!("error {number}: {text}")).after(sent),
    };
    Error::new(kind, message)
}

/// Why a statement ended whose effect the server may have kept.
fn ended_half_way(number: u16, text: &str) -> Option<&'static str> {
    match number {
        // The text names the hook; what failed before the commit was rolled back.
        3100 if !text.contains("before_") => Some("the server failed after the commit"),
        1053 | 1077 | 1079 | 1080 | 1152 | 1158..=1161 | 1184 | 1927 | 3032 | 3169 | 4031 => {
            Some("the connection was ended")
        }
        1317 | 1969 | 3024 => Some("the server ended the statement"),
        1021 | 1037 | 1038 | 1041 => Some("the server is out of resources"),
        1180 => Some("the server could not commit"),
        _ => None,
    }
}

/// The server refuses the login. Of its text, `Access denied for user 'name'@'host' (using password: YES)`, the part after the
/// user is shown.
fn refused_login(text: &str) -> Error {
    let from = text.rsplit_once("'@'").map(|(_, from)| format!(" from '{}", one_line(from))).unwrap_or_default();
    Error::new(ErrorKind::Denied, format!("the server refused the login{from}"))
}

/// Somebody keeps the row locked.
pub(crate) fn row_busy() -> Error {
    Error::new(ErrorKind::Unavailable, "another transaction keeps the row or the table locked")
}

/// All connections were in use for too long.
pub(crate) fn busy(bound: Duration) -> Error {
    Error::new(
        ErrorKind::TimedOut,
        format!("no connection became free within {bound:?}; a higher `connections` allows more"),
    )
}

/// An answer that does not fit the statement.
pub(crate) fn odd_reply(sent: Sent) -> Error {
    Error::new(ErrorKind::Unexpected, "the server gave an answer that does not fit the statement").after(sent)
}

/// The error of a server that is set to take no writes.
pub(crate) fn read_only() -> Error {
    Error::new(ErrorKind::Unavailable, format!("{}; {NEEDS_PRIMARY}", set_to("read_only")))
}

pub(crate) const NEEDS_PRIMARY: &str = "locks need the primary";

pub(crate) fn set_to(name: &str) -> String {
    format!("the server is set to {name}, as a replica is")
}

/// The error of a write to a server that logs statements.
pub(crate) fn logs_statements() -> Error {
    Error::new(ErrorKind::Unsupported, format!("{LOGS_STATEMENTS}; {SET_BINLOG_FORMAT}"))
}

pub(crate) const LOGS_STATEMENTS: &str =
    "the server's binlog_format is STATEMENT, with which it refuses each write of a lock";
pub(crate) const SET_BINLOG_FORMAT: &str = "set binlog_format to ROW or MIXED";

/// An answer that belongs to another question.
pub(crate) fn out_of_step(sent: Sent) -> Error {
    Error::new(ErrorKind::Unavailable, "the server's answer belongs to another statement").after(sent)
}

fn lost(cause: &std::io::Error) -> String {
    match cause.kind() {
        std::io::ErrorKind::UnexpectedEof => "the server closed the connection".to_owned(),
        _ => cause.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use lockkit_core::Effect;

    use super::*;

    #[test]
    fn what_the_server_refused_has_no_effect() {
        for (number, kind) in [
            (1213, ErrorKind::Deadlock),
            (1205, ErrorKind::Unavailable),
            (1040, ErrorKind::Unavailable),
            (1290, ErrorKind::Unavailable),
            (1836, ErrorKind::Unavailable),
            (1044, ErrorKind::Denied),
            (1142, ErrorKind::Denied),
            (1049, ErrorKind::Misconfigured),
            (1146, ErrorKind::Misconfigured),
            (1047, ErrorKind::Unavailable),
            (1461, ErrorKind::Unavailable),
            (1665, ErrorKind::Unsupported),
            (3101, ErrorKind::Unavailable),
            (3797, ErrorKind::Unavailable),
        ] {
            let error = server_error(number, "a\r\nb", Sent::Yes);
            assert_eq!((error.kind(), error.effect()), (kind, Effect::None), "{number}");
            assert_eq!(error.to_string().lines().count(), 1);
        }
    }

    /// The driver's words, for a build without the feature; tests are built with it.
    #[test]
    fn a_password_that_needs_rsa_is_unsupported() {
        let error = map(sqlx::Error::Configuration("RSA auth backend disabled; enable feature".into()), Sent::No);
        assert_eq!((error.kind(), error.effect()), (ErrorKind::Unsupported, Effect::None));
        assert!(error.message().contains("`tls`") && error.message().contains("`mysql-rsa`"), "{error}");
    }

    #[test]
    fn what_ended_half_way_is_open() {
        for number in [1053, 1180, 1317, 1927, 1969, 3024, 9999] {
            assert_eq!(server_error(number, "gone", Sent::Yes).effect(), Effect::Unknown, "{number}");
            assert_eq!(server_error(number, "gone", Sent::ReadOnly).effect(), Effect::None, "{number}");
        }
        for (hook, effect) in [("before_commit", Effect::None), ("after_commit", Effect::Unknown)] {
            let error =
                server_error(3100, &format!("Error on observer while running replication hook '{hook}'."), Sent::Yes);
            assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, effect), "{hook}");
        }
        let eof = || sqlx::Error::Io(std::io::ErrorKind::UnexpectedEof.into());
        for (sent, effect) in [(Sent::No, Effect::None), (Sent::ReadOnly, Effect::None), (Sent::Yes, Effect::Unknown)] {
            let error = map(eof(), sent);
            assert_eq!((error.kind(), error.effect()), (ErrorKind::Unavailable, effect));
        }
    }
}
