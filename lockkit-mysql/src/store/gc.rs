//! Removing the rows of locks that were not used for long.
//!
//! A row is made when its lock is first used. If names are used once, rows would pile up. So the making of rows drives their
//! removal: for every few rows that a store makes, it reads a page of the table and removes the unused rows of that page. Each
//! time that is at most two statements, in the background; and where there is a table of claims, one more and a short transaction
//! for each lock of the page that has lapsed claims, which is none where nobody shares locks.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use lockkit_core::{
    Error, ErrorKind, Result, Token,
    store::{Background, unpoisoned},
};

use crate::{
    client::{
        connection::{Bound, Connection},
        in_flight::Closing,
        pool::{ConnectionClass, Pool},
    },
    config::MySqlConfig,
    wire::{error, order::CLEARED, row::column, size::Size, statements::Statements},
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
    cursor: Mutex<Cursor>,
    /// Whether rows are to stay, or nothing can be removed.
    off: AtomicBool,
    /// Whether this user may not remove rows of locks; then claims are removed all the same.
    rows_stay: AtomicBool,
}

/// Rows that were read.
struct Page {
    /// The id of the last one, if there is any.
    last: Option<u64>,
    /// Whether the table has no more.
    is_end: bool,
    /// The names of those that are unused.
    unused: Vec<Vec<u8>>,
}

impl Page {
    /// Behind which id the next page begins, if there is one.
    fn next(&self) -> Option<u64> {
        self.last.filter(|_| !self.is_end)
    }
}

/// How far the sweep is.
#[derive(Default)]
struct Cursor {
    /// Where the next page begins, once that is known.
    after: Option<u64>,
    /// One page is swept until then, unless it is done before. A task that nobody drives any more keeps it from no other for longer.
    busy_until: Option<Instant>,
}

impl Sweeper {
    pub(crate) fn new(
        pool: Arc<Pool>,
        statements: Arc<Statements>,
        config: &MySqlConfig,
        background: Arc<Background>,
    ) -> Self {
        Self {
            pool,
            statements,
            timeout: config.timeout,
            background,
            made: AtomicU64::new(0),
            cursor: Mutex::default(),
            off: AtomicBool::new(config.keep_rows),
            rows_stay: AtomicBool::new(false),
        }
    }

    /// Takes note that this store has made the row with this id on this connection, and sweeps in the background when it is time.
    pub(crate) fn made_row(self: &Arc<Self>, id: u64, has_claims: bool, connection: Connection) {
        if self.off.load(Ordering::Relaxed) || !self.made.fetch_add(1, Ordering::Relaxed).is_multiple_of(EVERY) {
            return;
        }
        // One for the connection, and one for each of two steps. Before the right to a connection is given: a runtime that nobody drives must not
        // keep one for each of many rows.
        let Some(after) = self.begin_page(self.timeout.saturating_mul(3)) else { return };
        // Programs that make one row each begin at different places.
        let start = after.unwrap_or_else(|| below(id));
        let (sweeper, bound) = (Arc::clone(self), Bound::new(self.timeout));
        let counted = connection.give_up(bound.at);
        self.background.spawn(async move {
            let swept = sweeper.sweep(start, has_claims, bound, &counted).await;
            unpoisoned(&sweeper.cursor).busy_until = None;
            if let Err(failed) = swept {
                sweeper.off.store(!failed.is_retryable(), Ordering::Relaxed);
            }
        });
    }

    async fn sweep(&self, start: u64, has_claims: bool, bound: Bound, right: &Closing) -> Result<()> {
        let mut connection = self.pool.background_connection(bound).await?;
        let swept = self.sweep_page(&mut connection, start, has_claims).await;
        connection.take_right(right);
        swept
    }

    /// Where the next page begins, as far as that is known; `None` if one is being swept.
    fn begin_page(&self, within: Duration) -> Option<Option<u64>> {
        let (mut cursor, now) = (unpoisoned(&self.cursor), Instant::now());
        if cursor.busy_until.is_some_and(|until| now < until) {
            return None;
        }
        cursor.busy_until = now.checked_add(within);
        Some(cursor.after)
    }

    /// Removes what is unused on a page. Claims that lapsed are looked for on this page alone: in a table with many shared locks the search
    /// would else read all living ones.
    async fn sweep_page(&self, connection: &mut Connection, start: u64, has_claims: bool) -> Result<()> {
        let page = self.read_page(connection, WEEK, start).await?;
        // The first page follows the last.
        unpoisoned(&self.cursor).after = Some(page.next().unwrap_or(0));
        if let Some(last) = page.last.filter(|_| has_claims) {
            self.remove_claims(connection, start, last).await?;
        }
        if self.rows_stay.load(Ordering::Relaxed) {
            return Ok(());
        }
        connection.set_bound(Bound::new(self.timeout));
        match self.remove_rows(connection, WEEK, &page.unused).await {
            Err(failed) if has_claims && failed.kind() == ErrorKind::Denied => {
                self.rows_stay.store(true, Ordering::Relaxed);
                Ok(())
            }
            removed => removed.map(drop),
        }
    }

