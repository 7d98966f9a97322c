//! Transactions on locks that are shared, or whose waiters have an order: each is one text of several statements.
//!
//! The whole is sent at once, so that a client that stops in the middle of anything keeps no row locked for long: the server goes on
//! to the end, or, if a statement fails and the client says nothing, closes the connection and rolls back. Each begins with the row of the lock, `FOR UPDATE`. **Claims of a lock are changed only by those who
//! have its row locked**, so that there is nothing to deadlock on, and all that was decided still holds when it is written. There
//! are two exceptions. Who waits prolongs its own place: that is one row, and a column that is in no index, so that this waits for
//! nothing while it has the row. And what has long lapsed is removed by a statement that skips all rows that are locked. What one
//! statement finds out, the next ones find in variables of the session.
//!
//! **Claims are locked by the primary key alone, and by equality.** A range would lock the first claim of the next lock, too, and two
//! indexes in two orders are a deadlock. So what is to be changed is found first, by `SELECT … INTO`, which locks nothing; a `SET`
//! and a join would lock what they read.
//!
//! Each text says itself that no transaction follows its own: by the setting `completion_type` one would, and would keep all that
//! comes later on the connection from others.
//!
//! While claims share a lock, its row has no token, an `expires` that is that of the claim that lasts longest, and a `node_info`
//! that begins with [`GROUP_MARK`]: to a client that knows of no claims the lock is held by another. A claim counts only under such a
//! row. One that shares the lock with nobody may be the row itself ([`mode`](crate::wire::mode)): each text here makes a claim of it before it
//! does anything else, so that there is one form to go on from, and nobody waits behind such a row. The short texts of
//! [`sharing`](crate::wire::sharing) leave it alone. A step whose condition does not hold is given NULL in place of the lock's id, and finds
//! nothing.
//!
//! **A `SET` of several variables computes all values before it assigns any, and a `SELECT … INTO` one after the other**: what reads a
//! variable that was just assigned is a statement of its own.

use std::time::Duration;

use lockkit_core::{AcquireRequest, Claim, LockKey, Token};

use crate::wire::{
    mode::{ALONE, DIGITS, EXCLUSIVE, GROUP_MARK, PERMIT, PERMITS, READERS, SHARED, columns},
    name::to_column,
    settings::WRITABLE,
    statements::{LAPSED, Statements},
    terms::{LockedRow, Question, RenewalTerms, literal, microseconds},
};

/// So many claims are let in by one transaction at most. The others follow with the next one.
const STEP: u32 = 100;
pub(super) const NOW: &str = "CAST(@now AS DATETIME(6))";
/// How a transaction begins and ends. An error stops a text in its middle, and its transaction stays open until the client ends
/// it: a server that hears nothing of the client for two seconds does so itself.
const BEGIN: &str = "SET SESSION wait_timeout = 2; START TRANSACTION; ";
const COMMIT: &str = "COMMIT AND NO CHAIN NO RELEASE; SET SESSION wait_timeout = DEFAULT";

