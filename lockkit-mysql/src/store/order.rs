//! Locks that are shared, and those whose waiters are served in the order in which they came.
//!
//! A claim that finds the lock free, and nobody waiting, takes the lock's row by one statement, and gives it back by one. Each other step is one
//! transaction, sent as one text ([`wire::order`](crate::wire::order)). A claim that waits has a row of its own,
//! its place, which lasts a few seconds; each request for it prolongs that. Whoever ends a lease then grants the lock to the next in the
//! queue, until the end of its place at most, for that is what the next one knows of. A table can't wake it: the core's poller
//! sees that its token holds the lock, and asks for the rest. The named locks are left alone, for their order is another one.

use std::time::Duration;

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Contention, Effect, Error, ErrorKind, Fence, Hold, HolderInfo, LockKey, LossReason,
    Mode, Moment, Order, Release, Renewal, Renewed, Result, Token,
    store::{PLACE, REFRESH},
};
use sqlx::mysql::MySqlRow;

use crate::{
    client::{
        connection::{Bound, Connection},
        pool::ConnectionClass,
    },
    store::MySqlStore,
    wire::{
        error::{self, Sent},
        mode,
        row::{self, column},
        settings,
        terms::{LockedRow, MAX_FENCE, Question, RenewalTerms},
    },
};

/// What a renewal of shares says of a lock of which it had no row.
const NOT_FOUND: u64 = 2;

impl MySqlStore {
    /// Asks for a lease that is shared or has an order. A claim that waits has a place in the queue then.
    pub(super) async fn ask_in_order(&self, request: &AcquireRequest) -> Result<Attempt> {
        let (waits, token) = (request.order == Order::Fifo && !request.wait.is_zero(), &request.claim.token);
        self.grants.forget(token);
        let may_have_place = self.ordered.may_know(token);
        let is_new = waits && self.ordered.add(*token, request.ttl);
        self.ask_for_place(request, waits, is_new).await.map_err(|e| {
            if may_have_place {
                // It may have been granted the lock by the end of another's lease, whatever became of the last request.
                return e.unknown_effect();
            }
            if is_new && e.effect() == Effect::None {
                // It has no place, so that nobody has to release it.
                self.ordered.forget(token);
            }
            e
        })
    }

    async fn ask_for_place(&self, request: &AcquireRequest, waits: bool, is_new: bool) -> Result<Attempt> {
        let (bound, from) = (self.bound(request.ttl), request.from.as_ref());
        let (class, named_lock) = match from {
            Some(from) => (ConnectionClass::Reserved, self.before_replacing(&request.claim.key, from, bound).await?),
            None => (ConnectionClass::Common, None),
        };
        let _slot = if from.is_none() && (is_new || !waits) {
            Some(self.entry_slots.slot(&request.claim.key, bound).await?)
        } else {
            None
        };
        let mut connection = self.pool.connection(class, bound).await?;
        // One that waits has a place, which it is to take the lock from.
        let may_be_alone = is_new || !waits;
        let kept = if may_be_alone { None } else { self.keep_place(&mut connection, request).await? };
        let mut attempt = match kept {
            Some(kept) => Some(kept),
            None => self.take_free_or_in_order(&mut connection, request, waits, may_be_alone).await?,
        };
        drop(named_lock);
        if attempt.is_none() && from.is_none() {
            let made = self.make_row(&mut connection, &request.claim.key).await?;
            attempt = self.take_free_or_in_order(&mut connection, request, waits, may_be_alone).await?;
            self.sweep_after(made, connection);
        }
        if let Some(Attempt::Granted(hold)) = &attempt {
            if request.claim.mode == Mode::Exclusive {
                // Also after a try: others may have queued meanwhile.
                self.ordered.add(request.claim.token, request.ttl);
                self.grants.add(hold);
            } else {
                self.ordered.forget(&request.claim.token);
            }
            if let Some(from) = from {
                self.ordered.forget(from);
            }
        }
        // The row was removed twice in between; or there is no lease to be replaced.
        Ok(attempt.unwrap_or_else(|| row::contended(None)))
    }

    /// Prolongs the place of a claim, or the lease that the end of another's gave it. `None` if there is more to do: it is the first that waits, for a
    /// lock that is free or shared, or it has no place.
    async fn keep_place(&self, connection: &mut Connection, request: &AcquireRequest) -> Result<Option<Attempt>> {
        let sent = self.info.clock.now();
        let text = |question| self.statements.keep_place(question, request, PLACE, REFRESH);
        let rows = connection.transact(text, Some(request.claim.token)).await?;
        let [row] = &rows[..] else { return Err(error::odd_reply(Sent::Yes)) };
        if read::<u64>(row, 3)? > 0 {
            return granted(hold(row, 4, &request.claim, sent + request.ttl)?, request).map(Some);
        }
        let again = read::<Option<i64>>(row, 1)?.and_then(|again| u64::try_from(again).ok());
        let waits = |again| -> Result<Attempt> {
            let retry_after = Some(Duration::from_micros(again));
            Ok(Attempt::Contended(Contention { retry_after, holder: holder(row, 2)?, burnt: false }))
        };
        again.map(waits).transpose()
    }

