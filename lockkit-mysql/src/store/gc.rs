//! Removing the rows of locks that nobody uses any more.

use std::time::Duration;

use lockkit_core::Result;

use crate::{
    client::{
        connection::LONGEST_WAIT,
        pool::{Bound, Lane},
    },
    store::MySqlStore,
    wire::{
        error::{self, Sent, invalid},
        row::column,
    },
};

/// How many rows are looked up at once.
const PAGE: u32 = 500;
/// A shorter period would remove rows that are about to be used again.
const SHORTEST: Duration = Duration::from_secs(60);

/// Reads names without locking anything, then removes one row per statement, and only if it is still unused: a delete of
/// many rows would lock them in an order of its own, and get into deadlocks with those that use them.
pub(crate) async fn remove_unused(store: &MySqlStore, unused_for: Duration) -> Result<u64> {
    if unused_for < SHORTEST {
        return Err(invalid(format!("locks unused for less than {SHORTEST:?} are not removed")));
    }
    let micros = i64::try_from(unused_for.as_micros()).map_err(|_| invalid("the period is too long"))?;
    let (mut removed, mut last) = (0, 0_u64);
    loop {
        let mut connection = store.pool.connection(Lane::Common, Bound::new(store.timeout)).await?;
        let page = connection.rows(store.statements.idle().bind(last).bind(micros).bind(PAGE)).await?;
        drop(connection);
        for row in &page {
            last = column(row, 0)?;
            let name: &[u8] = column(row, 1)?;
            // The server itself gives up on a row that somebody keeps locked. It is left for the next time.
            let bound = Bound::new(store.timeout.saturating_add(LONGEST_WAIT));
            let mut connection = store.pool.connection(Lane::Common, bound).await?;
            let remove = |_| store.statements.remove().bind(name).bind(micros);
            match connection.execute_raw(remove, None).await? {
                // How many those are is for people: an answer to another statement would count wrongly, no more.
                Ok((done, _)) => removed += done.rows_affected(),
                Err(busy) if error::is_row_busy(&busy) => {}
                Err(failed) => return Err(error::map(failed, Sent::Yes)),
            }
        }
        if page.len() < usize::try_from(PAGE).unwrap_or(usize::MAX) {
            return Ok(removed);
        }
    }
}