impl Statements {
    /// Takes a lock, or a place in its queue. The answer is one row before the [last](commit): the question, the lock's id or NULL if it has no row, whether
    /// another limit is in use, what the claim has (0 nothing, 1 the lock alone, 2 a share, 3 a place), fence, span, depth;
    /// whether it is the first in the queue; who has the lock, if anybody, and in how many µs that may change.
    ///
    /// One that waits keeps its place for so long. One that is to take the lock in the place of an exclusive lease goes before all that wait.
    pub(crate) fn take_in_order(
        &self,
        question: Question,
        request: &AcquireRequest,
        place: Option<Duration>,
    ) -> String {
        let Self { table: locks, claims } = self;
        let AcquireRequest { claim, ttl, fence, holder, from, .. } = request;
        let (mode, limit) = columns(claim.mode);
        let (me, ttl, delete) = (token(&claim.token), microseconds(*ttl), self.delete());
        let (place, waits) = (place.map_or(0, microseconds), place.is_some());
        let (span, least) = (fence.span, fence.floor.get() + 1);
        let holder = text(holder.as_str());
        let ends = format!("{NOW} + INTERVAL {ttl} MICROSECOND");
        let keeps = format!("{NOW} + INTERVAL {place} MICROSECOND");
        let mut sql = self.enter(claim);
        // It may have the lock, by this claim.
        sql += &format!(
            "UPDATE {locks} SET expires = GREATEST(expires, {ends}), version = version + 1, update_time = {NOW} \
             WHERE id = IF(@mine, @id, NULL); \
             UPDATE {claims} FORCE INDEX (PRIMARY) SET expires = GREATEST(expires, {ends}) WHERE lock_id = @shared_lock AND token = {me} AND place = 0; \
             SET @asks = IF(@mine OR @shares, NULL, @id); "
        );
        if mode == PERMIT {
            // Those that hold or await a permit agree on the number, so that one of them tells of all.
            sql += &format!(
                "SELECT permits <> {limit} INTO @other FROM {claims} WHERE lock_id = @asks AND mode = {PERMIT} \
                 AND (place = 0 OR kept > {NOW}) LIMIT 1; \
                 SET @asks = IF(@other, NULL, @asks); "
            );
        }
        if let Some(from) = from {
            // The lock is as good as free, for this claim and for those that are let in beside it.
            sql += &format!(
                "SET @asks = IF(@live AND COALESCE(@owner = {}, 0), @asks, NULL); SET @kind = IF(@asks IS NULL, @kind, NULL); ",
                token(from)
            );
        }
        let behind = format!("GREATEST(CAST(COALESCE(@last_place, 0) AS UNSIGNED) + 1, {NOW_US})");
        let at = if from.is_some() { "1" } else { &behind };
        sql += &format!(
            "SELECT MAX(place) INTO @last_place FROM {claims} WHERE lock_id = @asks; \
             INSERT INTO {claims} (lock_id, token, place, mode, permits, fence, span, `count`, ttl, expires, kept, node_info) \
             SELECT @asks, {me}, {at}, {mode}, {limit}, {least}, {span}, 0, \
             {ttl}, {keeps}, {keeps}, {holder} FROM DUAL WHERE @asks IS NOT NULL ON DUPLICATE KEY UPDATE kept = {keeps}, \
             fence = GREATEST(fence, {least}); "
        );
        sql += &self.serve(&format!("IF(token = {me}, {ends}, LEAST({ITS_END}))"));
        if !waits {
            sql += &format!("{delete} WHERE c.lock_id = @id AND c.token = {me} AND c.place > 0; ");
        }
        sql += &format!(
            "SELECT CAST({question} AS UNSIGNED), l.id, CAST(@other > 0 AS UNSIGNED), \
             CAST(CASE WHEN l.token = {me} AND l.expires > {NOW} THEN 1 WHEN c.place = 0 THEN 2 WHEN c.place > 0 THEN 3 ELSE 0 END AS UNSIGNED), \
             CAST(COALESCE(c.fence, l.fence) AS UNSIGNED), CAST(COALESCE(c.span, l.span) AS UNSIGNED), \
             CAST(COALESCE(c.`count`, l.`count`) AS UNSIGNED), \
             CAST(COALESCE(c.place <= (SELECT w.place FROM {claims} AS w FORCE INDEX (turns) \
             WHERE w.lock_id = @id AND w.place > 0 AND w.kept > {NOW} ORDER BY w.place LIMIT 1), 1) AS UNSIGNED), \
             {}, \
             CAST(TIMESTAMPDIFF(MICROSECOND, {NOW}, LEAST(l.expires, COALESCE((SELECT MIN(m.expires) FROM {claims} AS m \
             WHERE m.lock_id = @id AND m.place = 0), l.expires))) AS SIGNED) \
             FROM (SELECT 1) AS one LEFT JOIN {locks} AS l ON l.id = @id \
             LEFT JOIN {claims} AS c ON c.lock_id = l.id AND c.token = {me}; {}",
            self.holder(NOW),
            commit(question)
        );
        sql
    }

