//! The statements, each written once.
//!
//! Each that changes a lock is **one** single-row update by the unique key in autocommit: one round trip, one short row
//! lock, no deadlock. Nothing is decided by the number of affected rows as such, which counts found or changed rows
//! depending on the driver: each of these changes a column for certain if it finds its row, so that the two are the same.
//!
//! Time is the server's: `UTC_TIMESTAMP(6)`, the start of the statement. A statement that waits for the row is older than it
//! looks when it comes to it. A lease that it grants ends no sooner than its holder believes, for the holder counts from an
//! even earlier moment. But of two renewals of one lease the one that began first may come to the row last, and its time is
//! the earlier one, while the holder believes what the other said: so **a renewal never moves the end of a lease back**.

use sqlx::{AssertSqlSafe, RawSql, mysql::MySqlArguments, query::Query};

use crate::wire::{
    mode::GROUP_MARK,
    settings::WRITABLE,
    size::Size,
    terms::{Question, literal},
};

/// A statement with its arguments.
pub(crate) type Statement = Query<'static, sqlx::MySql, MySqlArguments>;

/// The statements on one table. The transactions on its claims are in [`order`](crate::wire::order).
pub(crate) struct Statements {
    /// The table's name, quoted.
    pub(crate) table: String,
    /// The name of the table of claims, quoted; empty if it can have none.
    pub(super) claims: String,
}

/// Brings the number of the question back, as the first column of a row or as the insert id. Argument: the number.
const NUMBER: &str = "CAST(? AS UNSIGNED)";

/// The same of a question that only reads: a server that is set to take no writes is not the primary any more, and what it knows is
/// old. An update that finds no row does not look at that itself, and what is read then decides.
fn number_of_primary() -> String {
    format!("{NUMBER} + {WRITABLE}")
}

/// This many of the lowest bits of a question's number come back with a fence, above its own: fences end at 2^62. An answer
/// that is one, two or three answers late or early is noticed.
const NUMBER_BITS: u32 = 2;

/// The number of a question as it is laid over the fence.
pub(crate) fn over_fence(question: Question) -> u64 {
    question << (u64::BITS - NUMBER_BITS)
}

/// The columns that [`inspect`](Statements::inspect) and [`page`](Statements::page) read.
/// What is left of the lease is NULL, or not above zero, if the lock is free.
const COLUMNS: &str = "resource_name, token, fence, span, fence_last, `count`, node_info, \
     TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), expires), id";

/// A page of the locks that are held, by name. Arguments: the last name of the page before; the least name, and the one from which
/// on they are too high; how many.
const HELD_PAGE: &str = "resource_name > ? AND resource_name >= ? AND resource_name < ? AND expires > UTC_TIMESTAMP(6) \
     ORDER BY resource_name LIMIT ?";

/// The server's clock as a fence. Unsigned like the counter: between numbers of both kinds MariaDB's GREATEST compares signed ones,
/// and takes a counter from 2^63 on for a negative number, so that the fence would go back.
const NOW_US: &str = "CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) AS UNSIGNED)";

impl Statements {
    /// The statements on the table with this quoted name, and on that of its claims.
    pub(crate) fn new(table: String, claims: Option<String>) -> Self {
        Self { table, claims: claims.unwrap_or_default() }
    }

    /// Takes a free lock. Arguments: the least fence, the span, the token, the holder, the question [over the
    /// fence](over_fence), the ttl in µs, the name. Gives the fence, under the question, as the insert id.
    pub(crate) fn acquire(&self, with_clock: bool) -> Statement {
        self.take(with_clock, "(expires IS NULL OR expires <= UTC_TIMESTAMP(6))")
    }

    /// Takes a free lock for one who would share it or comes in an order, if nobody waits for it in an order. Arguments: the same, where
    /// the holder is as [`mode`](crate::wire::mode) says.
    ///
    /// To look for those who wait locks nothing. One who comes to wait at the same time may not be seen, and is behind then: which of
    /// the two was first nobody can tell. That the lock is free is seen in its row, which is locked by then.
    pub(crate) fn acquire_alone(&self) -> Statement {
        self.take(true, &format!("(expires IS NULL OR expires <= UTC_TIMESTAMP(6)) AND {}", self.nobody_waits()))
    }

