//! Removing the rows of locks that were not used for long.
//!
//! A row is made when its lock is first used. If names are used once, rows would pile up. So the making of rows drives their
//! removal: for every few rows that a store makes, it reads a page of the table and removes the unused rows of that page. Each
//! time that is at most two statements, in the background; and where there is a table of claims, one more and a short transaction
//! for each lock of the page that has lapsed claims, which is none where nobody shares locks.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockkit_core::{Error, Result, Token, store::Background};
use tokio::sync::Mutex;

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::{ConnectionClass, Pool},
    },
    config::MySqlConfig,
    wire::{
        error,
        row::column,
        statements::{Size, Statements},
    },
};

/// How many rows are read at once.
const PAGE: u32 = 64;
/// A shorter period would remove rows that are about to be used again.
const SHORTEST: Duration = Duration::from_secs(60);
/// A row goes by itself when no lease used it for a week, and one did before.
const WEEK: Unused = Unused { micros: 7 * 24 * 3600 * 1_000_000, never_leased: false };
/// A store reads a page for the first row that it makes, and then for each row after so many. A page has eight times as
/// many rows as are made meanwhile, so that a table shrinks.
const EVERY: u64 = 8;

/// Which rows are unused.
#[derive(Clone, Copy)]
struct Unused {
    /// For how long.
    micros: i64,
    /// Also those that no lease ever used. Transactions may use them: their locks leave no trace.
    never_leased: bool,
}

/// Removes rows as others are made.
pub(crate) struct Sweeper {
    pool: Arc<Pool>,
    statements: Arc<Statements>,
    timeout: Duration,
    background: Arc<Background>,
    made: AtomicU64,
    /// Where the next page begins, once that is known. The task that has this lock sweeps.
    after: Arc<Mutex<Option<u64>>>,
    /// Whether rows are to stay, or this user may not remove them.
    off: Arc<AtomicBool>,
    /// Whether there is a table of claims.
    pub(crate) has_claims: bool,
}

impl Sweeper {
    pub(crate) fn new(
        pool: Arc<Pool>,
        statements: Arc<Statements>,
        config: &MySqlConfig,
        background: Arc<Background>,
    ) -> Self {
        let (after, off) = (Arc::default(), Arc::new(AtomicBool::new(config.keep_rows)));
        let timeout = config.timeout;
        Self { pool, statements, timeout, background, made: AtomicU64::new(0), after, off, has_claims: false }
    }

    /// Takes note that this store has made the row with this id, and sweeps in the background when it is time.
    pub(crate) fn made_row(&self, id: u64) {
        if self.off.load(Ordering::Relaxed) || !self.made.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY) {
            return;
        }
        let (pool, statements, off) = (Arc::clone(&self.pool), Arc::clone(&self.statements), Arc::clone(&self.off));
        let (after, timeout, has_claims) = (Arc::clone(&self.after), self.timeout, self.has_claims);
        self.background.spawn(async move {
            // Not before the task has begun: one that nobody drives would keep them.
            let Ok(mut after) = after.try_lock_owned() else { return };
            // It waits for one: where connections are few, each is in use again by now.
            let Ok(mut connection) = pool.connection(ConnectionClass::Common, Bound::new(timeout)).await else {
                return;
            };
            // Programs that make one row each begin at different places.
            let start = after.unwrap_or_else(|| below(id));
            let removed = async {
                if has_claims {
                    remove_claims(&statements, &mut connection, start, timeout).await?;
                    connection.set_bound(Bound::new(timeout));
                }
                remove_page(&statements, &mut connection, WEEK, start).await
            };
            match removed.await {
                // The first page follows the last.
                Ok(page) => *after = Some(page.last.unwrap_or(0)),
                Err(failed) => off.store(!failed.is_retryable(), Ordering::Relaxed),
            }
        });
    }

    /// Removes all that is unused, page by page.
    pub(crate) async fn remove_unused(&self, unused_for: Duration) -> Result<u64> {
        if unused_for < SHORTEST {
            return Err(Error::invalid(format!("locks unused for less than {SHORTEST:?} are not removed")));
        }
        let micros = i64::try_from(unused_for.as_micros()).map_err(|_| Error::invalid("the period is too long"))?;
        let unused = Unused { micros, never_leased: true };
        let mut after = self.has_claims.then_some(0);
        while let Some(id) = after {
            let mut connection = self.pool.connection(ConnectionClass::Common, Bound::new(self.timeout)).await?;
            after = remove_claims(&self.statements, &mut connection, id, self.timeout).await?;
        }
        let (mut removed, mut after) = (0, Some(0));
        while let Some(id) = after {
            let mut connection = self.pool.connection(ConnectionClass::Common, Bound::new(self.timeout)).await?;
            let page = remove_page(&self.statements, &mut connection, unused, id).await?;
            (removed, after) = (removed + page.removed, page.last);
        }
        Ok(removed)
    }
}

/// A random number below this one.
fn below(id: u64) -> u64 {
    let random =
        Token::random().map_or(0, |token| token.as_bytes().iter().fold(0, |n, byte| n << 8 | u64::from(*byte)));
    random % id.max(1)
}

/// What was found on a page.
struct Page {
    removed: u64,
    /// The id of its last row; none if it is the table's last page.
    last: Option<u64>,
}

/// Removes the unused rows among those that follow an id. Reading locks nothing, and removing waits for no row.
async fn remove_page(statements: &Statements, connection: &mut Connection, unused: Unused, after: u64) -> Result<Page> {
    let Unused { micros, never_leased } = unused;
    let read =
        |question| statements.unused_page().bind(question).bind(micros).bind(never_leased).bind(after).bind(PAGE);
    let rows = connection.numbered_rows(read).await?;
    let is_last = rows.len() < usize::try_from(PAGE).unwrap_or(usize::MAX);
    let last = rows.last().filter(|_| !is_last).map(|row| column(row, 1)).transpose()?;
    let names = rows.iter().map(|row| column::<Option<&[u8]>>(row, 2)).collect::<Result<Vec<_>>>()?;
    let names: Vec<&[u8]> = names.into_iter().flatten().collect();
    if names.is_empty() {
        return Ok(Page { removed: 0, last });
    }
    let size = Size::of(names.len());
    let remove = |_| {
        let named = size.fill(&names).fold(statements.remove_unused(size), |remove, name| remove.bind(*name));
        named.bind(micros).bind(never_leased)
    };
    let removed = match connection.execute(remove, None).await {
        // How many those are is for people: an answer to another statement would count wrongly, no more.
        Ok((done, _)) => done.rows_affected(),
        // They are left for the next time.
        Err(busy) if error::is_row_busy(&busy) => 0,
        Err(failed) => return Err(failed),
    };
    Ok(Page { removed, last })
}

/// Removes claims that lapsed on a page of locks, those whose ids follow this one. Says where the next page begins, if there is one.
/// What lapsed of locks that are in use goes with the next request; this is for those that nobody asks for. Each lock has the time of an
/// operation.
async fn remove_claims(
    statements: &Statements,
    connection: &mut Connection,
    after: u64,
    timeout: Duration,
) -> Result<Option<u64>> {
    let read = |question| statements.lapsed_claims().bind(question).bind(after).bind(PAGE);
    let rows = connection.numbered_rows(read).await?;
    let mut last = after;
    for row in &rows {
        last = column(row, 1)?;
        connection.set_bound(Bound::new(timeout));
        connection.transact(|question| statements.order().clear(question, last), None).await?;
    }
    Ok((rows.len() >= usize::try_from(PAGE).unwrap_or(usize::MAX)).then_some(last))
}
