//! A row of the table, as it is read.

use std::time::Duration;

use lockkit_core::{
    Attempt, Claim, Contention, Fence, Hold, Holder, HolderInfo, KeyState, LockKey, LossReason, Mode, Moment, Result,
    Token, Waiter,
};
use sqlx::{Row, mysql::MySqlRow};

use crate::wire::{
    error::{self, Sent},
    mode, name,
};

/// A row, as the statements of [`Statements`](crate::wire::statements::Statements) read it.
#[derive(Clone, Debug)]
pub(crate) struct LockRow {
    pub(crate) id: u64,
    pub(crate) name: Vec<u8>,
    /// The counter: the last fence that was given out.
    pub(crate) last: u64,
    /// The lease, if the lock is held.
    pub(crate) lease: Option<StoredLease>,
    /// Those that share it, as far as they were read: then the lease is nobody's.
    shares: Option<Vec<Holder>>,
    /// How many wait for it in an order, if that was read.
    waiters: Option<u32>,
}

/// A lease that has not run out.
#[derive(Clone, Debug)]
pub(crate) struct StoredLease {
    /// `None` if something other than lockkit wrote it.
    pub(crate) token: Option<Token>,
    pub(crate) fence: u64,
    pub(crate) span: u32,
    pub(crate) depth: u32,
    /// Of one who has the lock alone. Of several who share it, it is that of their claims.
    pub(crate) mode: Mode,
    pub(crate) holder: HolderInfo,
    pub(crate) remaining: Duration,
}

impl LockRow {
    /// Reads all columns but the first, the number of the question.
    ///
    /// # Errors
    /// When the columns are not what they should be.
    pub(crate) fn read(row: &MySqlRow) -> Result<Self> {
        let remaining: Option<i64> = column(row, 8)?;
        let remaining = remaining.and_then(|micros| u64::try_from(micros).ok()).filter(|micros| *micros > 0);
        let lease = match remaining {
            None => None,
            Some(micros) => {
                let token = column::<Option<&[u8]>>(row, 2)?.and_then(token);
                let (mode, holder) = match column(row, 7)? {
                    words if token.is_none() => (Mode::Exclusive, words),
                    holder => mode::holder(holder),
                };
                Some(StoredLease {
                    token,
                    fence: column(row, 3)?,
                    span: column(row, 4)?,
                    depth: column(row, 6)?,
                    mode,
                    holder: HolderInfo::new(holder),
                    remaining: Duration::from_micros(micros),
                })
            }
        };
        Ok(Self {
            id: column(row, 9)?,
            name: column(row, 1)?,
            last: column(row, 5)?,
            lease,
            shares: None,
            waiters: None,
        })
    }

    /// Reads a row with its claims. One that is the same lock's as the last goes to that.
    ///
    /// # Errors
    /// When the columns are not what they should be.
    pub(crate) fn read_with_claim(row: &MySqlRow, locks: &mut Vec<Self>) -> Result<()> {
        let mut lock = Self::read(row)?;
        if column::<Option<i64>>(row, 10)?.is_some_and(|is_shared| is_shared != 0) {
            lock.shares = Some(Vec::new());
        }
        // Those that wait in no order are not known.
        lock.waiters = u32::try_from(column::<i64>(row, 11)?).ok().filter(|waiters| *waiters > 0);
        let share = share(row)?;
        if locks.last().is_none_or(|last| last.id != lock.id) {
            locks.push(lock);
        }
        if let Some(shares) = locks.last_mut().and_then(|last| last.shares.as_mut()) {
            shares.extend(share);
        }
        Ok(())
    }

