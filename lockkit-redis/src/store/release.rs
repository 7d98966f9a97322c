//! Ending a lease.

use lockkit_core::{Claim, Effect, Error, ErrorKind, LossReason, Mode, Release, Result, store::Sent};
use redis::Value;

use crate::{
    client::node::Route,
    store::RedisStore,
    wire::{error, request::Request},
};

/// Ends a lease, wherever the lock is.
pub(crate) async fn release(store: &RedisStore, claim: &Claim) -> Result<Release> {
    store.info.admit_mode(claim.mode)?;
    let is_in_order = store.is_in_order(claim);
    if is_in_order {
        let release = Box::pin(store.release_in_order(claim)).await;
        // While the slot of a lock moves, a script with all its keys may be refused, which one with the lock alone is not.
        // What timed out was not refused: nobody was reached, or others were not answered.
        let is_refused = |e: &Error| e.effect() == Effect::None && e.kind() != ErrorKind::TimedOut;
        let is_refused = store.nodes.is_cluster() && release.as_ref().is_err_and(is_refused);
        if !is_refused || claim.mode != Mode::Exclusive {
            return release;
        }
    }
    let lock = store.names.lock(&claim.key);
    let mut route = store.nodes.route(&lock).await?;
    loop {
        match release_at(store, &route, claim, &lock).await {
            Ok(release) => {
                if is_in_order {
                    store.ordered.released(claim, &release);
                }
                return Ok(release);
            }
            Err(e) => route = store.nodes.follow(route, e).await?,
        }
    }
}

async fn release_at(
    store: &RedisStore,
    Route { node, asking, .. }: &Route,
    claim: &Claim,
    lock: &str,
) -> Result<Release> {
    let request = Request::release(lock, &claim.token);
    let connection = node.dialer.connection().await?;
    let reply = connection.request(request, None, *asking, store.timeout).await?;
    match reply {
        Value::Int(-1) => Ok(Release::NotHeld(LossReason::Gone)),
        Value::Int(-2) => Ok(Release::NotHeld(LossReason::Taken)),
        Value::Int(-3) => Ok(Release::Released { waiters: None }),
        Value::Int(receivers @ 0..) => {
            let others = receivers - i64::from(node.subscriptions.is_subscribed(lock));
            // A member of a cluster counts only those who listen at it.
            Ok(Release::Released { waiters: Some(u32::try_from(others).unwrap_or(0)) })
        }
        _ => Err(error::odd_reply(Sent::Yes)),
    }
}