    /// The condition that nobody waits for the lock in an order, which has to be the last. The limit, which is none, keeps newer servers from making one
    /// statement on two tables of it, whose assignments have no order.
    fn nobody_waits(&self) -> String {
        let Self { table, claims } = self;
        let waits = format!("w.lock_id = {table}.id AND w.place > 0 AND w.kept > UTC_TIMESTAMP(6)");
        format!("NOT EXISTS (SELECT 1 FROM {claims} AS w FORCE INDEX (turns) WHERE {waits}) LIMIT 1")
    }

    /// Takes a lock in the place of the exclusive lease that has it. Arguments: the same, and the token of that lease.
    pub(crate) fn replace(&self, with_clock: bool) -> Statement {
        // Not that of one that shares the lock: its name has a mark in front.
        self.take(with_clock, "token = ? AND expires > UTC_TIMESTAMP(6) AND ORD(COALESCE(node_info, '')) <> 1")
    }

    /// Assignments take effect from left to right, so that the fence is computed from the old counter and the new counter
    /// from the fence. That the lock was free, or whose it was, is in the `WHERE`; who holds it by the same claim is found by looking.
    ///
    /// The fence is never below the server's clock, although a counter that is there would do: a server that lost the last
    /// second of its data in a crash has the counter, but an old one.
    fn take(&self, with_clock: bool, by: &str) -> Statement {
        let clock = if with_clock { format!(", {NOW_US}") } else { String::new() };
        query(format!(
            "UPDATE {} SET fence = GREATEST(fence_last + 1, ?{clock}) + {WRITABLE}, span = ?, fence_last = fence + span - 1, token = ?, \
             node_info = ?, `count` = 1 + 0 * LAST_INSERT_ID(fence ^ {NUMBER}), \
             expires = UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND, version = version + 1, update_time = UTC_TIMESTAMP(6) \
             WHERE resource_name = ? AND {by}",
            self.table
        ))
    }

    /// Makes the row of a lock, free, if there is none. Argument: the name.
    pub(crate) fn insert(&self) -> Statement {
        query(format!(
            "INSERT IGNORE INTO {} (resource_name, create_time, update_time) \
             VALUES (?, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL {WRITABLE} MICROSECOND)",
            self.table
        ))
    }

    /// Ends a lease. Arguments: the question, the name, the token. Gives the question as the insert id.
    pub(crate) fn release(&self) -> Statement {
        self.end("expires > UTC_TIMESTAMP(6)")
    }

    /// The same if nobody waits for the lock in an order. One who comes to wait at the same time may not be seen, as in
    /// [`acquire_alone`](Self::acquire_alone), and finds the lock free when it asks again.
    pub(crate) fn release_alone(&self) -> Statement {
        self.end(&format!("expires > UTC_TIMESTAMP(6) AND {}", self.nobody_waits()))
    }

    fn end(&self, condition: &str) -> Statement {
        query(format!(
            "UPDATE {} SET token = NULL, expires = NULL, `count` = 0 * LAST_INSERT_ID({NUMBER}) + {WRITABLE}, \
             version = version + 1, update_time = UTC_TIMESTAMP(6) \
             WHERE resource_name = ? AND token = ? AND {condition}",
            self.table
        ))
    }

    /// Extends leases; one that lasts longer already is left as it is. Arguments: the ttl in µs, the depth or NULL, the question, the least that the counter is to become, the
    /// holder's name or NULL; then as many names as the size says, for the index; then as many pairs of a name and a token.
    /// Gives the question as the insert id, if there are any.
    pub(crate) fn renew(&self, size: Size) -> Statement {
        query(format!("UPDATE {} SET {} WHERE {}", self.table, extended(), held_by_claims(size)))
    }