    /// Prolongs the place of a claim in the queue, or the lease that it was granted with the lock alone. It may have come to ask for a higher fence. The
    /// answer is one row: the question; in how many microseconds to ask again, if it waits behind others for a lock that is held, or is the
    /// first for one that is held exclusively, so that there is nothing else to do; the holder, if there is one; whether it has the lock,
    /// with fence, span and depth. Without a row of the lock the id is 0, which none has.
    ///
    /// One that waits has no use for the row of the lock, and does not lock it.
    pub(crate) fn keep_place(
        &self,
        question: Question,
        request: &AcquireRequest,
        place: Duration,
        refresh: Duration,
    ) -> String {
        let Self { table: locks, claims } = self;
        let AcquireRequest { claim, ttl, fence, .. } = request;
        let (me, ttl, place) = (token(&claim.token), microseconds(*ttl), microseconds(place));
        let (name, least) = (literal(to_column(&claim.key)), fence.floor.get() + 1);
        let (refresh, mark) = (microseconds(refresh), u32::from(ALONE));
        format!(
            "SET @id = {WRITABLE}, @granted = NULL; \
             SELECT id, IF(token = {me} AND expires > UTC_TIMESTAMP(6), id, NULL) INTO @id, @granted FROM {locks} WHERE resource_name = {name}; \
             UPDATE {locks} SET expires = GREATEST(expires, UTC_TIMESTAMP(6) + INTERVAL {ttl} MICROSECOND), version = version + 1 + {WRITABLE}, \
             update_time = UTC_TIMESTAMP(6) WHERE id = @granted AND token = {me} AND expires > UTC_TIMESTAMP(6); \
             SET @mine = ROW_COUNT(); \
             UPDATE {claims} FORCE INDEX (PRIMARY) SET kept = UTC_TIMESTAMP(6) + INTERVAL {place} MICROSECOND, \
             fence = GREATEST(fence, {least}) WHERE lock_id = @id AND token = {me} AND place > 0 AND kept > UTC_TIMESTAMP(6); \
             SELECT CAST({question} AS UNSIGNED) + {WRITABLE}, CAST(CASE WHEN l.expires > UTC_TIMESTAMP(6) AND c.kept > UTC_TIMESTAMP(6) THEN \
             CASE WHEN c.place > (SELECT w.place FROM {claims} AS w FORCE INDEX (turns) WHERE w.lock_id = @id AND w.place > 0 \
             AND w.kept > UTC_TIMESTAMP(6) ORDER BY w.place LIMIT 1) THEN {refresh} \
             WHEN l.token IS NOT NULL AND ORD(COALESCE(l.node_info, '')) <> {mark} \
             THEN LEAST({refresh}, TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), l.expires)) END END AS SIGNED), {}, CAST(COALESCE(@mine AND l.token = {me}, 0) AS UNSIGNED), \
             l.fence, l.span, l.`count` FROM (SELECT 1) AS one LEFT JOIN {locks} AS l ON l.id = @id \
             LEFT JOIN {claims} AS c ON c.lock_id = l.id AND c.token = {me} AND c.place > 0",
            self.holder("UTC_TIMESTAMP(6)")
        )
    }

    /// Ends a claim, whatever it has. The answer is one row: the question, whether it had the lock, whether another has it, whether it shared the
    /// lock or had a place.
    pub(crate) fn end_in_order(&self, question: Question, claim: &Claim) -> String {
        let Self { table: locks, claims } = self;
        let (me, delete) = (token(&claim.token), self.delete());
        let mut sql = self.enter(claim);
        sql += &format!(
            "{delete} WHERE c.lock_id = @id AND c.token = {me}; SET @had = ROW_COUNT() > 0; \
             SELECT MAX(expires), @mine OR @shares AND MAX(expires) IS NULL INTO @ends, @free FROM {claims} WHERE lock_id = @shared_lock AND place = 0; \
             UPDATE {locks} SET token = NULL, expires = IF(@free, NULL, CAST(@ends AS DATETIME(6))), `count` = 0, \
             version = version + 1, update_time = {NOW} WHERE id = IF(@mine OR @shares, @id, NULL); \
             SET @kind = IF(@free, NULL, @kind), @shared_lock = IF(@free, NULL, @shared_lock); "
        );
        sql += &self.serve(&format!("LEAST({ITS_END})"));
        sql += &format!(
            "SELECT CAST({question} AS UNSIGNED), CAST(@mine OR @shares AS UNSIGNED), CAST(@live AND NOT @mine AND NOT @shares AS UNSIGNED), \
             CAST(@had AS UNSIGNED); "
        );
        sql + &commit(question)
    }

