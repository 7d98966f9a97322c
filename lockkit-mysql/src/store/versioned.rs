//! Changes without a lock, of rows that count their versions.

use lockkit_core::{Error, Result};
use sqlx::{IntoArguments, MySql, Transaction, query::Query};

use crate::wire::error::{self, Sent};

/// Changes one row if nobody has changed it since it was read: the optimistic way, without a lock and without waiting for one.
///
/// The row has a column that counts its versions. Read it with the data; `update` names the row by its key **and the version that was
/// read**, and raises the version:
///
/// ```no_run
/// use lockkit_mysql::{VersionedUpdate, update_versioned};
/// use sqlx::{Connection, MySqlConnection};
///
/// # async fn sell(data: &mut MySqlConnection) -> Result<(), Box<dyn std::error::Error>> {
/// let (n, version): (u32, u64) = sqlx::query_as("SELECT n, version FROM stock WHERE id = 7").fetch_one(&mut *data).await?;
/// let mut transaction = data.begin().await?;
/// let update = sqlx::query("UPDATE stock SET n = ?, version = version + 1 WHERE id = 7 AND version = ?");
/// match update_versioned(&mut transaction, update.bind(n.saturating_sub(1)).bind(version)).await? {
///     VersionedUpdate::Done => transaction.commit().await?,
///     VersionedUpdate::Stale => transaction.rollback().await?, // read again, and decide again
/// }
/// # Ok(()) }
/// ```
///
/// It fits short decisions about one row that few want at the same time; where many do, most of them work in vain, and
/// [`lock_in_transaction`](crate::lock_in_transaction) lets them wait instead. Every writer of the row has to raise the version. The
/// statement sees what was committed last, also under `REPEATABLE READ`, and waits while another transaction has changed the row and is
/// not over. After `Stale` read again in a new transaction: under `REPEATABLE READ` the old one goes on seeing the old row. It has to be an
/// `UPDATE`: `INSERT … ON DUPLICATE KEY UPDATE` counts a change as two rows.
///
/// # Errors
/// `InvalidInput` if more than one row was changed: roll the transaction back; [`Deadlock`](lockkit_core::ErrorKind::Deadlock) when the server has
/// rolled it back, which MariaDB with `innodb_snapshot_isolation` (on by default in newer versions) does instead of `Stale` where the transaction
/// had read before; [`Unavailable`](lockkit_core::ErrorKind::Unavailable) when another transaction kept the row locked for too long
/// (`innodb_lock_wait_timeout`); others as the server's answer says.
///
/// # Cancellation
/// The change may be part of the transaction. Roll it back, or close the connection, which is safer: the driver may have read half
/// of an answer.
pub async fn update_versioned<'q, A>(
    transaction: &mut Transaction<'_, MySql>,
    update: Query<'q, MySql, A>,
) -> Result<VersionedUpdate>
where
    A: IntoArguments<MySql> + Send + 'q,
{
    let failed = |e: Error| e.at("update versioned", None, &"mysql".into());
    let done = update.execute(&mut **transaction).await.map_err(|e| failed(error::map(e, Sent::Yes)))?;
    // The driver asks for the number of rows that were found, not of those that came out different.
    match done.rows_affected() {
        0 => Ok(VersionedUpdate::Stale),
        1 => Ok(VersionedUpdate::Done),
        rows => {
            let message = format!("the statement changed {rows} rows: it has to name one by its key and its version");
            Err(failed(Error::invalid(message).unknown_effect()))
        }
    }
}

/// The answer of [`update_versioned`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum VersionedUpdate {
    /// The row had that version, and is changed when the transaction is committed.
    Done,
    /// The row has another version, or is gone: nothing was changed.
    Stale,
}

impl VersionedUpdate {
    /// Whether the row was changed.
    #[must_use]
    pub fn is_done(self) -> bool {
        self == Self::Done
    }
}
