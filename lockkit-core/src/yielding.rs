//! Asking a holder to yield: a waiter shows at the store that it would like to have the lock, and the holder can look.
//!
//! What is shown is the lease of a second lock, beside the one that is waited for: so a request lapses when its client dies, and every
//! store can keep it as it is.

use crate::{Error, LockKey, LockStore, Query, Result, StoreInfo, Token};

/// What stands before the name of a lock in that of the requests for it.
const PREFIX: &str = "lockkit/yield/";

/// The name of the lock whose holder asks the holder of `key` to yield.
pub(crate) fn request_key(key: &LockKey, info: &StoreInfo) -> Result<LockKey> {
    let most = info.capability.max_key_bytes.min(LockKey::MAX_BYTES).saturating_sub(PREFIX.len());
    if key.as_str().len() > most {
        let why = format!("the holder of a lock can be asked to yield if its name has at most {most} bytes");
        return Err(Error::invalid(why));
    }
    LockKey::new(format!("{PREFIX}{key}"))
}

/// Whether a holder of `key` is asked to yield, by another request than the one with the token of `own`.
pub(crate) async fn is_requested(store: &dyn LockStore, key: &LockKey, own: Option<Token>) -> Result<bool> {
    // Nobody can ask for one with a longer name.
    let Ok(request) = request_key(key, store.info()) else { return Ok(false) };
    let states = store.inspect(&Query::Keys(vec![request])).await?;
    Ok(states.iter().flat_map(|state| &state.holders).any(|holder| own.is_none() || holder.token != own))
}