    /// Extends shares of locks: of each lock those of some tokens. The answer has a row for each that was extended, and one for
    /// each lock of which none was: the question, the number of the lock, whether anybody has it (2 if there is no such row, or it
    /// was passed over), token, fence, span, depth. No lease is shortened: a transaction that waited for a row has an older time
    /// than one that began later and came first.
    ///
    /// Of several locks none may be waited for: those who have the row of one lock may not wait for another one's while they keep
    /// claims from others.
    pub(crate) fn renew_shares(
        &self,
        question: Question,
        shares: &[(&LockKey, Vec<Token>)],
        terms: &RenewalTerms,
        locked: LockedRow,
    ) -> String {
        debug_assert!(shares.len() == 1 || locked == LockedRow::PassedOver);
        let Self { table: locks, claims } = self;
        let ends = format!("{NOW} + INTERVAL {} MICROSECOND", terms.ttl);
        let depth = terms.depth.map_or(String::new(), |depth| format!(", `count` = {depth}"));
        let holder = terms.holder.as_ref().map_or(String::new(), |holder| format!(", node_info = {}", text(holder)));
        let floor = terms.floor;
        let mut sql = self.begin();
        for (number, (key, tokens)) in shares.iter().enumerate() {
            let tokens: Vec<String> = tokens.iter().map(token).collect();
            let mine = format!("token IN ({}) AND place = 0 AND expires > {NOW}", tokens.join(", "));
            sql += &self.lock(key, locked);
            sql += &format!(
                "SET @ends = NULL; \
                 SELECT MAX(expires) INTO @ends FROM {claims} WHERE lock_id = @shared_lock AND {mine}; \
                 SET @some = IF(@ends IS NULL, NULL, @shared_lock); \
                 UPDATE {claims} FORCE INDEX (PRIMARY) SET expires = GREATEST(expires, {ends}){depth}{holder} WHERE lock_id = @some AND {mine}; \
                 SELECT MAX(expires) INTO @ends FROM {claims} WHERE lock_id = @some AND place = 0; \
                 UPDATE {locks} SET expires = CAST(@ends AS DATETIME(6)), fence_last = GREATEST(fence_last, {floor}), \
                 version = version + 1, update_time = {NOW} WHERE id = @some; \
                 SELECT CAST({question} AS UNSIGNED), CAST({number} AS UNSIGNED), CAST(IF(@id IS NULL, 2, @live) AS UNSIGNED), \
                 token, fence, span, `count` \
                 FROM (SELECT 1) AS one LEFT JOIN {claims} ON lock_id = @some AND {mine}; "
            );
        }
        sql + &commit(question)
    }

    /// Removes what has long lapsed of a lock's claims, but for rows that somebody has locked, and [so many](CLEARED) at most. The answer is one row: the question,
    /// and how many those are.
    pub(crate) fn clear(&self, question: Question, lock: u64) -> String {
        let claims = &self.claims;
        format!(
            "DELETE gone FROM (SELECT token AS who FROM {claims} FORCE INDEX (PRIMARY) WHERE lock_id = {lock} + {WRITABLE} AND {LAPSED} LIMIT {CLEARED} \
             FOR UPDATE SKIP LOCKED) AS old STRAIGHT_JOIN {claims} AS gone FORCE INDEX (PRIMARY) \
             ON gone.lock_id = {lock} AND gone.token = old.who; SELECT CAST({question} AS UNSIGNED), CAST(ROW_COUNT() AS UNSIGNED)"
        )
    }

    /// Begins a transaction, with the table of claims opened for writing: while that is altered, or locked as a whole, nobody is to wait
    /// for it with the row of a lock. That would keep a holder from renewing its lease, which needs the row alone.
    pub(super) fn begin(&self) -> String {
        format!("{BEGIN}{} WHERE FALSE; ", self.delete())
    }

    /// Locks the row of a lock, and notes how it is held. One who has it alone is noted as one that shares it.
    fn lock(&self, key: &LockKey, locked: LockedRow) -> String {
        let locks = &self.table;
        let name = literal(to_column(key));
        let skip = if locked == LockedRow::PassedOver { " SKIP LOCKED" } else { "" };
        // That there is such a mark is seen by the number of the character: some collations take it for nothing at all, and each holder
        // for one who shares the lock.
        let (mark, digits) =
            (u32::from(ALONE), format!("SUBSTRING(node_info, 2, {DIGITS}) REGEXP '^[0-9]{{{DIGITS}}}$'"));
        let is_alone = format!("ORD(node_info) = {mark} AND {digits}");
        let is_shared = format!("IF(token IS NULL, LEFT(node_info, 1) = '{GROUP_MARK}', {is_alone})");
        format!(
            "SET @id = NULL, @now = NULL, @live = {WRITABLE}, @owner = NULL, @info = '', @last = 0, @lone = NULL, @shared_lock = NULL; \
             SELECT id, UTC_TIMESTAMP(6), COALESCE(expires > UTC_TIMESTAMP(6), 0), token, node_info, fence_last, \
             IF(expires > UTC_TIMESTAMP(6) AND token IS NOT NULL AND {is_alone}, id, NULL), \
             IF(expires > UTC_TIMESTAMP(6) AND {is_shared}, id, NULL) \
             INTO @id, @now, @live, @owner, @info, @last, @lone, @shared_lock FROM {locks} WHERE resource_name = {name} FOR UPDATE{skip}; {}",
            self.claim_of_row()
        )
    }

