//! Ending a lease.

use lockkit_core::{Claim, Error, Mode, Release, Result, store::Sent};

use crate::{
    client::{connection::Bound, pool::ConnectionClass},
    store::{MySqlStore, inspect},
    wire::{name::to_column, row::why_not, terms},
};

/// Ends a lease.
pub(crate) async fn release(store: &MySqlStore, claim: &Claim) -> Result<Release> {
    store.info.admit_mode(claim.mode)?;
    let is_ordered = store.ordered.has(claim);
    // One that has the lock alone has its row, unless others have come since.
    let is_alone = store.grants.knows(&claim.token);
    store.grants.forget(&claim.token);
    let bound = Bound::new(store.timeout);
    let named_lock = if is_ordered { None } else { store.named_locks.named_lock_of(&claim.key, &claim.token) };
    // The release follows every statement that was sent for the claim and given up: one of those could take the lock after it.
    store.pool.settled(&claim.token, bound).await?;
    let ends_in_order = is_ordered && !is_alone;
    // Many may give up at once: with all connections at one row, no lease could be renewed.
    let _slot = if ends_in_order { Some(store.leave_slots.slot(&claim.key, bound).await?) } else { None };
    let mut connection = store.pool.connection(ConnectionClass::Reserved, bound).await?;
    if ends_in_order {
        return store.end_in_order(&mut connection, claim).await;
    }
    let token = claim.token.as_bytes().as_slice();
    let statement = |question| {
        // A client that begins to wait makes a claim of the row of one who shares the lock, so that this finds nothing; but it leaves an
        // exclusive row as it is.
        let only_if_nobody_waits = is_ordered && claim.mode == Mode::Exclusive;
        let ending = if only_if_nobody_waits { store.statements.release_alone() } else { store.statements.release() };
        ending.bind(question).bind(to_column(&claim.key)).bind(token)
    };
    // Nobody has to wait for a release that was given up: another one does the same.
    let (done, question) = connection.execute(statement, None).await?;
    match done.rows_affected() {
        1 if terms::is_answer(&done, question) => {
            drop(named_lock);
            store.ordered.forget(&claim.token);
            Ok(Release::Released { waiters: None })
        }
        0 if terms::is_answer(&done, question) && is_ordered => {
            // It may have become one of those that share the lock, or others wait.
            store.end_in_order(&mut connection, claim).await
        }
        0 if terms::is_answer(&done, question) => {
            let has_claims = store.info.capability.fifo;
            let found = inspect::read(store, &mut connection, &[&claim.key], has_claims).await;
            let found = found.map_err(Error::unknown_effect)?.into_values().next();
            let may_have_claim = found.as_ref().is_some_and(|lock| lock.is_shared() || lock.has_queue());
            if has_claims && (may_have_claim || store.ordered.has_forgotten()) {
                // It may be the lease of one of those that share the lock, or a place: what was sent for the claim before it had the lock may
                // have come after its end.
                return store.end_in_order(&mut connection, claim).await;
            }
            // What the claim asked for may have come meanwhile, over another connection.
            let lease =
                found.as_ref().and_then(|lock| lock.lease.as_ref()).filter(|lease| lease.token != Some(claim.token));
            Ok(Release::NotHeld(why_not(lease)))
        }
        _ => Err(connection.out_of_step(Sent::Yes)),
    }
}
