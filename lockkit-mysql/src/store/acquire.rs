//! Taking a free lock: one statement. If it takes nothing, the row is read.

use std::time::Duration;

use lockkit_core::{AcquireRequest, Attempt, Contention, FenceClock, Hold, Result, Token};
use tokio::time::Instant;

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::ConnectionClass,
        raw::LONGEST_WAIT,
    },
    store::{MySqlStore, named_lock_queue::QueueTurn, renew},
    wire::{
        row,
        terms::{LockedRow, RenewalTerms, check_floor, microseconds},
    },
};

/// Asks for a lease, and queues on a named lock where the request waits for long enough.
pub(crate) async fn acquire(store: &MySqlStore, request: &AcquireRequest) -> Result<Attempt> {
    store.info.admit(request)?;
    check_floor(request.fence.floor)?;
    if request.is_in_order() {
        return store.ask_in_order(request).await;
    }
    if let Some(from) = request.from {
        return store.attempt_in_place_of(request, &from).await;
    }
    let waits = request.wait >= LONGEST_WAIT;
    match waits.then(|| store.named_locks.turn(&request.claim.key)).flatten() {
        Some(turn) => store.attempt_in_turn(request, turn).await,
        None => store.attempt_row(request, store.bound(request.ttl)).await,
    }
}

impl MySqlStore {
    /// Tries the row. If it is locked, queues on `GET_LOCK` and tries again. If the lock is hot, the queue comes first. All of it ends
    /// one bound after what the request waits for; half of that is for the last look at the row.
    async fn attempt_in_turn(&self, request: &AcquireRequest, mut turn: QueueTurn<'_>) -> Result<Attempt> {
        let whole = self.bound(request.ttl).whole;
        let [queue_ends, ends] = [whole / 2, whole].map(|more| Bound::new(request.wait.saturating_add(more)).at);
        let bound = || self.bound(request.ttl).no_later_than(ends);
        // The server may take that long to answer.
        let may_queue = || Instant::now() + LONGEST_WAIT <= queue_ends;
        if turn.should_ask() {
            let mut connection =
                self.pool.connection(ConnectionClass::Common, bound().no_later_than(queue_ends)).await?;
            if turn.is_contended(&mut connection).await {
                turn.note_contention();
            }
        }
        let mut queued =
            if turn.is_hot() && may_queue() { Some(turn.wait(&self.pool, queue_ends).await) } else { None };
        let mut attempt = self.attempt_row(request, bound()).await?;
        if let Attempt::Contended(contention) = &attempt {
            turn.note_contention();
            // A lease that may end before the wait does is left to the poller.
            let lasts = contention.retry_after.is_some_and(|left| left >= LONGEST_WAIT);
            if queued.is_none() && lasts && !turn.has_named_lock() && may_queue() {
                queued = Some(turn.wait(&self.pool, queue_ends).await);
                attempt = self.attempt_row(request, bound()).await?;
            }
        }
        match attempt {
            Attempt::Granted(hold) => {
                turn.took(request.claim.token, request.ttl);
                Ok(Attempt::Granted(hold))
            }
            Attempt::Contended(contention) => {
                turn.missed();
                // Other clients had the named lock all the time: queue again, rather than poll the row.
                let retry_after = if queued == Some(true) { Some(Duration::ZERO) } else { contention.retry_after };
                Ok(Attempt::Contended(Contention { retry_after, ..contention }))
            }
        }
    }

    /// Takes the place of a lease. Where there is no row, there is none. It is how a lease is taken up, and how one ends: like a release
    /// it does not wait behind those that ask for locks, and gives back the named lock that the former lease came with.
    async fn attempt_in_place_of(&self, request: &AcquireRequest, from: &Token) -> Result<Attempt> {
        let bound = self.bound(request.ttl);
        self.ordered.add_like(from, request.claim.token, request.ttl);
        let named_lock = self.before_replacing(&request.claim.key, from, bound).await?;
        let mut connection = self.pool.connection(ConnectionClass::Reserved, bound).await?;
        let taken = self.take(&mut connection, request).await?;
        drop(named_lock);
        let attempt = match taken {
            Some(hold) => Attempt::Granted(hold),
            None => {
                let found = self.look_after(&mut connection, &request.claim.key).await?;
                self.not_free(&mut connection, request, found).await?
            }
        };
        let over = if matches!(attempt, Attempt::Granted(_)) { from } else { &request.claim.token };
        self.ordered.forget(over);
        Ok(attempt)
    }

    async fn attempt_row(&self, request: &AcquireRequest, bound: Bound) -> Result<Attempt> {
        let mut connection = self.pool.connection(ConnectionClass::Common, bound).await?;
        if let Some(hold) = self.take(&mut connection, request).await? {
            return Ok(Attempt::Granted(hold));
        }
        let found = self.look_after(&mut connection, &request.claim.key).await?;
        if found.is_some() {
            return self.not_free(&mut connection, request, found).await;
        }
        let made = self.make_row(&mut connection, &request.claim.key).await?;
        let attempt = match self.take(&mut connection, request).await? {
            Some(hold) => Attempt::Granted(hold),
            None => row::contended(self.look_after(&mut connection, &request.claim.key).await?),
        };
        self.sweep_after(made, connection);
        Ok(attempt)
    }

    /// The claim has the lock already, or another one has it.
    async fn not_free(
        &self,
        connection: &mut Connection,
        request: &AcquireRequest,
        found: Option<row::LockRow>,
    ) -> Result<Attempt> {
        match found.as_ref().and_then(|lock| lock.lease.as_ref()) {
            Some(lease) if lease.is_of(&request.claim) => self.take_again(connection, request).await,
            _ => Ok(row::contended(found)),
        }
    }

    /// The usual case, in one round trip: takes the lock if its row is there and free, or that of the lease whose place it is to
    /// take.
    async fn take(&self, connection: &mut Connection, request: &AcquireRequest) -> Result<Option<Hold>> {
        let with_clock = request.fence.clock == FenceClock::Store;
        let taking = match request.from {
            None => self.statements.acquire(with_clock),
            Some(_) => self.statements.replace(with_clock),
        };
        self.take_row(connection, request, taking, request.holder.as_str()).await
    }

    /// The claim has the lease already (rule R1): extends it, and gives the grant that is on record.
    async fn take_again(&self, connection: &mut Connection, request: &AcquireRequest) -> Result<Attempt> {
        let renewal = RenewalTerms { ttl: microseconds(request.ttl), depth: None, floor: 0, holder: None };
        let sent = self.info.clock.now();
        let extended = renew::extend(self, connection, &[&request.claim], &renewal, LockedRow::Awaited).await?;
        match self.look_after(connection, &request.claim.key).await? {
            Some(row::LockRow { lease: Some(lease), .. }) if lease.is_of(&request.claim) => {
                // A lease that had run out by then, and is there again, lasts nobody knows how long.
                if extended == 1 {
                    Ok(Attempt::Granted(lease.hold(&request.claim, sent, request.ttl)))
                } else {
                    Err(renew::revived())
                }
            }
            found => Ok(row::contended(found)),
        }
    }
}
