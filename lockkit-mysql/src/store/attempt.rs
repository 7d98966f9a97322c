//! What all attempts to get a lease have in common, of whatever kind it is.

use lockkit_core::{AcquireRequest, Fence, FenceClock, FenceRequest, Hold, LockKey, Result, Token, store::Sent};

use crate::{
    client::connection::{Bound, Connection},
    store::{MySqlStore, named_lock_queue::NamedLock},
    wire::{
        name::to_column,
        statements::{Statement, over_fence},
        terms::{MAX_FENCE, microseconds},
    },
};

/// In µs since 1970: a server's clock that is behind this is not set, and fences from it would be numbers of rows.
const LEAST_TIME: u64 = 1 << 50;

impl MySqlStore {
    /// Awaits what is under way for a lease that is to end: a request that is still on its way would queue for nobody, or take the lock
    /// for nobody when this lease has ended. A release awaits it for the same reason. Gives the named lock that the lease came with.
    pub(super) async fn before_replacing(
        &self,
        key: &LockKey,
        from: &Token,
        bound: Bound,
    ) -> Result<Option<NamedLock>> {
        self.grants.forget(from);
        self.pool.settled(from, bound).await?;
        Ok(self.named_locks.named_lock_of(key, from))
    }

    /// Takes the row of a lock by one of the statements that do.
    pub(super) async fn take_row(
        &self,
        connection: &mut Connection,
        request: &AcquireRequest,
        taking: Statement,
        holder: &str,
    ) -> Result<Option<Hold>> {
        let AcquireRequest { claim, fence, .. } = request;
        let statement = |question| {
            let taking = taking
                .bind(fence.floor.get() + 1)
                .bind(fence.span)
                .bind(claim.token.as_bytes().as_slice())
                .bind(holder)
                .bind(over_fence(question))
                .bind(microseconds(request.ttl))
                .bind(to_column(&claim.key));
            match &request.from {
                None => taking,
                Some(from) => taking.bind(from.as_bytes().as_slice()),
            }
        };
        self.grants.forget(&claim.token);
        let sent = self.info.clock.now();
        let (done, question) = connection.execute(statement, Some(claim.token)).await?;
        let first = done.last_insert_id() ^ over_fence(question);
        match done.rows_affected() {
            0 if done.last_insert_id() == 0 => Ok(None),
            1 if is_sane(first, fence) => {
                let (fence, until) = (Fence::new(first), sent + request.ttl);
                let hold = Hold { claim: claim.clone(), fence, span: request.fence.span, until, depth: 1 };
                self.grants.add(&hold);
                Ok(Some(hold))
            }
            _ => Err(connection.out_of_step(Sent::Yes)),
        }
    }
}

/// Whether a grant can have this fence. If not, the answer belongs to another question: one with another number, or one
/// without a number, such as the one that makes the row.
fn is_sane(fence: u64, asked: &FenceRequest) -> bool {
    (asked.floor.get() + 1..MAX_FENCE).contains(&fence) && (asked.clock == FenceClock::Floor || fence > LEAST_TIME)
}