    /// Makes a claim of the lease of one who has the lock alone, and has the row say so. Claims that share it already are what is left of
    /// leases that are over: else the row would say that it is shared.
    fn claim_of_row(&self) -> String {
        let (Self { table: locks, claims }, delete) = (self, self.delete());
        let (limit, name) = (format!("CAST(SUBSTRING(@info, 2, {DIGITS}) AS UNSIGNED)"), DIGITS + 2);
        format!(
            "{delete} WHERE c.lock_id = @lone AND (c.place = 0 OR c.token = @owner); \
             INSERT INTO {claims} (lock_id, token, place, mode, permits, fence, span, `count`, ttl, expires, kept, node_info) \
             SELECT id, token, 0, IF({limit} = 0, {SHARED}, {PERMIT}), {limit}, fence, span, `count`, 0, expires, expires, \
             SUBSTRING(node_info, {name}) FROM {locks} WHERE id = @lone; \
             UPDATE {locks} SET token = NULL, `count` = 0, version = version + 1, update_time = {NOW}, \
             node_info = IF({limit} = 0, '{GROUP_MARK}{READERS}', CONCAT('{GROUP_MARK}{PERMITS}', {limit})) WHERE id = @lone; "
        )
    }

    /// Begins the transaction of a claim, locks the row of its lock, notes what it and others have, and removes what has lapsed, and what is left of those
    /// whose lock was taken from them. Mostly there is nothing: to look for it locks nothing.
    ///
    /// Of the places only the first and the claim's own are checked, for a long queue would take long to read. Lapsed places behind the first stay
    /// until one in front has lapsed, and every later read skips them.
    fn enter(&self, claim: &Claim) -> String {
        let (claims, delete, me) = (&self.claims, self.delete(), token(&claim.token));
        let over = "CAST(@over AS DATETIME(6))";
        let mine = format!("m.token = {me} AND m.place = 0 AND m.expires > {NOW}");
        format!(
            "{}{}\
             SET @owner = IF(@lone IS NULL, @owner, NULL), @over = IF(@shared_lock IS NULL, '9999-12-31', @now), @other = 0, \
             @first = NULL, @limit = 0, @alone = NULL, @group = NULL, @next = NULL; \
             SELECT EXISTS (SELECT 1 FROM {claims} AS g FORCE INDEX (turns) WHERE g.lock_id = @id AND g.place = 0 AND g.expires <= {over}) \
             OR COALESCE((SELECT w.kept <= {NOW} FROM {claims} AS w FORCE INDEX (turns) WHERE w.lock_id = @id AND w.place > 0 ORDER BY w.place LIMIT 1), 0) \
             OR EXISTS (SELECT 1 FROM {claims} AS w WHERE w.lock_id = @id AND w.token = {me} AND w.place > 0 AND w.kept <= {NOW}), \
             COALESCE((SELECT m.mode FROM {claims} AS m FORCE INDEX (turns) WHERE m.lock_id = @shared_lock AND m.place = 0 AND m.expires > {NOW} LIMIT 1), \
             IF(@live, {EXCLUSIVE}, NULL)), \
             @live AND COALESCE(@owner = {me}, 0), \
             EXISTS (SELECT 1 FROM {claims} AS m WHERE m.lock_id = @shared_lock AND {mine}) \
             INTO @lapsed, @kind, @mine, @shares; \
             {delete} WHERE c.lock_id = IF(@lapsed, @id, NULL) AND IF(c.place = 0, c.expires <= {over}, c.kept <= {NOW}); ",
            self.begin(),
            self.lock(&claim.key, LockedRow::Awaited)
        )
    }

    /// Who has the lock `l` at this moment, or NULL; of several one.
    fn holder(&self, now: &str) -> String {
        let members =
            format!("SELECT m.node_info FROM {} AS m WHERE m.lock_id = l.id AND m.place = 0 LIMIT 1", self.claims);
        format!(
            "CASE WHEN l.expires > {now} THEN IF(l.token IS NULL, COALESCE(({members}), l.node_info), l.node_info) END"
        )
    }

