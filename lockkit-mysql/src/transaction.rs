//! A lock that lives and dies with the user's own transaction.

use lockkit_core::{Contention, Error, LockKey, Result};
use sqlx::{MySql, Transaction};

use crate::{
    config::MySqlConfig,
    error::{self, Sent},
    name::{quoted_table, to_column},
    row::{self, Lease},
    statements::{insert_or_lock, look_locked},
};

/// Locks a name until the transaction ends, in the default table. See [`lock_in_transaction_on`].
///
/// # Errors
/// As [`lock_in_transaction_on`].
///
/// # Cancellation
/// As [`lock_in_transaction_on`].
pub async fn lock_in_transaction(transaction: &mut Transaction<'_, MySql>, name: &str) -> Result<TransactionLock> {
    lock_in_transaction_on(transaction, MySqlConfig::TABLE, name).await
}

/// Locks a name until the transaction ends: the pessimistic lock, a row lock on the row of the name.
///
/// When everything that the lock protects lies in the **same database** and is done within **one short transaction**,
/// this beats a lease: it needs no ttl, no renewal and no fence, it can't be lost while the transaction can still commit,
/// and it is free the moment the transaction ends, also when the client dies. For everything else (work outside the
/// database, or that takes longer than a transaction should last) take a lease.
///
/// It waits for other transactions for as long as `innodb_lock_wait_timeout` says. It respects leases of the same name,
/// and leases respect it: while one is held, this reports [`TransactionLock::Leased`] without waiting; and while this is
/// held, no lease of the name is granted, and none is renewed, so that a transaction that is told of a lease must end.
///
/// Lock **first**, then read: under `REPEATABLE READ` a transaction sees the database as it was at its first read, also
/// what its lock protects.
///
/// # Errors
/// `InvalidInput` for a name that is none; [`Unavailable`](lockkit_core::ErrorKind::Unavailable) when another
/// transaction kept the lock for too long, upon which the transaction can go on or try again;
/// [`Deadlock`](lockkit_core::ErrorKind::Deadlock) when the server has rolled the transaction back to end a deadlock;
/// others as the server's answer says.
///
/// # Cancellation
/// The lock may be held, or come to be held, until the transaction ends. Roll it back.
pub async fn lock_in_transaction_on(
    transaction: &mut Transaction<'_, MySql>,
    table: &str,
    name: &str,
) -> Result<TransactionLock> {
    let key = LockKey::new(name)?;
    let table = quoted_table(table)?;
    let failed = |e| error::map(e, Sent::Yes).at("lock in transaction", Some(&key), &"mysql".into());
    // This makes the row if it is missing and locks it in any case. A read for it, as the statement after this one, would
    // lock a gap when there is no row, and two that then both fill the gap are a deadlock.
    insert_or_lock(&table).bind(to_column(&key)).execute(&mut **transaction).await.map_err(failed)?;
    let statement = look_locked(&table).bind(to_column(&key));
    let rows = statement.fetch_all(&mut **transaction).await.map_err(failed)?;
    let lock = row::only(&rows).map_err(|e: Error| e.at("lock in transaction", Some(&key), &"mysql".into()))?;
    Ok(match lock.and_then(|lock| lock.lease) {
        Some(lease) => TransactionLock::Leased(Lease::into_contention(lease)),
        None => TransactionLock::Locked,
    })
}

/// What became of a [`lock_in_transaction`].
#[derive(Clone, Debug)]
#[must_use]
pub enum TransactionLock {
    /// The lock is the transaction's until it ends.
    Locked,
    /// Somebody has a lease of that name. End the transaction: until then it keeps the lease from being renewed.
    Leased(Contention),
}

impl TransactionLock {
    /// Whether the lock is the transaction's.
    #[must_use]
    pub fn is_locked(&self) -> bool {
        matches!(self, Self::Locked)
    }
}
