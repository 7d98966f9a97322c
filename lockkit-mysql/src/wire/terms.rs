//! Values as statements spell them.

use std::time::Duration;

use lockkit_core::{Error, Fence, Result, store::FENCE_ROOM};
use sqlx::mysql::MySqlQueryResult;

/// The number of a question on its connection, from [`FIRST_QUESTION`] on. It is part of the statement, and comes back with its
/// answer: as the first column of every row, or as the insert id.
pub(crate) type Question = u64;

/// Where the numbers of a connection's questions begin: above the numbers of rows and above all fences, which are insert ids, too. An
/// answer that comes twice is not to be taken for the one to a question that has the number of a row that was made, or that asked
/// for a fence. A fence is laid over by the last two bits of its question; whatever these are, what is left of a number like this
/// one is far below each fence.
pub(crate) const FIRST_QUESTION: Question = 1 << 62;

/// Beyond this the server's arithmetic would leave the integers.
pub(crate) const MAX_FENCE: u64 = 1 << 62;

/// The terms that leases in the same statement have in common.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RenewalTerms {
    /// In microseconds.
    pub(crate) ttl: i64,
    /// `None` leaves the depth as it is.
    pub(crate) depth: Option<u32>,
    /// The fence counter is raised to at least this.
    pub(crate) floor: u64,
    /// The name of the holder; `None` leaves it as it is.
    pub(crate) holder: Option<String>,
}

/// What becomes of a row that somebody keeps locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockedRow {
    /// The statement waits for it.
    Awaited,
    /// The statement leaves it as it is.
    PassedOver,
}

/// Whether it is the answer to this question. An answer that nothing was changed has no number; the next read decides.
pub(crate) fn is_answer(done: &MySqlQueryResult, question: Question) -> bool {
    done.last_insert_id() == if done.rows_affected() == 0 { 0 } else { question }
}

/// Bytes as a statement spells them, whatever they are.
pub(crate) fn literal(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("x'{digits}'")
}

/// A ttl as the server wants it: rounded up, so that the lease never ends before its holder believes.
pub(crate) fn microseconds(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_nanos().div_ceil(1000)).unwrap_or(i64::MAX)
}

/// # Errors
/// `InvalidInput` if the counter could not go there, or hardly any further.
pub(crate) fn check_floor(floor: Fence) -> Result<()> {
    if floor.get() < MAX_FENCE - FENCE_ROOM { Ok(()) } else { Err(Error::invalid("fences in a table end at 2^62")) }
}