    /// Removes all that is unused, page by page.
    pub(crate) async fn remove_unused(&self, unused_for: Duration, has_claims: bool) -> Result<u64> {
        if unused_for < SHORTEST {
            return Err(Error::invalid(format!("locks unused for less than {SHORTEST:?} are not removed")));
        }
        let micros = i64::try_from(unused_for.as_micros()).map_err(|_| Error::invalid("the period is too long"))?;
        let unused = Unused { micros, never_leased: true };
        let mut after = has_claims.then_some(0);
        while let Some(id) = after {
            after = self.remove_claims(&mut self.connection().await?, id, u64::MAX).await?;
        }
        let (mut removed, mut after) = (0, Some(0));
        while let Some(id) = after {
            let mut connection = self.connection().await?;
            let page = self.read_page(&mut connection, unused, id).await?;
            removed += self.remove_rows(&mut connection, unused, &page.unused).await?;
            after = page.next();
        }
        Ok(removed)
    }

    async fn connection(&self) -> Result<Connection> {
        self.pool.connection(ConnectionClass::Common, Bound::new(self.timeout)).await
    }

    /// Reads the rows that follow an id, which locks nothing.
    async fn read_page(&self, connection: &mut Connection, unused: Unused, after: u64) -> Result<Page> {
        let Unused { micros, never_leased } = unused;
        let read = |question| {
            self.statements.unused_page().bind(question).bind(micros).bind(never_leased).bind(after).bind(PAGE)
        };
        let rows = connection.numbered_rows(read).await?;
        let is_end = rows.len() < usize::try_from(PAGE).unwrap_or(usize::MAX);
        let names = rows.iter().map(|row| column::<Option<Vec<u8>>>(row, 2)).collect::<Result<Vec<_>>>()?;
        let last = rows.last().map(|row| column(row, 1)).transpose()?;
        Ok(Page { last, is_end, unused: names.into_iter().flatten().collect() })
    }

    /// Removes those of some rows that are unused still, and waits for no row. Gives their number.
    async fn remove_rows(&self, connection: &mut Connection, unused: Unused, names: &[Vec<u8>]) -> Result<u64> {
        if names.is_empty() {
            return Ok(0);
        }
        let Unused { micros, never_leased } = unused;
        let size = Size::of(names.len());
        let remove = |_| {
            let named =
                size.fill(names).fold(self.statements.remove_unused(size), |remove, name| remove.bind(name.clone()));
            named.bind(micros).bind(never_leased)
        };
        match connection.execute(remove, None).await {
            // How many those are is for people: an answer to another statement would count wrongly, no more.
            Ok((done, _)) => Ok(done.rows_affected()),
            // They are left for the next time.
            Err(busy) if error::is_row_busy(&busy) => Ok(0),
            Err(failed) => Err(failed),
        }
    }

    /// Removes claims that lapsed on a page of locks, those whose ids follow one, up to another. Says where the next page begins, if there is one.
    /// What lapsed of locks that are in use goes with the next request; this is for those that nobody asks for. Each text has the time of an
    /// operation.
    async fn remove_claims(&self, connection: &mut Connection, after: u64, up_to: u64) -> Result<Option<u64>> {
        let read = |question| self.statements.lapsed_claims().bind(question).bind(after).bind(up_to).bind(PAGE);
        let rows = connection.numbered_rows(read).await?;
        let mut last = after;
        for row in &rows {
            last = column(row, 1)?;
            let mut cleared = u64::from(CLEARED);
            while cleared == u64::from(CLEARED) {
                connection.set_bound(Bound::new(self.timeout));
                let rows = connection.transact(|question| self.statements.clear(question, last), None).await?;
                cleared = rows.first().map_or(Ok(0), |row| column(row, 1))?;
            }
        }
        Ok((rows.len() >= usize::try_from(PAGE).unwrap_or(usize::MAX)).then_some(last))
    }
}

/// A random number below this one.
fn below(id: u64) -> u64 {
    let random =
        Token::random().map_or(0, |token| token.as_bytes().iter().fold(0, |n, byte| n << 8 | u64::from(*byte)));
    random % id.max(1)
}
