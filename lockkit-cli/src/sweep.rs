//! Leaving a store as it was found, as far as that can be done.

use std::time::{Duration, Instant};

use lockkit::{
    KeyState, LockStore,
    store::{Claim, Query},
};

use crate::interrupt;

/// How long to go on with it. Longer than the longest lease that most cases take.
const LIMIT: Duration = Duration::from_secs(30);
/// Requests that were on their way when the cases ended may still take effect.
const LATE: Duration = Duration::from_millis(300);
/// What stands before the name of a lock in that of the requests to yield it ([`lockkit::Lock::ask_to_yield`]), which are locks, too.
const YIELD: &str = "lockkit/yield/";

/// Releases all locks with this prefix; says what stays in the store, a sentence each.
pub(crate) fn sweep(url: &str, prefix: &str) -> Vec<String> {
    release(url, prefix).into_iter().chain(stays(url)).collect()
}

/// Releases all locks with this prefix, whoever took them; says which may still be held.
pub(crate) fn release(url: &str, prefix: &str) -> Option<String> {
    let (store_url, names) = (url.to_owned(), prefix.to_owned());
    let released = interrupt::block_on(async move { Ok(release_all(&store_url, &names).await) });
    let failed = match released {
        Ok(Ok(left)) => left,
        Ok(Err(error)) => Some(format!("locks may still be held until their leases end, for {error}")),
        Err(interrupted) => Some(format!("locks may still be held ({})", interrupted.message())),
    };
    failed.map(|what| format!("{what}; their names start with {prefix} or {YIELD}{prefix}"))
}

/// Says what could not be released.
async fn release_all(url: &str, prefix: &str) -> lockkit::Result<Option<String>> {
    let store = lockkit::open(url).await?;
    let (started, mut was_clean) = (Instant::now(), false);
    loop {
        let held = held(store.as_ref(), prefix).await?;
        match held.len() {
            0 if was_clean => return Ok(None),
            many if started.elapsed() > LIMIT => return Ok(Some(format!("{many} locks are still held"))),
            _ => {}
        }
        was_clean = held.is_empty();
        for state in &held {
            release_one(store.as_ref(), state).await;
        }
        if was_clean {
            tokio::time::sleep(LATE).await;
        }
    }
}

/// The locks with this prefix that are held, and the requests to yield any of them.
async fn held(store: &dyn LockStore, prefix: &str) -> lockkit::Result<Vec<KeyState>> {
    let mut held = store.inspect(&Query::Prefix(prefix.to_owned())).await?;
    held.extend(store.inspect(&Query::Prefix(format!("{YIELD}{prefix}"))).await?);
    Ok(held)
}

/// What fails is seen in the next look at what is held.
async fn release_one(store: &dyn LockStore, state: &KeyState) {
    for holder in &state.holders {
        if let Some(token) = holder.token {
            drop(store.release(&Claim { key: state.key.clone(), token, mode: holder.mode }).await);
        }
    }
}

/// What a store keeps of a lock that is free, by design.
fn stays(url: &str) -> Option<String> {
    let keeps = [
        (&["redlock"][..], "the fence counters of the locks, which expire in about a week"),
        (&["redis", "valkey"], "the fence counters of the locks, which expire in about an hour"),
        (&["mysql", "mariadb"], "a row for each lock, which goes by itself when it was unused for a week"),
        (&["zk"], "the empty directories of the locks, which the servers remove after a while"),
    ];
    let url = url.to_ascii_lowercase();
    let kept = keeps.into_iter().find(|(schemes, _)| schemes.iter().any(|scheme| url.starts_with(scheme)));
    kept.map(|(_, what)| what.to_owned())
}