    /// The same, and passes over rows that somebody keeps locked. Arguments: the names, the pairs, then all that stands before the
    /// names there.
    ///
    /// It waits for no row: the rows are found by name, as all that use them do, those that are locked are skipped, and what is
    /// extended is locked by then, and still looked at once more. `LIMIT` makes the server find them first, and `STRAIGHT_JOIN` keeps it
    /// from reading the table in another order.
    pub(crate) fn renew_unlocked(&self, size: Size) -> Statement {
        let (table, Size(limit)) = (&self.table, size);
        query(format!(
            "UPDATE (SELECT id AS free, token AS by_claim FROM {table} WHERE {} LIMIT {limit} FOR UPDATE SKIP LOCKED) AS unlocked \
             STRAIGHT_JOIN {table} ON id = free AND token = by_claim AND expires > UTC_TIMESTAMP(6) SET {}",
            held_by_claims(size),
            extended()
        ))
    }

    /// Reads locks. Arguments: the question, then names, as many as the size says.
    pub(crate) fn inspect(&self, size: Size) -> Statement {
        let names = size.list("?");
        query(format!("SELECT {}, {COLUMNS} FROM {} WHERE resource_name IN ({names})", number_of_primary(), self.table))
    }

    /// Reads locks that are held, in the order of their names. Arguments: the question, the last name of the page before,
    /// the first name, the first name beyond, how many.
    pub(crate) fn page(&self) -> Statement {
        query(format!("SELECT {}, {COLUMNS} FROM {} WHERE {HELD_PAGE}", number_of_primary(), self.table))
    }

    /// The same as [`inspect`](Self::inspect), with the claims of the locks: several rows for a lock that is shared.
    pub(crate) fn inspect_claims(&self, size: Size) -> Statement {
        // The limit is no limit: names are unique.
        self.with_claims(&format!("resource_name IN ({}) LIMIT {}", size.list("?"), size.0), "l.id")
    }

    /// The same as [`page`](Self::page), likewise.
    pub(crate) fn page_claims(&self) -> Statement {
        self.with_claims(HELD_PAGE, "l.resource_name")
    }

    /// Reads rows of locks, `l`, with how many wait for each lock, and with the claims that share it. Rows of one lock follow each other,
    /// in an order that stays.
    ///
    /// Those that wait are counted once for each lock, and not for each claim that shares it: the limit that ends the choice of `rows`
    /// keeps the server from making one query of the two.
    fn with_claims(&self, rows: &str, order: &str) -> Statement {
        let Self { table, claims } = self;
        let is_shared =
            format!("l.token IS NULL AND l.expires > UTC_TIMESTAMP(6) AND LEFT(l.node_info, 1) = '{GROUP_MARK}'");
        let waiting = format!(
            "SELECT COUNT(*) FROM {claims} AS w FORCE INDEX (turns) WHERE w.lock_id = r.id AND w.place > 0 AND w.kept > UTC_TIMESTAMP(6)"
        );
        query(format!(
            "SELECT {}, l.resource_name, l.token, l.fence, l.span, l.fence_last, l.`count`, l.node_info, \
             TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), l.expires), l.id, {is_shared}, l.waiting, \
             c.token, c.mode, c.permits, c.fence, c.`count`, c.node_info, \
             TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), c.expires) \
             FROM (SELECT r.*, ({waiting}) AS waiting FROM {table} AS r WHERE {rows}) AS l LEFT JOIN {claims} AS c \
             ON c.lock_id = IF({is_shared}, l.id, NULL) AND c.place = 0 AND c.expires > UTC_TIMESTAMP(6) ORDER BY {order}, c.token",
            number_of_primary()
        ))
    }