    /// Removes claims, by the primary key.
    pub(super) fn delete(&self) -> String {
        format!("DELETE c FROM {} AS c FORCE INDEX (PRIMARY)", self.claims)
    }

    /// Grants the lock to those in front of the queue, as far as there is room, until this moment.
    fn serve(&self, until: &str) -> String {
        let Self { table: locks, claims } = self;
        // Those in front, with their numbers, and how many up to each are of another kind.
        let front = format!(
            "(SELECT f.*, ROW_NUMBER() OVER (ORDER BY place) AS number, SUM(mode <> @first) OVER (ORDER BY place) AS others \
             FROM (SELECT token, place, mode, fence, span FROM {claims} FORCE INDEX (turns) \
             WHERE lock_id = @group AND place > 0 AND kept >= {NOW} ORDER BY place LIMIT {STEP}) AS f)"
        );
        // The number, from 1, among those who are let in; 0 for others.
        let number = "FIND_IN_SET(HEX(token), @let_in)";
        let delete = self.delete();
        let group = "COALESCE(@group, @shared_lock)";
        // An exclusive lock is free to the first alone; others come in beside those of their kind.
        let fits = format!("(@kind IS NULL OR @kind = mode AND @kind <> {EXCLUSIVE})");
        format!(
            "SELECT mode, permits, IF({fits} AND mode = {EXCLUSIVE}, @id, NULL), IF({fits} AND mode <> {EXCLUSIVE}, @id, NULL), \
             token, GREATEST(CAST(@last AS UNSIGNED) + 1, fence, {NOW_US}), span, node_info, {until} \
             INTO @first, @limit, @alone, @group, @next, @fence, @span, @who, @until FROM {claims} FORCE INDEX (turns) \
             WHERE lock_id = @id AND place > 0 ORDER BY place LIMIT 1; \
             UPDATE {locks} SET token = @next, fence = @fence, span = @span, fence_last = @fence + @span - 1, node_info = @who, \
             `count` = 1, expires = CAST(@until AS DATETIME(6)), version = version + 1, update_time = {NOW} WHERE id = @alone; \
             {delete} WHERE c.lock_id = @alone AND c.token = @next; \
             SELECT IF(@first = {PERMIT}, CAST(@limit AS SIGNED) - CAST(COUNT(*) AS SIGNED), {STEP}) INTO @room FROM {claims} FORCE INDEX (turns) \
             WHERE lock_id = IF(@first = {PERMIT}, @shared_lock, NULL) AND place = 0; \
             SELECT GROUP_CONCAT(HEX(token) ORDER BY place), MAX(span), COUNT(*) * MAX(span), \
             GREATEST(CAST(@last AS UNSIGNED) + 1, MAX(fence), {NOW_US}) INTO @let_in, @each, @taken, @base \
             FROM {front} AS q WHERE others = 0 AND number <= @room; \
             UPDATE {claims} FORCE INDEX (PRIMARY) SET fence = @base + ({number} - 1) * @each, `count` = 1, \
             expires = {until}, place = 0 WHERE lock_id = @group AND {number} > 0; \
             SELECT MAX(expires) INTO @ends FROM {claims} WHERE lock_id = {group} AND place = 0; \
             UPDATE {locks} SET token = NULL, `count` = 0, expires = CAST(@ends AS DATETIME(6)), \
             node_info = CASE WHEN @base IS NULL THEN node_info WHEN @first = {PERMIT} THEN CONCAT('{GROUP_MARK}{PERMITS}', @limit) \
             ELSE '{GROUP_MARK}{READERS}' END, fence_last = COALESCE(@base + @taken - 1, fence_last), \
             version = version + 1, update_time = {NOW} WHERE id = {group} AND @ends IS NOT NULL; "
        )
    }
}

/// Ends a transaction by which a lease may have been granted or extended. The answer has one more row: the question, and whether the
/// server takes no writes by then. It may have been told so between two statements of the text, and what came after that may be
/// missing at the primary that takes its place.
pub(super) fn commit(question: Question) -> String {
    format!("{COMMIT}; SELECT CAST({question} AS UNSIGNED), CAST(@@GLOBAL.read_only AS CHAR)")
}

