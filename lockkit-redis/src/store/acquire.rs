//! Asking for a lease, and waiting for it.

use std::{sync::Arc, time::Duration};

use lockkit_core::{AcquireRequest, Attempt, Result};
use tokio::time::{Instant, timeout};

use crate::{
    client::node::Route,
    store::{
        RedisStore,
        attempt::{Acquisition, Answer, HeldByAnother, ON_ITS_WAY, SILENT_POLL, contended},
        ordered::Listener,
    },
};

/// A waiter asks at least this often, whatever messages may have been lost.
const SAFETY_POLL: Duration = Duration::from_secs(5);

/// Asks for a lease, for as long as the request says.
pub(crate) async fn acquire(store: &RedisStore, request: &AcquireRequest) -> Result<Attempt> {
    let acquisition = Acquisition::new(store, request)?;
    if acquisition.request.is_in_order() {
        return Box::pin(store.ask_in_order(&acquisition)).await;
    }
    if request.wait.is_zero() {
        return store.ask(&acquisition, None).await.map(|(answer, _)| answer.into_attempt());
    }
    // In a box, like all that most acquisitions do not need: it would take room in every one.
    Box::pin(store.wait(&acquisition, request.wait)).await
}

impl RedisStore {
    /// Asks, and asks again whenever the lock was released, until it is granted or there is reason to report back:
    /// the holder's lease has run out, `wait` is over, or it is time to make sure that no message was lost.
    async fn wait(&self, acquisition: &Acquisition<'_>, wait: Duration) -> Result<Attempt> {
        let deadline = Instant::now().checked_add(wait);
        // Listen before asking, so that a release between the answer and the wait is not missed.
        let lock = &acquisition.lock;
        let known = self.nodes.known(lock).filter(|node| node.subscriptions.is_subscribed(lock));
        let mut waiter = known.map(|node| Listener::new(node, lock.clone()));
        loop {
            let (answer, Route { node, asking, .. }) = self.ask(acquisition, waiter.as_mut()).await?;
            let Answer::Held(HeldByAnother { remaining, holder, is_silent, .. }) = answer else {
                return Ok(answer.into_attempt());
            };
            if asking {
                // Nobody listens at a server that the slot has not arrived at.
                return Ok(contended(Some(ON_ITS_WAY), holder));
            }
            let rest = deadline.map_or(Duration::MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            if rest.is_zero() {
                // Whatever messages came meanwhile: where there are many, there are more before each answer.
                return Ok(contended(Some(Duration::ZERO), holder));
            }
            let Some(listener) = waiter.as_mut().filter(|waiter| Arc::ptr_eq(&waiter.node, &node)) else {
                waiter = Some(Listener::new(node, lock.clone()));
                continue;
            };
            let lapses = remaining.map_or(SAFETY_POLL, |remaining| remaining + Duration::from_millis(1));
            let pause = lapses.min(if is_silent { SILENT_POLL } else { SAFETY_POLL }).min(rest);
            if timeout(pause, listener.called()).await.is_err() {
                if is_silent && pause < lapses.min(rest) {
                    continue;
                }
                return Ok(contended(Some(Duration::ZERO), holder));
            }
        }
    }
}
