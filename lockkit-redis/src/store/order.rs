//! Locks that are shared, and those whose waiters are served in the order in which they came: `queue.lua`.
//!
//! A claim that waits has a place at the server for a few seconds, which each request for it prolongs. It listens on a channel of
//! its own, on which it hears that the release of another has granted it the lock; the first in the queue listens on the
//! channel of the lock as well, for those who hold it without a thought of the queue. A place outlasts the call of
//! [`acquire`](lockkit_core::LockStore::acquire) in which it was taken: the core asks again with the same token, or releases it.

use std::{sync::Arc, time::Duration};

use lockkit_core::{
    AcquireRequest, Attempt, Claim, Effect, FenceClock, LossReason, Mode, Order, Release, Renewal, Result, Token,
    store::REFRESH,
};
use redis::{Cmd, Value};
use tokio::time::{Instant, timeout};

use crate::{
    client::{connection::Connection, node::Route},
    store::{
        RedisStore,
        attempt::{Acquisition, Answer, HeldByAnother, ON_ITS_WAY, SILENT_POLL, contended},
        ordered::{Listener, OpenClaim},
    },
    wire::{
        error::{self, Sent},
        order, redirect,
    },
};

impl RedisStore {
    /// Asks for a lease that is shared or has an order, and waits for it for a while: its place stays until it is released.
    pub(super) async fn ask_in_order(&self, acquisition: &Acquisition<'_>) -> Result<Attempt> {
        let mut asked = self.ordered.ask(&acquisition.request.claim);
        let outcome = self.ask_for_place(acquisition, &mut asked).await;
        outcome.map_err(|e| match asked.place {
            // It may have been granted the lock by the release of another, whatever became of the last request.
            Some(_) => e.unknown_effect(),
            None => {
                if e.effect() == Effect::None {
                    asked.refused();
                }
                e
            }
        })
    }

    async fn ask_for_place(&self, acquisition: &Acquisition<'_>, asked: &mut OpenClaim<'_>) -> Result<Attempt> {
        let AcquireRequest { wait, order, .. } = *acquisition.request;
        let give_back = Instant::now() + wait.min(REFRESH);
        loop {
            let (answer, Route { node, asking, .. }) = self.ask(acquisition, asked.place.as_mut()).await?;
            let held = match answer {
                Answer::Granted(hold) => {
                    asked.granted();
                    return Ok(Attempt::Granted(hold));
                }
                Answer::Paused(_) => {
                    asked.refused();
                    return Ok(answer.into_attempt());
                }
                Answer::Held(held) => held,
            };
            if wait.is_zero() {
                asked.refused();
                return Ok(Answer::Held(held).into_attempt());
            }
            if order == Order::Any {
                // It asks for no place, and the core with another token each time.
                asked.refused();
                return Ok(contended(Some(held.look_again().min(SILENT_POLL)), held.holder));
            }
            if asking {
                // Nobody listens at a server that the slot has not arrived at.
                return Ok(contended(Some(ON_ITS_WAY), held.holder));
            }
            let Some(place) = asked.place.as_mut().filter(|place| Arc::ptr_eq(&place.node, &node)) else {
                let channel = self.names.reserved(&format!("turn-{}", Token::random()?.reveal()));
                let mut place = Listener::new(node, channel);
                place.first = held.is_first.then(|| place.node.subscriptions.listen(&acquisition.lock));
                asked.place = Some(place);
                continue;
            };
            if held.is_first && place.first.is_none() {
                place.first = Some(place.node.subscriptions.listen(&acquisition.lock));
                continue;
            }
            if !held.is_first {
                place.first = None;
            }
            let left = give_back.saturating_duration_since(Instant::now());
            // It has been told, or it is time to look again.
            _ = timeout(left.min(held.look_again()), place.called()).await;
            if Instant::now() >= give_back {
                return Ok(contended(Some(Duration::ZERO), held.holder));
            }
        }
    }

    /// Whether a claim shares its lock, or was asked for in an order: its end grants the lock to the next.
    pub(super) fn is_in_order(&self, claim: &Claim) -> bool {
        claim.mode != Mode::Exclusive || self.ordered.has(claim)
    }

    /// Ends such a lease, or gives up its place.
    pub(super) async fn release_in_order(&self, claim: &Claim) -> Result<Release> {
        self.ordered.end(claim);
        let lock = self.names.lock(&claim.key);
        let mut route = self.nodes.route(&lock).await?;
        let release = loop {
            match self.release_in_order_at(&route, claim, &lock).await {
                Ok(release) => break release,
                Err(e) => route = self.nodes.follow(route, e).await?,
            }
        };
        self.ordered.released(claim, &release);
        Ok(release)
    }

    async fn release_in_order_at(&self, route: &Route, claim: &Claim, lock: &str) -> Result<Release> {
        let connection = route.node.dialer.connection().await?;
        if route.asking && connection.epoch().is_none() {
            // It has no slot yet, and may not be in charge: it must grant the lock to nobody.
            return Err(redirect::undecided());
        }
        let pause = connection.epoch().and_then(|epoch| epoch.pause(self.info.clock.now()));
        let first = connection.floor(FenceClock::Store)?.offset(1).get();
        let mut end = order::end(connection.mark(), lock, &claim.token, first, pause.is_none());
        connection.push_epoch(&mut end);
        let reply = connection.run(end, route.asking, self.timeout, Sent::Yes).await;
        // When many give up at once, their releases take the room that giving up their channels needs.
        route.node.subscriptions.tidy();
        match reply? {
            Value::Int(0) => Ok(Release::Released { waiters: None }),
            Value::Int(-1) => Ok(Release::NotHeld(LossReason::Gone)),
            Value::Int(-2) => Ok(Release::NotHeld(LossReason::Taken)),
            _ => Err(error::odd_reply(Sent::Yes)),
        }
    }
}

/// A command that renews a lease that shares its lock.
pub(super) fn renewal(store: &RedisStore, connection: &Connection, renewal: &Renewal, ttl_ms: u64) -> Cmd {
    let mut renew = order::renew(connection.mark(), &store.names.lock(&renewal.claim.key), renewal, ttl_ms);
    connection.push_epoch(&mut renew);
    renew
}

impl HeldByAnother {
    /// After which time to look again at a lock of whose end nobody may tell.
    fn look_again(&self) -> Duration {
        let lapses = self.remaining.map_or(REFRESH, |remaining| remaining + Duration::from_millis(1));
        match self {
            Self { is_first: false, .. } => REFRESH,
            Self { is_silent: true, .. } => lapses.min(SILENT_POLL),
            _ => lapses,
        }
    }
}