/// Ends a transaction without effect. The answer is the question.
pub(crate) fn roll_back(question: Question) -> String {
    format!("ROLLBACK AND NO CHAIN NO RELEASE; SET SESSION wait_timeout = DEFAULT; SELECT CAST({question} AS UNSIGNED)")
}

/// The moment as a fence.
pub(super) const NOW_US: &str = "CAST(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', CAST(@now AS DATETIME(6))) AS UNSIGNED)";
/// What a claim gets that did not ask just now: it knows only that its place lasts. A short ttl may be over before it can ask, so
/// that it gets a second. By the clock of now: the transaction may have waited for the row since its own moment.
const ITS_END: &str = "UTC_TIMESTAMP(6) + INTERVAL GREATEST(ttl, 1000000) MICROSECOND, kept";

/// So many lapsed claims are removed from one lock at a time.
pub(crate) const CLEARED: u32 = 1000;

pub(super) fn token(token: &Token) -> String {
    literal(token.as_bytes())
}

pub(super) fn text(text: &str) -> String {
    format!("CONVERT({} USING utf8mb4)", literal(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use lockkit_core::{FenceRequest, HolderInfo, Mode, Order};

    use super::*;

    /// The values of a `SET` with the variables that they are for, in their order.
    fn assignments(list: &str) -> Vec<(&str, &str)> {
        let (mut depth, mut is_text) = (0, false);
        let parts = list.split(|character| {
            is_text ^= character == '\'';
            depth += i32::from(character == '(') - i32::from(character == ')');
            character == ',' && depth == 0 && !is_text
        });
        parts.map(|part| part.trim().split_once(" = ").expect("an assignment")).collect()
    }

    fn reads(value: &str, variable: &str) -> bool {
        value.match_indices(variable).any(|(start, _)| {
            let rest = value[start + variable.len()..].chars().next();
            !rest.is_some_and(|next| next.is_alphanumeric() || next == '_')
        })
    }

    #[test]
    fn no_value_reads_what_its_own_statement_assigns() {
        let statements = Statements::new("`l`".to_owned(), Some("`c`".to_owned()));
        let key = LockKey::new("k").unwrap();
        let claim = |mode| Claim { key: key.clone(), token: Token::random().unwrap(), mode };
        let (fence, from) = (FenceRequest::default(), Token::random().unwrap());
        let mut texts = Vec::new();
        for mode in [Mode::Exclusive, Mode::Shared, Mode::Permit { limit: NonZeroU32::MIN }] {
            let claim = claim(mode);
            for (place, from) in [(None, Some(from)), (None, None), (Some(Duration::from_secs(6)), None)] {
                let (claim, holder, ttl) = (claim.clone(), HolderInfo::new("h"), Duration::from_secs(1));
                let request = AcquireRequest {
                    wait: ttl,
                    order: Order::Fifo,
                    fence,
                    from,
                    ..AcquireRequest::new(claim, ttl, holder)
                };
                texts.push(statements.take_in_order(1, &request, place));
                texts.push(statements.join(1, &request));
                texts.push(statements.keep_place(1, &request, Duration::from_secs(6), Duration::from_secs(2)));
            }
            texts.push(statements.end_in_order(1, &claim));
            texts.push(statements.leave(1, &claim));
        }
        let terms = RenewalTerms { ttl: 1, depth: Some(1), floor: 0, holder: Some("h".to_owned()) };
        texts.push(statements.renew_shares(1, &[(&key, vec![from])], &terms, LockedRow::Awaited));
        let mut lists = 0;
        for list in texts.iter().flat_map(|text| text.split(';')).filter_map(|part| part.trim().strip_prefix("SET @")) {
            let list = format!("@{list}");
            let assigned = assignments(&list);
            for (at, (_, value)) in assigned.iter().enumerate() {
                let before = assigned.iter().take(at).find(|(variable, _)| reads(value, variable));
                assert!(before.is_none(), "{before:?} is read in {list}");
            }
            lists += 1;
        }
        for part in texts.iter().flat_map(|text| text.split(';')).filter(|part| part.contains(" INTO @")) {
            let (values, rest) = part.split_once(" INTO @").expect("checked");
            let assigned = rest
                .split(" FROM ")
                .next()
                .expect("a list")
                .split(", ")
                .map(|name| name.trim_start_matches('@').trim());
            for variable in assigned {
                assert!(!reads(values, &format!("@{variable}")), "{variable} is read in {part}");
            }
            lists += 1;
        }
        assert!(lists > 50, "{lists}");
    }
}
