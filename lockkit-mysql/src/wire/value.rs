//! Values as statements spell them.

use std::time::Duration;

/// The number of a question on its connection, from 1. It is part of the statement, and comes back with its answer: as the
/// first column of every row, or as the insert id.
pub(crate) type Question = u64;

/// Bytes as a statement spells them, whatever they are.
pub(crate) fn literal(bytes: &[u8]) -> String {
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("x'{digits}'")
}

/// A ttl as the server wants it: rounded up, so that the lease never ends before its holder believes.
pub(crate) fn microseconds(ttl: Duration) -> i64 {
    i64::try_from(ttl.as_nanos().div_ceil(1000)).unwrap_or(i64::MAX)
}
