//! Waiting for the lock, and saying so.

use std::{convert::Infallible, future::pending, time::Duration};

use lockkit::{Guard, Lock, LockKey};

use crate::{
    exit::{Failure, NOT_ACQUIRED, say},
    show::held_by,
};

/// How long one waits without a word.
const SILENT: Duration = Duration::from_secs(1);

/// Acquires the lock; `wait` of `None` is for ever.
pub(super) async fn acquire(lock: &Lock, key: &LockKey, wait: Option<Duration>) -> Result<Guard, Failure> {
    let asking = async {
        match wait {
            None => lock.acquire().await.map(Some),
            Some(Duration::ZERO) => lock.try_acquire().await,
            Some(wait) => lock.acquire_within(wait).await,
        }
    };
    let guard = tokio::select! {
        guard = asking => guard?,
        never = announce(lock, key) => match never {},
    };
    match guard {
        Some(guard) => Ok(guard),
        None => Err(Failure::new(NOT_ACQUIRED, format!("{key:?} is {}", holder(lock).await))),
    }
}

/// Says once, if it takes long, who has the lock.
async fn announce(lock: &Lock, key: &LockKey) -> Infallible {
    tokio::time::sleep(SILENT).await;
    let holder = holder(lock).await;
    say(&format!("waiting for {key:?}, {holder}"));
    pending().await
}

async fn holder(lock: &Lock) -> String {
    match lock.inspect().await {
        Ok(state) => held_by(&state),
        Err(_) => "held by another".to_owned(),
    }
}
