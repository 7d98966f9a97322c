//! Short names for what the tests of a store ask it, and for what they expect of its answers.

use std::time::{Duration, Instant};

use lockkit_core::{
    Attempt, Claim, Contention, Hold, LockKey, LockStore, LossReason, Mode, Release, Renewal, Renewed, Result, Token,
};
use tokio::time::sleep;

/// A new exclusive claim on the lock of this name.
///
/// # Panics
/// If no lock can have this name.
#[must_use]
#[track_caller]
pub fn claim(name: &str) -> Claim {
    claim_as(Mode::Exclusive, name)
}

/// A new claim on the lock of this name in this mode.
///
/// # Panics
/// If no lock can have this name.
#[must_use]
#[track_caller]
pub fn claim_as(mode: Mode, name: &str) -> Claim {
    Claim { key: LockKey::new(name).expect("a name"), token: Token::random().expect("random bytes"), mode }
}

/// The hold of a claim that was granted its lock.
///
/// # Panics
/// If it was not granted the lock.
#[track_caller]
pub fn granted(attempt: Attempt) -> Hold {
    match attempt {
        Attempt::Granted(hold) => hold,
        other @ Attempt::Contended(_) => panic!("not granted: {other:?}"),
    }
}

/// What the store said to a claim that was not granted its lock.
///
/// # Panics
/// If it was granted the lock.
#[track_caller]
pub fn contended(attempt: Attempt) -> Contention {
    match attempt {
        Attempt::Contended(contention) => contention,
        other @ Attempt::Granted(_) => panic!("not contended: {other:?}"),
    }
}

/// Asks for one renewal.
///
/// # Errors
/// The store's.
///
/// # Panics
/// If the store gives more answers than one, or none.
pub async fn renew(store: &dyn LockStore, renewal: &Renewal) -> Result<Renewed> {
    let mut answers = store.renew(std::slice::from_ref(renewal)).await;
    assert_eq!(answers.len(), 1, "one answer for each renewal");
    answers.remove(0)
}

/// The hold of a lease that was renewed.
///
/// # Panics
/// If it is lost, or the store fails.
#[track_caller]
pub fn held(renewed: Result<Renewed>) -> Hold {
    match renewed.expect("renew") {
        Renewed::Held(hold) => hold,
        other @ Renewed::Lost(_) => panic!("not held: {other:?}"),
    }
}

/// Why a lease was not renewed.
///
/// # Panics
/// If it was renewed, or the store fails.
#[track_caller]
pub fn lost(renewed: Result<Renewed>) -> LossReason {
    match renewed.expect("renew") {
        Renewed::Lost(reason) => reason,
        other @ Renewed::Held(_) => panic!("not lost: {other:?}"),
    }
}

/// Ends the lease of a claim.
///
/// # Panics
/// If it has none, or the store fails.
pub async fn free(store: &dyn LockStore, claim: &Claim) {
    let released = store.release(claim).await.expect("release");
    assert!(matches!(released, Release::Released { .. }), "not released: {released:?}");
}

/// Waits until something is true, for 5 s at most. It is looked at every 2 ms.
///
/// # Panics
/// If it is not true by then.
pub async fn eventually(what: &str, is_true: impl AsyncFnMut() -> bool) {
    eventually_within(Duration::from_secs(5), what, is_true).await;
}

/// Waits until something is true, for no longer than this bound. It is looked at every 2 ms.
///
/// # Panics
/// If it is not true by then.
pub async fn eventually_within(bound: Duration, what: &str, mut is_true: impl AsyncFnMut() -> bool) {
    let start = Instant::now();
    while !is_true().await {
        assert!(start.elapsed() < bound, "never: {what}");
        sleep(Duration::from_millis(2)).await;
    }
}
