//! A lock that lives and dies with the user's own transaction.

use lockkit_core::{Contention, Error, LockKey, Result};
use sqlx::{MySql, Transaction};

use crate::{
    client::{connection::Bound, pool::ConnectionClass},
    config::MySqlConfig,
    store::MySqlStore,
    wire::{
        error::{self, Sent},
        name::{quoted_table, to_column},
        row::{LockRow, StoredLease, only_row},
        statements::{Text, insert_or_lock, lock_by_id, lock_by_name},
    },
};

const OPERATION: &str = "lock in transaction";

/// Locks a name in the default table until the transaction ends: the pessimistic lock, a lock on the row of the name.
///
/// When everything that the lock protects lies in the **same database** and is done within **one short transaction**,
/// this beats a lease: it needs no ttl, no renewal and no fence, it can't be lost while the transaction can still commit,
/// and it is free the moment the transaction ends, also when the client dies. For everything else (work outside the
/// database, or that takes longer than a transaction should) take a lease.
///
/// It waits for other transactions for as long as `innodb_lock_wait_timeout` says. It respects leases of the same name,
/// and leases respect it: while one is held, the answer is [`TransactionLock::Leased`], without waiting; and while this
/// is held, no lease of the name is granted, and none renewed, so that a transaction that is told of a lease must end.
///
/// Lock **first**, then read: under `REPEATABLE READ` a transaction sees the database as it was at its first read, also
/// what its lock protects.
///
/// Under `REPEATABLE READ` it may also lock the gap between the name and its neighbour in the table, so that names that
/// are used for the first time have to wait until the transaction ends; and it is a deadlock if two transactions lock a
/// new name at once. Nothing is lost by that, but [`MySqlStore::lock_in_transaction`] does without.
///
/// A server that is set to `read_only` gives no lock. If it is set so afterwards, a user who may write there all the same can still
/// commit.
///
/// # Errors
/// `InvalidInput` for a name that is none; [`Unavailable`](lockkit_core::ErrorKind::Unavailable) when another
/// transaction kept the lock for too long, upon which roll the transaction back: a server with `innodb_rollback_on_timeout` has
/// done so already, and what goes on then has none of the locks that the transaction had; `Unavailable`, too, from a server that is
/// set to `read_only`, as a former primary is;
/// [`Deadlock`](lockkit_core::ErrorKind::Deadlock) when the server has rolled the transaction back to end a deadlock;
/// others as the server's answer says.
///
/// # Cancellation
/// The lock may be held, or come to be held, until the transaction ends. Roll it back, or close the connection, which is
/// safer: the driver may have read half of an answer.
pub async fn lock_in_transaction(transaction: &mut Transaction<'_, MySql>, name: &str) -> Result<TransactionLock> {
    let key = LockKey::new(name)?;
    let locked = lock(transaction, &quoted_table(MySqlConfig::TABLE)?, &key).await;
    locked.map_err(|e| e.at(OPERATION, Some(&key), &"mysql".into()))
}

/// The answer of [`lock_in_transaction`].
#[derive(Clone, Debug)]
#[must_use]
pub enum TransactionLock {
    /// The lock is the transaction's until it ends.
    Locked,
    /// A client has a lease of that name. End the transaction: until then it keeps the lease from being renewed.
    Leased(Contention),
}

impl TransactionLock {
    /// Whether the lock is the transaction's.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        matches!(self, Self::Locked)
    }
}

impl MySqlStore {
    /// The same as [`lock_in_transaction`](crate::lock_in_transaction), in this store's table, which must be in the
    /// database of the transaction. The row of a new name is made on a connection of the store, before and outside the
    /// transaction, so that new names are as harmless as old ones. That costs a round trip more.
    ///
    /// # Errors
    /// As [`lock_in_transaction`](crate::lock_in_transaction), and those of the store's own connection.
    ///
    /// # Cancellation
    /// As [`lock_in_transaction`](crate::lock_in_transaction).
    pub async fn lock_in_transaction(
        &self,
        transaction: &mut Transaction<'_, MySql>,
        name: &str,
    ) -> Result<TransactionLock> {
        let key = LockKey::new(name)?;
        let failed = |e: Error| e.at(OPERATION, Some(&key), &self.info.name);
        let id = self.row_id(&key).await.map_err(failed)?;
        let found = look(transaction, lock_by_id(&self.statements.table, id)).await.map_err(failed)?;
        match found.filter(|lock| lock.name == to_column(&key)) {
            Some(lock) => Ok(judge(lock)),
            // It was removed just now, for it was unused for long.
            None => lock(transaction, &self.statements.table, &key).await.map_err(failed),
        }
    }

    /// The id of a lock's row, which is made if it is missing.
    async fn row_id(&self, key: &LockKey) -> Result<u64> {
        let mut connection = self.pool.connection(ConnectionClass::Common, Bound::new(self.timeout)).await?;
        if let Some(lock) = self.look(&mut connection, key).await? {
            return Ok(lock.id);
        }
        self.make_row(&mut connection, key).await?;
        let made = self.look(&mut connection, key).await?;
        made.map(|lock| lock.id).ok_or_else(|| error::odd_reply(Sent::Yes))
    }
}

async fn lock(transaction: &mut Transaction<'_, MySql>, table: &str, key: &LockKey) -> Result<TransactionLock> {
    if let Some(lock) = look(transaction, lock_by_name(table, to_column(key))).await? {
        return Ok(judge(lock));
    }
    let insert = insert_or_lock(table, to_column(key));
    insert.execute(&mut **transaction).await.map_err(|e| error::map(e, Sent::Yes))?;
    let made = look(transaction, lock_by_name(table, to_column(key))).await?;
    made.map(judge).ok_or_else(|| error::odd_reply(Sent::Yes))
}

/// A read that locks, so that it sees the row as it is, and does not become the first read of the transaction.
async fn look(transaction: &mut Transaction<'_, MySql>, statement: Text) -> Result<Option<LockRow>> {
    let rows = statement.fetch_all(&mut **transaction).await;
    only_row(&rows.map_err(|e| error::map(e, Sent::Yes))?)?.map(LockRow::read).transpose()
}

fn judge(lock: LockRow) -> TransactionLock {
    match lock.lease {
        Some(lease) => TransactionLock::Leased(StoredLease::into_contention(lease)),
        None => TransactionLock::Locked,
    }
}