    /// Whether claims share the lock.
    pub(crate) fn is_shared(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.token.is_none() && mode::sharers(lease.holder.as_str()).is_some())
    }

    /// Whether claims wait for it in an order, if that was read.
    pub(crate) fn has_queue(&self) -> bool {
        self.waiters.is_some()
    }

    /// The state to show; the key is known to be that of the row.
    pub(crate) fn into_state(self, key: LockKey) -> KeyState {
        // Claims that somebody has deleted by hand leave the row, which keeps others out until it lapses.
        let shares = self.shares.filter(|shares| !shares.is_empty());
        let holders = shares.unwrap_or_else(|| self.lease.into_iter().map(StoredLease::into_holder).collect());
        let fence = Some(self.last).filter(|last| *last > 0).map(Fence::new);
        KeyState { holders, fence, waiters: self.waiters, ..KeyState::unknown(key) }
    }

    /// The state to show, if the row was made by lockkit.
    pub(crate) fn into_named_state(self) -> Option<KeyState> {
        let key = name::from_column(&self.name)?;
        Some(self.into_state(key))
    }
}

impl StoredLease {
    pub(crate) fn is_of(&self, claim: &Claim) -> bool {
        self.token == Some(claim.token)
    }

    /// The grant to its holder, extended by a request that was sent at `sent`.
    pub(crate) fn hold(&self, claim: &Claim, sent: Moment, ttl: Duration) -> Hold {
        let (fence, span) = (Fence::new(self.fence), self.span.max(1));
        Hold { claim: claim.clone(), fence, span, until: sent + ttl, depth: self.depth }
    }

    pub(crate) fn into_contention(self) -> Contention {
        let holder = match mode::sharers(self.holder.as_str()) {
            Some(words) if self.token.is_none() => HolderInfo::new(words),
            _ => self.holder,
        };
        Contention { retry_after: Some(self.remaining), holder: Some(holder), burnt: false }
    }

    fn into_holder(self) -> Holder {
        Holder {
            token: self.token,
            info: self.holder,
            mode: self.mode,
            depth: self.depth,
            fence: Some(Fence::new(self.fence)),
            remaining: Some(self.remaining),
        }
    }
}

/// The claim in a row, if there is one.
fn share(row: &MySqlRow) -> Result<Option<Holder>> {
    let Some(bytes) = column::<Option<&[u8]>>(row, 12)? else { return Ok(None) };
    let remaining: i64 = column(row, 18)?;
    Ok(Some(Holder {
        token: token(bytes),
        info: HolderInfo::new(column(row, 17)?),
        mode: mode::mode(column(row, 13)?, column(row, 14)?),
        depth: column(row, 16)?,
        fence: Some(Fence::new(column(row, 15)?)),
        remaining: Some(Duration::from_micros(u64::try_from(remaining).unwrap_or(0))),
    }))
}

/// One that waits, as [`Statements::queue`](crate::wire::statements::Statements::queue) reads it.
pub(crate) fn waiter(row: &MySqlRow) -> Result<Waiter> {
    Ok(Waiter { info: HolderInfo::new(column(row, 3)?), mode: mode::mode(column(row, 1)?, column(row, 2)?) })
}

/// Another client has the lock; or had it then, and does not any more: then the retry is due at once.
pub(crate) fn contended(found: Option<LockRow>) -> Attempt {
    let free = Contention { retry_after: Some(Duration::ZERO), ..Contention::default() };
    Attempt::Contended(found.and_then(|lock| lock.lease).map_or(free, StoredLease::into_contention))
}

/// Why a lease is not the claim's, given the lease that was found.
pub(crate) fn why_not(found: Option<&StoredLease>) -> LossReason {
    if found.is_some() { LossReason::Taken } else { LossReason::Gone }
}

/// The only row that can come; `None` if none did.
pub(crate) fn only_row(rows: &[MySqlRow]) -> Result<Option<&MySqlRow>> {
    match rows {
        [] => Ok(None),
        [row] => Ok(Some(row)),
        _ => Err(error::odd_reply(Sent::ReadOnly)),
    }
}

fn token(bytes: &[u8]) -> Option<Token> {
    let number = u128::from_be_bytes(bytes.try_into().ok()?);
    format!("{number:032x}").parse().ok()
}

/// Reads a column. A value of another type is an error.
pub(crate) fn column<'r, T>(row: &'r MySqlRow, index: usize) -> Result<T>
where
    T: sqlx::Decode<'r, sqlx::MySql> + sqlx::Type<sqlx::MySql>,
{
    row.try_get(index).map_err(|e| error::map(e, Sent::ReadOnly))
}