    /// Takes the lock for the claim alone, if nobody has it or waits for it; else by a transaction. `None` if the lock has no row.
    async fn take_free_or_in_order(
        &self,
        connection: &mut Connection,
        request: &AcquireRequest,
        waits: bool,
        may_be_alone: bool,
    ) -> Result<Option<Attempt>> {
        let holder = mode::alone(request.claim.mode, request.holder.as_str());
        let holder = holder.filter(|_| may_be_alone && request.from.is_none());
        let mut asked_alone = holder.is_some();
        if let Some(holder) = holder
            && let Some(hold) = self.take_row(connection, request, self.statements.acquire_alone(), &holder).await?
        {
            return Ok(Some(Attempt::Granted(hold)));
        }
        if may_be_alone && request.from.is_none() && request.claim.mode != Mode::Exclusive {
            let joined = self.join(connection, request).await.map_err(|failed| in_doubt(failed, asked_alone))?;
            if joined.is_some() {
                return Ok(joined);
            }
            // Its answer had a number, so that the one before was none of its own.
            asked_alone = false;
        }
        self.take_in_order(connection, request, waits, asked_alone).await
    }

    /// Comes to others that share the lock, if nobody waits. `None` if there is more to do: then nothing was changed.
    async fn join(&self, connection: &mut Connection, request: &AcquireRequest) -> Result<Option<Attempt>> {
        let AcquireRequest { claim, ttl, fence, .. } = request;
        let sent = self.info.clock.now();
        let text = |question| self.statements.join(question, request);
        let row = one_row(connection, text, Some(claim.token)).await?;
        let hold = |fence_given| Hold {
            claim: claim.clone(),
            fence: Fence::new(fence_given),
            span: fence.span,
            until: sent + *ttl,
            depth: 1,
        };
        read::<Option<u64>>(&row, 1)?.map(|fence| granted(hold(fence), request)).transpose()
    }

    async fn take_in_order(
        &self,
        connection: &mut Connection,
        request: &AcquireRequest,
        waits: bool,
        asked_alone: bool,
    ) -> Result<Option<Attempt>> {
        let sent = self.info.clock.now();
        let text = |question| self.statements.take_in_order(question, request, waits.then_some(PLACE));
        let row = one_row(connection, text, Some(request.claim.token)).await;
        let row = &row.map_err(|failed| in_doubt(failed, asked_alone))?;
        if read::<Option<u64>>(row, 1)?.is_none() {
            return Ok(None);
        }
        if read::<u64>(row, 2)? > 0 {
            return Err(Error::invalid("the semaphore has another number of permits"));
        }
        if !matches!(read::<u64>(row, 3)?, 1 | 2) {
            let left =
                read::<Option<i64>>(row, 9)?.and_then(|left| u64::try_from(left).ok()).map(Duration::from_micros);
            let is_first = read::<u64>(row, 7)? > 0;
            let again = if is_first { left.map_or(REFRESH, |left| left.min(REFRESH)) } else { REFRESH };
            let retry_after = if waits { Some(again) } else { left };
            return Ok(Some(Attempt::Contended(Contention { retry_after, holder: holder(row, 8)?, burnt: false })));
        }
        granted(hold(row, 4, &request.claim, sent + request.ttl)?, request).map(Some)
    }

    /// Ends such a lease, or gives up its place; grants the lock to the next in the queue.
    pub(super) async fn end_in_order(&self, connection: &mut Connection, claim: &Claim) -> Result<Release> {
        // One that is known may have a place, and no share.
        let may_share = claim.mode != Mode::Exclusive && !self.ordered.may_know(&claim.token);
        if may_share && self.leave(connection, claim).await? {
            return Ok(Release::Released { waiters: None });
        }
        let text = |question| self.statements.end_in_order(question, claim);
        let row = &one_row(connection, text, None).await?;
        let release = match (read::<u64>(row, 1)?, read::<u64>(row, 2)?) {
            (1, _) => Release::Released { waiters: None },
            (_, 1) => Release::NotHeld(LossReason::Taken),
            _ => Release::NotHeld(LossReason::Gone),
        };
        // What it asked for may be still to come, and is then to be found by the next release.
        if matches!(release, Release::Released { .. }) || read::<u64>(row, 3)? > 0 {
            self.ordered.forget(&claim.token);
        }
        Ok(release)
    }

    /// Leaves others that share the lock, if nobody waits; says whether it did. If not, there is more to do, and nothing was changed.
    async fn leave(&self, connection: &mut Connection, claim: &Claim) -> Result<bool> {
        let text = |question| self.statements.leave(question, claim);
        Ok(read::<u64>(&one_row(connection, text, None).await?, 1)? > 0)
    }

