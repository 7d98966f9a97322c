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
//! **What is read before the claim was admitted may be old**, so claim first. A holder whose work spans several
//! transactions claims in each of them, and commits the first claim before it reads anything in another.

use lockkit_core::{Error, ErrorKind, Fence, LockKey, Result, fenced::Admission};
use sqlx::{MySql, Row, Transaction};

use crate::wire::{
    error::{self, Sent},
    statements::text,
    value::literal,
};

/// The table of the highest fences.
pub const TABLE: &str = "fenced_resource";

/// The statement that makes the table, if it is missing.
pub const DDL: &str = "CREATE TABLE IF NOT EXISTS fenced_resource (resource_name VARBINARY(512) NOT NULL PRIMARY KEY, \
                       fence BIGINT UNSIGNED NOT NULL) ENGINE=InnoDB";

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
    let key = LockKey::new(resource)?;
    let admission = admit(transaction, key.as_str().as_bytes(), fence).await;
    admission.map_err(|e| e.at("claim", Some(&key), &"mysql".into()))
}

async fn admit(transaction: &mut Transaction<'_, MySql>, name: &[u8], fence: Fence) -> Result<Admission> {
    let name = literal(name);
    let seen = look(transaction, &name).await?;
    if fence == Fence::NONE || seen.is_some_and(|highest| fence < highest) {
        return Ok(Admission::Refused { highest: seen.unwrap_or_default() });
    }
    if seen == Some(fence) {
        return Ok(Admission::Admitted);
    }
    // A row that another transaction makes meanwhile keeps its fence, if that is higher.
    let record = text(format!(
        "INSERT INTO {TABLE} (resource_name, fence) VALUES ({name}, {fence}) \
         ON DUPLICATE KEY UPDATE fence = GREATEST(fence, {fence})",
        fence = fence.get()
    ));
    record.execute(&mut **transaction).await.map_err(failed)?;
    match look(transaction, &name).await? {
        Some(highest) if highest == fence => Ok(Admission::Admitted),
        Some(highest) => Ok(Admission::Refused { highest }),
        None => Err(error::odd_reply(Sent::Yes)),
    }
}

/// A read that locks: it sees what was committed last, also under `REPEATABLE READ`. The name is a literal.
async fn look(transaction: &mut Transaction<'_, MySql>, name: &str) -> Result<Option<Fence>> {
    let look = text(format!("SELECT fence FROM {TABLE} WHERE resource_name = {name} FOR UPDATE"));
    let row = look.fetch_optional(&mut **transaction).await.map_err(failed)?;
    let number = row.map(|row| row.try_get::<u64, _>(0)).transpose();
    let odd = |e: sqlx::Error| Error::new(ErrorKind::Unexpected, format!("the fence is not a number: {e}"));
    Ok(number.map_err(odd)?.map(Fence::new))
}

fn failed(error: sqlx::Error) -> Error {
    if error::number(&error) == Some(error::NO_SUCH_TABLE) {
        let message = format!("the table {TABLE} is missing; `lockkit_mysql::fenced::DDL` makes it");
        return Error::new(ErrorKind::Misconfigured, message).with_source(error);
    }
    error::map(error, Sent::Yes)
}