    /// Reads those that wait for a lock in order, the next one first. Arguments: the question, the name, how many.
    pub(crate) fn queue(&self) -> Statement {
        let Self { table, claims } = self;
        query(format!(
            "SELECT {}, w.mode, w.permits, w.node_info FROM {table} AS l STRAIGHT_JOIN {claims} AS w FORCE INDEX (turns) \
             ON w.lock_id = l.id WHERE l.resource_name = ? AND w.place > 0 AND w.kept > UTC_TIMESTAMP(6) \
             ORDER BY w.place LIMIT ?",
            number_of_primary()
        ))
    }

    /// Reads ids of locks on which there are claims that lapsed a while ago. Arguments: the question, the id before the
    /// first, the last id, how many.
    pub(crate) fn lapsed_claims(&self) -> Statement {
        query(format!(
            "SELECT DISTINCT {}, lock_id FROM {} WHERE lock_id > ? AND lock_id <= ? AND {LAPSED} ORDER BY lock_id LIMIT ?",
            number_of_primary(),
            self.claims
        ))
    }

    /// Reads ids, and of rows that are long unused also the names. Arguments: the question, since when in µs, whether also those
    /// that no lease ever used, the last id of the page before, how many.
    pub(crate) fn unused_page(&self) -> Statement {
        query(format!(
            "SELECT {}, id, IF({UNUSED}, resource_name, NULL) FROM {} WHERE id > ? ORDER BY id LIMIT ?",
            number_of_primary(),
            self.table
        ))
    }

    /// Removes those of some rows that are long unused, unless somebody keeps them locked. Arguments: names, as many as the
    /// size says; then since when in µs, and whether also those that no lease ever used.
    ///
    /// One statement, so that no row stays locked for longer than it runs, whatever becomes of the client. It waits for nobody:
    /// the rows are found and locked by name, as all that use them do, those that are locked are skipped, and what is removed is
    /// locked by then. `LIMIT` makes the server find them before it removes any, and `STRAIGHT_JOIN` keeps it from reading the
    /// table in another order.
    pub(crate) fn remove_unused(&self, size: Size) -> Statement {
        let (table, names, Size(limit)) = (&self.table, size.list("?"), size);
        query(format!(
            "DELETE gone FROM (SELECT id + {WRITABLE} AS id FROM {table} WHERE resource_name IN ({names}) AND {UNUSED} LIMIT {limit} \
             FOR UPDATE SKIP LOCKED) AS unused STRAIGHT_JOIN {table} AS gone ON gone.id = unused.id"
        ))
    }

    /// Reads the text of a record and its name, which is NULL if there is none. Always one row. Arguments: the question, the name.
    pub(crate) fn record(&self) -> Statement {
        query(format!(
            "SELECT {}, COALESCE(node_info, ''), resource_name FROM (SELECT 1) AS one LEFT JOIN {} ON resource_name = ?",
            number_of_primary(),
            self.table
        ))
    }

    /// Changes the text of a record from what was seen. Arguments: the new text, 1 or for an empty one 0, the question, the
    /// name, the text that was seen. Gives the question as the insert id.
    pub(crate) fn set_record(&self) -> Statement {
        // A counter of 1 keeps the row from those that are removed as unused. The text is compared byte for byte, whatever
        // collation somebody gave the column.
        query(format!(
            "UPDATE {} SET node_info = ?, fence_last = ? + {WRITABLE}, `count` = 0 * LAST_INSERT_ID({NUMBER}), \
             version = version + 1, update_time = UTC_TIMESTAMP(6) WHERE resource_name = ? \
             AND CAST(COALESCE(node_info, '') AS BINARY) = CAST(? AS BINARY)",
            self.table
        ))
    }
}

/// Makes the row of a lock if there is none, and locks it for the transaction in any case.
pub(crate) fn insert_or_lock(table: &str, name: &[u8]) -> Text {
    // The assignment changes nothing. An INSERT IGNORE would take a shared lock on a row that is there, and two
    // transactions that both go on to an exclusive one are a deadlock.
    text(format!(
        "INSERT INTO {table} (resource_name, create_time, update_time) \
         VALUES ({}, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6) + INTERVAL {WRITABLE} MICROSECOND) ON DUPLICATE KEY UPDATE version = version",
        literal(name)
    ))
}

