//! Data in MySQL or MariaDB that checks fences: within the user's own transaction.
//!
//! ```no_run
//! use lockkit_core::Locker;
//! use lockkit_mysql::{MySqlStore, fenced};
//! use sqlx::{Connection, MySqlConnection};
//!
//! # async fn pay() -> Result<(), Box<dyn std::error::Error>> {
//! let locker = Locker::new(MySqlStore::from_url("mysql://app@locks/shop?create=true").await?);
//! let mut data = MySqlConnection::connect("mysql://app@data/shop").await?;
//! let guard = locker.lock("stock/7").acquire().await?;
//!
//! let mut transaction = data.begin().await?;
//! fenced::claim(&mut transaction, "stock/7", guard.fence()).await?.ok()?; // the first statement
//! sqlx::query("UPDATE stock SET n = n - 1 WHERE id = 7").execute(&mut *transaction).await?;
//! transaction.commit().await?;
//! # guard.release().await?; Ok(()) }
//! ```
//!
//! The highest fence of each resource is a row of a table of its own ([`TABLE`], made by [`DDL`]) in the database of the
//! data. A claim locks the row until the transaction ends, so that what the transaction changes is guarded to its very
//! commit. It is recorded by the commit and forgotten by a rollback.
//!
//! Readers of the data, who hold a shared lock, use [`claim_shared`].
//!
//! **What is read before the claim was admitted may be old**, so claim first. A holder whose work spans several
//! transactions claims in each of them, and commits the first claim before it reads anything in another.

use lockkit_core::{
    Error, ErrorKind, Fence, LockKey, Result,
    fenced::{Admission, SeenFences},
};
use sqlx::{MySql, Row, Transaction};

use crate::wire::{
    error::{self, Sent},
    statements::{Text, text},
    terms::literal,
};

/// The table of the highest fences.
pub const TABLE: &str = "fenced_resource";

/// The statement that makes the table, if it is missing.
pub const DDL: &str = "CREATE TABLE IF NOT EXISTS fenced_resource (resource_name VARBINARY(512) NOT NULL PRIMARY KEY, \
                       fence BIGINT UNSIGNED NOT NULL, writer BIGINT UNSIGNED NULL) ENGINE=InnoDB";

/// What a claim is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Writer,
    Reader,
}

/// Admits the transaction to a resource if no higher fence was seen, and remembers the fence: the first statement of a
/// holder's transaction. The resource is any name of 1 to 512 bytes, such as that of the lock.
///
/// Other transactions that claim the same resource wait until this one ends, for as long as `innodb_lock_wait_timeout`
/// says. A refused transaction has changed nothing; roll it back.
///
/// # Errors
/// `InvalidInput` for a name that is none; [`Deadlock`](ErrorKind::Deadlock) when the server rolled the transaction back to
/// end a deadlock, which two that claim a **new** resource at once may run into; others as the server's answer says. After an
/// error roll the transaction back.
///
/// # Cancellation
/// The claim may be part of the transaction. Roll it back, or close the connection, which is safer: the driver may have read
/// half of an answer.
pub async fn claim(transaction: &mut Transaction<'_, MySql>, resource: &str, fence: Fence) -> Result<Admission> {
    claim_as(Side::Writer, transaction, resource, fence).await
}

/// Admits the transaction of a reader, the holder of a shared lock, if no higher fence of a writer was seen, and remembers the
/// fence: writers with smaller ones are refused from the commit on, other readers are not. For the rest as [`claim`].
///
/// Readers that claim the same resource wait for each other, too, until their transactions end. To read for long, claim in a
/// transaction of its own, read in another, and claim again: if that is admitted, no writer was admitted in between.
///
/// # Errors
/// As [`claim`].
///
/// # Cancellation
/// As [`claim`].
pub async fn claim_shared(transaction: &mut Transaction<'_, MySql>, resource: &str, fence: Fence) -> Result<Admission> {
    claim_as(Side::Reader, transaction, resource, fence).await
}

async fn claim_as(
    side: Side,
    transaction: &mut Transaction<'_, MySql>,
    resource: &str,
    fence: Fence,
) -> Result<Admission> {
    let key = LockKey::new(resource)?;
    let admission = admit(side, transaction, key.as_str().as_bytes(), fence).await;
    admission.map_err(|e| e.at("claim", Some(&key), &"mysql".into()))
}

async fn admit(side: Side, transaction: &mut Transaction<'_, MySql>, name: &[u8], fence: Fence) -> Result<Admission> {
    let name = literal(name);
    let seen = look(transaction, &name).await?;
    let mut then = seen.unwrap_or_default();
    let admission = side.admit(&mut then, fence);
    if !admission.is_admitted() || seen == Some(then) {
        return Ok(admission);
    }
    record(side, &name, fence).execute(&mut **transaction).await.map_err(failed)?;
    // A row that another transaction made meanwhile keeps its fence, if that is higher.
    let mut seen = look(transaction, &name).await?.ok_or_else(|| error::odd_reply(Sent::Yes))?;
    Ok(side.admit(&mut seen, fence))
}

impl Side {
    fn admit(self, seen: &mut SeenFences, fence: Fence) -> Admission {
        match self {
            Self::Writer => seen.admit(fence),
            Self::Reader => seen.admit_shared(fence),
        }
    }
}

/// The statement that remembers a fence. Its assignments are made in their order: the first sees the fence that was there. A row
/// without a writer has the fence of one.
fn record(side: Side, name: &str, fence: Fence) -> Text {
    let fence = fence.get();
    let (new, writer) = match side {
        Side::Writer => ("NULL", format!("IF(fence <= {fence}, NULL, writer)")),
        Side::Reader => ("0", format!("IF(fence < {fence}, COALESCE(writer, fence), writer)")),
    };
    text(format!(
        "INSERT INTO {TABLE} (resource_name, fence, writer) VALUES ({name}, {fence}, {new}) \
         ON DUPLICATE KEY UPDATE writer = {writer}, fence = GREATEST(fence, {fence})"
    ))
}

/// A read that locks: it sees what was committed last, also under `REPEATABLE READ`. The name is a literal.
async fn look(transaction: &mut Transaction<'_, MySql>, name: &str) -> Result<Option<SeenFences>> {
    let look = text(format!("SELECT fence, writer FROM {TABLE} WHERE resource_name = {name} FOR UPDATE"));
    let Some(row) = look.fetch_optional(&mut **transaction).await.map_err(failed)? else { return Ok(None) };
    let odd = |e: sqlx::Error| Error::new(ErrorKind::Unexpected, format!("the fence is not a number: {e}"));
    let highest = row.try_get::<u64, _>(0).map_err(odd)?;
    let writer = row.try_get::<Option<u64>, _>(1).map_err(odd)?.unwrap_or(highest);
    Ok(Some(SeenFences::new(Fence::new(highest), Fence::new(writer))))
}

fn failed(error: sqlx::Error) -> Error {
    if error::number(&error) == Some(error::NO_SUCH_TABLE) {
        let message = format!("the table {TABLE} is missing; `lockkit_mysql::fenced::DDL` makes it");
        return Error::new(ErrorKind::Misconfigured, message).with_source(error);
    }
    if error::number(&error) == Some(error::NO_SUCH_COLUMN) {
        let message =
            format!("the table {TABLE} lacks a column: ALTER TABLE {TABLE} ADD writer BIGINT UNSIGNED NULL adds it");
        return Error::new(ErrorKind::Misconfigured, message).with_source(error);
    }
    error::map(error, Sent::Yes)
}
