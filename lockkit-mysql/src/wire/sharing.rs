//! The short transactions of a claim that comes to others that share the lock, and of one that leaves them.
//!
//! Where nobody waits and no lease has lapsed, there is nobody to serve and nothing to remove: less than half of the statements of
//! [`order`](crate::wire::order) is enough. Its rules hold here, too. A step that finds anything else changes nothing and says so,
//! and is to be taken as a whole.

use lockkit_core::{AcquireRequest, Claim, LockKey, Mode};

use crate::wire::{
    mode::{GROUP_MARK, columns, group},
    name::to_column,
    order::{NOW, NOW_US, commit, text, token},
    settings::WRITABLE,
    statements::Statements,
    terms::{Question, literal, microseconds},
};

impl Statements {
    /// Makes a claim one of those that share the lock in the same mode, if there is room and nobody waits. The answer is one row before the
    /// last: the question, and the fence, or NULL if nothing was changed.
    pub(crate) fn join(&self, question: Question, request: &AcquireRequest) -> String {
        let Self { table: locks, claims } = self;
        let AcquireRequest { claim, ttl, fence, holder, .. } = request;
        let ((mode, limit), me) = (columns(claim.mode), token(&claim.token));
        let (span, least, holder) = (fence.span, fence.floor.get() + 1, text(holder.as_str()));
        let ends = format!("{NOW} + INTERVAL {} MICROSECOND", microseconds(*ttl));
        let words = literal(group(claim.mode).as_bytes());
        let room = match claim.mode {
            Mode::Permit { .. } => format!(
                "AND (SELECT COUNT(*) FROM {claims} AS m FORCE INDEX (turns) WHERE m.lock_id = @id AND m.place = 0) < {limit}"
            ),
            _ => String::new(),
        };
        let mut sql = self.lock_shared(&claim.key, &format!("CAST(node_info AS BINARY) = {words}"));
        // If the lease of another has lapsed, the whole step is to remove it: where those that come never leave, nothing else would.
        sql += &format!(
            "SELECT @id, GREATEST(CAST(@last AS UNSIGNED) + 1, CAST({least} AS UNSIGNED), {NOW_US}) INTO @joined, @fence FROM DUAL WHERE {nobody_waits} \
             AND NOT EXISTS (SELECT 1 FROM {claims} AS m FORCE INDEX (turns) WHERE m.lock_id = @id AND m.place = 0 AND m.expires <= {NOW}) \
             AND NOT EXISTS (SELECT 1 FROM {claims} AS m WHERE m.lock_id = @id AND m.token = {me}) {room}; \
             INSERT INTO {claims} (lock_id, token, place, mode, permits, fence, span, `count`, ttl, expires, kept, node_info) \
             SELECT @joined, {me}, 0, {mode}, {limit}, @fence, {span}, 1, 0, {ends}, {ends}, {holder} FROM DUAL WHERE @joined IS NOT NULL; \
             UPDATE {locks} SET expires = GREATEST(expires, {ends}), fence_last = @fence + {span} - 1, version = version + 1, \
             update_time = {NOW} WHERE id = @joined; \
             SELECT CAST({question} AS UNSIGNED), CAST(@fence AS UNSIGNED); {commit}",
            nobody_waits = self.has_no_queue(),
            commit = commit(question)
        );
        sql
    }

    /// Ends a claim that shares the lock, if nobody waits. The answer is one row before the last: the question, and whether it did.
    pub(crate) fn leave(&self, question: Question, claim: &Claim) -> String {
        let Self { table: locks, claims } = self;
        let me = token(&claim.token);
        let mut sql = self.lock_shared(&claim.key, &format!("LEFT(node_info, 1) = '{GROUP_MARK}'"));
        // A lease of another that has lapsed is removed by the whole step, likewise.
        sql += &format!(
            "SELECT @id INTO @left FROM DUAL WHERE {nobody_waits} \
             AND EXISTS (SELECT 1 FROM {claims} AS m WHERE m.lock_id = @id AND m.token = {me} AND m.place = 0) \
             AND (SELECT m.expires FROM {claims} AS m FORCE INDEX (turns) WHERE m.lock_id = @id AND m.place = 0 ORDER BY m.expires LIMIT 1) > {NOW}; \
             {delete} WHERE c.lock_id = @left AND c.token = {me}; \
             SELECT expires INTO @ends FROM {claims} FORCE INDEX (turns) WHERE lock_id = @left AND place = 0 ORDER BY expires DESC LIMIT 1; \
             UPDATE {locks} SET expires = CAST(@ends AS DATETIME(6)), version = version + 1, update_time = {NOW} WHERE id = @left; \
             SELECT CAST({question} AS UNSIGNED), CAST(@left IS NOT NULL AS UNSIGNED); {commit}",
            nobody_waits = self.has_no_queue(),
            delete = self.delete(),
            commit = commit(question)
        );
        sql
    }

    /// Begins a transaction, and locks the row of a lock, if claims share it whose row is like this.
    fn lock_shared(&self, key: &LockKey, like: &str) -> String {
        let (locks, name) = (&self.table, literal(to_column(key)));
        format!(
            "{}SET @id = NULL, @now = NULL, @last = {WRITABLE}, @joined = NULL, @fence = NULL, @left = NULL, @ends = NULL; \
             SELECT id, UTC_TIMESTAMP(6), fence_last INTO @id, @now, @last FROM {locks} WHERE resource_name = {name} \
             AND token IS NULL AND expires > UTC_TIMESTAMP(6) AND {like} FOR UPDATE; ",
            self.begin()
        )
    }

    /// The condition that nobody has a place in the queue of the lock that was found, not even one that has lapsed.
    fn has_no_queue(&self) -> String {
        let claims = &self.claims;
        format!("NOT EXISTS (SELECT 1 FROM {claims} AS w FORCE INDEX (turns) WHERE w.lock_id = @id AND w.place > 0)")
    }
}