/// Reads a lock as it is, not as it was when the transaction began, and locks its row. The first column is in the place of a number.
pub(crate) fn lock_by_name(table: &str, name: &[u8]) -> Text {
    text(format!("SELECT {WRITABLE}, {COLUMNS} FROM {table} WHERE resource_name = {} FOR UPDATE", literal(name)))
}

/// The same by the row's id, and without its neighbourhood: by name, MariaDB also locks the gap in front of it.
pub(crate) fn lock_by_id(table: &str, id: u64) -> Text {
    text(format!("SELECT {WRITABLE}, {COLUMNS} FROM {table} WHERE id = {id} FOR UPDATE"))
}

/// A statement in somebody else's transaction. It is sent as text, in one exchange: when the future of one that has to be
/// prepared first is dropped, the driver loses count of the answers, and the user's connection waits for ever.
pub(crate) type Text = RawSql;

/// A statement whose arguments are part of it: numbers, and bytes as [`literal`] spells them.
pub(crate) fn text(statement: String) -> Text {
    sqlx::raw_sql(AssertSqlSafe(statement))
}

/// Asks for nothing but the number of the question, of a server that takes writes: without a row that it is to read, a statement may
/// not have looked at that. Argument: the question.
pub(crate) fn number() -> Statement {
    query(format!("SELECT {}", number_of_primary()))
}

/// Waits for a named lock of the server, for one second. Arguments: the question, its name. Gives 1 if it was had, 0 if not.
pub(crate) fn get_named_lock() -> Statement {
    sqlx::query("SELECT CAST(? AS UNSIGNED), CAST(GET_LOCK(?, 1) AS SIGNED)")
}

/// Gives a named lock back, whose name needs no quoting. It is a text, which is sent at once: a statement with arguments may have to be
/// prepared before.
pub(crate) fn release_named_lock(question: Question, name: &str) -> String {
    format!("SELECT CAST({question} AS UNSIGNED), CAST(RELEASE_LOCK('{name}') AS SIGNED)")
}

/// The connection that has a named lock, or NULL. Arguments: the question, its name.
pub(crate) fn named_lock_holder() -> Statement {
    sqlx::query("SELECT CAST(? AS UNSIGNED), CAST(IS_USED_LOCK(?) AS SIGNED)")
}

/// What a renewal changes.
fn extended() -> String {
    format!(
        "expires = GREATEST(expires, UTC_TIMESTAMP(6) + INTERVAL ? MICROSECOND), \
     `count` = COALESCE(?, `count`) + 0 * LAST_INSERT_ID(CAST(? AS UNSIGNED)), \
     fence_last = GREATEST(fence_last, ?) + {WRITABLE}, node_info = COALESCE(?, node_info), \
     version = version + 1, update_time = UTC_TIMESTAMP(6)"
    )
}

/// The rows with these names, as far as the leases are still those of these claims.
fn held_by_claims(size: Size) -> String {
    format!(
        "resource_name IN ({}) AND (resource_name, token) IN ({}) AND expires > UTC_TIMESTAMP(6)",
        size.list("?"),
        size.list("(?, ?)")
    )
}

/// Free for longer than some µs, and with a counter that begins anew above where it was: the server's clock has left it
/// behind, and it follows that clock (one that is below 2^50 never did). A row that no lease ever used may be one that
/// transactions use all the time: their locks leave no trace.
pub(crate) const UNUSED: &str = "(expires IS NULL OR expires < UTC_TIMESTAMP(6)) \
     AND update_time < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND \
     AND fence_last < TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)) \
     AND (fence_last >= 1125899906842624 OR (fence_last = 0 AND ?))";

/// A claim that is over for so long that nobody can mean it any more.
pub(crate) const LAPSED: &str = "IF(place > 0, kept, expires) < UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE";

fn query(text: String) -> Statement {
    // The table's name, checked and quoted, is all in it that is not written here.
    sqlx::query(AssertSqlSafe(text))
}
