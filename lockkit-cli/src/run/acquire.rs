//! Waiting for the lock, and saying so.

use std::{convert::Infallible, future::pending, time::Duration};

use lockkit::{Guard, Liveness, Lock, LockKey};

use crate::{
    duration::spoken,
    exit::{Failure, NOT_ACQUIRED, say},
    show::held_by,
};

/// How long one waits without a word.
const SILENT: Duration = Duration::from_secs(1);

/// Acquires the lock; `wait` of `None` is for ever.
pub(super) async fn acquire(
    lock: &Lock,
    key: &LockKey,
    wait: Option<Duration>,
    liveness: &Liveness,
) -> Result<Guard, Failure> {
    let asking = async {
        match wait {
            None => lock.acquire().await.map(Some),
            Some(Duration::ZERO) => lock.try_acquire().await,
            Some(wait) => lock.acquire_within(wait).await,
        }
    };
    let guard = tokio::select! {
        guard = asking => guard?,
        never = announce(lock, key, liveness) => match never {},
    };
    match guard {
        Some(guard) => Ok(guard),
        None => {
            let holder = holder(lock, liveness).await;
            let message = match wait {
                None | Some(Duration::ZERO) => format!("{key:?} is {holder}"),
                Some(wait) => format!("waited {} for {key:?}: it is {holder}", spoken(wait)),
            };
            Err(Failure::new(NOT_ACQUIRED, message))
        }
    }
}

/// Says once, if it takes long, who has the lock.
pub(super) async fn announce(lock: &Lock, key: &LockKey, liveness: &Liveness) -> Infallible {
    tokio::time::sleep(SILENT).await;
    let holder = holder(lock, liveness).await;
    say(&format!("waiting for {key:?}, {holder}"));
    pending().await
}

async fn holder(lock: &Lock, liveness: &Liveness) -> String {
    match lock.inspect().await {
        Ok(state) => held_by(&state, liveness),
        Err(error) => format!("held, or out of reach: {}", error.message()),
    }
}
