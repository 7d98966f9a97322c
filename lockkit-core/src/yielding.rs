//! Asking a holder to yield: a waiter shows at the store that it would like to have the lock, and the holder can look.
//!
//! What is shown is the lease of a second lock, beside the one that is waited for: so a request lapses when its client dies, and every
//! store can keep it as it is.

use std::{convert::Infallible, sync::Mutex, time::Duration};

use tokio::time::sleep;

use crate::{
    Error, ErrorKind, Guard, LockKey, Query, Result,
    engine::{Engine, Limit},
    lock::Lock,
    store::unpoisoned,
};

/// What stands before the name of a lock in that of the requests for it.
const PREFIX: &str = "lockkit/yield/";
/// After an error of the store, a request is made again so much later.
const AGAIN: Duration = Duration::from_secs(1);

/// The name of the lock whose holder asks the holder of `key` to yield.
fn request_key(key: &LockKey) -> Result<LockKey> {
    LockKey::new(format!("{PREFIX}{key}")).map_err(|_| {
        let most = LockKey::MAX_BYTES - PREFIX.len();
        let why = format!("the holder of a lock can be asked to yield if its name has at most {most} bytes");
        Error::new(ErrorKind::InvalidInput, why)
    })
}

/// Waits for a lock, and has its holder asked to yield meanwhile.
pub(crate) async fn get(lock: &Lock, limit: Limit) -> Result<Option<Guard>> {
    let request = lock.request(request_key(&lock.key()?)?.as_str());
    // Nobody is asked for a lock that is free. Whatever fails is asked for again, with the patience of one that waits.
    match lock.get_unasked(Limit::Try).await {
        Ok(None) => {}
        Err(error) if error.is_retryable() => {}
        answer => return answer,
    }
    let shown = Mutex::new(None);
    let answer = tokio::select! {
        biased;
        answer = lock.get_unasked(limit) => answer?,
        Err(error) = ask(&request, &shown) => return Err(error),
    };
    // The new holder would take the request for one to itself.
    if let Some(request) = shown.into_inner().unwrap_or_default() {
        drop(request.release().await);
    }
    Ok(answer)
}

/// Shows the request, for as long as this is polled: one waiter after another has it.
async fn ask(request: &Lock, shown: &Mutex<Option<Guard>>) -> Result<Infallible> {
    loop {
        match request.acquire().await {
            Ok(guard) => {
                let loss = guard.loss_signal();
                *unpoisoned(shown) = Some(guard);
                loss.lost().await;
            }
            Err(error) if error.is_retryable() => sleep(AGAIN).await,
            Err(error) => return Err(error),
        }
    }
}

/// Whether a holder of `key` is asked to yield.
pub(crate) async fn is_requested(engine: &Engine, key: &LockKey) -> Result<bool> {
    // Nobody can ask for one with a longer name.
    let Ok(request) = request_key(key) else { return Ok(false) };
    let states = engine.store.inspect(&Query::Keys(vec![request])).await?;
    Ok(states.iter().any(|state| !state.holders.is_empty()))
}
