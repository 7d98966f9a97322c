//! Values as statements spell them.

use std::time::Duration;

/// The number of a question on its connection, from [`FIRST_QUESTION`] on. It is part of the statement, and comes back with its
/// answer: as the first column of every row, or as the insert id.
pub(crate) type Question = u64;

/// Where the numbers of a connection's questions begin: above the numbers of rows and above all fences, which are insert ids, too. An
/// answer that comes twice is not to be taken for the one to a question that has the number of a row that was made, or that asked
/// for a fence. A fence is laid over by the last two bits of its question; whatever these are, what is left of a number like this
/// one is far below each fence.
pub(crate) const FIRST_QUESTION: Question = 1 << 62;

/// Bytes as a statement spells them, whatever they are.
pub(crate) fn literal(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("x'{digits}'")
}

/// A ttl as the server wants it: rounded up, so that the lease never ends before its holder believes.
pub(crate) fn microseconds(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_nanos().div_ceil(1000)).unwrap_or(i64::MAX)
}