    /// Extends shares of locks with the same terms, which are in the order of the locks' names. No answer to those whose lock's
    /// row was passed over.
    pub(super) async fn renew_shares(
        &self,
        renewals: &[&Renewal],
        terms: &RenewalTerms,
        locked: LockedRow,
        bound: Bound,
    ) -> Result<Vec<Option<Renewed>>> {
        let mut shares: Vec<(&LockKey, Vec<Token>)> = Vec::new();
        for Renewal { claim, .. } in renewals {
            match shares.last_mut() {
                Some((key, tokens)) if *key == &claim.key => tokens.push(claim.token),
                _ => shares.push((&claim.key, vec![claim.token])),
            }
        }
        let mut connection = self.pool.connection(ConnectionClass::Reserved, bound).await?;
        let sent = self.info.clock.now();
        let text = |question| self.statements.renew_shares(question, &shares, terms, locked);
        let rows = still_writable(connection.transact(text, None).await?)?;
        let read = rows
            .iter()
            .map(|row| Ok((read::<u64>(row, 1)?, read::<u64>(row, 2)?, read::<Option<&[u8]>>(row, 3)?, row)));
        let found = read.collect::<Result<Vec<_>>>()?;
        let answer = |renewal: &&Renewal| {
            let claim = &renewal.claim;
            let number = shares.iter().position(|(key, _)| *key == &claim.key).and_then(|at| u64::try_from(at).ok());
            let mut of_lock = found.iter().filter(|(lock, ..)| Some(*lock) == number).peekable();
            let Some((_, is_held, ..)) = of_lock.peek().copied().copied() else {
                return Err(error::odd_reply(Sent::Yes));
            };
            match of_lock.find(|(_, _, token, _)| *token == Some(claim.token.as_bytes().as_slice())) {
                Some((.., row)) => Ok(Some(Renewed::Held(hold(row, 4, claim, sent + renewal.ttl)?))),
                None if is_held == NOT_FOUND && locked == LockedRow::PassedOver => Ok(None),
                None if is_held == 1 => Ok(Some(Renewed::Lost(LossReason::Taken))),
                None => Ok(Some(Renewed::Lost(LossReason::Gone))),
            }
        };
        renewals.iter().map(answer).collect()
    }
}

/// Runs a transaction that may change something, and gives the row of its answer.
async fn one_row(
    connection: &mut Connection,
    text: impl FnOnce(Question) -> String,
    token: Option<Token>,
) -> Result<MySqlRow> {
    let mut rows = still_writable(connection.transact(text, token).await?)?;
    rows.pop().filter(|_| rows.is_empty()).ok_or_else(|| error::odd_reply(Sent::Yes))
}

/// The answer without its last row, which says whether the server still took writes when all was committed.
fn still_writable(mut rows: Vec<MySqlRow>) -> Result<Vec<MySqlRow>> {
    let last = rows.pop().ok_or_else(|| error::odd_reply(Sent::Yes))?;
    if settings::is_on(read(&last, 1)?) { Err(error::read_only().unknown_effect()) } else { Ok(rows) }
}

/// What an error says of its effect. The answer of the statement before, that nothing changed, has no number: without the number of this one,
/// that statement may have taken the lock.
fn in_doubt(failed: Error, asked_alone: bool) -> Error {
    if asked_alone && !error::is_row_busy(&failed) { failed.unknown_effect() } else { failed }
}

/// # Errors
/// When the fence is none that the claim can have.
fn granted(hold: Hold, request: &AcquireRequest) -> Result<Attempt> {
    let message = if hold.fence.get() >= MAX_FENCE {
        "the fence counter of the lock is out of bounds"
    } else if hold.fence <= request.fence.floor {
        // It was granted in the moment in which it asked for a higher one, or before.
        "the claim has a lease already, with a fence that is not above the one asked for"
    } else {
        return Ok(Attempt::Granted(hold));
    };
    Err(Error::new(ErrorKind::Unexpected, message).unknown_effect())
}

/// Who has the lock, if anybody.
fn holder(row: &MySqlRow, at: usize) -> Result<Option<HolderInfo>> {
    let holder = read::<Option<String>>(row, at)?;
    let words = |holder: &str| HolderInfo::new(mode::sharers(holder).unwrap_or(mode::holder(holder).1));
    Ok(holder.as_deref().map(words))
}

/// The grant in a row: fence, span and depth from this column on.
fn hold(row: &MySqlRow, at: usize, claim: &Claim, until: Moment) -> Result<Hold> {
    let small = |at| read::<u64>(row, at).map(|number| u32::try_from(number).unwrap_or(u32::MAX));
    Ok(Hold {
        claim: claim.clone(),
        fence: Fence::new(read(row, at)?),
        span: small(at + 1)?.max(1),
        until,
        depth: small(at + 2)?,
    })
}

/// Reads a column of an answer that came after the commit.
fn read<'r, T>(row: &'r MySqlRow, at: usize) -> Result<T>
where
    T: sqlx::Decode<'r, sqlx::MySql> + sqlx::Type<sqlx::MySql>,
{
    column(row, at).map_err(Error::unknown_effect)
}
